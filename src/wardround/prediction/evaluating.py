"""Evaluating: any model on any labelled set, case by case; nothing is trained.

Masks are compared with labels on each scan's own grid, as a user of the mask sees it. A run's own test
compares them on the prepared grid, so the two differ slightly where scans are resampled.

    OUT/cases.csv         one line per case and region: every metric of the run
    OUT/evaluation.json   the summary, the uncertainty of each case, what was left out
    OUT/report.html       the page, as for a run: OUT reads like the folder of a run that was only tested
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray

from wardround.comparison.runs import read_run
from wardround.config_file import resolve
from wardround.data.annotation import Annotation, annotations_of, measurable
from wardround.data.channels import find_places
from wardround.data.listing import Entry
from wardround.data.preparing.prepare import to_classes
from wardround.data.readers.image_files import same_affine
from wardround.data.readers.label_files import read_case_label
from wardround.data.slices.cutting import Along
from wardround.engine.judging.evaluation import Evaluation, summarise_cases
from wardround.engine.judging.result_tables import OWN_GRID, client_table, write_cases
from wardround.errors import ConfigError, DataError
from wardround.files import file_name, jsonable, write_json, write_text
from wardround.metrics import MM, PX, combine_units, measure
from wardround.prediction.inputs import InputProblem, Scan
from wardround.prediction.labelled import (
    Classes,
    LabelledSet,
    find_run_cases,
    match_classes,
    note_seen_cases,
    open_labelled,
)
from wardround.prediction.predicting import Predictor
from wardround.prediction.session import (
    UNEXPECTED,
    check_writable,
    describe_unexpected,
    group_by_input,
    load_models,
)
from wardround.prediction.trained import TrainedModel
from wardround.reporting import write_report
from wardround.tables import Table
from wardround.text import format_size

log = logging.getLogger(__name__)

Split = Literal["all", "train", "val", "test", "auto"]
FILES = (
    "aggregates.json",
    "cases.csv",
    "config.yaml",
    "environment.json",
    "records.jsonl",
    "report.html",
    "result.json",
)
SCANS_GRID, PREPARED_GRID = "the scan's own", "the prepared one"
WatchCases = Callable[[int, int, str], None]


@dataclass
class EvaluationReport:
    """The result of an evaluation; units: of distances; grid: on which masks are compared with labels."""

    folder: Path
    evaluation: Evaluation
    metrics: tuple[str, ...]
    title: str
    units: str = MM
    problems: list[InputProblem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    grid: str = SCANS_GRID

    @property
    def table(self) -> Table:
        remarks = [OWN_GRID] if self.grid == SCANS_GRID else []
        return client_table(self.evaluation, self.metrics, self.title, self.units, remarks)

    def __repr__(self) -> str:
        return f"<EvaluationReport {self.title}: {self.num_cases} cases, in {self.folder}>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return self.table.html()

    @property
    def num_cases(self) -> int:
        """Cases with a row, or behind the sums of a hospital that sends no rows."""
        found, first = self.evaluation, self.metrics[0]
        told = sum(one.summarise_means(first).num for one in found.aggregates.values())
        return told + sum(len(rows) for rows in found.cases.values())

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = jsonable(
            {
                "folder": self.folder,
                "cases": self.num_cases,
                "failed": len(self.problems),
                "summary": self.evaluation.as_dict(),
                "uncertainty": {
                    centre: {row["case"]: row["uncertainty"] for row in rows if "uncertainty" in row}
                    for centre, rows in self.evaluation.cases.items()
                },
                "warnings": {
                    centre: {row["case"]: row["warnings"] for row in rows if row.get("warnings")}
                    for centre, rows in self.evaluation.cases.items()
                },
                "problems": group_by_input(self.problems),
                "notes": self.notes,
            }
        )
        return plain


def evaluate(
    run: str | Path,
    data: str | Path,
    *,
    output: str | Path | None = None,
    split: Split = "auto",
    client: str | None = None,
    ensemble: Sequence[str | Path] = (),
    tta: bool | None = None,
    slices: Along | None = None,
    device: str = "auto",
    overwrite: bool = False,
    report: bool = True,
    watch: WatchCases | None = None,
) -> EvaluationReport:
    """Evaluate the model of a run on a federation.yaml, or on a folder that `wardround data init` reads.

    split: which cases; auto takes the test cases of the run's own data, and of any other data all cases that
    the model has not seen; tta: average over mirror images, None for as the run was tested; slices: the axis
    along which a 2D network goes through volumes, if the run does not record it.
    """
    models = load_models(run, client=client, ensemble=ensemble, device=device)
    predictor = Predictor(models, tta=tta, slices=slices)
    model, path = models[0], Path(data)
    run_cases = {entry.folder: find_run_cases(entry, path) for entry in models}
    own = run_cases[model.folder]
    is_own = own is not None and own.path == path.resolve()
    which = split if split != "auto" else "test" if is_own else "all"
    opened = open_labelled(path, which, model.config.data if is_own else None)
    labelled = note_seen_cases(opened, run_cases, leave_out=split == "auto")
    classes, note = match_classes(predictor.preparation.labels, labelled.labels, path)
    folder = Path(output) if output is not None else choose_folder(Path(run), path)
    check_folder(folder, overwrite)
    done = EvaluationReport(
        folder=folder,
        evaluation=Evaluation({}, {}, {}),
        metrics=tuple(model.config.evaluate.metrics),
        title=f"{model.name} on {path.name}",
        notes=[*labelled.notes, *note, *(w for m in models for w in m.warnings)],
    )
    rows = evaluate_cases(predictor, labelled, classes, done.problems, watch)
    done.units = combine_units(row["lengths"] for found in rows.values() for row in found)
    found = summarise_cases(rows, done.metrics)  # no loss, which needs the prepared grid
    held_out = find_held_out([entry.folder for entry in models], rows)
    if held_out and held_out == set(rows):
        done.notes.append("No client here took part in the training of the run.")
    done.evaluation = found.set_apart(held_out if held_out < set(rows) else ())
    is_whole = len(labelled.entries) == len(opened.entries)
    write_evaluation(done, models, data=str(path), split=which if is_whole else "unseen", tta=predictor.tta)
    if report:
        write_report([folder])
    return done


def find_held_out(runs: Sequence[Path], names: Collection[str]) -> set[str]:
    """Which of these clients took no part in the training of any run, as far as names tell.

    Those that a run held out; and where it trained at some of the names, all others. Clients that were made
    by a partition have names of their own.
    """
    found = set(names)
    for run in map(read_run, runs):
        out = set(run.test.held_out) if run.test is not None else set()
        trained = set(run.clients) - out
        found &= out if run.partition or not trained & set(names) else set(names) - trained
    return found


# The cases


def evaluate_cases(
    predictor: Predictor,
    labelled: LabelledSet,
    classes: Classes,
    problems: list[InputProblem],
    watch: WatchCases | None,
) -> dict[str, list[dict[str, Any]]]:
    """The rows of each centre; a case that cannot be evaluated goes to the problems."""
    rows: dict[str, list[dict[str, Any]]] = {}
    total = len(labelled.entries)
    trained = predictor.preparation
    annotations = annotations_of(
        labelled.annotates, list(trained.labels), trained.regions, list(labelled.annotates)
    )
    for number, entry in enumerate(labelled.entries, start=1):
        try:
            rows.setdefault(entry.client, []).append(
                evaluate_case(
                    predictor,
                    entry,
                    classes,
                    labelled.ignore,
                    annotations.get(entry.client),
                    labelled.channels,
                )
            )
        except DataError as error:
            problems.append(InputProblem(entry.where, str(error)))
        except UNEXPECTED as error:
            problems.append(describe_unexpected(entry.where, error))
        if watch is not None:
            watch(number, total, entry.where)
    if not any(rows.values()):
        reason = problems[0].reason if problems else "It has none."
        raise DataError(f"{labelled.path}: none of {total} cases could be evaluated. {reason}")
    return {name: found for name, found in rows.items() if found}


def find_classes(predictor: Predictor, entry: Entry, classes: Classes) -> Classes:
    """The values of each class of the run in this case, whose source may have a map of its own."""
    if entry.labels is None:
        return classes
    return match_classes(predictor.preparation.labels, entry.labels, entry.images[0])[0]


def evaluate_case(
    predictor: Predictor,
    entry: Entry,
    classes: Classes,
    ignore: Sequence[int] = (),
    annotation: Annotation | None = None,
    channels: Sequence[str] = (),
) -> dict[str, Any]:
    """Every metric of one case, on its own grid, in the regions that its label tells; channels: names of what
    images hold, where the case does not say."""
    label = read_case_label(entry)
    assert label is not None
    named = entry.channels or channels
    places = find_places(named, predictor.preparation.channels, entry.client)
    number = len(named) if places else 0
    scan = Scan(entry.images, entry.images[0].name, entry.where, places=places, num_channels=number)
    prediction = predictor(scan)
    if not same_affine(prediction.affine, label.affine):
        raise DataError(f"{entry.where}: image and label have different affines.")
    truth, _ = to_classes(label.data[0], find_classes(predictor, entry, classes), background=None)
    mask = to_class_numbers(prediction.mask, predictor.preparation.values)
    if mask.ndim > truth.ndim:  # a slice stored as a volume
        mask = np.squeeze(mask)
    if mask.shape != truth.shape:
        raise DataError(
            f"{entry.where}: image is {format_size(mask.shape)} but label is {format_size(truth.shape)}."
        )
    mask = np.where(np.isin(label.data[0], list(ignore)), 0, mask)
    settings = predictor.models[0].config.evaluate
    scores = measure(
        mask,
        truth,
        measurable(predictor.preparation.regions, annotation),
        settings.metrics,
        prediction.spacing,
        tolerance=settings.tolerance,
        empty_policy=settings.empty_policy,
        surface_penalty=settings.surface_penalty,
    )
    return {
        "case": entry.name,
        "regions": scores,
        "uncertainty": prediction.doubt,
        "warnings": list(prediction.warnings),
        "lengths": PX if prediction.affine is None else MM,
    }


def to_class_numbers(mask: NDArray[np.uint8], values: Sequence[int]) -> NDArray[np.uint8]:
    """Values in a file -> class numbers."""
    table = np.zeros(256, dtype=np.uint8)
    table[list(values)] = np.arange(len(values))
    numbers: NDArray[np.uint8] = table[mask]
    return numbers


# The folder


def choose_folder(run: Path, data: Path) -> Path:
    name = data.resolve().parent.name if data.is_file() else data.resolve().name
    return Path("runs") / file_name(f"{run.resolve().name}-on-{name}")


def check_folder(folder: Path, overwrite: bool) -> None:
    """Replace an earlier evaluation only if asked to, and never a run."""
    if (folder / "checkpoints").exists():
        raise ConfigError(f"{folder} holds a run, which is not replaced; choose another folder with -o.")
    if (folder / "evaluation.json").exists() and not overwrite:
        raise ConfigError(f"{folder} holds an evaluation. Add --overwrite to replace it, or choose another.")
    theirs = [name for name in FILES if (folder / name).exists()]
    if theirs and not overwrite:
        raise ConfigError(
            f"{folder} holds {theirs[0]}, which is not part of an evaluation. Choose another folder with -o, "
            "or add --overwrite to replace it."
        )
    check_writable(folder)


def write_evaluation(
    done: EvaluationReport, models: Sequence[TrainedModel], *, data: str, split: str, tta: bool | None
) -> None:
    """The tables, and the files that make the folder readable as a run folder."""
    folder, model = done.folder, models[0]
    write_cases(folder, done.evaluation, done.metrics)
    config = {**resolve(model.config), "name": done.title, "output": str(folder)}
    write_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    made = model.folder / "environment.json"
    if made.exists():
        write_text(folder / "environment.json", made.read_text(encoding="utf-8"))
    write_text(folder / "records.jsonl", "")
    result = {
        "status": "done",
        "name": done.title,
        "method": model.config.method.get("name", "fedavg"),
        "rounds": model.config.rounds,
        "params_sha256": model.params.sha256(),
        "best_round": None,
        "best_validation": math.nan,
        "tested_model": model.config.evaluate.model,
        "test": done.evaluation.as_dict(),
        "lengths": done.units,
        "cross_site": {},
        "num_refused": 0,
        "num_lost": 0,
        "seconds": 0.0,
    }
    write_json(folder / "result.json", result)
    axes = {entry.config.augmentation.mirror_axes for entry in models}
    about = {
        "run": [str(entry.folder) for entry in models],
        "client": model.client,
        "data": data,
        "split": split,
        "grid": done.grid,
        "tta": tta,
        "mirror_axes": axes.pop() if len(axes) == 1 else None,
    }
    write_json(folder / "evaluation.json", {**about, **done.as_dict()})
