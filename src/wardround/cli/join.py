"""join: a hospital takes part, on NVIDIA FLARE; what it says while it does."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wardround.cli.common import Debug, app, configure_logging
from wardround.cli.hospitals import leaving_on_signals, make_speaker, require_engine

if TYPE_CHECKING:
    from wardround.deploy.kits import Kit


@app.command()
def join(
    kit: Annotated[Path, typer.Argument(help="The hospital's kit.", metavar="KIT")],
    data: Annotated[
        Path | None,
        typer.Option("--data", help="federation.yaml; default: what site.yaml says.", metavar="FEDERATION"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Take part as a hospital: connect to the organiser and answer what site.yaml allows."""
    configure_logging(debug, False)
    require_engine(debug)
    from wardround.deploy.kits import DATA, open_kit
    from wardround.deploy.ledger import NAME
    from wardround.deploy.nvflare.processes import Processes
    from wardround.deploy.site import choose_device, describe_data, read_site_of

    opened = open_kit(kit, "hospital")
    if data is not None:
        os.environ[DATA] = str(data.absolute())
    say = make_speaker(False)
    rules = read_site_of(opened)
    choose_device(rules)
    say(describe_data(rules, opened.name))
    check_trust(opened)
    with leaving_on_signals(), Processes(opened.folder, "client", again=True, say=say) as processes:
        say(f"'{opened.name}' connects to {opened.server}:{opened.port}, outbound only. Ctrl-C ends.")
        line = ConnectionWatch(opened)
        news = watch_ledger(opened.state / NAME)
        while True:
            for text in (*line.news(processes.child.pid if processes.child else None), *next(news)):
                say(text)
            time.sleep(1.0)


def check_trust(kit: Kit) -> None:
    """A kit that is broken, expired or of another project would be refused for ever: say so and end.

    A server that does not run yet is no reason to end.
    """
    from wardround.deploy.nvflare.preflight.checks import TIMEOUT, CheckFailed, PreflightContext, TrustFailed
    from wardround.deploy.nvflare.preflight.connection import check_tls
    from wardround.deploy.nvflare.preflight.kit import refuse_broken
    from wardround.errors import ConfigError

    refuse_broken(kit)
    try:
        check_tls(PreflightContext(kit, None, datetime.now(UTC), TIMEOUT))
    except TrustFailed as wrong:
        raise ConfigError(f"{wrong.found} {wrong.todo}") from None
    except CheckFailed:
        return


class ConnectionWatch:
    """Reports when the connection to the organiser is made or lost; a single observation does not count."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit
        self._where = f"{kit.server}:{kit.port}"
        self._said: bool | None = None
        self._last = False
        self._same = self._looks = 0  # looks that saw the same in a row; looks in all

    def news(self, process: int | None) -> list[str]:
        """Called every second; process: the one that holds the connection."""
        here = process is not None and is_connected(process, self._kit.port)
        self._same = self._same + 1 if here == self._last else 1
        self._last = here
        self._looks += 1
        is_sure = self._same >= 3 and (here or self._said is not None)
        is_late = not here and self._said is None and self._looks >= 10  # or it is refused again and again
        if here == self._said or not (is_sure or is_late):
            return []
        first, self._said = self._said is None, here
        if here:
            return [f"connected to {self._where}"]
        no = "no connection yet" if first else "connection lost"
        return [f"{no} to {self._where}; retrying. Why: wardround preflight {self._kit.folder}"]


def is_connected(process: int, port: int) -> bool:
    """Whether a process has an open connection to this port somewhere; sends nothing."""
    import psutil

    try:
        found = psutil.Process(process).net_connections("tcp")
    except (psutil.Error, OSError):
        return False
    return any(one.status == "ESTABLISHED" and one.raddr and one.raddr.port == port for one in found)


def watch_ledger(path: Path) -> Iterator[list[str]]:
    """Yield a line for every message that left since the last time, as the ledger has it."""
    offset = path.stat().st_size if path.exists() else 0
    rest = b""
    while True:
        found = b""
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                found = file.read()
        offset += len(found)
        *lines, rest = (rest + found).split(b"\n")
        yield [describe_line(json.loads(line)) for line in lines]


def describe_line(line: dict[str, Any]) -> str:
    trouble = line.get("refused") or line.get("failure")
    what = f"answered with: {trouble}" if trouble else f"{len(line['tensors'])} tensors"
    return f"{line['task']}, round {line['round']}: {what}, {line['bytes']:,} bytes left"
