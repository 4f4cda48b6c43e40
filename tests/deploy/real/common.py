"""What the scripts of this folder share: kits and processes through the real command line, and checks.

    with Checks("what is shown") as checks, Deployment(["north", "east"], checks.options.keep) as hospitals:
        ...

Every process a deployment starts, and every one those start, is ended with the block.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import yaml

from wardround.deploy.job_queue import JobQueue
from wardround.deploy.kits.kit import Kit, read_kit
from wardround.deploy.processes import free_ports

WARDROUND = [sys.executable, "-m", "wardround"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
FINAL = ("done", "stopped", "failed")
START_SECONDS = 180.0  # for anything to start, on a machine that is busy with other things


class Failed(Exception):
    """Something did not come to pass in time."""


# Checks


class Checks:
    """Prints each check as it is made, with the seconds that matter; a script's result is their sum."""

    def __init__(self, title: str) -> None:
        parser = argparse.ArgumentParser(description=title)
        parser.add_argument("--json", action="store_true", help="one JSON object at the end")
        parser.add_argument("--only", default="", help="the parts to run, with commas; default: all")
        parser.add_argument("--keep", action="store_true", help="leave logs and kits where they are")
        self.options = parser.parse_args()
        self.title = title.splitlines()[0]
        self.began = time.monotonic()
        self.results: list[dict[str, Any]] = []

    def __enter__(self) -> Checks:
        self.note(self.title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Failed):
            self.check(False, str(error))
        elif error is not None:
            return
        failed = [entry for entry in self.results if not entry["ok"]]
        seconds = time.monotonic() - self.began
        self.note(f"{len(self.results) - len(failed)} of {len(self.results)} hold, {seconds:.0f} s")
        if self.options.json:
            facts = {"title": self.title, "seconds": round(seconds, 1), "checks": self.results}
            sys.stdout.write(json.dumps(facts) + "\n")
        sys.exit(1 if failed or not self.results else 0)

    def wants(self, part: str) -> bool:
        return not self.options.only or part in self.options.only.split(",")

    def note(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}        {text}", file=self._stream, flush=True)

    def check(self, holds: bool, text: str, **facts: Any) -> bool:
        self.results.append({"ok": bool(holds), "check": text, **facts})
        numbers = "".join(f", {name} {value}" for name, value in facts.items())
        word = "holds " if holds else "FAILS "
        print(f"{time.strftime('%H:%M:%S')} {word} {text}{numbers}", file=self._stream, flush=True)
        return bool(holds)

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        """A part that fails leaves the others their turn."""
        self.note(f"-- {title}")
        try:
            yield
        except Failed as error:
            self.check(False, f"{title}: {error}")

    @property
    def _stream(self) -> Any:
        return sys.stderr if self.options.json else sys.stdout


def until(claim: Callable[[], Any], seconds: float, what: str, step: float = 0.05) -> Any:
    """The claim's first true value; what: said if it does not come."""
    deadline = time.monotonic() + seconds
    while not (value := claim()):
        if time.monotonic() > deadline:
            raise Failed(f"{what}: not within {seconds:.0f} s")
        time.sleep(step)
    return value


def since(began: float) -> float:
    """Seconds since a moment of time.monotonic."""
    return round(time.monotonic() - began, 1)


# Runs


def settings(name: str, method: str | dict[str, Any] = "fedavg", **changes: Any) -> dict[str, Any]:
    """A small run on made-up scans; keyword arguments replace whole sections."""
    return {
        "name": name,
        "rounds": 3,
        "batch_size": 4,
        "method": {"name": method} if isinstance(method, str) else method,
        "data": {"phantom": {"hospitals": 3, "size": 32, "cases": 12}},
        "model": {"name": "unet2d", "base_filters": 4, "levels": 3},
        "optimizer": {"learning_rate": 0.01},
        "evaluate": {"metrics": ["dice"], "overlays": 0},
        "compute": {"threads": 1, "workers": 1, "device": "cpu"},
        "deadline": 120.0,
        **changes,
    }


def read(path: Path) -> dict[str, Any]:
    """A JSON file that another process writes; empty where there is none yet."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def records(run: Path) -> list[dict[str, Any]]:
    """The rounds written so far."""
    path = run / "records.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def fingerprint(run: Path) -> str:
    return str(read(run / "result.json").get("params_sha256", "none"))


def trained(folder: Path, config: dict[str, Any]) -> str:
    """The SHA-256 that `wardround train` gives, which everything is held against."""
    file = folder / f"train-{config['name']}.yaml"
    file.write_text(yaml.safe_dump({**config, "output": str(folder / "train" / config["name"])}))
    done = subprocess.run(
        [*WARDROUND, "train", str(file), "--quiet"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode != 0:
        raise Failed(f"wardround train of '{config['name']}' failed: {done.stderr[-500:]}")
    return fingerprint(folder / "train" / config["name"])


# Processes


class Command:
    """A wardround command that goes on, in a session of its own; its output is in a file.

    inside: words before the command, such as those that put it into a network of its own.
    """

    def __init__(self, log: Path, *arguments: str | Path, inside: Sequence[str] = ()) -> None:
        self.log = log
        self.arguments = [str(argument) for argument in arguments]
        self._start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*inside, *WARDROUND, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        """What this process has said, not those before it in the same file."""
        return self.log.read_bytes()[self._start :].decode(errors="replace")

    def tree(self) -> list[psutil.Process]:
        """The process and all below it."""
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.Error:
            return []

    def kill(self) -> None:
        """kill -9, all of it at the same moment."""
        for process in self.tree():
            try:
                process.kill()
            except psutil.Error:
                continue
        self.process.wait(timeout=20)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"`wardround {self.arguments[0]}` did not end within {seconds:.0f} s") from None

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None


def end_all(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(processes, timeout=5)


def below(folder: Path) -> list[psutil.Process]:
    """Processes that work for a kit in this folder, whoever their parent is by now."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.environ().get("WARDROUND_KIT", "")]
        except (psutil.Error, OSError):
            continue
        gone = process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE
        if not gone and any(word.startswith(str(folder)) for word in words):
            found.append(process)
    return found


def command_line(process: psutil.Process) -> str:
    """Empty for one that is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def described(processes: Sequence[psutil.Process]) -> str:
    return "; ".join(f"{process.pid} {command_line(process)[-100:]}" for process in processes)


class Deployment:
    """A server and hospitals on this machine, each started by its own command from its own kit.

    guests: hospitals that have a kit, and are not started or asked to take part.
    """

    host = "localhost"  # where hospitals find the server

    def __init__(self, names: Sequence[str], keep: bool = False, guests: Sequence[str] = ()) -> None:
        self.names = sorted(names)
        self.guests = sorted(guests)
        self.keep = keep
        self.folder = Path(tempfile.mkdtemp(prefix="wardround-real-")).resolve()
        self.kits = self.folder / "kits"
        self.organiser = self.kits / "organiser"
        self.commands: list[Command] = []
        self.joined: dict[str, Command] = {}
        (self.port,) = free_ports(1)
        self._server: Command | None = None

    def __enter__(self) -> Deployment:
        # what is started behind an `&` ignores Ctrl-C, and so would all our commands
        signal.signal(signal.SIGINT, signal.default_int_handler)
        project = self.folder / "project.yaml"
        where = {"host": self.host, "port": self.port}
        facts = {"project": "real", "organiser": where, "hospitals": [*self.names, *self.guests]}
        project.write_text(yaml.safe_dump({**facts, "valid_days": 2}))
        made = self.run("provision", project, "-o", self.kits)
        if made.returncode != 0:
            raise Failed(f"no kits: {made.stderr[-500:]}")
        for name in [*self.names, *self.guests]:
            rules = {
                "data": "phantom",
                "device": "cpu",
                "tasks": ["all"],
                "case_names": "keep",
                "min_cases": 0,
            }
            (self.kits / name / "site.yaml").write_text(yaml.safe_dump(rules))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for command in self.commands:
            if command.is_running:
                command.kill()
        end_all(below(self.folder))
        if not self.keep and (error is None or isinstance(error, KeyboardInterrupt)):
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            sys.stderr.write(f"logs and kits are left in {self.folder}\n")

    def run(self, *arguments: str | Path, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
        return subprocess.run(
            [*WARDROUND, *(str(argument) for argument in arguments)],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=seconds,
        )

    def start(self, log: str, *arguments: str | Path, inside: Sequence[str] = ()) -> Command:
        command = Command(self.folder / f"{log}.log", *arguments, inside=inside)
        self.commands.append(command)
        return command

    @property
    def server(self) -> Command:
        if self._server is None:
            raise Failed("the server was not started")
        return self._server

    def serve(self) -> Command:
        self._server = command = self.start("server", "server", self.organiser)

        def listens() -> bool:
            if not command.is_running:
                raise Failed(f"the server ended: {command.text[-500:]}")
            return "listening" in command.text

        until(listens, START_SECONDS, "the server listens")
        return command

    def join(self, name: str) -> Command:
        command = self.joined[name] = self.start(name, "join", self.kits / name)
        return command

    def join_all(self) -> None:
        for name in self.names:
            self.join(name)
        self.wait_connected(self.names)

    def wait_connected(self, names: Sequence[str]) -> None:
        def missing() -> list[str]:
            return [name for name in names if f"{name} is connected" not in self.server.text]

        until(lambda: not missing(), START_SECONDS, f"{', '.join(names)} connect")

    def config(self, config: dict[str, Any]) -> Path:
        file = self.folder / f"{config['name']}.yaml"
        file.write_text(yaml.safe_dump(config))
        return file

    def kit(self, name: str) -> Kit:
        return read_kit(self.kits / name)

    def submit(self, config: dict[str, Any], *more: str, names: Sequence[str] = ()) -> Command:
        everybody = ["--hospitals", ",".join(names or self.names)]
        name = f"submit-{config['name']}"
        return self.start(
            name, "submit", self.config(config), "--kit", self.organiser, "--quiet", *everybody, *more
        )

    def resume(self, name: str) -> Command:
        return self.start(f"submit-{name}", "submit", "--resume", name, "--kit", self.organiser, "--quiet")

    def run_folder(self, name: str) -> Path:
        return self.organiser / "runs" / name

    def live(self, name: str) -> dict[str, Any]:
        return read(self.run_folder(name) / "live.json")

    def wait_phase(
        self, name: str, round: int, task: str, seconds: float, step: float = 0.02
    ) -> dict[str, Any]:
        """Until the run waits for hospitals in this round and task."""

        def there() -> dict[str, Any] | None:
            facts = self.live(name)
            if facts.get("state") in FINAL:
                raise Failed(
                    f"run '{name}' is {facts['state']} before round {round}, {task}: {facts.get('reason')}"
                )
            fits = facts.get("round") == round and facts.get("task") == task and facts["state"] == "waiting"
            return facts if fits else None

        found: dict[str, Any] = until(there, seconds, f"run '{name}' comes to round {round}, {task}", step)
        return found

    def wait_done(self, command: Command, name: str, seconds: float) -> dict[str, Any]:
        code = command.wait(seconds)
        if code != 0:
            raise Failed(f"submit of '{name}' ended with {code}: {command.text[-800:]}")
        return self.live(name)

    def heard(self) -> dict[str, float]:
        """Of each hospital, the seconds since it gave a sign of life."""
        return JobQueue(read_kit(self.organiser)).connected()

    def job_processes(self, name: str) -> list[psutil.Process]:
        """Job processes of a hospital, the ones that train."""
        return [process for process in self.joined[name].tree() if "deploy.worker" in command_line(process)]

    def server_jobs(self) -> list[psutil.Process]:
        return [process for process in self.server.tree() if "deploy.run_process" in command_line(process)]

    def ledger_holds(self, name: str) -> bool:
        return self.run("egress", "verify", self.kits / name).returncode == 0


class Beside:
    """Runs of the four hospitals, one after the other as long as the block lasts; found: each one's SHA-256."""

    def __init__(self, hospitals: Deployment, config: dict[str, Any]) -> None:
        self.found: list[str] = []
        self.rounds = 0
        self._hospitals, self._config = hospitals, config
        self._done = threading.Event()
        self._trouble = ""
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Beside:
        self._thread.start()
        first = self._hospitals.run_folder(f"{self._config['name']}-0")
        until(lambda: records(first) or self._trouble, START_SECONDS, "the run beside has begun")
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._trouble:
            raise Failed(self._trouble)

    def _work(self) -> None:
        try:
            while not self._done.is_set():
                config = {**self._config, "name": f"{self._config['name']}-{len(self.found)}"}
                self._hospitals.wait_done(self._hospitals.submit(config), config["name"], 900)
                folder = self._hospitals.run_folder(config["name"])
                self.found.append(fingerprint(folder))
                self.rounds += len(records(folder))
        except Exception as error:
            self._trouble = f"the run beside: {error}"

    def check(self, checks: Checks, expected: str) -> None:
        """After the block: every run gave the expected parameters."""
        checks.check(
            bool(self.found) and set(self.found) == {expected},
            f"{len(self.found)} runs beside: {self.found[0][:12]}, with train {expected[:12]}",
            rounds=self.rounds,
        )
