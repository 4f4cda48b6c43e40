"""survey.json: what hospitals said, what is proposed to them, and what they decided; kept in the kit.

kits/organiser/survey/survey.json, survey.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from wardround.configuring.facts import Facts
from wardround.data.fingerprint.distance import format_foreground, format_sides
from wardround.deploy.survey.differences import Deviation, list_deviations
from wardround.deploy.survey.proposing import CommonSections, join_surveyed, propose
from wardround.deploy.survey.replies import Surveyed, read_surveyed
from wardround.errors import ConfigError, DataError
from wardround.files import parse_json, write_json
from wardround.tables import Table
from wardround.text import format_bytes

SURVEY, PAGE = "survey.json", "survey.html"
FORMAT = 1


@dataclass(frozen=True)
class Survey:
    """One survey.

    absent: hospital -> why it said nothing; decisions: hospital -> accepted, waiting, declined, or why none.
    """

    hospitals: Mapping[str, Surveyed]
    absent: Mapping[str, str] = field(default_factory=dict)
    decisions: Mapping[str, str] = field(default_factory=dict)
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @cached_property
    def common(self) -> CommonSections:
        return propose(self.hospitals)

    @cached_property
    def deviations(self) -> list[Deviation]:
        return list_deviations(self.hospitals, self.common)

    def join(self) -> Facts:
        """The facts of all that fit, for a plan."""
        if not self.common.class_names:
            raise ConfigError(" ".join([*self.common.notes, "Look at what does not fit: wardround survey."]))
        return join_surveyed(self.hospitals, self.common)

    def as_table(self) -> Table:
        """One row a hospital."""
        rows = []
        for name, one in sorted(self.hospitals.items()):
            found, facts = one.fingerprint, one.facts
            machine = found.hardware
            rows.append([
                name, found.cases, found.groups, ", ".join(facts.channels) or str(facts.in_channels),
                ", ".join(facts.classes), format_sides(found.shape), format_sides(found.spacing),
                format_foreground(found),
                "" if machine is None else f"{machine.device}, {format_bytes(machine.memory)}",
                self.decisions.get(name, ""),
            ])  # fmt: skip
        heads = ["hospital", "cases", "patients", "channels", "classes", "voxels", "mm", "foreground"]
        note = "Medians over training cases." + "".join(
            f" '{name}' said nothing: {why}." for name, why in sorted(self.absent.items())
        )
        return Table("Survey", [*heads, "machine", "proposal"], rows, note, width=60)

    def as_dict(self) -> dict[str, Any]:
        return {
            "version": FORMAT,
            "time": self.time,
            "hospitals": {
                name: {"fingerprint": one.fingerprint.as_dict(), "facts": one.facts.model_dump(mode="json")}
                for name, one in sorted(self.hospitals.items())
            },
            "absent": dict(self.absent),
            "decisions": dict(self.decisions),
            "common": self.common.as_dict(),
            "deviations": [dict(vars(one)) for one in self.deviations],
        }

    def save(self, folder: Path) -> None:
        write_json(folder / SURVEY, self.as_dict())


def load_survey(path: Path) -> Survey:
    """A survey.json; what is proposed is worked out again."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
        if found["version"] != FORMAT:
            raise ValueError(f"version {found['version']}, and this wardround reads {FORMAT}")
        hospitals = {name: read_surveyed(name, one) for name, one in found["hospitals"].items()}
        return Survey(hospitals, dict(found["absent"]), dict(found["decisions"]), str(found["time"]))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist. Ask the hospitals first: wardround survey") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, DataError) as error:
        reason = str(error).splitlines()[0][:200]
        raise ConfigError(f"{path} is not a survey ({reason}). Make a new one: wardround survey") from None
