"""What one model loses when every hospital annotates another structure, against cases annotated in full.

    python benchmarks/partial_labels.py                            # four phantom hospitals, one organ each
    python benchmarks/partial_labels.py fundus_odoc --data DATA    # one site outlines discs, one cups

DATA holds `fundus_odoc` with its index.csv. The same scans are trained on

    full        with every structure annotated everywhere
    marginal    each hospital with its own structure; the others count as unknown (`annotates`)
    exclusion   the same with `exclusion: 1`
    condist     the same with `objective: condist`: the received model teaches the other structures
    background  the same labels, but what is not outlined is trained as background, as without `annotates`
    alone       each structure by the one hospital that annotates it, without the others

and the model of the last round is scored on the test cases of all hospitals, with labels in full (with
`--split val` on validation cases, to choose settings by). A number is the mean over structures of the mean
over hospitals of the mean Dice of their cases.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wardround.config import Config
from wardround.config_file import load_config
from wardround.data.federation import Federation
from wardround.data.federation_file import FederationFile, Source, write
from wardround.data.opening import open_federation
from wardround.engine.experiment import Experiment
from wardround.engine.host import Host
from wardround.messages import Message
from wardround.params import Params
from wardround.tables import Table

ARMS = ("full", "marginal", "exclusion", "condist", "background", "alone")
Annotates = Mapping[str, Sequence[str]]
Scores = dict[str, float]


def phantom(options: argparse.Namespace, out: Path, annotates: Annotates) -> dict[str, Any]:
    made = {
        "hospitals": 4,
        "size": options.size or 48,
        "cases": options.cases,
        "split": options.shares,
        "organs": list(options.structures),
        "heterogeneity": options.heterogeneity,
        "seed": 1,
        "annotates": dict(annotates),
    }
    model = {"name": "unet2d", "base_filters": options.filters or 8, "levels": 4}
    return {"data": {"phantom": made}, "model": model, "batch_size": 8}


def fundus(options: argparse.Namespace, out: Path, annotates: Annotates) -> dict[str, Any]:
    path = out / f"fundus-{'partial' if annotates else 'full'}.yaml"
    file = FederationFile(
        sources=(Source(path=(options.data / "fundus_odoc").resolve()),),
        clients=tuple(options.sites),
        labels={"rim": (1,), "cup": (2,)},
        regions={"disc": (1, 2), "cup": (2,)},
        annotates={name: tuple(names) for name, names in annotates.items()},
        cache=out / "cache",
    )
    write(file, path, overwrite=True)
    side = options.size or 128
    return {
        "data": {"federation": str(path), "prepare": {"size": [side, side]}},
        "model": {"name": "unet2d", "base_filters": options.filters or 16, "levels": 5},
        "batch_size": 8,
        "augmentation": {"flip": 0.5},
    }


SETS = {
    "phantom": (phantom, 40, ("north", "east", "south", "west"), ("skull", "nuclei", "ventricles", "lesion")),
    "fundus_odoc": (fundus, 25, ("g1020", "papila"), ("disc", "cup")),
}


def configure(options: argparse.Namespace, out: Path, arm: str, seed: int, *, test: bool = False) -> Config:
    work = {"local_epochs": options.epochs}
    if options.local_steps is not None:
        work = {"local_steps": options.local_steps}
    settings = {
        **options.make(options, out, {} if arm == "full" else options.annotates),
        **work,
        "name": arm,
        "seed": seed,
        "rounds": options.rounds,
        "output": str(out / f"{arm}-{seed}"),
        "method": {"name": "local"} if arm == "alone" else choose_server(options),
        "objective": {"name": "condist" if arm == "condist" else "dice_bce", "reduction": "batch"},
        "exclusion": 1.0 if arm == "exclusion" else 0.0,
        "optimizer": {
            "name": options.optimizer,
            "learning_rate": options.rate,
            "momentum": 0.9 if options.optimizer == "sgd" else 0.0,
            "state": "keep",
            "schedule": {"name": "polynomial"},
        },
        "compute": {"workers": 1, "threads": 1},
        "checkpoint": {"every": 100},
        "evaluate": {"metrics": ["dice"], "overlays": 0, "every": options.rounds},
    }
    settings["data"]["test"] = test
    return load_config(settings)


def choose_server(options: argparse.Namespace) -> dict[str, Any]:
    if options.server == "adam":
        return {"name": "fedadam", "server_lr": options.server_lr, "tau": 1e-6, "bias_correction": True}
    return {"name": "fedavgm", "server_lr": options.server_lr, "beta": 0.0}  # 1: FedAvg


def forget_annotation(federation: Federation) -> Federation:
    """The same labels, taken as complete."""
    load = federation.load_one
    return replace(federation, load_one=lambda name: replace(load(name), annotation=None))


def train(config: Config, arm: str) -> dict[str, Params]:
    """The model of the last round, of each hospital where it trains alone."""
    federation = open_federation(config.data, config.seed, config.compute.resident)
    if arm == "background":
        federation = forget_annotation(federation)
    state = Experiment(config, federation=federation).run(overwrite=True).state
    if arm != "alone":
        return dict.fromkeys(federation.names, state.params)
    host = Host(config, config.folder / "clients", federation.names, federation=federation)
    asked = Message(params=state.params)
    answers = {name: host.run(name, "personal_model", config.rounds, asked) for name in federation.names}
    return {name: answer.message.extras["model"] for name, answer in answers.items()}


def score(full: Config, models: Mapping[str, Params], options: argparse.Namespace) -> Scores:
    """Structure -> mean Dice at all hospitals, by the model of the hospital that annotates it."""
    federation = open_federation(full.data, full.seed, full.compute.resident)
    host = Host(full, full.folder / "scored", federation.names, federation=federation)
    found: Scores = {}
    for hospital, (structure,) in options.annotates.items():
        means = []
        for name in federation.names:
            scalars = {"split": options.split, "metrics": ["dice"], "as_sent": True}
            answer = host.run(name, "evaluate", 0, Message(params=models[hospital], scalars=scalars))
            if answer.failure is not None:
                raise RuntimeError(answer.failure)
            rows = answer.message.scalars["cases"]
            means.append(statistics.fmean(row["regions"][structure]["dice"] for row in rows))
        found[structure] = statistics.fmean(means)
    return found


def summarise(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> Table:
    """Means over seeds; the difference to full is taken seed by seed."""
    columns = [*options.structures, "mean"]
    by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in options.arms}
    lines: list[list[Any]] = []
    for arm, own in by_arm.items():
        spread = statistics.stdev(row["mean"] for row in own) if len(own) > 1 else 0.0
        pairs = zip(own, by_arm.get("full", own), strict=True)
        gap = statistics.fmean(one["mean"] - other["mean"] for one, other in pairs)
        lines.append([arm, *(statistics.fmean(row[name] for row in own) for name in columns), spread, gap])
    return Table(f"{len(options.seeds)} seeds", ["arm", *columns, "SD of seeds", "against full"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("set", nargs="?", default="phantom", choices=sorted(SETS))
    parser.add_argument("--data", type=Path, help="folder with fundus_odoc in it")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--epochs", type=int, default=2, help="local epochs of a round")
    parser.add_argument("--cases", type=int, default=40, help="of each phantom hospital")
    parser.add_argument("--shares", nargs=3, type=float, default=[0.6, 0.15, 0.25], help="of splits")
    parser.add_argument("--heterogeneity", type=float, default=0.0, help="between phantom hospitals")
    parser.add_argument("--size", type=int)
    parser.add_argument("--filters", type=int)
    parser.add_argument("--optimizer", choices=["adam", "sgd"], default="sgd")
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate")
    parser.add_argument("--local-steps", type=int, help="of a round, in place of epochs")
    parser.add_argument("--server", choices=["mean", "adam"], default="mean", help="how the model is moved")
    parser.add_argument("--server-lr", type=float, default=1.0, help="how far the server goes along the mean")
    parser.add_argument("--split", choices=["val", "test"], default="test", help="cases that are scored")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.make, rounds, options.sites, options.structures = SETS[options.set]
    options.rounds = options.rounds or rounds
    options.annotates = {s: [w] for s, w in zip(options.sites, options.structures, strict=True)}
    if options.set == "fundus_odoc" and options.data is None:
        parser.error("fundus_odoc needs --data")

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            full = configure(options, Path(folder), "full", seed, test=True)
            for arm in options.arms:
                started = time.perf_counter()
                models = train(configure(options, Path(folder), arm, seed), arm)
                found = score(full, models, options)
                seconds = time.perf_counter() - started
                mean = statistics.fmean(found.values())
                rows.append({"seed": seed, "arm": arm, **found, "mean": mean, "seconds": seconds})
                if not options.json:
                    each = ", ".join(f"{name} {dice:.3f}" for name, dice in found.items())
                    print(f"seed {seed}, {arm}: {mean:.3f} ({each}), {seconds:.0f} s", flush=True)
    print(json.dumps(rows) if options.json else summarise(rows, options).markdown())


if __name__ == "__main__":
    main()
