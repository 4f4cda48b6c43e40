"""How many of our files take part in the way of a case, of a FedEvi round and of a hospital request.

A file counts when one of its functions runs on that way in this process: from federation.yaml to the last
batch (files of data/), from the beginning of a round to its record (all files but data/), and from the
server's request to the checked reply (files of deploy/ alone).

    python benchmarks/files_to_open.py --json
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import wardround as wr

ROOT = Path(wr.__file__).parent


class Trace:
    """Files of the package in which a function was entered while it was on."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_on = False

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or a class
        if self.is_on and event == "call" and is_function:
            self.files.add(frame.f_code.co_filename)

    def run(self, function: Callable[[], Any], *, on: bool = True) -> None:
        self.is_on = on
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            function()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def within(self, keep: Callable[[str], bool]) -> list[str]:
        ours = [Path(file) for file in self.files if file.startswith(str(ROOT))]
        return sorted(name for file in ours if keep(name := str(file.relative_to(ROOT))))


class Watch:
    """Turns a trace on while a round runs."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def on_start(self, config: Any, first_round: int) -> None: ...

    def on_round(self, round: int, present: Any) -> None:
        self.trace.is_on = True

    def on_progress(self, client: str, step: int, steps: int) -> None: ...

    def on_record(self, record: Any) -> None:
        self.trace.is_on = False


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output": str(folder),
        "rounds": 1,
        "batch_size": 4,
        "data": {"phantom": {"size": 16, "cases": 8}},
        "model": {"base_filters": 2, "levels": 2},
        "evaluate": {"metrics": ["dice"], "overlays": 0, "calibrate": False},
        "compute": {"threads": 1, "workers": 1, "device": "cpu"},
        **changes,
    }


def follow_case(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "wardround", "data"]
    made, file = folder / "made", folder / "federation.yaml"
    subprocess.run([*command, "phantom", str(made), "--set", "size=16"], check=True, capture_output=True)
    centres = sorted(str(path) for path in made.iterdir() if path.is_dir())
    subprocess.run([*command, "init", *centres, "-o", str(file)], check=True, capture_output=True)
    trace = Trace()
    trace.run(lambda: wr.run(settings(folder / "case", data={"federation": str(file)})))
    return trace.within(lambda name: name.startswith("data/"))


def follow_round(folder: Path) -> list[str]:
    trace = Trace()
    asked = settings(folder / "round", method={"name": "fedevi"})
    trace.run(lambda: wr.run(asked, listener=Watch(trace)), on=False)
    return trace.within(lambda name: not name.startswith("data/"))


def follow_request(folder: Path) -> list[str]:
    from deploy.loopback import Loopback, conducted

    trace = Trace()
    trace.run(lambda: conducted(Loopback(folder / "sites"), folder / "run", rounds=1))
    return trace.within(lambda name: name.startswith("deploy/"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one object with all names")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        ways = {"case": follow_case, "FedEvi round": follow_round, "hospital request": follow_request}
        found = {way: follow(Path(name)) for way, follow in ways.items()}
    if asked.json:
        print(
            json.dumps({way: {"files": len(names), "names": names} for way, names in found.items()}, indent=2)
        )
    else:
        for way, names in found.items():
            print(f"{way}: {len(names)} files")


if __name__ == "__main__":
    main()
