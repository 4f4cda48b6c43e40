"""The network a configuration asks for, and how a process computes with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wardround import models
from wardround.config import Config
from wardround.data.federation import Federation
from wardround.data.opening import open_federation
from wardround.data.preparing.record import Preparation
from wardround.data.serving.mirroring import find_mirror_axes
from wardround.engine.checkpoint import Checkpoints
from wardround.methods import build_method, build_objective
from wardround.models import start_weights
from wardround.models.base import Segmenter
from wardround.seeding import seed_everything
from wardround.training.device import Compute, choose, choose_device

TRAIN_SHARE = 0.6  # of a client's cases, about
ENVIRONMENT = "environment.json"  # in the folder of a run


def build_model(config: Config) -> Segmenter:
    """The network this configuration asks for, freshly initialised from the run's seed."""
    return network_for(config, open_federation(config.data, config.seed))


def network_for(config: Config, cases: Federation | Preparation) -> Segmenter:
    """The same, for a federation that is open already, or by what a run wrote down of its cases."""
    objective = build_objective(config)
    objective.check_classes(cases.num_classes)
    find_mirror_axes(config.augmentation.mirror_axes, cases.dimensions)
    seed_everything(config.seed, "init")
    model = models.build(
        config.model,
        in_channels=cases.in_channels,
        num_outputs=objective.num_outputs(cases.num_classes),
        dimensions=cases.dimensions,
    )
    path = config.model.weights  # not needed once it is gone and a checkpoint has what came of it
    if path is not None and (path.exists() or not Checkpoints(config.folder / "checkpoints").exists()):
        model.start_weights = start_weights.load_into(model, path)
    objective.start_model(model)
    build_method(config).start_model(model)
    return model


def choose_compute(
    config: Config,
    federation: Federation,
    names: Sequence[str],
    model: Segmenter | None = None,
    run: Path | None = None,
) -> Compute:
    """How the process that has these clients computes; where there is a GPU, the work ahead is weighed.

    run: folder of the run; what was weighed at its start holds for all its processes, and when it resumes.
    """
    settings = config.compute
    on_gpu = choose_device(settings).type == "cuda"
    shape = training_shape(config, federation) if on_gpu else None
    if shape is None:
        return choose(settings)
    decided = read_decision(run) if run is not None and settings.compile == "auto" else None
    counts = federation.sizes(names).values()
    steps = config.rounds * sum(config.count_steps(int(TRAIN_SHARE * count)) for count in counts)
    network = model or network_for(config, federation)
    if decided is None:
        return choose(settings, network, shape, config.batch_size, steps)
    how, why = decided
    chosen = choose(settings.model_copy(update={"compile": how}), network, shape, config.batch_size, steps)
    return replace(chosen, why=why, weighed=True)


def read_decision(run: Path) -> tuple[str, str] | None:
    """What a run on a GPU chose for `compile: auto` when it began, and why; None where it did not weigh."""
    try:
        facts = json.loads((run / ENVIRONMENT).read_text(encoding="utf-8"))["compute"]
        weighed, how, why = facts["weighed"], facts["compile"], facts["why"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (str(how), str(why)) if weighed and how in ("off", "graphs", "inductor", "full") else None


def training_shape(config: Config, federation: Federation) -> tuple[int, ...] | None:
    """Voxels of what goes through the network in training, where that is known."""
    if config.data.patch is not None:
        return config.data.patch
    seen = federation.summarise_scans() if federation.summarise_scans is not None else None
    return None if seen is None else seen.patch or seen.shape
