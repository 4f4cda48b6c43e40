"""The pictures of docs/explanation/uncertainty.md, from a finished run of an evidential model on phantoms.

    wardround train quickstart --set method.name=fedevi --set name=fedevi
    python docs/make_uncertainty_pictures.py runs/fedevi

Writes docs/images/uncertainty-maps.png (a scan of a training hospital and one of a hospital no model has
seen) and docs/images/uncertainty-calibration.png (reliability, and risk against coverage).
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from PIL import Image

from wardround.api import Result
from wardround.config_file import load_config
from wardround.data.opening import open_federation
from wardround.files import write_bytes
from wardround.methods import build_objective
from wardround.uncertainty.maps import Accumulator, Predicted, case_uncertainty
from wardround.uncertainty.quality import risk_coverage

matplotlib.use("Agg")
import matplotlib.pyplot as plt

IMAGES = Path(__file__).parent / "images"
BLUE, ORANGE, GREY = "#0f766e", "#b45309", "#9ca3af"


def predicted(result: Result, image: torch.Tensor, temperature: float) -> Predicted:
    scan = Accumulator(build_objective(result.config), temperature=temperature)
    with torch.no_grad():
        scan.add(result.model(image[None])[0])
    return scan.result()


def middle_of(result: Result, hospitals: int, name: str, temperature: float) -> tuple[Any, Any, Predicted]:
    """A test scan of a hospital, of middling uncertainty: image, truth, and what the model says."""
    settings = result.config.model_dump(mode="json")
    settings["data"]["phantom"]["hospitals"] = hospitals
    federation = open_federation(load_config(settings).data, result.config.seed)
    split = federation.load(name).test
    found = []
    for number in range(len(split)):
        batch = split.batch([number])
        if int((batch.label > 0).sum()) > 40:
            said = predicted(result, batch.image[0], temperature)
            found.append((case_uncertainty(said), batch.image[0], batch.label[0], said))
    _, image, truth, said = sorted(found, key=lambda entry: entry[0])[len(found) // 2]
    return image, truth, said


def draw_maps(result: Result, temperature: float, path: Path) -> None:
    known = list(open_federation(result.config.data, result.config.seed).names)
    settings = result.config.model_dump(mode="json")
    settings["data"]["phantom"]["hospitals"] = len(known) + 1
    new = [n for n in open_federation(load_config(settings).data, result.config.seed).names if n not in known]
    rows = [(f"{known[0]} (trained)", len(known), known[0]), (f"{new[0]} (unseen)", len(known) + 1, new[0])]
    figure, axes = plt.subplots(2, 5, figsize=(10, 4.3), layout="constrained")
    for line, (label, hospitals, name) in zip(axes, rows, strict=True):
        image, truth, said = middle_of(result, hospitals, name, temperature)
        line[0].imshow(image[0], cmap="gray")
        line[0].set_ylabel(label)
        line[1].imshow(image[0], cmap="gray")
        line[1].contour(truth > 0, levels=[0.5], colors=[BLUE], linewidths=1.2)
        if bool((said.label > 0).any()):
            line[1].contour(said.label > 0, levels=[0.5], colors=[ORANGE], linewidths=1.2)
        for place, part in enumerate(("total", "aleatoric", "epistemic"), start=2):
            values = said.part(part)  # type: ignore[arg-type]
            limit = {"total": np.log(2), "aleatoric": np.log(2), "epistemic": 0.2}[part]
            if values is not None:
                line[place].imshow(values, cmap="magma", vmin=0, vmax=limit)
        line[2].set_xlabel(f"case uncertainty {case_uncertainty(said):.2f}")
    titles = ("scan", "truth, prediction", "total", "aleatoric", "epistemic")
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title, fontsize=10)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    save(figure, path)


def draw_calibration(found: dict[str, Any], path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    left.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
    for when, label, colour in (("before", "as trained", BLUE), ("after", "with temperature", ORANGE)):
        bins = found["reliability"][when]
        error = found["overall"][when]["ece"]
        left.plot(
            [b["confidence"] for b in bins],
            [b["accuracy"] for b in bins],
            "o-",
            color=colour,
            markersize=4,
            label=f"{label}, ECE {error:.3f}",
        )
    left.set(xlabel="how sure", ylabel="how often right", xlim=(0.45, 1.01), ylim=(0.3, 1.01))
    left.legend(frameon=False, fontsize=9)
    cases = [row for row in found["cases"] if row["dice"] is not None]
    unsure, risk = [row["uncertainty"] for row in cases], [1 - row["dice"] for row in cases]
    lines = (("by uncertainty", unsure, BLUE), ("best possible order", risk, ORANGE))
    for label, order, colour in lines:
        right.plot(*risk_coverage(order, risk), color=colour, label=label)
    right.axhline(float(np.mean(risk)), color=GREY, linestyle="--", linewidth=1, label="any order")
    right.set(xlabel="share of cases kept without a look", ylabel="1 - Dice of those", xlim=(0, 1))
    right.set_ylim(bottom=0)
    right.legend(frameon=False, fontsize=9)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=80, metadata={"Software": None})
    plt.close(figure)
    small = io.BytesIO()
    Image.open(content).convert("RGB").quantize(96).save(small, format="png", optimize=True)
    write_bytes(path, small.getvalue())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="a finished run of an evidential model on phantoms")
    options = parser.parse_args()
    result = Result.load(options.run)
    found = json.loads((options.run / "calibration.json").read_text())
    draw_maps(result, found["temperature"], IMAGES / "uncertainty-maps.png")
    draw_calibration(found, IMAGES / "uncertainty-calibration.png")


if __name__ == "__main__":
    main()
