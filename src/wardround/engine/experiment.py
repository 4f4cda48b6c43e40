"""The loop over rounds: run, evaluate, record, checkpoint."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
import yaml

from wardround.aggregation.mean import mean
from wardround.aggregation.weights import by_samples, weights_complaint
from wardround.clients.clients import Clients, Exchange, Transport
from wardround.clients.gate import content_complaint, params_complaint
from wardround.config import Config
from wardround.config_file import resolve
from wardround.data.federation import Federation, open_federation
from wardround.data.preparing.record import PREPARATION, Preparation
from wardround.data.roles import NOT_HOSPITALS, POOLED, PROXY
from wardround.engine.checkpoint import Checkpoints, in_memory
from wardround.engine.host import Host, InProcess, Spilling, compute_for, network_for
from wardround.engine.judging.calibration import calibrated
from wardround.engine.judging.evaluation import Evaluation, gather
from wardround.engine.judging.pictures import draw_overlays
from wardround.engine.judging.result_tables import case_rows
from wardround.engine.judging.units import lengths_of
from wardround.engine.records import Egress, append_lines, keep_lines, read_lines
from wardround.engine.run_folder import LOCK, RUN_ENTRIES, check_folder, environment
from wardround.engine.trackers import open_trackers
from wardround.engine.transports.placement import Placement, place
from wardround.engine.transports.workers import Workers
from wardround.errors import ConfigError, TooFewClients, WardroundError
from wardround.files import try_lock, write_json, write_text
from wardround.machine import cores
from wardround.messages import Message, ServerState
from wardround.methods import build_method, build_objective
from wardround.metrics import METRICS, MM
from wardround.models.base import Segmenter
from wardround.models.norm import from_moments, running_stats, to_moments
from wardround.models.start_weights import Match
from wardround.params import Params
from wardround.seeding import generator
from wardround.text import suggest
from wardround.training.device import choose, choose_device, set_threads

log = logging.getLogger(__name__)


class Listener(Protocol):
    """Who wants to know how the run goes; the command line draws it."""

    def on_start(self, config: Config, first_round: int) -> None: ...

    def on_round(self, round: int, present: Sequence[str]) -> None: ...

    def on_progress(self, client: str, step: int, steps: int) -> None: ...

    def on_record(self, record: Mapping[str, Any]) -> None: ...


class Silent:
    """A listener that shows nothing."""

    def on_start(self, config: Config, first_round: int) -> None: ...

    def on_round(self, round: int, present: Sequence[str]) -> None: ...

    def on_progress(self, client: str, step: int, steps: int) -> None: ...

    def on_record(self, record: Mapping[str, Any]) -> None: ...


@dataclass
class Progress:
    """What the loop carries from round to round beside the server's state."""

    best_round: int | None = None
    best_value: float | None = None
    best_file: str | None = None
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        return {
            "best_round": self.best_round,
            "best_value": self.best_value,
            "best_file": self.best_file,
            "seconds": self.seconds,
        }


@dataclass
class Outcome:
    """What a finished (or stopped) run holds.

    status: done, or stopped (by the user, with a checkpoint); cross_site: model of one client on the
    test cases of another; troubles: replies lost or refused after the last round, "task/client": reason;
    lengths: what distances are in.
    """

    status: str
    state: ServerState
    progress: Progress
    test: Evaluation | None = None
    cross_site: dict[str, Evaluation] = field(default_factory=dict)
    troubles: dict[str, str] = field(default_factory=dict)
    lengths: str = MM


class Experiment:
    """One run in its folder.

    hospitals: where the clients are, if not on this machine; federation: what they agreed on.
    """

    def __init__(
        self,
        config: Config,
        *,
        listener: Listener | None = None,
        hospitals: Transport | None = None,
        federation: Federation | None = None,
    ) -> None:
        self.config = config
        self.method = build_method(config)
        self.folder = config.folder
        self.federation = federation or open_federation(config.data, config.seed)
        self._hospitals = hospitals
        self.checkpoints = Checkpoints(self.folder / "checkpoints")
        self.listener = listener or Silent()
        self.stop_requested = False
        choose_device(config.compute)  # refused before anything is written
        self._method_warnings = self.method.warnings(config, self._fresh_model())
        self._warnings = [*build_objective(config).warnings(config), *self._method_warnings]
        self._names = [*self.federation.names, *([POOLED] if self.method.pooled else [])]
        if "proxy" in self.method.needs and self.federation.proxy is not None:
            self._names.append(PROXY)
        self._check_participation()

    # Opening the run folder

    def run(self, *, resume: bool = False, overwrite: bool = False) -> Outcome:
        """Do all rounds that are left, then the test; everything lands in the run folder."""
        self._open_folder(resume, overwrite)
        for warning in self._method_warnings:  # the objective's were told with the configuration
            log.warning("%s", warning)
        with self._locked():
            set_threads(self.config.compute.threads or cores())
            self.federation.get_ready()  # once, on all cores, before worker processes ask for it
            self._write_preparation()
            self._lengths = lengths_of(self.federation)
            placement = self._place(resume)
            egress = Egress(self.folder / "egress.jsonl")
            self._transport = self._hospitals or self._open_transport(placement)
            try:
                clients = self._clients(egress)
                self._list_left_out()
                return self._rounds(clients, egress, resume)
            finally:
                self._transport.close()
                egress.close()
                shutil.rmtree(self.folder / "exchange", ignore_errors=True)

    def _place(self, resume: bool) -> Placement:
        """Where the work is done; environment.json tells it."""
        config = self.config
        if self._hospitals is not None:
            threads = config.compute.threads or cores()
            placement, compute = Placement(("cpu",), threads, "hospitals train"), choose(config.compute)
        else:
            placement = place(config, self.federation, self._names)
            compute = compute_for(config, self.federation, self._names)
        set_threads(placement.threads)
        if not resume:
            write_json(self.folder / "environment.json", environment(config, placement, compute))
            log.info("%s", compute)
        return placement

    def _fresh_model(self) -> Segmenter:
        return network_for(self.config, self.federation)

    def _open_folder(self, resume: bool, overwrite: bool) -> None:
        taken = self.folder / "config.yaml"
        check_folder(self.config, resume, overwrite)
        if resume:
            self._write_config()  # worker processes read it; compute settings may have changed
            return
        if taken.exists():
            for entry in RUN_ENTRIES:
                path = self.folder / entry
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_config()
        except OSError as error:
            raise ConfigError(f"output folder {self.folder} cannot be written: {error.strerror}.") from None

    def _write_config(self) -> None:
        text = yaml.safe_dump(resolve(self.config), sort_keys=False, allow_unicode=True)
        write_text(self.folder / "config.yaml", text)

    def _write_preparation(self) -> None:
        """preparation.json: how a scan became what the network sees, so that the model can go elsewhere."""
        Preparation.of(self.federation).save(self.folder / PREPARATION)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Two processes must not write one run."""
        with (self.folder / LOCK).open("w") as lock:
            if not try_lock(lock):
                raise ConfigError(f"{self.folder} is in use by another process.")
            yield

    # Clients

    def _open_transport(self, placement: Placement) -> Transport:
        config, clients_folder = self.config, self.folder / "clients"
        exchange = self.folder / "exchange"
        shutil.rmtree(exchange, ignore_errors=True)
        exchange.mkdir(parents=True)
        if placement.workers == 1:
            host = Host(config, clients_folder, self._names, self.listener.on_progress)
            return InProcess(host, Spilling(exchange))
        return Workers(
            self.folder / "config.yaml",
            clients_folder,
            exchange,
            self.federation.sizes(self._names),
            placement.devices,
            threads=placement.threads,
            deadline=config.deadline,
            on_progress=self.listener.on_progress,
        )

    def _clients(self, egress: Egress) -> Clients:
        registered = self._transport.register()
        untested = [e.client for e in registered if not e.num_test and e.client not in NOT_HOSPITALS]
        if untested:
            log.warning(
                "no test case at %s: the results will have no row for %s. Look at splits, and at what was "
                "left out (left_out.json).",
                ", ".join(f"'{name}'" for name in untested),
                "it" if len(untested) == 1 else "them",
            )
        return Clients(
            self._transport,
            registered,
            rounds=self.config.rounds,
            min_clients=self.config.min_clients,
            taking_part=None if isinstance(self.config.participation, float) else self.config.participation,
            tasks=dict.fromkeys(self.method.tasks, self.method.up),
            most_steps=partial(self.method.most_steps, self.config),
            judge=self.method.complaint,
            on_reply=egress.record,
        )

    def _list_left_out(self) -> None:
        """left_out.json: cases that could not be used, each with its reason; no file when there are none."""
        found = {name: dict(self.federation.left_out(name)) for name in self.federation.names}
        if any(found.values()):
            write_json(self.folder / "left_out.json", {name: cases for name, cases in found.items() if cases})

    def _check_participation(self) -> None:
        config = self.config
        if not isinstance(config.participation, float):
            if self.method.pooled:
                raise ConfigError(
                    f"participation names clients, but {self.method.title} trains on everybody's cases. "
                    "Leave participation out."
                )
            for name in config.participation:
                if name not in self.federation.names:
                    raise ConfigError(
                        f"participation names '{name}', which is not a client."
                        f"{suggest(name, self.federation.names)}"
                    )
            if config.min_clients > len(set(config.participation)):
                raise ConfigError(
                    f"min_clients is {config.min_clients}, but participation names only "
                    f"{len(set(config.participation))}."
                )
        if config.min_clients > len(self._names):
            raise ConfigError(
                f"min_clients is {config.min_clients}, but there are only {len(self._names)} clients."
            )

    def present(self, clients: Clients, round: int) -> list[str]:
        """Who takes part in a round: the named clients, or a random share drawn for this round."""
        share = self.config.participation
        able = clients.trainable
        if not isinstance(share, float):
            return [name for name in able if name in share]
        if self.method.pooled or share == 1.0:
            return able
        count = min(len(able), max(1, self.config.min_clients, round_half_up(share * len(able))))
        order = torch.randperm(len(able), generator=generator(self.config.seed, "participation", round))
        return sorted(able[index] for index in order[:count].tolist())

    # Rounds

    def _first_state(self, clients: Clients, resume: bool) -> tuple[ServerState, Progress]:
        if resume:
            facts, params, memory = self.checkpoints.load()
            done = int(facts["round"])
            self._rewind(clients, done)
            keep_lines(self.folder / "records.jsonl", lambda line: line["round"] <= done)
            keep_lines(
                self.folder / "egress.jsonl", lambda line: line["round"] <= done and line["phase"] == "round"
            )
            progress = Progress(
                facts["best_round"], facts["best_value"], facts["best_file"], facts["seconds"]
            )
            self._tell_best(clients, progress)
            log.info("resuming after round %d of %d", done, self.config.rounds)
            start = self.method.start(self._fresh_model())
            return replace(start, params=params, memory=memory, round=done), progress
        for name in ("records.jsonl", "egress.jsonl"):
            write_text(self.folder / name, "")
        clients.begin_round(-1, self.present(clients, -1))
        model = self._fresh_model()
        self._tell_start_weights(model.start_weights)
        state = self.method.prepare(self.method.start(model), clients)
        state = replace(state, params=in_memory(state.params), memory=in_memory(state.memory))
        if clients.exchanges:  # what some methods exchange before the first round
            write_json(self.folder / "setup.json", exchange_facts(clients.exchanges))
        self.checkpoints.save(0, state.params, state.memory, Progress().facts())
        return state, Progress()

    def _tell_start_weights(self, match: Match | None) -> None:
        """Write down which tensors began from a file, and say so where not all did."""
        if match is not None:
            write_json(self.folder / "start_weights.json", match.as_dict())
            log.log(logging.WARNING if match.left else logging.INFO, "%s", match.sentence())

    def _rounds(self, clients: Clients, egress: Egress, resume: bool) -> Outcome:
        config = self.config
        state, progress = self._first_state(clients, resume)  # held nowhere else, so that it can go
        self.listener.on_start(config, state.round)
        tracking = open_trackers(config.trackers, self.folder, resolve(config), state.round)
        while state.round < config.rounds:
            if self.stop_requested:
                egress.flush()
                stopped = Outcome("stopped", state, progress, lengths=self._lengths)
                tracking.on_end(self._write_result(stopped))
                return stopped
            started = time.perf_counter()
            number = state.round
            egress.round = number + 1
            state = self._one_round(clients, state)
            exchanges = list(clients.exchanges)
            validation = self._validate(clients, state, progress)
            progress.seconds += time.perf_counter() - started
            record = self._record(state, exchanges, validation, progress, time.perf_counter() - started)
            troubles = exchange_facts(clients.exchanges[len(exchanges) :])  # in the validation
            for kind in ("refused", "lost"):
                record[kind] |= troubles[kind]
            egress.flush()
            append_lines(self.folder / "records.jsonl", [record])
            self._transport.settle()
            self.checkpoints.save(state.round, state.params, state.memory, progress.facts())
            self.checkpoints.remove_other_best(progress.best_file)
            self.listener.on_record(record)
            tracking.on_record(record)
        outcome = self._finish(clients, egress, state, progress)
        tracking.on_end(self._write_result(outcome))
        return outcome

    def _one_round(self, clients: Clients, state: ServerState) -> ServerState:
        """One round of the method; with too few answers it is repeated, then the run stops."""
        present = self.present(clients, state.round)
        self.listener.on_round(state.round + 1, present)
        earlier: list[Exchange] = []  # of attempts that failed; the records show them too
        for attempt in range(self.config.retries + 1):
            clients.begin_round(state.round, present)
            try:
                after = self._reestimated(clients, self._after_round(state, clients))
                clients.exchanges[:0] = earlier
                break
            except TooFewClients as error:
                earlier += clients.exchanges
                self._rewind(clients, state.round)
                if attempt == self.config.retries:
                    raise TooFewClients(
                        f"{error} The run stopped; its last checkpoint is after round {state.round}. "
                        "Mend the cause and add --resume, with a lower min_clients if need be."
                    ) from None
                log.warning("%s Trying the round again.", error)
        return replace(after, params=in_memory(after.params), memory=in_memory(after.memory))

    def _after_round(self, state: ServerState, clients: Clients) -> ServerState:
        """What the method made of a round, if that can be gone on with."""
        where = f"round {state.round + 1}, method '{self.config.method.get('name', 'fedavg')}'"
        try:
            after = self.method.run_round(state, clients)
        except WardroundError:
            raise
        except Exception as error:  # of a method's own code
            raise WardroundError(
                f"{where}: failed on the server: {type(error).__name__}: {error}. --debug shows where."
            ) from error
        reason = state_complaint(state, after)
        if reason is not None:
            raise WardroundError(f"{where}: {reason}. The last whole round is safe.")
        return after

    def _reestimated(self, clients: Clients, state: ServerState) -> ServerState:
        """`bn_stats: reestimate`: every client measures the new model's statistics; they are pooled."""
        if self.config.model.bn_stats != "reestimate":
            return state
        replies = [r for r in clients.ask("norm_stats", Message(params=state.params)) if r.extras["stats"]]
        if not replies:
            return state
        pairs = running_stats(self._fresh_model())
        moments = [Params(to_moments(reply.extras["stats"], pairs)) for reply in replies]
        pooled = from_moments(mean(moments, by_samples(replies)), pairs)
        return replace(state, params=state.params.updated(pooled))

    def _rewind(self, clients: Clients, round: int) -> None:
        """The round begins again: what clients remember of it does not count, as their next request says."""
        clients.sync_state = replace(clients.sync_state, rewinds=self.checkpoints.add_rewind(round))

    def _tell_best(self, clients: Clients, progress: Progress) -> None:
        """Let clients keep what they remember beside the best model, from their next request on."""
        if progress.best_round is not None:
            clients.sync_state = replace(clients.sync_state, best=progress.best_round - 1)

    # Evaluation

    def _validate(self, clients: Clients, state: ServerState, progress: Progress) -> Evaluation | None:
        """Score the model on validation cases and keep it if it is the best so far."""
        settings, done = self.config.evaluate, state.round
        if done % settings.every and done != self.config.rounds:
            return None
        metrics = [name for name in settings.metrics if not METRICS[name].is_surface]
        metrics = list(dict.fromkeys([settings.select, *metrics]))
        validation = self._evaluate(clients, state.params, "val", metrics, names=self._judges(clients))
        value = validation.value(settings.select)
        if not math.isfinite(value):
            return validation
        if progress.best_value is None or better(settings.select, value, progress.best_value):
            progress.best_value, progress.best_round = value, done
            progress.best_file = self.checkpoints.save_best(done, state.params)
            self._tell_best(clients, progress)
        return validation

    def _judges(self, clients: Clients) -> list[str]:
        """Who chooses the best round: not a hospital that takes no part, which must stay unseen."""
        share = self.config.participation
        hospitals = [name for name in clients.names if name not in NOT_HOSPITALS]
        return hospitals if isinstance(share, float) else [name for name in hospitals if name in share]

    def _evaluate(
        self,
        clients: Clients,
        params: Params,
        split: str,
        metrics: Sequence[str],
        names: Sequence[str] | None = None,
        **scalars: Any,
    ) -> Evaluation:
        message = Message(params=params, scalars={"split": split, "metrics": list(metrics), **scalars})
        if names is None:
            names = [name for name in clients.names if name not in NOT_HOSPITALS]
        return gather(clients.ask("evaluate", message, to=names), metrics)

    def _finish(self, clients: Clients, egress: Egress, state: ServerState, progress: Progress) -> Outcome:
        """The test, once, with the model chosen on validation cases."""
        settings = self.config.evaluate
        chosen: dict[str, Any] = {}
        params = state.params
        if settings.model == "best" and progress.best_file is not None:
            params = self.checkpoints.load_best(progress.best_file)
            chosen = {"memory_of_round": int(progress.best_round or 0) - 1}
        clients.begin_round(state.round, [])
        egress.round, egress.phase = state.round, "test"
        test = self._evaluate(clients, params, "test", settings.metrics, **chosen)
        outcome = Outcome("done", state, progress, test, lengths=self._lengths)
        if settings.cross_site:
            outcome.cross_site = self._cross_site(clients, params, chosen)
        write_text(self.folder / "cases.csv", case_rows(test, settings.metrics).csv())
        if settings.overlays:
            self._draw(clients, params, chosen)
        if settings.calibrate:
            self._calibrate(clients, params, chosen)
        egress.flush()
        facts = exchange_facts(clients.exchanges)
        outcome.troubles = {**facts["refused"], **facts["lost"]}
        return outcome

    def _cross_site(
        self, clients: Clients, params: Params, chosen: Mapping[str, Any]
    ) -> dict[str, Evaluation]:
        """Every client's own model on the test cases of all (simulation only: models travel for it)."""
        names = [name for name in clients.names if name not in NOT_HOSPITALS]
        ask = Message(params=params, scalars=dict(chosen))
        return {
            reply.client: self._evaluate(
                clients, reply.extras["model"], "test", self.config.evaluate.metrics, as_sent=True
            )
            for reply in clients.ask("personal_model", ask, to=names)
        }

    def _draw(self, clients: Clients, params: Params, chosen: Mapping[str, Any]) -> None:
        """overlays.png, where the clients' pictures are on this machine; they do not travel."""
        found = {n: self._transport.pictures(n) for n in clients.names if n not in NOT_HOSPITALS}
        sources = {name: path for name, path in found.items() if path is not None}
        if not sources:
            return
        clients.ask("pictures", Message(params=params, scalars=dict(chosen)), to=list(sources))
        draw_overlays(sources, self.folder / "overlays.png", f"{self.config.name}: {self.method.title}")

    def _calibrate(self, clients: Clients, params: Params, chosen: Mapping[str, Any]) -> None:
        """calibration.json: whether the tested model is sure when it should be."""
        found = calibrated(
            clients,
            params,
            chosen,
            judges=self._judges(clients),
            hospitals=[name for name in clients.names if name not in NOT_HOSPITALS],
            passes=self.config.evaluate.passes,
        )
        write_json(self.folder / "calibration.json", found)

    # Writing

    def _record(
        self,
        state: ServerState,
        exchanges: Sequence[Exchange],
        validation: Evaluation | None,
        progress: Progress,
        seconds: float,
    ) -> dict[str, Any]:
        """The round's line in records.jsonl."""
        trained = [exchange for exchange in exchanges if exchange.task == "train"]
        record: dict[str, Any] = {
            "round": state.round,
            "clients": sorted({name for exchange in trained for name in exchange.bytes_down}),
            "loss": {name: loss for exchange in trained for name, loss in exchange.loss.items()},
            **state.notes,
        }
        record["warnings"] = [*record.get("warnings", []), *self._warnings]
        if validation is not None:
            record["validation"] = validation.as_dict()
            record["best_round"] = progress.best_round
        if strays := self._transport.strays():
            record["stray"] = [f"{name}: {reason}" for name, reason in strays]
        record["seconds"] = seconds
        return record | exchange_facts(exchanges)

    def _write_result(self, outcome: Outcome) -> dict[str, Any]:
        """result.json, and what it says."""
        progress, test = outcome.progress, outcome.test
        records = read_lines(self.folder / "records.jsonl")
        result = {
            "status": outcome.status,
            "name": self.config.name,
            "method": self.config.method.get("name", "fedavg"),
            "rounds": outcome.state.round,
            "params_sha256": outcome.state.params.sha256(),
            "best_round": progress.best_round,
            "best_validation": progress.best_value,
            "tested_model": self.config.evaluate.model,
            "test": test.as_dict() if test is not None else None,
            "lengths": outcome.lengths,
            "cross_site": {name: entry.as_dict() for name, entry in outcome.cross_site.items()},
            "num_refused": sum(len(record["refused"]) for record in records),
            "num_lost": sum(len(record["lost"]) for record in records),
            "test_troubles": outcome.troubles,
            "seconds": progress.seconds,
        }
        write_json(self.folder / "result.json", result)
        return result


def state_complaint(before: ServerState, after: Any) -> str | None:
    """Why a method's result cannot be the next state, or None."""
    if not isinstance(after, ServerState):
        return f"run_round returned {type(after).__name__}, not the next state; return state.next(...)"
    if after.round != before.round + 1:
        return "run_round returned a state of the same round; return state.next(...)"
    odd = weights_complaint(after.notes.get("weights", {}))
    if odd is not None:  # before the tensors, which they spoil
        return odd
    specs = {name: before.params.spec(name) for name in before.params}
    return params_complaint(specs, after.params) or content_complaint(Message(params=after.params))


def exchange_facts(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """Time and bytes of each exchange, by client, and why replies are missing."""
    facts: dict[str, Any] = {
        "exchanges": [
            {
                "task": exchange.task,
                "seconds": exchange.seconds,
                "bytes_down": exchange.bytes_down,
                "bytes_up": exchange.bytes_up,
            }
            for exchange in exchanges
        ]
    }
    for kind in ("refused", "lost"):
        facts[kind] = {
            f"{exchange.task}/{name}": reason
            for exchange in exchanges
            for name, reason in getattr(exchange, kind).items()
        }
    return facts


def better(metric: str, value: float, than: float) -> bool:
    entry = METRICS[metric]
    if entry.higher_is_better is None:
        return abs(value - entry.best) < abs(than - entry.best)
    return value > than if entry.higher_is_better else value < than


def round_half_up(value: float) -> int:
    return math.floor(value + 0.5)
