"""nnU-Net's plan taken over: axes in our order, both formats, both encoders; what does not fit is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from wardround.configuring.nnunet_plans import read_nnunet_plans, take_over
from wardround.configuring.plan import Choice, ConfigurationPlan
from wardround.errors import ConfigError
from wardround.models import ModelSettings, build

# A CT of thick slices, as nnU-Net 2.8.1 plans it: axes (z, y, x), z the coarse one.
CT: dict[str, Any] = {
    "dataset_name": "Dataset001_Liver",
    "plans_name": "nnUNetPlans",
    "original_median_spacing_after_transp": [5.0, 0.8, 0.7],
    "original_median_shape_after_transp": [60, 512, 480],
    "image_reader_writer": "SimpleITKIO",
    "transpose_forward": [0, 1, 2],
    "transpose_backward": [0, 1, 2],
    "configurations": {
        "2d": {"batch_size": 12, "patch_size": [512, 480], "spacing": [0.8, 0.7]},
        "3d_fullres": {
            "batch_size": 2,
            "patch_size": [28, 192, 160],
            "spacing": [5.0, 0.8, 0.7],
            "normalization_schemes": ["CTNormalization"],
            "use_mask_for_norm": [False],
            "architecture": {
                "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
                "arch_kwargs": {
                    "n_stages": 3,
                    "features_per_stage": [32, 64, 100],
                    "conv_op": "torch.nn.modules.conv.Conv3d",
                    "kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
                    "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 4]],
                    "n_conv_per_stage": [2, 2, 2],
                    "n_conv_per_stage_decoder": [2, 2],
                    "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
                    "dropout_op": None,
                },
            },
            "batch_dice": True,
        },
        "3d_cascade_fullres": {"inherits_from": "3d_fullres", "previous_stage": "3d_lowres"},
    },
    "foreground_intensity_properties_per_channel": {
        "0": {"mean": 99.5, "std": 37.1, "percentile_00_5": -15.0, "percentile_99_5": 197.0, "max": 3000.0}
    },
}
OLD = {  # what nnU-Net 2.0 wrote in place of `architecture`
    "UNet_class_name": "PlainConvUNet",
    "UNet_base_num_features": 32,
    "unet_max_num_features": 100,
    "n_conv_per_stage_encoder": [2, 2, 2],
    "n_conv_per_stage_decoder": [2, 2],
    "num_pool_per_axis": [1, 2, 2],
    "pool_op_kernel_sizes": [[1, 1, 1], [1, 2, 2], [2, 2, 4]],
    "conv_kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
}


def plans(*changes: tuple[str, Any]) -> dict[str, Any]:
    """The plan above with other values at places such as "configurations.3d_fullres.batch_size"."""
    made = copy.deepcopy(CT)
    for place, value in changes:
        *sections, name = place.split(".")
        at = made
        for section in sections:
            at = at[section]
        at[name] = value
    return made


FULL = "configurations.3d_fullres"
NETWORK = f"{FULL}.architecture.arch_kwargs"


def read(folder: Path, content: Any = CT, configuration: str | None = None) -> ConfigurationPlan:
    path = folder / "nnUNetPlans.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_nnunet_plans(path, configuration)


def values(plan: ConfigurationPlan) -> dict[str, Any]:
    return {choice.key: choice.value for choice in plan.choices}


def test_every_list_is_in_the_order_of_our_axes(tmp_path: Path) -> None:
    plan = read(tmp_path)
    assert {choice.reason for choice in plan.choices} == {"from nnUNetPlans.json, 3d_fullres"}
    found = plan.settings()
    assert found["data"]["patch"] == found["evaluate"]["window"] == [160, 192, 28]
    assert found["data"]["prepare"]["spacing"] == [0.7, 0.8, 5.0]
    assert found["data"]["prepare"]["orientation"] is None
    assert found["batch_size"] == 2 and found["objective"] == {"reduction": "batch"}
    assert found["model"] == {
        "name": "nnunet",
        "base_filters": 32,
        "levels": 3,
        "deep_supervision": False,
        "arguments": {
            "encoder": "plain",
            "kernels": [[3, 3, 1], [3, 3, 3], [3, 3, 3]],
            "strides": [[1, 1, 1], [2, 2, 1], [4, 2, 2]],
            "blocks": [2, 2, 2],
            "decoder_convolutions": 2,
            "most_filters": 100,
        },
    }


def test_transposed_axes_go_back_to_those_of_the_file(tmp_path: Path) -> None:
    # Thick slices along the file's y: the reader has (z, y, x) = (0.8, 5, 0.7), the plan puts y first.
    found = values(read(tmp_path, plans(("transpose_forward", [1, 0, 2]))))
    assert found["data.prepare.spacing"] == [0.7, 5.0, 0.8]
    assert found["data.patch"] == [160, 28, 192]
    assert found["model.arguments.strides"] == [[1, 1, 1], [2, 1, 2], [4, 2, 2]]
    found = values(read(tmp_path, plans(("transpose_forward", [2, 0, 1]))))  # the plan is (x, z, y)
    assert found["data.prepare.spacing"] == [5.0, 0.7, 0.8]


def test_ct_brings_the_intensities_of_the_foreground(tmp_path: Path) -> None:
    prepare = read(tmp_path).settings()["data"]["prepare"]
    assert prepare["normalise"] == "ct"
    assert prepare["intensities"] == [[-15.0, 197.0, 99.5, 37.1]]


def test_a_channel_beside_ct_may_have_a_z_score(tmp_path: Path) -> None:
    found = values(
        read(tmp_path, plans((f"{FULL}.normalization_schemes", ["CTNormalization", "ZScoreNormalization"])))
    )
    assert found["data.prepare.intensities"] == [[-15.0, 197.0, 99.5, 37.1], None]


@pytest.mark.parametrize(
    ("scheme", "mask", "ours"),
    [
        ("ZScoreNormalization", False, "zscore"),
        ("ZScoreNormalization", True, "zscore_nonzero"),
        ("RescaleTo01Normalization", False, "minmax"),
        ("NoNormalization", False, "none"),
    ],
)
def test_normalisation_has_our_name(tmp_path: Path, scheme: str, mask: bool, ours: str) -> None:
    changed = plans(
        (f"{FULL}.normalization_schemes", [scheme] * 2), (f"{FULL}.use_mask_for_norm", [mask] * 2)
    )
    assert values(read(tmp_path, changed))["data.prepare.normalise"] == ours


def test_the_older_format_says_the_same(tmp_path: Path) -> None:
    older = plans()
    del older["configurations"]["3d_fullres"]["architecture"]
    older["configurations"]["3d_fullres"] |= OLD
    older["foreground_intensity_properties_by_modality"] = older.pop(
        "foreground_intensity_properties_per_channel"
    )
    assert read(tmp_path, older) == read(tmp_path)


def test_a_residual_encoder_is_one_of_ours(tmp_path: Path) -> None:
    kwargs = CT["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"]
    residual = {name: value for name, value in kwargs.items() if name != "n_conv_per_stage"}
    residual |= {"n_blocks_per_stage": [1, 3, 4], "n_conv_per_stage_decoder": [1, 1]}
    name = "dynamic_network_architectures.architectures.unet.ResidualEncoderUNet"
    changed = plans((NETWORK, residual), (f"{FULL}.architecture.network_class_name", name))
    arguments = read(tmp_path, changed).settings()["model"]["arguments"]
    assert (arguments["encoder"], arguments["blocks"], arguments["decoder_convolutions"]) == (
        "residual",
        [1, 3, 4],
        1,
    )


def test_the_network_is_built_from_what_was_read(tmp_path: Path) -> None:
    settings = ModelSettings.model_validate(read(tmp_path).settings()["model"])
    model = build(settings, in_channels=1, num_outputs=2, dimensions=3)
    with torch.no_grad():
        assert model(torch.zeros(1, 1, 16, 16, 8)).shape == (1, 2, 16, 16, 8)


def test_pictures_keep_rows_and_columns_and_have_no_spacing(tmp_path: Path) -> None:
    pictures = plans(
        ("image_reader_writer", "NaturalImage2DIO"),
        ("original_median_shape_after_transp", [1, 160, 213]),
        (f"{FULL}.patch_size", [160, 224]),
        (f"{FULL}.spacing", [1.0, 1.0]),
        (f"{FULL}.normalization_schemes", ["ZScoreNormalization"] * 3),
        (f"{FULL}.use_mask_for_norm", [False] * 3),
        (f"{NETWORK}.kernel_sizes", 3),
        (f"{NETWORK}.strides", [1, 2, [2, 1]]),
    )
    pictures["configurations"] = {"2d": pictures["configurations"]["3d_fullres"]}
    found = values(read(tmp_path, pictures))
    assert found["data.patch"] == [160, 224] and "data.prepare.spacing" not in found
    assert found["model.arguments.strides"] == [[1, 1], [2, 2], [2, 1]]
    assert found["model.arguments.kernels"] == [[3, 3]] * 3


def test_what_the_plan_decides_replaces_our_choices_and_the_rest_stays(tmp_path: Path) -> None:
    path = tmp_path / "nnUNetPlans.json"
    path.write_text(json.dumps(CT))
    ours = [("rounds", 10), ("batch_size", 9), ("model.norm", "batch"), ("data.foreground", 0.33)]
    mixed = take_over(ConfigurationPlan(tuple(Choice(key, value, "a rule") for key, value in ours)), path)
    kept = {choice.key: choice.value for choice in mixed.choices if choice.reason == "a rule"}
    assert kept == {"rounds": 10, "data.foreground": 0.33}
    assert values(mixed)["batch_size"] == 2


def test_a_plan_of_other_dimensions_is_refused(tmp_path: Path) -> None:
    read(tmp_path)
    ours = ConfigurationPlan((Choice("data.patch", [64, 64], "a rule"),))
    with pytest.raises(ConfigError, match="is for 3D images, but yours are 2D"):
        take_over(ours, tmp_path / "nnUNetPlans.json")


def test_inherited_settings_are_followed(tmp_path: Path) -> None:
    changed = plans(("configurations.3d_small", {"inherits_from": "3d_fullres", "batch_size": 7}))
    found = values(read(tmp_path, changed, "3d_small"))
    assert found["batch_size"] == 7 and found["data.patch"] == [160, 192, 28]


def test_a_scan_of_any_orientation_is_warned_about(tmp_path: Path) -> None:
    assert "Scans keep the axes of their files" in read(tmp_path).warnings[0]
    turned = read(tmp_path, plans(("image_reader_writer", "NibabelIOWithReorient")))
    assert values(turned)["data.prepare.orientation"] == "RAS" and not turned.warnings


@pytest.mark.parametrize(
    ("changes", "configuration", "told"),
    [
        ([], "3d_cascade_fullres", "3d_cascade_fullres is a stage of a cascade"),
        ([("configurations.3d_lowres", {"patch_size": [1, 1, 1]})], "3d_lowres", "3d_lowres is a stage of a cascade"),
        ([], "2d", "2d trains on slices of volumes"),
        ([], "3d_huge", "configuration 3d_huge is not in it; it has 2d, 3d_fullres, 3d_cascade_fullres"),
        ([("configurations", {})], None, "configuration 3d_fullres or 2d is not in it; it has none"),
        ([(f"{FULL}.inherits_from", "3d_fullres")], None, "inherits from 3d_fullres, which does not end"),
        ([("image_reader_writer", "Tiff3DIO")], None, "images were read by Tiff3DIO"),
        ([("transpose_forward", [0, 1, 1])], None, r"transpose_forward is \[0, 1, 1\]"),
        ([(f"{FULL}.patch_size", [28, 192, 0])], None, "a size is 0; it must be a whole number"),
        ([(f"{FULL}.spacing", [1.0, 1.0])], None, "has 2 entries for 3 axes"),
        ([(f"{FULL}.spacing", [0.0, 1.0, 1.0])], None, "must be millimetres above 0"),
        ([(f"{FULL}.batch_size", 0)], None, "batch_size is 0"),
        ([(f"{FULL}.normalization_schemes", ["CTNormalization", "NoNormalization"])], None, "in different ways"),
        ([(f"{FULL}.normalization_schemes", ["RGBTo01Normalization"])], None, "by RGBTo01Normalization"),
        ([(f"{NETWORK}.features_per_stage", [32, 48, 64])], None, r"gives \[32, 64, 64\]"),
        ([(f"{NETWORK}.n_conv_per_stage_decoder", [1, 2])], None, "one number for all stages"),
        ([(f"{NETWORK}.n_stages", 9)], None, "has 9 stages; wardround builds up to 8"),
        ([(f"{NETWORK}.strides", [[1, 1, 1]])], None, "has 1 entries for 3 stages"),
        ([(f"{NETWORK}.dropout_op", "torch.nn.Dropout3d")], None, "dropout torch.nn.Dropout3d"),
        ([(f"{FULL}.architecture.network_class_name", "my.Transformer")], None, "the network is a Transformer"),
        ([("foreground_intensity_properties_per_channel", {"0": {}})], None, "'percentile_00_5' is missing"),
        ([(f"{FULL}.patch_size", "large")], None, "a value is not of the usual kind"),
        ([(f"{FULL}.architecture", None)], None, "a value is not of the usual kind"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_over_is_refused(
    tmp_path: Path, changes: list[tuple[str, Any]], configuration: str | None, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        read(tmp_path, plans(*changes), configuration)
    assert "nnUNetPlans.json" in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"configurations": 1}', '"text"', "{" * 5000])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match="nnUNetPlans.json (has no configurations|is not)"):
        read(tmp_path, content)


def test_pickled_plans_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a pickle"):
        read_nnunet_plans(tmp_path / "nnUNetPlansv2.1_plans_3D.pkl")
    with pytest.raises(ConfigError, match="nnUNetPlans.json"):
        read_nnunet_plans(tmp_path / "nnUNetPlans.json")
