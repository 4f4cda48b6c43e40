"""Run plans: from a federation.yaml and a budget to a run, ready to train.

measure -> rules for some steps -> time them on this machine -> rules for as many steps as the budget has
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wardround.config import Config
from wardround.config_file import load_config
from wardround.configuring.budget import LEAST_STEPS, Budget, Pace, find_steps, format_minutes, parse_budget
from wardround.configuring.facts import Facts, Quantiles
from wardround.configuring.measuring import measure_federation
from wardround.configuring.method_choice import TRIALS_SHARE
from wardround.configuring.plan import Choice, ConfigurationPlan, override_plan
from wardround.configuring.plan_file import PLAN, as_record
from wardround.configuring.preparation_rules import find_spacing
from wardround.configuring.rules import configure
from wardround.configuring.training_rules import choose_augmentation
from wardround.data.federation_file import FederationFile, load
from wardround.data.fingerprint.measure import Fingerprint
from wardround.data.listing import Watch
from wardround.data.settings import DataSettings
from wardround.engine.egress import describe_fingerprint
from wardround.errors import ConfigError
from wardround.planning.plan import make_plan
from wardround.text import format_duration
from wardround.yaml_file import apply_override

FIRST_STEPS = 400  # of the first plan that is timed
COUNTS = ("rounds", "local_steps", "evaluate.every")  # what steps change without changing a step's time

Adapt = Callable[[ConfigurationPlan], ConfigurationPlan]


@dataclass(frozen=True)
class RunPlan:
    """A run that is ready to train; its plan has the user's own settings in it.

    steps: of each client; seconds: what it is expected to take, None where only steps were asked for;
    notes: of clients that are made and a budget that is short, beside the plan's warnings; fingerprints: what
    clients told of their cases.
    """

    name: str
    federation: Path
    budget: Budget
    plan: ConfigurationPlan
    facts: Facts
    steps: int
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    fingerprints: Sequence[Fingerprint] = field(default=(), repr=False)

    def config(self) -> Config:
        return load_config(self.plan.settings())

    def describe(self) -> dict[str, Any]:
        """Facts of the plan as a whole, for plan.yaml."""
        return {
            "federation": str(self.federation),
            "budget": self.budget.name,
            "steps_of_each_client": self.steps,
            "expected_seconds": None if self.seconds is None else round(self.seconds),
            "notes": list(self.notes),
        }

    def make_files(self) -> dict[str, str]:
        """What the folder of the run begins with: the plan, and a ledger line for each fingerprint."""
        counts = {client.name: client.num_train for client in self.facts.clients}
        lines = [
            describe_fingerprint(one.client, one.as_bytes(), counts[one.client]) for one in self.fingerprints
        ]
        ledger = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        return {PLAN: as_record(self.plan, self.describe()), "egress.jsonl": ledger}


def plan_run(
    path: Path,
    budget: Budget,
    overrides: Sequence[str] = (),
    *,
    watch: Watch | None = None,
    on_timing: Callable[[], None] = lambda: None,
    adapt: Adapt | None = None,
) -> RunPlan:
    """Measure the cases of a federation.yaml and choose every setting of a run within a budget.

    overrides: settings of the user's on top (`a.b=c`), which count in the timing; watch: progress over cases;
    on_timing: called before training steps are timed; adapt: changes a plan of the rules, which mirrors along
    every axis then.
    """
    file = load(path)
    name = name_run(path, file)
    settings, compute = read_data_settings(path, overrides), read_overrides(overrides).get("compute")
    device = compute.get("device", "auto") if isinstance(compute, dict) else "auto"
    fingerprints, facts = measure_federation(path, settings, device=device, on_progress=watch)
    check_facts(path, facts)
    known = prepare_as_set(facts, overrides)
    first = [
        Choice("name", name, "the folder of the data" if path.stem == "federation" else f"as {path.name}"),
        Choice("data.federation", str(path), "your data, seen from where the command runs"),
    ]

    def plan(steps: int) -> ConfigurationPlan:
        if adapt is None:
            made = configure(known, steps=steps)
        else:  # whose axes may be those of the files
            made = adapt_plan(adapt, replace(known, positions=()), steps)
        return override_plan(replace(made, choices=(*first, *made.choices)), overrides)

    asked, seconds = choose_steps(plan, budget, len(facts.clients), on_timing)
    made = plan(asked)
    steps = count_steps(made, asked)
    notes = (*describe_artificial(file), *describe_shortage(budget, steps, seconds))
    return RunPlan(name, path, budget, made, facts, steps, seconds, notes, fingerprints)


def adapt_plan(adapt: Adapt, facts: Facts, steps: int) -> ConfigurationPlan:
    """What `adapt` makes of the plan, augmented as its patch asks; one for CT on other images is told."""
    made = adapt(configure(facts, steps=steps))
    data = made.settings()["data"]
    fitting = {choice.key: choice for choice in choose_augmentation(facts, steps, data["patch"])}
    made = replace(made, choices=tuple(fitting.get(choice.key, choice) for choice in made.choices))
    if data["prepare"]["normalise"] != "ct" or any(channel.modality == "ct" for channel in facts.channels):
        return made
    told = (
        "the plan clips intensities as CT, but no channel is CT by its name or values: is it of these data?"
    )
    return replace(made, warnings=(*made.warnings, told))


def plan_hospitals(
    facts: Facts,
    name: str,
    source: Path,
    data: Mapping[str, Any],
    budget: Budget,
    overrides: Sequence[str] = (),
) -> RunPlan:
    """Choose every setting of a run at hospitals from what they told of their cases.

    source: the survey; data: settings of `data` that it comes with. How fast hospitals' machines are is not
    known here, so a budget counts steps.
    """
    check_facts(source, facts)
    steps = budget.limit_steps(len(facts.clients))
    if steps is None:
        raise ConfigError(
            f"--budget {budget.name} is a time, and how fast the machines of hospitals are is not known. "
            "Give quick, standard or full, or a number of steps of each hospital."
        )
    first = [Choice("name", name, "so that hospitals can tell runs apart")]
    first += [Choice(f"data.{key}", value, "from the survey of the hospitals") for key, value in data.items()]
    made = configure(prepare_as_set(facts, overrides), steps=steps)
    made = override_plan(replace(made, choices=(*first, *made.choices)), overrides)
    return RunPlan(name, source, budget, made, facts, count_steps(made, steps))


def count_steps(plan: ConfigurationPlan, asked: int) -> int:
    """Steps of each client that the rounds of a plan make; those asked for where it counts epochs."""
    settings = plan.settings()
    rounds, local = settings.get("rounds"), settings.get("local_steps")
    return rounds * local if isinstance(rounds, int) and isinstance(local, int) else asked


def configure_run(federation: str | Path, *, budget: str = "quick", overrides: Sequence[str] = ()) -> Config:
    """The configuration of a run on a federation.yaml, planned from its cases, for `wr.run`.

    budget: quick, standard or full, a time such as 30m, or steps of each client; overrides: settings on top,
    as `--set` has them. Methods are tried by `wardround train --budget full` alone.

    >>> wr.run(wr.configure("federation.yaml", budget="30m"))  # doctest: +SKIP
    """
    return plan_run(Path(federation), parse_budget(budget), overrides).config()


def read_data_settings(path: Path, overrides: Sequence[str]) -> DataSettings:
    """What the user's own settings say of splits and orientation; the rest is to be planned."""
    own = read_own_data(overrides)
    prepare = {key: value for key, value in own["prepare"].items() if key == "orientation"}
    chosen = {"splits": own.get("splits") or None, "prepare": prepare or None}
    return DataSettings.read({"federation": str(path), **chosen}, "data.")


def read_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for override in overrides:
        apply_override(values, override)
    return values


def read_own_data(overrides: Sequence[str]) -> dict[str, Any]:
    """The user's own settings of `data`, which are checked elsewhere; "prepare" is always there."""
    data = read_overrides(overrides).get("data")
    own = data if isinstance(data, dict) else {}
    return {**own, "prepare": own["prepare"] if isinstance(own.get("prepare"), dict) else {}}


def prepare_as_set(facts: Facts, overrides: Sequence[str]) -> Facts:
    """The facts of images in the user's own spacing and size, so that patch and network fit them."""
    prepare = read_own_data(overrides)["prepare"]
    spacing, size = prepare.get("spacing"), prepare.get("size")
    if spacing and facts.has_spacing and len(spacing) == facts.dimensions:
        facts = replace(facts, spacing=tuple(Quantiles(side, side, side) for side in map(float, spacing)))
    elif "spacing" in prepare and not spacing:
        facts = replace(facts, has_spacing=False)
    if size and len(size) == facts.dimensions:
        extent = [side * voxel for side, voxel in zip(size, find_spacing(facts), strict=True)]
        facts = replace(
            facts,
            shape=tuple(Quantiles(side, side, side) for side in size),
            extent=tuple(Quantiles(side, side, side) for side in extent),
        )
    return facts


def name_run(path: Path, file: FederationFile) -> str:
    """A name for the run: that of a file of its own name, or of the folder that the data are in.

    Several folders give the name of the folder they share.
    """
    if path.stem != "federation":
        return path.stem
    places = [(path.parent / source.path).resolve() for source in file.sources]
    shared = places[0] if len(places) == 1 else places[0].parent
    if shared.is_file():  # a list of cases
        shared = shared.parent
    return (shared if len({place.parent for place in places}) == 1 else path.resolve().parent).name or "run"


def check_facts(path: Path, facts: Facts) -> None:
    """Refuse what is no federation, and classes that nobody can learn."""
    if len(facts.clients) < 2:
        raise ConfigError(
            f"{path} has one client that trains, '{facts.clients[0].name}'; a federation needs two. Add a "
            "folder under sources, or divide its cases artificially: partition: {kind: iid, clients: 4}. "
            + " ".join(facts.notes)
        )
    absent = [name for name in facts.classes if not facts.presence.get(name, 0)]
    if absent:
        raise ConfigError(
            f"{path}: class '{absent[0]}' is in no training case. Correct its values under labels, or take "
            "it out; wardround data check shows the values that are there."
        )


def describe_artificial(file: FederationFile) -> list[str]:
    """A sentence where clients are not hospitals."""
    partition = file.partition
    if partition.kind in ("natural", "column"):
        return []
    return [
        f"ARTIFICIAL CLIENTS: {partition.clients} clients were made from the cases ({partition.kind}). "
        "Report results as artificially partitioned."
    ]


# Steps


def describe_shortage(budget: Budget, steps: int, seconds: float | None) -> list[str]:
    """A sentence where the fewest steps take longer than a budget that has a name."""
    if seconds is None or budget.seconds is None or seconds <= budget.seconds:
        return []
    if steps > LEAST_STEPS:  # rounds are the user's
        return [
            f"{budget.name} means {format_duration(budget.seconds)}, but the {steps:,} steps of each client "
            f"that you set take about {format_duration(seconds)} on this machine."
        ]
    return [
        f"{budget.name} means {format_duration(budget.seconds)}, but the fewest steps of this plan take "
        f"about {format_duration(seconds)} on this machine, and teach little. Better: --budget "
        f"{format_minutes(5 * seconds)}."
    ]


def choose_steps(
    plan: Callable[[int], ConfigurationPlan],
    budget: Budget,
    clients: int,
    on_timing: Callable[[], None],
) -> tuple[int, float | None]:
    """Steps of each client, and the seconds they are expected to take."""
    if budget.seconds is None:
        assert budget.steps is not None
        return budget.steps, None
    paces: dict[str, Pace] = {}

    def predict(steps: int) -> float:
        made = plan(steps)
        recipe = json.dumps([[c.key, c.value] for c in made.choices if c.key not in COUNTS], default=str)
        if recipe not in paces:
            on_timing()
            paces[recipe] = measure_pace(load_config(made.settings()))
        settings = made.settings()
        rounds, every = int(settings["rounds"]), int(settings.get("evaluate", {}).get("every", 1))
        return paces[recipe].predict(count_steps(made, steps), rounds, math.ceil(rounds / every))

    predict(FIRST_STEPS)  # so that a short plan is timed first, which most budgets end with
    available = budget.seconds / (1 + TRIALS_SHARE) if budget.tries_methods else budget.seconds
    steps = find_steps(available, predict, budget, budget.limit_steps(clients))
    return steps, predict(steps)


def measure_pace(config: Config) -> Pace:
    """Seconds of steps, rounds and test, from a dry run of this network on this machine."""
    made = make_plan(config)
    assert made.time is not None
    local_steps = max(client.steps for client in made.clients)
    return Pace.of(made.time, max(1, local_steps))
