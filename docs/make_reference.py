"""Writes configuration.md, federation.md and commands.md of docs/reference, tables of docs/methods and the
questions of docs/explanation/data-protection.md.

They come from the classes and the command line themselves, and from the file that `wardround dossier` answers
from.

    python docs/make_reference.py --write      # without --write the reference is printed

A meaning comes from a field's description, from its entry in the class's docstring ("rounds: how many"), or
from MEANINGS below, in this order.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from wardround.cli import app
from wardround.config import Config
from wardround.data.federation_file import COMMENTS, FederationFile, Source
from wardround.deploy.dossier import read_questions
from wardround.methods import METHODS, OBJECTIVES
from wardround.metrics import METRICS, MM
from wardround.reporting.catalogue import method_list, objective_list

DOCS = Path(__file__).resolve().parent
METHODS_PAGE = DOCS / "methods/README.md"
PROTECTION_PAGE = DOCS / "explanation/data-protection.md"

HEAD = """\
# Configuration

<!-- Written by docs/make_reference.py. Do not edit: change the settings' classes and run it again. -->

One YAML file says what a run is. Every setting has a default, so a file only overrides.
Unknown keys are errors.
`--set a.b=c` on the command line overrides one setting; its value is read as YAML.
The run folder's `config.yaml` has every setting written out.
"""

MEANINGS: Mapping[str, str] = {
    "name": "name of the run, and of its folder under runs/ unless `output` is given",
    "seed": "the one seed every random stream is derived from",
    "rounds": "how often the server updates the model",
    "local_epochs": "passes over a client's training cases in one round",
    "batch_size": "cases of one training step",
    "method": "the method by `name`, and its own settings: see [Methods](#methods)",
    "objective": "the objective by `name`, and its own settings: see [Objectives](#objectives); "
    "without a name, the method's own objective",
    "min_clients": "a round needs this many usable answers",
    "evaluate.batch_size": "cases of one forward pass",
    "evaluate.empty_policy": "scores where a denominator is 0 because masks are empty",
    "evaluate.surface_penalty": "surface distance when only one of the two masks is empty: infinite, or the "
    "diagonal of the image",
    "compute.device": "`auto` takes a GPU where there is one; or cpu, cuda, cuda:0",
    "compute.precision": "`auto` is bfloat16 on a GPU and float32 on a CPU",
    "optimizer.name": "which optimizer",
    "optimizer.learning_rate": "the base rate, before the schedule",
    "optimizer.weight_decay": "weight decay, as torch's optimizer of this name applies it",
    "optimizer.betas": "decay of Adam's and AdamW's two moments",
    "optimizer.momentum": "momentum of SGD",
    "optimizer.nesterov": "Nesterov's momentum for SGD",
    "optimizer.schedule.name": "which schedule",
    "optimizer.schedule.gamma": "factor of `step` and `exponential`",
    "optimizer.schedule.every": "rounds between two falls of `step`",
    "optimizer.schedule.power": "exponent of `polynomial`",
    "optimizer.schedule.warmup": "first rounds in which the rate rises linearly",
    "focal_tversky.alpha": "weight of missed foreground",
    "focal_tversky.beta": "weight of false alarms",
    "focal_tversky.gamma": "above 1 stresses hard cases",
    "cfsl.eps_cos": "keeps the cosines' denominators above 0",
    "cfsl.eps_dist": "least distance between features",
    "cfsl.eps_dice": "epsilon in Dice's denominator",
    "clsl.eps_dice": "epsilon in Dice's denominator",
    **{
        f"{name}.schedule": "both losses in every round, or first the contrastive one and then Dice"
        for name in ("infonce", "simclr", "local_cl", "swav")
    },
    "swav.sinkhorn_iterations": "iterations that balance the codes",
    "version": "of this format",
    "sources.path": "a folder or a list, relative to this file; `~` is your home folder",
    "splits.ratios": "shares of training, validation and test",
    "splits.seed": "the same seed gives the same split, on every machine",
    "splits.file": "of `by: file`, relative to this file",
    "splits.folds": "of `by: kfold`",
    "splits.fold": "which of them is tested, counted from 0",
    "splits.repeat": "which draw of `by: repeated`",
    "partition.clients": "how many clients are made",
    "partition.skew": "exponent of `quantity`: the higher, the more unequal",
    "partition.alpha": "of `dirichlet`: the smaller, the more unequal",
    "partition.by": "what `dirichlet` sorts cases by",
    "partition.column": "of `column`: the column of the list",
    "partition.shift": "of `feature`: in what clients are made to differ",
    "partition.strength": "of `feature`: 0 changes nothing",
    "partition.seed": "same seed, same clients",
    "prepare.percentiles": "of `normalise: percentile`",
    "prepare.window": "centre and width of `normalise: window`",
}

FEDERATION = """\
# federation.yaml

<!-- Written by docs/make_reference.py. Do not edit: change the settings' classes and run it again. -->

Who takes part, with what data. `wardround data init FOLDER...` writes it, people edit it, and
[Train on your own data](../how-to/own-data.md) shows one. Every section but `sources` has a default.
Unknown keys are errors. `--set data.prepare.size=[256,256]` or `--set data.splits.by=kfold` overrides
`prepare` or `splits` for one run.
"""

METRICS_HEAD = """\
## Metrics

`evaluate.metrics` names some of these; `evaluate.select` names one. Each is measured for every case and
region. Distances of pictures, which have no spacing, are in pixels.
"""
METRIC_MEANINGS = {
    "dice": "2 x overlap / (predicted + true)",
    "iou": "overlap / union (Jaccard)",
    "precision": "share of what is predicted that is true",
    "sensitivity": "share of what is true that is predicted (recall)",
    "specificity": "share of what is not true that is not predicted",
    "hd95": "the larger of the two directed 95th percentiles of distances between surfaces",
    "hd95_pooled": "the 95th percentile of both directions' distances together",
    "assd": "mean of both directions' distances together",
    "assd_mean_directed": "mean of the two directed means",
    "asd": "mean distance from the predicted surface to the true one",
    "surface_dice": "share of both surfaces that lie within `evaluate.tolerance` of each other",
    "volume_difference": "predicted less true volume",
    "relative_volume_difference": "predicted less true volume, as a share of the true",
}


COMMANDS = """\
# Commands

<!-- Written by docs/make_reference.py. Do not edit: change the commands and run it again. -->

Every command with its arguments and options; `--help` prints the same. Exit codes: 0 done, 2 the input is
wrong (one sentence says what), 130 stopped by Ctrl-C, 1 anything else.
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting; `section` is the settings class it opens, if it opens one."""

    key: str
    accepts: str
    default: str
    meaning: str
    section: type[BaseModel] | None = None


def reference() -> str:
    """The whole page."""
    parts = [HEAD, *sections(Config, Config(), ""), metrics()]
    parts.append(
        "## Methods\n\n`method: {name: ...}` with these settings. `wardround methods` lists them all.\n"
    )
    parts += [choice(name, kind) for name, kind in METHODS.own.items()]
    parts.append(
        "## Objectives\n\n`objective: {name: ...}` with these settings. "
        "`wardround objectives` lists them all.\n"
    )
    parts += [choice(name, kind) for name, kind in OBJECTIVES.own.items()]
    return "\n".join(parts)


def metrics() -> str:
    lines = ["| name | in tables | best | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {metric.title_in(MM)} | {metric.best:g} | {METRIC_MEANINGS[name]} |"
        for name, metric in METRICS.items()
    ]
    empty = (
        "Where truth and prediction are both empty, shares are 1 and distances 0. Where one of them is, "
        "Dice, IoU and surface Dice are 0 and distances infinite. `evaluate.empty_policy` and "
        "`evaluate.surface_penalty` change that. Means leave infinite and undefined values out, and say how "
        "many."
    )
    return f"{METRICS_HEAD}\n" + "\n".join(lines) + f"\n\n{empty}\n"


def federation() -> str:
    """The page about federation.yaml."""
    top, *others = sections(FederationFile, None, "")
    rows = model_rows(Source, None, "sources")
    sources = f"## `sources`\n\n{prose(Source)}\n\n{table(rows)}"
    return "\n".join([FEDERATION, top.replace("## The run", "## The file"), sources, *others])


def sections(kind: type[BaseModel], defaults: BaseModel | None, path: str) -> Iterator[str]:
    """A settings class, then the ones inside it; `defaults` is None for a section that is left out."""
    rows = model_rows(kind, defaults, path)
    title = f"`{path}`" if path else "The run"
    yield f"## {title}\n\n{prose(kind)}\n\n{table(rows)}"
    for row in rows:
        if row.section is not None:
            yield from sections(row.section, getattr(defaults, row.key, None), joined(path, row.key))


def choice(name: str, kind: type[Any]) -> str:
    """A method or objective."""
    rows = dataclass_rows(name, kind)
    body = table(rows) if rows else "No settings of its own.\n"
    return f"### `{name}`\n\n{prose(kind)}\n\n{body}"


def model_rows(kind: type[BaseModel], defaults: BaseModel | None, path: str) -> list[Row]:
    written = entries(kind)
    rows = []
    for key, field in kind.model_fields.items():
        full = joined(path, key)
        inner = inner_settings(field.annotation)
        meaning = field.description or written.get(key) or MEANINGS.get(full) or comment(full)
        if inner is not None:
            link = f"see [`{full}`](#{anchor(full)})"
            meaning = f"{meaning.rstrip('.')}; {link}" if meaning else link
            rows.append(
                Row(key, "settings", "`null`" if field.default is None else "as below", meaning, inner)
            )
        else:
            kind_text = readable(field.annotation) + limits(field.metadata)
            default = default_text(field) if defaults is None else shown(getattr(defaults, key))
            rows.append(Row(key, kind_text, default, meaning))
    return rows


def comment(key: str) -> str:
    """What federation.yaml itself says of a section."""
    return " ".join(COMMENTS.get(key, "").split())


def dataclass_rows(name: str, kind: type[Any]) -> list[Row]:
    written, hints = entries(kind), get_type_hints(kind, include_extras=True)
    rows = []
    for field in dataclasses.fields(kind):
        hint, notes = hints[field.name], []
        if get_origin(hint) is Annotated:
            hint, *notes = get_args(hint)
        described = [note.description for note in notes if isinstance(note, FieldInfo) and note.description]
        bounds = [bound for note in notes if isinstance(note, FieldInfo) for bound in note.metadata]
        meaning = written.get(field.name) or (described or [MEANINGS.get(f"{name}.{field.name}", "")])[0]
        rows.append(Row(field.name, readable(hint) + limits(bounds), shown(field.default), meaning))
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        cells = (f"`{row.key}`", row.accepts, row.default, row.meaning.strip().rstrip(".;"))
        safe = (cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells)
        lines.append("| " + " | ".join(safe) + " |")
    return "\n".join(lines) + "\n"


# Docstrings


def paragraphs(kind: type[Any]) -> list[str]:
    """The class's own docstring, one line a paragraph; none for a dataclass's made-up one."""
    text = inspect.cleandoc(vars(kind).get("__doc__") or "")
    if text.startswith(f"{kind.__name__}("):
        return []
    return [" ".join(part.split()) for part in text.split("\n\n") if part]


def names_of(kind: type[Any]) -> list[str]:
    if issubclass(kind, BaseModel):
        return list(kind.model_fields)
    return [field.name for field in dataclasses.fields(kind)]


def entry_pattern(kind: type[Any]) -> re.Pattern[str] | None:
    """Where an entry begins: "name: " or "one, other: " at the start or after a stop."""
    one = "|".join(map(re.escape, names_of(kind)))
    return re.compile(rf"(?:^|[;,.] )((?:{one})(?:, (?:{one}))*): ") if one else None


def entries(kind: type[Any]) -> dict[str, str]:
    """Meanings from the docstrings of a class and its bases; the class's own words win."""
    found: dict[str, str] = {}
    pattern = entry_pattern(kind)
    if pattern is None:
        return found
    documented = [base for base in kind.__mro__ if base not in (BaseModel, object)]
    for paragraph in (text for base in documented for text in paragraphs(base)[1:]):
        starts = list(pattern.finditer(paragraph))
        for place, match in enumerate(starts):
            end = starts[place + 1].start() if place + 1 < len(starts) else len(paragraph)
            for name in match[1].split(", "):
                found.setdefault(name, paragraph[match.end() : end])
    return found


def prose(kind: type[Any]) -> str:
    """The docstring without its entries."""
    pattern = entry_pattern(kind)
    kept = []
    for place, paragraph in enumerate(paragraphs(kind)):
        match = pattern.search(paragraph) if pattern is not None and place else None
        text = paragraph[: match.start() + 1] if match is not None and match.start() else paragraph
        if match is None or match.start():
            kept.append(text)
    return "\n\n".join(kept)


# Words for types and values


def readable(hint: Any) -> str:
    """A type as a reader of YAML would say it.

    >>> readable(int | None), readable(tuple[str, ...])
    ('whole number or `null`', 'list of text')
    """
    plain = {
        int: "whole number",
        float: "number",
        str: "text",
        bool: "`true` or `false`",
        Path: "path",
        NoneType: "`null`",
    }
    if hint in plain:
        return plain[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return readable(inner[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(readable(part) for part in inner)
    if origin is tuple and Ellipsis not in inner:
        return f"{len(inner)} of: {readable(inner[0])}"
    if origin in (tuple, list):
        each = readable(inner[0])
        if each.startswith("list of "):
            return each.replace("list of ", "list of lists of ", 1)
        return f"list of {each}".replace("whole number", "whole numbers")
    if origin is dict:
        return "settings by name"
    return getattr(hint, "__name__", str(hint))


def limits(bounds: Sequence[Any]) -> str:
    """The bounds of a number, or of a text's length."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    texts = []
    for bound in bounds:
        texts += [f"{sign} {getattr(bound, key):g}" for key, sign in signs.items() if hasattr(bound, key)]
        texts += [f"up to {bound.max_length} characters"] if hasattr(bound, "max_length") else []
    return f", {', '.join(texts)}" if texts else ""


def default_text(field: FieldInfo) -> str:
    return "required" if field.is_required() else shown(field.get_default(call_default_factory=True))


def shown(value: Any) -> str:
    """A default as it would stand in YAML."""
    if isinstance(value, bool) or value is None:
        return "`null`" if value is None else f"`{str(value).lower()}`"
    if isinstance(value, list | tuple):
        return f"`[{', '.join(map(str, value))}]`"
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "}`"
    return f"`{value:.6g}`" if isinstance(value, float) else f"`{value}`"


def inner_settings(hint: Any) -> type[BaseModel] | None:
    """The settings class a field holds, if any."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)), None)


def joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def anchor(heading: str) -> str:
    """The link target GitHub makes of a heading."""
    return heading.lower().replace(".", "")


# The tables of the methods page


def methods_page() -> str:
    """docs/methods/README.md as it stands, its two tables written anew."""
    text = METHODS_PAGE.read_text(encoding="utf-8")
    for name, table in (("methods", method_rows()), ("objectives", objective_rows())):
        text = replace_block(text, name, table)
    return text


def replace_block(text: str, name: str, content: str) -> str:
    """A page with the content between two comments written anew."""
    start, end = f"<!-- {name}: written by docs/make_reference.py -->\n", f"\n<!-- end of {name} -->"
    before, _, rest = text.partition(start)
    return before + start + content + end + rest.partition(end)[2]


def method_rows() -> str:
    columns = method_list().columns
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for name, *cells in (row for row in method_list().rows if row[0] in METHODS.own):
        kind = METHODS[name]
        page = METHODS_PAGE.parent / f"{name}.md"
        source = Path(inspect.getfile(kind)).name
        where = page.name if page.exists() else f"../../src/wardround/methods/{source}"
        title, paper, *rest = [str(cell).replace("|", "\\|") for cell in cells]
        linked = f"[{paper}]({kind.link})" if kind.link else paper
        lines.append("| " + " | ".join([f"[`{name}`]({where})", title, linked, *rest]) + " |")
    return "\n".join(lines)


def objective_rows() -> str:
    table = objective_list()
    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    lines += [
        "| " + " | ".join([f"`{name}`", *map(str, cells)]) + " |"
        for name, *cells in table.rows
        if name in OBJECTIVES.own
    ]
    return "\n".join(lines)


# The questions of data protection


def protection_page() -> str:
    """docs/explanation/data-protection.md as it stands, its questions written anew."""
    parts = []
    for entry in read_questions():
        parts.append(f"### {entry['law']}: {entry['question']}\n\n**By design.** {entry['answer']}")
        parts += [f"**Yours to answer.** {entry['yours']}"] if entry.get("yours") else []
    return replace_block(
        PROTECTION_PAGE.read_text(encoding="utf-8"), "questions", "\n\n".join(["", *parts, ""])
    )


# The command line


def commands() -> str:
    """docs/reference/commands.md: every command as `--help` has it."""
    parts = [COMMANDS]
    for path, command in walk(typer.main.get_command(app), ("wardround",)):
        context = command.make_context(path[-1], [], resilient_parsing=True)
        rows = [param.get_help_record(context) for param in command.params if not param.hidden]
        lines = [
            f"| `{name.replace('|', chr(92) + '|')}` | {escape_cell(text)} |"
            for name, text in filter(None, rows)
        ]
        table = "\n".join(["| argument or option | meaning |", "|---|---|", *lines]) + "\n" if lines else ""
        told = inspect.cleandoc(command.help or "").replace("<", "&lt;")
        parts.append(f"{'#' * len(path)} `{' '.join(path)}`\n\n{told}\n\n{table}")
    return "\n".join(parts)


def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The commands below this one by name, each family with its own."""
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        if not inner.hidden:
            yield (*path, name), inner
            yield from walk(inner, (*path, name))


def escape_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    if "--write" in sys.argv:
        (DOCS / "reference/configuration.md").write_text(reference(), encoding="utf-8")
        (DOCS / "reference/federation.md").write_text(federation(), encoding="utf-8")
        (DOCS / "reference/commands.md").write_text(commands(), encoding="utf-8")
        METHODS_PAGE.write_text(methods_page(), encoding="utf-8")
        PROTECTION_PAGE.write_text(protection_page(), encoding="utf-8")
    else:
        sys.stdout.write(reference())
