"""Hospitals and servers die, networks fail, people press Ctrl-C: four hospitals, real processes. Twenty minutes.

python tests/deploy/real/faults.py [--only hospital,returns,server,network,late,kills,signals,rehearse]
"""

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections import Counter
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
    command_line,
    described,
    fingerprint,
    records,
    settings,
    since,
    trained,
    until,
)

from wardround.deploy.kits.authority import Authority, write_manifest
from wardround.deploy.kits.kit import open_kit
from wardround.deploy.kits.project import load_project

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
    absent = 10.0
    config = slow("hospital", "scaffold", rounds=5, min_clients=3, absent_after=absent, deadline=600.0)
    folder = hospitals.run_folder("hospital")
    command = hospitals.submit(config)
    waits(hospitals, "hospital", 2, "train")
    (own,) = hospitals.job_processes("west")
    own.suspend()  # it has not answered when it is killed, however fast this machine is
    time.sleep(1.5)
    checks.check("west" in hospitals.live("hospital")["waiting_for"], "west is training in round 2")
    hospitals.joined["west"].kill()
    own.resume()
    killed = time.monotonic()
    checks.note("west is killed")
    others: list[float] = []  # when nobody but west was waited for

    def is_closed() -> bool:
        facts = hospitals.live("hospital")
        if not others and facts.get("waiting_for") == ["west"]:
            others.append(time.monotonic())
        return facts.get("task") != "train"

    until(is_closed, 300, "round 2 closes")
    closed = time.monotonic()
    alone = max([killed + absent, *others])  # both must have come to pass
    checks.check(
        closed - alone < 5,
        f"round 2's training closes within absent_after of {absent:g} s and 5, once the others have answered",
        seconds=round(closed - killed, 1),
        others=round(others[0] - killed, 1) if others else None,
    )
    hospitals.join("west")
    until(lambda: len(records(folder)) >= 2, 60, "round 2 is recorded", 0.01)
    recorded = time.monotonic()
    third = waits(hospitals, "hospital", 3, "train")
    checks.check(
        third - recorded < 5, "round 3 starts within 5 s after it", seconds=round(third - recorded, 1)
    )
    (job,) = hospitals.job_processes("north")
    job.suspend()  # round 3 lasts until west is back, however fast this machine is
    until(lambda: hospitals.heard().get("west", 60) < 4, START_SECONDS, "west is back", 1.0)
    returned = hospitals.live("hospital")["round"]
    checks.check(True, "west's job process is heard of again", seconds=round(time.monotonic() - closed, 1))
    job.resume()
    hospitals.wait_done(command, "hospital", 400)
    took_part = [who_trained(record) for record in records(folder)]
    missed = [number for number, names in enumerate(took_part) if "west" not in names]
    checks.check("west" in took_part[0] and 1 in missed, "west took part in round 1, not in round 2")
    checks.check(
        "west" in took_part[returned],
        f"west returned in round {returned} and takes part in the next",
        missed=[number + 1 for number in missed],
    )
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
    config = slow("returns", "scaffold", rounds=3, local_epochs=12, absent_after=120)
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
            time.sleep(0.1)  # a fast machine is in the next round after a second
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
    config = slow("network", "scaffold", rounds=4, absent_after=120)  # a consortium that would rather wait
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


def kills(checks: Checks, hospitals: Deployment) -> None:
    """kill -9 at random times of random processes, twenty times, with resumes: the same bytes."""
    config = slow("kills", "scaffold", rounds=40, min_clients=4, retries=9, absent_after=120)
    config["deadline"] = 300.0
    expected = trained(hospitals.folder, config)
    draw = random.Random(20)
    command = hospitals.submit(config)
    waits(hospitals, "kills", 1, "train")
    killed: list[str] = []
    while len(killed) < 20:
        time.sleep(draw.uniform(0.2, 2.0))
        if not command.is_running:
            facts = hospitals.live("kills")
            if facts.get("state") == "done":
                break
            command = hospitals.resume("kills")
            until(lambda: hospitals.live("kills").get("state") == "waiting", START_SECONDS, "it goes on")
            continue
        targets = [("server", process) for process in hospitals.server.tree()]
        targets += [(name, process) for name in NAMES for process in hospitals.joined[name].tree()]
        who, process = draw.choice(targets)
        what = command_line(process).partition("wardround")[2][:20]
        try:
            process.kill()
        except psutil.Error:
            continue
        killed.append(f"{who}:{what.split(chr(47))[0].strip()}")
        for name in ("server", *NAMES):  # a join whose process was killed while it started ends, too
            start_again(hospitals, name)
    for _ in range(20):
        if not command.is_running and hospitals.live("kills").get("state") == "done":
            break
        if not command.is_running:
            command = hospitals.resume("kills")
        command.wait(600)
    checks.check(len(killed) == 20, "twenty processes were killed", killed=dict(Counter(killed)))
    same(checks, hospitals, "kills", expected)


def start_again(hospitals: Deployment, who: str) -> None:
    """A command that ended is started anew; others start their processes themselves."""
    time.sleep(0.05)
    if who == "server" and not hospitals.server.is_running:
        until_gone(hospitals.organiser, 10)
        hospitals.serve()
    elif who != "server" and not hospitals.joined[who].is_running:
        until_gone(hospitals.kits / who, 10)
        hospitals.join(who)


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
    stops_when_resumed(checks, hospitals, config["name"], command)
    command = hospitals.resume(config["name"])

    def trains() -> bool:
        facts = hospitals.live("signals")
        return facts["state"] == "waiting" and facts["task"] == "train"

    until(trains, START_SECONDS, "the run trains again")
    ends(checks, command, signal.SIGINT, "submit", None)
    round = hospitals.live("signals")["round"]
    until(lambda: hospitals.live("signals")["round"] > round, 120, "the run goes on without submit")
    checks.check(True, "the run goes on without submit")
    ends(checks, hospitals.joined["east"], signal.SIGINT, "join", hospitals.kits / "east", 5)
    ends(checks, hospitals.joined["west"], signal.SIGTERM, "join", hospitals.kits / "west", 5)
    ends(checks, hospitals.server, signal.SIGINT, "server, with a run going on", hospitals.organiser)
    hospitals.serve()
    ends(checks, hospitals.server, signal.SIGTERM, "server, with hospitals", hospitals.organiser)
    for name, number in (("north", signal.SIGTERM), ("south", signal.SIGINT)):
        ends(checks, hospitals.joined[name], number, "join, without a server", hospitals.kits / name, 5)


def stops_when_resumed(checks: Checks, hospitals: Deployment, name: str, command: Command) -> None:
    """`stop` finds a run whose `submit --resume` has just begun."""
    hospitals.run("stop", name, "--kit", hospitals.organiser)
    checks.check(command.wait(120) == 130, "stop ends the run after its round")
    command = hospitals.resume(name)
    stopped = hospitals.run("stop", name, "--kit", hospitals.organiser)
    said = (stopped.stdout + stopped.stderr).strip()
    checks.check(stopped.returncode == 0, "stop right after a resume finds the run", said=said[:100])
    checks.check(command.wait(120) == 130, "and ends it")


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


def ends(
    checks: Checks,
    command: Command,
    number: signal.Signals,
    what: str,
    folder: Path | None,
    within: float = 10.0,
) -> None:
    """A signal ends a command in time, with exit code 130, and with it all it started."""
    tree = command.tree()
    command.signal(number)
    began = time.monotonic()
    try:
        code: int | None = command.wait(20)
    except Failed:
        code = None
    left = [process for process in tree if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    seconds = since(began)
    clean = folder is None or until_gone(folder, max(0.1, within - seconds))
    checks.check(
        code == 130 and seconds < within and not left and clean,
        f"{number.name} to {what}: all gone within {within:g} s",
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
            for part in (hospital, returns, server, network, late, kills, signals)
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
