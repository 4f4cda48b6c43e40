"""Evaluating at hospitals: each judges a model on its own labelled cases; nothing is trained.

The folder reads like that of `wardround evaluate`: cases.csv, evaluation.json, report.html. Scores are on the
prepared grid, as in the test of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wardround.clients import Clients
from wardround.config import Config
from wardround.config_file import load_config, resolve
from wardround.data.federation import Federation
from wardround.deploy.agreement import agree_on_federation, check_networks
from wardround.deploy.conducting import check_names, claim, run_id
from wardround.deploy.live_file import Live, announcing
from wardround.deploy.remote import Channel, Remote
from wardround.deploy.survey.conducting import require_agreement
from wardround.deploy.survey.proposals import complete_prepare
from wardround.engine.egress import Egress
from wardround.engine.judging.evaluation import gather
from wardround.engine.judging.result_tables import detect_units
from wardround.engine.networks import network_for
from wardround.engine.records import missing_replies
from wardround.errors import ConfigError, TooFewClients
from wardround.exporting.package import MODEL, WEIGHTS, opened, without_heads
from wardround.messages import Message
from wardround.params import Params
from wardround.prediction.evaluating import (
    PREPARED_GRID,
    EvaluationReport,
    find_held_out,
    write_evaluation,
)
from wardround.prediction.inputs import InputProblem
from wardround.prediction.trained import TrainedModel
from wardround.reporting import write_report
from wardround.yaml_file import apply_override

AT_HOSPITALS = "cases at hospitals"


def load_judged(path: Path) -> TrainedModel:
    """The model of a run folder, or of an exported package with tensors (torch, bundle)."""
    if (path / "config.yaml").exists():
        return TrainedModel.load(path, device="cpu")
    places = ((path, path), (path / "configs", path / "models"))
    for model, weights in ((first / MODEL, second / WEIGHTS) for first, second in places):
        if model.exists() and weights.exists():
            return opened(model, weights)
    raise ConfigError(
        f"{path} holds no model to evaluate. Give the folder of a run, or one that `wardround export --to "
        "torch` or `--to bundle` wrote."
    )


def configure_evaluation(model: TrainedModel, overrides: list[str] | None = None) -> Config:
    """The settings under which hospitals judge a model: its network and how its scans were prepared."""
    plain, preparation = resolve(model.config), model.preparation
    layers_of = without_heads(model)[1]  # of a run; a package has them in its method
    package = not (model.folder / "config.yaml").exists()
    common = {"classes": list(preparation.classes[1:]), "channels": list(preparation.channels)}
    values: dict[str, Any] = {
        key: plain[key] for key in ("seed", "objective", "evaluate", "batch_size", "deadline")
    } | {
        "name": f"{model.name}-evaluated",
        "rounds": 1,
        "min_clients": 1,
        "method": plain["method"] if package else layers_of or {"name": "fedavg"},
        "model": {**plain["model"], "weights": None, "bn_stats": "average"},
        "data": {
            "hospitals": True,
            "common": common,
            "prepare": complete_prepare(preparation.prepare),
            "patch": preparation.patch and list(preparation.patch),
        },
    }
    values["evaluate"] |= {"overlays": 0, "calibrate": False, "cross_site": False}
    for override in overrides or []:
        apply_override(values, override)
    return load_config(values)


def conduct_evaluation(
    channel: Channel,
    config: Config,
    *,
    names: list[str],
    model: Path,
    split: str = "test",
    proposals: Mapping[str, Any] | None = None,
    job: str = "",
) -> EvaluationReport:
    """Have hospitals judge a model; tables and the page land in the folder of the configuration."""
    folder = config.folder
    check_names(names)
    with claim(folder), announcing(Live(folder / "live.json", job=job, rounds=0, run=None)) as live:
        trained = load_judged(model)
        run = run_id(folder, resume=False)
        remote = Remote(channel, config, run=run, names=names, live=live, exchange=folder / "exchange")
        if proposals:
            require_agreement(remote, proposals)
        registered = remote.register()
        federation = agree_on_federation(remote.facts, remote.hospitals)
        check_networks(config, federation, remote.hospitals)
        params = fit_params(config, federation, trained)
        egress = Egress(folder / "egress.jsonl")
        clients = Clients(remote, registered, rounds=1, min_clients=1, on_reply=egress.record)
        egress.begin(1, "test")
        metrics = list(config.evaluate.metrics)
        asked = {"split": split, "metrics": metrics, "as_sent": True}
        replies = clients.ask("evaluate", Message(params=params, scalars=asked), to=clients.names)
        egress.close()
        missing = missing_replies(clients.exchanges)
        troubles = {**missing["refused"], **missing["lost"]}
        if not replies:
            why = "; ".join(f"{who}: {why.rstrip('.')}" for who, why in sorted(troubles.items()))
            raise TooFewClients(f"no hospital evaluated the model. {why}.")
        trained_here = (model / "config.yaml").exists()
        held_out = find_held_out([model], clients.names) if trained_here else set()
        found = gather(replies, metrics)
        done = EvaluationReport(
            folder=folder,
            evaluation=found.set_apart(held_out if held_out < set(clients.names) else ()),
            metrics=tuple(metrics),
            title=f"{trained.name} at {len(replies)} hospitals",
            units=detect_units(federation),
            problems=[InputProblem(who, why) for who, why in sorted(troubles.items())],
            notes=[*describe_seen(split, trained_here, held_out, clients.names), *trained.warnings],
            grid=PREPARED_GRID,
        )
        write_evaluation(done, [trained], data=AT_HOSPITALS, split=split, tta=config.evaluate.tta)
        write_report([folder])
    return done


def fit_params(config: Config, federation: Federation, model: TrainedModel) -> Params:
    """The model's tensors for the network that hospitals build; heads that only training uses stay as new."""
    network = network_for(config, federation)
    everything = Params.of(network)
    for name in everything:
        if name in model.params and model.params.spec(name)[0] != everything.spec(name)[0]:
            raise ConfigError(
                f"the model does not fit the cases of these hospitals: tensor '{name}' is "
                f"{list(model.params.spec(name)[0])} there and {list(everything.spec(name)[0])} here. Look "
                "at channels and classes: wardround survey"
            )
    return everything.updated(model.params.only([name for name in model.params if name in everything]))


def describe_seen(split: str, is_run: bool, held_out: set[str], names: list[str]) -> list[str]:
    """What is known of cases that the model was trained on."""
    if held_out and held_out == set(names):
        return ["No hospital here took part in the training of the run."]
    if split == "test" and is_run:
        return ["Test cases of each hospital, by its own splits."]
    if split == "test":
        return ["Test cases of each hospital, by its own splits; whether the model has seen them is unknown."]
    return [f"Cases ({split}) by each hospital's own splits. The model may have been trained on some."]
