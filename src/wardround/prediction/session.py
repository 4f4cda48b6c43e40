"""Session: many scans into one folder, one after the other; a scan that fails is reported and skipped.

predictions.json in that folder records for every mask its scan, its model, the size and uncertainty of each
structure, and warnings.
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

from wardround.data.dicom.web import Archive, check_reachable, open_archive, store
from wardround.data.dicom.writing import MadeBy
from wardround.data.slices.cutting import Along
from wardround.errors import ConfigError, DataError, WardroundError
from wardround.files import jsonable, write_json
from wardround.prediction import writing
from wardround.prediction.inputs import Format, InputProblem, Scan, find_scans, name_in_format
from wardround.prediction.predicting import Predictor
from wardround.prediction.results import Prediction
from wardround.prediction.trained import TrainedModel, list_clients
from wardround.version import __version__

log = logging.getLogger(__name__)

PREDICTIONS = "predictions.json"
FORMAT = "wardround-predictions-1"
UNEXPECTED = (ArithmeticError, LookupError, RuntimeError, ValueError)

Input = str | os.PathLike[str]
WatchScans = Callable[[str, int, int, int, int], None]  # scan, number, of how many, window, of how many


@dataclass
class Report:
    """What a session did: entries of predictions.json by mask, and every input that failed."""

    folder: Path
    done: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[InputProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = jsonable(
            {
                "folder": str(self.folder),
                "predicted": len(self.done),
                "failed": len(self.problems),
                "scans": self.done,
                "problems": group_by_input(self.problems),
                "notes": self.notes,
            }
        )
        return plain


def group_by_input(problems: Sequence[InputProblem]) -> dict[str, str]:
    """Input -> its problems as text."""
    reasons: dict[str, list[str]] = {}
    for problem in problems:
        reasons.setdefault(problem.where, []).append(problem.reason)
    return {where: " ".join(said) for where, said in reasons.items()}


def load_models(
    run: str | Path, *, client: str | None = None, ensemble: Sequence[str | Path] = (), device: str = "auto"
) -> list[TrainedModel]:
    """The models of a run and of further runs; ensemble `all`: every client's personal model."""
    everyone = [str(entry) for entry in ensemble] == ["all"]
    if everyone:
        if client is not None:
            raise ConfigError("--ensemble all uses every client's model; leave --client out.")
        names = list_clients(Path(run))
        if not names:
            raise ConfigError(f"{run} has no personal models; give other runs to --ensemble.")
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
    to: Format | None = None,
    overwrite: bool = False,
    watch: WatchScans | None = None,
    store_in: str | None = None,
    login: Path | None = None,
) -> Report:
    """Predict every input into a folder. Inputs that fail are in the report; no file is left incomplete.

    to: the format of all masks and maps; None: each scan's own; store_in: the address of an archive that gets
    them too; login: of archives, as `data.dicom.web.open_archive` has it.
    """
    check_writable(folder)
    archive = None if store_in is None else open_store(store_in, login, to)
    report = Report(folder, notes=predictor.notes)
    before = read_earlier(folder / PREDICTIONS, overwrite)
    origin = describe_models(predictor)
    with tempfile.TemporaryDirectory(prefix="wardround-") as workplace:
        found = find_scans([os.fspath(given) for given in inputs], predictor.layout, Path(workplace), login)
        found = found if to is None else name_in_format(found, to)
        report.problems += found.problems
        sources = {file.resolve(): f"the scan {file}" for scan in found.scans for file in scan.files}
        taken = dict(sources)
        try:
            for number, scan in enumerate(found.scans, start=1):
                shown = watch_windows(watch, scan.where, number, len(found.scans))
                predict_one(predictor, scan, report, origin, overwrite=overwrite, taken=taken, watch=shown)
                if overwrite and scan.name in report.done:
                    remove_stale(scan, report, before, sources)
                if archive is not None and scan.name in report.done:
                    store_masks(archive, scan, report)
        finally:  # also when interrupted, every mask has its entry
            if report.done:
                scans = {**before, **report.done}
                write_json(folder / PREDICTIONS, {"format": FORMAT, "wardround": __version__, "scans": scans})
    return report


def predict_one(
    predictor: Predictor,
    scan: Scan,
    report: Report,
    origin: Mapping[str, Any],
    *,
    overwrite: bool,
    taken: dict[Path, str],
    watch: Callable[[int, int], None] | None,
) -> None:
    """Predict one scan into the report's folder; a failure does not affect the others."""
    folder = report.folder
    try:
        outputs = check_outputs(scan, folder, predictor, overwrite, taken)
        prediction = predictor(scan, watch)
        files = writing.write(prediction, folder, describe_algorithm(predictor))
    except WardroundError as error:
        report.problems.append(InputProblem(scan.where, str(error)))
    except OSError as error:
        reason = f"{scan.where}: {error.filename or folder}: {error.strerror or error}."
        report.problems.append(InputProblem(scan.where, reason))
    except UNEXPECTED as error:
        report.problems.append(describe_unexpected(scan.where, error))
    else:
        taken |= {path.resolve(): f"a file of {scan.where}" for path in outputs}
        facts = {"files": files, **prediction.as_dict(), **origin}
        facts["inputs"] = [scan.where] if len(scan.files) == 1 else facts["inputs"]
        report.done[scan.name] = facts


def open_store(address: str, login: Path | None, to: Format | None) -> Archive:
    """The archive for masks, before anything is predicted."""
    if to not in ("dicom-seg", "rtstruct"):
        raise ConfigError("--store sends DICOM to an archive; add --to dicom-seg or --to rtstruct.")
    archive = open_archive(address, login)
    check_reachable(archive)
    return archive


def store_masks(archive: Archive, scan: Scan, report: Report) -> None:
    """Send a scan's mask and maps; where that fails they are still in the folder."""
    facts = report.done[scan.name]
    try:
        store(archive, [report.folder / name for name in facts["files"].values()])
        facts["stored"] = archive.url
    except DataError as error:
        reason = f"{scan.where}: {report.folder / scan.name} was written but not stored: {error}"
        report.problems.append(InputProblem(scan.where, reason))


def describe_unexpected(where: str, error: Exception) -> InputProblem:
    """A problem that no check caught, such as an unexpected shape; --debug logs its traceback."""
    log.debug("%s", where, exc_info=error)
    said = (str(error).splitlines() or [""])[0].rstrip(". ") or type(error).__name__
    return InputProblem(where, f"{where} cannot be predicted: {said[:200]}.")


def predict_all(predictor: Predictor, inputs: Sequence[Input]) -> list[Prediction]:
    """Every input's prediction in memory; the first failure is a DataError."""
    with tempfile.TemporaryDirectory(prefix="wardround-") as workplace:
        found = find_scans([os.fspath(given) for given in inputs], predictor.layout, Path(workplace))
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
    tta: bool | None = None,
    slices: Along | None = None,
    device: str = "auto",
) -> list[Prediction]:
    """Masks, probabilities and uncertainty of scans by the model of a run, on each scan's own grid.

    inputs: files, folders or lists, as for `wardround predict`; client: that hospital's personal model;
    ensemble: further runs, or ["all"] for the personal models of all clients; uncertainty: None for none;
    tta: average over mirror images, None for as the run was tested; slices: R, A or S, the axis along which a
    2D network goes through a volume, if the run has none on record.
    """
    models = load_models(run, client=client, ensemble=ensemble, device=device)
    predictor = Predictor(models, uncertainty, samples, tta, probabilities=probabilities, slices=slices)
    for note in predictor.notes:
        log.warning(note)
    given = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    return predict_all(predictor, given)


# The folder


def check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"output folder {folder} cannot be written: {error.strerror or error}.") from None


def check_outputs(
    scan: Scan, folder: Path, predictor: Predictor, overwrite: bool, taken: Mapping[Path, str]
) -> list[Path]:
    """The files it may write. Nothing is replaced unasked, and never a scan, nor what was just made.

    taken: files of this session, and what they are; the map of `x` may have the name of the mask of
    `x_uncertainty`.
    """
    outputs = writing.list_outputs(
        scan, folder, probabilities=predictor.probabilities, uncertainty=predictor.uncertainty is not None
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
    """Remove the maps of a scan's earlier prediction that were not written again: they do not fit this mask.

    before: the earlier predictions.json; sources: the scans themselves. Only files it lists are removed,
    under the names of this scan's maps, and no other scan's.
    """
    own = writing.list_outputs(scan, report.folder, probabilities=True, uncertainty=True)
    others = {**before, **report.done}
    kept = {name for other, facts in others.items() if other != scan.name for name in list_files(facts)}
    kept |= list_files(report.done[scan.name])
    listed = list_files(before.get(scan.name)) - kept
    for path in own:
        if path.name in listed and path.is_file() and path.resolve() not in sources:
            try:
                path.unlink()
            except OSError as error:
                report.notes.append(
                    f"{path} belongs to an earlier prediction, not to this mask, and cannot be removed: "
                    f"{error.strerror or error}."
                )


def list_files(facts: Any) -> set[str]:
    """Names of the files an entry of predictions.json lists."""
    files = facts.get("files") if isinstance(facts, Mapping) else None
    return {name for name in files.values() if isinstance(name, str)} if isinstance(files, Mapping) else set()


def read_earlier(path: Path, overwrite: bool) -> dict[str, Any]:
    """The entries of an earlier session; a file of another program is refused."""
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


def describe_algorithm(predictor: Predictor) -> MadeBy:
    """What a DICOM mask says of its making: the method, and the digest that the model card has."""
    first, *others = predictor.models
    name = type(first.method).__name__ if not others else f"ensemble of {len(predictor.models)}"
    return MadeBy(name, first.params.sha256())


def describe_models(predictor: Predictor) -> dict[str, Any]:
    models = [
        {"run": str(model.folder), "client": model.client, "params_sha256": model.params.sha256()}
        for model in predictor.models
    ]
    return {"models": models, "tta": predictor.tta, "temperature": predictor.temperature}


def watch_windows(
    watch: WatchScans | None, where: str, number: int, total: int
) -> Callable[[int, int], None] | None:
    if watch is None:
        return None
    return lambda done, windows: watch(where, number, total, done, windows)
