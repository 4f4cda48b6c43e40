"""Draws docs/images/predict.png: a synthetic scan, its mask, and where the model was unsure.

python docs/make_predict_picture.py      about a minute: three synthetic hospitals, FedAvg, a small U-Net
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import nibabel

import wardround as wr
from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings

TARGET = Path(__file__).parent / "images" / "predict.png"


def main() -> None:
    with tempfile.TemporaryDirectory() as workplace:
        home = Path(workplace)
        wr.run(
            {
                "name": "picture",
                "output": str(home / "run"),
                "rounds": 6,
                "local_epochs": 2,
                "batch_size": 4,
                "data": {"phantom": {"hospitals": 3, "size": 48, "cases": 16}},
                "model": {"name": "unet2d", "base_filters": 6, "levels": 3},
                "evaluate": {"metrics": ["dice"], "overlays": 0},
                "optimizer": {"learning_rate": 0.01},
            }
        )
        phantom_files.write(PhantomSettings(size=48, cases=6, hospitals=1), home / "new", "nifti", seed=7)
        scans = sorted((home / "new" / "north" / "images").iterdir())
        found = wr.predict(home / "run", scans)
        best = max(found, key=lambda entry: entry.sizes["lesion"]["voxels"])
        draw(best)


def draw(found: wr.Prediction) -> None:
    image = np.squeeze(nibabel.load(found.scan.files[0]).get_fdata())
    mask = np.squeeze(found.mask)
    panels: list[tuple[str, NDArray[np.generic]]] = [("scan", image), ("mask", image)]
    panels.append(("uncertainty (entropy)", np.squeeze(found.uncertainty["total"])))
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 3.1), layout="constrained")
    for axis, (title, values) in zip(axes, panels, strict=True):
        grey = title in ("scan", "mask")
        shown = axis.imshow(values, cmap="gray" if grey else "magma")
        if title == "mask":
            axis.imshow(np.ma.masked_equal(mask, 0), cmap="autumn", alpha=0.55, vmin=0, vmax=2)
        if not grey:
            figure.colorbar(shown, ax=axis, shrink=0.8, label="nats")
        axis.set_title(title)
        axis.set_axis_off()
    size = found.sizes["lesion"]["mm2"]
    figure.suptitle(f"lesion {size:.0f} mm², uncertainty {found.doubt:.2f}", fontsize=10)
    TARGET.parent.mkdir(exist_ok=True)
    figure.savefig(TARGET, dpi=110)


if __name__ == "__main__":
    main()
