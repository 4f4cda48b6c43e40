"""What a run folder or a hospital's kit has on record, as values; nothing here writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

from wardround.comparison.runs import Run, mapping, read_json, read_run
from wardround.data.preparing.record import PREPARATION
from wardround.data.serving.loading import federation_of
from wardround.data.settings import DataSettings
from wardround.deploy import ledger
from wardround.deploy.kits.kit import Kit, read_kit
from wardround.deploy.site_file import PHANTOM, SiteFile, find_client, load_site
from wardround.engine.records import brief, read_lines
from wardround.errors import CheckpointError, ConfigError, WardroundError
from wardround.exporting.card import count_validation
from wardround.privacy import BUDGET_FILE, PrivacyBudget
from wardround.privacy.words import gather_told
from wardround.text import format_bytes

KIT_FILES = {
    "state/egress.jsonl": ("every message that left", "keep: it is the only proof of what left"),
    "state/egress.head.json": ("length and last hash of that list", "keep beside it"),
    "state/privacy.jsonl": ("what was spent of epsilon", "keep as long as the cases"),
    "state": (
        "all of the above, and of each run this hospital's last models and slices of test cases as pictures",
        "a run's own folder, after it",
    ),
    "logs": ("connections and errors, which may name files and cases", "when nobody needs them"),
    "keys": ("the private key and certificates", "on leaving; the organiser then revokes them"),
    "site.yaml": ("the rules", "keep with this document"),
}
RUN_FILES = {
    "egress.jsonl": ("every message that came from a client", "keep: it is the record of what came"),
    "records.jsonl": ("losses, weights and scores of every round", "with the run"),
    "cases.csv": ("test scores, a row a case", "with the run"),
    "checkpoints": ("models of the last rounds and the best one", "with the run"),
    "clients": ("what clients keep: their models, and slices of test cases as pictures", "with the run"),
    "rehearsal": ("kits: keys, ledgers, and slices of test cases as pictures", "with the run"),
    "overlays.png": ("slices of test cases, on one machine alone", "treat it as you treat scans"),
    "report.html": ("tables and curves; it may show slices of scans", "treat it as you treat scans"),
    "run.log": ("rounds, warnings, errors", "with the run"),
}


SYNTHETIC = "synthetic phantoms, not patients"


class SentMessage(NamedTuple):
    """One message that left a hospital; numbers: by name, tables as their size; trouble: why none."""

    time: str
    client: str
    run: str
    round: int
    task: str
    tensors: Mapping[str, str]
    numbers: Mapping[str, str]
    num_bytes: int
    sha256: str
    trouble: str

    @property
    def words(self) -> str:
        return self.trouble or ", ".join(f"{name} {value}" for name, value in self.numbers.items())


@dataclass(frozen=True)
class DossierFacts:
    """What is on record at one place.

    about, cases, files: rows of tables; fewest: lower counts of cases are not told; site: a hospital's rules;
    verdict: on its ledger; card: path of a model card in the folder;
    private: what each client, or run, last said of its privacy; spent: epsilon of all runs of a hospital.
    """

    kind: Literal["simulation", "rehearsal", "organiser", "hospital"]
    name: str
    about: Sequence[tuple[str, str]]
    case_columns: Sequence[str]
    cases: Sequence[Sequence[Any]]
    sent: Sequence[SentMessage]
    private: Mapping[str, Mapping[str, Any]]
    files: Sequence[tuple[str, str, str, str]]
    classes: Sequence[str] = ()
    channels: Sequence[str] = ()
    fewest: int = SiteFile().min_count
    site: SiteFile | None = None
    verdict: ledger.Verdict | None = None
    spent: float | None = None
    card: str | None = None


def read_facts(place: Path, run: str | None = None) -> DossierFacts:
    """The facts of a run folder or a hospital's kit; run: of a kit, only runs of this name or pattern."""
    if (place / "kit.json").is_file():
        kit = read_kit(place)
        if kit.role != "hospital":
            raise ConfigError(f"{place} is the organiser's kit. Give one of its runs: {place}/runs/NAME")
        return read_kit_facts(kit, run)
    if not (place / "config.yaml").is_file():
        raise CheckpointError(
            f"{place} is neither a run (it has no config.yaml) nor a hospital's kit (it has no kit.json)."
        )
    if run is not None:
        raise ConfigError(f"--run chooses among the runs of a hospital's kit; {place} is a single run.")
    return read_run_facts(place)


# A run, simulated or the organiser's


def read_run_facts(folder: Path) -> DossierFacts:
    run, preparation = read_run(folder), read_json(folder / PREPARATION)
    sent = list(parse_lines(folder / ledger.NAME, read_lines(folder / ledger.NAME), ""))
    classes, channels = (list(map(str, preparation.get(key) or ())) for key in ("classes", "channels"))
    cards = sorted(path.relative_to(folder) for path in folder.glob("*/MODEL_CARD.md"))
    return DossierFacts(
        kind=find_kind(folder, run.config),
        name=run.label,
        about=[*list_project(folder), *list_run(run)],
        case_columns=("hospital", "training", "validation", "test"),
        cases=count_cases(run),
        sent=sent,
        private=gather_told(run.records),
        files=list_files(folder, RUN_FILES),
        classes=classes[1:],
        channels=channels,
        card=str(cards[0]) if cards else None,
    )


def find_kind(folder: Path, config: Mapping[str, Any]) -> Literal["simulation", "rehearsal", "organiser"]:
    if mapping(config.get("data")).get("hospitals"):
        return "organiser"
    return "rehearsal" if (folder / "rehearsal").is_dir() else "simulation"


def list_project(folder: Path) -> Iterator[tuple[str, str]]:
    """Where a run lies in an organiser's kit: the project and its server."""
    kit = folder.absolute().parent.parent
    if (kit / "kit.json").is_file():
        yield from list_kit(read_kit(kit))


def list_kit(kit: Kit) -> Iterator[tuple[str, str]]:
    yield "project", kit.project
    yield "organiser", f"{kit.server}, port {kit.port}"


def list_run(run: Run) -> Iterator[tuple[str, str]]:
    config = run.config
    yield "run", run.label
    data = mapping(config.get("data"))
    if not (data.get("federation") or data.get("hospitals") or data.get("in_memory")):
        yield "cases", SYNTHETIC
    yield "hospitals", ", ".join(sorted({*run.clients, *run.num_trained})) or "none yet"
    yield (
        "method, objective, network",
        ", ".join(
            [run.method, run.objective or "the method's own", str(mapping(config.get("model")).get("name"))]
        ),
    )
    yield "rounds", f"{len(run.records)} of {run.rounds}, {run.status}"
    yield "wardround", str(run.environment.get("wardround", "not known"))
    yield "final parameters (SHA-256)", str(run.result.get("params_sha256", "not yet"))


def count_cases(run: Run) -> list[list[Any]]:
    validation, scores = count_validation(run.records), next(iter(run.cases.values()), {})
    tested = {client: len({key.case for key in scores if key.client == client}) for client in run.clients}
    names = sorted({*run.clients, *run.num_trained})
    return [
        [name, run.num_trained.get(name, 0), validation.get(name, 0), tested.get(name, 0)] for name in names
    ]


# A hospital's kit


def read_kit_facts(kit: Kit, run: str | None) -> DossierFacts:
    path = kit.state / ledger.NAME
    lines = [line for line in ledger.read(path) if is_of(line, run)]
    sent = list(parse_lines(path, lines, kit.name))
    runs = list(dict.fromkeys(message.run for message in sent))
    if run is not None and not runs:
        raise ConfigError(f"no message of a run '{run}' left {kit.folder}. See: wardround egress show")
    site = load_site(kit.site_file)
    budget = kit.state / BUDGET_FILE
    cases, classes, channels = count_own_cases(site, kit.name)
    told = {str(line.get("name") or line["run"]): line["privacy"] for line in lines if line.get("privacy")}
    return DossierFacts(
        kind="hospital",
        name=kit.name,
        about=[
            ("hospital", kit.name),
            *list_kit(kit),
            ("runs", ", ".join(runs) or "none yet"),
            *([("cases", SYNTHETIC)] if site.data == PHANTOM else []),
        ],
        case_columns=("hospital", "cases"),
        cases=cases,
        sent=sent,
        private={name: dict(entry) for name, entry in told.items() if isinstance(entry, Mapping)},
        files=list_files(kit.folder, KIT_FILES),
        classes=classes,
        channels=channels,
        fewest=site.min_count,
        site=site,
        verdict=ledger.verify(path),
        spent=count_spent(PrivacyBudget(budget), site) if budget.exists() else None,
    )


def is_of(line: Mapping[str, Any], run: str | None) -> bool:
    return run is None or any(fnmatchcase(str(line.get(key, "")), run) for key in ("name", "run"))


def count_own_cases(site: SiteFile, name: str) -> tuple[list[list[Any]], list[str], list[str]]:
    """The row of cases, the classes and the channels; no row where the files are not there any more."""
    if not isinstance(site.data, Path):
        return [], [], []
    try:
        found = federation_of(site.data, DataSettings(federation=site.data), 0)
        inside = find_client(site, found.names, name)
    except (WardroundError, OSError):
        return [], [], []
    return [[name, found.counts[inside]]], list(found.labels), list(found.channels)


def count_spent(budget: PrivacyBudget, site: SiteFile) -> float | None:
    try:
        return budget.spent(site.privacy)
    except ConfigError:  # Opacus, which counts, is not installed here
        return None


# Both


def parse_lines(path: Path, lines: Iterable[Mapping[str, Any]], client: str) -> Iterator[SentMessage]:
    """Lines of an organiser's or a hospital's list, the same way; client: whose list it is, if one's."""
    for line in lines:
        try:
            types = line.get("types") or {}
            yield SentMessage(
                str(line["time"])[:19].replace("T", " "),
                str(line.get("client", client)),
                str(line.get("name") or line.get("run", "")),
                int(line["round"]),
                str(line["task"]),
                {
                    str(key): " ".join([" x ".join(map(str, shape)) or "1", str(types.get(key, ""))]).strip()
                    for key, shape in (line.get("tensors") or {}).items()
                },
                {str(key): shorten(value) for key, value in (line.get("scalars") or {}).items()},
                int(line["bytes"]),
                str(line["sha256"]),
                next((f"{key}: {line[key]}" for key in ("refused", "failure") if line.get(key)), ""),
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ledger.LedgerError(
                f"{path} has a line that wardround did not write. See: wardround egress verify"
            ) from None


def shorten(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(brief(value))


def list_files(folder: Path, known: Mapping[str, tuple[str, str]]) -> list[tuple[str, str, str, str]]:
    """Path inside the folder, size, what it holds, when to delete it: those that exist."""
    return [
        (name, format_bytes(measure(folder / name)), holds, delete)
        for name, (holds, delete) in known.items()
        if (folder / name).exists()
    ]


def measure(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())
