"""The network a configuration asks for, and how a process computes with it."""

from __future__ import annotations

from collections.abc import Sequence

from wardround import models
from wardround.config import Config
from wardround.data.federation import Federation
from wardround.data.opening import open_federation
from wardround.data.preparing.record import Preparation
from wardround.engine.checkpoint import Checkpoints
from wardround.methods import build_method, build_objective
from wardround.models import start_weights
from wardround.models.base import Segmenter
from wardround.seeding import seed_everything
from wardround.training.device import Compute, choose, choose_device

TRAIN_SHARE = 0.6  # of a client's cases, about


def build_model(config: Config) -> Segmenter:
    """The network this configuration asks for, freshly initialised from the run's seed."""
    return network_for(config, open_federation(config.data, config.seed))


def network_for(config: Config, cases: Federation | Preparation) -> Segmenter:
    """The same, for a federation that is open already, or by what a run wrote down of its cases."""
    objective = build_objective(config)
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
    config: Config, federation: Federation, names: Sequence[str], model: Segmenter | None = None
) -> Compute:
    """How the process that has these clients computes; where there is a GPU, the work ahead is weighed."""
    on_gpu = choose_device(config.compute).type == "cuda"
    shape = training_shape(config, federation) if on_gpu else None
    if shape is None:
        return choose(config.compute)
    counts = federation.sizes(names).values()
    batches = sum(-(-int(TRAIN_SHARE * count) // config.batch_size) for count in counts)
    steps = config.rounds * config.local_epochs * batches
    return choose(config.compute, model or network_for(config, federation), shape, config.batch_size, steps)


def training_shape(config: Config, federation: Federation) -> tuple[int, ...] | None:
    """Voxels of what goes through the network in training, where that is known."""
    if config.data.patch is not None:
        return config.data.patch
    seen = federation.summarise_scans() if federation.summarise_scans is not None else None
    return None if seen is None else seen.patch or seen.shape
