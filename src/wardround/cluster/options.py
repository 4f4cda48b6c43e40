"""Where the cells of a comparison run, as a user says it: `--on slurm --on-options partition=gpu,time=60`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

from wardround.cluster.jobs import Cluster
from wardround.cluster.ray import RayCluster
from wardround.cluster.slurm import SlurmCluster
from wardround.errors import ConfigError
from wardround.text import suggest

PLACES = ("local", "slurm", "ray")
EXTRAS = {"slurm": "submitit", "ray": "ray"}  # what each needs; the extra is named as the place
OPTIONS = {
    "slurm": (
        "account", "comment", "constraint", "cpus-per-gpu", "cpus-per-task", "exclude", "exclusive",
        "executor", "gpus", "gpus-per-node", "gpus-per-task", "gres", "licenses", "mail-type", "mail-user",
        "mem", "mem-per-cpu", "mem-per-gpu", "nice", "nodelist", "partition", "priority", "qos",
        "reservation", "time", "tmp", "wckey",
    ),
    "ray": ("address", "num_cpus", "num_gpus"),
}  # fmt: skip
NUMBERS = ("num_cpus", "num_gpus")


def open_cluster(on: str, options: Mapping[str, Any]) -> Cluster | None:
    """The cluster that was asked for; None for this machine."""
    if on not in PLACES:
        raise ConfigError(f"--on is '{on}'.{suggest(on, PLACES)} It is one of {', '.join(PLACES)}.")
    if on == "local":
        if options:
            raise ConfigError("--on-options are for --on slurm and --on ray; this machine has none.")
        return None
    checked = check_options(on, options)
    try:
        library = importlib.import_module(EXTRAS[on])
    except ImportError:
        raise ConfigError(
            f"--on {on} needs {EXTRAS[on]}, which is not installed. Install it with: "
            f"pip install 'wardround[{on}]'"
        ) from None
    return SlurmCluster(library, checked) if on == "slurm" else RayCluster(library, checked)


def parse_options(text: str) -> dict[str, str]:
    """A comma ends a value only where another name follows.

    >>> parse_options("partition=gpu,exclude=n1,n2,time=60")
    {'partition': 'gpu', 'exclude': 'n1,n2', 'time': '60'}
    """
    if not text:
        return {}
    pairs = [part.partition("=") for part in re.split(r",(?=\s*[a-z_-]+=)", text)]
    if not all(equals and value.strip() for _, equals, value in pairs):
        raise ConfigError(f"--on-options is '{text}'; give name=value, several with commas between them.")
    return {name.strip(): value.strip() for name, _, value in pairs}


def check_options(on: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with values of their types; one that does not exist is refused."""
    found: dict[str, Any] = {}
    for given, value in options.items():
        name = given.replace("_", "-") if on == "slurm" else given
        if name not in OPTIONS[on]:
            raise ConfigError(
                f"--on {on} has no option '{given}'.{suggest(name, OPTIONS[on])} "
                f"There are: {', '.join(OPTIONS[on])}."
            )
        found[name] = check_value(name, str(value))
    return found


def check_value(name: str, text: str) -> Any:
    if name in NUMBERS:
        if not re.fullmatch(r"\d{1,4}(\.0)?|0\.\d+", text):
            raise ConfigError(f"--on-options: {name} is '{text}'; give a whole number, or a part of one.")
        return float(text)
    if name == "executor" and text not in ("local", "slurm"):
        raise ConfigError(f"--on-options: executor is '{text}'; it is slurm or local.")
    if name == "address" and text == "local":
        raise ConfigError("--on-options: address is 'local'; for this machine alone, leave out --on ray.")
    if not text or not text.isprintable():
        raise ConfigError(f"--on-options: {name} is {text!r}; give a word or a number.")
    return text
