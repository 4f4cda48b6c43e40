"""The way back from pseudonyms: which file of an import came from which patient, series and folder.

    <folder>/.patient-map.csv    stem, patient, patient_id, series_uid, source

It lies beside .patient-key, can be read by its owner alone, and stays at the hospital: no reader opens it, no
command sends or copies it, and a .gitignore keeps both out of a repository.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from wardround.data.readers.common import read_rows
from wardround.errors import DataError
from wardround.files import write_private, write_text

MAP = ".patient-map.csv"
KEY = ".patient-key"


@dataclass(frozen=True)
class Origin:
    """Where a file came from; stem, patient: pseudonyms; source: the folder of its series."""

    stem: str
    patient: str
    patient_id: str
    series_uid: str
    source: str


HEADS = [own.name for own in fields(Origin)]


def read_origins(folder: Path) -> dict[str, Origin]:
    """What earlier imports wrote, by stem; a file of somebody else is refused before anything is written."""
    path = folder / MAP
    if not path.exists():
        return {}
    rows = read_rows(path)
    if any(list(row) != HEADS for row in rows):
        raise DataError(f"{path} is not the map that an import writes; move it elsewhere.")
    return {row["stem"]: Origin(**row) for row in rows}


def write_origins(folder: Path, origins: Mapping[str, Origin]) -> None:
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, HEADS, lineterminator="\n")
    table.writeheader()
    table.writerows(asdict(origins[stem]) for stem in sorted(origins))
    write_private(folder / MAP, text.getvalue().encode())
    if not (folder / ".gitignore").exists():
        write_text(folder / ".gitignore", f"{KEY}\n{MAP}\n")
