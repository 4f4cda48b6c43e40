"""Why a sum is refused, and by whose fault."""

from __future__ import annotations

from wardround.errors import WardroundError


class SumRefusal(WardroundError):
    """Something about a secure sum is not as it must be; member: whose fault it is, None where nobody's."""

    def __init__(self, reason: str, member: str | None = None) -> None:
        super().__init__(reason)
        self.member = member


class TooFewMembers(SumRefusal):
    """Fewer members than the threshold are left; phase: the round of the paper."""

    def __init__(self, phase: str, found: int, threshold: int) -> None:
        super().__init__(f"{phase}: {found} members are left, and a secure sum needs {threshold}.")
        self.phase = phase
