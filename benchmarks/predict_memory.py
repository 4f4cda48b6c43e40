"""How much memory `wardround predict` takes for a large volume on the CPU.

A 3D U-Net is trained for one round on synthetic hospitals of 64³ (which is also the window), then a volume of
noise is predicted in a process of its own, mask and uncertainty map, and its largest resident size is read.

    python benchmarks/predict_memory.py                 # 320³, some minutes
    python benchmarks/predict_memory.py --side 96       # quick
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nibabel
import numpy as np

import wardround as wr

PREDICT = """
import resource, sys
import wardround as wr
(found,) = wr.predict(sys.argv[1], [sys.argv[2]], uncertainty="entropy")
assert found.mask.shape == tuple([int(sys.argv[3])] * 3)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--side", type=int, default=320)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wr.run(
            {
                "output": str(folder / "run"),
                "rounds": 1,
                "batch_size": 1,
                "data": {"phantom": {"hospitals": 1, "cases": 4, "dimensions": 3, "size": 64}},
                "model": {"name": "unet3d", "base_filters": 4, "levels": 3},
                "evaluate": {"metrics": ["dice"], "overlays": 0},
            }
        )
        values = np.random.default_rng(0).normal(size=(options.side,) * 3).astype(np.float32)
        scan = folder / "scan.nii"
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), scan)
        started = time.perf_counter()
        command = [sys.executable, "-c", PREDICT, str(folder / "run"), str(scan), str(options.side)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    gib = int(done.stdout.split()[-1]) / 2**20
    result = {
        "side": options.side,
        "peak_gib": gib,
        "seconds": time.perf_counter() - started,
        "ratio": gib / 4,  # of what is allowed
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"{options.side}³ voxels: peak {gib:.2f} GiB (at most 4), {result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
