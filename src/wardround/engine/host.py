"""Host: the clients of one process, and the tasks they can be asked for.

The same object serves the in-process loop, a worker process and a hospital's machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wardround.clients import Answer, Client, Registration, Snapshot, SyncState
from wardround.clients.client import run_to_completion
from wardround.clients.secure_sum import KEY, SUM_TASKS, Sender, Terms
from wardround.clients.traffic import as_received, count_wire_bytes
from wardround.config import Config, EvaluateSettings, TrafficSettings
from wardround.data.annotation import measurable
from wardround.data.cases import ClientData, TensorSplit
from wardround.data.federation import Federation
from wardround.data.listing import SPLITS
from wardround.data.opening import open_federation
from wardround.data.roles import POOLED, PROXY
from wardround.engine.cached_memory import CachedMemory, MemoryBudget
from wardround.engine.client_checks import check_client
from wardround.engine.judging.calibration import calibrate
from wardround.engine.judging.evaluation import score_cases
from wardround.engine.judging.pictures import PICTURES, take_pictures
from wardround.engine.judging.postprocessing import read_steps
from wardround.engine.memory_store import IN_FLIGHT, MemoryStore
from wardround.engine.networks import choose_compute, network_for
from wardround.errors import ClientError, WardroundError
from wardround.files import file_name
from wardround.messages import Message
from wardround.methods import build_method, build_objective
from wardround.metrics import METRICS
from wardround.params import Params
from wardround.privacy import BUDGET_FILE, Guard, Outgoing, Policy, PrivacyBudget, PrivacyRefusal
from wardround.privacy.checks import check_cards, check_network
from wardround.privacy.secure_sum import Identity
from wardround.seeding import seed_everything
from wardround.training.device import apply
from wardround.training.workbench import Workbench

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]

UNTOUCHED = SyncState()
REASON_KEPT = "the task failed; under privacy the reason stays in this client's log"


def list_taught_classes(data: ClientData, num_classes: int) -> tuple[bool, ...]:
    """`Registration.annotates`."""
    if data.num_unlabelled and data.num_unlabelled == len(data.train):
        return (False,) * (num_classes - 1)
    return () if data.annotation is None else data.annotation.told_classes


def check_sendable(reply: Any, task: str) -> Message:
    """The reply of a method's own code, if it can travel."""
    try:
        if isinstance(reply, Message) and reply.num_bytes >= 0:
            return reply
        reason = f"it is a {type(reply).__name__}, not a Message"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    raise ClientError(
        f"what the method's '{task}' returned cannot be sent ({reason}). Return a Message: params and extras "
        "are Params, scalars are plain numbers and text."
    )


def regions_of(client: Client, federation: Federation) -> Mapping[str, Sequence[int]]:
    """What can be measured by a client's labels."""
    return measurable(federation.regions, client.data.annotation)


def count_unlabelled(client: Client, num_train: int) -> int:
    """Training cases without a label; under privacy the number that is told of all, if none has one."""
    if client.guard is None:
        return client.data.num_unlabelled
    return num_train if client.data.num_unlabelled == client.num_examples else 0


def pass_on(guard: Guard, task: str, round: int, request: Message, answer: Answer) -> Answer:
    """The answer as it may leave, and what was done to it."""
    facts = {key: getattr(answer, key) for key in ("message", "num_examples", "num_steps", "seconds", "loss")}
    outgoing = guard.pass_on(round, Outgoing(task, request.optional_params, **facts))
    left = {key: getattr(outgoing, key) for key in facts}
    return replace(answer, **left, privacy=guard.report(outgoing))


def check_privacy(host: Host) -> None:
    """Refuse what does not work under the policy."""
    config, settings = host.config, host.policy.run
    method, objective = (
        config.method.get("name", "fedavg"),
        config.objective.get("name", host.method.objective),
    )
    check_cards(settings, method, host.method, objective, host.objective)
    check_network(settings, config.model.name, host.bench.model, host.shared)


def make_guard(host: Host, client: Client) -> Guard:
    """What stands between a client's answers and whoever asked for them."""
    cases, run = host.policy.run.cases or client.num_examples, host.folder(client.name).parent
    return Guard(
        host.policy,
        PrivacyBudget(host.budget or host.folder(client.name) / BUDGET_FILE),
        run.parent.name if host.budget is None else run.name,
        asked=host.config.privacy,
        rounds=host.config.rounds,
        cases=cases,
        steps=host.config.count_steps(cases),
        batch=host.config.batch_size,
        trainable=[name for name in Params.trainable(host.bench.model) if name in host.shared],
    )


def withhold(sender: Sender, client: Client, task: str, round: int, asked: Message, answer: Answer) -> Answer:
    """What leaves of a method's answer before it is summed in secret."""
    message, guard = answer.message, client.guard
    about, received = asked.scalars.get(KEY), asked.optional_params
    charge = partial(guard.charge_sum, round) if guard is not None else lambda: None
    return replace(answer, message=sender.withhold(about, round, task, message, received, charge))


def answer_sum(sender: Sender, client: Client, task: str, message: Message) -> Answer:
    """One exchange of a secure sum; it needs none of the client's cases."""
    started, guard = time.perf_counter(), client.guard
    reply = sender.answer(task, message)
    if guard is None:
        return Answer(client.name, reply, seconds=time.perf_counter() - started)
    done = Outgoing(task, None, reply).noted("secure_sum")
    return Answer(client.name, reply, privacy=guard.report(done) if task == "sum_masked" else {})


class Host:
    """Some clients, one workbench.

    folder: where each client keeps its own files; on_progress: called with client, step, steps;
    shared: names of the tensors that travel; kept: of those that the method leaves at the client;
    federation: other cases than the configuration names; room: what clients remember stays in memory as far
    as it fits there, and is written with a `snapshot`; durable: it is on the disk with every task; policy:
    what is private, if not as the configuration asks; budget: where a client's is, if not in its folder;
    identity: who signs for a client in secure sums, if its word is not enough.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        names: Sequence[str],
        on_progress: OnProgress | None = None,
        federation: Federation | None = None,
        *,
        room: MemoryBudget | None = None,
        durable: bool = False,
        policy: Policy | None = None,
        budget: Path | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.config = config
        self.policy = policy or Policy(config.privacy)
        self.budget = budget
        self.method = build_method(config)
        self.objective = build_objective(config)
        self.federation = federation or open_federation(config.data, config.seed, config.compute.resident)
        self.names = list(names)
        self._folder = folder
        self._room = room
        self._durable = durable
        self._on_progress = on_progress
        model = network_for(config, self.federation)
        travelling, heads = set(self.method.shared(model)), set(self.objective.local_names(model))
        self.shared = [name for name in model.state_dict() if name in travelling - heads]
        self.kept = [name for name in model.state_dict() if name not in travelling | heads]
        compute = choose_compute(config, self.federation, self.names, model, folder.parent)
        try:
            self.bench = Workbench(
                model,
                self.objective,
                config.optimizer,
                shared=self.shared,
                bn_stats=config.model.bn_stats,
                compute=compute,
            )
        except torch.OutOfMemoryError:
            raise WardroundError(
                f"{compute.device} has no room for the network '{config.model.name}'. Stop what else uses it "
                "(see nvidia-smi), or choose another device with compute.device."
            ) from None
        apply(self.bench.compute)
        check_privacy(self)
        self._clients: dict[str, Client] = {}
        self._stores: dict[str, MemoryStore | CachedMemory] = {}
        learned = list(Params.trainable(self.bench.model)) if self.policy.run.secure_sum else []
        terms = Terms.of(config.privacy, config.rounds)
        self.senders = {n: Sender(n, self.folder(n), learned, identity, terms) for n in self.names}

    # Registration and bookkeeping

    def register(self, name: str) -> Registration:
        """What the gate will hold this client's replies against."""
        data = self.client(name).data
        everything = Params(self.bench.model.state_dict())
        is_pooled = self.method.pooled and name != POOLED
        guard = self.client(name).guard
        num_train = len(data.train) if guard is None or not data.train else guard.cases
        return Registration(
            client=name,
            num_train=0 if is_pooled or name == PROXY else num_train,
            num_val=len(data.val),
            num_test=len(data.test),
            tensors={tensor: everything.spec(tensor) for tensor in self.shared},
            trainable=tuple(t for t in Params.trainable(self.bench.model) if t in self.shared),
            kept={tensor: everything.spec(tensor) for tensor in self.kept},
            num_pooled=len(data.train) if is_pooled and name != PROXY else 0,
            num_unlabelled=0 if is_pooled else count_unlabelled(self.client(name), num_train),
            annotates=list_taught_classes(data, self.federation.num_classes),
        )

    def client(self, name: str) -> Client:
        """The client, its cases loaded on first use and kept."""
        if name not in self._clients:
            data = self.federation.load(name)
            device = self.bench.device
            check_client(name, data, self.config, self.method, self.objective)
            splits = {split: getattr(data, split).to(device) for split in SPLITS}
            if self.policy.withholds_scores and name != PROXY:  # as if it had no cases to be judged on
                splits |= {"val": TensorSplit.of([]), "test": TensorSplit.of([])}
            data = replace(data, **splits)
            client = Client(name, data, self.bench, self._config_of(name), self.method.needs)
            client.guard = make_guard(self, client) if self.policy.is_on and name != PROXY else None
            self._clients[name] = client
        return self._clients[name]

    def _config_of(self, name: str) -> Config:
        """The configuration; the pooled client takes the steps of all clients that could train."""
        steps = self.config.local_steps
        if name != POOLED or steps is None:
            return self.config
        data = [
            self._clients[member].data if member in self._clients else self.federation.load(member)
            for member in self.federation.names
        ]
        count = sum(1 for cases in data if len(cases.train))
        return self.config.model_copy(update={"local_steps": steps * count})

    def close(self) -> None:
        """Release what would stay on a GPU until the next garbage collection."""
        self.bench.close()
        self._clients.clear()

    def folder(self, name: str) -> Path:
        return self._folder / file_name(name)

    def store(self, name: str) -> MemoryStore | CachedMemory:
        """The client's memory; the same object every time, which knows what it has checked."""
        if name not in self._stores:
            settings = self.config.checkpoint  # a hospital removes old memories itself, else the server does
            often = settings.least_often
            keep = settings.keep * often + IN_FLIGHT * (often - 1) if self._durable else None
            store = MemoryStore(self.folder(name), durable=self._durable, keep=keep)
            gpu = self.bench.device if self.bench.device.type == "cuda" else None
            self._stores[name] = store if self._room is None else CachedMemory(store, self._room, gpu)
        return self._stores[name]

    def snapshot(self, round: int) -> Snapshot:
        """What the clients remember after so many rounds, to be written."""
        return Snapshot.joined([self.store(name).snapshot(round) for name in self.names])

    # Tasks

    def send(
        self, name: str, task: str, round: int, message: Message, sync_state: SyncState = UNTOUCHED
    ) -> Answer:
        """Do a task; the reply as it would arrive, rounded where the upload is."""
        answer = self.run(name, task, round, message, sync_state)
        traffic = self.config.traffic
        if answer.failure is not None or traffic == TrafficSettings():
            return answer
        return replace(
            answer,
            message=as_received(answer.message, message.optional_params, traffic, task),
            num_bytes=count_wire_bytes(answer.message, message.optional_params, traffic, task),
        )

    def run(
        self, name: str, task: str, round: int, message: Message, sync_state: SyncState = UNTOUCHED
    ) -> Answer:
        """Do a task for a client; whatever goes wrong becomes an answer that says so."""
        started = time.perf_counter()
        reason: WardroundError | None = None

        def attempt() -> tuple[Client, Message]:
            client = self._prepare_client(name, round, sync_state)
            if client.guard is not None:
                client.guard.check_task(task, message)
            if task in ("norm_stats", "personal_model") and self.policy.run.secure_sum:
                raise PrivacyRefusal(f"task '{task}' of a single client is not done under privacy.secure_sum")
            return client, check_sendable(self._find_task(task)(client, message), task)

        try:
            if task in SUM_TASKS:
                return answer_sum(self.senders[name], self.client(name), task, message)
            client, reply = run_to_completion(attempt)  # out of memory restarts it with fewer cases at a time
            if self.bench.device.type == "mps":
                reply = reply.on_host()  # float64 is there, for the gate and the server
            if task == "train" and reply.optional_params is not None:
                reply = replace(reply, params=reply.params.only(self.shared))
            fitted, client.fitted = client.fitted, None  # one model in memory, not one a client
            answer = Answer(
                name,
                reply,
                num_examples=client.num_examples,
                num_steps=fitted.num_steps if fitted else 0,
                num_trained=fitted.num_examples if fitted else 0,
                seconds=time.perf_counter() - started,
                loss=dict(fitted.loss) if fitted else {},
            )
            if client.guard is not None:
                answer = pass_on(client.guard, task, round, message, answer)
            if self.policy.run.secure_sum and task in self.method.tasks:
                answer = withhold(self.senders[name], client, task, round, message, answer)
            self._save_memory(client, task, round, sync_state)
        except WardroundError as error:
            failure, reason = str(error), error
        except Exception as error:  # one client's mistake must not take the others down
            log.debug("client '%s', %s", name, task, exc_info=True)
            failure = f"{type(error).__name__}: {error}"
        except SystemExit as error:  # from foreign code; a wrapped network says so itself
            model = self.config.model.name
            failure = f"the code of '{model}' or of the method called sys.exit({error.code!r})"
        else:
            return replace(answer, seconds=time.perf_counter() - started) if client.guard is None else answer
        if self.policy.is_on and not isinstance(reason, PrivacyRefusal):
            log.warning("client '%s', %s: %s", name, task, failure)
            failure = REASON_KEPT
        return Answer(name, failure=failure, seconds=time.perf_counter() - started)

    def _prepare_client(self, name: str, round: int, sync_state: SyncState) -> Client:
        if name not in self.names:
            raise ClientError(f"client '{name}' is not served by this process")
        client = self.client(name)
        client.round = round
        client.fitted = None
        store = self.store(name)
        store.follow(sync_state)
        client.memory = store.load()
        progress = self._on_progress
        client.on_progress = None if progress is None else lambda step, steps: progress(name, step, steps)
        seed_everything(self.config.seed, "task", name, round)
        return client

    def _save_memory(self, client: Client, task: str, round: int, sync_state: SyncState) -> None:
        """Methods' tasks may change memory; the engine's own never do."""
        if task in self.method.tasks:
            for name in ("objective", "objective_second"):
                if not client.memory.get(name):
                    client.memory.pop(name, None)
            self.store(client.name).save(round, client.memory, len(sync_state.rewinds))
        client.memory = {}

    def _find_task(self, task: str) -> Callable[[Client, Message], Message]:
        own: dict[str, Callable[[Client, Message], Message]] = {
            "evaluate": self._evaluate,
            "personal_model": self._personal_model,
            "norm_stats": self._norm_stats,
            "pictures": self._pictures,
            "calibrate": self._calibrate,
        }
        if task in own:
            return own[task]
        if task in self.method.tasks:
            function: Callable[[Client, Message], Message] = getattr(self.method, task)
            return function
        raise ClientError(f"task '{task}' is not one this method knows")

    def _model_for(self, client: Client, message: Message) -> Params:
        """The params a client is judged with: its own version of what was sent.

        memory_of_round takes the memory kept with the best model; as_sent leaves the client's own aside.
        """
        if message.scalars.get("as_sent"):
            client.memory = {}
            return message.params
        if "memory_of_round" in message.scalars:
            client.memory = self.store(client.name).load_best(message.scalars["memory_of_round"])
        return self.method.personal(client, message.params)

    def _evaluate(self, client: Client, message: Message) -> Message:
        """Scores of the client's model on one of its splits."""
        params = self._model_for(client, message)
        asked = str(message.scalars["split"])
        metrics = [name for name in message.scalars["metrics"] if name in METRICS]
        regions, settings = regions_of(client, self.federation), self._settings_for(message)
        variants = [read_steps(steps) for steps in message.scalars.get("variants", ())]
        rows: list[dict[str, Any]] = []
        for name in SPLITS if asked == "all" else (asked,):
            split, tta = getattr(client.data, name), settings.tta and asked == "all"
            rows += score_cases(
                client, params, split, self.objective, regions, metrics, settings, variants, tta=tta
            )
        return Message(scalars={"cases": rows})

    def _settings_for(self, message: Message) -> EvaluateSettings:
        """How models are judged; the server sends the steps that `postprocess: auto` came to."""
        settings, steps = self.config.evaluate, message.scalars.get("postprocess")
        return settings if steps is None else settings.with_steps(read_steps(steps))

    def _personal_model(self, client: Client, message: Message) -> Message:
        """The client's own model, for tests at other sites (simulation only)."""
        return Message(extras={"model": self.bench.with_own(self._model_for(client, message), client.memory)})

    def _norm_stats(self, client: Client, message: Message) -> Message:
        """Running statistics of the sent model, estimated on this client's training cases."""
        stats = self.bench.reestimate_statistics(client.data.train, message.params, self.config.batch_size)
        return Message(extras={"stats": stats})

    def _calibrate(self, client: Client, message: Message) -> Message:
        """How well calibrated the client's model is: sums over its cases."""
        params = self._model_for(client, message)
        return calibrate(
            client, params, message, regions_of(client, self.federation), self._settings_for(message)
        )

    def _pictures(self, client: Client, message: Message) -> Message:
        """A few test cases with the model's uncertainty, written to the client's own folder."""
        params = self._model_for(client, message)
        path = self.folder(client.name) / PICTURES
        settings = self._settings_for(message)
        take_pictures(client, self.bench, params, self.federation, settings, path)
        return Message()
