"""Take over nnU-Net's plan: spacing, patch, batch, network and normalisation of an nnUNetPlans.json.

    wardround configure federation.yaml --from nnUNetPlans.json -o run.yaml

nnU-Net 2 writes the network as `architecture`; its first versions wrote `pool_op_kernel_sizes` and the like.
Axes: nnU-Net's readers give (z, y, x) of a file and `transpose_forward` reorders them; ours are (x, y, z), of
pictures (row, column). Every list is brought into our order; scans keep the axes of their files, as there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wardround.configuring.plan import Choice, ConfigurationPlan
from wardround.data.readers.common import join_names, read_json
from wardround.errors import ConfigError, DataError

ORDER = ("3d_fullres", "2d")  # the best first
PICTURES = "NaturalImage2DIO"
READERS = ("SimpleITKIO", "SimpleITKIOWithReorient", "NibabelIO", "NibabelIOWithReorient", PICTURES)
ENCODERS = {"PlainConvUNet": "plain", "ResidualEncoderUNet": "residual"}
NORMALISATIONS = {
    "ZScoreNormalization": "zscore",
    "CTNormalization": "ct",
    "RescaleTo01Normalization": "minmax",
    "NoNormalization": "none",
}
REPLACED = ("model.", "data.prepare.", "data.patch", "evaluate.window", "batch_size", "objective.reduction")
MOST_LEVELS = 8


def take_over(plan: ConfigurationPlan, path: Path, configuration: str | None = None) -> ConfigurationPlan:
    """A plan with what nnU-Net's file decides put in place of its own choices; the others stay."""
    taken = read_nnunet_plans(path, configuration)
    ours, theirs = (
        {len(choice.value) for choice in made.choices if choice.key == "data.patch"} for made in (plan, taken)
    )
    if ours - theirs:
        raise ConfigError(f"{path} is for {theirs.pop()}D images, but yours are {ours.pop()}D.")
    kept = [choice for choice in plan.choices if not choice.key.startswith(REPLACED)]
    return ConfigurationPlan((*taken.choices, *kept), (*plan.warnings, *taken.warnings))


def read_nnunet_plans(path: Path, configuration: str | None = None) -> ConfigurationPlan:
    """The choices of one configuration of an nnUNetPlans.json, 3d_fullres or else 2d if none is named."""
    if path.suffix == ".pkl":
        raise ConfigError(
            f"{path} is a pickle, as nnU-Net 1 wrote it, and is not read. Give nnUNetPlans.json of nnU-Net 2."
        )
    plans = read_object(path)
    try:
        return translate(plans, configuration, path.name)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else "a value is not of the usual kind"
        raise ConfigError(
            f"{path} is not a plan of nnU-Net 2 ({what}). Give the nnUNetPlans.json of nnUNet_preprocessed."
        ) from None


def read_object(path: Path) -> Mapping[str, Any]:
    try:
        plans = read_json(path)
    except DataError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(plans, dict) or not isinstance(plans.get("configurations"), dict):
        raise ConfigError(
            f"{path} has no configurations, so it is not a plan of nnU-Net 2. Give the nnUNetPlans.json of "
            "nnUNet_preprocessed."
        )
    return plans


def translate(plans: Mapping[str, Any], wanted: str | None, file: str) -> ConfigurationPlan:
    name = choose_configuration(plans, wanted)
    settings = resolve(plans["configurations"], name)
    patch = read_sides(settings["patch_size"])
    axes = order_axes(plans, len(patch))
    reason = f"from {file}, {name}"
    warnings: list[str] = []
    values = {
        **read_preparing(plans, settings, axes, warnings),
        "data.patch": pick(patch, axes),
        "evaluate.window": pick(patch, axes),
        "batch_size": read_count(settings["batch_size"], "batch_size"),
        **read_network(settings, axes),
        "objective.reduction": "batch" if settings["batch_dice"] else "per_sample",
    }
    if "3d_lowres" in plans["configurations"]:
        warnings.append(f"{file} also has a cascade over a lower resolution; it is not taken over.")
    return ConfigurationPlan(
        tuple(Choice(key, value, reason) for key, value in values.items()), tuple(warnings)
    )


# Which configuration


def choose_configuration(plans: Mapping[str, Any], wanted: str | None) -> str:
    """The one named, or the best; a stage of a cascade and slices of volumes are refused."""
    there = list(plans["configurations"])
    name = wanted or next((name for name in ORDER if name in there), None)
    if name is None or name not in there:
        raise ConfigError(
            f"configuration {wanted or ' or '.join(ORDER)} is not in it; it has "
            f"{join_names(there) or 'none'}."
        )
    settings = resolve(plans["configurations"], name)
    if "lowres" in name or settings.get("previous_stage"):
        raise ConfigError(
            f"{name} is a stage of a cascade, which wardround does not train. Take 3d_fullres or 2d."
        )
    if len(settings["patch_size"]) == 2 and plans["original_median_shape_after_transp"][0] > 1:
        raise ConfigError(
            f"{name} trains on slices of volumes. Take 3d_fullres, or cut slices first (wardround data "
            "slices) and configure from these."
        )
    return name


def resolve(configurations: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A configuration with what it inherits from others."""
    settings: dict[str, Any] = {}
    seen: list[str] = []
    following: str | None = name
    while following is not None:
        if following in seen or following not in configurations:
            raise ConfigError(f"configuration {name} inherits from {following}, which does not end.")
        seen.append(following)
        settings = {**configurations[following], **settings}
        following = configurations[following].get("inherits_from")
    return settings


# Axes


def order_axes(plans: Mapping[str, Any], dimensions: int) -> list[int]:
    """For each of our axes, its place among the axes of the plan.

    transpose_forward[i] is the reader's axis that the plan has in place i. The reader's axes are those of a
    volume's file backwards, and (1, row, column) of a picture.
    """
    reader, forward = plans["image_reader_writer"], list(plans["transpose_forward"])
    if reader not in READERS:
        raise ConfigError(
            f"images were read by {reader}, whose order of axes is not known here. Known: "
            f"{join_names(READERS, 9)}."
        )
    if sorted(forward) != [0, 1, 2]:
        raise ConfigError(f"transpose_forward is {forward}; it must be an order of 0, 1 and 2.")
    if dimensions == 2 and forward[0] != 0:
        raise ConfigError(f"transpose_forward is {forward}, so its slices are not the pictures themselves.")
    places = forward[3 - dimensions :]
    ours = [place - 1 if reader == PICTURES else 2 - place for place in places]
    return [ours.index(axis) for axis in range(dimensions)]


def pick(values: Sequence[Any], axes: Sequence[int]) -> list[Any]:
    """Values of the plan's axes in the order of ours.

    >>> pick([5.0, 0.7, 0.8], [2, 1, 0])
    [0.8, 0.7, 5.0]
    """
    if len(values) != len(axes):
        raise ConfigError(f"{list(values)} has {len(values)} entries for {len(axes)} axes.")
    return [values[place] for place in axes]


# Preparing


def read_preparing(
    plans: Mapping[str, Any], settings: Mapping[str, Any], axes: Sequence[int], warnings: list[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    reader = plans["image_reader_writer"]
    if reader != PICTURES:
        found["data.prepare.orientation"] = "RAS" if reader.endswith("WithReorient") else None
        found["data.prepare.spacing"] = spacing = [float(side) for side in pick(settings["spacing"], axes)]
        if not all(0 < side < math.inf for side in spacing):
            raise ConfigError(f"spacing is {settings['spacing']}; it must be millimetres above 0.")
        if not reader.endswith("WithReorient"):
            warnings.append(
                "Scans keep the axes of their files, as in nnU-Net. Where hospitals store them in different "
                "orders, set data.prepare.orientation: RAS and see that spacing and patch fit those axes."
            )
    found["data.prepare.crop"] = "foreground"
    return found | read_normalisation(plans, settings)


def read_normalisation(plans: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """One normalisation for all channels; CT with the intensities of the foreground, z-scores beside it."""
    schemes = settings["normalization_schemes"]
    masks = settings.get("use_mask_for_norm") or [False]
    unknown = [scheme for scheme in schemes if scheme not in NORMALISATIONS]
    if unknown:
        raise ConfigError(
            f"images are normalised by {unknown[0]}, which wardround does not do. It does "
            f"{join_names(NORMALISATIONS, 9)}."
        )
    ways = [NORMALISATIONS[scheme] for scheme in schemes]
    if "ct" in ways and {*ways} <= {"ct", "zscore"} and not any(masks):
        rows = [read_intensities(plans, n) if way == "ct" else None for n, way in enumerate(ways)]
        return {"data.prepare.normalise": "ct", "data.prepare.intensities": rows}
    if len({*ways}) != 1 or len({*masks}) != 1:
        raise ConfigError(
            f"channels are normalised in different ways ({join_names(schemes, 9)}); wardround has one way "
            "for all, or CT beside z-scores of whole images."
        )
    return {"data.prepare.normalise": "zscore_nonzero" if ways[0] == "zscore" and masks[0] else ways[0]}


def read_intensities(plans: Mapping[str, Any], channel: int) -> list[float]:
    """Percentiles, mean and SD of a channel's foreground."""
    told = plans.get("foreground_intensity_properties_per_channel")
    told = (told or plans["foreground_intensity_properties_by_modality"])[str(channel)]
    return [float(told[name]) for name in ("percentile_00_5", "percentile_99_5", "mean", "std")]


# The network


def read_network(settings: Mapping[str, Any], axes: Sequence[int]) -> dict[str, Any]:
    encoder, told = read_architecture(settings)
    levels = read_count(told["n_stages"], "n_stages")
    if levels > MOST_LEVELS:
        raise ConfigError(f"the network has {levels} stages; wardround builds up to {MOST_LEVELS}.")
    widths = [int(width) for width in told["features_per_stage"]]
    doubling = [min(widths[0] * 2**level, max(widths)) for level in range(levels)]
    if widths != doubling:
        raise ConfigError(
            f"features_per_stage is {widths}; wardround doubles them up to a limit, which gives {doubling}."
        )
    decoder = expand(told["n_conv_per_stage_decoder"], levels - 1)
    if len({*decoder}) != 1:
        raise ConfigError(f"n_conv_per_stage_decoder is {decoder}; wardround has one number for all stages.")
    if told.get("dropout_op") is not None or "InstanceNorm" not in str(told["norm_op"]):
        raise ConfigError(
            f"the network has norm {told['norm_op']} and dropout {told.get('dropout_op')}; wardround takes "
            "over nnU-Net's instance norm without dropout alone."
        )
    blocks = told["n_conv_per_stage" if encoder == "plain" else "n_blocks_per_stage"]
    arguments = {
        "encoder": encoder,
        "kernels": [pick(sides, axes) for sides in expand_sides(told["kernel_sizes"], levels, len(axes))],
        "strides": [pick(sides, axes) for sides in expand_sides(told["strides"], levels, len(axes))],
        "blocks": expand(blocks, levels),
        "decoder_convolutions": decoder[0],
        "most_filters": max(widths),
    }
    network = {
        "name": "nnunet",
        "base_filters": widths[0],
        "levels": levels,
        "deep_supervision": levels > 3,  # below, ours has no coarser logits to learn from
    }
    found = {f"model.{name}": value for name, value in network.items()}
    return found | {f"model.arguments.{name}": value for name, value in arguments.items()}


def read_architecture(settings: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """plain or residual, and the arguments of the network as nnU-Net 2 has them now."""
    if "architecture" in settings:
        name = str(settings["architecture"]["network_class_name"]).rpartition(".")[2]
        told: Mapping[str, Any] = settings["architecture"]["arch_kwargs"]
    else:
        name, told = settings["UNet_class_name"], modernise(settings)
    if name not in ENCODERS:
        raise ConfigError(f"the network is a {name}; wardround builds {join_names(ENCODERS)}.")
    return ENCODERS[name], told


def modernise(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the network from a plan of nnU-Net 2.0 to 2.3."""
    stages = len(settings["pool_op_kernel_sizes"])
    first, most = settings["UNet_base_num_features"], settings["unet_max_num_features"]
    blocks = settings["n_conv_per_stage_encoder"][:stages]
    return {
        "n_stages": stages,
        "features_per_stage": [min(first * 2**stage, most) for stage in range(stages)],
        "kernel_sizes": settings["conv_kernel_sizes"],
        "strides": settings["pool_op_kernel_sizes"],
        "n_conv_per_stage": blocks,
        "n_blocks_per_stage": blocks,
        "n_conv_per_stage_decoder": settings["n_conv_per_stage_decoder"][: stages - 1],
        "norm_op": "InstanceNorm",
    }


def expand(given: int | Sequence[int], count: int) -> list[int]:
    """One number a stage."""
    numbers = [int(given)] * count if isinstance(given, int) else [int(number) for number in given]
    if len(numbers) != count:
        raise ConfigError(f"{numbers} has {len(numbers)} entries for {count} stages.")
    return numbers


def expand_sides(given: int | Sequence[Any], count: int, dimensions: int) -> list[list[int]]:
    """One number an axis for every stage."""
    stages = [given] * count if isinstance(given, int) else list(given)
    sides = [read_sides([side] * dimensions if isinstance(side, int) else side) for side in stages]
    if len(sides) != count:
        raise ConfigError(f"{stages} has {len(stages)} entries for {count} stages.")
    return sides


def read_sides(given: Sequence[Any]) -> list[int]:
    return [read_count(side, "a size") for side in given]


def read_count(value: Any, what: str) -> int:
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ConfigError(f"{what} is {value}; it must be a whole number from 1 on.")
    return int(value)
