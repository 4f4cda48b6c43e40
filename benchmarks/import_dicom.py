"""What `wardround data import-dicom` takes for one CT, in a process of its own.

    python benchmarks/import_dicom.py                 # 600 slices of 512 x 512, about 330 MB of disk
    python benchmarks/import_dicom.py --slices 100

Seconds by the clock and of the processor, and the most memory the process had; needs wardround[dicom].
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from wardround.data.dicom.importing import import_dicom
from wardround.data.dicom.writing import write_series


def make_values(slices: int, side: int = 512) -> np.ndarray:
    """A body of soft tissue with the noise of a scanner, in air."""
    draw = np.random.default_rng(0)
    row, column = np.mgrid[:side, :side]
    inside = ((row - side / 2) / (0.4 * side)) ** 2 + ((column - side / 2) / (0.47 * side)) ** 2 < 1
    values = np.empty((side, side, slices), dtype=np.int16)
    for number in range(slices):
        noise = draw.normal(size=(side, side)).astype(np.float32)
        values[:, :, number] = np.where(inside, 40 + 15 * noise, -1000 + 5 * noise)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slices", type=int, default=600)
    slices = parser.parse_args().slices
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        half = slices // 2  # written in halves, so that the writer needs less memory than the import
        for start in (0, half):
            affine = np.diag([-0.7, -0.7, 1.0, 1.0])
            affine[2, 3] = start
            write_series(
                folder / f"in{start}", make_values(slices - half if start else half), affine, "patient"
            )
            for path in sorted((folder / f"in{start}").iterdir()):
                (folder / "in").mkdir(exist_ok=True)
                path.rename(folder / "in" / f"{start}-{path.name}")
        clock, processor = time.perf_counter(), time.process_time()
        done = import_dicom(folder / "in", folder / "out")
        clock, processor = time.perf_counter() - clock, time.process_time() - processor
        size = done.written[0].stat().st_size / 2**20
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    took = f"{clock:.1f} s, {processor:.1f} s of the processor, {most:.0f} MiB"
    print(f"{slices} slices: {took}; {size:.0f} MiB written")


if __name__ == "__main__":
    main()
