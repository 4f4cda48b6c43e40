"""Build a release and try it as a user would: `make release`.

dist/ then holds the source distribution and the wheel, which is built from it and which a second build gives
again, byte by byte; and the SBOM and the licences of what an installation consists of. The wheel is installed
into a new environment outside the repository, with the versions of constraints.txt, and does the work of a
first day in an empty folder. Each step is a function that raises where something is wrong; `main` names them
in order.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from pathlib import Path

from supply_chain import check_reproducible, describe_environment

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 3_000_000
TRIAL = """
wardround --version
wardround configs
wardround demo
wardround train quickstart
wardround compare quickstart --seeds 1 --set rounds=4
wardround train quickstart-3d
wardround data phantom volumes --dimensions 3 --hospitals 1 --set data.phantom.cases=4
wardround predict runs/quickstart-3d volumes/north -o masks
wardround export runs/quickstart-3d --to torch -o exported
"""
NOT_OURS = ("torch", "torchgen", "functorch", "triton", "nvidia", "cuda", "pip", "setuptools", "wheel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the files go; emptied first")
    parser.add_argument("--no-trial", action="store_true", help="build and check, do not install")
    options = parser.parse_args()
    check_tag()
    dist = options.dist.absolute()
    wheel = build(dist)
    for name, digest in check_reproducible(build, ROOT, dist).items():
        print(f"{digest}  {name}, twice")
    check_wheel(wheel)
    if not options.no_trial:
        with tempfile.TemporaryDirectory(prefix="wardround-release-") as place:
            try_wheel(wheel, Path(place))


def read_version() -> str:
    """The version, from the one place where it is written."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def check_tag() -> None:
    """A tag like v1.2.3 on this commit must be that of the version."""
    found = subprocess.run(
        ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD"], capture_output=True, text=True
    )
    tags = [tag for tag in found.stdout.split() if tag.startswith("v")]
    if tags and f"v{read_version()}" not in tags:
        raise SystemExit(f"This commit is tagged {tags[0]}, but pyproject.toml says {read_version()}.")


def build(dist: Path, root: Path = ROOT) -> Path:
    """The source distribution, and the wheel from it; times in them are that of the commit."""
    shutil.rmtree(dist, ignore_errors=True)
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    stamp = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    environment = {**os.environ, **({"SOURCE_DATE_EPOCH": stamp} if stamp else {})}
    builder = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(root)]
    subprocess.run(builder, env=environment, check=True, stdout=subprocess.DEVNULL)
    for path in sorted(dist.iterdir()):
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    (wheel,) = dist.glob(f"wardround-{read_version()}-*.whl")
    return wheel


def check_wheel(wheel: Path) -> None:
    """Small, with every configuration as it stands in the repository, and nothing but the package."""
    if wheel.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{wheel.name} has {wheel.stat().st_size:,} bytes, more than {MOST_BYTES:,}.")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for path in (ROOT / "configs").rglob("*.*"):
            inside = f"wardround/configs/{path.relative_to(ROOT / 'configs').as_posix()}"
            if inside not in names or archive.read(inside) != path.read_bytes():
                raise SystemExit(f"{wheel.name} lacks {inside}, or has another one.")
    strange = {name.split("/")[0] for name in names} - {"wardround", f"wardround-{read_version()}.dist-info"}
    if strange:
        raise SystemExit(f"{wheel.name} has {', '.join(sorted(strange))} beside the package.")


def try_wheel(wheel: Path, place: Path) -> dict[str, float]:
    """Install the wheel into a new environment and run every command of TRIAL in an empty folder: seconds."""
    if place.resolve().is_relative_to(ROOT):
        raise SystemExit(f"{place} is inside the repository, where the wheel would not be alone.")
    home = place / "environment"
    venv.create(home, with_pip=True)
    programs = home / ("Scripts" if os.name == "nt" else "bin")
    python = str(programs / "python")
    limits = ROOT / "constraints.txt"
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", str(limits), str(wheel)], check=True)
    subprocess.run([python, "-m", "pip", "check"], check=True)
    describe_environment(python, wheel.with_name(f"wardround-{read_version()}"))
    print(f"installed without torch: {measure_installed(home) / 1e6:.0f} MB")
    empty = place / "empty"
    empty.mkdir()
    own = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    seconds = {}
    for line in TRIAL.split("\n"):
        if not line:
            continue
        program, *words = shlex.split(line)
        began = time.monotonic()
        done = subprocess.run(
            [str(programs / program), *words], cwd=empty, env=own, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"`{line}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        seconds[line] = time.monotonic() - began
        print(f"{seconds[line]:6.1f} s  {line}", flush=True)
    return seconds


def measure_installed(home: Path) -> int:
    """Bytes of all packages in an environment but torch, what only torch brings, and installers."""
    (packages,) = [path for path in home.rglob("site-packages") if path.is_dir()]
    return sum(
        path.stat().st_size
        for path in packages.rglob("*")
        if path.is_file() and not path.relative_to(packages).parts[0].startswith(NOT_OURS)
    )


if __name__ == "__main__":
    main()
