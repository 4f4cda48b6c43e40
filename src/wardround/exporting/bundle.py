"""A MONAI bundle: metadata, an inference workflow and weights, for `python -m monai.bundle`.

    configs/metadata.json      what it is, checked by `verify_metadata`
    configs/inference.json     the workflow, started by `run`
    configs/model.json         settings of network, objective and preparation
    models/model.safetensors   weights; no pickle, no TorchScript
    docs/README.md             how to run it

The network and the preparation are wardround's own, so the bundle needs wardround installed, and says so in
`required_packages_version`. MONAI (1.6) leaves reading weights to `torch.load`, which knows safetensors in
new versions of PyTorch alone. So the workflow loads the weights itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from wardround.exporting.package import MODEL, WEIGHTS, Package
from wardround.files import write_json, write_text
from wardround.losses.regions import RegionDiceBCE
from wardround.methods import METHODS, OBJECTIVES
from wardround.models import MODELS
from wardround.version import __version__

SCHEMA = (
    "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"
)
PARTS = "wardround.exporting.parts"
TODO = "TODO: not known to the run that made this model"


def write_bundle(folder: Path, package: Package) -> None:
    package.save(folder / "configs" / MODEL, folder / "models" / WEIGHTS)
    write_json(folder / "configs" / "metadata.json", metadata(package))
    write_json(folder / "configs" / "inference.json", inference())
    write_text(folder / "docs" / "README.md", readme(package))


def inference() -> dict[str, Any]:
    """The workflow; every part has the name that MONAI's tools look for."""
    return {
        "imports": ["$import torch"],
        "bundle_root": ".",
        "inputs": "$@bundle_root + '/inputs'",
        "output_dir": "$@bundle_root + '/masks'",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "model_file": f"$@bundle_root + '/configs/{MODEL}'",
        "weights_file": f"$@bundle_root + '/models/{WEIGHTS}'",
        "network_def": {"_target_": f"{PARTS}.network_def", "model": "@model_file"},
        "trained": {
            "_target_": f"{PARTS}.trained",
            "model": "@model_file",
            "weights": "@weights_file",
            "device": "@device",
        },
        "network": "$@trained.model",
        "datalist": {
            "_target_": f"{PARTS}.datalist",
            "inputs": "@inputs",
            "model": "@trained",
            "workplace": "$@output_dir + '/series'",
        },
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [{"_target_": f"{PARTS}.ReadAndPrepare", "model": "@trained"}],
        },
        "dataset": {"_target_": "Dataset", "data": "@datalist", "transform": "@preprocessing"},
        "inferer": {"_target_": f"{PARTS}.WindowInferer", "model": "@trained"},
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [
                {"_target_": f"{PARTS}.MaskOnOwnGrid", "model": "@trained"},
                {"_target_": f"{PARTS}.SaveMask", "output_dir": "@output_dir"},
            ],
        },
        "evaluator": {
            "_target_": f"{PARTS}.Evaluator",
            "dataset": "@dataset",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
        },
        "run": ["$@evaluator.run()"],
    }


def metadata(package: Package) -> dict[str, Any]:
    preparation, network = package.trained.preparation, package.network
    dimensions = preparation.dimensions
    channels = preparation.channels or [f"channel {n}" for n in range(preparation.in_channels)]
    task = f"Segmentation of {', '.join(preparation.classes[1:])} in {dimensions}D images"
    outputs = preparation.classes if network.num_outputs > 1 else preparation.classes[1:]
    if isinstance(package.trained.objective, RegionDiceBCE):
        outputs = name_regions(package.trained.objective, preparation.classes)
    return {
        "schema": SCHEMA,
        "version": "0.1.0",
        "changelog": {"0.1.0": f"exported by wardround {__version__}"},
        "monai_version": version("monai"),
        "pytorch_version": version("torch").partition("+")[0],
        "numpy_version": version("numpy"),
        "required_packages_version": {
            name: __version__ if name == "wardround" else version(name)
            for name in ("wardround", "safetensors", "nibabel", "scipy", "pillow")
        },
        "name": package.name,
        "task": task,
        "description": f"{task}, trained by federated learning. Research use only; see MODEL_CARD.md.",
        "authors": TODO,
        "copyright": TODO,
        "data_source": TODO,
        "data_type": "files that wardround reads: NIfTI, PNG, JPEG, TIFF, NumPy, DICOM series",
        "image_classes": ", ".join(channels),
        "label_classes": ", ".join(preparation.classes),
        "pred_classes": ", ".join(preparation.classes),
        "eval_metrics": eval_metrics(package),
        "intended_use": "Research use only. This is not a medical device.",
        "references": references(package),
        "network_data_format": {
            "inputs": {"image": describe_tensor("magnitude", preparation.in_channels, dimensions, channels)},
            "outputs": {"pred": describe_tensor("logits", network.num_outputs, dimensions, outputs)},
        },
    }


def name_regions(objective: RegionDiceBCE, classes: Sequence[str]) -> tuple[str, ...]:
    """A name for each output: its classes, joined."""
    regions = objective.regions or [(number,) for number in range(1, len(classes))]
    return tuple(" + ".join(classes[number] for number in region) for region in regions)


def describe_tensor(kind: str, num_channels: int, dimensions: int, names: Sequence[str]) -> dict[str, Any]:
    """What goes into the network or comes out of it; kind: of its values."""
    return {
        "type": "image",
        "format": kind,
        "num_channels": num_channels,
        "spatial_shape": ["*"] * dimensions,
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": dimensions == 3,
        "channel_def": {str(n): name for n, name in enumerate(names)},
    }


def eval_metrics(package: Package) -> dict[str, float]:
    """Means over sites on test cases, as result.json has them."""
    test = package.run.test
    if test is None:
        return {}
    return {f"mean_{metric}": test.value(metric) for metric in package.run.metrics if metric in test.overall}


def references(package: Package) -> list[str]:
    run = package.run
    method, objective = METHODS.get(run.method), OBJECTIVES.get(run.objective)
    info = MODELS.get(package.trained.config.model.name)
    said = [
        "" if method is None else " ".join(filter(None, [method.title, method.paper, method.link])),
        "" if objective is None or not objective.paper else f"{objective.title}, {objective.paper}",
        "" if info is None else f"{info.title}, {info.paper}",
    ]
    return [text for text in said if text]


def readme(package: Package) -> str:
    note = f"\n- {package.inference_note}" if package.inference_note else ""
    return f"""# {package.name}: a MONAI bundle

Written by wardround {__version__}. What it is for, what it reached and where it fails:
[MODEL_CARD.md](../MODEL_CARD.md).

It needs `monai`, `fire` and `wardround` (versions: `configs/metadata.json`), which holds the network and the
preparation of images. Nothing in it is a pickle.

From inside this folder:

```sh
python -m monai.bundle run --config_file configs/inference.json --inputs scan.nii.gz --output_dir masks
```

- `--inputs`: a scan, a folder of scans, a DICOM folder, or a text file with one scan a line.
- `--output_dir`: each mask gets its scan's name, format, shape and affine. It is the mask that
  `wardround predict` makes.
- From elsewhere, add `--bundle_root FOLDER` and give the paths in full.{note}

Check the bundle (needs `jsonschema`; the first command downloads MONAI's schema unless that file exists):

```sh
python -m monai.bundle verify_metadata --meta_file configs/metadata.json --filepath schema.json
python -m monai.bundle verify_net_in_out network_def --meta_file configs/metadata.json \\
    --config_file configs/inference.json --any 32
```

In Python, `monai.bundle.load` gives the network where `torch.load` reads safetensors (tried with
PyTorch 2.13):

```python
from monai.bundle import load

network = load(
    "FOLDER", bundle_dir="WHERE IT LIES", workflow_type="inference", model_file="models/{WEIGHTS}",
    net_override={{"model": "WHERE IT LIES/FOLDER/configs/{MODEL}"}},
).eval()
```

With any PyTorch, from inside this folder:

```python
from wardround.exporting.parts import trained

network = trained("configs/{MODEL}", "models/{WEIGHTS}").model
```
"""
