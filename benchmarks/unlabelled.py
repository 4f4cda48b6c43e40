"""What hospitals without labels add to one that has them.

    python benchmarks/unlabelled.py polyp4 --data DATA         # kvasir is labelled, three are not
    python benchmarks/unlabelled.py fundus_odoc --data DATA    # papila is labelled, two are not
    python benchmarks/unlabelled.py phantom                    # north is labelled, three are not

DATA holds the folder of the set with its index.csv. The same scans are trained on

    alone           the labelled hospital alone
    mean_teacher    all hospitals by FedAvg, the training labels of the others withheld
    pseudo_labels   the same with the other objective
    labelled        all hospitals by FedAvg, with all labels: what there is to gain

and the model of the last round is scored on the test cases of all hospitals. A number is the mean over
hospitals of the mean Dice of their cases. The gain over `alone` is paired by case, each case with its mean
over seeds; its 95 % interval resamples cases within hospitals.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from wardround.comparison.statistics import CaseKey, average, client_mean, compare_scores
from wardround.config import Config
from wardround.config_file import load_config
from wardround.data.cases import ClientData, TensorSplit, as_stack, blank_label
from wardround.data.federation import Federation
from wardround.data.federation_file import FederationFile, Source, write
from wardround.data.opening import open_federation
from wardround.engine.experiment import Experiment
from wardround.engine.host import Host
from wardround.messages import Message
from wardround.params import Params
from wardround.tables import Table

ARMS = ("alone", "mean_teacher", "pseudo_labels", "labelled")
Scores = dict[CaseKey, float]


def polyp4(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    return real(options, out, {"polyp": (1,)}, {"polyp": (1,)})


def fundus(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    return real(options, out, {"rim": (1,), "cup": (2,)}, {"disc": (1, 2), "cup": (2,)})


def real(options: argparse.Namespace, out: Path, labels: Any, regions: Any) -> dict[str, Any]:
    path = out / f"{options.set}.yaml"
    source = Source(path=(options.data / options.set).resolve())
    file = FederationFile(sources=(source,), labels=labels, regions=regions, cache=out / "cache")
    write(file, path, overwrite=True)
    return {"federation": str(path), "prepare": {"size": [options.size, options.size]}}


def phantom(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    return {"phantom": {"hospitals": 4, "size": options.size, "cases": 60, "seed": 1}}


SETS: dict[str, tuple[Callable[..., dict[str, Any]], str]] = {
    "polyp4": (polyp4, "kvasir"),
    "fundus_odoc": (fundus, "papila"),
    "phantom": (phantom, "north"),
}


def configure(options: argparse.Namespace, out: Path, arm: str, seed: int) -> Config:
    semi = arm in ("mean_teacher", "pseudo_labels")
    objective: dict[str, Any] = {"name": arm if semi else "dice_bce"}
    if semi:
        objective |= {"lam": options.lam, "warmup": options.warmup}
    settings = {
        "name": arm,
        "seed": seed,
        "data": options.make(options, out),
        "rounds": options.rounds,
        "local_steps": options.steps,
        "batch_size": 8,
        "model": {"name": "unet2d", "base_filters": options.filters, "levels": 4},
        "objective": objective,
        "participation": [options.labelled] if arm == "alone" else 1.0,
        "optimizer": {
            "name": "adam",
            "learning_rate": options.rate,
            "momentum": 0.0,
            "state": "keep",
            "schedule": {"name": "polynomial"},
        },
        "output": str(out / f"{arm}-{seed}"),
        "compute": {"workers": 1, "threads": 1},
        "evaluate": {"metrics": ["dice"], "overlays": 0, "every": options.rounds},
    }
    return load_config(settings)


def withhold_labels(federation: Federation, labelled: str) -> Federation:
    """The same training scans; one hospital keeps its labels."""

    def load(name: str) -> ClientData:
        data, none = federation.load_one(name), TensorSplit.of([])
        if name == labelled:
            return data
        cases = as_stack(data.train, "this benchmark")
        blank = torch.stack([blank_label(image) for image in cases.images]).long()
        spacings = [cases.spacing(place) for place in range(len(cases))]
        bare = TensorSplit(cases.names, cases.images, blank, spacings)
        return replace(data, train=bare, val=none, test=none, num_unlabelled=len(bare))

    return replace(federation, load_one=load)


def score(config: Config, params: Params, federation: Federation) -> Scores:
    """Dice of every test case and region."""
    host = Host(config, config.folder / "scored", federation.names, federation=federation)
    found: Scores = {}
    for name in federation.names:
        scalars = {"split": "test", "metrics": ["dice"], "as_sent": True}
        answer = host.run(name, "evaluate", 0, Message(params=params, scalars=scalars))
        if answer.failure is not None:
            raise RuntimeError(answer.failure)
        for row in answer.message.scalars["cases"]:
            for region, values in row["regions"].items():
                found[CaseKey(name, row["case"], region)] = float(values["dice"])
    return found


def summarise(found: dict[str, list[Scores]]) -> Table:
    lines: list[list[Any]] = []
    for arm, own in found.items():
        means = [client_mean(scores) for scores in own]
        line: list[Any] = [arm, statistics.fmean(means), statistics.stdev(means) if len(means) > 1 else 0.0]
        if arm != "alone" and "alone" in found:
            pair = compare_scores(average(own), average(found["alone"]), best=1.0, higher_is_better=True)
            assert pair is not None
            seeds = [a - client_mean(b) for a, b in zip(means, found["alone"], strict=True)]
            line += [pair.difference, f"{pair.interval.low:+.3f} to {pair.interval.high:+.3f}"]
            line.append(", ".join(f"{gain:+.3f}" for gain in seeds))
        lines.append(line + [""] * (6 - len(line)))
    return Table("Dice", ["arm", "Dice", "SD of seeds", "gain", "95 % interval", "gain by seed"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("set", choices=sorted(SETS))
    parser.add_argument("--data", type=Path, help="folder with the set in it")
    parser.add_argument("--labelled", help="the hospital that has labels")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=15, help="local steps of a round")
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--filters", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.003, help="learning rate")
    parser.add_argument("--lam", type=float, default=1.0)
    parser.add_argument("--warmup", type=float, default=0.4)
    parser.add_argument("--json", type=Path, help="also write the Dice of every case there")
    options = parser.parse_args()
    options.make, labelled = SETS[options.set]
    options.labelled = options.labelled or labelled
    if options.set != "phantom" and options.data is None:
        parser.error(f"{options.set} needs --data")

    found: dict[str, list[Scores]] = {arm: [] for arm in options.arms}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for arm in options.arms:
                started = time.perf_counter()
                config = configure(options, Path(folder), arm, seed)
                full = open_federation(config.data, config.seed, config.compute.resident)
                semi = arm in ("mean_teacher", "pseudo_labels")
                used = withhold_labels(full, options.labelled) if semi else full
                params = Experiment(config, federation=used).run(overwrite=True).state.params
                found[arm].append(score(config, params, full))
                dice, seconds = client_mean(found[arm][-1]), time.perf_counter() - started
                print(f"seed {seed}, {arm}: {dice:.3f}, {seconds:.0f} s", flush=True)
    if options.json is not None:
        plain = {a: [{"/".join(k): v for k, v in own.items()} for own in rows] for a, rows in found.items()}
        options.json.write_text(json.dumps(plain))
    print(summarise(found).markdown())


if __name__ == "__main__":
    main()
