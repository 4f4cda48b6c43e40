"""A plain PyTorch folder: tensors as safetensors, settings as JSON, and a loader of twenty lines."""

from __future__ import annotations

from pathlib import Path

from wardround import __version__
from wardround.exporting.package import MODEL, WEIGHTS, Package
from wardround.files import write_text

LOADER = '''"""The network of this folder: `from loader import load`, or run this file to see what it is.

Needs torch, safetensors and wardround (pip install wardround); nothing here is a pickle.
"""

from pathlib import Path

from wardround.exporting.package import opened

HERE = Path(__file__).resolve().parent


def load(device: str = "cpu"):
    """The network in evaluation mode: (batch, channels, *spatial), prepared -> logits of the same size."""
    return load_all(device).model


def load_all(device: str = "cpu"):
    """The network with its objective (`.objective.probabilities(logits)`) and preparation."""
    return opened(HERE / "model.json", HERE / "model.safetensors", device)


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
    preparation = package.trained.preparation
    sides = ", ".join(["1", str(preparation.in_channels), *["64"] * preparation.dimensions])
    return f"""# {package.name}: a network for PyTorch

Written by wardround {__version__}. What it is for, what it reached and where it fails:
[MODEL_CARD.md](MODEL_CARD.md).

```python
import torch
from loader import load, load_all

network = load()                                # or load("cuda")
logits = network(torch.zeros({sides}))     # a prepared image; sides of any length
everything = load_all()
probabilities = everything.objective.probabilities(logits)   # classes: {", ".join(preparation.classes)}
```

- `model.safetensors`: the tensors. `model.json`: settings of the network, classes, how an image was prepared.
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
