"""Peak memory must not grow with the number of clients.

Runs FedAvg with 4 and with 16 clients, each in a process of its own, with the same cases in total,
and compares the largest resident size.

    python benchmarks/memory.py
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

CASES = 64  # in all, whatever the number of clients


def one_run(clients: int, filters: int) -> None:
    import wardround as wr

    with tempfile.TemporaryDirectory() as folder:
        result = wr.run(
            {
                "name": "memory",
                "output": str(Path(folder) / "run"),
                "rounds": 3,
                "batch_size": 4,
                "data": {"phantom": {"hospitals": clients, "size": 64, "cases": CASES // clients}},
                "model": {"name": "unet2d", "base_filters": filters},
                "evaluate": {"metrics": ["dice"], "overlays": 0},
                "compute": {"threads": 2, "device": "cpu"},
            }
        )
        size = result.params.num_bytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"clients": clients, "peak_bytes": peak, "model_bytes": size}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--one", type=int, help="run with this many clients, here")
    parser.add_argument("--filters", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.one:
        one_run(options.one, options.filters)
        return
    found = {}
    for clients in (4, 16):
        command = [sys.executable, __file__, "--one", str(clients), "--filters", str(options.filters)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[clients] = json.loads(done.stdout.splitlines()[-1])
    ratio = found[16]["peak_bytes"] / found[4]["peak_bytes"]
    if options.json:
        print(json.dumps({"ratio": ratio, "runs": list(found.values())}))
        return
    print(f"FedAvg, one model is {found[4]['model_bytes'] / 2**20:.0f} MiB")
    for clients, entry in found.items():
        print(f"{clients:3d} clients   peak {entry['peak_bytes'] / 2**20:.0f} MiB")
    print(f"ratio         {ratio:.3f}")


if __name__ == "__main__":
    main()
