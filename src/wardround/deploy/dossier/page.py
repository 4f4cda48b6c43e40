"""The dossier as one HTML page in the style of reports, which opens offline and prints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wardround.clients.secure_sum import SUM_TASKS
from wardround.deploy.dossier.facts import SYNTHETIC, DossierFacts, SentMessage
from wardround.deploy.site_file import COMMENTS, TASKS, SiteFile
from wardround.errors import ConfigError
from wardround.files import write_text
from wardround.privacy.words import COVERS, describe_told
from wardround.reporting.html import Html, details, join, section, tag
from wardround.reporting.page import draw_document
from wardround.reporting.tabular import facts_table, in_words, table_html
from wardround.tables import Table, one_line
from wardround.text import format_bytes
from wardround.yaml_file import loaded

QUESTIONS = Path(__file__).with_name("questions.yaml")
MOST_LISTED = 2000  # messages in the annex; the ledger has them all
CASE_NAMES = {"number": "cases go by number, not by name", "keep": "CASES GO BY THEIR NAMES (case_names)"}
NAMES_ELSEWHERE = "cases of a hospital go by number, unless its own rules keep their names (case_names)"
SECRET = ("data", "proxy")  # of site.yaml: a path, and an address that may hold a password
KINDS = {
    "simulation": "a simulation",
    "rehearsal": "a rehearsal",
    "organiser": "a run, as the organiser has it",
    "hospital": "a hospital's kit",
}
ON_ONE_MACHINE = ("simulation", "rehearsal")
NAMES_HERE = (
    "of this folder cases go by their names; those of a real hospital by number, unless it says otherwise"
)
FROM_IMAGES = ("contribute", "measure")  # tasks whose answers are made of pixels
ANSWERS = {
    **TASKS,
    "register": "what taking part means: names and shapes of tensors, numbers of cases",
    **dict.fromkeys(SUM_TASKS, "secure summation: keys, shares of keys, and the update under a mask"),
}
RULES = {
    "simulation": "A simulation has no hospital with rules of its own.",
    "rehearsal": "The hospitals of a rehearsal allow everything.",
    "organiser": "The rules are each hospital's own and not on record here; its own dossier has them.",
}
CHAINS = {
    "simulation": "A simulation has no ledger of a hospital.",
    "rehearsal": "Ledgers with a chain are in the kits of the rehearsal.",
    "organiser": "The ledger with a chain is at each hospital.",
}
CONNECTIONS = {
    "simulation": "A simulation: no connection was made.",
    "rehearsal": "Mutual TLS between processes of one machine; no connection left it.",
    "hospital": "Mutual TLS, opened by the hospital; the certificate says who calls.",
}
SECTIONS = {
    "short": "In short",
    "about": "Purpose and parties",
    "data": "Categories of data",
    "left": "What left",
    "rules": "Rules in force",
    "privacy": "Differential privacy and secure summation",
    "readers": "Who could read what",
    "retention": "Retention",
    "questions": "Questions, one by one",
    "annex": "Every message",
}
READERS = {  # security.md says the same of each, and why
    "hospital": "its own scans, masks, names of cases, kit, ledger and logs; the shared model",
    "organiser": "each hospital's updates and numbers, as listed here, one by one, but of updates that left "
    "masked (secure summation) sums alone; no scan, no file",
    "project authority": "no data; it could issue a certificate in any name",
    "network": "that connections exist, when, and how much passes; the content is encrypted (TLS 1.3)",
    "other hospitals": "the shared model, the run's configuration, names of hospitals; no other's update",
    "other accounts of the same machine": "nothing, while file modes are as the kit demands; root reads all",
}


def write_dossier(facts: DossierFacts, path: Path) -> None:
    try:
        write_text(path, draw_dossier(facts))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def draw_dossier(facts: DossierFacts) -> str:
    """The whole page as text."""
    told = state_facts(facts)
    parts = {
        "short": [tag("ul", [tag("li", told[key]) for key in ("left", "verdict", "privacy", "refused")])],
        "about": draw_about(facts, told),
        "data": draw_data(facts),
        "left": draw_sent(facts, told),
        "rules": draw_rules(facts.site, told),
        "privacy": draw_privacy(facts, told),
        "readers": draw_readers(facts),
        "retention": draw_retention(facts),
        "questions": [draw_question(entry, told) for entry in read_questions()],
        "annex": draw_messages(facts.sent),
    }
    drawn = {key: section(key, SECTIONS[key], *content) for key, content in parts.items()}
    data = {"kind": facts.kind, "messages": len(facts.sent)}
    return draw_document("Dossier", f"{facts.name}: {KINDS[facts.kind]}", SECTIONS, drawn, data)


def read_questions() -> list[Mapping[str, Any]]:
    """Entries with law, question and answer, some with facts and yours."""
    return list(loaded(QUESTIONS))


def quoted(names: Sequence[str]) -> str:
    return ", ".join(one_line(name, 60) for name in names)


def draw_words(text: str) -> Html:
    """A sentence with `code` in it."""
    return join(tag("code", part) if place % 2 else part for place, part in enumerate(text.split("`")))


# What is on record, in a sentence each; questions.yaml names them


def state_facts(facts: DossierFacts) -> dict[str, str]:
    site = facts.site
    refused = sum(bool(message.trouble) for message in facts.sent)
    rules = RULES.get(facts.kind, RULES["organiser"])
    if site is not None:
        rules = (
            f"At least {site.min_cases} training cases and {site.min_batch} in a step. Scores leave as "
            f"{site.scores}, of {in_words(site.rows)}; {CASE_NAMES[site.case_names]}. "
            f"Tasks: {in_words(site.tasks)}."
        )
    many = "channels" if len(facts.channels) > 1 else "channel"
    channels = f" with the {many} {quoted(facts.channels)}" if facts.channels else ""
    organiser = dict(facts.about).get("organiser", "on this machine")
    return {
        "purpose": f"A network that outlines {quoted(facts.classes) or 'structures'} in images{channels}.",
        "left": state_volume(facts),
        "refused": f"Requests answered by one sentence, a refusal or a failure: {refused}.",
        "verdict": state_verdict(facts),
        "rules": rules,
        "privacy": state_privacy(facts),
        "recipients": f"The organiser: {one_line(organiser, 80)}. The shared model: all hospitals of a run.",
        "channel": CONNECTIONS.get(facts.kind, CONNECTIONS["hospital"]),
        "retention": f"Files and folders listed under Retention, with what they hold: {len(facts.files)}.",
    }


def state_privacy(facts: DossierFacts) -> str:
    """Noise and secure sums, as far as messages show them."""
    noise = describe_told(facts.private) or "Without differential privacy: no noise was added."
    masked = {message.run for message in facts.sent if message.task == "sum_masked" and not message.trouble}
    if not masked:
        return noise
    plain = {message.run for message in facts.sent if message.task == "train" and message.tensors}
    rest = " Updates of other runs left readable." if plain - masked else ""
    return f"{noise} Updates left masked, for sums of at least three hospitals (secure summation).{rest}"


def state_volume(facts: DossierFacts) -> str:
    sent = facts.sent
    if not sent:
        return "Nothing has left."
    made = [task for task in FROM_IMAGES if any(m.task == task and not m.trouble for m in sent)]
    pixels = "".join(f" MADE FROM IMAGES, task {task}: {ANSWERS[task]}." for task in made)
    times, size = sorted(message.time for message in sent), format_bytes(sum(m.num_bytes for m in sent))
    tasks = quoted(sorted({message.task for message in sent}))
    total = f"{len(sent):,} messages, {size}, {times[0]} to {times[-1]} UTC, for the tasks {tasks}"
    if facts.kind in ON_ONE_MACHINE:
        where = f"{KINDS[facts.kind].capitalize()} on one machine"
        return f"{where}: nothing left a hospital. Exchanged were {total}.{pixels}"
    return f"{'Left this hospital' if facts.kind == 'hospital' else 'Came from hospitals'}: {total}.{pixels}"


def state_verdict(facts: DossierFacts) -> str:
    if facts.verdict is None:
        chained = CHAINS.get(facts.kind, CHAINS["organiser"])
        return f"This list has no chain: it is what reached the run. {chained}"
    if not facts.verdict.ok:
        return f"BROKEN: the ledger is not as it was written; {facts.verdict.sentence}"
    last = f" Last hash {facts.verdict.hash}." if facts.verdict.hash else ""
    return f"The ledger was verified: {facts.verdict.sentence}{last}"


# Sections


def draw_about(facts: DossierFacts, told: Mapping[str, str]) -> list[Html]:
    card = "`wardround export` writes it with the model: results by hospital, limits, failures, hashes"
    rows = [*facts.about, ("model card", draw_words(facts.card or card))]
    yours = "Yours to add: the clinical question, controller and officer with contacts, the ethics vote."
    return [tag("p", told["purpose"]), facts_table("Facts", rows), tag("p", yours)]


def draw_data(facts: DossierFacts) -> list[Html]:
    elsewhere = NAMES_HERE if facts.kind in ON_ONE_MACHINE else NAMES_ELSEWHERE
    names = CASE_NAMES[facts.site.case_names] if facts.site else elsewhere
    lines = [
        "Synthetic images and masks: no patient stands behind them."
        if dict(facts.about).get("cases") == SYNTHETIC
        else "Health data: medical images, and masks in which people outlined structures.",
        "Leaves: model tensors, named numbers, tables of scores, counts. Stays: images, masks, files.",
        f"In tables {names}.",
        f"Counts from 1 to {facts.fewest - 1} are told as fewer than {facts.fewest}.",
    ]
    rows = [[row[0], *(bound(count, facts.fewest) for count in row[1:])] for row in facts.cases]
    none = "Numbers of cases are not on record here: synthetic cases, no finished run, or files that moved."
    counts = table_html(Table("Cases", facts.case_columns, rows)) if rows else tag("p", none)
    return [tag("ul", [tag("li", line) for line in lines]), counts]


def bound(count: int, fewest: int) -> str:
    """
    >>> bound(0, 5), bound(3, 5), bound(12, 5)
    ('0', 'fewer than 5', '12')
    """
    return f"fewer than {fewest}" if 0 < count < fewest else str(count)


def draw_sent(facts: DossierFacts, told: Mapping[str, str]) -> list[Html]:
    groups: defaultdict[tuple[str, str], list[SentMessage]] = defaultdict(list)
    for message in facts.sent:
        groups[message.client, message.task].append(message)
    rows = [
        [
            client,
            task,
            len(those),
            max(len(message.tensors) for message in those),
            ", ".join(dict.fromkeys(name for message in those for name in message.numbers)) or "none",
            format_bytes(sum(message.num_bytes for message in those)),
            " to ".join(sorted({min(m.time for m in those)[:10], max(m.time for m in those)[:10]})),
        ]
        for (client, task), those in sorted(groups.items())
    ]
    heads = ["hospital", "task", "messages", "tensors", "numbers and tables", "size", "days (UTC)"]
    tasks = sorted({task for _, task in groups})
    largest = max(facts.sent, key=lambda message: len(message.tensors), default=None)
    tensors = [] if largest is None else list(largest.tensors.items())
    folded = table_html(Table("Tensors of one message", ["tensor", "shape and type"], tensors))
    return [
        tag("p", told["left"], " ", told["verdict"]),
        table_html(Table("Messages by hospital and task", heads, rows, width=200)),
        facts_table("What the tasks answer", [(task, ANSWERS.get(task, "")) for task in tasks]),
        details(f"Tensors of one message: {len(tensors)}", folded),
    ]


def draw_rules(site: SiteFile | None, told: Mapping[str, str]) -> list[Html]:
    if site is None:
        return [tag("p", told["rules"])]
    values, usual = (rules.model_dump(mode="json", exclude_none=True) for rules in (site, SiteFile()))
    rows = []
    for key, comment in COMMENTS.items():
        if key not in SECRET:
            meaning = comment.partition("\n{tasks}")[0].replace("\n", " ").partition(". ")[0].rstrip(".:")
            whose = "default" if values.get(key) == usual.get(key) else "set here"
            rows.append((key, [tag("strong", in_words(values.get(key))), f" ({whose}). {meaning}."]))
    note = "As site.yaml is now; earlier ones are not on record. A path and a proxy's address are left out."
    return [tag("p", told["rules"]), facts_table("site.yaml", rows), tag("p", note)]


def draw_privacy(facts: DossierFacts, told: Mapping[str, str]) -> list[Html]:
    keys = ["level", "epsilon", "delta", "scores"]
    rows = [[name, *(str(told.get(key, "")) for key in keys)] for name, told in sorted(facts.private.items())]
    whose = "run" if facts.kind == "hospital" else "hospital"
    parts = [tag("p", told["privacy"]), *([table_html(Table("Spent", [whose, *keys], rows))] if rows else [])]
    if facts.site is not None and facts.site.privacy.is_on:
        limit = facts.site.privacy
        spent = "not counted (Opacus is not installed)" if facts.spent is None else f"{facts.spent:.3f}"
        allowed = f"epsilon {limit.epsilon:g} at delta {limit.delta:g} over all runs"
        parts.append(tag("p", f"This hospital allows {allowed}; spent: {spent}."))
    covers = " ".join(f"{level.capitalize()} level covers {what}." for level, what in COVERS.items())
    return [*parts, tag("p", covers)]


def draw_readers(facts: DossierFacts) -> list[Html]:
    scores = (
        "Scores of validation and test cases leave as rows, one a case, unless a hospital's rules forbid it."
    )
    if facts.site is not None and facts.site.scores == "aggregate":
        scores = "Scores leave as sums and histograms, never as a row a case."
    note = f"Whoever ran this {facts.kind} had all files. With real hospitals it is as follows. "
    first = note if facts.kind in ON_ONE_MACHINE else ""
    return [tag("p", first, scores), facts_table("Who could read what", list(READERS.items()))]


def draw_retention(facts: DossierFacts) -> list[Html]:
    lines = [
        "wardround erases nothing by a date.",
        "Prepared copies of scans are in `.wardround-cache` beside federation.yaml; they go with the scans.",
        "Exports and copies are wherever they were put; others who took part have the shared model.",
    ]
    files = Table("Files", ["file or folder", "size", "holds", "delete"], facts.files, width=100)
    return [tag("ul", [tag("li", draw_words(line)) for line in lines]), table_html(files, sortable=False)]


def draw_question(entry: Mapping[str, Any], told: Mapping[str, str]) -> Html:
    """By design, from the records, or the controller's own."""
    recorded = " ".join(told[key] for key in entry.get("facts", ()))
    parts = {"By design": entry["answer"], "On record": recorded, "Yours to answer": entry.get("yours")}
    lines = [tag("p", tag("strong", f"{label}. "), draw_words(text)) for label, text in parts.items() if text]
    return tag("div", tag("h3", f"{entry['law']}: {entry['question']}"), lines)


def draw_messages(sent: Sequence[SentMessage]) -> list[Html]:
    rows = [
        [m.time, m.client, m.run, str(m.round), m.task, len(m.tensors), m.num_bytes, m.words, m.sha256]
        for m in sent[-MOST_LISTED:]
    ]
    heads = ["time (UTC)", "hospital", "run", "round", "task", "tensors", "bytes", "numbers", "SHA-256"]
    left_out = len(sent) - len(rows)
    note = f"{left_out:,} earlier messages are not listed; the ledger has all." if left_out else ""
    return [details(f"Messages: {len(rows):,}", table_html(Table("Messages", heads, rows, note, width=80)))]
