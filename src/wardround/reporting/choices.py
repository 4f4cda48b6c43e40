"""What a run chose from its data: every setting with its reason, the method, the postprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wardround.comparison.runs import Run, mapping, number, read_json
from wardround.engine.judging.postprocessing import POSTPROCESS
from wardround.metrics import METRICS
from wardround.reporting.html import Html, section, tag
from wardround.reporting.tabular import in_words, plain_table
from wardround.text import clipped

MOST_OF_A_SETTING = 120  # characters
SCORES = "validation_"  # in plan.yaml, before the name of the metric


def configuration(run: Run, prefix: str) -> Html:
    """The choices of a planned run, each with its reason; nothing for a run with a file of the user's."""
    choices = [mapping(choice) for choice in run.plan.get("choices") or []]
    if not choices:
        return Html("")
    rows = [[str(c.get("setting")), plain_setting(c.get("value")), str(c.get("reason"))] for c in choices]
    table = plain_table("Settings that were chosen", ["setting", "value", "reason"], rows)
    said = [*(run.plan.get("notes") or []), *(run.plan.get("warnings") or [])]
    listed = tag("ul", [tag("li", str(text)) for text in said], class_="warnings") if said else None
    budget, steps = run.plan.get("budget"), run.plan.get("steps_of_each_client")
    lead = f"Planned from the data, without a configuration. Budget {budget}: {steps} steps of each client."
    parts = [listed, method_table(mapping(run.plan.get("methods"))), table]
    return section(f"{prefix}-configured", "How this run was configured", *parts, level=3, lead=lead)


def plain_setting(value: Any) -> str:
    """A setting on one line: a list as YAML has it, a section in words."""
    text = f"[{in_words(value)}]" if isinstance(value, list) else in_words(value)
    return clipped(text, MOST_OF_A_SETTING)


def method_table(choice: Mapping[str, Any]) -> Html | None:
    """The methods that a plan of budget full tried, and what they scored."""
    key = next((key for key in choice if key.startswith(SCORES)), None)
    if key is None:
        return None
    metric, taken = key.removeprefix(SCORES), choice.get("taken")
    title = METRICS[metric].label if metric in METRICS else metric
    rows: list[list[Any]] = [
        [name, number(score), "yes" if name == taken else "no"]
        for name, score in mapping(choice[key]).items()
    ]
    rows += [[name, "not tried", str(why)] for name, why in mapping(choice.get("refused")).items()]
    note = (
        f"Each trained for {choice.get('rounds')} rounds on this plan, with the same seed, and judged by the "
        "mean over clients on validation cases. FedAvg stays unless another is better by a margin."
    )
    return plain_table("Methods that were tried", ["method", f"validation {title}", "taken"], rows, note)


def postprocessing(run: Run, prefix: str) -> Html:
    """What was chosen on validation cases, and what each step would have changed; or nothing."""
    found = read_json(run.folder / POSTPROCESS)
    if not found:
        return Html("")
    dice = mapping(found.get("dice"))
    before = mapping(dice.get("before"))
    regions = list(mapping(before.get("regions")))
    columns = ["step", "mean Dice", *(regions if len(regions) > 1 else []), "taken"]
    steps = [("predictions as they are", before, "")]
    for entry in map(mapping, found.get("tried") or []):
        is_taken = "yes" if entry.get("taken") else "no"
        steps.append((name_step(run, entry), mapping(entry.get("dice")), is_taken))
    if len(found.get("steps") or []) > 1:
        steps.append(("all steps that were taken", mapping(dice.get("after")), ""))
    rows = []
    for label, scores, taken in steps:
        apart = mapping(scores.get("regions"))
        values = [number(scores.get("mean")), *(number(apart.get(region)) for region in regions)]
        rows.append([label, *values[: len(columns) - 2], taken])
    cases = sum(int(number(count)) for count in mapping(found.get("validation_cases")).values())
    note = "A step is taken where it raises the mean Dice and lowers that of no region, as in nnU-Net."
    table = plain_table("Validation Dice with each step", columns, rows, note) if before else None
    lead = f"Chosen by {cases} validation cases: {found.get('note')}."
    return section(f"{prefix}-postprocess", "Postprocessing", table, level=3, lead=lead)


def name_step(run: Run, step: Mapping[str, Any]) -> str:
    """Which classes keep only their largest part, by their names where the run knows them."""
    preparation = read_json(run.folder / "preparation.json")
    names = preparation.get("classes") or []
    numbers = [int(n) for n in step.get("classes") or []]
    named = [str(names[n]) if n < len(names) else f"class {n}" for n in numbers]
    return "largest part of " + " and ".join(named) + (" together" if len(named) > 1 else "")
