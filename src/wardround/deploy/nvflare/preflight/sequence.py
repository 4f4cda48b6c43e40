"""preflight: before the first round, the first thing that would go wrong, and what to do about it.

    checks = preflight(Path("kits/north"), data=Path("federation.yaml"))

Checks run in the order in which things would fail: the kit, its certificates, the way to the organiser, the
encrypted connection with both certificates, the clock, the disk, the versions, the data. The first failure
ends it, and the checks after it are "not reached". Nothing about the data leaves this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from wardround.deploy.kits import open_kit
from wardround.deploy.nvflare.preflight.checks import TIMEOUT, Check, CheckFailed, PreflightContext
from wardround.deploy.nvflare.preflight.connection import check_name, check_own_port, check_port, check_tls
from wardround.deploy.nvflare.preflight.kit import check_certificates, check_kit
from wardround.deploy.nvflare.preflight.machine import (
    check_clock,
    check_data,
    check_device,
    check_disk,
    check_versions,
)
from wardround.errors import WardroundError

Step = tuple[str, Callable[[PreflightContext], Check | str]]
HOSPITAL: list[Step] = [
    ("kit", check_kit),
    ("certificate", check_certificates),
    ("name", check_name),
    ("port", check_port),
    ("encryption", check_tls),
    ("clock", check_clock),
    ("disk", check_disk),
    ("versions", check_versions),
    ("device", check_device),
    ("data", check_data),
]
ORGANISER: list[Step] = [
    ("kit", check_kit),
    ("certificate", check_certificates),
    ("port", check_own_port),
    ("disk", check_disk),
    ("versions", check_versions),
]


def preflight(
    folder: Path, *, data: Path | None = None, now: datetime | None = None, timeout: float = TIMEOUT
) -> list[Check]:
    """Every check in order; none runs after one that fails."""
    try:
        kit = open_kit(folder)
    except WardroundError as error:
        return [Check("kit", "wrong", str(error)), *mark_unreached(HOSPITAL[1:])]
    context = PreflightContext(kit, data, now or datetime.now(UTC), timeout)
    steps = HOSPITAL if kit.role == "hospital" else ORGANISER
    done: list[Check] = []
    for number, (name, look) in enumerate(steps):
        try:
            seen = look(context)
            done.append(Check(name, "ok", seen) if isinstance(seen, str) else replace(seen, name=name))
        except CheckFailed as wrong:
            done.append(Check(name, "wrong", wrong.found, wrong.todo))
        except WardroundError as error:
            done.append(Check(name, "wrong", str(error)))
        if done[-1].state == "wrong":
            return [*done, *mark_unreached(steps[number + 1 :])]
    return done


def mark_unreached(steps: Sequence[Step]) -> list[Check]:
    return [Check(name, "not reached") for name, _ in steps]


def find_failed(checks: Sequence[Check]) -> Check | None:
    return next((check for check in checks if check.state == "wrong"), None)
