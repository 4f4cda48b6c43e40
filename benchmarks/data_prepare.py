"""Preparing a federation in two processes against one: the same files, an empty cache each time.

    python benchmarks/data_prepare.py                                  synthetic volumes
    python benchmarks/data_prepare.py --data ../shared/data/polyp4 --size 160 160

Runs alternate, and the best of each kind counts. The ratio is near 2 on two free processors.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

from wardround.data.federation_file import FederationFile, Source
from wardround.data.listing import Listing
from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.preparing.cache import Cache
from wardround.data.preparing.pool import prepare_cases
from wardround.data.sources import read_source


def listing_of(data: Path | None, folder: Path) -> Listing:
    """The cases of a folder, or synthetic ones."""
    if data is None:
        data = folder / "phantom"
        settings = PhantomSettings(hospitals=2, cases=48, dimensions=3, size=128)
        phantom_files.write(settings, data, "nifti", seed=0)
    return read_source(Source(path=data.absolute()), data.absolute().parent)


def seconds(listing: Listing, file: FederationFile, jobs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        outcome = prepare_cases(Cache(Path(folder)), listing.entries, file, jobs=jobs, background=None)
        spent = time.perf_counter() - start
    if outcome.failures:
        raise SystemExit(f"{len(outcome.failures)} cases failed, the first: {outcome.failures[0]}")
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="a folder of cases; left out: synthetic volumes")
    parser.add_argument("--size", type=int, nargs="+", help="voxels to resize to")
    parser.add_argument("--spacing", type=float, nargs="+", help="millimetres to resample to")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        listing = listing_of(options.data, Path(folder))
        size, spacing = options.size, options.spacing
        if options.data is None and size is None and spacing is None:
            size = [96, 96, 96]
        prepare = {"size": size, "spacing": spacing, "crop": "foreground", "normalise": "percentile"}
        file = FederationFile.model_validate({"sources": [{"path": "."}], "prepare": prepare})
        times: dict[int, list[float]] = {1: [], 2: []}
        for _ in range(options.repeats):
            for jobs, spent in times.items():
                spent.append(seconds(listing, file, jobs))
    one, two = min(times[1]), min(times[2])
    cases = len(listing.entries)
    if options.json:
        print(
            json.dumps({"ratio": one / two, "cases": cases, "seconds": {str(j): s for j, s in times.items()}})
        )
        return
    rate = f"{cases / one:.0f} cases/s"
    print(f"{cases} cases: one process {one:.2f} s ({rate}), two {two:.2f} s; ratio {one / two:.2f}")


if __name__ == "__main__":
    main()
