"""The whole deployment on one machine: a server and one process for each hospital, with mutual TLS.

    <run>/rehearsal/kits/            made again every time; a hospital's state stays for --resume
      organiser/ north/ east/ ...    logs in logs/, what each hospital remembers and sent in state/

Everything listens on 127.0.0.1 alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import yaml

from wardround.config import Config
from wardround.data.opening import open_federation
from wardround.deploy.conducting import refuse_pooled
from wardround.deploy.job_queue import JobQueue
from wardround.deploy.kits.kit import Kit
from wardround.deploy.kits.project import Hospital, Organiser, Project
from wardround.deploy.kits.provisioning import provision
from wardround.deploy.organising import Submission, make_paths_absolute, submit
from wardround.deploy.processes import KitProcess, Say, free_ports, wait_for_hospitals, wait_for_port
from wardround.deploy.resources import Resources
from wardround.engine.run_folder import check_folder
from wardround.engine.transports.placement import place
from wardround.errors import ConfigError
from wardround.files import take_lock, write_text

START_SECONDS = 120.0
LOOPBACK = "127.0.0.1"


@contextmanager
def rehearsal(
    config: Config, *, resume: bool, overwrite: bool, say: Say, from_round: int | None = None
) -> Iterator[Submission]:
    """Start everything, submit the run, and end everything with the block."""
    refuse_pooled(config)
    check_folder(config, resume, overwrite)
    config = fix_threads(config)
    names = sorted(open_federation(config.data, config.seed).names)
    with ExitStack() as stack:
        stack.enter_context(claim_folder(config.folder))
        kits = make_fresh_kits(config, names, keep=resume)
        organiser, hospitals = kits[0], kits[1:]
        say(f"starting a server and {len(hospitals)} hospitals on this machine")
        server = stack.enter_context(KitProcess(organiser, "server"))
        started = [server, *(stack.enter_context(KitProcess(kit, "join")) for kit in hospitals)]
        for each in started:
            stack.callback(each.ask_to_end)  # all, before any is waited for
        wait_for_port(LOOPBACK, organiser.port, START_SECONDS, server)
        queue = JobQueue(organiser)
        wait_for_hospitals(queue.connected, names, START_SECONDS, say)
        folder = organiser.folder.parent
        yield submit(
            queue, config, names, resume=resume, overwrite=overwrite, from_round=from_round, kits=folder
        )


def claim_folder(run: Path) -> IO[str]:
    """One rehearsal in a folder at a time: a second would replace the kits of the first, and end it."""
    elsewhere = "write elsewhere with --set output=..."
    return take_lock(
        run / "rehearsal" / ".lock",
        taken=f"a rehearsal is already running in {run}. Wait for its end, or {elsewhere}",
        advice=f"{run} must be a folder; or {elsewhere}",
    )


def fix_threads(config: Config) -> Config:
    """The configuration with as many threads as `train` would take, so that the bytes are the same."""
    config = make_paths_absolute(config)
    federation = open_federation(config.data, config.seed)
    threads = place(config, federation, federation.names).threads
    return config.model_copy(update={"compute": config.compute.model_copy(update={"threads": threads})})


def make_fresh_kits(config: Config, names: list[str], *, keep: bool) -> list[Kit]:
    """Kits with ports that are free now; keep: what the hospitals remember of the run."""
    folder = config.folder.absolute() / "rehearsal"
    states = {name: folder / "kits" / name / "state" for name in names}
    kept = folder / "kept"
    shutil.rmtree(kept, ignore_errors=True)
    for name, state in states.items():
        if keep and state.is_dir():
            kept.mkdir(parents=True, exist_ok=True)
            state.rename(kept / name)
    shutil.rmtree(folder / "kits", ignore_errors=True)
    (port,) = free_ports(1)
    try:
        project = Project(
            project="rehearsal",
            organiser=Organiser(host=LOOPBACK, port=port),
            hospitals=tuple(Hospital(name=name) for name in names),
            valid_days=30,
        )
    except ValueError as error:
        reason = (str(error).splitlines()[2:3] or [str(error)])[0].strip()
        raise ConfigError(f"the clients' names cannot serve as names of hospitals: {reason}") from None
    kits = provision(project, folder / "kits", bind=LOOPBACK)
    for kit in kits[1:]:
        write_text(kit.site_file, render_site(config, kit.name))
        if (kept / kit.name).is_dir():
            shutil.rmtree(kit.state, ignore_errors=True)
            (kept / kit.name).rename(kit.state)
    shutil.rmtree(kept, ignore_errors=True)
    return kits


def render_site(config: Config, name: str) -> str:
    """The rules of a rehearsed hospital: its own cases, and everything allowed, names of cases included.

    The cases are the organiser's own, and so are their splits.
    """
    data = "phantom" if config.data.federation is None else str(config.data.federation)
    rules = {
        "data": data,
        "client": None if data == "phantom" else name,
        "splits": config.data.splits,
        "device": config.compute.device,
        "tasks": ["all"],
        "networks": ["all", *([config.model.name] if ":" in config.model.name else [])],
        "case_names": "keep",
        "min_cases": 0,
        "min_batch": 1,
        "resources": Resources.unlimited().model_dump(),
        "largest_message": "16 GB",
    }
    return yaml.safe_dump(rules, sort_keys=False)
