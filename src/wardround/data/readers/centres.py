"""One folder for each centre, with images and labels of the same stems; or one such centre alone.

    <root>/<centre>/images/<stem>.nii.gz | .png | .jpg | .tif | .npy ...
    <root>/<centre>/labels/<stem>.nii.gz | .png ...     or <stem>_mask.png, <stem>_seg.nii.gz ...
    <root>/index.csv                                    optional: centre, stem, split, patient, ...

The folders may also be called image(s), img(s), scans and label(s), mask(s), gt, segmentations. Several
channels may be several files, `<stem>_0000.nii.gz`, `<stem>_0001.nii.gz`. Where there is an index.csv, its
rows are the cases; all its columns are carried along.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    is_safe,
    join_names,
    list_entries,
    list_folders,
    list_images,
    note_names,
    parse_split,
    read_rows,
)
from wardround.errors import DataError

IMAGES = ("images", "image", "imgs", "img", "scans")
LABELS = (
    "labels", "label", "masks", "mask", "gt", "ground_truth", "segmentations", "segmentation", "annotations",
)  # fmt: skip
LABEL_MARKS = re.compile(r"[_-](mask|label|labels|seg|segmentation|gt|annotation|roi)$", re.IGNORECASE)
CHANNEL_MARK = re.compile(r"^(?P<case>.+)_(?P<channel>\d{4})$")
Pairs = dict[str, tuple[tuple[Path, ...], Path | None]]


def recognise(path: Path) -> str | None:
    if not path.is_dir():
        return None
    if find_parts(path, []) is not None:
        return f"{path.name or path} has a folder of images and one of labels: one centre"
    found = [child.name for child in list_folders(path, []) if find_parts(child, []) is not None]
    return f"folders with images and labels ({len(found)}): {join_names(found)}" if found else None


def read(path: Path, client: str | None = None) -> Listing:
    """All centres of a folder, or the one centre it is; client: the name of a single centre."""
    notes: list[str] = []
    root = path.resolve()
    if find_parts(root, []) is not None:
        name = check_name(client or root.name, str(path))
        lone, source = find_lone_index(root)
        if lone is None:
            notes += note_unread_lists(root, name)
        return Listing("centres", tuple(read_centre(root, name, lone, source, notes)), notes=tuple(notes))
    index, source = read_index(root / "index.csv")
    entries: list[Entry] = []
    for folder in list_folders(root, notes):
        if find_parts(folder, notes) is None:
            continue
        if not is_safe(folder.name):
            notes.append(f"{folder.name!a} cannot be the name of a client; left out.")
            continue
        rows = index.get(folder.name) or {} if index is not None else None
        entries += read_centre(folder, folder.name, rows, source, notes)
    for missing in sorted(set(index or {}) - {entry.client for entry in entries}):
        notes.append(f"{source} lists centre '{missing}', which has no cases here.")
    return Listing("centres", tuple(entries), notes=tuple(notes))


def find_parts(folder: Path, notes: list[str]) -> tuple[Path, Path] | None:
    """A centre's folders of images and of labels, under any of their usual names."""
    children = {child.name.lower(): child for child in list_folders(folder, notes)}
    images, labels = find_first(IMAGES, children), find_first(LABELS, children)
    return (children[images], children[labels]) if images and labels else None


def read_centre(
    folder: Path, client: str, index: Mapping[str, Mapping[str, str]] | None, source: str, notes: list[str]
) -> list[Entry]:
    """The cases of one centre; with an index, only those it lists."""
    found = find_parts(folder, [])
    assert found is not None
    cases, doubled = pair_files(*found, client, notes)
    if index is not None:
        absent, extra = sorted(set(index) - set(cases)), sorted(set(cases) - set(index))
        where = f"client '{client}'"
        note_names(notes, f"{where}: {source} lists cases without an image", absent, "; left out")
        note_names(notes, f"{where}: {len(extra)} images are not in {source}", extra, "; left out")
        cases = {stem: pair for stem, pair in cases.items() if stem in index}
    for case in sorted(set(doubled) & set(cases)):
        files = join_names(path.name for path in doubled[case])
        notes.append(
            f"client '{client}', case '{case}': several labels ({files}); left out. Keep one of them."
        )
        del cases[case]
    rows = index or {}
    return [make_entry(client, stem, *cases[stem], rows.get(stem, {})) for stem in sorted(cases)]


def make_entry(
    client: str, stem: str, images: tuple[Path, ...], label: Path | None, row: Mapping[str, str]
) -> Entry:
    group = get_cell(row, find_first(GROUP, row)) or stem
    known = {find_first(CLIENT, row), find_first(CASE, row), find_first(SPLIT, row)}
    columns = {name: value for name, value in row.items() if name not in known}
    return Entry(
        client, stem, images, label, group, parse_split(get_cell(row, find_first(SPLIT, row)), stem), columns
    )


def pair_files(
    images: Path, labels: Path, client: str, notes: list[str]
) -> tuple[Pairs, Mapping[str, Sequence[Path]]]:
    """Stem -> images and label, and stem -> labels where nothing says which of several is meant.

    What has no partner is noted; an image alone stays, without label. A label of the image's own name counts
    before `x_mask` and `x_seg`, which are then noted.
    """
    pictures, masks = list_images(images, notes), list_images(labels, notes)
    own = {stem: path for stem, path in masks.items() if stem in pictures or not LABEL_MARKS.search(stem)}
    marked: dict[str, list[Path]] = {}
    for stem in sorted(set(masks) - set(own)):
        marked.setdefault(LABEL_MARKS.sub("", stem), []).append(masks[stem])
    doubled = {case: paths for case, paths in marked.items() if len(paths) > 1 and case not in own}
    spare = [path.name for case, paths in marked.items() if case in own for path in paths]
    note_names(notes, f"client '{client}': labels beside one of the image's own name are not used", spare)
    found = {**{case: paths[0] for case, paths in marked.items()}, **own}
    cases = {case: (files, found.get(case)) for case, files in group_channels(pictures, found).items()}
    bare = sorted(case for case, (_, label) in cases.items() if label is None)
    note_names(notes, f"client '{client}': {len(bare)} images have no label", bare)
    lost = sorted(path.name for stem, path in found.items() if stem not in cases)
    note_names(notes, f"client '{client}': {len(lost)} labels have no image", lost, "; left out")
    return cases, doubled


def group_channels(pictures: Mapping[str, Path], labels: Mapping[str, Path]) -> dict[str, tuple[Path, ...]]:
    """Files by case: `x_0000` and `x_0001` are channels of `x` where the label is called `x`."""
    cases: dict[str, list[Path]] = {}
    for stem in sorted(pictures):
        match = CHANNEL_MARK.match(stem) if stem not in labels else None
        case = match["case"] if match and match["case"] in labels else stem
        cases.setdefault(case, []).append(pictures[stem])
    return {case: tuple(files) for case, files in cases.items()}


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
