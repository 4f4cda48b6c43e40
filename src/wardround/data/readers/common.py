"""What all readers share: files by stem, safe names, synonyms of columns, text files."""

from __future__ import annotations

import csv
import io
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wardround.data.readers.image_files import ENDINGS
from wardround.errors import DataError

DELIMITERS = (",", ";", "\t")
DEEPEST = 5  # folders down, as in country/hospital/patient/study/series; the first few of each level
MOST_LOOKED_AT = 20

# Synonyms of the columns of a list; the first that a list has counts.
CLIENT = ("centre", "center", "client", "site", "hospital", "institution")
CASE = ("stem", "case", "case_id", "name", "id")
GROUP = (
    "split_group", "patient", "patient_id", "patientid", "group", "subject", "subject_id", "participant_id",
)  # fmt: skip
SPLIT = ("split", "subset", "set", "partition")
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "tr"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "ts"), "test"),
}


def stem_of(name: str) -> str | None:
    """A file's name without an image ending; None where it has none.

    >>> stem_of("p01.T1.nii.gz"), stem_of("readme.txt")
    ('p01.T1', None)
    """
    for ending in ENDINGS:
        if name.lower().endswith(ending):
            return name[: -len(ending)]
    return None


def is_safe(name: str) -> bool:
    """Whether a name can stand for a client or case: one printable line, no path, not hidden."""
    is_line = 0 < len(name) <= 200 and name.isprintable()
    return is_line and not name.startswith(".") and not set(name) & set("/\\")


def check_name(name: str, where: str) -> str:
    if is_safe(name):
        return name
    raise DataError(
        f"{where}: {name[:80]!a} is not a usable name; take one without slashes, line breaks or a "
        "dot in front."
    )


def join_names(names: Iterable[str], limit: int = 5) -> str:
    """Some names in a sentence, the rest counted."""
    every = list(names)
    shown = ", ".join(name if name.isprintable() else ascii(name) for name in every[:limit])
    return shown if len(every) <= limit else f"{shown} and {len(every) - limit} more"


def note_names(notes: list[str], about: str, names: Sequence[str], then: str = "") -> None:
    """Add a note on some names, if there are any."""
    if names:
        notes.append(f"{about}: {join_names(names)}{then}.")


def list_entries(folder: Path, notes: list[str]) -> list[os.DirEntry[str]]:
    """What lies in a folder, hidden names left out; a folder that cannot be read is noted."""
    try:
        with os.scandir(folder) as found:
            return sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        notes.append(f"{folder} cannot be read ({error.strerror}) and is left out.")
        return []


def list_folders(folder: Path, notes: list[str]) -> list[Path]:
    """Its folders; a link that leads nowhere or in a circle is noted."""
    found = []
    for entry in list_entries(folder, notes):
        try:
            if stat.S_ISDIR(entry.stat().st_mode):
                found.append(folder / entry.name)
        except OSError as error:
            notes.append(f"{folder / entry.name} is a link that leads nowhere ({error.strerror}); left out.")
    return found


def list_images(folder: Path, notes: list[str]) -> dict[str, Path]:
    """Image files by stem. Broken links stay, so that checking names them as the cases they are.

    Of two files with one stem the first ending of ENDINGS counts, and a note says so.
    """
    found: dict[str, Path] = {}
    doubled, unsafe, deeper = [], [], []
    for entry in list_entries(folder, notes):
        stem = stem_of(entry.name)
        if is_folder(entry):
            deeper.append(entry.name)
        elif stem is not None and not is_safe(stem):
            unsafe.append(entry.name)
        elif stem is not None and stem in found:
            doubled.append(stem)
            found[stem] = min(found[stem], folder / entry.name, key=rank_ending)
        elif stem is not None:
            found[stem] = folder / entry.name
    if doubled:
        notes.append(
            f"{folder} holds two files for {join_names(doubled)}; only "
            f"{found[doubled[0]].name} is used, and so on."
        )
    note_names(notes, f"{folder} holds files whose names cannot be used", unsafe, "; left out")
    if deeper:
        notes.append(f"{folder} holds folders ({join_names(deeper)}), which are not read.")
    return found


def rank_ending(path: Path) -> int:
    return next(rank for rank, ending in enumerate(ENDINGS) if path.name.lower().endswith(ending))


def is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """Whether a file can be opened there; False for links in a circle and folders one may not enter."""
    try:
        return path.is_file()
    except OSError:
        return False


def holds_dicom(path: Path) -> bool:
    """Whether a file here, or in the first folders down to a series, carries DICOM's mark."""
    level = [path]
    for _ in range(DEEPEST + 1):
        files = [f / entry.name for f in level for entry in list_entries(f, [])[:MOST_LOOKED_AT]]
        if any(is_dicom(file) for file in files):
            return True
        level = [child for folder in level for child in list_folders(folder, [])[:5]][:MOST_LOOKED_AT]
    return False


def is_dicom(file: Path) -> bool:
    """DICM after 128 bytes, as the standard says."""
    try:
        if not file.is_file():
            return False
        with file.open("rb") as opened:
            return opened.read(132)[128:] == b"DICM"
    except OSError:
        return False


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a text file in UTF-8; save it as such (Excel: CSV UTF-8).") from None


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}).") from None


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV or TSV, heads in lower case, cells without blanks around them; row 0 is line 2."""
    text = read_text(path)
    head = text.partition("\n")[0]
    delimiter = max(DELIMITERS, key=head.count)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        lines = [line for line in reader if any(cell.strip() for cell in line)]
    except csv.Error as error:
        raise DataError(f"{path} is not a CSV file ({error}).") from None
    if not lines:
        raise DataError(f"{path} is empty.")
    heads = [cell.strip().lower() for cell in lines[0]]
    if len(set(heads)) < len(heads):
        raise DataError(f"{path}: two columns have the same name; columns are {join_names(heads, 20)}.")
    for number, line in enumerate(lines[1:], start=2):
        if len(line) > len(heads):
            raise DataError(f"{path}, line {number}: {len(line)} cells under {len(heads)} column heads.")
    return [dict(zip(heads, [cell.strip() for cell in line], strict=False)) for line in lines[1:]]


def find_first(names: Sequence[str], columns: Iterable[str]) -> str | None:
    """The first of some synonyms that a list has as a column."""
    have = set(columns)
    return next((name for name in names if name in have), None)


def get_cell(row: Mapping[str, str], column: str | None) -> str:
    return row.get(column, "") if column is not None else ""


def parse_split(word: str, where: str) -> str | None:
    """train, val or test from what lists write; None for an empty cell."""
    if not word:
        return None
    try:
        return SPLIT_WORDS[word.lower()]
    except KeyError:
        raise DataError(f"{where}: split is {word!r}; write train, val or test, or leave it empty.") from None


def parse_whole(value: Any) -> int | None:
    """A whole number of 0 or more from JSON, which may be written as text; else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    return value if isinstance(value, int) and value >= 0 else None
