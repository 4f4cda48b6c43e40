"""The hospital's side: one request in, one reply out, and a line in the ledger before it leaves.

A request carries all it needs (the run's configuration included), so a hospital that was restarted continues
from its own disk. `Site.answer` never raises: what is refused or fails is a reply that says
so. Only a ledger that cannot be written raises, and then nothing may leave.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wardround.clients import Answer, SyncState
from wardround.clients.secure_sum import SUM_TASKS
from wardround.config import TrafficSettings
from wardround.data.serving.loading import federation_of
from wardround.data.settings import DataSettings
from wardround.deploy import limits
from wardround.deploy.agreement import collect_facts, localise_config, open_own_federation
from wardround.deploy.kits.kit import DATA, KIT, SITE, Kit, open_kit
from wardround.deploy.kits.signing import site_identity
from wardround.deploy.kits.statements import Sign
from wardround.deploy.ledger import Ledger
from wardround.deploy.rules import SURVEY, Rules
from wardround.deploy.site_file import SiteFile, find_client, load_site
from wardround.deploy.survey.answering import answer_survey
from wardround.deploy.survey.proposals import ProposalFolder
from wardround.deploy.wire import Parcel, ParcelError, pack, unpack
from wardround.engine.host import REASON_KEPT, Host
from wardround.engine.networks import network_for
from wardround.errors import ConfigError, WardroundError
from wardround.files import file_name
from wardround.messages import Message
from wardround.params import Params
from wardround.privacy import BUDGET_FILE, Policy, PrivacySettings, combine
from wardround.privacy.secure_sum import Identity
from wardround.training.device import set_threads

log = logging.getLogger(__name__)

REQUESTS, ANSWERED = "requests.txt", "answered"
REQUEST = re.compile(r"[0-9a-f]{16,64}")


class Refused(WardroundError):
    """A request this hospital does not answer."""


@contextmanager
def keep_reasons(policy: Policy) -> Iterator[None]:
    """Under privacy, why cases cannot be used stays in the hospital's log: it may tell of them."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        if not policy.is_on:
            raise
        raise WardroundError(REASON_KEPT) from error


def refuse(reason: str | None) -> None:
    """Refuse, where there is a reason to."""
    if reason is not None:
        raise Refused(reason)


def open_site(sign: Sign) -> Site:
    """The site whose kit the environment names; sign: has `wardround join` sign with the kit's key."""
    kit = open_kit(Path(os.environ[KIT]), "hospital")
    return Site(kit.name, read_site_of(kit), kit.state, site_identity(kit, sign))


def read_site_of(kit: Kit) -> SiteFile:
    """The hospital's rules; the environment may name another file, and other cases."""
    site = load_site(Path(os.environ.get(SITE) or kit.site_file))
    return site.model_copy(update={"data": Path(os.environ[DATA])}) if os.environ.get(DATA) else site


def choose_device(site: SiteFile) -> str:
    """The device that training runs on, in words; one this machine does not have is an error."""
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind, _, number = site.device.partition(":")
    if kind == "cuda" and int(number or 0) >= there:
        found = f"this machine has {there} GPUs, counted from 0" if there else "torch finds no GPU here"
        raise ConfigError(f"site.yaml: device is '{site.device}', but {found}. Set device to auto or cpu.")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(
            "site.yaml: device is 'mps', but torch finds no GPU of Apple's here. Set device to auto or cpu."
        )
    return "cuda" if site.device == "auto" and there else "cpu" if site.device == "auto" else site.device


def describe_data(site: SiteFile, name: str) -> str:
    """What a hospital will take part with, in words; raises where its cases cannot be used."""
    if not isinstance(site.data, Path):
        return "synthetic cases, as the organiser's configuration describes them"
    found = federation_of(site.data, DataSettings(federation=site.data), 0)
    inside = find_client(site, found.names, name)
    return f"{found.counts[inside]} cases of '{inside}' in {site.data}"


class Site:
    """One hospital.

    state: the folder where it keeps its memory of runs, and its ledger. identity: who it is in secure sums,
    None where nobody can vouch for it. first_model: after a registration, the request that brings the model
    which the run begins with; the numbers are the organiser's where both ends build the network alike.
    """

    def __init__(self, name: str, site: SiteFile, state: Path, identity: Identity | None = None) -> None:
        self.name = name
        self.identity = identity
        self._site = site
        self._rules = Rules(site)
        self._state = state
        self._ledger = Ledger(state / "egress.jsonl")
        self._hosts: dict[str, Host] = {}  # the present run's alone
        self._seen: dict[str, dict[str, str]] = {}
        self._begun = 0.0  # when the present task began
        self.first_model: Parcel | None = None

    def answer(self, parcel: Parcel) -> Parcel:
        """Do what is asked for, if the rules allow it."""
        self.first_model = None
        header = parcel.header if isinstance(parcel.header, Mapping) else {}
        about = {key: _text(header.get(key)) for key in ("run", "request", "task")}
        round, base = _round(header.get("round")), None
        is_damaged = False
        try:
            message, more = self._open_request(parcel, header)
            base = message.optional_params
            if about["task"] in SURVEY:
                reply, facts = self._answer_survey(about["task"], message)
                traffic = None
            else:
                host = self._host(about["run"], more["config"])
                sync_state = SyncState.from_dict(more["sync_state"])
                host.store(self.name).follow(sync_state)
                if about["task"] in host.method.tasks:  # others change no memory
                    self._begin(host, about["run"], about["request"])
                answer = self._run_task(host, about["task"], round, message, sync_state)
                reply, facts = self._filter_reply(host, about["task"], answer)
                traffic = host.config.traffic
        except (Refused, ParcelError) as error:
            log.warning("%s, round %d: refused: %s", about["task"], round + 1, error)
            reply, facts, traffic = Message(), {"refused": str(error)}, None
            is_damaged = isinstance(error, ParcelError)  # the true one may still come
        except Exception as error:  # a hospital's mistake must reach the organiser as an answer
            log.warning("%s, round %d failed", about["task"], round + 1, exc_info=True)
            words = str(error) if isinstance(error, WardroundError) else f"{type(error).__name__}: {error}"
            reply, facts, traffic = Message(), {"failure": self._rules.redact(words)}, None
        try:
            made = self._pack(about, round, reply, facts, traffic, base)
        except ParcelError as error:
            made = self._pack(about, round, Message(), {"failure": f"the answer cannot be sent: {error}"})
        reason = self._rules.too_large("answer", made.num_bytes)
        if reason is not None:
            made = self._pack(about, round, Message(), {"refused": reason})
        self._ledger.append(made.header, made.num_bytes, name=self._run_name(header))  # before it leaves
        if not is_damaged and is_named(about):  # what answers in a sum is gone with this process anyway
            self._note(about["run"], about["request"], ANSWERED, durable=about["task"] not in SUM_TASKS)
        return made

    @staticmethod
    def _run_name(header: Mapping[str, Any]) -> str | None:
        more = header.get("more")
        config = more.get("config") if isinstance(more, Mapping) else None
        return _text(config.get("name")) if isinstance(config, Mapping) else None

    def _pack(
        self,
        about: Mapping[str, str],
        round: int,
        message: Message,
        facts: Mapping[str, Any],
        traffic: TrafficSettings | None = None,
        base: Params | None = None,
    ) -> Parcel:
        address: dict[str, Any] = {**about, "kind": "reply", "client": self.name, "round": round}
        return pack(message, **address, more=facts, traffic=traffic, base=base)

    # Coming in

    def _open_request(self, parcel: Parcel, header: Mapping[str, Any]) -> tuple[Message, dict[str, Any]]:
        """The request, checked: the rules first, which need no byte of its tensors."""
        task, run, request = (_text(header.get(key)) for key in ("task", "run", "request"))
        more = header.get("more")
        config = more.get("config") if isinstance(more, Mapping) else None
        if not isinstance(config, Mapping):
            raise Refused("the request has no configuration of its run")
        if not is_named({"run": run, "request": request}):
            raise Refused("the request has no valid id of its own or of its run")
        refuse(self._rules.refuses_request(task, config=config, bytes=_num_bytes(parcel)))
        largest = self._site.largest_message
        opened = unpack(parcel, kind="request", client=self.name, largest=largest, finite=True)
        refuse(self._rules.refuses_rows(task, opened[0]))
        if self._load_requests(run).get(request) == ANSWERED:
            raise Refused("this request was answered before (a replay)")
        return opened

    # Requests are answered once. One that a crash interrupted comes again, and is done again unless memory
    # has changed since it was begun: its task would then count twice.

    def _begin(self, host: Host, run: str, request: str) -> None:
        before = self._load_requests(run).get(request)
        present = _version(host.store(self.name).folder)
        if before is not None and before != present:
            raise Refused("this request was carried out before, and its answer was lost")
        if before is None:
            self._note(run, request, present)

    def _load_requests(self, run: str) -> dict[str, str]:
        """Requests of a run and how far each came; kept on the disk, so that they outlive the process."""
        if run not in self._seen:
            path = self._folder(run) / REQUESTS
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            pairs = (line.split() for line in lines)
            self._seen = {run: {pair[0]: pair[1] for pair in pairs if len(pair) == 2}}
        return self._seen[run]

    def _note(self, run: str, request: str, state: str, *, durable: bool = True) -> None:
        known, path = self._load_requests(run), self._folder(run) / REQUESTS
        if known.get(request) == state:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{request} {state}\n")
            file.flush()
            if durable:
                os.fsync(file.fileno())
        known[request] = state

    def _folder(self, run: str) -> Path:
        return self._state / file_name(run)

    def _host(self, run: str, asked: Mapping[str, Any]) -> Host:
        """The hospital's cases with this run's network; kept for the length of the run."""
        key = json.dumps([run, asked], sort_keys=True)
        if key not in self._hosts:
            self._hosts.clear()
            self._hosts[key] = self._open_host(run, asked)
        return self._hosts[key]

    def _open_host(self, run: str, asked: Mapping[str, Any]) -> Host:
        """The same, opened now; what is too large is refused before it is built."""
        rules, resources = self._rules, self._site.resources
        config = localise_config(asked, device=self._site.device, threads=self._site.threads)
        refuse(rules.refuses_run(config))
        if config.compute.threads is not None:
            set_threads(config.compute.threads)
        policy = combine(config.privacy, self._site.privacy)
        with keep_reasons(policy):
            names = ProposalFolder(self._state).find_names(config.data)
            federation = open_own_federation(config, self._site, self.name, names)
            refuse(resources.refuses_scans(config, federation))
            federation.prepare_clients()
        refuse(resources.refuses_network(config, federation))
        if policy.run.secure_sum:
            self._check_sums(config.privacy, policy.run)
        host = Host(
            config,
            self._folder(run),
            [self.name],
            self._keep_time,
            federation=federation,
            durable=True,
            policy=policy,
            budget=self._state / BUDGET_FILE,
            identity=self.identity,
        )
        with keep_reasons(policy):
            client = host.client(self.name)
        told = client.num_examples if client.guard is None else client.guard.cases
        refuse(rules.too_few(client.num_examples) or resources.refuses_steps(config, told))
        return host

    def _check_sums(self, asked: PrivacySettings, own: PrivacySettings) -> None:
        """Refuse a run whose sums cannot be what this hospital demands, before any training."""
        if self.identity is None:
            raise Refused(
                "this hospital has no key to sign with, which privacy.secure_sum needs. Kits of wardround "
                "provision and startup kits of FLARE have one; FLARE's simulator has none"
            )
        if not asked.secure_sum:
            raise Refused("this hospital answers only runs with privacy.secure_sum: true (its site.yaml)")
        if own.level == "client" != asked.level:
            raise Refused(
                "this hospital demands noise of the client level in the sum, which all hospitals share: set "
                "privacy.level: client in the run"
            )

    def _keep_time(self, *_: Any) -> None:
        """Refuse a task that takes too long; called with every training step, and at its end."""
        refuse(self._site.resources.too_long(time.monotonic() - self._begun))

    # Going out

    def _run_task(self, host: Host, task: str, round: int, message: Message, sync_state: SyncState) -> Answer:
        if task != "register":
            self._begun = time.monotonic()
            answer = host.run(self.name, task, round, message, sync_state)
            self._keep_time()
            return answer
        with keep_reasons(host.policy):
            registration = host.register(self.name)
            facts = collect_facts(host.federation)
        self.first_model = build_first_request(host)
        if host.policy.is_on:  # measured on cases, and only for a plan
            facts |= {"shape": None, "spacing": None}
            told = dict.fromkeys(facts.get("lacks", ()), registration.num_train or 1)
            facts |= {"lacks": told} if "lacks" in facts else {}
        scalars = {"registration": registration.as_dict(), "facts": facts}
        client = host.client(self.name)
        count = client.num_examples if client.guard is None else registration.num_train
        return Answer(self.name, Message(scalars=scalars), num_examples=count)

    def _answer_survey(self, task: str, message: Message) -> tuple[Message, dict[str, Any]]:
        """What a survey asks for, as far as it may leave."""
        self._begun = time.monotonic()
        reply, count = answer_survey(task, message, self._site, self.name, self._state, self._keep_time)
        self._keep_time()
        refuse(self._rules.refuses_reply(task, reply, 0, count))
        told = reply.scalars.get("fingerprint", {}).get("cases")
        num, seconds = told if isinstance(told, int) else 0, time.monotonic() - self._begun
        return reply, {"num_examples": num, "num_steps": 0, "seconds": seconds, "loss": {}}

    def _filter_reply(self, host: Host, task: str, answer: Answer) -> tuple[Message, dict[str, Any]]:
        """The reply and the facts beside it, as far as they may leave."""
        data = host.client(self.name).data
        if answer.failure is not None:
            names = [name for split in (data.train, data.val, data.test) for name in split.names]
            return Message(), {"failure": self._rules.redact(answer.failure, names)}
        message = self._rules.filter_message(task, answer.message)
        refuse(self._rules.refuses_reply(task, message, 0, len(data.train)))
        refuse(self._rules.too_few_behind(answer.num_trained))
        return message, {
            "num_examples": answer.num_examples,
            "num_steps": answer.num_steps,
            "seconds": answer.seconds,
            "loss": self._rules.filter_loss(task, answer.loss),
            **({"privacy": answer.privacy} if answer.privacy else {}),
        }


def build_first_request(host: Host) -> Parcel:
    """The model of a run before any training, as a request would bring it."""
    start = host.method.start(network_for(host.config, host.federation))
    address: dict[str, Any] = {"run": "", "request": "", "client": "", "task": "train", "round": 0}
    return pack(Message(start.params), kind="request", **address)


# Of a request that is not checked yet


def _text(value: Any) -> str:
    return value[:200] if isinstance(value, str) else ""


def is_named(about: Mapping[str, str]) -> bool:
    return bool(about["run"] and REQUEST.fullmatch(about["request"]))


def _round(value: Any) -> int:
    is_count = isinstance(value, int) and not isinstance(value, bool) and -1 <= value < limits.ROUNDS
    return value if is_count else -1


def _version(folder: Path) -> str:
    """A hash of the memory files' times; it changes when one is written."""
    files = sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("memory-*.safetensors"))
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]


def _num_bytes(parcel: Parcel) -> int:
    try:
        return parcel.num_bytes
    except (TypeError, ValueError, AttributeError, RecursionError):  # no JSON, or no arrays
        raise Refused("the request holds something other than plain JSON and numeric arrays") from None
