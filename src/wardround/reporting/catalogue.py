"""Lists and cards of methods, objectives and networks, written from the classes themselves."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from wardround.methods import METHODS, OBJECTIVES
from wardround.models import MODELS, ModelSettings, resolve
from wardround.models.base import Segmenter
from wardround.models.measure import (
    Costs,
    costs,
    features_text,
    fedbn_text,
    fedma_text,
    fedper_text,
    norm_layers,
    sketch,
)
from wardround.models.start_weights import Match
from wardround.tables import Table
from wardround.text import format_size

FULL = "every client in every round; with fewer the absent keep their weight, and the run warns"


def method_list() -> Table:
    rows = []
    for name, kind in METHODS.items():
        paper = f"{kind.paper} {kind.year}".strip() if kind.year else kind.paper
        needs, secure = ", ".join(sorted(kind.needs)) or "-", "yes" if kind.secure_sum else "no"
        rows.append([name, kind.title, paper, kind.kind, kind.sends, needs, secure])
    columns = ["name", "method", "paper", "kind", "sends beyond the model", "needs", "secure sum"]
    return Table("Methods", columns, rows)


def method_card(name: str) -> Table:
    kind = METHODS[name]
    return card(
        f"{kind.title} ({name})",
        kind,
        {
            "paper": f"{kind.paper} {kind.year or ''}".strip(),
            "link": kind.link,
            "kind": kind.kind,
            "sends beyond the model": kind.sends,
            "names in its replies": ", ".join(sorted(kind.up)),
            "needs": ", ".join(sorted(kind.needs - {"full"})),
            "made for": FULL if "full" in kind.needs else "",
            "works under secure summation": "yes"
            if kind.secure_sum
            else f"no: {kind.needs_each_model}".rstrip(": "),
            "default objective": kind.objective,
        },
    )


def objective_list() -> Table:
    rows = [
        [name, kind.title, kind.paper or "-", ", ".join(sorted(kind.needs)) or "-"]
        for name, kind in OBJECTIVES.items()
    ]
    return Table("Objectives", ["name", "objective", "paper", "needs"], rows)


def objective_card(name: str) -> Table:
    kind = OBJECTIVES[name]
    return card(f"{kind.title} ({name})", kind, {"paper": kind.paper})


def card(title: str, kind: type[Any], facts: dict[str, str]) -> Table:
    """What it is, then its settings with types and defaults."""
    rows = [["what it does", first_line(kind)], *([key, value] for key, value in facts.items() if value)]
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        rows.append([f"setting {field.name}", f"{field.default!r} ({readable(hints[field.name])})"])
    return Table(title, ["", title], rows)


def first_line(kind: type[Any]) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def readable(hint: Any) -> str:
    """A type as a reader would say it.

    >>> readable(float), readable(int | None)
    ('float', 'int | None')
    """
    choices = getattr(hint, "__args__", ())
    if str(hint).startswith("typing.Literal"):
        return " | ".join(str(choice) for choice in choices)
    return getattr(hint, "__name__", None) or str(hint).replace("typing.", "")


# Networks


SIZES = {2: (256, 256), 3: (128, 128, 128)}  # where the user gives none
OTHERS = "Further networks: monai:NAME (any of MONAI's), package.module:Class (your own)."


@dataclass(frozen=True)
class Measured:
    """A network and what it costs for one image of this size."""

    settings: ModelSettings
    model: Segmenter
    size: tuple[int, ...]
    costs: Costs


def measure(settings: ModelSettings, size: Sequence[int], channels: int, outputs: int) -> Measured:
    model = sketch(settings, in_channels=channels, num_outputs=outputs, dimensions=len(size))
    return Measured(settings, model, tuple(size), costs(model, size))


def network_list(size: Sequence[int] | None, channels: int, outputs: int) -> Table:
    """Our networks, each for images or volumes of this size; one row for each where it can be both."""
    rows = []
    for name, info in MODELS.items():
        for dimensions in info.dimensions:
            if size is not None and dimensions != len(size):
                continue
            chosen = SIZES[dimensions] if size is None else size
            found = measure(ModelSettings(name=name), chosen, channels, outputs)
            known = [name, info.title, f"{dimensions}D", format_size(chosen)]
            measured = [found.costs.parameters, round(found.costs.flops / 1e9, 1)]
            rows.append([*known, *measured, norm_text(found.model), features_text(found.model)])
    caption = (
        f"Channels in: {channels}, out: {outputs}. GFLOPs: of one forward pass of one image, a "
        f"multiplication and an addition counted as two. {OTHERS}"
    )
    columns = ["name", "network", "data", "size", "parameters", "GFLOPs", "norm layers", "features"]
    return Table("Models", columns, rows, caption=caption)


def network_facts(found: Measured) -> dict[str, Any]:
    """Everything about one network, for people and programs."""
    name, model, cost = found.settings.name, found.model, found.costs
    info = MODELS.get(name)
    settings = resolve(found.settings)
    facts: dict[str, Any] = {"name": name}
    if info is not None:
        facts |= {"network": info.title, "paper": info.paper}
    facts |= {
        "data": f"{model.dimensions}D",
        "size": format_size(found.size),
        "seen by the network as": format_size(cost.padded),
        "channels in": model.in_channels,
        "channels out": model.num_outputs,
        "parameters": cost.parameters,
        "GFLOPs, forward": round(cost.flops / 1e9, 2),
        "activations kept in training, MiB": round(cost.kept_bytes / 2**20, 1),
        "training with Adam, one image, MiB": round(cost.training_bytes / 2**20, 1),
        "norm layers": norm_text(model),
        "features": features_text(model),
        "FedBN": fedbn_text(model),
        "FedMA": fedma_text(model),
        "FedPer": fedper_text(model),
    }
    if info is not None:
        for key, parameter in info.parameters.items():
            place = key if key in ModelSettings.model_fields else f"arguments.{key}"
            value = getattr(settings, key, None) if key in ModelSettings.model_fields else None
            value = settings.arguments.get(key, parameter.default) if value is None else value
            facts[f"model.{place}"] = value
    else:
        facts |= {f"model.arguments.{key}": value for key, value in settings.arguments.items()}
    return facts


def facts_table(facts: dict[str, Any]) -> Table:
    rows = [
        [key, f"{value:,}" if isinstance(value, int | float) else str(value)] for key, value in facts.items()
    ]
    return Table(str(facts["name"]), ["", str(facts["name"])], rows)


def parts_table(found: Measured) -> Table:
    rows = [
        [part.name, format_size(part.shape[1:]), part.parameters, round(part.flops / 1e9, 2)]
        for part in found.costs.parts
    ]
    caption = (
        "Parts in the order they run; shapes are channels x voxels. Memory: float32, nothing recomputed."
    )
    return Table("Parts", ["part", "gives", "parameters", "GFLOPs"], rows, caption=caption)


def weights_table(match: Match) -> Table:
    """Every tensor of the network: where its start comes from."""
    rows = [[name, f"taken: {source}"] for name, source in match.taken.items()]
    rows += [[name, f"random: {reason}"] for name, reason in match.left.items()]
    unused = f" Unused in the file: {len(match.unused)}." if match.unused else ""
    return Table("Start weights", ["tensor", "start"], rows, caption=f"{match.sentence()}.{unused}")


def norm_text(model: Segmenter) -> str:
    """
    >>> from wardround.models.unet import unet2d
    >>> norm_text(unet2d(in_channels=1, num_outputs=1, base_filters=2, levels=2))
    '6 instance'
    """
    return ", ".join(f"{count} {kind}" for kind, count in norm_layers(model).items()) or "none"
