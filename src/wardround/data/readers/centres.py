"""One folder for each centre, with images and labels of the same stems; or one such centre alone.

    <root>/<centre>/images/<stem>.nii.gz | .png | .jpg | .tif | .npy ...
    <root>/<centre>/labels/<stem>.nii.gz | .png ...     or <stem>_mask.png, <stem>_seg.nii.gz ...
    <root>/<centre>/train/images ...                    or images/train: train, val and test are splits
    <root>/images/<centre>, <root>/labels/<centre>      centres below
    <root>/<centre>/labels/<stem>_liver, <stem>_spleen  a file a class; or labels/liver/<stem>
    <root>/index.csv                                    optional: centre, stem, split, patient, ...

The folders may also be called image(s), img(s), scans and label(s), mask(s), gt, segmentations. Several
channels may be several files, `<stem>_0000.nii.gz`, `<stem>_0001.nii.gz`. Where there is an index.csv, its
rows are the cases; all its columns are carried along.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wardround.data.listing import Entry, Listing
from wardround.data.readers.common import (
    CASE,
    CLIENT,
    GROUP,
    SPLIT,
    SPLIT_WORDS,
    check_name,
    find_first,
    get_cell,
    is_file,
    is_safe,
    join_names,
    list_entries,
    list_folders,
    note_names,
    parse_split,
    read_rows,
    stem_of,
)
from wardround.data.readers.pairing import name_numbered, pair_files
from wardround.errors import DataError

IMAGES = ("images", "image", "imgs", "img", "scans")
LABELS = (
    "labels", "label", "masks", "mask", "gt", "ground_truth", "segmentations", "segmentation", "annotations",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A folder of images and its folder of labels; split: where the folders say it."""

    images: Path
    labels: Path
    split: str | None = None


def recognise(path: Path) -> str | None:
    if not path.is_dir():
        return None
    name = path.name or path
    parts = find_parts(path, [])
    if parts:
        splits = [part.split for part in parts if part.split is not None]
        if splits:
            return f"{name} has images and labels in folders of splits ({join_names(splits)}): one centre"
        return f"{name} has a folder of images and one of labels: one centre"
    found = find_centres(path, [])
    if not found:
        return None
    if find_pair(path, []):
        return f"images and labels are sorted into folders of centres ({len(found)}): {join_names(found)}"
    return f"folders with images and labels ({len(found)}): {join_names(found)}"


def read(path: Path, client: str | None = None) -> Listing:
    """All centres of a folder, or the one centre it is; client: the name of a single centre."""
    notes: list[str] = []
    root = path.resolve()
    parts = find_parts(root, [])
    if parts:
        name = check_name(client or root.name, str(path))
        lone, source = find_lone_index(root)
        if lone is None:
            notes += note_unread_lists(root, name)
        named, channels = name_numbered(read_centre(parts, name, lone, source, notes))
        return Listing("centres", named, channels, notes=tuple(notes))
    index, source = read_index(root / "index.csv")
    entries: list[Entry] = []
    for name, parts in find_centres(root, notes).items():
        if not is_safe(name):
            notes.append(f"{name!a} cannot be the name of a client; left out.")
            continue
        rows = index.get(name) or {} if index is not None else None
        entries += read_centre(parts, name, rows, source, notes)
    note_unread_folders(root, {entry.client for entry in entries}, notes)
    for missing in sorted(set(index or {}) - {entry.client for entry in entries}):
        notes.append(f"{source} lists centre '{missing}', which has no cases here.")
    named, channels = name_numbered(entries)
    return Listing("centres", named, channels, notes=tuple(notes))


# Which folders are whose


def find_pair(folder: Path, notes: list[str]) -> tuple[Path, Path] | None:
    """Its folders of images and of labels, under any of their usual names."""
    return match_roles({child.name.lower(): child for child in list_folders(folder, notes)})


def match_roles(children: Mapping[str, Path]) -> tuple[Path, Path] | None:
    images, labels = find_first(IMAGES, children), find_first(LABELS, children)
    return (children[images], children[labels]) if images and labels else None


def list_roles(name: str) -> Iterator[tuple[str, str]]:
    """The split and the role that a folder's name joins: val and masks of val_masks."""
    for word, split in SPLIT_WORDS.items():
        for role in (name.removeprefix(word).lstrip("_-"), name.removesuffix(word).rstrip("_-")):
            if role != name and role in (*IMAGES, *LABELS):
                yield split, role


def find_split_pairs(folder: Path) -> list[Part]:
    """Folders of images and labels that are named with their split: train_images, imagesTr, masks-test."""
    if is_file(folder / "dataset.json"):  # nnU-Net's, which says more
        return []
    children: dict[str, dict[str, Path]] = {}
    for child in list_folders(folder, []):
        for split, role in list_roles(child.name.lower()):
            children.setdefault(split, {})[role] = child
    pairs = [(split, match_roles(own)) for split, own in children.items()]
    return [Part(*pair, split) for split, pair in pairs if pair is not None]


def find_parts(folder: Path, notes: list[str]) -> list[Part]:
    """The folders of one centre: images and labels, or those of each split; none where it is no centre."""
    pair = find_pair(folder, notes)
    if pair is not None:
        inner = match_folders(*pair)
        if not inner:
            return [Part(*pair)]
        by_split = [Part(*own, split) for name, own in inner.items() if (split := find_split(name))]
        return by_split if len(by_split) == len(inner) else []
    parts = find_split_pairs(folder)
    if parts:
        return parts
    for child in list_folders(folder, notes):
        split, pair = find_split(child.name), find_pair(child, [])
        if pair is not None and (split is None or match_folders(*pair)):
            return []  # a centre of its own
        if split is not None and pair is not None:
            parts.append(Part(*pair, split))
    return parts


def find_centres(root: Path, notes: list[str]) -> dict[str, list[Part]]:
    """Every centre below a folder, its name and its parts. A folder called train, val or test is a split."""
    pair = find_pair(root, [])
    if pair is not None:
        return {name: [Part(*own)] for name, own in match_folders(*pair).items()}
    found: dict[str, list[Part]] = {}
    lone = []
    for child in list_folders(root, notes):
        split, parts = find_split(child.name), find_parts(child, notes)
        if split is None and parts:
            found.setdefault(child.name, []).extend(parts)
        elif split is not None and parts:
            lone.append(child.name)
        elif split is not None:
            for centre in list_folders(child, notes):
                own = [replace(part, split=split) for part in find_parts(centre, notes)]
                if own:
                    found.setdefault(centre.name, []).extend(own)
    if lone and found:
        raise DataError(
            f"{root} holds {join_names(lone)}, the name of a split, beside {join_names(found)}. If it is a "
            "centre, rename it; if it is a split, give each centre a folder of that name."
        )
    return found


def match_folders(images: Path, labels: Path) -> dict[str, tuple[Path, Path]]:
    """Folders of one name inside both, as images/north and labels/north, where no image lies beside them."""
    if any(stem_of(entry.name) is not None for entry in list_entries(images, [])):
        return {}
    others = {child.name.lower(): child for child in list_folders(labels, [])}
    inner = [child for child in list_folders(images, []) if child.name.lower() in others]
    return {child.name: (child, others[child.name.lower()]) for child in inner}


def find_split(name: str) -> str | None:
    """The split that a folder's name says; short words such as `ts` may be a hospital."""
    return SPLIT_WORDS.get(name.lower()) if len(name) > 2 else None


# One centre


def read_centre(
    parts: Sequence[Part],
    client: str,
    index: Mapping[str, Mapping[str, str]] | None,
    source: str,
    notes: list[str],
) -> list[Entry]:
    """The cases of one centre; with an index, only those it lists."""
    splits = [part for part in parts if part.split is not None]
    if splits:
        told = join_names(f"{find_split_folder(part)} ({part.split})" for part in splits)
        notes.append(f"client '{client}': folders are its splits, not clients: {told}.")
    every = [(part, pair_files(part.images, part.labels, client, notes)) for part in parts]
    if index is not None:
        stems = {stem for _, (cases, _, _) in every for stem in cases}
        absent, extra = sorted(set(index) - stems), sorted(stems - set(index))
        where = f"client '{client}'"
        note_names(notes, f"{where}: {source} lists cases without an image", absent, "; left out")
        note_names(notes, f"{where}: {len(extra)} images are not in {source}", extra, "; left out")
    rows = index or {}
    entries = []
    for part, (cases, doubled, masks) in every:
        chosen = sorted(stem for stem in cases if index is None or stem in index)
        for case in sorted(set(doubled) & set(chosen)):
            files = join_names(path.name for path in doubled[case])
            notes.append(
                f"client '{client}', case '{case}': several labels ({files}); left out. Keep one of them."
            )
            chosen.remove(case)
        found = [make_entry(client, stem, *cases[stem], rows.get(stem, {})) for stem in chosen]
        entries += [
            replace(entry, split=entry.split or part.split, masks=masks.get(entry.name, {}))
            for entry in found
        ]
    return tell_apart(entries)


def find_split_folder(part: Part) -> str:
    return part.images.name if find_split(part.images.name) else part.images.parent.name


def tell_apart(entries: Sequence[Entry]) -> list[Entry]:
    """Cases of one name in two splits get the split in front: numbers often begin again in each."""
    counts = Counter(entry.name for entry in entries)
    named = []
    for entry in entries:
        if counts[entry.name] > 1:
            group = f"{entry.split}_{entry.group}" if entry.group == entry.name else entry.group
            entry = replace(entry, name=f"{entry.split}_{entry.name}", group=group)
        named.append(entry)
    return sorted(named, key=lambda entry: entry.name)


def make_entry(
    client: str, stem: str, images: tuple[Path, ...], label: Path | None, row: Mapping[str, str]
) -> Entry:
    group = get_cell(row, find_first(GROUP, row)) or stem
    known = {find_first(CLIENT, row), find_first(CASE, row), find_first(SPLIT, row)}
    columns = {name: value for name, value in row.items() if name not in known}
    return Entry(
        client, stem, images, label, group, parse_split(get_cell(row, find_first(SPLIT, row)), stem), columns
    )


def read_index(path: Path) -> tuple[dict[str, dict[str, dict[str, str]]] | None, str]:
    """index.csv as centre -> stem -> row, None where there is none; a list without centres has centre ''."""
    if not is_file(path):
        return None, ""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for number, row in enumerate(read_rows(path), start=2):
        where = f"{path}, line {number}"
        stem, site = get_cell(row, find_first(CASE, row)), get_cell(row, find_first(CLIENT, row))
        if not stem:
            raise DataError(
                f"{where}: no stem. An index.csv needs the columns centre and stem; split is optional."
            )
        parse_split(get_cell(row, find_first(SPLIT, row)), where)
        cases = found.setdefault(site, {})
        if stem in cases:
            raise DataError(f"{where}: case '{stem}' of '{site}' is listed twice; keep one line.")
        cases[stem] = row
    return found, path.name


def note_unread_lists(folder: Path, client: str) -> list[str]:
    """Lists beside the images that are not read: the patients they name would not be kept together."""
    found = [entry.name for entry in list_entries(folder, []) if entry.name.lower().endswith(".csv")]
    if not found:
        return []
    return [
        f"client '{client}': {join_names(found)} beside the images is not read. If it names the patients, "
        "give it to `wardround data init` itself, or call it index.csv."
    ]


def note_unread_folders(root: Path, centres: set[str], notes: list[str]) -> None:
    """Folders beside the centres that hold images but are none: a hospital must not go missing unseen."""
    pair = find_pair(root, [])
    known = {name.lower() for name in centres}
    others = [
        folder.name
        for folder in list_folders(root if pair is None else pair[0], [])
        if folder.name.lower() not in known and find_split(folder.name) is None and holds_images(folder)
    ]
    note_names(
        notes, f"{root}: folders where images and labels are not found as elsewhere", others, "; not read"
    )


def holds_images(folder: Path) -> bool:
    """Whether image files lie in a folder or one below."""
    return any(
        stem_of(entry.name) is not None
        for place in (folder, *list_folders(folder, []))
        for entry in list_entries(place, [])
    )


def find_lone_index(folder: Path) -> tuple[Mapping[str, Mapping[str, str]] | None, str]:
    """The rows of one centre: from its own index.csv, or from the one beside it that names this centre."""
    own, source = read_index(folder / "index.csv")
    if own is not None:
        rows = own.get(folder.name) or own.get("", {}) if len(own) > 1 else next(iter(own.values()), {})
        return rows, source
    try:
        beside, source = read_index(folder.parent / "index.csv")
    except DataError:  # somebody else's file
        return None, ""
    found = (beside or {}).get(folder.name)
    return (found, f"../{source}") if found is not None else (None, "")
