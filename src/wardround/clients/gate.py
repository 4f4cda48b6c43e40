"""The gate: every reply is checked before a method sees it.

Each client registers once what it will send (names, shapes and types of its tensors) and how many
cases it has. Every reply is checked against that; a bad one is refused with a sentence that names the
tensor or number, and the round goes on with the others.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from wardround.aggregation.weights import check_weights, is_number
from wardround.aggregation.withheld import Withheld
from wardround.clients.traffic import short
from wardround.messages import Message, ServerState
from wardround.metrics.registry import SHARES
from wardround.params import Params
from wardround.storage import DTYPES

MOST_CLASSES = 255  # labels are bytes
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
LARGEST = 1e15  # of a server's tensors: a float32 network multiplies and adds up many of them
Spec = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Registration:
    """What a client registered before round 0.

    tensors: shape and type of what it will send; trainable: names of those that learn; kept: of what the
    method leaves at the client; num_pooled: its training cases where the pooled client trains on them;
    num_unlabelled: training cases without a label; annotates: whether its labels say where each class is,
    from the first after background, empty where they say everything, all False where it trains on none.
    """

    client: str
    num_train: int
    num_val: int = 0
    num_test: int = 0
    tensors: Mapping[str, Spec] = field(default_factory=dict)
    trainable: tuple[str, ...] = ()
    kept: Mapping[str, Spec] = field(default_factory=dict)
    num_pooled: int = 0
    num_unlabelled: int = 0
    annotates: tuple[bool, ...] = ()

    @property
    def has_labels(self) -> bool:
        """Whether it trains on any label."""
        return self.num_unlabelled < self.num_train

    @property
    def lacks_test(self) -> bool:
        """Whether it could be tested, but has no case for that."""
        return not self.num_test and not self.num_unlabelled

    @property
    def learned(self) -> dict[str, Spec]:
        """The tensors that learn, without running statistics and counters."""
        return {name: self.tensors[name] for name in self.trainable}

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON."""
        tensors, kept = (describe_specs(group) for group in (self.tensors, self.kept))
        lists = {"trainable": list(self.trainable), "annotates": list(self.annotates)}
        return {**vars(self), "tensors": tensors, "kept": kept, **lists}

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Registration:
        """From plain JSON; whatever does not fit raises a KeyError, TypeError or ValueError."""
        return cls(
            client=str(facts["client"]),
            num_train=count(facts["num_train"]),
            num_val=count(facts["num_val"]),
            num_test=count(facts["num_test"]),
            tensors=specs(facts["tensors"]),
            trainable=tuple(str(name) for name in facts["trainable"]),
            kept=specs(facts["kept"]),
            num_pooled=count(facts.get("num_pooled", 0)),
            num_unlabelled=count(facts.get("num_unlabelled", 0)),
            annotates=tuple(bool(told) for told in list(facts.get("annotates", ()))[:MOST_CLASSES]),
        )


def describe_specs(group: Mapping[str, Spec]) -> dict[str, Any]:
    """Shapes and types as plain JSON."""
    return {name: [list(shape), KINDS[dtype]] for name, (shape, dtype) in group.items()}


def specs(tensors: Mapping[str, Any]) -> dict[str, Spec]:
    return {
        str(name): (tuple(count(side) for side in shape), DTYPES[kind])
        for name, (shape, kind) in dict(tensors).items()
    }


def count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def complaint(
    registration: Registration, message: Message, num_examples: Any, num_steps: Any, most_steps: int | None
) -> str | None:
    """Why a training reply cannot be used, or None. most_steps: what was asked for, None: any number."""
    return (
        count_complaint("num_examples", num_examples, 1, registration.num_train)
        or steps_complaint(num_steps, most_steps, registration.num_train)
        or params_complaint(registration.tensors, message.optional_params)
        or variance_complaint(message.optional_params)
    )


def count_complaint(name: str, value: Any, least: int, most: int | None) -> str | None:
    """Counts are whole numbers inside what was registered; they become weights."""
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{name} is {value!r}, not a whole number"
    if value < least:
        return f"{name} is {value}; at least {least} is needed"
    if most is not None and value > most:
        return f"{name} is {value}, but the client registered {most}"
    return None


def steps_complaint(num_steps: Any, most: int | None, num_train: int) -> str | None:
    """Steps become factors (FedNova), so a client cannot have taken more than it was asked for."""
    reason = count_complaint("num_steps", num_steps, 0, None)
    if reason is not None or most is None or num_steps <= most:
        return reason
    cases = "case makes" if num_train == 1 else "cases make"
    return (
        f"num_steps is {num_steps}, but its {num_train} {cases} at most {most} a round; a method that trains "
        "longer says so in most_steps"
    )


def facts_complaint(seconds: Any, loss: Any) -> str | None:
    """Seconds are not negative, and losses are finite; both are shown and added up."""
    if not is_number(seconds) or seconds < 0:
        return f"seconds is {seconds!r}, not a number from 0 on"
    if not isinstance(loss, Mapping):
        return f"its loss is a {type(loss).__name__}, not numbers by term"
    bad = next((term for term, value in loss.items() if not is_number(value)), None)
    return None if bad is None else f"loss '{bad}' is {loss[bad]!r}, not a finite number"


def params_complaint(expected: Mapping[str, Spec], params: Params | None) -> str | None:
    """Names, shapes and types must be those registered."""
    given = params if params is not None else Params()
    for name, (shape, dtype) in expected.items():
        if name not in given:
            return f"tensor '{name}' is missing"
        got_shape, got_dtype = given.spec(name)
        if got_shape != shape:
            return f"tensor '{name}' has shape {got_shape}, registered {shape}"
        if got_dtype != dtype:
            return f"tensor '{name}' has type {short(got_dtype)}, registered {short(dtype)}"
    extra = next((name for name in given if name not in expected), None)
    return None if extra is None else f"tensor '{extra}' was never registered"


def variance_complaint(params: Params | None) -> str | None:
    """Running variances, and the mean squares they travel as, are not negative."""
    given = Params() if params is None or isinstance(params, Withheld) else params
    bad = (name for name in given if name.endswith("running_var") and bool((given[name] < 0).any()))
    return next((f"tensor '{name}' holds a negative variance" for name in bad), None)


def scores_complaint(message: Message, num_cases: int) -> str | None:
    """Scores of no more cases than registered, each inside what its metric can be; NaN: not defined."""
    rows = message.scalars.get("cases", [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        return "its scores are not a list with a row for each case"
    if len(rows) > num_cases:
        return f"it scored {len(rows)} cases, but the client registered {num_cases}"
    for row in rows:
        regions = row.get("regions")
        for region in regions.values() if isinstance(regions, Mapping) else ():
            for metric, value in region.items() if isinstance(region, Mapping) else ():
                if metric in SHARES and is_number(value) and not 0 <= value <= 1:
                    return f"{metric} of a case is {value:g}, not between 0 and 1"
    return None


def names_complaint(declared: Collection[str], message: Message) -> str | None:
    """Beside the model, a reply holds only what the method's card names."""
    extra = next((name for name in [*message.extras, *message.scalars] if name not in declared), None)
    return None if extra is None else f"'{extra}' is not among what the method's card says it sends (`up`)"


def content_complaint(message: Message) -> str | None:
    """Every tensor and every number must be finite."""
    for label, group in message.tensors().items():
        if isinstance(group, Withheld) or all_finite_on_gpu(
            group
        ):  # what is withheld only its client can check
            continue
        for name in group:
            tensor = group[name]
            if tensor.is_floating_point() and not all_finite(tensor):
                kind = "NaN" if bool(torch.isnan(tensor).any()) else "an infinite value"
                place = f"tensor '{name}'" if label == "params" else f"tensor '{name}' of {label}"
                return f"{place} holds {kind}"
    return scalar_complaint(message.scalars)


def all_finite_on_gpu(group: Params) -> bool:
    """Whether all tensors lie on one GPU and are finite: one wait, not one for each of them."""
    if any(group.device(name).type != "cuda" for name in group):
        return False
    tensors = [group[name] for name in group if group[name].is_floating_point() and group[name].numel()]
    if not tensors or len({tensor.device for tensor in tensors}) > 1:
        return False
    largest = list(torch._foreach_norm(tensors, math.inf))  # NaN where there is one
    if len({value.dtype for value in largest}) > 1:
        largest = [value.double() for value in largest]
    return math.isfinite(float(torch.stack(largest).max()))


def is_finite(group: Params) -> bool:
    """Whether no tensor holds NaN or an infinite value."""
    return all_finite_on_gpu(group) or all(all_finite(tensor) for tensor in group.values())


def all_finite(tensor: torch.Tensor) -> bool:
    """One pass: a sum is NaN or infinite if any element is; a sum that overflows is checked again."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def scalar_complaint(value: Any, where: str = "scalars") -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where} is {value}"
    if isinstance(value, Mapping):
        found = (scalar_complaint(item, f"scalar '{key}'") for key, item in value.items())
        return next((text for text in found if text), None)
    if isinstance(value, list | tuple):
        return next((text for text in (scalar_complaint(item, where) for item in value) if text), None)
    if isinstance(value, int) and abs(value) >= 2**63:
        return f"{where} is a whole number of more than 64 bits"
    if value is None or isinstance(value, str | int | float):
        return None
    return f"{where} has type {type(value).__name__}"


def state_complaint(before: ServerState, after: Any) -> str | None:
    """Why a method's result cannot be the next state, or None."""
    if not isinstance(after, ServerState):
        return f"run_round returned {type(after).__name__}, not the next state; return state.next(...)"
    if after.round != before.round + 1:
        return "run_round returned a state of the same round; return state.next(...)"
    reason = check_weights(after.notes.get("weights", {}))
    if reason is not None:  # before the tensors, which bad weights spoil
        return reason
    specs = {name: before.params.spec(name) for name in before.params}
    return params_complaint(specs, after.params) or finite_complaint(after.params, "the new model")


def finite_complaint(value: Any, where: str) -> str | None:
    """Why tensors, however nested, cannot be computed with: they are not finite, or far too large."""
    if isinstance(value, torch.Tensor):
        return None if is_usable([value]) else f"{where} holds {describe_worst(value)}"
    if isinstance(value, Params):
        tensors = [value[name] for name in value]
        if is_usable(tensors):
            return None
        bad = next(name for name in value if not is_usable([value[name]]))
        return f"tensor '{bad}' of {where} holds {describe_worst(value[bad])}"
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((text for item in inner if (text := finite_complaint(item, where))), None)


def is_usable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all numbers are finite and below LARGEST; on a GPU one wait for all of them."""
    given = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    largest = [torch.linalg.vector_norm(tensor.detach(), math.inf).double() for tensor in given]
    if len({value.device for value in largest}) > 1:
        largest = [value.cpu() for value in largest]
    return not largest or float(torch.stack(largest).max()) <= LARGEST  # NaN is not


def describe_worst(tensor: torch.Tensor) -> str:
    if bool(torch.isnan(tensor).any()):
        return "NaN"
    largest = float(tensor.abs().max())
    if math.isinf(largest):
        return "an infinite value"
    return f"{largest:.3g}, too large to compute with"
