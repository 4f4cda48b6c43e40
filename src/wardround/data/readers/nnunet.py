"""The raw layout of nnU-Net: one file a channel, numbered from 0000.

    <Dataset001_Name>/dataset.json                channel_names, labels, file_ending
    <Dataset001_Name>/imagesTr/<case>_0000.nii.gz, <case>_0001.nii.gz ...
    <Dataset001_Name>/labelsTr/<case>.nii.gz
    <Dataset001_Name>/imagesTs, labelsTs          where both are there: test cases
    <Dataset001_Name>/splits_final.json           optional: folds, [{"train": [...], "val": [...]}, ...]

Isensee et al., Nature Methods 18, 203-211, 2021. Labels given as lists of values are regions
(whole tumour = 1, 2 and 3): every value becomes a class and the lists become regions. The label `ignore` is
no class: its voxels are not annotated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from wardround.data.listing import FOLD, Entry, Labels, Listing
from wardround.data.readers import msd
from wardround.data.readers.common import is_file, join_names, list_images, note_names, parse_whole, read_json
from wardround.data.readers.pairing import CHANNEL_MARK, name_numbered
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
    labels, regions, ignore = read_classes(facts.get("labels"))
    if ignore:
        notes.append(
            f"{root.name}: label value {ignore[0]} ('ignore') marks voxels that nobody annotated; they "
            "count in no loss and no score."
        )
    check_class_order(facts.get("regions_class_order"), labels, regions, root, notes)
    folds = read_folds(root / "splits_final.json", set(entries), notes)
    entries = {
        stem: replace(e, columns={FOLD: folds.get(stem, "")}) if folds else e for stem, e in entries.items()
    }
    ordered, names = name_numbered([entries[stem] for stem in sorted(entries)], names)
    return Listing("nnunet", ordered, names, labels, tuple(notes), regions, ignore)


def read_cases(root: Path, part: str, client: str, num_channels: int, notes: list[str]) -> dict[str, Entry]:
    """The cases of imagesTr or imagesTs, by number; num_channels: what dataset.json names, 0 for none."""
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
    known = {case for case, channels in files.items() if max(channels) < wanted}
    odd = sorted(set(files) - known)
    note_names(notes, f"{root.name}: {len(odd)} cases have more than {wanted} channels", odd, "; left out")
    labels = list_images(root / f"labels{part}", notes)
    bare = sorted(known - set(labels))
    note_names(notes, f"{root.name}: {len(bare)} cases have no label", bare)
    lost = sorted(set(labels) - set(files))
    note_names(notes, f"{root.name}: {len(lost)} labels have no image", lost, "; left out")
    split = "test" if part == "Ts" else None
    return {
        case: Entry(
            client,
            case,
            tuple(path for _, path in sorted(files[case].items())),
            labels.get(case),
            case,
            split,
        )
        for case in known
    }


def read_classes(said: Any) -> tuple[Labels, Labels, tuple[int, ...]]:
    """Classes (name -> values), regions (name -> class numbers) if labels are lists, and what to ignore."""
    if not isinstance(said, dict):
        return {}, {}, ()
    if all(parse_whole(key) is not None for key in said):  # the older {"1": "tumour"}
        return msd.read_labels(said), {}, ()
    meant = {str(name): as_values(value) for name, value in said.items()}
    ignore = meant.pop("ignore", ())
    meant = {name: values for name, values in meant.items() if values}
    if all(len(values) == 1 for values in meant.values()):
        return dict(sorted(meant.items(), key=lambda item: item[1])), {}, ignore
    own = {values[0]: name for name, values in meant.items() if len(values) == 1}
    every = sorted({value for values in meant.values() for value in values})
    labels: dict[str, tuple[int, ...]] = {own.get(value, f"value_{value}"): (value,) for value in every}
    regions = {name: tuple(every.index(value) + 1 for value in values) for name, values in meant.items()}
    return labels, regions, ignore


def check_class_order(order: Any, labels: Labels, regions: Labels, root: Path, notes: list[str]) -> None:
    """Say where nnU-Net would write another value than the labels have.

    It writes the value of each region in turn, regions_class_order, over those before; wardround writes the
    class whose regions these are.
    """
    if not regions:
        return
    values = [parse_whole(value) for value in order] if isinstance(order, list) else []
    if len(values) != len(regions) or None in values:
        notes.append(
            f"{root.name}: regions_class_order is {order}, not a value for each of the {len(regions)} "
            "regions; it is not used."
        )
        return
    written = {n: v for v, numbers in zip(values, regions.values(), strict=True) for n in numbers}
    differ = [
        f"{own[0]} as {written[n]}" for n, own in enumerate(labels.values(), start=1) if written[n] != own[0]
    ]
    note_names(
        notes, f"{root.name}: nnU-Net writes label value", differ, " by its regions_class_order; here not"
    )


def read_folds(path: Path, cases: set[str], notes: list[str]) -> Mapping[str, str]:
    """Case -> the fold in which it is not trained on; nothing without a usable file."""
    if not is_file(path):
        return {}
    folds = read_json(path)
    named = [fold.get("val") for fold in folds if isinstance(fold, dict)] if isinstance(folds, list) else []
    if len(named) < 2 or len(named) < len(folds) or not all(isinstance(own, list) for own in named):
        raise DataError(
            f"{path} is not nnU-Net's list of at least two folds, each with train and val. Remove it."
        )
    places = [(str(case), str(number)) for number, own in enumerate(named) for case in own or []]
    unknown = sorted({case for case, _ in places} - cases)
    if unknown:
        raise DataError(
            f"{path} names {join_names(unknown)}, which are not in imagesTr. Correct or remove it."
        )
    repeated = [case for case, count in Counter(case for case, _ in places).items() if count > 1]
    if repeated:
        told = f"{path.parent.name}/splits_final.json validates cases in several folds and is not used"
        note_names(notes, told, repeated)
        return {}
    return dict(places)


def as_values(said: Any) -> tuple[int, ...]:
    """The values of one label, background left out."""
    values = (parse_whole(value) for value in (said if isinstance(said, list) else [said]))
    return tuple(sorted({value for value in values if value}))
