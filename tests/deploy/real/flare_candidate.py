"""The FLARE adapter on the next release candidate of NVIDIA FLARE, if there is one to install. A minute.

python tests/deploy/real/flare_candidate.py

Installs it into a folder of its own, beside what is installed here, and runs the adapter's tests on it: what
they name as internals must be there. Says so and is skipped where no candidate can be had.
"""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from common import Checks

TESTS = Path(__file__).parent.parent / "nvflare"


def install(folder: str) -> str:
    """Install the newest version, candidates too; why not, where that fails."""
    words = ["install", "--quiet", "--pre", "--no-deps", "--target", folder, "nvflare"]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=600)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["pip failed"])[-1]


def find_version(environment: dict[str, str]) -> str:
    ask = "from importlib.metadata import version; print(version('nvflare'))"
    done = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True)
    return done.stdout.strip()


def main() -> None:
    with Checks(__doc__) as checks, tempfile.TemporaryDirectory() as folder:
        reason = install(folder)
        paths = os.pathsep.join([folder, *(path for path in sys.path if path)])
        environment = {**os.environ, "PYTHONPATH": paths}
        found, here = ("", version("nvflare")) if reason else (find_version(environment), version("nvflare"))
        if reason or found == here:
            checks.check(True, f"skipped: {reason or f'there is nothing newer than {here}'}")
            return
        words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS)]
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
        last = (done.stdout.strip().splitlines() or [""])[-1]
        checks.check(
            done.returncode == 0, f"the adapter's tests hold on nvflare {found}, not only {here}", said=last
        )
        if done.returncode != 0:
            checks.note(done.stdout[-3000:])


if __name__ == "__main__":
    main()
