"""`export`: one function for all kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wardround.errors import ConfigError
from wardround.exporting.bundle import write_bundle
from wardround.exporting.card import write_card
from wardround.exporting.folder import write_folder
from wardround.exporting.onnx import Difference, check_installed, export_onnx
from wardround.exporting.package import MODEL, WEIGHTS, Package
from wardround.exporting.writing import CARD, check_place, whole_folder
from wardround.files import write_json, write_text
from wardround.text import format_size
from wardround.version import __version__

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
    """model.onnx, with the content of model.json inside and beside it."""
    facts = package.as_dict()
    kept = ("made_by", "classes", "values", "channels", "preparation", "params_sha256")
    inside = {key: facts[key] for key in kept} | {
        "temperature": package.temperature,
        "use": "Research use only. This is not a medical device.",
    }
    found = export_onnx(
        folder / "model.onnx",
        package.network,
        package.trained.objective,
        temperature=package.temperature,
        facts=inside,
    )
    write_json(folder / MODEL, facts)
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

```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
probabilities, logits = session.run(None, {{"image": image}})   # image: float32, ({sides})
```

- `image`: prepared as `model.json` says under `preparation`.{stay} Batch and sides are free; the graph pads.
- `probabilities`: {", ".join(preparation.classes)}. Temperature {package.temperature:.4g} is in them.
- `logits`: as the network returns them.
- Volumes larger than the training window are best predicted in overlapping windows, which is up to you.

Checked against PyTorch when it was written, one random batch per size. The limit is wider for an image
within one block of the network, where a norm sees two voxels and magnifies rounding. Avoid that size.

| image | difference of probabilities | of logits (of the largest one, where above 1) | limit |
|---|---:|---:|---:|
{rows}
"""
