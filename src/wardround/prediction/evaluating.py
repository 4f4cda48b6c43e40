"""Evaluating: any model on any labelled set, case by case; nothing is trained.

Masks are judged where the annotator drew, on each scan's own grid, as a user of the mask would see it;
a run's own test judges them on the prepared grid, so the two differ a little where scans are resampled.

    OUT/cases.csv         one line a case and region: every metric of the run
    OUT/evaluation.json   the same in summary, how sure the model was of each case, what was left out
    OUT/report.html       the page, as of a run: OUT looks like the folder of a run that was only tested
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray

from wardround.config_file import resolve
from wardround.data.listing import Entry
from wardround.data.preparing.prepare import to_classes
from wardround.data.readers.image_files import read_label, same_affine
from wardround.data.slices.view import Along
from wardround.engine.judging.evaluation import Evaluation, column
from wardround.engine.judging.result_tables import case_rows, client_table
from wardround.errors import ConfigError, DataError
from wardround.files import file_name, jsonable, write_json, write_text
from wardround.metrics import METRICS, MM, PX, combine_units, measure
from wardround.metrics.summary import across_clients, summarise
from wardround.prediction.inputs import Problem, Scan
from wardround.prediction.labelled import open_labelled, values_of
from wardround.prediction.predicting import Predictor
from wardround.prediction.seen_cases import past_of, told
from wardround.prediction.session import UNFORESEEN, by_input, check_writable, models_for, unforeseen
from wardround.reporting import write_report
from wardround.tables import Table
from wardround.text import format_size

log = logging.getLogger(__name__)

Split = Literal["all", "train", "val", "test", "auto"]
WRITTEN = ("cases.csv", "config.yaml", "environment.json", "records.jsonl", "report.html", "result.json")
WatchCases = Callable[[int, int, str], None]


@dataclass
class Judged:
    """What an evaluation found; cases: centre -> one row a case; lengths: what distances are in."""

    folder: Path
    evaluation: Evaluation
    metrics: tuple[str, ...]
    title: str
    lengths: str = MM
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def table(self) -> Table:
        return client_table(self.evaluation, self.metrics, self.title, self.lengths)

    @property
    def num_cases(self) -> int:
        return sum(len(rows) for rows in self.evaluation.cases.values())

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = jsonable(
            {
                "folder": self.folder,
                "cases": self.num_cases,
                "failed": len(self.problems),
                "summary": self.evaluation.as_dict(),
                "uncertainty": {
                    centre: {row["case"]: row["uncertainty"] for row in rows}
                    for centre, rows in self.evaluation.cases.items()
                },
                "warnings": {
                    centre: {row["case"]: row["warnings"] for row in rows if row["warnings"]}
                    for centre, rows in self.evaluation.cases.items()
                },
                "problems": by_input(self.problems),
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
    flips: bool = False,
    slices: Along | None = None,
    device: str = "auto",
    overwrite: bool = False,
    report: bool = True,
    watch: WatchCases | None = None,
) -> Judged:
    """Judge the model of a run on a federation.yaml, or on a folder `wardround data init` understands.

    split: which cases; auto takes the test cases of the data the run was trained on, and all of any other
    that it has not seen; slices: the axis along which a 2D network goes through volumes, if the run does not
    know it.
    """
    models = models_for(run, client=client, ensemble=ensemble, device=device)
    predictor = Predictor(models, flips=flips, slices=slices)
    model = predictor.models[0]
    path = Path(data)
    pasts = {entry.folder: past_of(entry, path) for entry in predictor.models}
    own = pasts[model.folder]
    ours = own is not None and own.path == path.resolve()
    which = split if split != "auto" else "test" if ours else "all"
    labelled = open_labelled(path, which, model.config.data if ours else None)
    every = len(labelled.entries)
    labelled = told(labelled, pasts, leave_out=split == "auto")
    classes, note = values_of(predictor.preparation.labels, labelled.labels, path)
    folder = Path(output) if output is not None else default_folder(Path(run), path)
    refuse_taken(folder, overwrite)
    judged = Judged(
        folder=folder,
        evaluation=Evaluation({}, {}, {}),
        metrics=tuple(model.config.evaluate.metrics),
        title=f"{model.name} on {path.name}",
        notes=[*labelled.notes, *note, *(w for m in predictor.models for w in m.warnings)],
    )
    rows: dict[str, list[dict[str, Any]]] = {}
    for number, entry in enumerate(labelled.entries, start=1):
        try:
            rows.setdefault(entry.client, []).append(judge(predictor, entry, classes))
        except DataError as error:
            judged.problems.append(Problem(entry.where, str(error)))
        except UNFORESEEN as error:
            judged.problems.append(unforeseen(entry.where, error))
        if watch is not None:
            watch(number, len(labelled.entries), entry.where)
    if not any(rows.values()):
        reason = judged.problems[0].reason if judged.problems else "It has none."
        raise DataError(f"{path}: none of {len(labelled.entries)} cases could be judged. {reason}")
    judged.lengths = combine_units(row["lengths"] for found in rows.values() for row in found)
    judged.evaluation = summarised({name: found for name, found in rows.items() if found}, judged.metrics)
    write(judged, predictor, path, which if len(labelled.entries) == every else "unseen")
    if report:
        write_report([folder])
    return judged


# One case


def judge(predictor: Predictor, entry: Entry, classes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Every metric of one case, on its own grid."""
    assert entry.label is not None
    prediction = predictor(Scan(entry.images, entry.images[0].name, entry.where))
    label = read_label(entry.label)
    if not same_affine(prediction.affine, label.affine):
        raise DataError(f"{entry.where}: image and label lie in different places (their affines differ).")
    truth, _ = to_classes(label.data[0], classes, background=None)
    mask = numbers_of(prediction.mask, predictor.preparation.values)
    if mask.ndim > truth.ndim:  # a slice stored as a volume of one
        mask = np.squeeze(mask)
    if mask.shape != truth.shape:
        raise DataError(
            f"{entry.where}: image is {format_size(mask.shape)} but label is {format_size(truth.shape)}."
        )
    settings = predictor.models[0].config.evaluate
    scores = measure(
        mask,
        truth,
        predictor.preparation.regions,
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


def numbers_of(mask: NDArray[np.uint8], values: Sequence[int]) -> NDArray[np.uint8]:
    """File values -> class numbers."""
    table = np.zeros(256, dtype=np.uint8)
    table[list(values)] = np.arange(len(values))
    numbers: NDArray[np.uint8] = table[mask]
    return numbers


def summarised(cases: Mapping[str, Sequence[Mapping[str, Any]]], metrics: Sequence[str]) -> Evaluation:
    """By centre and over centres, as `engine.evaluation.gather` does it; a loss needs the prepared grid."""
    clients = {
        metric: {name: summarise(column(rows, metric)) for name, rows in cases.items()} for metric in metrics
    }
    overall = {m: across_clients(found, best=METRICS[m].best) for m, found in clients.items()}
    return Evaluation(cases, clients, overall)


# The folder


def default_folder(run: Path, data: Path) -> Path:
    name = data.resolve().parent.name if data.is_file() else data.resolve().name
    return Path("runs") / file_name(f"{run.resolve().name}-on-{name}")


def refuse_taken(folder: Path, overwrite: bool) -> None:
    """An evaluation replaces an evaluation if asked to, and never a run."""
    if (folder / "checkpoints").exists():
        raise ConfigError(f"{folder} holds a run, which is not replaced; choose another folder with -o.")
    if (folder / "evaluation.json").exists() and not overwrite:
        raise ConfigError(f"{folder} holds an evaluation. Add --overwrite to replace it, or choose another.")
    theirs = [name for name in WRITTEN if (folder / name).exists()]
    if theirs and not overwrite:
        raise ConfigError(
            f"{folder} holds {theirs[0]}, which is of no evaluation. Choose another folder with -o, or add "
            "--overwrite to replace it."
        )
    check_writable(folder)


def write(judged: Judged, predictor: Predictor, data: Path, split: str) -> None:
    """The tables, and the few files that make the folder readable as one of a run."""
    folder, model = judged.folder, predictor.models[0]
    write_text(folder / "cases.csv", case_rows(judged.evaluation, judged.metrics).csv())
    config = {**resolve(model.config), "name": judged.title, "output": str(folder)}
    write_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    made = model.folder / "environment.json"
    if made.exists():
        write_text(folder / "environment.json", made.read_text(encoding="utf-8"))
    write_text(folder / "records.jsonl", "")
    result = {
        "status": "done",
        "name": judged.title,
        "method": model.config.method.get("name", "fedavg"),
        "rounds": model.config.rounds,
        "params_sha256": model.params.sha256(),
        "best_round": None,
        "best_validation": math.nan,
        "tested_model": model.config.evaluate.model,
        "test": judged.evaluation.as_dict(),
        "lengths": judged.lengths,
        "cross_site": {},
        "num_refused": 0,
        "num_lost": 0,
        "seconds": 0.0,
    }
    write_json(folder / "result.json", result)
    about = {
        "run": [str(entry.folder) for entry in predictor.models],
        "client": model.client,
        "data": str(data),
        "split": split,
        "grid": "the scan's own",
        "flips": predictor.flips,
    }
    write_json(folder / "evaluation.json", {**about, **judged.as_dict()})
