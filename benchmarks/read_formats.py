"""What reading one volume takes, by file format, against NIfTI in the same run.

    python benchmarks/read_formats.py                 # 512 x 512 x 100, int16
    python benchmarks/read_formats.py --json

Seconds of the processor, the best of five; .nrrd and .mha are packed, as .nii.gz is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import nibabel
import numpy as np
from import_dicom import make_values

from wardround.data.readers import metaimage, nrrd
from wardround.data.readers.image_files import read_image

ENDINGS = (".nii.gz", ".nii", ".nrrd", ".mha")


def measure(path: Path, repeats: int = 5) -> float:
    """Seconds of the processor."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        read_image([path])
        times.append(time.process_time() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    values, affine = make_values(100), np.diag([0.7, 0.7, 1.0, 1.0])
    with tempfile.TemporaryDirectory() as folder:
        files = {ending: Path(folder) / f"scan{ending}" for ending in ENDINGS}
        for ending in (".nii", ".nii.gz"):
            nibabel.save(nibabel.Nifti1Image(values, affine), files[ending])
        files[".nrrd"].write_bytes(nrrd.encode(values, affine))
        files[".mha"].write_bytes(metaimage.encode(values, affine))
        seconds = {ending: measure(path) for ending, path in files.items()}
    ratio = {ending: taken / seconds[".nii.gz"] for ending, taken in seconds.items()}
    if options.json:
        print(json.dumps({"seconds": seconds, "ratio": ratio}))
        return
    for ending in ENDINGS:
        print(f"{ending}: {seconds[ending]:.2f} s, {ratio[ending]:.2f} of .nii.gz")


if __name__ == "__main__":
    main()
