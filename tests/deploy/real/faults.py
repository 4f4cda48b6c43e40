"""Hospitals and servers die, networks fail, people press Ctrl-C: four hospitals, real processes. A quarter of an hour.

python tests/deploy/real/faults.py [--only hospital,returns,server,network,late,signals,rehearse]
"""

import asyncio
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from common import (
    START_SECONDS,
    Checks,
    Command,
    Deployment,
    Failed,
    below,
    described,
    fingerprint,
    records,
    settings,
    since,
    trained,
    until,
)

from wardround.deploy.authority import Authority, write_manifest
from wardround.deploy.kits import open_kit
from wardround.deploy.project import load_project

NAMES = ["east", "north", "south", "west"]
BEHIND = "south"  # the hospital whose network fails


def slow(name: str, method: str, **changes: Any) -> dict[str, Any]:
    """A run whose training takes some seconds a round, so that something can happen meanwhile."""
    return settings(
        name,
        method,
        **{
            "data": {"phantom": {"hospitals": 4, "size": 64, "cases": 40}},
            "model": {"name": "unet2d", "base_filters": 8, "levels": 3},
            "local_epochs": 4,
            "deadline": 150.0,
            **changes,
        },
    )


# A network that can fail


class Proxy:
    """Stands between a hospital and the server; frozen, it passes nothing on and closes nothing; cut, every
    connection breaks at once."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        ready = threading.Event()
        threading.Thread(target=self._work, args=[ready], daemon=True).start()
        ready.wait(10)

    def _work(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        listening = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = listening.sockets[0].getsockname()[1]
        self._open.set()
        ready.set()
        self._loop.run_forever()

    def freeze(self) -> None:
        self._loop.call_soon_threadsafe(self._open.clear)

    def thaw(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._cut, True)

    def mend(self) -> None:
        self._loop.call_soon_threadsafe(self._cut, False)

    def _cut(self, is_cut: bool) -> None:
        self._is_cut = is_cut
        for writer in list(self._writers) if is_cut else []:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            other, back = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pump(reader, back), self._pump(other, writer))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        self._writers.add(sink)
        try:
            while data := await source.read(65536):
                await self._open.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            self._writers.discard(sink)
            sink.close()


class Disturbed(Deployment):
    """A deployment with one hospital behind a network that can fail."""

    def __enter__(self) -> "Disturbed":
        super().__enter__()
        self.proxy = Proxy(self.port)
        project = load_project(self.folder / "project.yaml")
        authority = Authority.open(self.kits / ".authority", project, None)
        put_behind(self.kits / BEHIND, self.port, self.proxy.port, authority)
        return self


def put_behind(kit: Path, port: int, other: int, authority: Authority) -> None:
    """Let a kit connect to another port of the same machine, and sign that."""
    file = kit / "kit.json"
    file.write_text(file.read_text().replace(str(port), str(other)))
    write_manifest(open_kit(kit, "hospital"), authority)


# The parts


def hospital(checks: Checks, hospitals: Deployment) -> None:
    """kill -9 of a hospital in the middle of round 2; it comes back in round 4 with its memory."""
    deadline = 60.0
    config = slow("hospital", "scaffold", rounds=5, min_clients=3, deadline=deadline)
    folder = hospitals.run_folder("hospital")
    command = hospitals.submit(config)
    began = waits(hospitals, "hospital", 2, "train")
    time.sleep(1.5)
    checks.check("west" in hospitals.live("hospital")["waiting_for"], "west is training in round 2")
    hospitals.joined["west"].kill()
    checks.note("west is killed")
    until(lambda: hospitals.live("hospital").get("task") != "train", deadline + 30, "round 2 closes")
    closed = time.monotonic()
    checks.check(
        closed - began < deadline + 1,
        f"round 2's training closes within its deadline of {deadline:g} s",
        seconds=round(closed - began, 1),
    )
    hospitals.join("west")
    until(lambda: len(records(folder)) >= 2, 60, "round 2 is recorded", 0.01)
    recorded = time.monotonic()
    third = waits(hospitals, "hospital", 3, "train")
    checks.check(
        third - recorded < 5, "round 3 starts within 5 s after it", seconds=round(third - recorded, 1)
    )
    checks.check(third - closed < 5, "and after the deadline", seconds=round(third - closed, 1))
    (job,) = hospitals.job_processes("north")
    job.suspend()  # round 3 lasts until west is back, however fast this machine is
    until(lambda: hospitals.heard().get("west", 60) < 4, 50, "west is back", 1.0)
    checks.check(True, "west's job process is heard of again", seconds=round(time.monotonic() - closed, 1))
    job.resume()
    hospitals.wait_done(command, "hospital", 400)
    took_part = [who_trained(record) for record in records(folder)]
    missed = [number for number, names in enumerate(took_part) if "west" not in names]
    checks.check("west" in took_part[0] and 1 in missed, "west took part in round 1, not in round 2")
    checks.check("west" in took_part[3], "west is back in round 4", missed=[number + 1 for number in missed])
    checks.check(all(len(names) >= 3 for names in took_part), "three hospitals or more in every round")
    expected = without(hospitals.folder, config, "west", missed)
    found = fingerprint(folder)
    checks.check(
        found == expected,
        f"with its memory: {found[:12]}, and {expected[:12]} where only its replies of those rounds are missing",
    )
    checks.check(hospitals.ledger_holds("west"), "the ledger of west verifies")


def without(folder: Path, config: dict[str, Any], name: str, missed: list[int]) -> str:
    """The SHA-256 of the run in one process, where a client does not train in some rounds."""
    import wardround as wr
    from wardround.clients import Answer
    from wardround.engine.host import Host

    run = Host.run

    def spoiled(self: Host, client: str, task: str, round: int, *more: Any) -> Answer:
        if client == name and task == "train" and round in missed:
            return Answer(client, failure="away")
        return run(self, client, task, round, *more)

    Host.run = spoiled  # type: ignore[method-assign, assignment]
    try:
        result = wr.run({**config, "output": str(folder / "without")})
    finally:
        Host.run = run  # type: ignore[method-assign]
    return str(result.params_sha256)


def returns(checks: Checks, hospitals: Deployment) -> None:
    """A hospital, and then the job process of another, die while they train and are back in time."""
    # long enough that neither has answered when it is killed: what was answered is not answered again
    config = slow("returns", "scaffold", rounds=3, local_epochs=12)
    expected = trained(hospitals.folder, config)
    command = hospitals.submit(config)
    waits(hospitals, "returns", 2, "train")
    time.sleep(1.5)
    hospitals.joined["west"].kill()
    killed = time.monotonic()
    hospitals.join("west")
    checks.note("west is killed in round 2, and started again")
    began = waits(hospitals, "returns", 3, "train")
    checks.check(True, "round 2 ends with everybody", seconds=round(began - killed, 1))
    time.sleep(1.5)
    jobs = hospitals.job_processes("north")
    checks.check(len(jobs) == 1, "north has one job process in round 3")
    for job in jobs:
        job.kill()
    checks.note("the job process of north is killed in round 3")
    hospitals.wait_done(command, "returns", 400)
    lost = {
        place: reason
        for record in records(hospitals.run_folder("returns"))
        for place, reason in record["lost"].items()
    }
    checks.check(not lost, "no reply was lost", lost=lost)
    same(checks, hospitals, "returns", expected)


def server(checks: Checks, hospitals: Deployment) -> None:
    """kill -9 of the server in each phase of round 2 of FedEvi; resumed each time."""
    config = slow("server", "fedevi", rounds=3, local_epochs=2)
    expected = trained(hospitals.folder, config)
    folder = hospitals.run_folder("server")
    command = hospitals.submit(config)
    for phase in ("train", "score", "evaluate", "between"):
        if phase == "between":
            until(lambda: len(records(folder)) >= 2, START_SECONDS, "round 2 is recorded", 0.002)
        else:
            waits(hospitals, "server", 2, phase, step=0.005)
            time.sleep(1.0 if phase == "train" else 0.1)
        hospitals.server.kill()
        facts = hospitals.live("server")
        where = f"{facts.get('state')}, {facts.get('task')}, round {facts.get('round')}"
        left = below(hospitals.organiser)
        checks.note(f"the server is killed in phase '{phase}' ({where})")
        code = command.wait(60)
        checks.check(
            code not in (0, 130), "submit says that its server is gone", code=code, said=last_line(command)
        )
        checks.check(
            until_gone(hospitals.organiser, 10), "no process of the server is left", left=described(left)
        )
        began = time.monotonic()
        hospitals.serve()
        hospitals.wait_connected(NAMES)
        checks.check(True, "server and hospitals are together again", seconds=since(began))
        command = hospitals.resume("server")
    hospitals.wait_done(command, "server", 400)
    checks.check(len(records(folder)) == 3, "three rounds are recorded")
    same(checks, hospitals, "server", expected)


def network(checks: Checks, hospitals: Disturbed) -> None:
    """The network of one hospital passes nothing on for a minute, then breaks for a minute."""
    config = slow("network", "scaffold", rounds=4)
    expected = trained(hospitals.folder, config)
    command = hospitals.submit(config)
    proxy = hospitals.proxy
    for round, what, lose, restore in (
        (2, "stands still", proxy.freeze, proxy.thaw),
        (3, "is cut", proxy.cut, proxy.mend),
    ):
        began = waits(hospitals, "network", round, "train")
        time.sleep(1.0)
        lose()
        checks.note(f"the network of {BEHIND} {what} in round {round}")
        time.sleep(60.0)
        waiting = hospitals.live("network")["waiting_for"]
        checks.check(waiting == [BEHIND], f"after a minute round {round} waits for {BEHIND} alone")
        restore()
        back = time.monotonic()
        ended = waits(hospitals, "network", round + 1, "train")
        seconds = rounded(ended - back)
        checks.check(True, f"round {round} ends after the network is back", seconds=seconds)
        checks.check(
            ended - began < config["deadline"], "within its deadline", seconds=rounded(ended - began)
        )
    hospitals.wait_done(command, "network", 400)
    same(checks, hospitals, "network", expected)


def late(checks: Checks, hospitals: Deployment) -> None:
    """A hospital that answers after the deadline is refused once and counted, and takes part again."""
    config = slow("late", "fedavg", rounds=5, min_clients=3, deadline=30.0)
    folder = hospitals.run_folder("late")
    command = hospitals.submit(config)
    waits(hospitals, "late", 2, "train")
    time.sleep(0.5)
    (job,) = hospitals.job_processes("north")
    job.suspend()
    checks.note("the job process of north is stopped in round 2")
    waits(hospitals, "late", 3, "train")
    job.resume()
    checks.note("it goes on in round 3")
    facts = hospitals.wait_done(command, "late", 400)
    found = records(folder)
    strays = [line for record in found for line in record.get("stray", [])]
    checks.check("north" not in who_trained(found[1]), "round 2 closes without north")
    checks.check(len(strays) == 1 and "late" in strays[0], "its reply is refused once", strays=strays)
    checks.check(facts["stray"] == 1, "and counted in live.json", stray=facts["stray"])
    checks.check("north" in who_trained(found[-1]), "north takes part in the last round")
    checks.check(len(found) == 5, "five rounds are recorded")


def signals(checks: Checks, hospitals: Deployment) -> None:
    """Ctrl-C and SIGTERM: submit, join, server."""
    config = slow("signals", "fedavg", rounds=30)
    command = hospitals.submit(config)
    waits(hospitals, "signals", 1, "train")
    ends(checks, command, signal.SIGINT, "submit", None)
    round = hospitals.live("signals")["round"]
    until(lambda: hospitals.live("signals")["round"] > round, 120, "the run goes on without submit")
    checks.check(True, "the run goes on without submit")
    ends(checks, hospitals.joined["east"], signal.SIGINT, "join", hospitals.kits / "east")
    ends(checks, hospitals.joined["west"], signal.SIGTERM, "join", hospitals.kits / "west")
    ends(checks, hospitals.server, signal.SIGINT, "server, with a run going on", hospitals.organiser)
    hospitals.serve()
    ends(checks, hospitals.server, signal.SIGTERM, "server, with hospitals", hospitals.organiser)
    for name, number in (("north", signal.SIGTERM), ("south", signal.SIGINT)):
        ends(checks, hospitals.joined[name], number, "join, without a server", hospitals.kits / name)


def rehearse(checks: Checks, hospitals: Deployment) -> None:
    """Ctrl-C, once and twice, and SIGTERM: rehearse."""
    config = {**slow("rehearse", "fedavg", rounds=30), "output": str(hospitals.folder / "rehearse")}
    file, folder = hospitals.config(config), hospitals.folder / "rehearse"
    rehearsed = hospitals.start("rehearse", "rehearse", file)
    in_rehearsal(folder)
    rehearsed.signal(signal.SIGINT)
    began = time.monotonic()
    code = rehearsed.wait(90)
    checks.check(
        code == 130 and until_gone(folder, 10) and "--resume" in rehearsed.text,
        "rehearse, Ctrl-C once: the round ends, a checkpoint is written, nothing is left",
        code=code,
        seconds=since(began),
    )
    done = len(records(folder))
    rehearsed = hospitals.start("rehearse", "rehearse", folder, "--resume")
    in_rehearsal(folder)
    checks.check(len(records(folder)) >= done >= 1, "rehearse --resume goes on", rounds=done)
    rehearsed.signal(signal.SIGINT)
    time.sleep(0.5)
    ends(checks, rehearsed, signal.SIGINT, "rehearse, twice", folder)
    for seconds in (3.0, 6.0, 9.0):  # no round, or at most the first, has begun
        rehearsed = hospitals.start("rehearse", "rehearse", folder, "--resume")
        time.sleep(seconds)
        ends(checks, rehearsed, signal.SIGINT, f"rehearse, {seconds:g} s after its start", folder)
    rehearsed = hospitals.start("rehearse", "rehearse", folder, "--resume")
    in_rehearsal(folder)
    ends(checks, rehearsed, signal.SIGTERM, "rehearse", folder)


def in_rehearsal(folder: Path) -> None:
    """Until this rehearsal trains."""
    before = time.time()

    def trains() -> bool:
        try:
            facts = json.loads((folder / "live.json").read_text())
            fresh = (folder / "live.json").stat().st_mtime > before
        except (OSError, ValueError):
            return False
        return fresh and facts["state"] == "waiting" and facts["task"] == "train" and bool(facts["round"])

    until(trains, START_SECONDS, "the rehearsal trains")


def ends(checks: Checks, command: Command, number: signal.Signals, what: str, folder: Path | None) -> None:
    """A signal ends a command within 10 s, with exit code 130, and with it all it started."""
    tree = command.tree()
    command.signal(number)
    began = time.monotonic()
    try:
        code: int | None = command.wait(20)
    except Failed:
        code = None
    left = [process for process in tree if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    seconds = since(began)
    clean = folder is None or until_gone(folder, max(0.1, 10 - seconds))
    checks.check(
        code == 130 and seconds < 10 and not left and clean,
        f"{number.name} to {what}: all gone within 10 s",
        seconds=seconds,
        code=code,
        left=described(left if folder is None else below(folder)),
    )


# What they share


def rounded(seconds: float) -> float:
    return round(seconds, 1)


def waits(hospitals: Deployment, run: str, round: int, task: str, step: float = 0.02) -> float:
    """The moment at which a run waits for hospitals in this round and task."""
    hospitals.wait_phase(run, round, task, START_SECONDS, step)
    return time.monotonic()


def who_trained(record: dict[str, Any]) -> set[str]:
    return {name for entry in record["exchanges"] if entry["task"] == "train" for name in entry["bytes_up"]}


def same(checks: Checks, hospitals: Deployment, run: str, expected: str) -> None:
    found = fingerprint(hospitals.run_folder(run))
    checks.check(
        found == expected and len(found) == 64, f"{run}: {found[:12]}, undisturbed with train {expected[:12]}"
    )


def until_gone(folder: Path, seconds: float) -> bool:
    try:
        until(lambda: not below(folder), seconds, "all processes are gone", 0.2)
    except Failed:
        return False
    return True


def last_line(command: Command) -> str:
    return (command.text.strip().splitlines() or [""])[-1][-160:]


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with Checks(__doc__) as checks, Disturbed(NAMES, checks.options.keep) as hospitals:
        if checks.wants("rehearse"):
            with checks.part(str(rehearse.__doc__)):
                rehearse(checks, hospitals)
        parts = [
            part
            for part in (hospital, returns, server, network, late, signals)
            if checks.wants(part.__name__)
        ]
        if not parts:
            return
        hospitals.serve()
        hospitals.join_all()
        for part in parts:  # signals is the last one: it ends everything
            with checks.part(str(part.__doc__)):
                part(checks, hospitals)
        for name in NAMES:
            checks.check(hospitals.ledger_holds(name), f"the ledger of {name} verifies")


if __name__ == "__main__":
    main()
