"""What one model loses when every hospital annotates another structure, against cases annotated in full.

    python benchmarks/partial_labels.py                            # four phantom hospitals, one organ each
    python benchmarks/partial_labels.py fundus_odoc --data DATA    # one site outlines discs, one cups
    python benchmarks/partial_labels.py fundus_odoc --data DATA --third-site    # and a third one both

DATA holds `fundus_odoc` with its index.csv. The same scans are trained on

    full        with every structure annotated everywhere
    marginal    each hospital with its own structure; the others count as unknown (`annotates`)
    exclusion   the same with `exclusion: 1`
    condist     the same with `objective: condist`: the received model teaches the other structures
    background  the same labels, but what is not outlined is trained as background, as without `annotates`
    alone       each structure by those who annotate it, without the others: a model of that structure alone

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


def phantom(options: argparse.Namespace, path: Path, annotates: Annotates) -> dict[str, Any]:
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


def fundus(options: argparse.Namespace, path: Path, annotates: Annotates) -> dict[str, Any]:
    file = FederationFile(
        sources=(Source(path=(options.data / "fundus_odoc").resolve()),),
        clients=("g1020", "papila", *(["drishti_gs"] if options.third_site else [])),
        labels={"rim": (1,), "cup": (2,)},
        regions={"disc": (1, 2), "cup": (2,)},
        annotates={name: tuple(names) for name, names in annotates.items()},
        cache=path.parent / "cache",
    )
    write(file, path, overwrite=True)
    side = options.size or 128
    return {
        "data": {"federation": str(path), "prepare": {"size": [side, side]}},
        "model": {"name": "unet2d", "base_filters": options.filters or 16, "levels": 5},
        "batch_size": 8,
        "augmentation": {"flip": 0.5},
    }


# What the first hospital, the second ... annotates; rounds; regions of `region_dice_bce`, where not classes
ORGANS = {"north": ["skull"], "east": ["nuclei"], "south": ["ventricles"], "west": ["lesion"]}
SETS = {
    "phantom": (phantom, 40, ORGANS, []),
    "fundus_odoc": (fundus, 25, {"g1020": ["disc"], "papila": ["cup"]}, [[1, 2], [2]]),
}


def configure(options: argparse.Namespace, out: Path, arm: str, seed: int, *, test: bool = False) -> Config:
    """arm: its name, or `alone-<structure>`."""
    work = {"local_epochs": options.epochs}
    if options.local_steps is not None:
        work = {"local_steps": options.local_steps}
    settings = {
        **options.make(options, out / f"{arm}.yaml", choose_annotates(options, arm)),
        **work,
        "name": arm,
        "seed": seed,
        "rounds": options.rounds,
        "output": str(out / f"{arm}-{seed}"),
        "method": choose_server(options),
        "objective": choose_objective(options, arm),
        "exclusion": 1.0 if arm == "exclusion" else 0.0,
        "optimizer": {
            "name": options.optimizer,
            "learning_rate": options.rate,
            "momentum": options.momentum if options.optimizer == "sgd" else 0.0,
            "state": "keep",
            "schedule": {"name": "constant" if options.server == "adam" else "polynomial"},  # one falls
        },
        "compute": {"workers": 1, "threads": 1},
        "checkpoint": {"every": 100},
        "evaluate": {"metrics": ["dice"], "overlays": 0, "every": options.rounds},
        "min_clients": 1,
    }
    settings["data"]["test"] = test
    return load_config(settings)


def choose_annotates(options: argparse.Namespace, arm: str) -> Annotates:
    """What hospitals annotate; those that are not named annotate everything."""
    if arm == "full":
        return {}
    structure = arm.removeprefix("alone-")
    if structure == arm:
        return dict(options.annotates)
    return {name: [structure] for name in annotators(options, structure)}


def annotators(options: argparse.Namespace, structure: str) -> list[str]:
    third = ["drishti_gs"] if options.third_site else []
    return [*(name for name, own in options.annotates.items() if structure in own), *third]


def choose_objective(options: argparse.Namespace, arm: str) -> dict[str, Any]:
    name = "condist" if arm == "condist" else options.objective
    regions = {"regions": options.regions} if name == "region_dice_bce" and options.regions else {}
    return {"name": name, "reduction": "batch", **regions}


def choose_server(options: argparse.Namespace) -> dict[str, Any]:
    if options.server == "adam":
        adam = {"tau": 1e-6, "bias_correction": True, "decay_power": options.decay_power}
        return {"name": "fedadam", "server_lr": options.server_lr, **adam}
    return {"name": "fedavgm", "server_lr": options.server_lr, "beta": 0.0}  # 1: FedAvg


def forget_annotation(federation: Federation) -> Federation:
    """The same labels, taken as complete."""
    load = federation.load_one
    return replace(federation, load_one=lambda name: replace(load(name), annotation=None))


def train(options: argparse.Namespace, out: Path, arm: str, seed: int) -> dict[str, Params]:
    """Structure -> the model of the last round that is to find it."""
    if arm == "alone":
        each = {name: f"alone-{name}" for name in options.structures}
        return {name: train(options, out, alone, seed)[name] for name, alone in each.items()}
    config = configure(options, out, arm, seed)
    federation = open_federation(config.data, config.seed, config.compute.resident)
    if arm == "background" or arm.startswith("alone-"):
        federation = forget_annotation(federation)
    if arm.startswith("alone-"):
        names = annotators(options, arm.removeprefix("alone-"))
        counts = {name: federation.counts[name] for name in names}
        federation = replace(federation, names=names, counts=counts)
    state = Experiment(config, federation=federation).run(overwrite=True).state
    return dict.fromkeys(options.structures, state.params)


def score(full: Config, models: Mapping[str, Params], options: argparse.Namespace) -> Scores:
    """Structure -> mean Dice at all hospitals, by its model."""
    federation = open_federation(full.data, full.seed, full.compute.resident)
    host = Host(full, full.folder / "scored", federation.names, federation=federation)
    found: Scores = {}
    for structure in options.structures:
        means = []
        for name in federation.names:
            scalars = {"split": options.split, "metrics": ["dice"], "as_sent": True}
            answer = host.run(name, "evaluate", 0, Message(params=models[structure], scalars=scalars))
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
    parser.add_argument(
        "--third-site", action="store_true", help="Drishti-GS, which annotates discs and cups"
    )
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
    parser.add_argument("--objective", choices=["dice_bce", "region_dice_bce"], default="dice_bce")
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate")
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD")
    parser.add_argument("--local-steps", type=int, help="of a round, in place of epochs")
    parser.add_argument("--server", choices=["mean", "adam"], default="mean", help="how the model is moved")
    parser.add_argument("--server-lr", type=float, default=1.0, help="how far the server goes along the mean")
    parser.add_argument(
        "--decay-power", type=float, default=0.9, help="how the rate of a server's Adam falls"
    )
    parser.add_argument("--split", choices=["val", "test"], default="test", help="cases that are scored")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.make, rounds, options.annotates, options.regions = SETS[options.set]
    options.structures = [name for names in options.annotates.values() for name in names]
    options.rounds = options.rounds or rounds
    if options.set == "fundus_odoc" and options.data is None:
        parser.error("fundus_odoc needs --data")
    if options.set == "phantom" and options.third_site:
        parser.error("--third-site is for fundus_odoc")

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            full = configure(options, Path(folder), "full", seed, test=True)
            for arm in options.arms:
                started = time.perf_counter()
                models = train(options, Path(folder), arm, seed)
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
