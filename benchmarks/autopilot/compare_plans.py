"""The plan of each data set beside nnU-Net's own.

    python benchmarks/autopilot/compare_plans.py --data DATA [--sets hippocampus ...]

Needs nnunetv2 2.8.1 beside wardround. nnU-Net's planner runs as it is, on a fingerprint of the same training
cases, cropped by its own function. All clients are taken to have a GPU of 24 GB, since nnU-Net plans for one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from wardround.configuring.facts import Facts
from wardround.configuring.measuring import measure_federation
from wardround.configuring.network_rules import list_widths
from wardround.configuring.rules import configure
from wardround.data.checking.facts import read_and_remember
from wardround.data.federation_file import write
from wardround.data.preparing.geometry import find_reorientation, reorient
from wardround.data.proposing.proposal import propose
from wardround.data.serving.loading import RealData
from wardround.data.settings import DataSettings

FOLDERS = ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")  # nnU-Net reads them as variables
SETS = ("hippocampus", "lgg3d", "fundus_odoc", "polyp4")


def ours(facts: Facts) -> dict[str, Any]:
    """Our plan for clients with GPUs."""
    clients = tuple(replace(client, device="cuda", memory=24 * 10**9) for client in facts.clients)
    settings = configure(replace(facts, clients=clients), steps=5000).settings()
    model, data = settings["model"], settings["data"]
    return {
        "spacing": data["prepare"]["spacing"] or [1.0] * facts.dimensions,
        "patch": data["patch"],
        "batch": settings["batch_size"],
        "strides": model["arguments"]["strides"],
        "kernels": model["arguments"]["kernels"],
        "features": list_widths(model["levels"], model["base_filters"], facts.dimensions),
        "dice": settings["objective"]["reduction"],
        "normalise": data["prepare"]["normalise"],
    }


def nnunets(path: Path, facts: Facts) -> dict[str, Any]:
    """nnU-Net's plan for the training cases of a federation.yaml, its axes in our order."""
    from nnunetv2.experiment_planning.experiment_planners import default_experiment_planner as planner
    from nnunetv2.preprocessing.cropping.cropping import crop_to_nonzero

    data = RealData(path, DataSettings())
    shapes, spacings, kept = [], [], []
    for entry in data.listing.entries:
        if entry.split != "train":
            continue
        image, _ = read_and_remember(entry)
        values, spacing = image.data, list(image.spacing)
        if facts.dimensions == 3:
            order, flips = find_reorientation(image.affine, 3, "RAS")
            values = reorient(values, order, flips).transpose(0, 3, 2, 1)
            spacing = [spacing[axis] for axis in order][::-1]
        else:
            values, spacing = values[:, None], [999.0, 1.0, 1.0]
        cropped = crop_to_nonzero(values)[0]
        shapes.append(list(cropped.shape[1:]))
        spacings.append([float(side) for side in spacing])
        kept.append(cropped.size / values.size)
    names = {str(number): channel.name for number, channel in enumerate(facts.channels)}
    about = {
        "channel_names": names,
        "labels": {"background": 0} | {name: number for number, name in enumerate(facts.classes, start=1)},
        "numTraining": len(shapes),
        "file_ending": ".nii.gz",
    }
    fingerprint = {
        "spacings": spacings,
        "shapes_after_crop": shapes,
        "median_relative_size_after_cropping": sorted(kept)[len(kept) // 2],
        "foreground_intensity_properties_per_channel": {},
    }
    raw, made = (Path(os.environ[name]) / "set" for name in FOLDERS[:2])
    for folder in (raw, made):
        folder.mkdir(exist_ok=True)
    (raw / "dataset.json").write_text(json.dumps(about), encoding="utf-8")
    (made / "dataset_fingerprint.json").write_text(json.dumps(fingerprint), encoding="utf-8")
    planner.maybe_convert_to_dataset_name = lambda name: name
    planner.get_filenames_of_train_images_and_targets = lambda *_: {}

    class Planner(planner.ExperimentPlanner):  # type: ignore[misc,name-defined]
        def determine_reader_writer(self) -> type:
            return str

    with contextlib.redirect_stdout(io.StringIO()):
        plans = Planner("set").plan_experiment()
    return summarise(plans, facts.dimensions)


def summarise(plans: dict[str, Any], dimensions: int) -> dict[str, Any]:
    chosen = plans["configurations"]["2d" if dimensions == 2 else "3d_fullres"]
    network = chosen["architecture"]["arch_kwargs"]
    order = [2 - axis for axis in plans["transpose_forward"]] if dimensions == 3 else [0, 1]
    back = [order.index(axis) for axis in range(dimensions)]

    def move(sides: Any) -> list[Any]:
        return [sides[axis] for axis in back]

    return {
        "spacing": [float(side) for side in move(chosen["spacing"])],
        "patch": [int(side) for side in move(chosen["patch_size"])],
        "batch": int(chosen["batch_size"]),
        "strides": [[int(side) for side in move(level)] for level in network["strides"]],
        "kernels": [[int(side) for side in move(level)] for level in network["kernel_sizes"]],
        "features": [int(width) for width in network["features_per_stage"]],
        "dice": "batch" if chosen["batch_dice"] else "per_sample",
        "normalise": chosen["normalization_schemes"][0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name in FOLDERS:
            os.environ[name] = str(Path(scratch) / name)
            Path(os.environ[name]).mkdir()
        for name in given.sets:
            path = Path(scratch) / f"{name}.yaml"
            write(propose([given.data / name]).file, path)
            facts = measure_federation(path)[1]
            mine, theirs = ours(facts), nnunets(path, facts)
            print(f"\n| {name} | wardround | nnU-Net | |\n|---|---|---|---|")
            for row in mine:
                same = "equal" if mine[row] == theirs[row] else ""
                print(f"| {row} | {mine[row]} | {theirs[row]} | {same} |", flush=True)


if __name__ == "__main__":
    main()
