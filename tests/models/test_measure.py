"""Costs without computing: parameters, operations, memory; what methods can do with each network."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from wardround.cli import app
from wardround.errors import ConfigError
from wardround.models import MODELS, ModelSettings, build
from wardround.models.measure import (
    costs,
    fedbn_text,
    fedma_text,
    fedper_text,
    norm_layers,
    sketch,
)

PAIRS = [(name, dimensions) for name, info in MODELS.items() for dimensions in info.dimensions]
SMALL = {"base_filters": 4, "levels": 3}
OWN = {"sam3d": {"base_filters": 12, "arguments": {"depth": 2, "window": 2}}}


def settings(name, **changes):
    return ModelSettings(name=name, **{**SMALL, **OWN.get(name, {}), **changes})


def called(*arguments):
    result = CliRunner().invoke(app, ["models", *arguments])
    if isinstance(result.exception, ConfigError):
        return 2, str(result.exception)
    return result.exit_code, result.output


# All registered networks


@pytest.mark.parametrize(("name", "dimensions"), PAIRS)
@pytest.mark.parametrize(("channels", "outputs"), [(1, 1), (2, 5), (3, 3), (4, 2)])
def test_any_size_channels_and_classes(name, dimensions, channels, outputs):
    torch.manual_seed(0)
    model = build(settings(name), in_channels=channels, num_outputs=outputs, dimensions=dimensions).eval()
    for sides in ((13, 10, 9), (8, 8, 8)):
        x = torch.randn(1, channels, *sides[:dimensions])
        with torch.no_grad():
            output = model.forward_features(x)
            assert output.logits.shape == (1, outputs, *x.shape[2:]) == model(x).shape
            assert output.decoder.shape[2:] == x.shape[2:]
            assert torch.equal(model.encode(x), output.bottleneck)


@pytest.mark.parametrize(("name", "dimensions"), PAIRS)
def test_every_network_is_measured_and_stated(name, dimensions):
    model = sketch(settings(name), dimensions=dimensions)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    found = costs(model, [16] * dimensions)
    assert found.flops > 0 and found.kept_bytes > 0 and found.parameters > 0
    assert found.parts[-1].shape[1] == 2 and sum(part.flops for part in found.parts) <= found.flops
    assert fedper_text(model).startswith("keeps head.weight, head.bias; ") and "refused" not in fedper_text(
        model
    )
    assert ("groups of channels are matched" in fedma_text(model)) == (
        "unet" in name or name == "autoencoder"
    )
    assert "keeps" in fedbn_text(sketch(settings(name, norm="batch"), dimensions=dimensions))


def test_the_3d_u_net_has_the_papers_parameters():
    code, out = called("show", "unet3d", "--size", "32,32,32", "--channels", "3", "--classes", "3", "--json",
                       "--set", "model.norm=none")  # fmt: skip
    assert code == 0 and json.loads(out)["parameters"] == 19_069_955


def test_a_sketch_leaves_random_streams_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    sketch(ModelSettings(name="unet3d"), dimensions=3)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(("name", "dimensions"), PAIRS)
def test_the_page_on_networks_has_the_right_counts(name, dimensions):
    page = (Path(__file__).parents[2] / "docs/how-to/networks.md").read_text(encoding="utf-8")
    model = sketch(ModelSettings(name=name), dimensions=dimensions)
    rows = [
        line for line in page.splitlines() if line.startswith(f"| `{name}` | ") and f"{dimensions}D" in line
    ]
    assert rows and all(f"| {sum(p.numel() for p in model.parameters()):,} |" in row for row in rows)
    assert all(("| yes |" in row or "with `norm: batch`" in row) for row in rows)


# Numbers by hand


def test_operations_of_a_convolution_by_hand():
    model = sketch(ModelSettings(name="user_nets:Flat"), in_channels=3, num_outputs=5, dimensions=2)
    assert costs(model, [10, 8]).flops == 2 * 3 * 5 * 10 * 8


def test_padding_counts():
    model = sketch(settings("unet2d"), dimensions=2)
    assert costs(model, [13, 10]).padded == (16, 12)
    assert costs(model, [13, 10]).flops == costs(model, [16, 12]).flops


def test_kept_activations_by_hand():
    """conv keeps the image, the activation keeps its result, which the second convolution needs too."""

    class Two(nn.Module):
        def __init__(self, in_channels: int, num_classes: int) -> None:
            super().__init__()
            self.one, self.act, self.two = (
                nn.Conv2d(in_channels, 6, 1),
                nn.ReLU(),
                nn.Conv2d(6, num_classes, 1),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.two(self.act(self.one(x)))
            return logits

    import user_nets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(user_nets, "Two", Two, raising=False)
        model = sketch(ModelSettings(name="user_nets:Two"), dimensions=2)
    found = costs(model, [8, 8])
    assert found.kept_bytes == 4 * 8 * 8 * (1 + 6)
    assert found.training_bytes == found.kept_bytes + 16 * found.parameters


def test_norm_layers_are_counted_by_kind():
    counted = {
        norm: norm_layers(sketch(settings("unet2d", norm=norm), dimensions=2))
        for norm in ("batch", "instance", "instance_affine", "group", "none")
    }
    assert counted == {norm: {} if norm == "none" else {norm: 10} for norm in counted}


# The command


def test_the_list_has_every_network_and_is_read_by_programs():
    code, out = called("--size", "16,16,16", "--json")
    rows = json.loads(out)
    assert code == 0 and [row["name"] for row in rows] == [name for name, number in PAIRS if number == 3]
    assert all(row["parameters"] > 0 and row["GFLOPs"] >= 0 and row["features"] for row in rows)


def test_a_network_of_monais_is_shown_with_its_parts():
    code, out = called("show", "monai:BasicUNet", "--set", "model.arguments.features=[4,4,4,4,4,4]",
                       "--size", "32,32", "--json")  # fmt: skip
    facts = json.loads(out)
    assert code == 0 and facts["features"] == "bottleneck (down_4), decoder"
    assert [part["name"] for part in facts["parts"]][:2] == ["conv_0", "down_1"]
    assert facts["FedMA"].startswith("refused: the channels of network 'monai:BasicUNet'")


def test_start_weights_are_listed(tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(0)
    model = build(settings("unet2d"), in_channels=1, num_outputs=3, dimensions=2)
    save_file(model.state_dict(), tmp_path / "start.safetensors")
    options = ["--set", "model.base_filters=4", "--set", "model.levels=3", "--size", "16,16"]
    code, out = called("show", "unet2d", *options, "--weights", str(tmp_path / "start.safetensors"))
    assert code == 0 and "taken: encoder.0.first.conv.weight" in out
    assert "random: 2x4x1x1 here, 3x4x1x1 in the file" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["show", "unett"], "model.name is 'unett'. Did you mean 'unet"),
        (["show", "unet2d", "--size", "16"], "--size 16: give two or three numbers"),
        (["show", "unet2d", "--size", "²,²"], "--size ²,²: give two or three numbers"),
        (["show", "unet3d", "--size", "99999999999999999999,1,1"], "numbers of voxels up to 100000"),
        (["--size", "16,16", "show", "unet2d"], "write options after show NAME"),
        (["show", "unet2d", "--size", "16,16,16"], "a 2D network, but the data are 3D"),
        (["show", "unet2d", "--set", "rounds=3"], "--set rounds: only settings of the network"),
        (["show", "unet2d", "--set", "model.norm=bn"], "model.norm is 'bn'; it must be 'batch'"),
        (["show", "unet2d", "--weights", "/nowhere"], "/nowhere, which does not exist"),
        (["show", "monai:UNet"], "also needs channels, strides"),
    ],
)
def test_mistakes_are_told_in_a_sentence(arguments, reason):
    code, said = called(*arguments)
    assert code == 2 and reason in said
