"""What the bounds of the gate must not touch: how honest updates differ, in runs of every method.

    python benchmarks/honest_updates.py --data DATA

Trains all methods on synthetic hospitals (five alike, three of very unequal size, two, an SGD with momentum)
and on polyps, with default limits. Prints how many replies were judged and refused, and of each quantity
that the gate bounds the figure of an honest reply that comes nearest to it. --only and --sets choose.
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wardround as wr
from wardround.clients import bounds
from wardround.clients.bounds import Bounds, Change, Sight
from wardround.data.federation_file import FederationFile, Source, write
from wardround.errors import WardroundError
from wardround.methods import METHODS

BATCH = {"name": "unet2d", "base_filters": 4, "levels": 3, "norm": "batch"}
INSTANCE = {"name": "unet2d", "base_filters": 4, "levels": 3}
ADAM, SGD = {"learning_rate": 3e-3}, {"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}


def phantom(*cases: int) -> dict[str, Any]:
    return {"phantom": {"hospitals": len(cases), "size": 32, "cases": list(cases)}}


SETS: dict[str, dict[str, Any]] = {
    "five": {"rounds": 10, "data": phantom(20, 16, 12, 10, 9), "model": BATCH, "optimizer": ADAM},
    "unequal": {
        "rounds": 6,
        "data": phantom(60, 14, 8),
        "model": INSTANCE,
        "optimizer": ADAM,
        "local_epochs": 2,
    },
    "two": {"rounds": 6, "data": phantom(30, 8), "model": BATCH, "optimizer": SGD},
    "momentum": {"rounds": 10, "data": phantom(20, 16, 12, 10, 9), "model": INSTANCE, "optimizer": SGD},
}
COMMON = {
    "batch_size": 4,
    "evaluate": {"metrics": ["dice"], "overlays": 0, "calibrate": False},
    "compute": {"threads": 1, "workers": 1},
}


def polyp4(data: Path, out: Path, rounds: int) -> dict[str, Any]:
    """Four sources of polyps, small and short."""
    path = out / "polyp4.yaml"
    sources = (Source(path=(data / "polyp4").resolve()),)
    write(FederationFile(sources=sources, labels={"polyp": (1,)}), path, overwrite=True)
    return {
        "rounds": rounds,
        "local_steps": 12,
        "batch_size": 8,
        "data": {"federation": str(path), "prepare": {"size": [32, 32], "normalise": "maximum"}},
        "model": BATCH,
        "optimizer": {"learning_rate": 1e-3},
    }


class Extremes:
    """The nearest that honest replies came to each bound: its name -> (share of the bound, where)."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, float, str]] = {}
        self.counts: Counter[str] = Counter()
        self.where = ""

    def note(self, name: str, value: float, share: float) -> None:
        if share > self.found.get(name, (-1.0, 0.0, ""))[0]:
            self.found[name] = (share, value, self.where)

    def watch(self) -> None:
        """Look at what the gate measures, before it judges."""
        judge, complain = Bounds.judge, Bounds._direction_complaint

        def watched(
            gate: Bounds, round: int, replies: Any, sent: Any, changes: Mapping[str, Change]
        ) -> dict[str, str]:
            self.counts["replies"] += len(changes)
            for name, change in changes.items() if len(changes) > 1 else ():
                if change.learned:
                    ratio = gate._ratio(name, changes)
                    self.note("norm, two clients" if len(changes) == 2 else "norm", ratio, ratio)
                for label, norm, reference in gate._parts(name, changes):
                    if reference > 0:
                        kind = "extras" if label.startswith("extras") else "tensor"
                        self.note(kind, norm / reference, norm / reference)
            refused = judge(gate, round, replies, sent, changes)
            self.counts["refused"] += len(refused)
            for name, reason in refused.items():
                print(f"REFUSED {self.where}, round {round + 1}, {name}: {reason}", flush=True)
            return refused

        def weighed(gate: Bounds, sights: list[Sight]) -> str | None:
            weights = [max(sight.agreement, 0.0) for sight in sights[: bounds.JUDGED]]
            if sum(weights) >= bounds.EVIDENCE:
                mean = sum(w * s.cosine for w, s in zip(weights, sights, strict=False)) / sum(weights)
                self.note("cosine", mean, -mean)
            return complain(gate, sights)

        Bounds.judge, Bounds._direction_complaint = watched, weighed  # type: ignore[method-assign, assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="the folder that holds polyp4; without it no polyps")
    parser.add_argument("--out", type=Path, default=Path("runs/honest"))
    parser.add_argument("--only", default=",".join(METHODS), help="methods, with commas")
    parser.add_argument("--sets", default=f"{','.join(SETS)},polyp4")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.data is not None:
        SETS["polyp4"] = polyp4(options.data, options.out, 4)
    extremes, runs = Extremes(), 0
    extremes.watch()
    for chosen in (name for name in options.sets.split(",") if name in SETS):
        for method in options.only.split(","):
            extremes.where = f"{method} on {chosen}"
            settings = {"name": method, **({"proxy": "clients"} if method == "fedlaw" else {})}
            run = {**COMMON, **SETS[chosen], "method": settings, "output": str(options.out / chosen / method)}
            try:
                wr.run(run, overwrite=True)
                runs += 1
            except WardroundError as error:
                print(f"{extremes.where} did not run: {error}", flush=True)
        print(f"{chosen}: {runs} runs so far, {dict(extremes.counts)}", flush=True)
    print(f"\n{runs} runs, {extremes.counts['replies']} replies, {extremes.counts['refused']} refused\n")
    print("| bounded | nearest honest reply | of |\n|---|---:|---|")
    for name, (_, value, where) in sorted(extremes.found.items()):
        print(f"| {name} | {value:.3g} | {where} |")


if __name__ == "__main__":
    main()
