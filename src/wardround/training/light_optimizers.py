"""torch's optimizers without torch's compiler.

torch wraps an optimizer's functions so that a compiled program leaves them out. The wrappers import the
compiler, with sympy and much else, when they are first called: about a second and 100 MB in every process
that trains, compiled or not. We never compile an optimizer, so we call what is inside the wrappers.
"""

from __future__ import annotations

import inspect
from typing import TypeVar

import torch
from torch.optim import Optimizer

Kind = TypeVar("Kind", bound=Optimizer)


def light(kind: type[Kind]) -> type[Kind]:
    """The same optimizer, the same bytes, without the wrappers."""
    inside = {
        "step": torch.no_grad()(inspect.unwrap(kind.step)),  # the wrapper also turns gradients off
        "zero_grad": inspect.unwrap(kind.zero_grad),
        "add_param_group": inspect.unwrap(kind.add_param_group),
    }
    return type(kind.__name__, (kind,), inside)
