"""Thirty rounds, four hospitals, random kills of hospitals and of their job processes. Up to ten minutes."""

import random
import signal
import threading
import time

import psutil
from common import Checks, Deployment, Failed, below, described, records, settings, since, until

ROUNDS = 30
SEED = 7
SECONDS = 600.0
PAUSE = (5.0, 14.0)  # between kills
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
        local_epochs=2,
    )
    with Checks(__doc__) as checks, Deployment(NAMES, checks.options.keep) as hospitals:
        hospitals.serve()
        hospitals.join_all()
        folder = hospitals.run_folder("soak")
        began = time.monotonic()
        command = hospitals.submit(config)
        memory: dict[int, float] = {}  # MiB of the run's process on the server, by rounds done
        threads: dict[int, int] = {}
        until(lambda: len(records(folder)) >= 1, 180, "round 1 is recorded")
        with Reaper(checks, hospitals) as reaper:
            (server,) = hospitals.server_jobs()
            while command.is_running:
                if since(began) > SECONDS:
                    raise Failed(f"the run did not end within {SECONDS:.0f} s: {hospitals.live('soak')}")
                try:
                    done = len(records(folder))
                    memory[done], threads[done] = server.memory_info().rss / 2**20, server.num_threads()
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
        checks.check(numbers == list(range(1, ROUNDS + 1)), "all thirty rounds are recorded, each once")
        early, end = memory.get(10, 0.0), memory.get(ROUNDS - 1, 0.0)
        checks.check(
            0 < end < 1.05 * early,
            "the server's job process has not grown between round 10 and the end",
            mib=[round(early, 1), round(end, 1)],
        )
        checks.note(f"MiB after each round: {' '.join(f'{value:.0f}' for value in memory.values())}")
        checks.note(f"threads after each round: {' '.join(str(value) for value in threads.values())}")
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
