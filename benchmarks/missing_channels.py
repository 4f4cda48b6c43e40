"""What one model loses when every hospital lacks another channel, against hospitals that have all of them.

    python benchmarks/missing_channels.py                           # three phantom hospitals, three channels
    python benchmarks/missing_channels.py --arms full dropout       # without the ways that were not taken
    python benchmarks/missing_channels.py fundus_odoc --data DATA   # photographs: red, green, blue

DATA holds `fundus_odoc` with its index.csv. The same scans are trained on by FedAvg

    full        with every channel everywhere
    zeros       each hospital without one channel, another at each; what is absent is zeros
    dropout     the same, and channels are dropped at random in training: what wardround does
    flags       dropout, with an input more for each channel that says whether it is there
    stand_in    dropout, with a learned number for each channel in place of zeros

and the model of the last round is scored on the test cases of all hospitals: with all channels, with what
each hospital has, and with every subset. A number is the mean over structures of the mean over hospitals.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wardround.config import Config
from wardround.config_file import load_config
from wardround.data.cases import TensorSplit, as_stack
from wardround.data.federation import Federation
from wardround.data.federation_file import FederationFile, Source, write
from wardround.data.opening import open_federation
from wardround.data.serving.augment import DROP_CHANNELS
from wardround.engine.experiment import Experiment
from wardround.engine.host import Host
from wardround.messages import Message
from wardround.models.foreign_networks import give_network
from wardround.models.unet import unet2d
from wardround.params import Params
from wardround.tables import Table

NETWORKS = {"flags": "Flagged", "stand_in": "StoodIn"}
ARMS = ("full", "zeros", "dropout", *NETWORKS)
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided quantile of Student's t, by number of seeds
Places = tuple[int, ...]


class Flagged(nn.Module):
    """A U-Net that is told by a constant plane a channel which are there."""

    def __init__(self, in_channels: int, num_outputs: int, width: int) -> None:
        super().__init__()
        self.net = unet2d(in_channels=2 * in_channels, num_outputs=num_outputs, base_filters=width, levels=4)

    def forward(self, x: Tensor) -> Tensor:
        is_there = x.flatten(2).any(dim=2)[:, :, None, None].to(x)
        result: Tensor = self.net(torch.cat([x, is_there.expand_as(x)], dim=1))
        return result


class StoodIn(nn.Module):
    """A U-Net that sees a learned number where a channel is absent."""

    def __init__(self, in_channels: int, num_outputs: int, width: int) -> None:
        super().__init__()
        self.stand_in = nn.Parameter(torch.zeros(in_channels))
        self.net = unet2d(in_channels=in_channels, num_outputs=num_outputs, base_filters=width, levels=4)

    def forward(self, x: Tensor) -> Tensor:
        absent = ~x.flatten(2).any(dim=2)[:, :, None, None]
        result: Tensor = self.net(x + absent * self.stand_in[None, :, None, None])
        return result


def phantom(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    made = {
        "hospitals": 3,
        "channels": 3,
        "size": options.size or 48,
        "cases": options.cases,
        "organs": ["skull", "nuclei", "ventricles", "lesion"],
        "heterogeneity": options.heterogeneity,
        "seed": 1,
    }
    return {"phantom": made}


def fundus(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    path = out / "fundus.yaml"
    file = FederationFile(
        sources=(Source(path=(options.data / "fundus_odoc").resolve()),),
        clients=tuple(options.sites),
        labels={"rim": (1,), "cup": (2,)},
        regions={"disc": (1, 2), "cup": (2,)},
        cache=out / "cache",
    )
    write(file, path, overwrite=True)
    side = options.size or 64
    return {"federation": str(path), "prepare": {"size": [side, side]}}


SETS = {
    "phantom": (phantom, ("north", "east", "south"), ("skull", "nuclei", "ventricles", "lesion")),
    "fundus_odoc": (fundus, ("drishti_gs", "g1020", "papila"), ("disc", "cup")),
}


def configure(options: argparse.Namespace, out: Path, arm: str, seed: int) -> Config:
    model: dict[str, Any] = {"name": "unet2d", "base_filters": options.filters, "levels": 4}
    if arm in NETWORKS:
        name = give_network(globals()[NETWORKS[arm]])
        model = {"name": name, "arguments": {"width": options.filters}, "divisor": 8}
    return load_config(
        {
            "data": options.make(options, out),
            "model": model,
            "name": arm,
            "seed": seed,
            "rounds": options.rounds,
            "local_epochs": options.epochs,
            "batch_size": 8,
            "output": str(out / f"{arm}-{seed}"),
            "method": {"name": "fedavg"},
            "objective": {"name": "dice_bce", "reduction": "batch"},
            "optimizer": {
                "name": "sgd",
                "learning_rate": options.rate,
                "momentum": 0.9,
                "state": "keep",
                "schedule": {"name": "polynomial"},
            },
            "augmentation": {"drop_channels": choose_dropout(arm, options)},
            "compute": {"workers": 1, "threads": 1},
            "evaluate": {"metrics": ["dice"], "overlays": 0, "every": options.rounds},
        }
    )


def choose_dropout(arm: str, options: argparse.Namespace) -> float | None:
    return {"full": None, "zeros": 0.0}.get(arm, options.drop)


def keep_channels(federation: Federation, kept: Callable[[str], Places]) -> Federation:
    """The same cases with zeros in the other channels."""
    load = federation.load_one

    def load_one(name: str) -> Any:
        data = load(name)
        return replace(
            data, **{part: mask(getattr(data, part), kept(name)) for part in ("train", "val", "test")}
        )

    return replace(federation, load_one=load_one)


def mask(split: Any, kept: Places) -> TensorSplit:
    stack = as_stack(split, "the benchmark")
    if not len(stack):
        return stack
    images = torch.zeros_like(stack.images)
    images[:, list(kept)] = stack.images[:, list(kept)]
    spacings = [stack.spacing(number) for number in range(len(stack))]
    return TensorSplit(stack.names, images, stack.labels, spacings)


def score(config: Config, federation: Federation, params: Params, structures: Sequence[str]) -> float:
    host = Host(config, config.folder / "scored", federation.names, federation=federation)
    means = []
    for name in federation.names:
        scalars = {"split": "test", "metrics": ["dice"], "as_sent": True}
        answer = host.run(name, "evaluate", 0, Message(params=params, scalars=scalars))
        if answer.failure is not None:
            raise RuntimeError(answer.failure)
        rows = answer.message.scalars["cases"]
        means += [statistics.fmean(row["regions"][what]["dice"] for row in rows) for what in structures]
    return statistics.fmean(means)


def measure(config: Config, arm: str, options: argparse.Namespace) -> dict[str, float]:
    """Mean Dice with all channels, with what each hospital has, and with every subset."""
    whole = open_federation(config.data, config.seed, config.compute.resident)
    every = range(whole.in_channels)
    lacks = {name: number % whole.in_channels for number, name in enumerate(options.sites)}

    def own(name: str) -> Places:
        return tuple(place for place in every if place != lacks[name])

    trained = whole if arm == "full" else keep_channels(whole, own)
    params = Experiment(config, federation=trained).run(overwrite=True).state.params
    subsets = [places for size in (2, 1) for places in itertools.combinations(every, size)]
    return {
        "all": score(config, whole, params, options.structures),
        "own": score(config, keep_channels(whole, own), params, options.structures),
        **{
            "+".join(map(str, places)): score(
                config, keep_channels(whole, lambda _, places=places: places), params, options.structures
            )
            for places in subsets
        },
    }


def summarise(rows: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> Table:
    """Means over seeds; differences to full are taken seed by seed, with their 95 % interval."""
    columns = [name for name in rows[0] if name not in ("seed", "arm", "seconds")]
    by_arm = {arm: [row for row in rows if row["arm"] == arm] for arm in arms}
    lines: list[list[Any]] = []
    for arm, own in by_arm.items():
        cells: list[Any] = [statistics.fmean(row[name] for row in own) for name in columns]
        for name in ("all", "own"):
            pairs = zip(own, by_arm.get("full", own), strict=True)
            gaps = [one[name] - other["all"] for one, other in pairs]
            half = T_95[len(gaps)] * statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
            cells.append(f"{statistics.fmean(gaps):+.3f} ± {half:.3f}")
        lines.append([arm, *cells])
    heads = ["arm", *columns, "all against full", "own against full"]
    return Table(f"{len(by_arm[arms[0]])} seeds", heads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("set", nargs="?", default="phantom", choices=sorted(SETS))
    parser.add_argument("--data", type=Path, help="folder with fundus_odoc in it")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--epochs", type=int, default=3, help="of a round")
    parser.add_argument("--cases", type=int, default=40, help="of each phantom hospital")
    parser.add_argument("--heterogeneity", type=float, default=0.0, help="between phantom hospitals")
    parser.add_argument("--size", type=int)
    parser.add_argument("--filters", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.2, help="learning rate")
    parser.add_argument("--drop", type=float, default=DROP_CHANNELS, help="chance of dropping a channel")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.make, options.sites, options.structures = SETS[options.set]
    if options.set == "fundus_odoc" and options.data is None:
        parser.error("fundus_odoc needs --data")

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed, arm in itertools.product(options.seeds, options.arms):
            started = time.perf_counter()
            found = measure(configure(options, Path(folder), arm, seed), arm, options)
            seconds = time.perf_counter() - started
            rows.append({"seed": seed, "arm": arm, **found, "seconds": seconds})
            if not options.json:
                shown = ", ".join(f"{name} {value:.3f}" for name, value in found.items())
                print(f"seed {seed}, {arm}: {shown}; {seconds:.0f} s", flush=True)
    print(json.dumps(rows) if options.json else summarise(rows, options.arms).markdown())


if __name__ == "__main__":
    main()
