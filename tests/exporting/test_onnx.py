"""ONNX: the graph gives what the network gives, at sizes and batches it was never traced with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from wardround import models
from wardround.errors import ConfigError
from wardround.exporting import export
from wardround.exporting import onnx as exporter
from wardround.exporting.onnx import Difference, export_onnx
from wardround.losses.objective import DiceBCE, Objective
from wardround.losses.regions import RegionDiceBCE
from wardround.methods.fedevi import Evidential
from wardround.models.base import Output, Segmenter
from wardround.prediction.trained import TrainedModel
from wardround.uncertainty.maps import tempered

for module in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(module, reason="needs the extra wardround[onnx]")


def network(dimensions: int, outputs: int, **settings: Any) -> Segmenter:
    torch.manual_seed(0)
    chosen = models.ModelSettings(
        **{"name": f"unet{dimensions}d", "base_filters": 2, "levels": 2, **settings}
    )
    built = models.build(chosen, in_channels=1, num_outputs=outputs, dimensions=dimensions)
    for part in built.modules():  # statistics as training leaves them, not 0 and 1
        if isinstance(part, torch.nn.modules.batchnorm._BatchNorm):
            part.running_mean.normal_()  # type: ignore[union-attr,operator]
            part.running_var.uniform_(0.5, 2)  # type: ignore[union-attr,operator]
    return built.eval()


def largest(found: list[Difference]) -> float:
    return max(entry.largest for entry in found)


def outputs_of(path: Path, image: torch.Tensor) -> list[torch.Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(part) for part in session.run(None, {"image": image.numpy()})]


@pytest.mark.parametrize(
    ("which", "shapes"),
    [
        ("pictures", [(1, 1, 37, 21), (3, 1, 8, 8), (1, 1, 1, 2)]),
        pytest.param(
            "volumes", [(1, 1, 13, 9, 22), (2, 1, 8, 4, 4), (1, 1, 2, 2, 2)], marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_becomes_a_graph_for_every_size(
    which: str, shapes: list[tuple[int, ...]], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run = request.getfixturevalue(which)
    done = export(run, "onnx", tmp_path / "out")
    trained = TrainedModel.load(run, device="cpu")
    temperature = float((trained.calibration or {}).get("temperature") or 1.0)

    assert largest(done.differences) < 1e-4
    says_what_it_is(done.folder)
    sides = ", ".join(["any"] * trained.preparation.dimensions)
    assert f"float32, (batch, 1, {sides})" in (done.folder / "README.md").read_text(encoding="utf-8")
    for shape in shapes:
        image = torch.randn(shape)
        logits = trained.model(image)
        probabilities, raw = outputs_of(tmp_path / "out" / "model.onnx", image)
        expected = tempered(trained.objective, logits, temperature).float()
        torch.testing.assert_close(probabilities, expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(raw, logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(shape[0], *shape[2:]))


def says_what_it_is(folder: Path) -> None:
    import onnx

    graph = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(graph, full_check=True)
    said = {entry.key: entry.value for entry in graph.metadata_props}
    sides = [d.dim_param or d.dim_value for d in graph.graph.input[0].type.tensor_type.shape.dim]

    assert sides in (["batch", 1, "height", "width"], ["batch", 1, "x", "y", "z"])
    assert [output.name for output in graph.graph.output] == ["probabilities", "logits"]
    assert json.loads(said["classes"])[0] == "background"
    assert json.loads(said["preparation"])["dimensions"] == len(sides) - 2
    assert said["params_sha256"] == json.loads((folder / "model.json").read_text())["params_sha256"]


@pytest.mark.slow
def test_the_variational_stem_and_temperature_are_in_the_graph(tmp_path: Path) -> None:
    stem = network(2, 2, stem="variational", variational={"eval_samples": 2})

    found = export_onnx(tmp_path / "m.onnx", stem, Evidential(), temperature=1.7)

    assert largest(found) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "dimensions", "objective"),
    [
        ("batch", 2, DiceBCE()),
        ("batch", 3, Evidential()),
        ("instance_affine", 3, DiceBCE()),
        ("group", 2, Evidential()),
        ("none", 3, DiceBCE()),
    ],
)
def test_every_norm_is_the_same_in_the_graph(
    norm: str, dimensions: int, objective: Objective, tmp_path: Path
) -> None:
    built = network(dimensions, objective.num_outputs(2), norm=norm)

    assert largest(export_onnx(tmp_path / "m.onnx", built, objective)) < 1e-4


def test_regions_become_class_probabilities_in_the_graph(tmp_path: Path) -> None:
    objective = RegionDiceBCE(regions=((1, 2), (2,)))

    assert largest(export_onnx(tmp_path / "m.onnx", network(2, 2), objective, temperature=1.7)) < 1e-4


class BySize(Segmenter):
    """A network that looks at the size of the image in a way no graph can."""

    def __init__(self) -> None:
        super().__init__(in_channels=1, num_outputs=1, dimensions=2, divisor=1)
        self.layer = torch.nn.Conv2d(1, 1, 1)

    def _output(self, x: torch.Tensor) -> Output:
        return Output(self.layer(x) * (2.0 if x.shape[2] > 4 else 3.0))


class Random(BySize):
    """A network that is not the same twice, as a graph with a mistake would be."""

    def _output(self, x: torch.Tensor) -> Output:
        return Output(self.layer(x) + torch.rand_like(x))


@pytest.mark.parametrize("kind", [BySize, Random])
def test_a_network_that_cannot_be_exported_is_refused_in_a_sentence(
    kind: type[Segmenter], tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=rf"network '{kind.__name__}' cannot be exported to ONNX: .*--to torch"
    ):
        export_onnx(tmp_path / "m.onnx", kind().eval(), DiceBCE())


class AtLeast(BySize):
    """A network whose way of computing changes at some size, and is nearly the same below it."""

    def _output(self, x: torch.Tensor) -> Output:
        return Output(self.layer(x) * (1.0 if x.shape[2] > 3 else 1.0001))


def test_a_graph_that_holds_from_some_size_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="how it computes depends on the size of the image"):
        export_onnx(tmp_path / "m.onnx", AtLeast().eval(), DiceBCE())


UNETR = {"img_size": 32, "feature_size": 4, "hidden_size": 24, "mlp_dim": 32, "num_heads": 2}
SWIN = {"feature_size": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_size": 4}


@pytest.mark.parametrize(
    ("name", "arguments", "dimensions", "reason"),
    [
        ("monai:UNETR", UNETR, 2, "it takes images of up to 32x32 alone"),
        pytest.param(
            "monai:UNETR", UNETR, 3, "it takes images of up to 32x32x32 alone", marks=pytest.mark.slow
        ),
        pytest.param(
            "monai:SwinUNETR", SWIN, 2, "how it computes depends on the size", marks=pytest.mark.slow
        ),
        pytest.param(
            "monai:SwinUNETR", SWIN, 3, "how it computes depends on the size", marks=pytest.mark.slow
        ),
    ],
)
def test_transformers_of_monai_are_refused_with_the_reason(
    name: str, arguments: dict[str, Any], dimensions: int, reason: str, tmp_path: Path
) -> None:
    pytest.importorskip("einops")
    chosen = models.ModelSettings(name=name, arguments=arguments)
    built = models.build(chosen, in_channels=1, num_outputs=1, dimensions=dimensions).eval()

    with pytest.raises(
        ConfigError, match=f"network '{name}' cannot be exported to ONNX: {reason}.*--to torch"
    ):
        export_onnx(tmp_path / "m.onnx", built, DiceBCE())


def test_without_the_extra_the_command_that_installs_it_is_named(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"pip install 'wardround\[onnx\]'"):
        export(pictures, "onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()
