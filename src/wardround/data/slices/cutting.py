"""Slicing: a federation of slices from one of volumes, for networks that see one slice at a time.

    turn (prepare.orientation) -> cut -> <target>/<client>/slices/<case>_s012.nii.gz, and a list of them

A slice keeps its place in millimetres, its patient and its volume's part (train, val, test), so that no
patient is on two sides.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import gzip
import io
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from wardround.data.checking.facts import Watch
from wardround.data.checking.quick import assign_splits
from wardround.data.federation_file import (
    OPPOSITE,
    FederationFile,
    PrepareSettings,
    SliceSettings,
    Source,
    SplitSettings,
    load,
    write,
)
from wardround.data.listing import Entry, Listing
from wardround.data.preparing.cache import content_key, digest_of
from wardround.data.preparing.prepare import check_voxels
from wardround.data.preparing.prepared_file import gone
from wardround.data.readers.common import check_name
from wardround.data.readers.image_files import Volume, read_image, read_label, same_affine
from wardround.data.slices.view import Along, Array, Slices, clipped
from wardround.data.sources import list_cases
from wardround.errors import ConfigError, DataError
from wardround.files import file_name, write_bytes, write_text, writing

LIST = "cases.csv"
FILE = "federation.yaml"
VOLUME = "volume"  # the name of the case a slice was cut from
CUT_FROM = "cut_from"  # what the volume's files hold, so that `evaluate` knows a volume it was trained on
COLUMNS = ("image", "label", "centre", "stem", "split_group", "split", VOLUME, CUT_FROM)  # known to readers


@dataclass
class CutSet:
    """What `cut` made: the new federation.yaml; volumes and slices of each client; what was left out, why."""

    path: Path
    volumes: dict[str, int] = field(default_factory=dict)
    slices: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Cutting:
    """How volumes are cut.

    keep: slices on which something is drawn, or all; labels: class -> the values that mean it; column: of
    the list, which the partition needs.
    """

    settings: SliceSettings
    orientation: str | None
    keep: Literal["labelled", "all"]
    labels: Mapping[str, tuple[int, ...]]
    column: str | None


def cut(
    source: Path,
    target: Path,
    *,
    along: Along = "S",
    keep: Literal["labelled", "all"] = "labelled",
    clip: float | None = None,
    watch: Watch | None = None,
) -> CutSet:
    """Every volume of a federation.yaml as slices in a new folder, whole or not at all.

    keep: slices on which something is drawn, or all; clip: values above this percentile of the volume are cut
    to it. A volume that cannot be used is left out with its reason.
    """
    if clip is not None and not 0 < clip <= 100:
        raise ConfigError(f"--clip is {clip:g}; give a percentile above 0, up to 100.")
    check_free(target)
    file = load(source)
    listing = list_cases(file, source.parent)
    recipe = Cutting(
        SliceSettings(along=along, clip=clip),
        file.prepare.orientation,
        keep,
        dict(file.labels) or dict(listing.labels),
        file.partition.column if file.partition.kind == "column" else None,
    )
    prepare = flat(file.prepare, recipe.settings)
    entries, leaks = assign_splits(listing, file, source.parent)
    leaking = {(found.client, found.case): found.sentence for found in leaks}
    done = CutSet(target / FILE)
    with writing(target), workplace_beside(target) as workplace:
        rows = list(cut_all(entries, leaking, workplace, recipe, done, watch))
        if not rows:
            why = f" {done.left_out[0]}" if done.left_out else " Nothing is drawn on them; add --keep all."
            raise DataError(f"{source}: no volume gave a slice.{why}")
        write_text(workplace / LIST, as_csv(rows))
        made = sliced_file(file, listing, recipe, prepare, {row["centre"] for row in rows})
        write(made, workplace / FILE, notes=[*told(source, recipe), *done.notes])
        if target.exists():
            target.rmdir()  # it is empty
        workplace.rename(target)
    return done


def check_free(target: Path) -> None:
    """Nothing is replaced, and what could not be put there is said before the work."""
    with writing(target):
        there = target.exists()
        if target.resolve() == Path.cwd():
            raise ConfigError(f"{target} is the folder you are in; give the name of a new one.")
        if target.is_symlink() or (there and (not target.is_dir() or any(target.iterdir()))):
            raise ConfigError(f"{target} is not an empty folder; choose a new one.")
        if there and target.is_mount():
            raise ConfigError(f"{target} is a disk of its own; choose a new folder in it.")


@contextlib.contextmanager
def workplace_beside(target: Path) -> Iterator[Path]:
    """A folder of this process beside the target; those of processes that were killed are removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        number = left.name.split(".")[-2]
        if number.isdecimal() and gone(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    workplace = target.with_name(f".{target.name}.{os.getpid()}.partial")
    shutil.rmtree(workplace, ignore_errors=True)
    workplace.mkdir()
    try:
        yield workplace
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def cut_all(
    entries: Sequence[Entry],
    leaks: Mapping[tuple[str, str], str],
    folder: Path,
    recipe: Cutting,
    done: CutSet,
    watch: Watch | None,
) -> Iterator[dict[str, str]]:
    """Rows of the list, volume after volume; leaks: cases of patients whom the list has in two splits."""
    others: set[int] = set()
    for number, entry in enumerate(entries, start=1):
        try:
            if (entry.client, entry.name) in leaks:
                raise DataError(leaks[entry.client, entry.name])
            rows = list(cut_one(entry, folder, recipe, others))
        except DataError as error:
            done.left_out.append(f"{entry.where}: {str(error).removeprefix(entry.where + ': ')}")
        else:
            done.volumes[entry.client] = done.volumes.get(entry.client, 0) + 1
            done.slices[entry.client] = done.slices.get(entry.client, 0) + len(rows)
            yield from rows
        if watch is not None:
            watch(number, len(entries), entry.where)
    if others:
        values = ", ".join(map(str, sorted(others)[:10]))
        done.notes.append(f"Label values that are no class became background: {values}.")


def cut_one(entry: Entry, folder: Path, recipe: Cutting, others: set[int]) -> Iterator[dict[str, str]]:
    """Write the slices of one volume; a row of the list for each. others: gets label values of no class."""
    along = recipe.settings.along
    image = read_image(entry.images)
    label = None if entry.label is None else read_label(entry.label)
    if label is None and recipe.keep == "labelled":
        raise DataError("nobody drew on it; --keep all takes it.")
    check_voxels(image, label)
    if label is not None and not same_affine(image.affine, label.affine):
        raise DataError("image and label lie in different places (their affines differ). Resample one.")
    image = clipped(image, recipe.settings.clip)
    slices = Slices.of(image, along, recipe.orientation)
    drawn: Sequence[Volume | None] = [None] * len(slices)
    if label is not None:
        classes = classes_alone(label, recipe.labels, others)
        drawn = list(Slices(replace(classes, affine=image.affine), slices.order, slices.flips, slices.axis))
    check_name(f"{entry.name}_{along.lower()}{len(slices):03d}", entry.where)  # before any is written
    home = Path(file_name(entry.client))
    volume = content_of([digest_of(path) for path in entry.images])
    for number, (plane, mask) in enumerate(zip(slices, drawn, strict=True)):
        if recipe.keep == "labelled" and mask is not None and not mask.data.any():
            continue
        name = f"{entry.name}_{along.lower()}{number:03d}"
        row = {
            **({recipe.column: entry.columns.get(recipe.column, "")} if recipe.column else {}),
            "image": str(home / "slices" / f"{file_name(name)}.nii.gz"),
            "label": "",
            "centre": entry.client,
            "stem": name,
            "split_group": entry.group,
            "split": entry.split or "",
            VOLUME: entry.name,
            CUT_FROM: volume,
        }
        if (folder / row["image"]).exists():
            raise DataError(f"its slice {row['image']} would replace that of another case; rename one.")
        write_bytes(folder / row["image"], as_nifti(plane))
        if mask is not None:
            row["label"] = str(home / "drawn" / f"{file_name(name)}.nii.gz")
            write_bytes(folder / row["label"], as_nifti(mask))
        yield row


def classes_alone(label: Volume, labels: Mapping[str, Sequence[int]], others: set[int]) -> Volume:
    """The label without values that are no class: what a volume may hold, a single slice may not explain."""
    if not labels:
        return label
    wanted = [value for values in labels.values() for value in values]
    odd = set(np.unique(label.data).tolist()) - {0, *wanted}
    others |= odd
    return replace(label, data=np.where(np.isin(label.data, wanted), label.data, 0)) if odd else label


def content_of(digests: Sequence[str]) -> str:
    """One name for what the files of a volume hold, whatever their order; none if one cannot be read."""
    return content_key(sorted(digests)) if all(digests) else ""


def as_nifti(plane: Volume) -> bytes:
    """One slice, its axis of length one kept, in the smallest type that holds its values exactly."""
    import nibabel

    tools: Any = nibabel
    assert plane.thin is not None
    values = np.expand_dims(np.moveaxis(plane.data, 0, -1), plane.thin)  # (x, y, z, C)
    values = values[..., 0] if plane.channels == 1 else values
    kind = next((kind for kind in (np.uint8, np.int16, np.int32) if holds(kind, values)), np.float32)
    image = tools.Nifti1Image(values.astype(kind), plane.affine)
    image.header.set_xyzt_units("mm")
    return gzip.compress(image.to_bytes(), 1, mtime=0)


def holds(kind: Any, values: Array) -> bool:
    limits = np.iinfo(kind)
    inside = float(values.min()) >= limits.min and float(values.max()) <= limits.max
    return bool(inside and (values == np.rint(values)).all())


def as_csv(rows: Sequence[Mapping[str, str]]) -> str:
    others = sorted({head for row in rows for head in row} - set(COLUMNS))
    text = io.StringIO()
    table = csv.DictWriter(text, [*COLUMNS, *others], restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def sliced_file(
    file: FederationFile, listing: Listing, recipe: Cutting, prepare: PrepareSettings, clients: set[str]
) -> FederationFile:
    """The federation.yaml of the slices: as that of the volumes, with two axes and those who have some."""
    named = None if file.clients is None else tuple(name for name in file.clients if name in clients)
    return file.model_copy(
        update={
            "sources": (Source(path=Path(LIST), reader="table"),),
            "clients": named,
            "held_out": tuple(name for name in file.held_out if name in clients),
            "channels": file.channels or tuple(listing.channels),
            "labels": recipe.labels,
            "regions": dict(file.regions) or dict(listing.regions),
            "splits": SplitSettings(by="column", ratios=file.splits.ratios, seed=file.splits.seed),
            "prepare": prepare,
            "cache": None,
        }
    )


def flat(settings: PrepareSettings, slices: SliceSettings) -> PrepareSettings:
    """The same preparation without the axis that was cut along."""
    orientation = settings.orientation

    def without(name: str, sides: Sequence[Any] | None) -> tuple[Any, ...] | None:
        if sides is None or len(sides) != 3:
            return None if sides is None else tuple(sides)
        if orientation is None:
            raise ConfigError(
                f"prepare.orientation is null, so nobody knows which number of prepare.{name} belongs to "
                f"axis {slices.along}. Set it to RAS, or leave {name} out."
            )
        axis = orientation.upper().translate(OPPOSITE).index(slices.along)
        return tuple(side for number, side in enumerate(sides) if number != axis)

    new = {"spacing": without("spacing", settings.spacing), "size": without("size", settings.size)}
    return settings.model_copy(update={**new, "slices": slices})


def told(source: Path, recipe: Cutting) -> list[str]:
    which = "all slices" if recipe.keep == "all" else "slices on which something is drawn"
    clip = recipe.settings.clip
    cut_off = "" if clip is None else f"; values above percentile {clip:g} of a volume are cut to it"
    return [
        f"Cut from {source} along {recipe.settings.along}: {which}{cut_off}.",
        "A slice has its volume's part of the split; what is measured is measured slice by slice.",
    ]
