"""Judge: validation after rounds, the test of the chosen model, its pictures and calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from wardround.clients import Clients, Transport
from wardround.config import Config
from wardround.data.roles import NOT_HOSPITALS
from wardround.engine.judging.calibration import measure_calibration
from wardround.engine.judging.evaluation import Evaluation, gather
from wardround.engine.judging.pictures import draw_overlays
from wardround.engine.judging.postprocessing import POSTPROCESS, as_sent, choose_postprocessing
from wardround.engine.judging.result_tables import case_rows, write_cases
from wardround.engine.outcome import Outcome, Progress
from wardround.engine.run_folder import TESTED, RunFolder
from wardround.files import write_json, write_text
from wardround.messages import Message, ServerState
from wardround.metrics import METRICS
from wardround.params import Params

MOST_ALONE = 3  # times the largest change of another client that one client's change counts


class Judge:
    """Evaluates models of one run at its clients.

    title: of the pictures; hospitals: who is tested; held_out: those that never train; choosers: whose
    validation cases choose the best round.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        clients: Clients,
        transport: Transport,
        title: str,
        num_classes: int,
    ) -> None:
        self._config = config
        self._folder = folder
        self._clients = clients
        self._transport = transport
        self._title = title
        self._num_classes = num_classes
        self.hospitals = [name for name in clients.names if name not in NOT_HOSPITALS]
        share = config.participation  # a client that takes no part must stay unseen
        self.choosers = [name for name in self.hospitals if isinstance(share, float) or name in share]
        trained = {name for name in self.hospitals if clients.registered[name].num_pooled}
        self.held_out = [name for name in self.hospitals if name not in trained.union(clients.trainable)]

    # After a round

    def validate(self, state: ServerState, progress: Progress) -> Evaluation | None:
        """Score the model on validation cases and keep it if it is the best so far."""
        settings, done = self._config.evaluate, state.round
        if done % settings.every and done != self._config.rounds:
            return None
        metrics = [name for name in settings.metrics if not METRICS[name].is_surface]
        metrics = list(dict.fromkeys([settings.select, *metrics]))
        validation = self._evaluate(state.params, "val", metrics, self.choosers)
        value, scores = validation.value(settings.select), validation.scores(settings.select)
        if math.isfinite(value) and is_best(settings.select, value, scores, progress):
            progress.best_value, progress.best_round, progress.best_scores = value, done, scores
            progress.best_file = self._folder.checkpoints.hold_best(done, state.params)
        return validation

    def test_round(self, state: ServerState) -> None:
        """Test a round that `evaluate.test_after` names: its cases are written, nothing is chosen by them."""
        settings = self._config.evaluate
        if state.round not in settings.test_after:
            return
        test = self._evaluate(state.params, "test", settings.metrics, self.hospitals)
        path = self._folder.path / TESTED.format(state.round)
        path.parent.mkdir(exist_ok=True)
        write_text(path, case_rows(test, settings.metrics).csv())

    # After the last round

    def test(self, state: ServerState, progress: Progress, units: str) -> Outcome:
        """The test, once, with the model and the postprocessing chosen on validation cases."""
        settings = self._config.evaluate
        params, chosen = self._tested_model(state, progress)
        if settings.postprocess == "auto":
            chosen["postprocess"] = self._choose_postprocessing(params, chosen)
        if not self._config.data.test:
            return Outcome("done", state, progress, units=units)
        test = self._evaluate(params, "test", settings.metrics, self.hospitals, **chosen)
        outcome = Outcome("done", state, progress, test, units=units)
        if settings.cross_site:
            outcome.cross_site = self._cross_site(params, chosen)
        write_cases(self._folder.path, test, settings.metrics)
        if settings.overlays:
            self._draw(params, chosen)
        if settings.calibrate:
            self._calibrate(params, chosen)
        return outcome

    def _tested_model(self, state: ServerState, progress: Progress) -> tuple[Params, dict[str, Any]]:
        """The model, and which round's client memories belong to it."""
        if self._config.evaluate.model != "best" or progress.best_file is None:
            return state.params, {}
        params = self._folder.checkpoints.load_best(progress.best_file)
        return params, {"memory_of_round": int(progress.best_round or 0) - 1}

    def _choose_postprocessing(self, params: Params, chosen: dict[str, Any]) -> list[list[int]]:
        """The steps for this model, as they travel; postprocess.json has them too."""
        found = choose_postprocessing(
            self._clients, params, chosen, judges=self.choosers, num_classes=self._num_classes
        )
        write_json(self._folder.path / POSTPROCESS, found.as_dict())
        return as_sent([found.steps])[0]

    def _evaluate(
        self, params: Params, split: str, metrics: Sequence[str], names: Sequence[str], **scalars: Any
    ) -> Evaluation:
        message = Message(params=params, scalars={"split": split, "metrics": list(metrics), **scalars})
        return gather(self._clients.ask("evaluate", message, to=names), metrics, self.held_out)

    def _cross_site(self, params: Params, chosen: dict[str, Any]) -> dict[str, Evaluation]:
        """Every client's own model on the test cases of all (simulation only: models travel for it)."""
        metrics = self._config.evaluate.metrics
        message = Message(params=params, scalars=chosen)
        asked = {name: value for name, value in chosen.items() if name == "postprocess"} | {"as_sent": True}
        replies = self._clients.ask("personal_model", message, to=self.hospitals)
        return {
            reply.client: self._evaluate(reply.extras["model"], "test", metrics, self.hospitals, **asked)
            for reply in replies
        }

    def _draw(self, params: Params, chosen: dict[str, Any]) -> None:
        """overlays.png, where the clients' pictures are on this machine; they do not travel."""
        found = {name: self._transport.pictures(name) for name in self.hospitals}
        sources = {name: path for name, path in found.items() if path is not None}
        if not sources:
            return
        self._clients.ask("pictures", Message(params=params, scalars=chosen), to=list(sources))
        draw_overlays(sources, self._folder.path / "overlays.png", self._title)

    def _calibrate(self, params: Params, chosen: dict[str, Any]) -> None:
        """calibration.json: whether the tested model's confidence matches its accuracy."""
        passes = self._config.evaluate.passes
        found = measure_calibration(
            self._clients, params, chosen, judges=self.choosers, hospitals=self.hospitals, passes=passes
        )
        write_json(self._folder.path / "calibration.json", found)


def is_best(metric: str, value: float, scores: Mapping[str, float], progress: Progress) -> bool:
    """Whether a round is the best so far, by the mean over clients, which none of them decides alone.

    Where one client's score changed far more than any other's, it counts as so many times the largest change
    among these, fewer than there are of them: clients that changed as much together decide against it.
    """
    best, before = progress.best_value, progress.best_scores
    if best is None:
        return True
    if len(scores) < 3 or scores.keys() != before.keys():
        return is_better(metric, value, best)
    gains = {name: gain(metric, score, before[name]) for name, score in scores.items()}
    most = min(MOST_ALONE, len(gains) - 1.5)  # below their number, so that the others can outweigh it
    bounds = {name: most * max(abs(g) for other, g in gains.items() if other != name) for name in gains}
    if all(abs(found) <= bounds[name] for name, found in gains.items()):
        return is_better(metric, value, best)
    return math.fsum(max(-bounds[name], min(bounds[name], found)) for name, found in gains.items()) > 0


def gain(metric: str, value: float, than: float) -> float:
    """By how much a value is better."""
    entry = METRICS[metric]
    if entry.higher_is_better is None:
        return abs(than - entry.best) - abs(value - entry.best)
    return value - than if entry.higher_is_better else than - value


def is_better(metric: str, value: float, than: float) -> bool:
    entry = METRICS[metric]
    if entry.higher_is_better is None:
        return abs(value - entry.best) < abs(than - entry.best)
    return value > than if entry.higher_is_better else value < than
