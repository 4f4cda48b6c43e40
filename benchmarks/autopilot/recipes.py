"""Which optimizer, local steps and augmentation the plan should choose: trials on validation cases.

    python benchmarks/autopilot/recipes.py --data DATA --out runs/recipes --jobs 14 --minutes 9
    python benchmarks/autopilot/recipes.py --write          # the README's table from recipes.json

Every set is described and configured as by run.py, then trained with each recipe in place of the plan's own:
optimizer and rate, local steps, augmentation, pooled or federated. Scores of the last round's model, without
mirror images and post-processing, are added to recipes.json. Rules follow the validation cases; test cases
are shown beside them to see whether that choice holds.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from run import QUICKER, Runner, find_commit, read_cases, shared_gpu
from summarise import README, SETS

from wardround.files import write_json

FOUND = Path(__file__).parent / "recipes.json"
MARKS = "<!-- recipes: begin -->", "<!-- recipes: end -->"
SCHEDULE = "clip_norm: 12.0, schedule: {name: polynomial, power: 0.9}, state: keep"
AUGMENTATION = {
    "nnU-Net's": [],
    "none": ["augmentation={flip: 0.0, intensity: 0.0}"],
    "mirror": ["augmentation={flip: 0.0, intensity: 0.0, mirror: 0.5}"],
    "no mirror": ["augmentation.mirror=0.0"],
}
# set, steps of each client, optimizer, rate, local steps, augmentation, method
RECIPES: list[tuple[str, int, str, float, int, str, str]] = [
    (name, steps, optimizer, rate, local, augmentation, method)
    for name, steps in {"hippocampus": 1000, "fundus_odoc": 1000, "lgg3d": 600, "polyp4": 600}.items()
    for optimizer, rate, local, augmentation, method in [
        ("sgd", 0.01, 20, "nnU-Net's", "fedavg"),
        ("sgd", 0.04, 20, "nnU-Net's", "fedavg"),
        ("adam", 0.003, 20, "nnU-Net's", "fedavg"),
        ("adam", 0.003, 10, "nnU-Net's", "fedavg"),
        ("adam", 0.003, 5, "nnU-Net's", "fedavg"),
        ("adam", 0.001, 10, "nnU-Net's", "fedavg"),
        ("adam", 0.001, 10, "mirror", "fedavg"),
        ("adam", 0.001, 10, "none", "fedavg"),
        ("adam", 0.001, 10, "nnU-Net's", "centralised"),
    ]
]
KEYS = ("set", "steps", "optimizer", "rate", "local_steps", "augmentation", "method")


def settings_of(recipe: tuple[str, int, str, float, int, str, str]) -> list[str]:
    _, steps, optimizer, rate, local, augmentation, method = recipe
    momentum = "momentum: 0.99, nesterov: true, weight_decay: 3.0e-5, " if optimizer == "sgd" else ""
    return [
        f"optimizer={{name: {optimizer}, learning_rate: {rate}, {momentum}{SCHEDULE}}}",
        *(
            f"rounds={steps // local}",
            f"local_steps={local}",
            f"evaluate.every={max(1, steps // local // 2)}",
        ),
        *(f"method={{name: {method}}}", *(["min_clients=1"] if method == "centralised" else [])),
        *("evaluate.tta=false", "evaluate.postprocess=[]", *AUGMENTATION[augmentation]),
    ]


def train(runner: Runner, recipe: tuple[str, int, str, float, int, str, str]) -> dict[str, Any] | None:
    name, label = recipe[0], "-".join(str(part).replace(" ", "") for part in recipe[1:])
    folder = runner.work(name) / label
    alone = ["compute.workers=1", "compute.threads=1", f"output={folder}"]
    words = [w for setting in [*alone, *QUICKER, *settings_of(recipe)] for w in ("--set", setting)]
    line = ["train", str(runner.work(name) / "run.yaml"), *words, "--overwrite", "--no-report", "--quiet"]
    if time.monotonic() > runner.end or runner.call(name, label, "wardround", *line) is None:
        return None
    records = [json.loads(text) for text in (folder / "records.jsonl").read_text().splitlines()]
    last = [record["validation"] for record in records if record.get("validation")][-1]
    cases = read_cases(folder / "cases.csv", runner.data / name)
    scores = {"validation": last["dice"]["mean"], "test": sum(case["dice"] for case in cases) / len(cases)}
    print(name, label, scores, flush=True)
    return {**dict(zip(KEYS, recipe, strict=True)), **scores, "commit": find_commit()}


def write_table() -> None:
    """The best first, set by set."""
    found = json.loads(FOUND.read_text())
    lines = ["| " + " | ".join(KEYS[:1]) + " | steps of each client | optimizer | rate | local steps "
             "| augmentation | method | validation | test |", "|" + "---|" * 9]  # fmt: skip
    for name in SETS:
        own = sorted((row for row in found if row["set"] == name), key=lambda row: -row["validation"])
        for row in own:
            scores = f"{row['validation']:.4f} | {row['test']:.4f}"
            lines.append(f"| {' | '.join(str(row[key]) for key in KEYS)} | {scores} |")
    before, rest = README.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    README.write_text("\n".join([f"{before}{MARKS[0]}", *lines, f"{MARKS[1]}{after}"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--minutes", type=float, default=600.0, help="for everything")
    parser.add_argument("--write", action="store_true", help="write the README's table, train nothing")
    options = parser.parse_args()
    if options.write:
        return write_table()
    steps = dict.fromkeys(SETS, 4000)
    vars(options).update(parts=["federated"], steps=steps, results=options.out, set=[], most=None)
    runner = Runner(options)
    with shared_gpu(options.jobs), ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(runner.set_up, SETS))
        found = [row for row in pool.map(lambda recipe: train(runner, recipe), RECIPES) if row]
    write_json(FOUND, [*json.loads(FOUND.read_text()), *found] if FOUND.exists() else found)
    return None


if __name__ == "__main__":
    main()
