"""A plain PyTorch folder: tensors as safetensors, settings as JSON, and a short loader."""

from __future__ import annotations

from pathlib import Path

from wardround.exporting.package import MODEL, WEIGHTS, Package
from wardround.files import write_text
from wardround.version import __version__

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
    write_text(folder / "README.md", readme(package))


def readme(package: Package) -> str:
    preparation = package.preparation
    stay = f" {package.orientation_note}" if package.orientation_note else ""
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
- Prediction of whole scans, with preparation and the way back to the scan's own grid:

```python
from wardround.prediction.predicting import Predictor
from wardround.prediction.inputs import Scan
from pathlib import Path

scan = Path("scan.nii.gz")
mask = Predictor([load_all()])(Scan((scan,), scan.name, str(scan))).mask
```
"""
