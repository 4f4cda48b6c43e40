"""Plain and secure sums of four hospitals on NVIDIA FLARE: the bytes of `wardround train`. Two minutes."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from common import ENVIRONMENT, Checks, Failed, fingerprint, records, settings, since, trained

from wardround.deploy.ledger import verify

FEDERATION = Path(__file__).parents[3] / "benchmarks" / "flare.py"


def federated(folder: Path, config: dict[str, Any]) -> Path:
    """Run it over FLARE's processes; its folder."""
    run = folder / "flare" / config["name"]
    file = folder / f"flare-{config['name']}.yaml"
    file.write_text(yaml.safe_dump({**config, "output": str(run)}))
    words = [sys.executable, str(FEDERATION), str(file)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise Failed(f"FLARE did not run '{config['name']}': {(done.stdout + done.stderr)[-500:]}")
    return run


def main() -> None:
    with Checks(__doc__) as checks, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = {"phantom": {"hospitals": 4, "size": 32, "cases": 12}}
        for title, privacy in (("plain", {}), ("secure", {"secure_sum": True})):
            if not checks.wants(title):
                continue
            with checks.part(title):
                config = settings(title, data=data, min_clients=4, privacy=privacy)
                expected = trained(folder, config)
                began = time.monotonic()
                run = federated(folder, config)
                found = fingerprint(run)
                checks.check(
                    found == expected and len(found) == 64,
                    f"{title}: {found[:12]} on FLARE, {expected[:12]} with train",
                    seconds=since(began),
                )
                sums = [record.get("secure_sum") for record in records(run)]
                clean = not any(record["lost"] or record["refused"] for record in records(run))
                checks.check(
                    clean and all(sums) == bool(privacy), f"{title}: nobody lost, {len(sums)} rounds"
                )
                ledgers = sorted((run / "rehearsal" / "state").glob("*/egress.jsonl"))
                holds = len(ledgers) == 4 and all(verify(path).ok for path in ledgers)
                checks.check(holds, f"{title}: the ledgers of four hospitals verify")


if __name__ == "__main__":
    main()
