"""Session: many scans into one folder, one after the other; what fails is said and the rest goes on.

predictions.json in that folder says of every mask where it came from, which model made it, the size of
each structure, how sure the model was, and what a reader should be wary of.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wardround.data.slices.view import Along
from wardround.errors import ConfigError, DataError, WardroundError
from wardround.files import jsonable, write_json
from wardround.prediction import writing
from wardround.prediction.inputs import Problem, Scan, find_scans
from wardround.prediction.predicting import Predictor
from wardround.prediction.results import Prediction
from wardround.prediction.trained import TrainedModel, clients_of
from wardround.version import __version__

log = logging.getLogger(__name__)

PREDICTIONS = "predictions.json"
FORMAT = "wardround-predictions-1"
UNFORESEEN = (ArithmeticError, LookupError, RuntimeError, ValueError)

Input = str | os.PathLike[str]
WatchScans = Callable[[str, int, int, int, int], None]  # scan, its number, of how many, window, of how many


@dataclass
class Report:
    """What a session did: the facts of every mask, by its name, and every input that failed."""

    folder: Path
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = jsonable(
            {
                "folder": str(self.folder),
                "predicted": len(self.done),
                "failed": len(self.problems),
                "scans": self.done,
                "problems": by_input(self.problems),
                "notes": self.notes,
            }
        )
        return plain


def by_input(problems: Sequence[Problem]) -> dict[str, str]:
    """Input -> what is wrong with it, all sentences where there are several."""
    reasons: dict[str, list[str]] = {}
    for problem in problems:
        reasons.setdefault(problem.where, []).append(problem.reason)
    return {where: " ".join(said) for where, said in reasons.items()}


def models_for(
    run: str | Path, *, client: str | None = None, ensemble: Sequence[str | Path] = (), device: str = "auto"
) -> list[TrainedModel]:
    """The run's model, and those that join it: further runs, or `all` for every client's personal model."""
    everyone = [str(entry) for entry in ensemble] == ["all"]
    if everyone:
        if client is not None:
            raise ConfigError("--ensemble all takes every client's model; leave --client out.")
        names = clients_of(Path(run))
        if not names:
            raise ConfigError(f"{run} keeps no personal models; give further runs to --ensemble.")
        try:
            return [TrainedModel.load(run, client=name, device=device) for name in names]
        except ConfigError as error:
            raise ConfigError(f"--ensemble all needs a model of every client, but {error}") from None
    first = TrainedModel.load(run, client=client, device=device)
    return [first, *(TrainedModel.load(other, client=client, device=device) for other in ensemble)]


def predict_into(
    predictor: Predictor,
    inputs: Sequence[Input],
    folder: Path,
    *,
    overwrite: bool = False,
    watch: WatchScans | None = None,
) -> Report:
    """Predict every input into a folder. Inputs that fail are in the report; nothing is half written."""
    check_writable(folder)
    report = Report(folder, notes=predictor.notes)
    before = earlier(folder / PREDICTIONS, overwrite)
    origin = made_by(predictor)
    with tempfile.TemporaryDirectory(prefix="wardround-") as workplace:
        found = find_scans(list(map(Path, inputs)), predictor.layout, Path(workplace))
        report.problems += found.problems
        sources = {file.resolve(): f"the scan {file}" for scan in found.scans for file in scan.files}
        taken = dict(sources)
        try:
            for number, scan in enumerate(found.scans, start=1):
                shown = windows_of(watch, scan.where, number, len(found.scans))
                one_into(predictor, scan, report, origin, overwrite=overwrite, taken=taken, watch=shown)
                if overwrite and scan.name in report.done:
                    remove_stale(scan, report, before, sources)
        finally:  # stopped half-way, the masks that are there have their facts too
            if report.done:
                scans = {**before, **report.done}
                write_json(folder / PREDICTIONS, {"format": FORMAT, "wardround": __version__, "scans": scans})
    return report


def one_into(
    predictor: Predictor,
    scan: Scan,
    report: Report,
    origin: Mapping[str, Any],
    *,
    overwrite: bool,
    taken: dict[Path, str],
    watch: Callable[[int, int], None] | None,
) -> None:
    """Predict one scan into the report's folder; whatever is wrong with it leaves the others alone."""
    folder = report.folder
    try:
        outputs = refuse_existing(scan, folder, predictor, overwrite, taken)
        prediction = predictor(scan, watch)
        files = writing.write(prediction, folder)
    except WardroundError as error:
        report.problems.append(Problem(scan.where, str(error)))
    except OSError as error:
        reason = f"{scan.where}: {error.filename or folder}: {error.strerror or error}."
        report.problems.append(Problem(scan.where, reason))
    except UNFORESEEN as error:
        report.problems.append(unforeseen(scan.where, error))
    else:
        taken |= {path.resolve(): f"a file of {scan.where}" for path in outputs}
        facts = {"files": files, **prediction.facts(), **origin}
        facts["inputs"] = [scan.where] if len(scan.files) == 1 else facts["inputs"]
        report.done[scan.name] = facts


def unforeseen(where: str, error: Exception) -> Problem:
    """What no check foresaw, such as an odd shape, in a sentence; --debug shows where it came from."""
    log.debug("%s", where, exc_info=error)
    said = (str(error).splitlines() or [""])[0].rstrip(". ") or type(error).__name__
    return Problem(where, f"{where} cannot be predicted: {said[:200]}.")


def predictions(predictor: Predictor, inputs: Sequence[Input]) -> list[Prediction]:
    """Every input's prediction in memory; the first that fails is a DataError."""
    with tempfile.TemporaryDirectory(prefix="wardround-") as workplace:
        found = find_scans(list(map(Path, inputs)), predictor.layout, Path(workplace))
        if found.problems:
            raise DataError(found.problems[0].reason)
        return [predictor(scan) for scan in found.scans]


def predict(
    run: str | Path,
    inputs: Input | Sequence[Input],
    *,
    client: str | None = None,
    ensemble: Sequence[str | Path] = (),
    probabilities: bool = True,
    uncertainty: str | None = "auto",
    samples: int | None = None,
    flips: bool = False,
    slices: Along | None = None,
    device: str = "auto",
) -> list[Prediction]:
    """Masks, probabilities and uncertainty of scans by the model of a run, on each scan's own grid.

    inputs: files, folders or lists, as for `wardround predict`; client: that hospital's personal model;
    ensemble: further runs, or ["all"] for the personal models of all clients; uncertainty: None for none;
    slices: R, A or S, the axis along which a 2D network goes through a volume, if the run does not know it.
    """
    predictor = Predictor(
        models_for(run, client=client, ensemble=ensemble, device=device),
        uncertainty=uncertainty,
        samples=samples,
        flips=flips,
        probabilities=probabilities,
        slices=slices,
    )
    for note in predictor.notes:
        log.warning(note)
    given = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    return predictions(predictor, given)


# The folder


def check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"output folder {folder} cannot be written: {error.strerror or error}.") from None


def refuse_existing(
    scan: Scan, folder: Path, predictor: Predictor, overwrite: bool, taken: Mapping[Path, str]
) -> list[Path]:
    """The files it may write. Nothing is replaced unasked, and never a scan, nor what was just made.

    taken: files of this session, and what they are; the map of `x` may have the name of the mask of
    `x_uncertainty`.
    """
    outputs = writing.outputs_of(
        scan,
        folder,
        probabilities=predictor.probabilities,
        uncertainty=predictor.uncertainty is not None,
    )
    sources = {file.resolve() for file in scan.files}
    for path in outputs:
        if path.resolve() in sources:
            raise DataError(f"{scan.where}: its mask would replace the scan itself; choose another folder.")
        if path.resolve() in taken:
            what = taken[path.resolve()]
            raise DataError(f"{scan.where}: {path} would replace {what}; choose another folder.")
        if path.exists() and not overwrite:
            raise DataError(f"{scan.where}: {path} exists already. Add --overwrite to replace it.")
    return outputs


def remove_stale(scan: Scan, report: Report, before: Mapping[str, Any], sources: Container[Path]) -> None:
    """Remove the maps of a scan's earlier prediction that were not made anew: they are not of this mask.

    before: what predictions.json said; sources: the scans themselves. Only files it lists are removed, under
    the names this scan's maps have, and no other scan's.
    """
    own = writing.outputs_of(scan, report.folder, probabilities=True, uncertainty=True)
    others = {**before, **report.done}
    kept = {name for other, facts in others.items() if other != scan.name for name in files_of(facts)}
    kept |= files_of(report.done[scan.name])
    listed = files_of(before.get(scan.name)) - kept
    for path in own:
        if path.name in listed and path.is_file() and path.resolve() not in sources:
            try:
                path.unlink()
            except OSError as error:
                report.notes.append(
                    f"{path} is of an earlier prediction, not of this mask, and cannot be removed: "
                    f"{error.strerror or error}."
                )


def files_of(facts: Any) -> set[str]:
    """Names of the files an entry of predictions.json lists."""
    files = facts.get("files") if isinstance(facts, Mapping) else None
    return {name for name in files.values() if isinstance(name, str)} if isinstance(files, Mapping) else set()


def earlier(path: Path, overwrite: bool) -> dict[str, Any]:
    """What an earlier session wrote here; a file of somebody else is not touched."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] == FORMAT:
            return dict(found["scans"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    if overwrite:
        return {}
    raise ConfigError(f"{path} was not written by wardround predict. Add --overwrite to replace it.")


def made_by(predictor: Predictor) -> dict[str, Any]:
    models = [
        {"run": str(model.folder), "client": model.client, "params_sha256": model.params.sha256()}
        for model in predictor.models
    ]
    return {"models": models, "flips": predictor.flips, "temperature": predictor.temperature}


def windows_of(
    watch: WatchScans | None, where: str, number: int, total: int
) -> Callable[[int, int], None] | None:
    if watch is None:
        return None
    return lambda done, windows: watch(where, number, total, done, windows)
