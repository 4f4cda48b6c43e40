"""The bundle: MONAI's own commands, in another process, verify it and give the mask of `wardround predict`."""

from __future__ import annotations

import inspect
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
import yaml

from wardround.exporting import export, parts
from wardround.prediction.predicting import Predictor
from wardround.prediction.session import predict
from wardround.prediction.trained import TrainedModel

pytest.importorskip("fire", reason="MONAI's commands need fire: pip install fire")
pytest.importorskip("jsonschema", reason="verify_metadata needs jsonschema: pip install jsonschema")

# What MONAI's specification asks of metadata.json, in our words; its own schema would have to be downloaded.
TENSOR = {
    "type": "object",
    "required": ["type", "format", "num_channels", "spatial_shape", "dtype", "value_range"],
    "properties": {
        "num_channels": {"type": "integer"},
        "spatial_shape": {"type": "array", "items": {"type": ["string", "integer"]}},
        "value_range": {"type": "array", "items": {"type": "number"}},
    },
}
TEXTS = ("schema", "version", "monai_version", "pytorch_version", "numpy_version", "task", "description")
TEXTS += ("authors", "copyright")
SCHEMA = {
    "type": "object",
    "required": [*TEXTS, "required_packages_version", "network_data_format"],
    "properties": {
        **{name: {"type": "string"} for name in TEXTS},
        "required_packages_version": {"type": "object", "required": ["wardround"]},
        "references": {"type": "array", "items": {"type": "string"}},
        "eval_metrics": {"type": "object"},
        "network_data_format": {
            "type": "object",
            "required": ["inputs", "outputs"],
            "properties": {
                side: {"type": "object", "additionalProperties": TENSOR} for side in ("inputs", "outputs")
            },
        },
    },
}


@pytest.fixture(scope="module")
def bundle(volumes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(volumes, "bundle", tmp_path_factory.mktemp("bundle") / "model").folder


def test_monai_runs_it_and_gives_the_mask_of_predict(
    volumes: Path, bundle: Path, tmp_path: Path, in_process: Any
) -> None:
    scans = sorted((volumes.parent / "scans").glob("*/images/*.nii.gz"))[:2]
    for number, scan in enumerate(scans):
        (tmp_path / "in" / f"scan{number}.nii.gz").parent.mkdir(exist_ok=True)
        (tmp_path / "in" / f"scan{number}.nii.gz").write_bytes(scan.read_bytes())

    done = in_process(
        *("-m", "monai.bundle", "run", "--config_file", "configs/inference.json"),
        *("--inputs", tmp_path / "in", "--output_dir", tmp_path / "masks"),
        cwd=bundle,
    )

    assert done.returncode == 0, done.stderr
    expected = predict(volumes, tmp_path / "in", uncertainty=None, probabilities=False, device="cpu")
    assert len(expected) == 2
    for prediction in expected:
        mask = nibabel.load(tmp_path / "masks" / prediction.name)
        assert np.array_equal(np.asarray(mask.dataobj), prediction.mask)
        assert np.allclose(mask.affine, prediction.affine)
        assert len(np.unique(prediction.mask)) > 1  # an empty mask would prove little


@pytest.mark.parametrize(
    ("evaluate", "axes"),
    [
        ({"tta": True}, None),
        ({"tta": True}, [0, 2]),
        ({"window": [8, 8, 8]}, None),
        ({"tta": True, "window": [8, 8, 8]}, None),
    ],
)
def test_mirror_images_and_windows_of_the_run_come_along(
    volumes: Path, tmp_path: Path, evaluate: dict[str, Any], axes: list[int] | None
) -> None:
    shutil.copytree(volumes, tmp_path / "run")
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    settings["evaluate"].update(evaluate)
    settings["augmentation"]["mirror_axes"] = axes
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(settings))
    scan = next((volumes.parent / "scans").glob("*/images/*.nii.gz"))
    (expected,) = predict(tmp_path / "run", scan, uncertainty=None, probabilities=False, device="cpu")
    (plain,) = predict(volumes, scan, uncertainty=None, probabilities=False, device="cpu")
    folder = export(tmp_path / "run", "bundle", tmp_path / "bundle").folder

    model = parts.trained(str(folder / "configs/model.json"), str(folder / "models/model.safetensors"))
    (item,) = parts.datalist(str(scan), model, str(tmp_path / "series"))
    item = parts.ReadAndPrepare(model)(item)
    item["logits"] = parts.WindowInferer(model)(item["image"][None], model.model)[0]

    assert np.array_equal(parts.MaskOnOwnGrid(model)(item)["pred"], expected.mask)
    assert not np.array_equal(expected.mask, plain.mask)  # or nothing would be shown
    assert np.array_equal(Predictor([model])(item["scan"]).mask, expected.mask)  # as a PyTorch folder does
    readme = (folder / "docs" / "README.md").read_text()
    assert "as the run was tested" in readme and ("along axes 0 and 2" in readme) is (axes is not None)


@pytest.mark.skipif(
    "safetensors" not in inspect.getsource(torch.load), reason="this PyTorch does not read safetensors"
)
def test_monai_loads_the_network_with_its_weights(bundle: Path, volumes: Path) -> None:
    from monai.bundle import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a bundle's workflow is code
        network = load(
            bundle.name,
            bundle_dir=bundle.parent,
            model_file="models/model.safetensors",
            workflow_type="inference",
            device="cpu",
            net_override={"model": str(bundle / "configs" / "model.json")},
        ).eval()

    image = torch.randn(1, 1, 9, 10, 11)
    assert torch.equal(network(image), TrainedModel.load(volumes, device="cpu").model(image))


@pytest.mark.slow
def test_monai_verifies_the_metadata_and_the_network(bundle: Path, tmp_path: Path, in_process: Any) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    files = ("--meta_file", "configs/metadata.json")

    metadata = in_process("-m", "monai.bundle", "verify_metadata", *files, "--filepath", schema, cwd=bundle)
    network = in_process(
        *("-m", "monai.bundle", "verify_net_in_out", "network_def", *files),
        *("--config_file", "configs/inference.json", "--any", "9"),
        cwd=bundle,
    )

    assert metadata.returncode == 0, metadata.stderr
    assert "metadata is verified with no error" in metadata.stdout + metadata.stderr
    assert network.returncode == 0, network.stderr
    assert "data shape of network is verified with no error" in network.stdout + network.stderr


def test_nothing_in_it_is_a_pickle_and_no_path_or_client_is_named(bundle: Path, volumes: Path) -> None:
    files = {str(path.relative_to(bundle)) for path in bundle.rglob("*") if path.is_file()}

    assert files == {
        "MODEL_CARD.md", "configs/inference.json", "configs/metadata.json", "configs/model.json",
        "docs/README.md", "models/model.safetensors",
    }  # fmt: skip
    for path in bundle.rglob("*.json"):
        text = path.read_text()
        assert str(volumes.parent) not in text
        assert "north" not in text


def test_metadata_say_what_the_run_measured(bundle: Path, volumes: Path) -> None:
    metadata = json.loads((bundle / "configs" / "metadata.json").read_text())
    result = json.loads((volumes / "result.json").read_text())

    assert metadata["eval_metrics"]["mean_dice"] == result["test"]["dice"]["mean"]
    assert metadata["network_data_format"]["outputs"]["pred"]["num_channels"] == 3
    assert metadata["pred_classes"] == "background, rim, core"
