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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray

from wardround.config import DataSettings
from wardround.data.check import with_splits
from wardround.data.federation_file import FederationFile, load
from wardround.data.files import read_label, same_affine
from wardround.data.init import propose
from wardround.data.listing import Entry, Listing
from wardround.data.loading import with_meaning
from wardround.data.prepare import to_classes
from wardround.data.readers import joining, read
from wardround.engine.evaluation import Evaluation, column
from wardround.errors import ConfigError, DataError, WardroundError
from wardround.files import file_name, jsonable, write_json, write_text
from wardround.metrics import METRICS, measure
from wardround.metrics.summary import across_clients, summarise
from wardround.prediction.inputs import Problem, Scan
from wardround.prediction.predicting import Predictor
from wardround.prediction.session import UNFORESEEN, by_input, check_writable, models_for, unforeseen
from wardround.reporting.report import write_report
from wardround.reporting.result_tables import case_rows, client_table
from wardround.reporting.tables import Table

log = logging.getLogger(__name__)

Split = Literal["all", "train", "val", "test", "auto"]
SEEN = (
    "holds data this run was trained on, so cases it has seen are judged too; "
    "its own federation.yaml with --split test leaves them out."
)
WRITTEN = ("cases.csv", "config.yaml", "environment.json", "records.jsonl", "report.html", "result.json")
WatchCases = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Labelled:
    """A labelled set: its cases by centre, and what its labels mean; notes: what a person should know."""

    path: Path
    entries: tuple[Entry, ...]
    labels: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()


@dataclass
class Judged:
    """What an evaluation found; cases: centre -> one row a case."""

    folder: Path
    evaluation: Evaluation
    metrics: tuple[str, ...]
    title: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def table(self) -> Table:
        return client_table(self.evaluation, self.metrics, self.title)

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
    device: str = "auto",
    overwrite: bool = False,
    report: bool = True,
    watch: WatchCases | None = None,
) -> Judged:
    """Judge the model of a run on a federation.yaml, or on a folder `wardround data init` understands.

    split: which cases; auto takes the test cases of the data the run was trained on, and all of any other.
    """
    predictor = Predictor(models_for(run, client=client, ensemble=ensemble, device=device), flips=flips)
    model = predictor.models[0]
    path = Path(data)
    if split == "auto":
        split = "test" if is_training_data(path, model.config.data.federation) else "all"
    labelled = open_labelled(path, split)
    seen = [f"{path} {SEEN}"] if split == "all" and holds_training_data(path, model.config.data) else []
    classes, note = values_of(predictor.preparation.labels, labelled.labels, path)
    folder = Path(output) if output is not None else default_folder(Path(run), path)
    refuse_taken(folder, overwrite)
    judged = Judged(
        folder=folder,
        evaluation=Evaluation({}, {}, {}),
        metrics=tuple(model.config.evaluate.metrics),
        title=f"{model.name} on {path.name}",
        notes=[*labelled.notes, *seen, *note, *(w for m in predictor.models for w in m.warnings)],
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
    judged.evaluation = summarised({name: found for name, found in rows.items() if found}, judged.metrics)
    write(judged, predictor, path, split)
    if report:
        write_report([folder])
    return judged


# The cases


def open_labelled(path: Path, split: str) -> Labelled:
    """The labelled cases of a federation.yaml or of a folder, in the order of centres and names."""
    if path.is_file() and path.suffix.lower() in (".yaml", ".yml"):
        file, found = of_file(path)
    else:
        proposal = propose([path])
        file, found = proposal.file, proposal.listing
    if split != "all":
        entries, _ = with_splits(found, file, path.parent if path.is_file() else path)
        found = replace(found, entries=tuple(entry for entry in entries if (entry.split or "train") == split))
    drawn = tuple(entry for entry in found.entries if entry.label is not None)
    notes = []
    if len(drawn) < len(found.entries):
        notes.append(f"{len(found.entries) - len(drawn)} cases have no label and are left out.")
    if not drawn:
        which = "" if split == "all" else f" in split '{split}'"
        raise DataError(f"{path} has no labelled cases{which}.")
    return Labelled(path, drawn, file.labels, tuple(notes))


def of_file(path: Path) -> tuple[FederationFile, Listing]:
    """All centres it names; with none named, all there are, whether they could train or not."""
    file = load(path)
    found = joining.join([read(source, path.parent) for source in file.sources], file.channels, file.labels)
    if file.clients is not None:
        chosen = {*file.clients, *file.held_out}
        found = replace(found, entries=tuple(entry for entry in found.entries if entry.client in chosen))
    return with_meaning(file, found, path), found


def is_training_data(path: Path, trained_on: Path | None) -> bool:
    return trained_on is not None and path.resolve() == trained_on.resolve()


def holds_training_data(path: Path, trained_on: DataSettings) -> bool:
    """Whether data lie where the run's own did, as far as its federation.yaml is still there to tell."""
    homes = [] if trained_on.folders is None else [trained_on.folders.root]
    if trained_on.federation is not None:
        if is_training_data(path, trained_on.federation):
            return True
        try:
            file = load(trained_on.federation)
        except (WardroundError, OSError):
            return False
        homes = [trained_on.federation.parent / source.path for source in file.sources]
    here = path.resolve()
    return any(
        here == home or here in home.parents or home in here.parents for home in map(Path.resolve, homes)
    )


def values_of(
    wanted: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]], path: Path
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The values that mean each class of the run in these labels: by name, else by order where counts fit."""
    known = {name.casefold(): values for name, values in given.items()}
    if all(name.casefold() in known for name in wanted):
        return {name: known[name.casefold()] for name in wanted}, []
    if len(given) == len(wanted):
        pairs = ", ".join(f"{theirs} is {ours}" for ours, theirs in zip(wanted, given, strict=True))
        renamed = dict(zip(wanted, given.values(), strict=True))
        return renamed, [f"classes of the data have other names than the run's; taken in order: {pairs}."]
    raise ConfigError(
        f"{path} has the classes {', '.join(given)}, but the run was trained on {', '.join(wanted)}. "
        "Give classes the run's names under labels of a federation.yaml."
    )


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
        raise DataError(f"{entry.where}: image is {by(mask.shape)} but label is {by(truth.shape)}.")
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
    return {"case": entry.name, "regions": scores, "uncertainty": prediction.doubt}


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
    config = {**model.config.as_dict(), "name": judged.title, "output": str(folder)}
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


def by(shape: Sequence[int]) -> str:
    return "x".join(str(side) for side in shape)
