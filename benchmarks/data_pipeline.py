"""How fast prepared images reach a model, beside MONAI's CacheDataset and DataLoader on the same files.

Images at 160x160 with flips and changes of intensity, in batches of 16, from 2 processes with one thread
each, as `compute: {workers: 2, threads: 1}` trains. MONAI does the same to the same training cases:
everything up to normalising is cached in memory, flips and intensities run in 2 worker processes. The two
take turns, so that a noisy machine disturbs both alike. Preparing is timed with one and with two processes.

    python benchmarks/data_pipeline.py            # ../shared/data/polyp4, or synthetic images without it
    python benchmarks/data_pipeline.py --limit 100 --seconds 1 --turns 1 --skip-prepare --json
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from wardround.data.cases import Split, TensorSplit
from wardround.data.listing import Entry
from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.preparing.pool import prepare_cases
from wardround.data.serving.augment import Augmentation
from wardround.data.serving.loading import RealData
from wardround.data.serving.resident import join_splits
from wardround.data.settings import DataSettings

SIZE = (160, 160)
BATCH = 16
GOAL = 1500.0  # images a second from 2 cores
AUGMENTATION = Augmentation(flip=0.5, intensity=0.1)


def federation_file(folder: Path, data: Path, cache: str) -> Path:
    """A federation.yaml over the data, in a folder of our own."""
    path = folder / f"{cache}.yaml"
    plain = {
        "sources": [{"path": str(data.resolve())}],
        "labels": {"lesion": [1]},
        "prepare": {"size": list(SIZE)},
        "cache": cache,
    }
    path.write_text(yaml.safe_dump(plain))
    return path


def real_data(path: Path) -> RealData:
    return RealData(path, DataSettings(federation=path))


def training_cases(data: RealData, limit: int | None) -> list[Entry]:
    return [entry for entry in data.listing.entries if entry.split == "train"][:limit]


def prepare_seconds(path: Path, limit: int | None, jobs: int) -> float:
    """Time to prepare the training cases into a cache that is empty."""
    data = real_data(path)
    started = time.perf_counter()
    prepare_cases(data.cache, training_cases(data, limit), data.file, jobs=jobs)
    return time.perf_counter() - started


# Ours


def feed(path: Path, limit: int | None, number: int, workers: int, pipe: Any) -> None:
    """One process: its share of the clients' training cases, batch after batch, whenever told to go."""
    torch.set_num_threads(1)
    split = own_share(path, limit, number, workers)
    pipe.send(len(split))
    for turn in itertools.count():
        seconds = pipe.recv()
        if not seconds:
            return
        started, images, checked = time.perf_counter(), 0, 0.0
        for step, indices in enumerate(endless(len(split), turn)):
            batch, _ = AUGMENTATION(split.batch(indices), turn, (number, step))
            images += len(batch)
            checked += float(batch.image[0, 0, 0, 0])
            if time.perf_counter() - started >= seconds:
                break
        pipe.send((images, time.perf_counter() - started))


def own_share(path: Path, limit: int | None, number: int, workers: int) -> Split:
    """Every so manieth case of all clients, resident in memory as in training."""
    data = real_data(path)
    loaded = join_splits([data.load(name).train for name in data.listing.clients])
    wanted = {entry.name for entry in training_cases(data, limit)[number::workers]}
    assert isinstance(loaded, TensorSplit)
    kept = [index for index, name in enumerate(loaded.names) if name in wanted]
    return TensorSplit(
        [loaded.names[index] for index in kept],
        loaded.images[kept],
        loaded.labels[kept],
        [loaded.spacing(index) for index in kept],
    )


def endless(count: int, seed: int) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=draw).split(BATCH)


class Ours:
    """The feeding processes."""

    def __init__(self, path: Path, limit: int | None, workers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for number in range(workers):
            here, there = context.Pipe()
            process = context.Process(target=feed, args=(path, limit, number, workers, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        self.count = sum(pipe.recv() for pipe in self.pipes)

    def rate(self, seconds: float) -> float:
        """Images a second of all processes together."""
        for pipe in self.pipes:
            pipe.send(seconds)
        return sum(images / took for images, took in [pipe.recv() for pipe in self.pipes])

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(0)
            process.join(timeout=30)


# MONAI


class Monai:
    """CacheDataset and DataLoader as its tutorials have them, with our augmentation."""

    def __init__(self, entries: list[Entry], workers: int) -> None:
        from monai.data import CacheDataset, DataLoader
        from monai.transforms import (
            Compose,
            EnsureChannelFirstd,
            EnsureTyped,
            LoadImaged,
            NormalizeIntensityd,
            RandAxisFlipd,
            RandScaleIntensityd,
            RandShiftIntensityd,
            Resized,
        )

        both = ["image", "label"]
        steps = Compose(
            [
                LoadImaged(both),
                EnsureChannelFirstd(both),
                Resized(both, SIZE, mode=("area", "nearest")),
                NormalizeIntensityd("image", channel_wise=True),
                EnsureTyped(both, track_meta=False),
                RandAxisFlipd(both, prob=0.5),
                RandScaleIntensityd("image", factors=0.1, prob=1.0),
                RandShiftIntensityd("image", offsets=0.1, prob=1.0),
            ]
        )
        files = [{"image": str(entry.images[0]), "label": str(entry.label)} for entry in entries]
        self.count = len(files)
        dataset = CacheDataset(files, steps, num_workers=workers, progress=False)
        self.loader = DataLoader(
            dataset, batch_size=BATCH, shuffle=True, num_workers=workers, persistent_workers=True
        )
        self._batches = self._endless()
        next(self._batches)  # start the workers

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def rate(self, seconds: float) -> float:
        """Images a second. Workers read ahead a few batches between turns, which are not counted."""
        for _ in range(2 * self.loader.num_workers + 1):
            next(self._batches)
        started, images = time.perf_counter(), 0
        for batch in self._batches:
            images += len(batch["image"])
            if time.perf_counter() - started >= seconds:
                break
        return images / (time.perf_counter() - started)


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything, as one record."""
    data, source = options.data, str(options.data)
    if not data.exists():
        data, source = folder / "phantoms", "synthetic images"
        made = PhantomSettings(hospitals=4, size=SIZE[0], channels=3, cases=options.limit or 400)
        phantom_files.write(made, data, "png", 1)
    result: dict[str, Any] = {"data": source, "size": list(SIZE), "batch_size": BATCH, "goal": GOAL}
    if not options.skip_prepare:
        one, two = (
            prepare_seconds(federation_file(folder, data, f"cache-{jobs}"), options.limit, jobs)
            for jobs in (1, 2)
        )
        result |= {"prepare_seconds_1": one, "prepare_seconds_2": two, "prepare_speedup": one / two}
    path = federation_file(folder, data, "cache-2")
    for name in (loaded := real_data(path)).listing.clients:
        loaded.load(name)  # checked and prepared once, before two processes want it
    monai = Monai(training_cases(loaded, options.limit), options.workers)
    ours = Ours(path, options.limit, options.workers)
    assert ours.count == monai.count, (ours.count, monai.count)
    rates: dict[str, list[float]] = {"wardround": [], "monai": []}
    for _ in range(options.turns):
        rates["wardround"].append(ours.rate(options.seconds))
        rates["monai"].append(monai.rate(options.seconds))
    ours.close()
    fast, plain = statistics.median(rates["wardround"]), statistics.median(rates["monai"])
    return {
        **result,
        "images": ours.count,
        "workers": options.workers,
        "wardround_images_a_second": fast,
        "monai_images_a_second": plain,
        "ratio": fast / plain,
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("--data", type=Path, default=here / "shared/data/polyp4")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--limit", type=int, help="use so many training cases only")
    parser.add_argument("--skip-prepare", action="store_true", help="do not time preparing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    warnings.filterwarnings("ignore")  # MONAI's own
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = measured(options, Path(folder))
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['images']} images of {result['data']} at 160x160, {options.workers} processes")
    if "prepare_speedup" in result:
        one, two = result["prepare_seconds_1"], result["prepare_seconds_2"]
        print(
            f"prepare      {one:.1f} s with one process, {two:.1f} s with two ({one / two:.2f} times as fast)"
        )
    print(f"wardround    {result['wardround_images_a_second']:,.0f} images a second (goal {GOAL:,.0f})")
    print(f"MONAI        {result['monai_images_a_second']:,.0f} images a second")
    print(f"ratio        {result['ratio']:.2f}")


if __name__ == "__main__":
    main()
