"""The peer: nnU-Net 2.8.1 on the pooled cases of a set, with the set's own split and a given number of steps.

    python benchmarks/autopilot/nnunet_train.py prepare --data DATA/hippocampus --work WORK
    python benchmarks/autopilot/nnunet_train.py train --data DATA/hippocampus --work WORK --steps 5000

`prepare` writes the raw format, the fingerprint and the plan of the default planner, and preprocesses its
best single configuration (3d_fullres, else 2d); the plan is made from training cases alone, as ours is.
`train` is the official trainer with its own learning rate, augmentation and deep supervision; only its epochs
are shorter where there are fewer than 5,000 steps, kernels are not compiled and no checkpoint is written.
Test cases are predicted with mirroring and overlapping windows, as nnU-Net does, on their own grid, and
scored by wardround's Dice. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

DATASET = 501
EPOCHS = 20  # at least, as the learning rate falls from epoch to epoch
ITERATIONS = 250  # of an epoch of nnU-Net
LEAST_SHARED = 2**30  # bytes; with less, batches are loaded in the training process itself


def read_rows(data: Path) -> list[dict[str, str]]:
    """The cases of index.csv, of centres that have training cases."""
    with (data / "index.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    training = {row["centre"] for row in rows if row["split"] == "train"}
    return [row for row in rows if row["centre"] in training]


def name_case(row: dict[str, str]) -> str:
    return f"{row['centre']}__{row['stem']}"


def find_file(folder: Path, stem: str) -> Path:
    return next(path for path in folder.iterdir() if path.name.partition(".")[0] == stem)


def convert(data: Path, raw: Path) -> None:
    """The set in nnU-Net's raw format; pictures as PNG, since it reads no JPEG."""
    from PIL import Image

    rows = read_rows(data)
    values: set[int] = set()
    for row in rows:
        part = "Ts" if row["split"] == "test" else "Tr"
        image = find_file(data / row["centre"] / "images", row["stem"])
        label = find_file(data / row["centre"] / "labels", row["stem"])
        ending = ".nii.gz" if image.name.endswith(".nii.gz") else ".png"
        places = raw / f"images{part}" / f"{name_case(row)}_0000{ending}", raw / f"labels{part}"
        for place in (places[0].parent, places[1]):
            place.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(label, places[1] / f"{name_case(row)}{ending}")
        if ending == ".png":
            Image.open(image).convert("RGB").save(places[0], compress_level=1)
            values |= set(np.unique(np.asarray(Image.open(label))).tolist())
        else:
            shutil.copyfile(image, places[0])
    is_volume = ending == ".nii.gz"
    if is_volume:
        values = count_classes(raw / "labelsTr")
    facts = {
        "channel_names": {"0": "MRI"} if is_volume else {"0": "R", "1": "G", "2": "B"},
        "labels": {"background": 0} | {f"class_{value}": value for value in sorted(values) if value},
        "numTraining": sum(row["split"] == "train" for row in rows),
        "file_ending": ending,
        "overwrite_image_reader_writer": "NibabelIO" if is_volume else "NaturalImage2DIO",
    }
    own = [name_case(row) for row in rows if row["split"] == "train"]
    planned = {
        name: {"images": [f"imagesTr/{name}_0000{ending}"], "label": f"labelsTr/{name}{ending}"}
        for name in own
    }
    # The plan is made from training cases alone, as ours; then all cases are preprocessed.
    (raw / "dataset.json").write_text(json.dumps({**facts, "dataset": planned}))
    (raw / "dataset_all.json").write_text(json.dumps(facts))


def count_classes(labels: Path) -> set[int]:
    import nibabel

    found: set[int] = set()
    for path in sorted(labels.iterdir()):
        found |= set(np.unique(np.asarray(nibabel.load(path).dataobj)).astype(int).tolist())
    return found


def set_paths(work: Path, processes: int) -> int:
    """Tell nnU-Net and its children through the environment; how many children load batches."""
    for name in ("raw", "preprocessed", "results"):
        (work / name).mkdir(parents=True, exist_ok=True)
        os.environ[f"nnUNet_{name}"] = str((work / name).resolve())
    os.environ.setdefault("nnUNet_compile", "f")
    shared = Path("/dev/shm")  # where loading processes hand over their batches
    loading = processes if shared.exists() and shutil.disk_usage(shared).free > LEAST_SHARED else 0
    os.environ |= {"nnUNet_n_proc_DA": str(loading), "nnUNet_def_n_proc": str(processes)}
    os.environ["OMP_NUM_THREADS"] = "1"
    return loading


def prepare(data: Path, work: Path, processes: int) -> dict[str, Any]:
    """Raw format, fingerprint, plan, preprocessed cases."""
    from nnunetv2.experiment_planning import plan_and_preprocess_api as api
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    started = time.perf_counter()
    name = f"Dataset{DATASET}_{data.name}"
    shutil.rmtree(work / "raw" / name, ignore_errors=True)
    convert(data, work / "raw" / name)
    api.extract_fingerprints([DATASET], num_processes=processes, verbose=False, show_progress_bar=False)
    api.plan_experiments([DATASET])
    folder = work / "preprocessed" / name
    for place in (work / "raw" / name, folder):
        shutil.copyfile(work / "raw" / name / "dataset_all.json", place / "dataset.json")
    manager = PlansManager(str(folder / "nnUNetPlans.json"))
    chosen = choose_configuration(manager.available_configurations)
    preprocessor = manager.get_configuration(chosen).preprocessor_class(verbose=False)
    preprocessor.show_progress_bar = False
    preprocessor.run(DATASET, chosen, "nnUNetPlans", num_processes=processes)
    rows = read_rows(data)
    split = {part: [name_case(row) for row in rows if row["split"] == part] for part in ("train", "val")}
    (folder / "splits_final.json").write_text(json.dumps([split]))
    facts = {"configuration": chosen, "seconds": time.perf_counter() - started}
    (work / "prepared.json").write_text(json.dumps(facts))
    return facts


def choose_configuration(available: Any) -> str:
    return "3d_fullres" if "3d_fullres" in available else "2d"


def count_epochs(steps: int) -> tuple[int, int]:
    """Epochs and iterations of each, together the steps asked for or, where these do not divide, a few more.

    >>> count_epochs(5000), count_epochs(1000), count_epochs(20000)
    ((20, 250), (20, 50), (80, 250))
    """
    iterations = min(ITERATIONS, -(-steps // EPOCHS))
    return -(-steps // iterations), iterations


def train(
    data: Path, work: Path, *, steps: int, seed: int, device: str, most: int | None = None
) -> dict[str, Any]:
    """Train, predict the test cases, score them."""
    import torch
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    started = time.perf_counter()
    chosen = json.loads((work / "prepared.json").read_text())["configuration"]
    os.environ |= {"nnUNet_results": str((work / "results" / f"seed{seed}").resolve())}
    folder = work / "preprocessed" / f"Dataset{DATASET}_{data.name}"
    np.random.seed(seed)
    torch.manual_seed(seed)
    if device == "cuda":
        torch.backends.cudnn.benchmark = True  # as nnUNetv2_train does
    plans = json.loads((folder / "nnUNetPlans.json").read_text())
    plans["continue_training"] = False
    dataset = json.loads((folder / "dataset.json").read_text())
    trainer = nnUNetTrainer(plans, chosen, 0, dataset, torch.device(device))
    trainer.num_epochs, trainer.num_iterations_per_epoch = count_epochs(steps)
    trainer.num_val_iterations_per_epoch = max(1, trainer.num_iterations_per_epoch // 5)
    trainer.disable_checkpointing = True
    trainer.run_training()
    trained = time.perf_counter() - started
    begun, ended = (trainer.logger.get_value(f"epoch_{edge}_timestamps", None) for edge in ("start", "end"))
    epochs = [end - begin for begin, end in zip(begun, ended, strict=True)]
    cases = predict(trainer, data, work / "raw" / folder.name, most)
    return {
        "cases": cases,
        "steps": trainer.num_epochs * trainer.num_iterations_per_epoch,
        "batch_size": trainer.batch_size,
        "configuration": chosen,
        "seconds": {
            "train": trained,
            "test": time.perf_counter() - started - trained,
            "epochs": [round(seconds, 3) for seconds in epochs],
        },
    }


def predict(trainer: Any, data: Path, raw: Path, most: int | None) -> list[dict[str, Any]]:
    """Dice of every test case, mean over its classes."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    trainer.set_deep_supervision_enabled(False)
    trainer.network.eval()
    on_gpu = trainer.device.type == "cuda"
    predictor = nnUNetPredictor(
        device=trainer.device, perform_everything_on_device=on_gpu, allow_tqdm=False, verbose=False
    )
    predictor.manual_initialization(
        trainer.network,
        trainer.plans_manager,
        trainer.configuration_manager,
        [{key: value.cpu() for key, value in trainer.network.state_dict().items()}],
        trainer.dataset_json,
        type(trainer).__name__,
        trainer.inference_allowed_mirroring_axes,
    )
    io = trainer.plans_manager.image_reader_writer_class()
    ending, classes = trainer.dataset_json["file_ending"], trainer.label_manager.foreground_labels
    found = []
    for row in [row for row in read_rows(data) if row["split"] == "test"][:most]:
        image, facts = io.read_images([str(raw / "imagesTs" / f"{name_case(row)}_0000{ending}")])
        truth, _ = io.read_seg(str(raw / "labelsTs" / f"{name_case(row)}{ending}"))
        guess = predictor.predict_single_npy_array(image, facts)
        found.append(score(row, guess, truth[0], classes))
    return found


def score(row: dict[str, str], guess: Any, truth: Any, classes: Any) -> dict[str, Any]:
    from wardround.metrics.overlap import confusion, dice

    scores = [dice(confusion(guess == value, truth == value)) for value in classes]
    return {"client": row["centre"], "case": row["stem"], "dice": float(np.mean(scores))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["prepare", "train"])
    parser.add_argument("--data", type=Path, required=True, help="folder of one set, with its index.csv")
    parser.add_argument("--work", type=Path, required=True, help="nnU-Net's folders; one for each set")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--processes", type=int, default=8, help="that load and augment, or preprocess")
    parser.add_argument("--most", type=int, help="test cases that are predicted, for a trial; default all")
    options = parser.parse_args()
    loading = set_paths(options.work, options.processes)
    if options.what == "prepare":
        facts = prepare(options.data, options.work, options.processes)
    else:
        facts = train(
            options.data,
            options.work,
            steps=options.steps,
            seed=options.seed,
            device=options.device,
            most=options.most,
        )
    sys.stdout.write(json.dumps({**facts, "loading_processes": loading}) + "\n")


if __name__ == "__main__":
    main()
