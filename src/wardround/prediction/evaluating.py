"""Evaluating: any model on any labelled set, case by case; nothing is trained.

Masks are judged where the annotator drew, on each scan's own grid, as a user of the mask would see it;
a run's own test judges them on the prepared grid, so the two differ a little where scans are resampled.

    OUT/cases.csv         one line a case and region: every metric of the run
    OUT/evaluation.json   the same in summary, how sure the model was of each case, what was left out
    OUT/report.html       the page, as of a run: OUT looks like the folder of a run that was only tested
"""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from numpy.typing import NDArray

from wardround.config_file import resolve
from wardround.data.checking.quick import assign_splits
from wardround.data.federation_file import FederationFile, load
from wardround.data.listing import SPLITS, Entry, Listing
from wardround.data.preparing.cache import Known, digest_of, signature
from wardround.data.preparing.prepare import to_classes
from wardround.data.proposing.init import propose
from wardround.data.readers.image_files import read_label, same_affine
from wardround.data.serving.loading import RealData, overridden, with_meaning
from wardround.data.settings import DataSettings
from wardround.data.slices.cutting import CUT_FROM, VOLUME, content_of
from wardround.data.slices.view import Along
from wardround.data.sources import join_listings, read_source
from wardround.engine.judging.evaluation import Evaluation, column
from wardround.engine.judging.result_tables import case_rows, client_table
from wardround.errors import ConfigError, DataError, WardroundError
from wardround.files import file_name, jsonable, write_json, write_text
from wardround.metrics import METRICS, MM, PX, lengths_together, measure
from wardround.metrics.summary import across_clients, summarise
from wardround.prediction.inputs import Problem, Scan
from wardround.prediction.predicting import Predictor
from wardround.prediction.session import UNFORESEEN, by_input, check_writable, models_for, unforeseen
from wardround.prediction.trained import TrainedModel, stored_config
from wardround.reporting import write_report
from wardround.tables import Table
from wardround.text import format_size
from wardround.yaml_file import read_yaml

log = logging.getLogger(__name__)

Split = Literal["all", "train", "val", "test", "auto"]
SEEN = "the model has seen before (split train or val of its run)"
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
    judged.lengths = lengths_together(row["lengths"] for found in rows.values() for row in found)
    judged.evaluation = summarised({name: found for name, found in rows.items() if found}, judged.metrics)
    write(judged, predictor, path, which if len(labelled.entries) == every else "unseen")
    if report:
        write_report([folder])
    return judged


# The cases


def open_labelled(path: Path, split: str, settings: DataSettings | None = None) -> Labelled:
    """The labelled cases of a federation.yaml or of a folder, in the order of centres and names.

    settings: of the run whose own file it is, laid over the file as the run did.
    """
    if path.is_file() and path.suffix.lower() in (".yaml", ".yml"):
        file, found = of_file(path)
    else:
        proposal = propose([path])
        file, found = proposal.file, proposal.listing
    if split != "all":
        file = file if settings is None else overridden(file, settings)
        entries, _ = assign_splits(found, file, path.parent if path.is_file() else path)
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
    listings = [read_source(source, path.parent) for source in file.sources]
    found = join_listings(listings, file.channels, file.labels)
    if file.clients is not None:
        chosen = {*file.clients, *file.held_out}
        found = replace(found, entries=tuple(entry for entry in found.entries if entry.client in chosen))
    return with_meaning(file, found, path), found


# What the model has seen


class Past:
    """The cases a run was made of, as they lie here now, each with its split in the run.

    path: its federation.yaml, or its folder; tested: client -> the cases its own test judged, or could not;
    assumed: names alone say that these are its data.
    """

    def __init__(
        self, path: Path, entries: Sequence[Entry], cache: Path, tested: Mapping[str, set[str]], assumed: bool
    ) -> None:
        self.path = path
        self.tested = tested
        self.assumed = assumed
        self._known = Known(cache)
        self._digests: dict[Path, str] = {}
        self._named = {(entry.client, entry.name): entry for entry in entries}
        self._at: dict[Path, Entry] = {}
        self._of_size: dict[tuple[int, ...], list[Entry]] = {}
        # Of two copies the run leaves the training case out, so the test case is the one that counts.
        for entry in sorted(entries, key=lambda entry: SPLITS.index(entry.split or "train")):
            self._at |= {image.resolve(): entry for image in entry.images}
            self._of_size.setdefault(sizes(entry.images), []).append(entry)
        self._of_content: dict[tuple[int, ...], dict[tuple[str, ...], Entry]] = {}
        cut = [entry for entry in entries if entry.columns.get(CUT_FROM)]
        self._slices = {entry.columns[CUT_FROM]: entry for entry in cut}  # all of a volume have one split
        self._volumes = {(entry.client, entry.columns.get(VOLUME, "")): entry for entry in cut}

    def match(self, entry: Entry) -> Entry | None:
        """The run's case that a case is: the same files, copies of them, or a slice cut from them."""
        for image in entry.images:
            if image.resolve() in self._at:
                return self._at[image.resolve()]
        copied = self._copied(entry)
        if copied is not None:
            return copied
        if self._slices and (cut := self._slices.get(content_of(self._content(entry.images)))):
            return cut
        namesake = self._named.get((entry.client, entry.name))
        return namesake if namesake is not None and self._same_label(entry, namesake) else None

    def has_namesake(self, entry: Entry) -> bool:
        """Whether a case it has seen has the same client and name."""
        key = entry.client, entry.name
        other = self._named.get(key) or self._volumes.get(key)
        return other is not None and is_seen(other)

    def may_be_seen(self, own: Entry) -> bool:
        """Whether one of its cases is a test case now, but was none when the run judged its own."""
        return own.client in self.tested and not is_seen(own) and own.name not in self.tested[own.client]

    def _copied(self, entry: Entry) -> Entry | None:
        """The case whose images have the same bytes; files are read only where sizes are the same."""
        size = sizes(entry.images)
        if size not in self._of_size:
            return None
        if size not in self._of_content:
            self._of_content[size] = {self._content(own.images): own for own in self._of_size[size]}
        content = self._content(entry.images)
        return self._of_content[size].get(content) if all(content) else None

    def _same_label(self, one: Entry, other: Entry) -> bool:
        if one.label is None or other.label is None:
            return False
        content = self._content([one.label])
        return all(content) and content == self._content([other.label])

    def _content(self, paths: Sequence[Path]) -> tuple[str, ...]:
        return tuple(sorted(map(self._digest, paths)))

    def _digest(self, path: Path) -> str:
        if path not in self._digests:
            self._digests[path] = self._known.digest(path) or digest_of(path)
        return self._digests[path]


def sizes(paths: Sequence[Path]) -> tuple[int, ...]:
    return tuple(sorted(signature(path)[0] for path in paths))


def is_seen(own: Entry) -> bool:
    """Whether a case of a run had a part in its model: trained on, or chosen by."""
    return own.split != "test"


def told(labelled: Labelled, pasts: Mapping[Path, Past | None], *, leave_out: bool) -> Labelled:
    """The set with what a person should know of cases the model has seen; leave_out: without them."""
    path, entries, notes = labelled.path, labelled.entries, list(labelled.notes)
    found = [past for past in pasts.values() if past is not None]
    matches = [[(past, past.match(entry)) for past in found] for entry in entries]
    seen = [any(own is not None and is_seen(own) for _, own in matched) for matched in matches]
    number, of = sum(seen), len(entries)
    if number and leave_out:
        if number == of:
            raise DataError(f"{path}: all {of} labelled cases are ones {SEEN}. --split all judges them.")
        notes.append(
            f"{path}: {number} of {of} cases, which {SEEN}, are left out. --split all judges them too."
        )
        entries = tuple(entry for entry, known in zip(entries, seen, strict=True) if not known)
        matches = [matched for matched, known in zip(matches, seen, strict=True) if not known]
    elif number:
        notes.append(
            f"{path}: {number} of {of} cases are ones {SEEN}, so their scores say little about new scans. "
            "Without --split they are left out."
        )
    changed = sum(any(own is not None and past.may_be_seen(own) for past, own in m) for m in matches)
    if changed:
        notes.append(
            f"{path}: {changed} of {len(entries)} cases were no test cases when the run judged its own. "
            "Its data or splits have changed since, and it may have been trained on them."
        )
    alike = sum(
        any(own is None and past.has_namesake(entry) for past, own in matched)
        for entry, matched in zip(entries, matches, strict=True)
    )
    if alike:
        notes.append(
            f"{path}: {alike} of {len(entries)} cases have client and name of cases {SEEN}, but other files. "
            "They are judged as new; leave them out of the data if they are the same scans."
        )
    for folder, past in pasts.items():
        notes += doubts(folder, past, path)
    return replace(labelled, entries=entries, notes=tuple(notes))


def doubts(run: Path, past: Past | None, path: Path) -> list[str]:
    """What cannot be known for certain of a run's data."""
    data = stored_config(run).data
    if past is not None and past.assumed:
        return [f"{path} is taken for the data of {run}: its test cases have the same names."]
    if past is not None or (data.federation is None and not data.hospitals):
        return []
    where = f"{data.federation}, which is not found" if data.federation else "cases at hospitals"
    return [f"{run} was trained on {where}; whether it has seen cases of {path} cannot be told."]


def past_of(model: TrainedModel, given: Path) -> Past | None:
    """The cases of a run, if its data are here; given: a set that may be them."""
    data = model.config.data
    tested = tested_by(model.folder)
    left_out = left_out_by(model.folder)
    named = data.federation
    sure, others = ([], []) if named is None else places_of(named, model.folder)
    is_file = given.is_file() and given.suffix.lower() in (".yaml", ".yml")
    for place in dict.fromkeys([*sure, *others, *([given.resolve()] if is_file and tested else [])]):
        try:
            entries, cache = opened(place, data)
        except (WardroundError, OSError):
            continue
        used = [entry for entry in entries if entry.name not in left_out.get(entry.client, ())]
        certain = place in sure or not (sure or tested)
        if certain or tests_are(used, tested):
            judged = {client: names | left_out.get(client, set()) for client, names in tested.items()}
            return Past(place, entries, cache, judged, assumed=place not in (*sure, *others))
    return None


def places_of(named: Path, run: Path) -> tuple[list[Path], list[Path]]:
    """Where a path of a run's settings leads, and where else it may: it counts from where the run started.

    The run's own folder, as its settings call it, tells that place, unless it was moved or named in full.
    """
    if named.is_absolute():
        return [named.resolve()], []
    called = Path(str(read_yaml(run / "config.yaml").get("output") or run))
    above, start = [Path()], []
    for folder in (run.absolute(), run.resolve()):
        above += folder.parents
        if called.parts and folder.parts[-len(called.parts) :] == called.parts and not called.is_absolute():
            start.append(folder.parents[len(called.parts) - 1])
    return [(folder / named).resolve() for folder in start], [(folder / named).resolve() for folder in above]


def opened(path: Path, data: DataSettings) -> tuple[list[Entry], Path]:
    """The cases a run has of its data, each with its split, and the folder of its cache."""
    found = RealData(path, data)
    return list(found.listing.entries), found.cache.folder


def tested_by(run: Path) -> dict[str, set[str]]:
    """Client -> its cases that a run judged in the end; empty if it has not come to that."""
    found: dict[str, set[str]] = {}
    try:
        with (run / "cases.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                found.setdefault(row["client"], set()).add(row["case"])
    except (OSError, ValueError, KeyError, csv.Error):
        return {}
    return found


def left_out_by(run: Path) -> dict[str, set[str]]:
    """Client -> its cases that a run could not use."""
    try:
        plain = json.loads((run / "left_out.json").read_text(encoding="utf-8"))
        return {client: set(cases) for client, cases in plain.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def tests_are(entries: Sequence[Entry], tested: Mapping[str, set[str]]) -> bool:
    """Whether cases are divided so that each client has the test cases it had in the run."""
    tests: dict[str, set[str]] = {}
    for entry in entries:
        if entry.split == "test":
            tests.setdefault(entry.client, set()).add(entry.name)
    both = tests.keys() & tested.keys()
    return bool(both) and all(tests[client] == tested[client] for client in both)


# One case


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
