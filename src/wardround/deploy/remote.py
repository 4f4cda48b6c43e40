"""The organiser's side: `Clients.ask` over a channel to hospitals.

`Remote` is a transport like those of the engine; `run_process` and `nvflare` provide the `Channel`.
"""

from __future__ import annotations

import logging
import math
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from wardround.clients import Answer, Registration, Snapshot, SyncState
from wardround.clients.secure_sum import SUM_TASKS
from wardround.config import Config
from wardround.deploy import limits
from wardround.deploy.agreement import DataFacts, make_hospital_config
from wardround.deploy.live_file import Live
from wardround.deploy.rules import SURVEY
from wardround.deploy.strict_json import show
from wardround.deploy.survey.replies import read_decision, read_surveyed
from wardround.deploy.wire import Parcel, ParcelError, pack, unpack
from wardround.engine.checksums import read_object
from wardround.engine.judging.calibration import fit_temperature, pooled_quantiles, summarise_test
from wardround.engine.judging.evaluation import gather
from wardround.engine.judging.result_tables import case_rows
from wardround.engine.transports.local import InProcess, Spilling
from wardround.errors import TooFewClients
from wardround.files import write_json
from wardround.messages import Message, Reply
from wardround.tables import one_line

log = logging.getLogger(__name__)
WAITING_STEP = 0.2
REGISTRATIONS = "registrations.json"
# Tasks whose replies have no model.
NUMBERS_ONLY = {"register", "evaluate", "calibrate", "pictures", *SURVEY, *SUM_TASKS} - {"sum_masked"}
STATISTICS = ("running_mean", "running_var")  # as torch calls those of every norm layer


class Channel(Protocol):
    """How parcels reach hospitals, over our own connection or a federated engine."""

    def alive(self) -> Mapping[str, float]:
        """Every hospital that was heard from, and how many seconds ago."""

    def exchange(
        self, requests: Mapping[str, Parcel], deadline: float, absent_after: float
    ) -> Iterator[tuple[str, Parcel]]:
        """Send each hospital its parcel; yield replies as they come.

        Ends when all have answered, when `time.monotonic()` is past the deadline, or when none of those still
        expected was heard from for `absent_after` seconds.
        """

    def strays(self) -> list[tuple[str, str]]:
        """Unexpected replies since the last call: which hospital, and what was wrong."""


class Remote:
    """A transport to hospitals: every request carries all it needs, so a hospital may crash and rejoin.

    names: the hospitals of the run; own: the client on the organiser's machine, where a method has one;
    pictures_at: where clients' folders are, if on this machine (a rehearsal); facts, hospitals: what those
    that registered said; what they say is checked before it is used, and replies are not kept.
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
        resumes: bool = False,
        own: InProcess | None = None,
        pictures_at: Callable[[str], Path] | None = None,
    ) -> None:
        self.names = sorted(names)
        self.facts: dict[str, DataFacts] = {}
        self._channel = channel
        self._config = config
        self._asked = make_hospital_config(config)
        self._run = run
        self._live = live
        self._own = own
        self._pictures_at = pictures_at
        self._folder = exchange.parent
        self._resumes = resumes
        self._spilling = Spilling(exchange)
        self._registered: dict[str, Registration] = {}
        self._strays: deque[tuple[str, str]] = deque(maxlen=limits.STRAYS)
        self._gone: dict[str, str] = {}
        self._longest: dict[str, float] = {}  # seconds of the longest answer, by task

    # Registration

    def register(self) -> list[Registration]:
        """Ask every hospital of the run what it has; those that do not answer do not take part."""
        if self._registered:
            return list(self._registered.values())
        present = self._wait_for(self.names, len(self.names), "register", -1)
        requests = {name: Message() for name in self.names}
        troubles = {}
        for answer in self._deliver("register", -1, requests, SyncState(), present):
            reason = answer.failure or answer.refused
            if reason is None:
                try:
                    self._enter(answer.client, answer.message.scalars)
                    continue
                except (KeyError, TypeError, ValueError) as error:
                    reason = f"its registration cannot be read ({describe_error(error)})"
            troubles[answer.client] = reason
        changed = self._refuse_other_counts()
        self._remember_those_away(troubles)
        troubles |= changed
        for name, reason in troubles.items():
            self._gone[name] = reason
            log.warning("hospital '%s' does not take part: %s", name, reason)
        if len(self.facts) < self._config.min_clients:
            why = "; ".join(f"'{name}': {reason.rstrip('.')}" for name, reason in sorted(troubles.items()))
            raise TooFewClients(
                f"{len(self.facts)} hospitals registered, min_clients is {self._config.min_clients}. {why}"
            )
        if self._own is not None:
            for entry in self._own.register():
                self._registered[entry.client] = entry
        return list(self._registered.values())

    @property
    def hospitals(self) -> dict[str, Registration]:
        return {name: self._registered[name] for name in sorted(self.facts)}

    def _enter(self, name: str, said: Mapping[str, Any]) -> None:
        facts = DataFacts.model_validate(said["facts"])
        entry = Registration.from_dict({**said["registration"], "client": name})
        if max(entry.num_train, entry.num_val, entry.num_test) > limits.CASES:
            raise ValueError(f"more than {limits.CASES} cases")
        if entry.annotates and len(entry.annotates) != facts.num_classes - 1:
            raise ValueError(f"it annotates {len(entry.annotates)} of {facts.num_classes - 1} classes")
        shapes = [shape for group in (entry.tensors, entry.kept) for shape, _ in group.values()]
        fit = all(len(shape) <= limits.AXES and max(shape, default=0) <= limits.SIDE for shape in shapes)
        if len(shapes) > limits.TENSORS or not fit:
            raise ValueError("too many tensors, or one with too many or too long sides")
        self._registered[name], self.facts[name] = entry, facts

    def _refuse_other_counts(self) -> dict[str, str]:
        """A resumed run goes on with the cases it began with: other counts would be other weights."""
        changed = {}
        known = self._read_registrations()
        for name in [name for name in self.facts if name in known]:
            before, now = known[name]["registration"]["num_train"], self._registered[name].num_train
            if before != now:
                changed[name] = f"it registered {before} training cases when the run began, and {now} now"
                del self._registered[name], self.facts[name]
        return changed

    def _read_registrations(self) -> dict[str, Any]:
        """What hospitals registered when a run that is resumed began."""
        path = self._folder / REGISTRATIONS
        return read_object(path) if self._resumes and path.exists() else {}

    def _remember_those_away(self, troubles: dict[str, str]) -> None:
        """A resumed run knows its hospitals: one that is away for now may rejoin later."""
        known = self._read_registrations()
        for name in [name for name in troubles if name in known]:
            self._enter(name, known[name])
            log.warning("hospital '%s' is away for now: %s", name, troubles.pop(name))
        said = {
            name: {"registration": entry.as_dict(), "facts": self.facts[name].model_dump(mode="json")}
            for name, entry in self.hospitals.items()
        }
        write_json(self._folder / REGISTRATIONS, {**known, **said})

    # Requests

    def deliver(
        self, task: str, round: int, messages: Mapping[str, Message], sync_state: SyncState
    ) -> Iterator[Answer]:
        self._spilling.begin(round)
        own = set(self._own.host.names) if self._own is not None else set()
        away = {name: message for name, message in messages.items() if name not in own}
        if away:
            yield from self._deliver(task, round, away, sync_state)
        if self._own is not None:
            here = {name: message for name, message in messages.items() if name in own}
            yield from self._own.deliver(task, round, here, sync_state)

    def _deliver(
        self,
        task: str,
        round: int,
        messages: Mapping[str, Message],
        sync_state: SyncState,
        present: Sequence[str] | None = None,
    ) -> Iterator[Answer]:
        if present is None:
            needed = min(self._config.min_clients, len(messages))
            present = self._wait_for(list(messages), needed, task, round)
        for name in messages:
            if name not in present:
                yield Answer(name, failure=self._gone.get(name, "it is not connected"))
        requests = self._requests(task, round, {name: messages[name] for name in present}, sync_state)
        ids = {name: str(parcel.header["request"]) for name, parcel in requests.items()}
        began = time.monotonic()
        deadline = began + self._config.give_seconds(self._longest.get(task, 0.0))
        pending, bad = set(present), dict[str, str]()
        self._live.wait(task, round + 1, sorted(pending), deadline)
        for name, parcel in self._channel.exchange(requests, deadline, self._config.absent_after):
            if name not in pending:
                what = "a second answer" if name in ids else "an unrequested answer"
                self._strays.append((name, f"{what} to '{task}'"))
                continue
            answer = self._answer(name, parcel, ids[name], task, round, messages[name])
            del parcel
            if name in bad:  # of two, one at most is the right one
                self._strays.append((name, bad.pop(name)))
            if answer.refused is not None:
                bad[name] = answer.refused  # the right one may still come
                continue
            pending.discard(name)
            self._longest[task] = max(self._longest.get(task, 0.0), time.monotonic() - began)
            if pending:
                self._live.wait(task, round + 1, sorted(pending), deadline)
            yield self._spilling.kept(answer)
            del answer
        for name in sorted(pending):
            late = f" within the deadline of {deadline - began:g} s" if time.monotonic() >= deadline else ""
            yield self._missing(name, task, bad.get(name), late or self._describe_silence(name))
        self._live.say(state="working", waiting_for=[], until=None, away=dict(self._gone))

    def _requests(
        self, task: str, round: int, messages: Mapping[str, Message], sync_state: SyncState
    ) -> dict[str, Parcel]:
        more = {"config": self._asked, "sync_state": sync_state.as_dict()}
        about: dict[str, Any] = {"kind": "request", "run": self._run, "task": task, "round": round}
        return {
            name: pack(message, **about, request=secrets.token_hex(16), client=name, more=more)
            for name, message in messages.items()
        }

    def _describe_silence(self, name: str) -> str:
        seconds = self._channel.alive().get(name, 0.0)
        return (
            f", and it has not been heard from for {seconds:.0f} s"
            if seconds >= self._config.absent_after
            else ""
        )

    def _missing(self, name: str, task: str, refused: str | None, why: str) -> Answer:
        """The answer recorded for a reply that did not come, or was not the right one."""
        if refused is not None:
            return Answer(name, refused=refused)
        self._gone[name] = f"no answer to '{task}'{why}"
        return Answer(name, failure=self._gone[name])

    def _answer(
        self, name: str, parcel: Parcel, request: str, task: str, round: int, sent: Message
    ) -> Answer:
        """What a reply says; one that is not what was asked for is refused."""
        about: dict[str, Any] = {"kind": "reply", "run": self._run, "task": task, "round": round}
        try:
            message, more = unpack(
                parcel,
                **about,
                request=request,
                client=name,
                base=sent.optional_params,
                **bound_reply(task, self._registered.get(name)),
            )
            for key in ("failure", "refused"):
                if more.get(key) is not None:
                    words = f"the hospital refuses: {more[key]}" if key == "refused" else str(more[key])
                    return Answer(name, failure=one_line(words[: limits.REASON]))
            answer = Answer(name, message, num_bytes=parcel.num_bytes, **read_facts(more))
            check_usable(task, sent, answer, self._registered.get(name))
            return answer
        except ParcelError as error:
            return Answer(name, refused=str(error))
        except Exception as error:  # untrusted content must not end the run
            return Answer(name, refused=f"it cannot be read ({describe_error(error)})")

    def _wait_for(self, names: Sequence[str], needed: int, task: str, round: int) -> list[str]:
        """The named hospitals that are there; if fewer than needed, wait for them until the deadline."""
        away, seconds = self._config.absent_after, self._config.give_seconds()
        end, told = time.monotonic() + seconds, False
        while True:
            heard = self._channel.alive()
            present = [name for name in names if heard.get(name, away) < away]
            if len(present) >= needed or time.monotonic() >= end:
                break
            if not told:
                missing = sorted(set(names) - set(present))
                self._live.wait(f"{task} (to connect)", round + 1, missing, end)
                log.info("waiting for %s to connect, at most %g s", ", ".join(missing), seconds)
                told = True
            time.sleep(WAITING_STEP)
        for name in names:
            if name in present and self._gone.pop(name, None) is not None:
                log.info("hospital '%s' is back", name)
            elif name not in present:
                self._gone[name] = f"it has not been heard from for {away:g} s"
        return present

    # The rest of a transport

    def snapshot(self, round: int) -> Snapshot:
        """Hospitals write their memory to disk with every task."""
        return Snapshot(0, lambda: None) if self._own is None else self._own.snapshot(round)

    def strays(self) -> list[tuple[str, str]]:
        found = [*self._strays, *self._channel.strays()]
        self._strays.clear()
        if found:
            self._live.facts["stray"] += len(found)
        return found

    def pictures(self, name: str) -> Path | None:
        return None if self._pictures_at is None else self._pictures_at(name)

    def close(self) -> None:
        """The engine ends its own processes."""


def describe_error(error: Exception) -> str:
    return one_line(" ".join(f"{type(error).__name__}: {error}".split())[:300])


# What a reply may hold, known before it is unpacked


def bound_reply(task: str, registration: Registration | None) -> dict[str, Any]:
    """For `unpack`: bytes on the way, bytes unpacked, and the params that a client's reply may have."""
    if task in SURVEY:
        return {"largest": limits.SURVEY_BYTES, "expected": {}}
    if task in NUMBERS_ONLY or registration is None:
        return {"largest": min(limits.HEADER_CHARACTERS, limits.REPLY_BYTES), "expected": {}}
    if task != "train":  # these are not compressed, so they cost no more memory than they have bytes
        return {"largest": limits.REPLY_BYTES}
    # not `kept`, which a hospital can say what it likes of: only `tensors` were compared with our network
    model = sum(math.prod(shape) * dtype.itemsize for shape, dtype in registration.tensors.values())
    room = limits.REPLY_MODELS * model + limits.EXTRAS_BYTES
    return {
        "largest": min(room + limits.HEADER_CHARACTERS, limits.REPLY_BYTES),
        "unpacked": min(room, limits.REPLY_BYTES),
        "expected": registration.tensors,
    }


def read_facts(more: Mapping[str, Any]) -> dict[str, Any]:
    """Counts, seconds and losses beside a reply; a ValueError names one that is not inside its limits."""
    loss = more["loss"]
    if not isinstance(loss, dict) or len(loss) > limits.LOSS_TERMS:
        raise ValueError(f"a loss is not an object of at most {limits.LOSS_TERMS} terms")
    largest = sys.float_info.max  # so that infinities are refused, and NaN is nowhere between
    return {
        "num_examples": read_number("num_examples", more["num_examples"], 0, limits.CASES, int),
        "num_steps": read_number("num_steps", more["num_steps"], 0, limits.STEPS, int),
        "seconds": float(read_number("seconds", more["seconds"], 0, limits.SECONDS, int | float)),
        "loss": {
            term: float(read_number(f"loss '{show(term)}'", value, -largest, largest, int | float))
            for term, value in loss.items()
        },
        "privacy": read_privacy(more.get("privacy", {})),
    }


def read_privacy(told: Any) -> dict[str, Any]:
    """What a hospital says it did for privacy; only what we know, inside its limits."""
    if not isinstance(told, dict):
        raise ValueError("privacy is not an object")
    if not told:
        return {}
    largest = sys.float_info.max
    words = {key: one_line(str(told[key]))[:100] for key in ("level", "scores", "counts")}
    numbers = {
        key: float(read_number(f"privacy {key}", told[key], 0, largest, int | float))
        for key in ("epsilon", "delta", "total", "limit")
        if key in told
    }
    filters = told["filters"]
    if not isinstance(filters, list) or len(filters) > limits.FILTERS:
        raise ValueError(f"privacy has not at most {limits.FILTERS} filters")
    shared = {"shared": True} if told.get("shared") is True else {}
    return {**words, **numbers, **shared, "filters": [read_filter(entry) for entry in filters]}


def read_filter(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("filter"), str):
        raise ValueError("privacy holds something other than filters")
    numbers = {key: entry[key] for key in ("clip", "noise") if key in entry}
    most = sys.float_info.max
    return {
        "filter": one_line(entry["filter"])[:100],
        **{key: float(read_number(key, value, 0, most, int | float)) for key, value in numbers.items()},
    }


def read_number(name: str, value: Any, least: float, most: float, kind: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{name} is {show(value)}, not a {'whole ' if kind is int else ''}number")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}, not between {least:g} and {most:g}")
    return value


def check_usable(task: str, sent: Message, answer: Answer, registration: Registration | None) -> None:
    """Raise where the engine could not use an answer to one of its own tasks; the gate checks the rest."""
    message, name = answer.message, answer.client
    reply = Reply(message.params, message.extras, message.scalars, client=name, num_examples=1)
    if task == "evaluate":
        check_scores(reply, list(sent.scalars["metrics"]), registration)
    elif task == "fingerprint":
        read_surveyed(name, message.scalars)
    elif task == "agree":
        read_decision(message.scalars)
    elif task == "calibrate" and sent.scalars["step"] == "temperature":
        fit_temperature([reply])
        int(reply.scalars["cases"])
    elif task == "calibrate":
        summarise_test([reply])
        pooled_quantiles([reply] if "validation" in reply.scalars else [])
    elif task in ("norm_stats", "personal_model"):
        given = reply.extras["stats" if task == "norm_stats" else "model"]
        for tensor, (shape, dtype) in ((name, sent.params.spec(name)) for name in sent.params):
            needed = task == "personal_model" or tensor.endswith(STATISTICS)
            if given and needed and (tensor not in given or given.spec(tensor) != (shape, dtype)):
                raise ValueError(f"tensor '{tensor}' is missing, or of another shape or type than was sent")


def check_scores(reply: Reply, metrics: list[str], registration: Registration | None) -> None:
    """Raise where the scores of an evaluation cannot be used: a row for each case, or sums over them."""
    if ("aggregate" in reply.scalars) == ("cases" in reply.scalars):
        raise ValueError("it holds neither scores nor sums of them, or both")
    found = gather([reply], metrics)
    case_rows(found, metrics).csv()
    entry = registration
    most = limits.CASES if entry is None else entry.num_train + entry.num_val + entry.num_test
    for sums in found.aggregates.values():
        counts = [one.num for own in sums.scores.values() for one in own.values() if one is not None]
        if max(counts, default=0) > most:
            raise ValueError(f"sums are over {max(counts)} cases, but {most} were registered")
