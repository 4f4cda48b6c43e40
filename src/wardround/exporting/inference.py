"""inference.json: all that happens between a scan and its mask, as data, for a script without wardround.

    inference.json        preparation, windows, mirror images, what logits mean, classes and their values
    prepare_and_run.py    does it with NumPy, SciPy and onnxruntime; scan_files.py reads and writes

The script's mask is that of `wardround predict` on a CPU. An objective with probabilities of its own that the
script does not know has no script; `rule_of_logits` says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wardround.data.preparing.prepare import MARGIN
from wardround.data.serving.mirroring import find_mirror_axes
from wardround.exporting.package import Package
from wardround.files import jsonable, write_bytes, write_json
from wardround.losses.objective import Objective
from wardround.losses.regions import RegionDiceBCE
from wardround.methods.fedevi import Evidential
from wardround.models.variational import VariationalSegmenter
from wardround.prediction.windows import HUGE_PICTURE, LARGEST_VOLUME, TILE
from wardround.training.inference import OVERLAP
from wardround.uncertainty.maps import sources
from wardround.version import __version__

FORMAT = 1
INFERENCE = "inference.json"
SCRIPT = "prepare_and_run.py"
SCRIPTS = Path(__file__).parent / "standalone"
RESAMPLING = (
    "Linear between voxel centres, smoothed first along axes that shrink (a triangle as wide as two new "
    "voxels): PyTorch's interpolate(mode='bilinear', align_corners=False, antialias=True) along each axis. "
    "The box keeps its extent. Back, each class's probability is resampled likewise and the largest wins."
)
PADDING = "As dark as the darkest voxel of the channel; 0 after zscore_nonzero."


def write_inference(folder: Path, package: Package) -> None:
    """inference.json, and the scripts that follow it."""
    facts = as_inference(package)
    write_json(folder / INFERENCE, facts)
    if facts["logits"] is not None:
        for name in (SCRIPT, "scan_files.py"):
            write_bytes(folder / name, (SCRIPTS / name).read_bytes())


def describe_script(package: Package) -> str:
    """How to run it, for the README."""
    preparation, facts = package.preparation, as_inference(package)
    missing = " ".join(facts["not_carried"])
    if facts["logits"] is None:
        return f"`{INFERENCE}` has every step between a scan and its mask as data. {missing}"
    is_volume = preparation.dimensions == 3 or preparation.settings.slices is not None
    ending = ".nii.gz" if is_volume else ".png"
    scans = preparation.channels if is_volume and len(preparation.channels) > 1 else ["scan"]
    return f"""Scan to mask, without wardround and without PyTorch:

```sh
pip install numpy scipy onnxruntime {"nibabel" if is_volume else "pillow"}
python {SCRIPT} {" ".join(f"{name}{ending}" for name in scans)} mask{ending}
```

The mask is that of `wardround predict` on a CPU. `{INFERENCE}` has every step as data. {missing}"""


def as_inference(package: Package) -> dict[str, Any]:
    rule = rule_of_logits(package.trained.objective, package.network.num_outputs)
    preparation, config = package.preparation, package.trained.config
    facts = {
        "format": FORMAT,
        "made_by": f"wardround {__version__}",
        "use": "Research use only. This is not a medical device.",
        "dimensions": preparation.dimensions,
        "in_channels": preparation.in_channels,
        "channels": preparation.channels,
        "classes": preparation.classes,
        "values": preparation.values,
        "regions": preparation.regions,
        "prepare": {
            **preparation.settings.model_dump(mode="json"),
            "crop_margin": MARGIN,
            "resampling": RESAMPLING,
            "padding": PADDING,
        },
        "windows": {
            "size": package.trained.window,
            "overlap": OVERLAP,
            "weights": "gaussian",
            "sigma": 0.125,  # of the window's side, and the least weight: MONAI's
            "least_weight": 1e-3,
            "huge_picture": HUGE_PICTURE,
            "tile": (TILE, TILE),
            "largest_volume": LARGEST_VOLUME,
        },
        "tta": config.evaluate.tta,
        "mirror_axes": find_mirror_axes(config.augmentation.mirror_axes, preparation.dimensions),
        "logits": rule,
        "temperature": package.temperature,
        "postprocess": config.evaluate.postprocess,
        "not_carried": list(list_missing(package, rule)),
    }
    found: dict[str, Any] = jsonable(facts)
    return found


def rule_of_logits(objective: Objective, num_outputs: int) -> dict[str, Any] | None:
    """How logits become classes and probabilities; None for an objective with a way of its own."""
    if isinstance(objective, Evidential):
        return {
            "kind": "dirichlet",
            "evidence": objective.evidence,
            "cap": objective.cap,
            "cap_kind": objective.cap_kind,
        }
    if isinstance(objective, RegionDiceBCE):
        return {"kind": "sigmoid", "paints": objective.painted(num_outputs)}
    own = type(objective)
    if any(getattr(own, name) is not getattr(Objective, name) for name in ("probabilities", "predict")):
        return None
    return {"kind": "sigmoid", "paints": [1]} if num_outputs == 1 else {"kind": "softmax"}


def list_missing(package: Package, rule: dict[str, Any] | None) -> Iterator[str]:
    """What `wardround predict` gives and the script does not, each in a sentence."""
    objective, network = package.trained.objective, package.network
    if rule is None:
        own = type(objective).__name__
        yield f"There is no {SCRIPT}: objective {own} has its own way from logits to classes."
        return
    kinds = ", ".join(sources(network, objective))
    if package.preparation.lacking:
        yield (
            "The network takes scans that lack channels, which are zeros after normalising; the script "
            "refuses them, `wardround predict` does not."
        )
    yield f"The script gives masks; maps of uncertainty ({kinds}) need `wardround predict`."
    if isinstance(network, VariationalSegmenter) and network.settings.eval_samples > 1:
        yield "The variational stem's draws are those of a CPU; on a GPU, `wardround predict` draws others."
