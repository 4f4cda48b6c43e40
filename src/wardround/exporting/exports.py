"""`export`: one function for all kinds, into a folder that is complete or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wardround.errors import ConfigError
from wardround.exporting.bundle import write_bundle
from wardround.exporting.card import write_card
from wardround.exporting.inference import describe_script, write_inference
from wardround.exporting.onnx import Difference, check_installed, export_onnx
from wardround.exporting.package import MODEL, WEIGHTS, Package
from wardround.files import write_json, write_text
from wardround.text import format_size
from wardround.version import __version__

CARD = "MODEL_CARD.md"
KINDS = {
    "onnx": ("an ONNX graph", "model.onnx"),
    "bundle": ("a MONAI bundle", f"models/{WEIGHTS}"),
    "torch": ("a PyTorch folder", WEIGHTS),
}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """What was written; differences: between the ONNX graph and PyTorch, by size."""

    folder: Path
    files: list[Path]
    differences: list[Difference] = field(default_factory=list)
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "folder": str(self.folder),
            "files": {str(file.relative_to(self.folder)): file.stat().st_size for file in self.files},
            "warnings": list(self.warnings),
        }
        if self.differences:
            facts["differences"] = [{**vars(d), "shape": list(d.shape)} for d in self.differences]
            facts["largest_difference"] = max(d.largest for d in self.differences)
        return facts


def export(
    run: Path | str,
    to: str,
    out: Path | str,
    *,
    client: str | None = None,
    overwrite: bool = False,
    anonymous: bool = False,
    say: Say = lambda text: None,
) -> Exported:
    """Write a run's model into a folder, with its card; the folder is complete or absent.

    to: onnx, bundle or torch; client: that client's personal model; anonymous: sites are numbered; say:
    called with each step.
    """
    if to not in KINDS:
        raise ConfigError(f"--to is '{to}'; choose from {', '.join(KINDS)}.")
    if to == "onnx":
        check_installed()
    out = Path(out)
    check_place(out, Path(run), overwrite=overwrite)
    say("Reading the run")
    package = Package.of(run, client=client, anonymous=anonymous)
    differences: list[Difference] = []
    title, weights = KINDS[to]
    with whole_folder(out) as folder:
        if to == "onnx":
            say("Building the graph and checking it against PyTorch")
            differences = write_graph(folder, package)
        elif to == "bundle":
            write_bundle(folder, package)
        else:
            write_folder(folder, package)
        say("Writing the card")
        write_card(folder / CARD, package, kind=title, files={weights: folder / weights})
    files = sorted(path for path in out.rglob("*") if path.is_file())
    return Exported(out, files, differences, package.trained.warnings)


def write_graph(folder: Path, package: Package) -> list[Difference]:
    """model.onnx, with the content of model.json inside and beside it, and the script that runs it."""
    facts = package.as_dict()
    kept = ("made_by", "classes", "values", "channels", "preparation", "params_sha256")
    inside = {key: facts[key] for key in kept} | {
        "temperature": package.temperature,
        "use": "Research use only. This is not a medical device.",
    }
    path, objective = folder / "model.onnx", package.trained.objective
    found = export_onnx(path, package.network, objective, temperature=package.temperature, facts=inside)
    write_json(folder / MODEL, facts)
    write_inference(folder, package)
    write_text(folder / "README.md", graph_readme(package, found))
    return found


def graph_readme(package: Package, found: list[Difference]) -> str:
    preparation = package.preparation
    stay = f" {package.orientation_note}" if package.orientation_note else ""
    rows = "\n".join(
        f"| {format_size(d.shape)} | {d.probabilities:.1e} | {d.logits:.1e} | {d.limit:g} |" for d in found
    )
    sides = ", ".join(["batch", str(preparation.in_channels), *["any"] * preparation.dimensions])
    return f"""# {package.name}: an ONNX graph

Written by wardround {__version__}. What it is for, what it reached and where it fails:
[MODEL_CARD.md](MODEL_CARD.md).

{describe_script(package)}

The network alone:

```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
probabilities, logits = session.run(None, {{"image": image}})   # image: float32, ({sides})
```

- `image`: prepared as `model.json` says under `preparation`.{stay} Batch and sides are free; the graph pads.
- `probabilities`: {", ".join(preparation.classes)}. Temperature {package.temperature:.4g} is in them.
- `logits`: as the network returns them.

Checked against PyTorch when it was written, one random batch per size. The limit is wider for an image
within one block of the network, where a norm sees two voxels and magnifies rounding. Avoid that size.

| image | difference of probabilities | of logits (of the largest one, where above 1) | limit |
|---|---:|---:|---:|
{rows}
"""


# The folder: written under another name, then renamed


def check_place(out: Path, run: Path, *, overwrite: bool) -> None:
    """Refuse a folder whose replacement would lose something."""
    if out.suffix.lower() in (".onnx", ".pt", ".pth", ".zip", ".safetensors"):
        raise ConfigError(f"{out} looks like a file; give a folder for the model and its card.")
    if run.resolve() == out.resolve() or out.resolve() in run.resolve().parents:
        raise ConfigError(f"{out} contains the run itself; export into another folder.")
    if not (out.exists() or out.is_symlink()):
        return
    if not out.is_dir() or out.is_symlink():
        raise ConfigError(f"{out} is not a folder; choose another.")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"{out} exists. Add --overwrite to replace it, or choose another folder.")
    if not (out / CARD).is_file():
        raise ConfigError(
            f"{out} is not an export of wardround (it has no {CARD}) and is not replaced; choose another "
            "folder."
        )


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` on success and is removed on failure."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    former = out.with_name(f".{out.name}.{os.getpid()}.former")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}.") from None
    try:
        yield partial
        if out.exists():
            out.rename(former)
        partial.rename(out)
    except BaseException:
        if former.exists() and not out.exists():
            former.rename(out)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


# A PyTorch folder: tensors as safetensors, settings as JSON, and a short loader


LOADER = '''"""The network of this folder: `from loader import load`, or run this file to see what it is.

Needs torch, safetensors and wardround (pip install wardround); nothing here is a pickle.
"""

from pathlib import Path

from wardround.exporting.package import opened
from wardround.uncertainty.maps import tempered

HERE = Path(__file__).resolve().parent


def load(device: str = "cpu"):
    """The network in evaluation mode: (batch, channels, *spatial), prepared -> logits of the same size."""
    return load_all(device).model


def load_all(device: str = "cpu"):
    """The network with its objective, preparation and calibration."""
    return opened(HERE / "model.json", HERE / "model.safetensors", device)


def probabilities(found, logits):
    """Of the classes, background first, after the run's temperature; found: what `load_all` gave."""
    return tempered(found.objective, logits, (found.calibration or {}).get("temperature") or 1.0)


if __name__ == "__main__":
    found = load_all()
    weights = sum(tensor.numel() for tensor in found.model.parameters())
    print(f"{type(found.model).__name__}, {weights:,} parameters: {', '.join(found.preparation.classes)}")
'''


def write_folder(folder: Path, package: Package) -> None:
    """model.safetensors, model.json, loader.py and a README."""
    package.save(folder / MODEL, folder / WEIGHTS)
    write_text(folder / "loader.py", LOADER)
    write_text(folder / "README.md", folder_readme(package))


def folder_readme(package: Package) -> str:
    preparation = package.preparation
    stay = f" {package.orientation_note}" if package.orientation_note else ""
    note = f" {package.inference_note}" if package.inference_note else ""
    sides = ", ".join(["1", str(preparation.in_channels), *["64"] * preparation.dimensions])
    return f"""# {package.name}: a network for PyTorch

Written by wardround {__version__}. What it is for, what it reached and where it fails:
[MODEL_CARD.md](MODEL_CARD.md).

```python
import torch
from loader import load_all, probabilities

found = load_all()                                 # or load_all("cuda")
logits = found.model(torch.zeros({sides}))    # a prepared image; sides of any length
p = probabilities(found, logits)                   # after the temperature; {", ".join(preparation.classes)}
```

- `model.safetensors`: the tensors.
- `model.json`: settings of the network, classes, how an image was prepared.{stay}
- `loader.py` needs `torch`, `safetensors` and `wardround` (which holds the definition of the network).
- Prediction of whole scans, with preparation and the way back to the scan's own grid.{note}

```python
from wardround.prediction.predicting import Predictor
from wardround.prediction.inputs import Scan
from pathlib import Path

scan = Path("scan.nii.gz")
mask = Predictor([load_all()])(Scan((scan,), scan.name, str(scan))).mask
```
"""
