"""models: the networks, their costs and what they support."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wardround.cli.common import (
    Json,
    JsonRows,
    Set,
    app,
    configure_logging,
    out,
    print_rows,
    print_table,
    show_wait,
)
from wardround.errors import ConfigError
from wardround.yaml_file import apply_override

if TYPE_CHECKING:
    from wardround.models import ModelSettings

models_app = typer.Typer(name="models", invoke_without_command=True)
app.add_typer(models_app)

MOST_VOXELS = 100_000  # a side; counts of more do not fit torch's numbers

Size = Annotated[
    str | None,
    typer.Option("--size", metavar="H,W[,D]", help="Image size; by default 256,256 or 128,128,128."),
]
Channels = Annotated[int, typer.Option("--channels", min=1, help="Channels of the images.")]
Classes = Annotated[int, typer.Option("--classes", min=1, help="Output channels of the network.")]


@models_app.callback()
def models(
    context: typer.Context,
    size: Size = None,
    channels: Channels = 1,
    classes: Classes = 2,
    json_: JsonRows = False,
) -> None:
    """List the networks and their costs, or show one."""
    if context.invoked_subcommand is not None:
        if (size, channels, classes, json_) != (None, 1, 2, False):  # show has its own options
            raise ConfigError("wardround models: write options after show NAME, not before it.")
        return
    configure_logging(debug=False, quiet=True)
    wanted = parse_size(size)
    with show_wait("Measuring the networks", json_):
        from wardround.reporting.catalogue import network_list

        found = network_list(wanted, channels, classes)
    print_rows(found, json_)


@models_app.command()
def show(
    name: Annotated[str, typer.Argument(help="Such as unet3d, monai:SegResNet, package.module:Class.")],
    size: Size = None,
    channels: Channels = 1,
    classes: Classes = 2,
    weights: Annotated[
        Path | None, typer.Option("--weights", help="A safetensors file, to see which tensors fit.")
    ] = None,
    overrides: Set = None,
    json_: Json = False,
) -> None:
    """Show one network: its parts, its costs, and whether FedBN, FedMA and FedPer can use it.

    Its settings are given as in a configuration: --set model.base_filters=16, --set model.arguments.depth=2.
    """
    configure_logging(debug=False, quiet=True)
    with show_wait(f"Measuring {name}", json_):
        from wardround.models.start_weights import compare
        from wardround.reporting import catalogue

        settings = read_settings(name, overrides or [])
        found = catalogue.measure(settings, parse_size(size) or choose_size(settings), channels, classes)
        facts = catalogue.network_facts(found)
        path = weights or settings.weights
        match = None if path is None else compare(found.model, path)
    if json_:
        parts = [vars(part) for part in found.costs.parts]
        matched = {} if match is None else {"weights": match.as_dict()}
        out.print_json(json.dumps({**facts, "parts": parts, **matched}, default=str))
        return
    print_table(catalogue.facts_table(facts))
    out.print()
    print_table(catalogue.parts_table(found))
    if match is not None:
        out.print()
        print_table(catalogue.weights_table(match))


def read_settings(name: str, overrides: list[str]) -> ModelSettings:
    """The settings of a network by name, with `model.a=b` on top."""
    from wardround.models import ModelSettings, resolve

    values: dict[str, Any] = {"model": {"name": name}}
    for override in overrides:
        apply_override(values, override)
    others = [key for key in values if key != "model"]
    if others or not isinstance(values["model"], dict):
        raise ConfigError(
            f"--set {others[0] if others else 'model'}: only settings of the network are allowed, model.a=b."
        )
    settings = ModelSettings.read(values["model"], "model.")
    resolve(settings)
    return settings


def parse_size(text: str | None) -> tuple[int, ...] | None:
    """128,128,128 as numbers."""
    if text is None:
        return None
    parts = text.replace("x", ",").split(",")
    if len(parts) not in (2, 3) or not all(
        part.strip().isdecimal() and 0 < int(part) <= MOST_VOXELS for part in parts
    ):
        raise ConfigError(
            f"--size {text}: give two or three numbers of voxels up to {MOST_VOXELS}, such as 128,128,128."
        )
    return tuple(int(part) for part in parts)


def choose_size(settings: ModelSettings) -> tuple[int, ...]:
    from wardround.models import MODELS
    from wardround.reporting.catalogue import SIZES

    info = MODELS.get(settings.name)
    return SIZES[2 if info is None else info.dimensions[-1]]
