"""The raw layout of nnU-Net: one file a channel, numbered from 0000.

    <Dataset001_Name>/dataset.json                channel_names, labels, file_ending
    <Dataset001_Name>/imagesTr/<case>_0000.nii.gz, <case>_0001.nii.gz ...
    <Dataset001_Name>/labelsTr/<case>.nii.gz
    <Dataset001_Name>/imagesTs, labelsTs          where both are there: test cases

Isensee et al., Nature Methods 18, 203-211, 2021. Labels given as lists of values are regions
(whole tumour = 1, 2 and 3): every value becomes a class and the lists become regions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wardround.data.listing import Entry, Labels, Listing
from wardround.data.readers import msd
from wardround.data.readers.centres import CHANNEL_MARK
from wardround.data.readers.common import list_images, note_names, parse_whole, read_json
from wardround.errors import DataError


def recognise(path: Path) -> str | None:
    facts = msd.read_description(path)
    if facts is None or not (path / "imagesTr").is_dir():
        return None
    if not ({"channel_names", "file_ending"} & set(facts) or has_channel_numbers(path / "imagesTr")):
        return None
    return "dataset.json and numbered channels (_0000): nnU-Net raw data"


def has_channel_numbers(images: Path) -> bool:
    """Whether every image ends in a channel number, as the older nnU-Net with an MSD list has it."""
    stems = list(list_images(images, []))
    return bool(stems) and all(CHANNEL_MARK.match(stem) for stem in stems)


def read(path: Path, client: str | None = None) -> Listing:
    """One client: the data set, or the name given."""
    root = path.resolve()
    facts = read_json(root / "dataset.json")
    if not isinstance(facts, dict):
        raise DataError(
            f"{path / 'dataset.json'} holds a {type(facts).__name__}, not the facts of a data set."
        )
    name = msd.choose_client_name(root, facts, client)
    names = msd.read_channel_names(facts)
    notes: list[str] = []
    entries = read_cases(root, "Tr", name, len(names), notes)
    if (root / "imagesTs").is_dir():
        if (root / "labelsTs").is_dir():
            tests = read_cases(root, "Ts", name, len(names), notes)
            entries |= {stem: entry for stem, entry in tests.items() if stem not in entries}
        else:
            notes.append(f"{root.name}/imagesTs has no labels (labelsTs) and is not used.")
    labels, regions = read_classes(facts.get("labels"), notes)
    ordered = tuple(entries[stem] for stem in sorted(entries))
    return Listing("nnunet", ordered, names, labels, tuple(notes), regions)


def read_cases(root: Path, part: str, client: str, num_channels: int, notes: list[str]) -> dict[str, Entry]:
    """The cases of imagesTr or imagesTs that have all channels."""
    files: dict[str, dict[int, Path]] = {}
    for stem, file in list_images(root / f"images{part}", notes).items():
        match = CHANNEL_MARK.match(stem)
        if match:
            files.setdefault(match["case"], {})[int(match["channel"])] = file
        else:
            notes.append(
                f"{root.name}/images{part}/{file.name} has no channel number such as _0000; left out."
            )
    wanted = num_channels or max((max(channels) + 1 for channels in files.values()), default=0)
    whole_cases = {case for case, channels in files.items() if set(channels) == set(range(wanted))}
    lacking = sorted(set(files) - whole_cases)
    note_names(notes, f"{root.name}: {len(lacking)} cases lack a channel of {wanted}", lacking, "; left out")
    labels = list_images(root / f"labels{part}", notes)
    bare = sorted(whole_cases - set(labels))
    note_names(notes, f"{root.name}: {len(bare)} cases have no label", bare)
    lost = sorted(set(labels) - set(files))
    note_names(notes, f"{root.name}: {len(lost)} labels have no image", lost, "; left out")
    split = "test" if part == "Ts" else None
    return {
        case: Entry(client, case, tuple(files[case][c] for c in range(wanted)), labels.get(case), case, split)
        for case in whole_cases
    }


def read_classes(said: Any, notes: list[str]) -> tuple[Labels, Labels]:
    """Classes (name -> values) and, where some labels are lists, regions (name -> class numbers)."""
    if not isinstance(said, dict):
        return {}, {}
    if all(parse_whole(key) is not None for key in said):  # the older {"1": "tumour"}
        return msd.read_labels(said), {}
    meant = {str(name): as_values(value) for name, value in said.items()}
    ignored = meant.pop("ignore", ())
    if ignored:
        notes.append(f"label {ignored[0]} ('ignore') is read as background; wardround has no ignored voxels.")
    meant = {name: values for name, values in meant.items() if values}
    if all(len(values) == 1 for values in meant.values()):
        return dict(sorted(meant.items(), key=lambda item: item[1])), {}
    own = {values[0]: name for name, values in meant.items() if len(values) == 1}
    every = sorted({value for values in meant.values() for value in values})
    labels: dict[str, tuple[int, ...]] = {own.get(value, f"value_{value}"): (value,) for value in every}
    regions = {name: tuple(every.index(value) + 1 for value in values) for name, values in meant.items()}
    return labels, regions


def as_values(said: Any) -> tuple[int, ...]:
    """The values of one label, background left out."""
    values = (parse_whole(value) for value in (said if isinstance(said, list) else [said]))
    return tuple(sorted({value for value in values if value}))
