"""wardround: one segmentation model, every hospital.

>>> import wardround as wr
>>> result = wr.run("quickstart")  # doctest: +SKIP
>>> print(result.table)  # doctest: +SKIP

The names below are the public interface; modules and everything else in them are private and may change.
"""

from __future__ import annotations

from importlib import import_module
from inspect import isfunction
from typing import TYPE_CHECKING, Any

from wardround.version import __version__

__all__ = [
    # Do something
    "run",
    "compare",
    "predict",
    "evaluate",
    "export",
    "plan",
    "configure",
    "load_config",
    # What comes back
    "Result",
    "Comparison",
    "Prediction",
    "Exported",
    "Plan",
    "Config",
    # Write a method, an objective or a metric
    "Method",
    "Objective",
    "Metric",
    "Client",
    "Clients",
    "Message",
    "Reply",
    "Params",
    "ServerState",
    "Batch",
    "Context",
    "Listener",
    "METHODS",
    "OBJECTIVES",
    "METRICS",
    # Errors
    "WardroundError",
    "ConfigError",
    "DataError",
    "ClientError",
    "CheckpointError",
    "TooFewClients",
    "__version__",
]

if TYPE_CHECKING:
    from wardround.api import Result, run
    from wardround.clients import Client, Clients
    from wardround.comparison import Comparison, compare
    from wardround.config import Config
    from wardround.config_file import load_config
    from wardround.configuring.run_plan import configure_run as configure
    from wardround.data.cases import Batch
    from wardround.engine.outcome import Listener
    from wardround.errors import (
        CheckpointError,
        ClientError,
        ConfigError,
        DataError,
        TooFewClients,
        WardroundError,
    )
    from wardround.exporting import Exported, export
    from wardround.losses.objective import Context, Objective
    from wardround.messages import Message, Reply, ServerState
    from wardround.methods import METHODS, OBJECTIVES
    from wardround.methods.base import Method
    from wardround.metrics import METRICS, Metric
    from wardround.params import Params
    from wardround.planning.plan import Plan
    from wardround.planning.plan import make_plan as plan
    from wardround.prediction.evaluating import evaluate
    from wardround.prediction.results import Prediction
    from wardround.prediction.session import predict

_HOMES = {
    "api": "Result run",
    "clients": "Client Clients",
    "comparison": "Comparison compare",
    "config": "Config",
    "config_file": "load_config",
    "configuring.run_plan": "configure=configure_run",
    "data.cases": "Batch",
    "engine.outcome": "Listener",
    "errors": "CheckpointError ClientError ConfigError DataError TooFewClients WardroundError",
    "exporting": "Exported export",
    "losses.objective": "Context Objective",
    "messages": "Message Reply ServerState",
    "methods": "METHODS OBJECTIVES",
    "methods.base": "Method",
    "metrics": "METRICS Metric",
    "params": "Params",
    "planning.plan": "Plan plan=make_plan",
    "prediction.evaluating": "evaluate",
    "prediction.results": "Prediction",
    "prediction.session": "predict",
}
_PLACES = {
    name.partition("=")[0]: (f"wardround.{module}", name.rpartition("=")[2])
    for module, names in _HOMES.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: `import wardround` stays instant."""
    if name not in _PLACES:
        raise AttributeError(f"module 'wardround' has no attribute '{name}'")
    module, attribute = _PLACES[name]
    found = getattr(import_module(module), attribute)
    if not isfunction(found):
        return found
    return import_module("wardround.python_words").for_python(found)


def __dir__() -> list[str]:
    return sorted(__all__)
