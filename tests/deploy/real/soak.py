"""Ninety rounds, four hospitals, random kills of hospitals and of their job processes. Up to ten minutes."""

import random
import signal
import threading
import time

import psutil
from common import Checks, Deployment, Failed, below, described, records, settings, since, until

ROUNDS = 90
SEED = 7
SECONDS = 600.0
PAUSE = (5.0, 14.0)  # between kills
SETTLED = 120.0  # seconds: the engine keeps a record of every finished transfer for 65, then has as many as it will have
NAMES = ["east", "north", "south", "west"]


class Reaper:
    """Kills a hospital, all of it or its job process alone, again and again; what it kills is started again."""

    def __init__(self, checks: Checks, hospitals: Deployment) -> None:
        self._checks = checks
        self._hospitals = hospitals
        self._random = random.Random(SEED)
        self._done = threading.Event()
        self.kills: list[str] = []
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Reaper":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._done.wait(self._random.uniform(*PAUSE)):
            name = self._random.choice(NAMES)
            if self._random.random() < 0.5:
                self._hospitals.joined[name].kill()
                self._hospitals.join(name)
                self.kills.append(f"{name}, all of it")
            else:
                for process in self._hospitals.job_processes(name):
                    try:
                        process.kill()
                        self.kills.append(f"{name}, its job process")
                    except psutil.Error:
                        continue


def main() -> None:
    config = settings(
        "soak",
        "scaffold",
        rounds=ROUNDS,
        min_clients=2,
        deadline=25.0,
        retries=5,
        data={"phantom": {"hospitals": 4, "size": 48, "cases": 24}},
        local_epochs=20,
    )
    with Checks(__doc__) as checks, Deployment(NAMES, checks.options.keep) as hospitals:
        hospitals.serve()
        hospitals.join_all()
        folder = hospitals.run_folder("soak")
        began = time.monotonic()
        command = hospitals.submit(config)
        memory: dict[float, float] = {}  # MiB of the run's process on the server, by seconds since round 1
        until(lambda: len(records(folder)) >= 1, 180, "round 1 is recorded")
        first = time.monotonic()
        with Reaper(checks, hospitals) as reaper:
            (server,) = hospitals.server_jobs()
            while command.is_running:
                if since(began) > SECONDS:
                    raise Failed(f"the run did not end within {SECONDS:.0f} s: {hospitals.live('soak')}")
                try:
                    memory[since(first)] = server.memory_info().rss / 2**20
                except psutil.Error:
                    break
                time.sleep(0.5)
        code = command.wait(60)
        found = records(folder)
        lost = sum(len(record["lost"]) for record in found)
        strays = sum(len(record.get("stray", [])) for record in found)
        facts = {"seconds": since(began), "kills": len(reaper.kills), "lost": lost, "strays": strays}
        checks.check(code == 0, "the run ends", code=code, **facts)
        numbers = [record["round"] for record in found]
        checks.check(numbers == list(range(1, ROUNDS + 1)), "all rounds are recorded, each once")
        last = max(memory)
        early = [value for second, value in memory.items() if SETTLED < second < SETTLED + 60]
        late = [value for second, value in memory.items() if second > last - 30]
        checks.check(
            last > SETTLED + 120 and max(late) < 1.05 * max(early, default=0.0),
            f"the server's job process has not grown since it settled ({SETTLED:.0f} s after round 1)",
            mib=[round(max(early, default=0.0), 1), round(max(late), 1)],
            seconds=last,
        )
        shown = [value for number, value in enumerate(memory.values()) if number % 40 == 0]
        checks.note(f"MiB every 20 s: {' '.join(f'{value:.0f}' for value in shown)}")
        began = time.monotonic()
        until(lambda: not hospitals.server_jobs(), 30, "the run's process on the server is gone")
        checks.check(True, "the run's process on the server is gone", seconds=since(began))
        for name in NAMES:
            checks.check(hospitals.ledger_holds(name), f"the ledger of {name} verifies")
        for command in [*hospitals.joined.values(), hospitals.server]:
            command.signal(signal.SIGTERM)
        time.sleep(10.0)
        left = below(hospitals.folder)
        checks.check(not left, "no process is left 10 s after SIGTERM", left=described(left))


if __name__ == "__main__":
    main()
