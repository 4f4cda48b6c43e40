"""A list of cases: CSV, TSV, or JSON (a list of objects), one row a case.

    image,label,patient,split,centre
    scans/p01.nii.gz,masks/p01.nii.gz,p01,train,north

image: one file, several separated by `;`, or a column a channel (image_0, image_1 or image_t1, image_flair),
empty where a case lacks it; label may be empty. Other columns are optional and carried along. Heads may be
written in either case and under usual other names (mask, center, site, subject ...); under any other where
`columns` of the source says so, or where the files in them leave no doubt. Paths are relative to the list and
stay below its folder; a file elsewhere is given by its absolute path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wardround.data.listing import Entry, Listing
from wardround.data.readers.class_masks import strip_word
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
from wardround.errors import ConfigError, DataError
from wardround.text import suggest

IMAGE = ("image", "images", "img", "image_path", "image_file", "scan", "path", "file", "filename")
LABEL = (
    "label", "mask", "labels", "masks", "seg", "segmentation", "label_path", "mask_path", "label_file", "gt",
)  # fmt: skip
LIST_ENDINGS = (".csv", ".tsv", ".json")
NUM_SAMPLED = 20  # cells of a column that say whether it holds files


NEEDS = {"image": IMAGE, "label": LABEL, "case": CASE, "patient": GROUP, "split": SPLIT, "client": CLIENT}


@dataclass(frozen=True)
class Heads:
    """Which column says what; images: several where there is a column a channel; guessed: by their files."""

    images: tuple[str, ...]
    label: str | None
    case: str | None
    group: str | None
    split: str | None
    client: str | None
    guessed: tuple[str, ...] = ()

    @property
    def known(self) -> set[str | None]:
        return {*self.images, self.label, self.case, self.split, self.client}

    def describe(self) -> str:
        """Which column is taken for what, and what the list lacks."""
        found = {"image": join_names(self.images), "label": self.label, "case": self.case}
        found |= {"patient": self.group, "split": self.split, "client": self.client}
        taken = (
            f"{need} from '{head}'{' (a guess)' if need in self.guessed else ''}"
            for need, head in found.items()
            if head
        )
        lacking = [need for need in ("label", "patient", "split", "client") if not found[need]]
        then = f"; no column for {join_names(lacking)} (--column {lacking[0]}=...)" if lacking else ""
        return f"{join_names(taken, 6)}{then}"


def recognise(path: Path) -> str | None:
    """A list itself, or a folder with a single list in it."""
    file = find_list(path)
    if file is None:
        return None
    try:
        rows = read_list(file)
        if read_heads(rows, file).guessed and file != path:
            return None  # somebody else's list
        return describe_list(file)
    except DataError:
        # A list given by name is read, and its mistakes reported; one merely found in a folder is ignored.
        return f"{file.name} is a list" if file == path else None


def describe_list(path: Path, named: Mapping[str, str] | None = None) -> str:
    """How many cases a list has, and which column is taken for what."""
    file = find_list(path) or path
    rows = read_list(file)
    return f"{file.name} lists {len(rows)} cases: {read_heads(rows, file, named).describe()}"


def find_guess(path: Path) -> dict[str, str] | None:
    """The columns of a list where some are a guess, to be written down; None where names say it."""
    file = find_list(path)
    if file is None:
        return None
    heads = read_heads(read_list(file), file)
    if not heads.guessed:
        return None
    found = {"image": ", ".join(heads.images), "label": heads.label}
    return {need: head for need, head in found.items() if head}


def find_list(path: Path) -> Path | None:
    if path.name.lower().endswith(LIST_ENDINGS) and is_file(path):
        return path
    if not path.is_dir():
        return None
    lists = [path / e.name for e in list_entries(path, []) if e.name.lower().endswith(LIST_ENDINGS)]
    lists = [file for file in lists if is_file(file)]
    return lists[0] if len(lists) == 1 else None


def read(path: Path, client: str | None = None, named: Mapping[str, str] | None = None) -> Listing:
    """The cases of a list; client: of all cases, where the list has no column for it; named: the column of
    what is needed (image, label, patient ...), where its name does not say it."""
    file = find_list(path)
    if file is None:
        raise DataError(f"{path} is not a list ({', '.join(LIST_ENDINGS)}), nor a folder with just one.")
    file = file.resolve()
    rows = read_list(file)
    columns = read_heads(rows, file, named or {})
    fallback = client or file.parent.name or "all"
    entries = [make_entry(row, columns, file, n, fallback) for n, row in enumerate(rows, start=2)]
    entries = make_unique(entries, file)
    channels = name_channels(columns.images)
    is_numbered = any(head.removeprefix("image_").isdecimal() for head in columns.images)
    if len(channels) == 1 or (is_numbered and not any(entry.channels for entry in entries)):
        channels = ()
    notes: list[str] = []
    bare = [entry.name for entry in entries if entry.label is None]
    note_names(notes, f"{file.name}: {len(bare)} cases have no label", bare)
    if columns.label is None:
        others = join_names([head for head in rows[0] if head not in columns.known], 12) or "none"
        notes.append(f"{file.name} has no column of label files. Name one of: {others}; --column label=...")
    if columns.guessed:
        notes.append(f"{file.name}: {columns.describe()}. Another: --column label=...")
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


def read_heads(
    rows: Sequence[Mapping[str, str]], file: Path, named: Mapping[str, str] | None = None
) -> Heads:
    """What each column is, by what was named, by usual names, then by the files in it; a list whose images
    cannot be told is refused."""
    columns = list(dict.fromkeys(head for row in rows for head in row))
    said = {find_need(need): check_heads(text, columns, file) for need, text in (named or {}).items()}
    usual = {need: find_first(names, columns) for need, names in NEEDS.items()}
    found = {need: said[need][0] if need in said else head for need, head in usual.items()}
    one = usual["image"]
    images = said.get("image") or ((one,) if one else tuple(h for h in columns if holds_images(h, rows)))
    guessed: list[str] = []
    files = [h for h in columns if holds_files(h, rows) and h not in (*images, *found.values())]
    if files and found["label"] is None:
        drawn = [head for head in files if names_label(head, rows)]
        drawn = drawn if images else drawn[: len(files) - 1]
        if len(drawn) == 1 or (images and len(files) == 1):
            found["label"] = (drawn or files)[0]
            guessed.append("label")
            files.remove((drawn or files)[0])
    if not images and files and (found["label"] is not None or len(files) == 1):
        images = tuple(files)
        guessed.insert(0, "image")
    if not images:
        raise DataError(ask_for_columns(file, columns, files))
    if all(head.removeprefix("image_").isdecimal() for head in images):
        images = tuple(sorted(images, key=lambda head: int(head.removeprefix("image_"))))
    group, client = found["patient"], found["client"]
    return Heads(images, found["label"], found["case"], group, found["split"], client, tuple(guessed))


def find_need(word: str) -> str:
    """What a list needs, by any of its names: hospital is client."""
    need = next((need for need, names in NEEDS.items() if word.strip().lower() in (need, *names)), None)
    if need is None:
        raise ConfigError(f"A list has no use for a column of '{word}'; name one of {', '.join(NEEDS)}.")
    return need


def check_heads(text: str, columns: Sequence[str], file: Path) -> tuple[str, ...]:
    """The columns somebody named, several separated by commas."""
    heads = tuple(part.strip().lower() for part in text.split(","))
    for head in heads:
        if head not in columns:
            have = join_names(columns, 12)
            raise ConfigError(f"{file} has no column '{head}'.{suggest(head, columns)} It has: {have}.")
    return heads


def ask_for_columns(file: Path, columns: Sequence[str], files: Sequence[str]) -> str:
    held = f"Files are in {join_names(files, 8)}. " if files else ""
    first, second = (*files, "...", "...")[:2]
    return (
        f"{file} has no column 'image'; its columns are {join_names(columns, 12)}. {held}Say which has the "
        f"images and which the labels: --column image={first} --column label={second}; or call them so."
    )


def holds_files(head: str, rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether the first filled cells of a column are all image files."""
    values = [row[head] for row in rows if row.get(head)][:NUM_SAMPLED]
    return bool(values) and all(stem_of(value) is not None for value in values)


def names_label(head: str, rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether the name of a column, or of its first file and folder, has a word for labels."""
    value = next((row[head] for row in rows if row.get(head)), "")
    parts = [head, stem_of(Path(value).name) or "", Path(value).parent.name]
    return any(strip_word(part) is not None for part in parts)


def holds_images(head: str, rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether `image_...` is a channel: its first filled cell is an image file."""
    value = next((row[head] for row in rows if row.get(head)), "")
    return head.startswith("image_") and stem_of(value) is not None


def name_channels(heads: Sequence[str]) -> tuple[str, ...]:
    """What the columns of images are called: t1 of image_t1, channel_0 of image_0."""
    names = (head.removeprefix("image_") for head in heads)
    return tuple(f"channel_{name}" if name.isdecimal() else name for name in names)


def make_entry(row: Mapping[str, str], columns: Heads, file: Path, number: int, fallback: str) -> Entry:
    where = f"{file}, line {number}" if file.suffix != ".json" else f"{file}, case {number - 1}"
    cells = [get_cell(row, head) for head in columns.images]
    texts = [part.strip() for part in (cells[0].split(";") if len(cells) == 1 else cells)]
    channels: tuple[str, ...] = ()
    if len(cells) > 1 and any(texts) and not all(texts):  # a case may lack channels
        names = zip(name_channels(columns.images), texts, strict=True)
        channels = tuple(name for name, text in names if text)
        texts = [text for text in texts if text]
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
        channels=channels,
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
