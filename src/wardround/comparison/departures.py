"""Where the runs of a paper's table depart from the paper: what the caption says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wardround.data.settings import DataSettings
from wardround.models import ModelSettings, resolve
from wardround.papers.presets import PaperFederation, get_dotted
from wardround.papers.scaling import Scale
from wardround.text import format_size

WATCHED = {
    "rounds": "rounds",
    "local_epochs": "local epochs",
    "batch_size": "cases a batch",
    "optimizer.learning_rate": "learning rate",
    "model.base_filters": "filters",
    "size": "image size",
    "split": "split",
}
OF_TRAINING = (  # other settings that `--set` may change; the rest changes where and how fast it is computed
    "method", "objective", "exclusion", "model", "optimizer", "augmentation", "local_steps", "participation",
    "model_average", "privacy", "evaluate", "data.prepare", "data.splits",
)  # fmt: skip


class Departures:
    """What differs from the print, over all rows of a table."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}

    def add(
        self, printed: Mapping[str, Any], federation: PaperFederation, settings: Mapping[str, Any]
    ) -> None:
        """One row. printed: its settings in the paper; settings: those of its runs."""
        for key in WATCHED:
            wanted: Any
            ours: Any
            if key in ("size", "split"):
                wanted, ours = compare_data(key, federation, settings)
            elif key == "model.base_filters":
                wanted, ours = count_filters(printed), count_filters(settings)
            else:
                wanted, ours = get_dotted(printed, key), get_dotted(settings, key)
            if wanted is not None and wanted != ours:
                both = self._found.setdefault(key, ({}, {}))
                both[0][str(wanted)] = None
                both[1][str(ours)] = None

    def sentences(self, scale: Scale) -> list[str]:
        """For the caption; nothing where all is as printed."""
        parts = [
            f"{WATCHED[key]} {', '.join(ours)} instead of {', '.join(printed)}"
            for key, (printed, ours) in self._found.items()
        ]
        scaled = [f"Scaled to {scale}."] if scale.shares else []
        if not parts:
            return scaled
        return [*scaled, f"Not as in the paper: {'; '.join(parts)}. Printed numbers are not comparable."]


def describe_overrides(overrides: Sequence[str]) -> list[str]:
    """What `--set` says of the experiment, where no other sentence does.

    >>> describe_overrides(["model.norm = batch", "rounds=3", "compute.threads=1"])
    ['Set otherwise than in the preset: model.norm=batch.']
    """
    pairs = [[part.strip() for part in override.split("=", 1)] for override in overrides]
    said = [
        "=".join(pair)
        for pair in pairs
        if pair[0] not in WATCHED and f"{pair[0]}.".startswith(tuple(f"{name}." for name in OF_TRAINING))
    ]
    return [f"Set otherwise than in the preset: {', '.join(said)}."] if said else []


def count_filters(settings: Mapping[str, Any]) -> int | None:
    return (
        resolve(ModelSettings.read(settings["model"], "model.")).base_filters if "model" in settings else None
    )


def compare_data(
    key: str, federation: PaperFederation, settings: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    """Image size or split of the paper, and of a run."""
    data = DataSettings.read(settings["data"], "data.")
    real = data.federation is not None
    if key == "split":
        shares = (data.splits or {}).get("ratios", federation.split) if real else data.phantom.split
        return format_shares(federation.split), format_shares(shares)
    size = (data.prepare or {}).get("size") if real else data.phantom.shape
    printed = None if federation.size is None else format_size(federation.size)
    return printed, None if size is None else format_size(size)


def format_shares(shares: Any) -> str:
    """
    >>> format_shares((0.7, 0.1, 0.2))
    '70:10:20'
    """
    return ":".join(f"{100 * share:g}" for share in shares)
