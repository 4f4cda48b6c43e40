"""The organiser's side: `Clients.ask` over a federated engine.

`conduct` runs the ordinary experiment with a `Remote` transport; an engine adapter brings the `Channel`.
live.json in the run folder always says what is waited for and until when.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from wardround.config import Config
from wardround.data.federation import PROXY, Federation
from wardround.deploy.agreement import agreed, for_hospitals
from wardround.deploy.wire import Parcel, ParcelError, pack, unpack
from wardround.engine.checkpoint import Standing
from wardround.engine.clients import Answer
from wardround.engine.experiment import Experiment, Outcome, check_folder
from wardround.engine.gate import Registration
from wardround.engine.host import PICTURES, Host, InProcess, Spilling
from wardround.errors import ConfigError, TooFewClients, WardroundError
from wardround.messages import Message
from wardround.storage import file_name, write_json, write_text

log = logging.getLogger(__name__)

AWAY_SECONDS = 20.0  # without a sign of life, before a hospital is no longer asked
LARGEST = 4 * 2**30  # bytes of one reply; what a hospital registered bounds it further
WAITING_STEP = 0.2


class Channel(Protocol):
    """How parcels reach hospitals; every federated engine brings one."""

    def alive(self) -> Mapping[str, float]:
        """Every hospital that was heard of, and how many seconds ago."""
        ...

    def exchange(self, requests: Mapping[str, Parcel], deadline: float) -> Iterator[tuple[str, Parcel]]:
        """Send each hospital its parcel; yield replies as they come, until `time.monotonic()` is past it."""
        ...

    def strays(self) -> list[tuple[str, str]]:
        """Replies nobody waited for since the last call: which hospital, and what was wrong."""
        ...


class Live:
    """live.json: what the run is doing at this moment, for `status` and for whoever watches."""

    def __init__(self, path: Path, **facts: Any) -> None:
        self._path = path
        self.facts: dict[str, Any] = {
            "state": "starting",
            "task": None,
            "round": None,
            "waiting_for": [],
            "until": None,
            "away": {},
            "stray": 0,
            **facts,
        }

    def say(self, **facts: Any) -> None:
        self.facts |= {**facts, "updated": now().isoformat(timespec="seconds")}
        write_json(self._path, self.facts)

    def wait(self, task: str, round: int, names: Sequence[str], seconds: float) -> None:
        until = (now() + timedelta(seconds=seconds)).isoformat(timespec="seconds")
        self.say(state="waiting", task=task, round=round, waiting_for=sorted(names), until=until)


def now() -> datetime:
    return datetime.now(UTC)


class Remote:
    """A transport to hospitals: every request carries all it needs, so a hospital may die and come back.

    names: the hospitals of the run; own: the client on the organiser's machine, where a method has one;
    pictures_at: where clients' folders are, if on this machine (a rehearsal).
    """

    def __init__(
        self,
        channel: Channel,
        config: Config,
        *,
        run: str,
        names: Sequence[str],
        live: Live,
        exchange: Path,
        own: InProcess | None = None,
        pictures_at: Callable[[str], Path] | None = None,
    ) -> None:
        self.names = sorted(names)
        self.facts: dict[str, Mapping[str, Any]] = {}
        self._channel = channel
        self._config = config
        self._asked = for_hospitals(config)
        self._run = run
        self._live = live
        self._own = own
        self._pictures_at = pictures_at
        self._spilling = Spilling(exchange)
        self._registered: dict[str, Registration] = {}
        self._strays: list[tuple[str, str]] = []
        self._gone: dict[str, str] = {}

    # Registration

    def register(self) -> list[Registration]:
        """Ask every hospital of the run what it has; those that do not answer take no part."""
        if self._registered:
            return list(self._registered.values())
        self._wait_for(self.names, len(self.names), "register", 0)
        requests = {name: Message() for name in self.names}
        troubles = {}
        for answer in self._deliver("register", -1, requests, Standing()):
            reason = answer.failure or answer.refused
            if reason is None:
                try:
                    self._enter(answer)
                    continue
                except (KeyError, TypeError, ValueError) as error:
                    reason = f"its registration cannot be read ({type(error).__name__}: {error})"
            troubles[answer.client] = reason
            log.warning("hospital '%s' takes no part: %s", answer.client, reason)
        if len(self._registered) < self._config.min_clients:
            details = "; ".join(f"'{name}': {reason}" for name, reason in sorted(troubles.items()))
            raise TooFewClients(
                f"{len(self._registered)} hospitals registered, min_clients is {self._config.min_clients}. "
                f"{details}"
            )
        if self._own is not None:
            for entry in self._own.register():
                self._registered[entry.client] = entry
        return list(self._registered.values())

    def _enter(self, answer: Answer) -> None:
        scalars = answer.message.scalars
        entry = Registration.of({**scalars["registration"], "client": answer.client})
        self._registered[answer.client] = entry
        self.facts[answer.client] = dict(scalars["facts"])

    # Requests

    def deliver(
        self, task: str, round: int, messages: Mapping[str, Message], standing: Standing
    ) -> Iterator[Answer]:
        self._spilling.begin(round)
        own = set(self._own.host.names) if self._own is not None else set()
        away = {name: message for name, message in messages.items() if name not in own}
        if away:
            yield from self._deliver(task, round, away, standing)
        if self._own is not None:
            here = {name: message for name, message in messages.items() if name in own}
            yield from self._own.deliver(task, round, here, standing)

    def _deliver(
        self, task: str, round: int, messages: Mapping[str, Message], standing: Standing
    ) -> Iterator[Answer]:
        needed = min(self._config.min_clients, len(messages))
        present = self._wait_for(list(messages), needed, task, round)
        for name in messages:
            if name not in present:
                yield Answer(name, failure=self._gone.get(name, "it is not connected"))
        requests, ids = {}, {}
        more = {"config": self._asked, "standing": standing.facts()}
        for name in present:
            ids[name] = secrets.token_hex(16)
            requests[name] = pack(
                messages[name],
                kind="request",
                run=self._run,
                request=ids[name],
                client=name,
                task=task,
                round=round,
                more=more,
            )
        seconds = self._config.deadline
        pending = set(present)
        self._live.wait(task, round + 1, sorted(pending), seconds)
        for name, parcel in self._channel.exchange(requests, time.monotonic() + seconds):
            if name not in pending:
                self._strays.append((name, f"a second answer to '{task}'"))
                continue
            pending.discard(name)
            self._live.wait(task, round + 1, sorted(pending), seconds)
            yield self._spilling.kept(self._answer(name, parcel, ids[name], task, round, messages[name]))
        for name in sorted(pending):
            reason = f"no answer to '{task}' within the deadline of {seconds:g} s"
            self._gone[name] = reason
            yield Answer(name, failure=reason)
        self._live.say(state="working", waiting_for=[], until=None, away=dict(self._gone))

    def _answer(
        self, name: str, parcel: Parcel, request: str, task: str, round: int, sent: Message
    ) -> Answer:
        """What a reply says; one that is not what was asked for is refused."""
        try:
            message, more = unpack(
                parcel,
                kind="reply",
                run=self._run,
                request=request,
                client=name,
                task=task,
                round=round,
                largest=LARGEST,
                base=sent.params,
            )
            for key in ("failure", "refused"):
                if more.get(key) is not None:
                    words = f"the hospital refuses: {more[key]}" if key == "refused" else str(more[key])
                    return Answer(name, failure=words[:2000])
            return Answer(
                name,
                message,
                num_examples=more["num_examples"],
                num_steps=more["num_steps"],
                seconds=float(more["seconds"]),
                loss={str(term): float(value) for term, value in dict(more["loss"]).items()},
                num_bytes=parcel.num_bytes,
            )
        except ParcelError as error:
            return Answer(name, refused=str(error))
        except (KeyError, TypeError, ValueError) as error:
            return Answer(name, refused=f"it cannot be read ({type(error).__name__}: {error})")

    def _wait_for(self, names: Sequence[str], needed: int, task: str, round: int) -> list[str]:
        """The named hospitals that are there; if fewer than needed, wait for them until the deadline."""
        end = time.monotonic() + self._config.deadline
        told = False
        while True:
            heard = self._channel.alive()
            present = [name for name in names if heard.get(name, AWAY_SECONDS) < AWAY_SECONDS]
            if len(present) >= needed or time.monotonic() >= end:
                break
            if not told:
                missing = sorted(set(names) - set(present))
                self._live.wait(f"{task} (to connect)", round + 1, missing, self._config.deadline)
                log.info("waiting for %s to connect, at most %g s", ", ".join(missing), self._config.deadline)
                told = True
            time.sleep(WAITING_STEP)
        for name in names:
            if name in present and self._gone.pop(name, None) is not None:
                log.info("hospital '%s' is back", name)
            elif name not in present:
                self._gone[name] = f"it was not heard of for {AWAY_SECONDS:g} s"
        return present

    # The rest of a transport

    def settle(self) -> None:
        """Hospitals bring their memory to the disk with every task."""
        if self._own is not None:
            self._own.settle()

    def strays(self) -> list[tuple[str, str]]:
        found = [*self._strays, *self._channel.strays()]
        self._strays = []
        if found:
            self._live.facts["stray"] += len(found)
        return found

    def pictures(self, name: str) -> Path | None:
        return None if self._pictures_at is None else self._pictures_at(name)

    def close(self) -> None:
        """The engine ends its own processes."""


# A whole run


def conduct(
    channel: Channel,
    config: Config,
    *,
    names: Sequence[str],
    resume: bool = False,
    overwrite: bool = False,
    job: str = "",
    pictures_at: Callable[[str], Path] | None = None,
    on_experiment: Callable[[Experiment], None] | None = None,
) -> Outcome:
    """Run an experiment whose clients are at hospitals; everything lands in the run folder.

    on_experiment: gets the experiment before it starts, to be able to stop it.
    """
    folder = config.folder
    live = Live(folder / "live.json", job=job, rounds=config.rounds, run=None)
    try:
        refuse_what_cannot_travel(config)
        check_folder(config, resume, overwrite)
        run = run_id(folder, resume)
        live.say(run=run)
        remote = Remote(
            channel,
            config,
            run=run,
            names=names,
            live=live,
            exchange=folder / "exchange",
            own=organisers_own(config),
            pictures_at=pictures_at,
        )
        remote.register()
        hospitals = {name: entry for name, entry in remote._registered.items() if name in remote.facts}
        federation = with_proxy(config, agreed(remote.facts, hospitals))
        experiment = Experiment(config, hospitals=remote, federation=federation)
        if on_experiment is not None:
            on_experiment(experiment)
        outcome = experiment.run(resume=resume, overwrite=overwrite)
    except BaseException as error:
        reason = str(error) if isinstance(error, WardroundError) else f"{type(error).__name__}: {error}"
        live.say(state="failed", reason=reason, waiting_for=[], until=None)
        raise
    live.say(state=outcome.status, waiting_for=[], until=None)
    return outcome


def refuse_what_cannot_travel(config: Config) -> None:
    method = config.build_method()
    if method.pooled:
        raise ConfigError(
            f"method '{config.method.get('name')}' puts all cases in one place, which hospitals do not allow."
            " Use it with wardround train on cases you may have."
        )


def run_id(folder: Path, resume: bool) -> str:
    """The name under which hospitals keep what belongs to this run; it stays when the run is resumed."""
    path = folder / "run_id.txt"
    if resume and path.exists():
        return path.read_text(encoding="utf-8").strip()
    run = secrets.token_hex(8)
    write_text(path, run + "\n")
    return run


def organisers_own(config: Config) -> InProcess | None:
    """The server's own labelled cases, for methods that need some."""
    if "proxy" not in config.build_method().needs or config.data.proxy is None:
        return None
    host = Host(config, config.folder / "clients", [PROXY])
    return InProcess(host, Spilling(config.folder / "exchange"))


def with_proxy(config: Config, federation: Federation) -> Federation:
    return replace(federation, proxy=config.data.proxy)


def rehearsed_pictures(kits: Path, folder: Path, name: str) -> Path:
    """Where a hospital on this machine leaves its pictures of a run."""
    run = run_id(folder, resume=True)
    return kits / name / "state" / file_name(run) / file_name(name) / PICTURES
