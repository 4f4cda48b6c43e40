"""Slices of volumes, for 2D networks: `cut` makes a federation of slices from one of volumes.

    reorient (prepare.orientation) -> cut -> <target>/<client>/slices/<case>_s012.nii.gz, and a list of them

A slice keeps its place in millimetres, its patient and the split of its volume (train, val, test), so that
no patient is in two splits. `Slices` is one volume as slices along an axis, and the way back.
"""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wardround.data import federation_file
from wardround.data.checking.check import assign_splits
from wardround.data.federation_file import FederationFile, PrepareSettings, SliceSettings, SplitSettings
from wardround.data.listing import Entry, Labels, Listing, Watch
from wardround.data.preparing.cache import hash_contents, hash_file
from wardround.data.preparing.geometry import find_reorientation, invert_reorientation, reorient
from wardround.data.preparing.prepare import check_voxels, take_channels
from wardround.data.readers.common import check_name
from wardround.data.readers.image_files import Volume, read_image, same_affine
from wardround.data.readers.label_files import read_case_label
from wardround.data.sources import list_cases
from wardround.errors import ConfigError, DataError
from wardround.files import file_name, new_folder, write_bytes, write_text, writing

Array = NDArray[Any]
Along = Literal["R", "A", "S"]
LIST = "cases.csv"
FILE = "federation.yaml"
VOLUME = "volume"  # the name of the case a slice was cut from
CUT_FROM = "cut_from"  # digest of the volume, by which `evaluate` recognises training cases
COLUMNS = ("image", "label", "centre", "stem", "split_group", "split", VOLUME, CUT_FROM)  # known to readers


@dataclass
class CutResult:
    """Result of `cut`: the new federation.yaml, volumes and slices of each client, what was left out, why."""

    path: Path
    volumes: dict[str, int] = field(default_factory=dict)
    slices: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CutRecipe:
    """How volumes are cut.

    keep: slices with labelled voxels, or all; labels: class -> the values that mean it; column: of the list,
    needed by the partition.
    """

    settings: SliceSettings
    orientation: str | None
    keep: Literal["labelled", "all"]
    labels: Labels
    column: str | None


def cut(
    source: Path,
    target: Path,
    *,
    along: Along = "S",
    keep: Literal["labelled", "all"] = "labelled",
    clip: float | None = None,
    watch: Watch | None = None,
) -> CutResult:
    """Cut every volume of a federation.yaml into slices, in a new folder that appears when complete.

    keep: slices with labelled voxels, or all; clip: clip values at this percentile of the volume. A volume
    that cannot be used is left out with its reason.
    """
    if clip is not None and not 0 < clip <= 100:
        raise ConfigError(f"--clip is {clip:g}; give a percentile above 0, up to 100.")
    check_free(target)
    file = federation_file.load(source)
    listing = list_cases(file, source.parent)
    recipe = CutRecipe(
        SliceSettings(along=along, clip=clip),
        file.prepare.orientation,
        keep,
        dict(file.labels) or dict(listing.labels),
        file.partition.column if file.partition.kind == "column" else None,
    )
    prepare = drop_axis(file.prepare, recipe.settings)
    entries, leaks = assign_splits(listing, file, source.parent)
    leaking = {(found.client, found.case): found.sentence for found in leaks}
    done = CutResult(target / FILE)
    with writing(target), new_folder(target) as partial:
        rows = list(cut_all(entries, leaking, partial, recipe, done, watch))
        if not rows:
            why = f" {done.left_out[0]}" if done.left_out else " None has labelled voxels; add --keep all."
            raise DataError(f"{source}: no volume gave a slice.{why}")
        write_text(partial / LIST, as_csv(rows))
        made = make_federation_file(file, listing, recipe, prepare, {row["centre"] for row in rows})
        federation_file.write(made, partial / FILE, notes=[*describe_cut(source, recipe), *done.notes])
    return done


def check_free(target: Path) -> None:
    """Refuse a target that cannot become a new folder, before any work is done."""
    with writing(target):
        there = target.exists()
        if target.resolve() == Path.cwd():
            raise ConfigError(f"{target} is the current folder; choose a new one.")
        if target.is_symlink() or (there and (not target.is_dir() or any(target.iterdir()))):
            raise ConfigError(f"{target} is not an empty folder; choose a new one.")
        if there and target.is_mount():
            raise ConfigError(f"{target} is a mount point; choose a new folder in it.")


def cut_all(
    entries: Sequence[Entry],
    leaks: Mapping[tuple[str, str], str],
    folder: Path,
    recipe: CutRecipe,
    done: CutResult,
    watch: Watch | None,
) -> Iterator[dict[str, str]]:
    """Yield rows of the list, volume by volume; leaks: cases whose patient the list has in two splits."""
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
        done.notes.append(f"Label values of no class became background: {values}.")


def cut_one(entry: Entry, folder: Path, recipe: CutRecipe, others: set[int]) -> Iterator[dict[str, str]]:
    """Write the slices of one volume, and yield a row for each; others: collects label values of no class."""
    along = recipe.settings.along
    image = take_channels(read_image(entry.images), entry.places)
    label = read_case_label(entry)
    if label is None and recipe.keep == "labelled":
        raise DataError("it has no label; --keep all includes it.")
    check_voxels(image, label)
    if label is not None and not same_affine(image.affine, label.affine):
        raise DataError("image and label lie in different places (their affines differ). Resample one.")
    image = clip_intensities(image, recipe.settings.clip)
    slices = Slices.of(image, along, recipe.orientation)
    masks: Sequence[Volume | None] = [None] * len(slices)
    if label is not None:
        own = entry.label_map(recipe.labels)
        classes = translate(keep_classes(label, own, others), own, recipe.labels)
        masks = list(Slices(replace(classes, affine=image.affine), slices.order, slices.flips, slices.axis))
    check_name(f"{entry.name}_{along.lower()}{len(slices):03d}", entry.where)  # before any is written
    home = Path(file_name(entry.client))
    volume = hash_volume([hash_file(path) for path in entry.images])
    for number, (plane, mask) in enumerate(zip(slices, masks, strict=True)):
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


def keep_classes(label: Volume, labels: Mapping[str, Sequence[int]], others: set[int]) -> Volume:
    """The label without values of no class, which are checked over the whole volume, not in one slice."""
    if not labels:
        return label
    wanted = [value for values in labels.values() for value in values]
    unexpected = set(np.unique(label.data).tolist()) - {0, *wanted}
    others |= unexpected
    return replace(label, data=np.where(np.isin(label.data, wanted), label.data, 0)) if unexpected else label


def translate(label: Volume, own: Labels, common: Labels) -> Volume:
    """The label in the values of all, where its source has values of its own."""
    if own is common:
        return label
    data = np.zeros_like(label.data, dtype=np.int64)
    for name, values in own.items():
        data[np.isin(label.data, values)] = common[name][0]
    return replace(label, data=data)


def hash_volume(digests: Sequence[str]) -> str:
    """One digest for the files of a volume, in any order; "" if one cannot be read."""
    return hash_contents(sorted(digests)) if all(digests) else ""


def as_nifti(plane: Volume) -> bytes:
    """One slice, its axis of length one kept, in the smallest type that holds its values exactly."""
    import nibabel

    tools: Any = nibabel
    assert plane.thin is not None
    values = np.expand_dims(np.moveaxis(plane.data, 0, -1), plane.thin)  # (x, y, z, C)
    values = values[..., 0] if plane.channels == 1 else values
    kind = next((kind for kind in (np.uint8, np.int16, np.int32) if can_hold(kind, values)), np.float32)
    image = tools.Nifti1Image(values.astype(kind), plane.affine)
    image.header.set_xyzt_units("mm")
    return gzip.compress(image.to_bytes(), 1, mtime=0)


def can_hold(kind: Any, values: Array) -> bool:
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


def make_federation_file(
    file: FederationFile, listing: Listing, recipe: CutRecipe, prepare: PrepareSettings, clients: set[str]
) -> FederationFile:
    """The federation.yaml of the slices: that of the volumes, in 2D, with the clients that have slices."""
    named = None if file.clients is None else tuple(name for name in file.clients if name in clients)
    return file.model_copy(
        update={
            "sources": (federation_file.Source(path=Path(LIST), reader="table"),),
            "clients": named,
            "held_out": tuple(name for name in file.held_out if name in clients),
            "annotates": {name: own for name, own in file.annotates.items() if name in clients},
            "channels": file.channels or tuple(listing.channels),
            "channels_of": {n: own for n, own in list_channels(listing).items() if n in clients},
            "labels": recipe.labels,
            "labels_differ": file.labels_differ or any(source.labels for source in file.sources),
            "regions": dict(file.regions) or dict(listing.regions),
            "splits": SplitSettings(by="column", ratios=file.splits.ratios, seed=file.splits.seed),
            "prepare": prepare,
            "cache": None,
        }
    )


def list_channels(listing: Listing) -> dict[str, tuple[str, ...]]:
    """The channels of clients whose volumes lack some; all volumes of a client must have the same."""
    found: dict[str, tuple[str, ...]] = {}
    for entry in listing.entries:
        places = entry.places or tuple(range(len(listing.channels)))
        own = tuple(name for name, place in zip(listing.channels, places, strict=True) if place >= 0)
        if found.setdefault(entry.client, own) != own:
            raise DataError(
                f"{entry.where} has other channels than the first of its client; slices of both cannot be "
                "told apart. Give the client two names, each for volumes with the same channels."
            )
    return {client: own for client, own in found.items() if own != tuple(listing.channels)}


def drop_axis(settings: PrepareSettings, slices: SliceSettings) -> PrepareSettings:
    """The same preparation without the axis that volumes are cut along."""
    orientation = settings.orientation

    def without(name: str, sides: Sequence[Any] | None) -> tuple[Any, ...] | None:
        if sides is None or len(sides) != 3:
            return None if sides is None else tuple(sides)
        if orientation is None:
            raise ConfigError(
                f"prepare.orientation is null, so it is unknown which number of prepare.{name} belongs to "
                f"axis {slices.along}. Set it to RAS, or leave {name} out."
            )
        axis = orientation.upper().translate(federation_file.OPPOSITE).index(slices.along)
        return tuple(side for number, side in enumerate(sides) if number != axis)

    new = {"spacing": without("spacing", settings.spacing), "size": without("size", settings.size)}
    return settings.model_copy(update={**new, "slices": slices})


def describe_cut(source: Path, recipe: CutRecipe) -> list[str]:
    which = "all slices" if recipe.keep == "all" else "slices with labelled voxels"
    clip = recipe.settings.clip
    clipped = "" if clip is None else f"; values are clipped at percentile {clip:g} of the volume"
    return [
        f"Cut from {source} along {recipe.settings.along}: {which}{clipped}.",
        "A slice is in the split of its volume; metrics are computed slice by slice.",
    ]


# A volume as slices, and the way back


@dataclass(frozen=True)
class Slices:
    """A volume as slices: reoriented (see `geometry.reorient`), then cut along one of its axes."""

    volume: Volume
    order: tuple[int, ...]
    flips: tuple[bool, ...]
    axis: int

    @classmethod
    def of(cls, volume: Volume, along: Along, orientation: str | None) -> Slices:
        """along: R, A or S, the direction in which slices follow each other (S: axial slices)."""
        if len(volume.spatial) != 3:
            raise DataError("it is 2D already.")
        if volume.affine is None:
            raise DataError(
                f"its format does not store the orientation, so axis {along} is unknown; convert it to NIfTI."
            )
        order, flips = find_reorientation(volume.affine, 3, orientation)
        slices = cls(volume, order, flips, 0)
        import nibabel

        tools: Any = nibabel  # untyped
        codes = "".join(tools.aff2axcodes(slices.affine)).translate(federation_file.OPPOSITE)
        return replace(slices, axis=codes.index(along))

    @property
    def are_reoriented(self) -> bool:
        return self.order != (0, 1, 2) or any(self.flips)

    @property
    def affine(self) -> NDArray[np.float64]:
        """Voxel to millimetres of the reoriented grid."""
        old = self.volume.affine
        assert old is not None
        new = old.copy()
        for axis, (source, flip) in enumerate(zip(self.order, self.flips, strict=True)):
            new[:, axis] = -old[:, source] if flip else old[:, source]
            if flip:
                new[:, 3] += old[:, source] * (self.volume.spatial[source] - 1)
        return new

    def __len__(self) -> int:
        return self.volume.spatial[self.order[self.axis]]

    def __iter__(self) -> Iterator[Volume]:
        data = reorient(self.volume.data, self.order, self.flips)
        affine = self.affine
        spacing = [self.volume.spacing[axis] for axis in self.order]
        del spacing[self.axis]
        for number in range(len(self)):
            place = affine.copy()
            place[:, 3] += number * affine[:, self.axis]
            plane = np.ascontiguousarray(np.take(data, number, axis=self.axis + 1))
            yield Volume(plane, place, tuple(spacing), thin=self.axis)

    def join(self, planes: Sequence[Array]) -> Array:
        """Join planes (C, *spatial), with the axis of length one, into an array on the volume's own grid."""
        whole = np.concatenate(planes, axis=self.axis + 1)
        return np.ascontiguousarray(reorient(whole, *invert_reorientation(self.order, self.flips)))


def restore_axis(image: Volume) -> Volume:
    """Give a scan of one slice the axis that reading dropped."""
    assert image.thin is not None and image.affine is not None
    spacing = list(image.spacing)
    spacing.insert(image.thin, float(np.linalg.norm(image.affine[:3, image.thin])))
    return Volume(np.expand_dims(image.data, image.thin + 1), image.affine, tuple(spacing))


def clip_intensities(image: Volume, percentile: float | None) -> Volume:
    """Clip the values of each channel at this percentile of the volume."""
    if percentile is None:
        return image
    axes = tuple(range(1, image.data.ndim))
    highest = np.percentile(image.data, percentile, axis=axes, keepdims=True).astype(np.float32)
    return replace(image, data=np.minimum(image.data, highest))
