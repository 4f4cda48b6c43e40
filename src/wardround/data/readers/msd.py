"""The layout of the Medical Segmentation Decathlon: a task's folder with its dataset.json.

    <Task04_Name>/dataset.json     modality, labels, and the list of training pairs
    <Task04_Name>/imagesTr/*.nii.gz, labelsTr/*.nii.gz     several channels are a fourth axis

Antonelli et al., Nature Communications 13:4128, 2022. Images without a label (imagesTs) are not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from wardround.data.listing import Entry, Listing
from wardround.data.readers.common import (
    check_name,
    is_file,
    is_safe,
    list_images,
    note_names,
    parse_whole,
    read_json,
    stem_of,
)
from wardround.errors import DataError


def read_description(path: Path) -> Mapping[str, Any] | None:
    """The dataset.json of a folder; None where there is none that can be read."""
    if not is_file(path / "dataset.json"):
        return None
    try:
        content = read_json(path / "dataset.json")
    except DataError:
        return None
    return content if isinstance(content, dict) else None


def recognise(path: Path) -> str | None:
    facts = read_description(path)
    if facts is None or not isinstance(facts.get("training"), list):
        return None
    return f"dataset.json lists {len(facts['training'])} training pairs: Medical Segmentation Decathlon"


def read(path: Path, client: str | None = None) -> Listing:
    """One client: the task, or the name given."""
    root = path.resolve()
    facts = read_json(root / "dataset.json")
    if not isinstance(facts, dict) or not isinstance(facts.get("training"), list):
        raise DataError(f"{path / 'dataset.json'} has no list 'training'; is this a Decathlon task?")
    name = choose_client_name(root, facts, client)
    notes: list[str] = []
    entries: dict[str, Entry] = {}
    for image, label in list_pairs(root, facts["training"], notes):
        stem = stem_of(image.name) or image.name
        if not is_safe(stem):
            notes.append(f"{root.name}: {image.name!a} is not a usable file name; left out.")
        elif stem in entries:
            raise DataError(f"{path / 'dataset.json'} lists case '{stem}' twice; keep one.")
        else:
            entries[stem] = Entry(name, stem, (image,), label, group=stem)
    note_unlisted(root, {entry.images[0].name for entry in entries.values()}, notes)
    return Listing(
        "msd",
        tuple(entries[stem] for stem in sorted(entries)),
        read_channel_names(facts),
        read_labels(facts.get("labels")),
        tuple(notes),
    )


def choose_client_name(root: Path, facts: Mapping[str, Any], client: str | None) -> str:
    given = facts.get("name")
    own = given if isinstance(given, str) and is_safe(given) else root.name
    return check_name(client or own, str(root))


def list_pairs(root: Path, training: list[Any], notes: list[str]) -> Iterator[tuple[Path, Path | None]]:
    """The pairs of the list as paths inside the folder; an entry that points elsewhere is noted."""
    for item in training:
        pair = item if isinstance(item, dict) else {"image": item}
        image, label = resolve_inside(root, pair.get("image")), resolve_inside(root, pair.get("label"))
        if image is None or (label is None and pair.get("label")):
            notes.append(
                f"{root.name}/dataset.json: {ascii(item)[:120]} is not a pair of files in "
                "the folder; left out."
            )
        elif not image.name.startswith("._"):  # what macOS leaves in archives
            yield image, label


def resolve_inside(root: Path, name: Any) -> Path | None:
    """The file a list names, if it lies in the list's folder."""
    if not isinstance(name, str) or not name or "\0" in name:
        return None
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts:
        return None
    return root / parts


def note_unlisted(root: Path, known: set[str], notes: list[str]) -> None:
    folder = root / "imagesTr"
    files = list_images(folder, []) if folder.is_dir() else {}
    extra = [path.name for path in files.values() if path.name not in known]
    about = f"{root.name}/imagesTr holds images not listed in dataset.json"
    note_names(notes, about, extra, "; left out")


def read_channel_names(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """The channels in order, from {"0": "FLAIR", "1": "T1w"}; empty where the file does not say."""
    said = facts.get("channel_names") or facts.get("modality")
    if not isinstance(said, dict) or any(parse_whole(key) is None for key in said):
        return ()
    return tuple(str(said[key]) for key in sorted(said, key=int))


def read_labels(said: Any) -> dict[str, tuple[int, ...]]:
    """Class name -> its value, background left out, from {"0": "background", "1": "head"}."""
    if not isinstance(said, dict):
        return {}
    values = {str(name): parse_whole(value) for value, name in said.items()}
    return {name: (value,) for name, value in sorted(values.items(), key=lambda item: item[1] or 0) if value}
