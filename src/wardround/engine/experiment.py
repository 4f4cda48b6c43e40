"""The loop over rounds: run, evaluate, record, checkpoint."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from wardround.aggregation.mean import mean
from wardround.aggregation.weights import by_samples
from wardround.clients import Clients, Exchange, Snapshot, Transport
from wardround.clients.bounds import Bounds
from wardround.clients.gate import finite_complaint, state_complaint
from wardround.clients.secure_sum import check_members
from wardround.config import Config
from wardround.config_file import resolve
from wardround.data.federation import Federation
from wardround.data.opening import open_federation
from wardround.data.roles import NOT_HOSPITALS, POOLED, PROXY
from wardround.engine.admission import admit_clients, check_left_out, list_able
from wardround.engine.egress import Egress
from wardround.engine.judging.judge import Judge
from wardround.engine.judging.result_tables import detect_units
from wardround.engine.memory_file import read_into_memory
from wardround.engine.model_average import ModelAverage
from wardround.engine.networks import choose_compute, network_for
from wardround.engine.outcome import Listener, Outcome, Progress, SilentListener
from wardround.engine.records import append_lines, describe_exchanges, missing_replies, round_record
from wardround.engine.run_folder import RunFolder
from wardround.engine.run_log import keep_log
from wardround.engine.trackers import open_trackers
from wardround.engine.transports.local import open_transport
from wardround.engine.transports.placement import Placement, check_participation, choose_present, place
from wardround.engine.write_behind import BackgroundWriter
from wardround.errors import ConfigError, TooFewClients, WardroundError
from wardround.files import write_json
from wardround.losses.loss_function import LossFunction
from wardround.machine import cores
from wardround.messages import Message, ServerState
from wardround.methods import build_method, build_objective
from wardround.models.base import Segmenter
from wardround.models.norm import from_moments, running_stats, to_moments
from wardround.models.start_weights import Match
from wardround.params import Params
from wardround.text import describe_round
from wardround.training.device import choose, choose_device, set_threads, start_device
from wardround.version import __version__

log = logging.getLogger(__name__)

LARGE = 32 * 2**20  # bytes of a checkpoint that a disk may need longer for than a round takes
MOST_LEFT_OUT = 10  # rounds from one such checkpoint to the next


class Experiment:
    """One run in its folder.

    hospitals: where the clients are, if not on this machine; federation: what they agreed on; files: name ->
    text of files that the folder of a new run begins with.
    """

    def __init__(
        self,
        config: Config,
        *,
        listener: Listener | None = None,
        hospitals: Transport | None = None,
        federation: Federation | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        self.config = config
        self.method, self._objective = build_method(config), build_objective(config)
        objective = self._objective
        if isinstance(objective, LossFunction):
            objective.check_present()
        self.folder = RunFolder(config, files)
        self.federation = federation or open_federation(config.data, config.seed, config.compute.resident)
        self._hospitals = hospitals
        self.listener = listener or SilentListener()
        self.stop_requested = False
        self._average = ModelAverage(config.model_average, config.rounds)
        self._saved = 0  # the last round that has a checkpoint, or will have one
        self._lines: list[Callable[[], None]] = []  # of completed rounds, not yet given to the writer
        self._snapshot: list[Snapshot] = []  # of the last completed round, likewise
        choose_device(config.compute)  # refused before anything is written
        self._method_warnings = self.method.warnings(config, self._network)
        self._statistics = running_stats(self._network)
        self._warnings = [*objective.warnings(config), *self._method_warnings]
        self._names = [*self.federation.names, *([POOLED] if self.method.pooled else [])]
        if "proxy" in self.method.needs and self.federation.proxy is not None:
            self._names.append(PROXY)
        check_participation(config, self.method, self.federation, self._names)

    def run(self, *, resume: bool = False, overwrite: bool = False, from_round: int | None = None) -> Outcome:
        """Do all rounds that are left, then the test; everything lands in the run folder.

        from_round: resume after this round, one of those that are kept, and drop what came later.
        """
        if from_round is not None and not resume:
            raise ConfigError("--from-round chooses the round that --resume continues after; add --resume.")
        check_left_out(self.config, [] if self._hospitals is not None else self._names, resume)
        self.folder.open(resume=resume, overwrite=overwrite)
        self.config = self.folder.config  # with those who were left out before
        self._warnings += self.folder.warnings
        with self.folder.locked(), keep_log(self.folder.path) as self._say:
            for warning in (
                *self._method_warnings,
                *self.folder.warnings,
            ):  # the objective's were logged before
                log.warning("%s", warning)
            if self._hospitals is None:
                start_device(self.config.compute)
            set_threads(self.config.compute.threads or cores())
            self.federation.prepare_clients()  # once, on all cores, before worker processes ask for it
            self.folder.write_preparation(self.federation)
            self._units = detect_units(self.federation)
            placement = self._place(resume)
            egress = Egress(self.folder.egress)
            self._writer = BackgroundWriter()
            self._transport = self._hospitals or open_transport(
                self.folder, self.federation, self._names, placement, self.listener.on_progress
            )
            try:
                clients = self._register_clients(egress)
                return self._run_rounds(clients, egress, resume, from_round)
            finally:
                gc.unfreeze()
                self._writer.close(self._unwritten())  # completed rounds, when the run ends with an error
                self._transport.close()
                egress.close()
                self.folder.remove_exchange()

    @cached_property
    def _network(self) -> Segmenter:
        """The network as it begins."""
        return network_for(self.config, self.federation)

    # Clients

    def _place(self, resume: bool) -> Placement:
        """Where the work is done; environment.json says so."""
        config = self.config
        if self._hospitals is not None:
            threads = config.compute.threads or cores()
            placement, compute = Placement(("cpu",), threads, "hospitals train"), choose(config.compute)
        else:
            placement = place(config, self.federation, self._names)
            compute = choose_compute(config, self.federation, self._names, self._network, self.folder.path)
        set_threads(placement.threads)
        if not resume:
            self.folder.write_environment(placement, compute)
            log.info("%s", compute)
        return placement

    def _register_clients(self, egress: Egress) -> Clients:
        classes = list(self.federation.labels)
        fewest = 1 if self.method.pooled else self.config.min_clients  # pooled: one trains for all
        told = self._transport.register()
        self.folder.write_left_out(self.federation)
        registered, counts, warnings = admit_clients(self.config, told, classes, fewest=fewest)
        self._warnings += warnings
        untested = [e.client for e in registered if e.lacks_test and e.client not in NOT_HOSPITALS]
        if untested and self.config.data.test:
            log.warning(
                "no test case at %s: the results will have no row for %s. Look at splits, and at what was "
                "left out (left_out.json); privacy.scores may withhold them.",
                ", ".join(f"'{name}'" for name in untested),
                "it" if len(untested) == 1 else "them",
            )
        clients = Clients(
            self._transport,
            registered,
            rounds=self.config.rounds,
            min_clients=fewest,
            taking_part=None if isinstance(self.config.participation, float) else self.config.participation,
            tasks=dict.fromkeys(self.method.tasks, self.method.up),
            most_steps=partial(self.method.most_steps, self.config),
            judge=self.method.check_reply,
            on_reply=egress.record,
            counts=counts,
            privacy=self.config.privacy,
        )
        if self.config.privacy.secure_sum:
            check_members(clients.num_total)
        return clients

    # Rounds

    def _first_state(
        self, clients: Clients, resume: bool, from_round: int | None
    ) -> tuple[ServerState, Progress]:
        checkpoints = self.folder.checkpoints
        if resume:
            done = checkpoints.check(from_round)
            facts, params, memory = checkpoints.load(from_round, self._gpu())
            params, memory = self._average.unpack(params, memory)
            self.folder.rewind(done)
            self._saved = done
            self._rewind(clients, done)
            clients.bounds = Bounds(self.config.limits, facts.get("sights"))
            progress = Progress.from_dict(facts)
            announce_best(clients, progress)
            log.info("resuming after round %d of %d", done, self.config.rounds)
            start = self.method.start(self._network)
            return replace(start, params=params, memory=memory, round=done), progress
        self.folder.start_records()
        clients.bounds = Bounds(self.config.limits)
        clients.begin_round(-1, choose_present(self.config, self.method, clients.trainable, -1))
        self._report_start_weights(self._network.start_weights)
        state = self.method.prepare(self.method.start(self._network), clients)
        state = replace(state, params=read_into_memory(state.params), memory=read_into_memory(state.memory))
        if clients.exchanges:  # what some methods exchange before the first round
            write_json(self.folder.path / "setup.json", describe_exchanges(clients.exchanges))
        self._snapshot = self._take_snapshot(state, Progress(), clients)
        self._hand_over()
        self._writer.flush()  # from here on there is something to resume
        return state, Progress()

    def _gpu(self) -> torch.device | None:
        """The GPU that messages and memories stay on, if there is one."""
        device = choose_device(self.config.compute)
        return device if self._hospitals is None and device.type == "cuda" else None

    def _report_start_weights(self, match: Match | None) -> None:
        """Write down which tensors began from a file, and say so where not all did."""
        if match is not None:
            write_json(self.folder.path / "start_weights.json", match.as_dict())
            log.log(logging.WARNING if match.left else logging.INFO, "%s", match.sentence())

    def _run_rounds(self, clients: Clients, egress: Egress, resume: bool, from_round: int | None) -> Outcome:
        config = self.config
        state, progress = self._first_state(
            clients, resume, from_round
        )  # held nowhere else, so that it can go
        del self._network  # the state has its tensors
        title, num_classes = f"{config.name}: {self.method.title}", self.federation.num_classes
        judge = Judge(config, self.folder, clients, self._transport, title, num_classes)
        self.listener.on_start(config, state.round)
        self._say(f"{title}, from round {state.round + 1} of {config.rounds}; wardround {__version__}")
        gc.freeze()  # what is here now stays for all rounds; looking through it takes longer than a round
        tracking = open_trackers(config.trackers, self.folder.path, resolve(config), state.round)
        while state.round < config.rounds:
            if self.stop_requested:
                self._hand_over()
                self._writer.flush()
                outcome = Outcome("stopped", self._average.judged(state), progress, units=self._units)
                break
            started = time.perf_counter()
            egress.begin(state.round + 1)
            state = self._run_round(clients, state)
            exchanges = list(clients.exchanges)
            validation = judge.validate(self._average.judged(state), progress)
            if validation is not None and validation.is_broken:
                wrong = (
                    f"round {state.round}: the new model has no finite loss at any client; it is not kept."
                )
                raise WardroundError(f"{wrong} {go_back(state.round - 1)}")
            announce_best(clients, progress)
            judge.test_round(self._average.judged(state))
            seconds = time.perf_counter() - started
            progress.seconds += seconds
            record = round_record(
                state,
                exchanges,
                judging=clients.exchanges[len(exchanges) :],
                warnings=self._warnings,
                validation=validation,
                best_round=progress.best_round,
                strays=self._transport.strays(),
                seconds=seconds,
            )
            if state.round == 1:
                record |= self.folder.read_method_choice()
            self._save_round(state, record, egress, progress, clients)
            self._say(f"round {state.round} of {config.rounds}: {describe_round(record)}")
            self.listener.on_record(record)
            tracking.on_record(record)
        else:
            self._hand_over()
            self._writer.flush()
            outcome = self._test(judge, clients, egress, self._average.judged(state), progress)
        outcome.partition = self.federation.partition
        counts = {name: entry.num_unlabelled for name, entry in clients.registered.items()}
        outcome.unlabelled = {n: c for n, c in counts.items() if c and n not in NOT_HOSPITALS}
        outcome.lacks = {name: own for name, own in self.federation.lacks.items() if own}
        tracking.on_end(self.folder.write_result(outcome))
        self._say(f"{outcome.status} after round {state.round} of {config.rounds}")
        return outcome

    def _save_round(
        self,
        state: ServerState,
        record: Mapping[str, Any],
        egress: Egress,
        progress: Progress,
        clients: Clients,
    ) -> None:
        """Have a round brought to the disk; the checkpoint comes last, since a resumed run trusts it."""
        self._lines += [egress.take(), lambda: append_lines(self.folder.records, [record])]
        self._snapshot = self._take_snapshot(state, progress, clients)
        waiting = state.round - self._saved
        if self._is_due(state.round, waiting):
            self._saved = state.round
            self._hand_over()
        elif waiting >= MOST_LEFT_OUT or not self._writer.is_busy():
            self._writer.submit(self._lines)
            self._lines = []

    def _take_snapshot(self, state: ServerState, progress: Progress, clients: Clients) -> list[Snapshot]:
        """What a checkpoint writes, in its order."""
        checkpoints = self.folder.checkpoints
        facts = progress.as_dict() | {"sights": clients.bounds.as_dict() if clients.bounds else {}}
        return [
            self._transport.snapshot(state.round),
            checkpoints.snapshot(state.round, *self._average.pack(state), facts),
        ]

    def _is_due(self, round: int, waiting: int) -> bool:
        """Whether a round gets a checkpoint; waiting: rounds since the last one.

        A large one is left out while the last is still being written: writing the moments of every
        client's optimizer can take longer than a round.
        """
        every = self.config.checkpoint.every
        if every != "auto":
            return round % every == 0
        if waiting >= MOST_LEFT_OUT or self._hospitals is not None or not self._writer.is_busy():
            return True
        return sum(part.num_bytes for part in self._snapshot) < LARGE

    def _hand_over(self) -> None:
        """Give the writer what it has not seen yet of completed rounds."""
        self._writer.submit(self._unwritten())

    def _unwritten(self) -> list[Callable[[], None]]:
        """What the writer has not seen yet; from here on it has."""
        steps = [*self._lines, *(part.write for part in self._snapshot)]
        self._lines, self._snapshot = [], []
        return steps

    def _test(
        self, judge: Judge, clients: Clients, egress: Egress, state: ServerState, progress: Progress
    ) -> Outcome:
        """The test of the chosen model; replies that are missing here are part of the outcome."""
        if not self.config.data.test and self.config.evaluate.postprocess != "auto":
            return Outcome("done", state, progress, units=self._units)
        clients.begin_round(state.round, [])
        egress.begin(state.round, "test")
        outcome = judge.test(state, progress, self._units)
        egress.take()()
        self._transport.snapshot(state.round).write()  # where the last round is the best, that is new
        missing = missing_replies(clients.exchanges)
        outcome.troubles = {**missing["refused"], **missing["lost"]}
        return outcome

    def _run_round(self, clients: Clients, state: ServerState) -> ServerState:
        """One round of the method; with too few answers it is repeated, then the run stops."""
        able = list_able(clients, self._objective, self.config.rounds, state.round)
        present = choose_present(self.config, self.method, able, state.round)
        self.listener.on_round(state.round + 1, present)
        earlier: list[Exchange] = []  # of attempts that failed; the records show them too
        for attempt in range(self.config.retries + 1):
            clients.begin_round(state.round, present)
            try:
                after = self._reestimate_statistics(clients, self._run_method(state, clients))
                averaged = self._average_models(clients, after)
                clients.exchanges[:0] = earlier
                break
            except TooFewClients as error:
                earlier += clients.exchanges
                self._rewind(clients, state.round)
                if attempt == self.config.retries:
                    raise TooFewClients(
                        f"{error} The run stopped; its last checkpoint is after round {state.round}. "
                        "Fix the cause and add --resume, with a lower min_clients if need be."
                    ) from None
                log.warning("%s Trying the round again.", error)
        self._average.params = None if averaged is None else read_into_memory(averaged)
        return replace(after, params=read_into_memory(after.params), memory=read_into_memory(after.memory))

    def _average_models(self, clients: Clients, state: ServerState) -> Params | None:
        """The average with the model of this round, its statistics measured where those of models are."""
        found = self._average.after(state)
        if found is None or found is state.params:
            return found
        return self._reestimate_statistics(clients, replace(state, params=found)).params

    def _run_method(self, state: ServerState, clients: Clients) -> ServerState:
        """The state after the method's round, checked."""
        where = f"round {state.round + 1}, method '{self.config.method.get('name', 'fedavg')}'"
        try:
            after = self.method.run_round(state, clients)
        except WardroundError:
            raise
        except Exception as error:  # of a method's own code
            raise WardroundError(
                f"{where}: failed on the server: {type(error).__name__}: {error}. --debug shows where."
            ) from error
        after = clients.describe_sums(after)
        reason = state_complaint(state, after) or finite_complaint(after.memory, "the server's memory")
        if reason is not None:
            raise WardroundError(f"{where}: {reason}. {go_back(state.round)}")
        return after

    def _reestimate_statistics(self, clients: Clients, state: ServerState) -> ServerState:
        """`bn_stats: reestimate`: every client measures the new model's statistics; they are pooled."""
        if self.config.model.bn_stats != "reestimate":
            return state
        replies = [r for r in clients.ask("norm_stats", Message(params=state.params)) if r.extras["stats"]]
        if not replies:
            return state
        moments = [Params(to_moments(reply.extras["stats"], self._statistics)) for reply in replies]
        pooled = from_moments(mean(moments, by_samples(replies)), self._statistics)
        return replace(state, params=state.params.updated(pooled))

    def _rewind(self, clients: Clients, round: int) -> None:
        """The round restarts: what clients remember of it does not count, as their next request says."""
        clients.sync_state = replace(clients.sync_state, rewinds=self.folder.checkpoints.add_rewind(round))


def go_back(round: int) -> str:
    """What to do about a round that went wrong."""
    return (
        f"Round {round} is safe: continue with --resume, after an earlier round with --from-round N, without "
        "a client that spoils it with --without NAME."
    )


def announce_best(clients: Clients, progress: Progress) -> None:
    """Let clients keep what they remember beside the best model, from their next request on."""
    if progress.best_round is not None:
        clients.sync_state = replace(clients.sync_state, best=progress.best_round - 1)
