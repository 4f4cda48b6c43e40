"""What a report can be made from: the folder of a run, of an evaluation or of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wardround.errors import CheckpointError


@dataclass(frozen=True)
class ReportSource:
    """One folder to report on."""

    folder: Path
    kind: str  # run, comparison, or waiting (nothing there yet)

    def state(self) -> str:
        """A text that changes whenever the page would: rounds and results of every run in the folder."""
        names = ("records.jsonl", "result.json", "comparison.json", "cases.csv")
        folders = [self.folder]
        if (self.folder / "cells").is_dir():
            folders += sorted(path for path in (self.folder / "cells").iterdir() if path.is_dir())
        return "-".join(str(file_size(folder / name)) for folder in folders for name in names)


def file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def open_source(folder: str | Path, *, may_wait: bool = False) -> ReportSource:
    """Find out what a folder holds. may_wait: a run that has not started yet is not an error."""
    folder = Path(folder)
    if (folder / "comparison.json").exists():
        return ReportSource(folder, "comparison")
    if (folder / "config.yaml").exists():
        return ReportSource(folder, "run")
    if may_wait:
        return ReportSource(folder, "waiting")
    what = "does not exist" if not folder.exists() else "contains neither a run nor a comparison"
    raise CheckpointError(
        f"{folder} {what}. Give the folder of a run (it has a config.yaml) or of a comparison "
        "(it has a comparison.json), for example runs/quickstart."
    )
