"""Slices: volumes cut into 2D images along one axis, for networks that see one slice at a time.

    turn (prepare.orientation) -> cut -> <target>/<client>/images/<case>_s012.nii.gz, and the list of them

A slice keeps its place in millimetres, its patient and its volume's part (train, val, test), so that no
patient is on two sides. `cut` makes a federation of slices from one of volumes; `Slices` is the way there and
back, which `wardround predict` takes with a whole volume.
"""

from __future__ import annotations

import csv
import gzip
import io
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wardround.data.cache import content_key, digest_of
from wardround.data.federation_file import (
    FederationFile,
    PrepareSettings,
    Source,
    SplitSettings,
    listing_of,
    load,
    write,
)
from wardround.data.files import Volume, read_image, read_label, same_affine
from wardround.data.geometry import inverse, turned, turning
from wardround.data.listing import Entry, Listing
from wardround.data.splits import assign
from wardround.errors import ConfigError, DataError
from wardround.files import file_name, write_bytes, write_text

Array = NDArray[Any]
Along = Literal["R", "A", "S"]
OPPOSITE = str.maketrans("LPI", "RAS")
LIST = "cases.csv"
CUT_FROM = "cut_from"  # what the volume's files hold, so that `evaluate` knows a volume it was trained on
COLUMNS = ("image", "label", "case", "patient", "split", "client", CUT_FROM)
Watch = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Slices:
    """A volume as slices: its axes turned (see `geometry.turned`), then cut along one of them."""

    volume: Volume
    order: tuple[int, ...]
    flips: tuple[bool, ...]
    axis: int

    @classmethod
    def of(cls, volume: Volume, along: Along, orientation: str | None) -> Slices:
        """along: R, A or S, the direction slices follow each other in (S: axial slices)."""
        if len(volume.spatial) != 3:
            raise DataError("it is 2D already.")
        if volume.affine is None:
            raise DataError(
                "its format does not say how it lies in space, so nobody knows which axis is "
                f"{along}; store it as NIfTI."
            )
        order, flips = turning(volume.affine, 3, orientation)
        slices = cls(volume, order, flips, 0)
        import nibabel

        tools: Any = nibabel  # it has no types here
        codes = "".join(tools.aff2axcodes(slices.affine)).translate(OPPOSITE)
        return replace(slices, axis=codes.index(along))

    @property
    def affine(self) -> NDArray[np.float64]:
        """Voxel to millimetres of the turned grid."""
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
        data = turned(self.volume.data, self.order, self.flips)
        affine = self.affine
        spacing = [self.volume.spacing[axis] for axis in self.order]
        del spacing[self.axis]
        for number in range(len(self)):
            place = affine.copy()
            place[:, 3] += number * affine[:, self.axis]
            plane = np.ascontiguousarray(np.take(data, number, axis=self.axis + 1))
            yield Volume(plane, place, tuple(spacing), thin=self.axis)

    def joined(self, planes: Sequence[Array]) -> Array:
        """Planes (C, *spatial), with the axis of length one, as one array on the volume's own grid."""
        whole = np.concatenate(planes, axis=self.axis + 1)
        return np.ascontiguousarray(turned(whole, *inverse(self.order, self.flips)))


# A federation of slices


@dataclass
class CutSet:
    """What `cut` made: the new federation.yaml; volumes and slices of each client; what was left out, why."""

    path: Path
    volumes: dict[str, int] = field(default_factory=dict)
    slices: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


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
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not an empty folder; choose a new one.")
    file = load(source)
    listing = listing_of(file, source.parent)
    labels = dict(file.labels) or dict(listing.labels)
    entries = assign(listing.entries, file.splits, source.parent, held_out=file.held_out)
    workplace = target.with_name(f".{target.name}.partial")
    shutil.rmtree(workplace, ignore_errors=True)  # of an attempt that was ended
    done = CutSet(target / "federation.yaml")
    rows: list[dict[str, str]] = []
    try:
        workplace.mkdir(parents=True)
        for number, entry in enumerate(entries, start=1):
            try:
                new = list(cut_one(entry, workplace, file.prepare.orientation, along, keep, clip, labels))
            except DataError as error:
                done.left_out.append(f"{entry.where}: {error}")
            else:
                rows += new
                done.volumes[entry.client] = done.volumes.get(entry.client, 0) + 1
                done.slices[entry.client] = done.slices.get(entry.client, 0) + len(new)
            if watch is not None:
                watch(number, len(entries), entry.where)
        if not rows:
            why = f" {done.left_out[0]}" if done.left_out else " Nothing is drawn on them; add --keep all."
            raise DataError(f"{source}: no volume gave a slice.{why}")
        write_text(workplace / LIST, as_csv(rows))
        if target.exists():
            target.rmdir()  # it is empty
        workplace.rename(target)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror or error}. Choose another place."
        ) from None
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    write(sliced_file(file, listing, labels, along), done.path, notes=told(source, along, keep, clip))
    return done


def cut_one(
    entry: Entry,
    folder: Path,
    orientation: str | None,
    along: Along,
    keep: str,
    clip: float | None,
    labels: Mapping[str, Sequence[int]],
) -> Iterator[dict[str, str]]:
    """Write the slices of one volume; a row of the list for each."""
    image = read_image(entry.images)
    label = None if entry.label is None else read_label(entry.label)
    if label is None and keep == "labelled":
        raise DataError("nobody drew on it; --keep all takes it.")
    if label is not None and label.spatial != image.spatial:
        raise DataError(f"image is {_by(image.spatial)} but label is {_by(label.spatial)}. Resample one.")
    if label is not None and not same_affine(image.affine, label.affine):
        raise DataError("image and label lie in different places (their affines differ). Resample one.")
    if not np.isfinite(image.data).all():
        raise DataError("the image holds NaN or infinite voxels.")
    if clip is not None:
        most = np.percentile(image.data, clip, axis=(1, 2, 3), keepdims=True).astype(np.float32)
        image = replace(image, data=np.minimum(image.data, most))
    wanted = [value for values in labels.values() for value in values]
    slices = Slices.of(image, along, orientation)
    drawn: Sequence[Volume | None] = [None] * len(slices)
    if label is not None:
        drawn = list(Slices(replace(label, affine=image.affine), slices.order, slices.flips, slices.axis))
    home = Path(file_name(entry.client))
    volume = content_of([digest_of(path) for path in entry.images])
    for number, (plane, mask) in enumerate(zip(slices, drawn, strict=True)):
        if keep == "labelled" and mask is not None:
            shown = np.isin(mask.data, wanted) if wanted else mask.data > 0
            if not shown.any():
                continue
        name = f"{entry.name}_{along.lower()}{number:03d}"
        row = {
            **entry.columns,
            "image": str(home / "images" / f"{file_name(name)}.nii.gz"),
            "label": "",
            "case": name,
            "patient": entry.group,
            "split": entry.split or "",
            "client": entry.client,
            CUT_FROM: volume,
        }
        write_bytes(folder / row["image"], as_nifti(plane))
        if mask is not None:
            row["label"] = str(home / "labels" / f"{file_name(name)}.nii.gz")
            write_bytes(folder / row["label"], as_nifti(mask))
        yield row


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
    inside = values.min() >= limits.min and values.max() <= limits.max
    return bool(inside and (values == np.rint(values)).all())


def as_csv(rows: Sequence[Mapping[str, str]]) -> str:
    others = sorted({head for row in rows for head in row} - set(COLUMNS))
    text = io.StringIO()
    table = csv.DictWriter(text, [*COLUMNS, *others], restval="", lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def sliced_file(
    file: FederationFile,
    listing: Listing,
    labels: Mapping[str, tuple[int, ...]],
    along: Along,
) -> FederationFile:
    """The federation.yaml of the slices: as that of the volumes, with two axes."""
    return file.model_copy(
        update={
            "sources": (Source(path=Path(LIST), reader="table"),),
            "channels": file.channels or tuple(listing.channels),
            "labels": labels,
            "regions": dict(file.regions) or dict(listing.regions),
            "splits": SplitSettings(by="column", ratios=file.splits.ratios, seed=file.splits.seed),
            "prepare": flat(file.prepare, along),
            "cache": None,
        }
    )


def flat(settings: PrepareSettings, along: Along) -> PrepareSettings:
    """The same preparation without the axis that was cut along."""
    axis = (settings.orientation or "RAS").upper().translate(OPPOSITE).index(along)

    def without(sides: Sequence[Any] | None) -> tuple[Any, ...] | None:
        if sides is None or len(sides) != 3:
            return None
        return tuple(side for number, side in enumerate(sides) if number != axis)

    new = {"spacing": without(settings.spacing), "size": without(settings.size), "slices": along}
    return settings.model_copy(update=new)


def told(source: Path, along: Along, keep: str, clip: float | None) -> list[str]:
    which = "all slices" if keep == "all" else "slices on which something is drawn"
    clipped = "" if clip is None else f"; values above percentile {clip:g} of a volume are cut to it"
    return [
        f"Cut from {source} along {along}: {which}{clipped}.",
        "A slice has its volume's part of the split; what is measured is measured slice by slice.",
    ]


def _by(shape: Sequence[int]) -> str:
    return "x".join(str(side) for side in shape)
