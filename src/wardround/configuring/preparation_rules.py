"""Rules of the preparation: spacing, cropping, size and normalisation (nnU-Net 2's, or ours where said)."""

from __future__ import annotations

from wardround.configuring.facts import ChannelFacts, Facts, Quantiles
from wardround.configuring.plan import Choice
from wardround.text import format_percent, format_size

ORIENTATION = "RAS"
ANISOTROPIC = 3  # voxels so many times as long as wide are thick slices
MOST_KEPT = 0.75  # share of the voxels left by cropping below which the rest is a black frame
MOST_VARIED = 2.0  # largest to smallest side of images without spacing; augmentation covers as much


def plan_preparation(facts: Facts) -> list[Choice]:
    """The choices of `data.prepare`."""
    choices = [choose_orientation(facts), choose_crop(facts), choose_spacing(facts), choose_size(facts)]
    return [choice for choice in choices if choice is not None] + choose_normalisation(facts)


# Geometry


def choose_orientation(facts: Facts) -> Choice | None:
    """Ours: all volumes to RAS, since hospitals store them differently; nnU-Net leaves them as they are."""
    if facts.dimensions == 2:
        return None
    return Choice("data.prepare.orientation", ORIENTATION, "axes mean the same at every client")


def choose_crop(facts: Facts) -> Choice:
    """nnU-Net: every image is cut to what is not empty."""
    reason = f"{format_percent(1 - facts.kept)} of the median image is empty border"
    return Choice("data.prepare.crop", "foreground", reason)


def find_spacing(facts: Facts) -> tuple[float, ...]:
    """Millimetres to resample to (nnU-Net's `determine_fullres_target_spacing`).

    The median along each axis. Where one axis has voxels more than three times as large as the others, and
    less than a third of their number, its 10th percentile, though not finer than the others: few thick
    slices must not be invented from each other. Without millimetres every voxel counts as 1.
    """
    if not facts.has_spacing:
        return (1.0,) * facts.dimensions
    target = [axis.median for axis in facts.spacing]
    if facts.dimensions == 3 and (axis := find_thick_axis(facts)) is not None:
        others = max(side for number, side in enumerate(target) if number != axis)
        target[axis] = max(facts.spacing[axis].low, others)
    return tuple(target)


def find_thick_axis(facts: Facts) -> int | None:
    """The axis of thick slices, if there is one."""
    spacing, sizes = [axis.median for axis in facts.spacing], [axis.median for axis in facts.shape]
    worst = max(range(len(spacing)), key=lambda axis: spacing[axis])
    others = [axis for axis in range(len(spacing)) if axis != worst]
    is_thick = spacing[worst] > ANISOTROPIC * max(spacing[axis] for axis in others)
    is_short = sizes[worst] * ANISOTROPIC < min(sizes[axis] for axis in others)
    return worst if is_thick and is_short else None


def choose_spacing(facts: Facts) -> Choice:
    if not facts.has_spacing:
        return Choice("data.prepare.spacing", None, "the files say no millimetres")
    spacing = [round(side, 6) for side in find_spacing(facts)]
    reason = "median of the training cases, in mm"
    axis = find_thick_axis(facts) if facts.dimensions == 3 else None
    if axis is not None:
        is_low = spacing[axis] == round(facts.spacing[axis].low, 6)
        reason += "; of thick slices the 10th percentile" if is_low else "; thick slices as the other axes"
    return Choice("data.prepare.spacing", spacing, reason)


def find_shape(facts: Facts) -> tuple[int, ...]:
    """The median prepared image in voxels (nnU-Net: the median of the resampled shapes)."""
    if not facts.has_spacing:
        return tuple(max(1, round(axis.median)) for axis in facts.shape)
    sides = zip(facts.extent, find_spacing(facts), strict=True)
    return tuple(max(1, round(extent.median / spacing)) for extent, spacing in sides)


def choose_size(facts: Facts) -> Choice:
    """nnU-Net trains on patches of images at their own size. Ours: images without spacing whose sides differ
    more than scaling in augmentation covers are resized, as nothing else says how large a thing is in them.
    """
    if facts.has_spacing:
        return Choice("data.prepare.size", None, "images keep the size that their spacing gives them")
    most = max(spread(axis) for axis in facts.shape)
    if most <= MOST_VARIED:
        return Choice(
            "data.prepare.size", None, f"sides differ by {most:.2g} times, which augmentation covers"
        )
    size = find_shape(facts)
    reason = (
        f"sides differ by {most:.2g} times and no millimetres tell sizes apart; "
        f"the median image is {format_size(size)}"
    )
    return Choice("data.prepare.size", list(size), reason)


def spread(axis: Quantiles) -> float:
    return axis.high / max(axis.low, 1)


# Intensities


def choose_normalisation(facts: Facts) -> list[Choice]:
    """nnU-Net: CT by the joint intensities of labelled voxels (clipped to the percentiles 0.5 and 99.5, then
    standardised by one mean and SD), other channels by those of each image; of its voxels above zero
    where cropping removed more than a quarter of the median image. nnU-Net standardises colour images too.
    """
    if any(channel.modality == "ct" for channel in facts.channels):
        rows = [list_intensities(channel) for channel in facts.channels]
        ranges = ", ".join(f"{row[0]:.4g} to {row[1]:.4g}" for row in rows if row is not None)
        return [
            Choice("data.prepare.normalise", "ct", f"Hounsfield units mean the same everywhere: {ranges}"),
            Choice("data.prepare.intensities", rows, "percentiles, mean and SD of all labelled voxels"),
        ]
    if facts.kept < MOST_KEPT:
        reason = f"{format_percent(1 - facts.kept)} of the median image was empty; the rest is standardised"
        return [Choice("data.prepare.normalise", "zscore_nonzero", reason)]
    return [
        Choice("data.prepare.normalise", "zscore", "intensities have no common unit: each image by itself")
    ]


def list_intensities(channel: ChannelFacts) -> list[float] | None:
    """What `prepare.intensities` takes; none for a channel that is not CT."""
    if channel.modality != "ct":
        return None
    return [channel.percentile_00_5, channel.percentile_99_5, channel.mean, channel.sd]
