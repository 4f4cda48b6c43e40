"""configs: the configurations that come with wardround."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from wardround.cli.common import JsonRows, app, out, print_rows
from wardround.errors import ConfigError
from wardround.files import write_text, writing
from wardround.tables import Table

configs_app = typer.Typer(name="configs", invoke_without_command=True)
app.add_typer(configs_app)

Name = Annotated[str, typer.Argument(help="A name from the list.")]


@configs_app.callback()
def configs(context: typer.Context, json_: JsonRows = False) -> None:
    """List the configurations that come with wardround; show one, or copy it to change it."""
    if context.invoked_subcommand is not None:
        return
    from wardround.builtin_configs import list_configs

    rows = [[config.name, config.command, config.about] for config in list_configs()]
    caption = "One of them: wardround configs show NAME. As a file to change: wardround configs copy NAME"
    print_rows(Table("Configurations", ["name", "command", "what"], rows, caption), json_)


@configs_app.command()
def show(name: Name) -> None:
    """Print one configuration."""
    from wardround.builtin_configs import require

    out.print(require(name).read_text(encoding="utf-8").rstrip("\n"), markup=False, soft_wrap=True)


@configs_app.command()
def copy(
    name: Name,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The new file; default: my-NAME.yaml.")
    ] = None,
) -> None:
    """Write one configuration into a file of your own."""
    from wardround.builtin_configs import require

    path, content = output or Path(f"my-{name}.yaml"), require(name).read_text(encoding="utf-8")
    if path.exists():
        raise ConfigError(f"{path} exists already. Choose another name with -o FILE.")
    with writing(path):
        write_text(path, content)
    out.print(f"Written: [bold]{escape(str(path))}[/]. Use it in place of the name.")
