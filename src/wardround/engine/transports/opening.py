"""The transport of a run on this machine: this process, or several workers."""

from __future__ import annotations

from collections.abc import Sequence

from wardround.clients import Transport
from wardround.data.federation import Federation
from wardround.engine.host import Host, OnProgress
from wardround.engine.run_folder import RunFolder
from wardround.engine.transports.in_process import InProcess, Spilling
from wardround.engine.transports.placement import Placement
from wardround.engine.transports.workers import Workers


def open_transport(
    folder: RunFolder,
    federation: Federation,
    names: Sequence[str],
    placement: Placement,
    on_progress: OnProgress,
) -> Transport:
    """Clients where the placement has them, with an empty folder for messages on their way."""
    exchange = folder.clear_exchange()
    if placement.workers == 1:
        given = federation if folder.config.data.in_memory else None  # else a host opens its own
        return InProcess(Host(folder.config, folder.clients, names, on_progress, given), Spilling(exchange))
    return Workers(
        folder.path / "config.yaml",
        folder.clients,
        exchange,
        federation.sizes(names),
        placement.devices,
        threads=placement.threads,
        deadline=folder.config.deadline,
        on_progress=on_progress,
    )
