"""A list of cases: CSV, TSV, or JSON (a list of objects), one row a case.

    image,label,patient,split,centre
    scans/p01.nii.gz,masks/p01.nii.gz,p01,train,north

image: one file, several separated by `;`, or a column a channel (image_0, image_1 or image_t1, image_flair);
label may be empty. Other columns are optional and carried along. Heads may be written in either case and
under usual other names (mask, center, site, subject ...). Paths are relative to the list and stay below its
folder; a file elsewhere is given by its absolute path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wardround.data.listing import Entry, Listing
from wardround.data.readers.common import (
    CASE,
    CLIENT,
    GROUP,
    SPLIT,
    check_name,
    find_first,
    get_cell,
    is_file,
    join_names,
    list_entries,
    note_names,
    parse_split,
    read_json,
    read_rows,
    stem_of,
)
from wardround.data.readers.msd import resolve_inside
from wardround.errors import DataError

IMAGE = ("image", "images", "img", "image_path", "image_file", "scan", "path", "file", "filename")
LABEL = (
    "label", "mask", "labels", "masks", "seg", "segmentation", "label_path", "mask_path", "label_file", "gt",
)  # fmt: skip
LIST_ENDINGS = (".csv", ".tsv", ".json")


@dataclass(frozen=True)
class Heads:
    """Which column says what; images: several where there is a column a channel."""

    images: tuple[str, ...]
    label: str | None
    case: str | None
    group: str | None
    split: str | None
    client: str | None

    @property
    def known(self) -> set[str | None]:
        return {*self.images, self.label, self.case, self.split, self.client}


def recognise(path: Path) -> str | None:
    """A list itself, or a folder with a single list in it."""
    file = find_list(path)
    if file is None:
        return None
    try:
        rows = read_list(file)
        return f"{file.name} lists {len(rows)} cases" if read_heads(rows, file) else None
    except DataError:
        # A list given by name is read, and its mistakes reported; one merely found in a folder is ignored.
        return f"{file.name} is a list" if file == path else None


def find_list(path: Path) -> Path | None:
    if path.name.lower().endswith(LIST_ENDINGS) and is_file(path):
        return path
    if not path.is_dir():
        return None
    lists = [path / e.name for e in list_entries(path, []) if e.name.lower().endswith(LIST_ENDINGS)]
    lists = [file for file in lists if is_file(file)]
    return lists[0] if len(lists) == 1 else None


def read(path: Path, client: str | None = None) -> Listing:
    """The cases of a list; client: of all cases, where the list has no column for it."""
    file = find_list(path)
    if file is None:
        raise DataError(f"{path} is not a list ({', '.join(LIST_ENDINGS)}), nor a folder with just one.")
    file = file.resolve()
    rows = read_list(file)
    columns = read_heads(rows, file)
    fallback = client or file.parent.name or "all"
    entries = [make_entry(row, columns, file, n, fallback) for n, row in enumerate(rows, start=2)]
    entries = make_unique(entries, file)
    channels = tuple(head.removeprefix("image_") for head in columns.images)
    if len(channels) == 1 or any(channel.isdecimal() for channel in channels):
        channels = ()
    notes: list[str] = []
    bare = [entry.name for entry in entries if entry.label is None]
    note_names(notes, f"{file.name}: {len(bare)} cases have no label", bare)
    if columns.label is None:
        others = join_names([head for head in rows[0] if head not in columns.known], 12) or "none"
        notes.append(
            f"{file.name} has no column 'label'; call the one with the label files so, of: {others}."
        )
    ordered = tuple(sorted(entries, key=lambda entry: (entry.client, entry.name)))
    return Listing("table", ordered, channels, notes=tuple(notes))


def read_list(file: Path) -> list[dict[str, str]]:
    """All rows with text in every cell; lists inside JSON become `;`-separated text."""
    if not file.name.lower().endswith(".json"):
        rows = read_rows(file)
    else:
        rows = [as_text(row, file) for row in find_objects(read_json(file), file)]
    if not rows:
        raise DataError(f"{file} lists no cases.")
    return rows


def find_objects(content: Any, file: Path) -> list[Any]:
    """The list itself, or the only list in an object around it."""
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        content = lists[0] if len(lists) == 1 else None
    if not isinstance(content, list):
        raise DataError(
            f'{file} must be a list of objects such as {{"image": "a.nii.gz", "label": "b.nii.gz"}}.'
        )
    return content


def as_text(row: Any, file: Path) -> dict[str, str]:
    if not isinstance(row, dict):
        raise DataError(f"{file}: {ascii(row)[:80]} is not an object with an image and a label.")
    plain = {}
    for key, value in row.items():
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, dict | list) for item in items):
            raise DataError(f"{file}: '{key}' of a case is not a plain value.")
        plain[str(key).strip().lower()] = ";".join("" if item is None else str(item) for item in items)
    return plain


def read_heads(rows: Sequence[Mapping[str, str]], file: Path) -> Heads:
    """What each column is; a list without images is refused."""
    columns = list(dict.fromkeys(head for row in rows for head in row))
    one = find_first(IMAGE, columns)
    images = (one,) if one else tuple(head for head in columns if holds_images(head, rows))
    if not images:
        raise DataError(
            f"{file} has no column 'image'; its columns are {join_names(columns, 12)}. Call the one with the "
            "image files image, and the one with the label files label."
        )
    if all(head.removeprefix("image_").isdecimal() for head in images):
        images = tuple(sorted(images, key=lambda head: int(head.removeprefix("image_"))))
    return Heads(images, *(find_first(names, columns) for names in (LABEL, CASE, GROUP, SPLIT, CLIENT)))


def holds_images(head: str, rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether `image_...` is a channel: its first filled cell is an image file."""
    value = next((row[head] for row in rows if row.get(head)), "")
    return head.startswith("image_") and stem_of(value) is not None


def make_entry(row: Mapping[str, str], columns: Heads, file: Path, number: int, fallback: str) -> Entry:
    where = f"{file}, line {number}" if file.suffix != ".json" else f"{file}, case {number - 1}"
    cells = [get_cell(row, head) for head in columns.images]
    texts = [part.strip() for part in (cells[0].split(";") if len(cells) == 1 else cells)]
    images = tuple(locate(file.parent, text, where, "image") for text in texts)
    said = get_cell(row, columns.label)
    label = locate(file.parent, said, where, "label") if said else None
    name = get_cell(row, columns.case) or stem_of(images[0].name) or images[0].name
    case = check_name(name, where)
    return Entry(
        check_name(get_cell(row, columns.client) or fallback, where),
        case,
        images,
        label,
        get_cell(row, columns.group),
        parse_split(get_cell(row, columns.split), where),
        {head: value for head, value in row.items() if head not in columns.known},
    )


def locate(folder: Path, text: str, where: str, what: str) -> Path:
    """A path of the list: below its folder, or absolute."""
    if not text or "\0" in text:
        raise DataError(f"{where}: no {what} file is named.")
    if Path(text).is_absolute():
        return Path(text)
    path = resolve_inside(folder, text)
    if path is None:
        raise DataError(
            f"{where}: the {what} {text[:120]!a} leaves the list's folder; give an absolute path "
            "if that is meant."
        )
    return path


def make_unique(entries: Sequence[Entry], file: Path) -> list[Entry]:
    """Cases named by their folders too where file names repeat (p1/t1.nii.gz, p2/t1.nii.gz); groups filled.

    Two rows with the same images, or the same given name, are a mistake in the list.
    """
    twice = {key for key, count in Counter((e.client, e.name) for e in entries).items() if count > 1}
    named = [replace(e, name=make_long_name(e, file)) if (e.client, e.name) in twice else e for e in entries]
    still = [key for key, count in Counter((e.client, e.name) for e in named).items() if count > 1]
    if still:
        client, name = still[0]
        raise DataError(
            f"{file} lists case '{name}' of client '{client}' twice; keep one row, or give other names."
        )
    return [replace(entry, group=entry.group or entry.name) for entry in named]


def make_long_name(entry: Entry, file: Path) -> str:
    """A case's name with its folders in front; left alone where the list itself gave the name."""
    image = entry.images[0]
    if entry.name != stem_of(image.name):
        return entry.name
    below = image.is_relative_to(file.parent)
    folders = image.parent.relative_to(file.parent).parts if below else image.parent.parts[-2:]
    return check_name("_".join([*folders, entry.name]), str(file))
