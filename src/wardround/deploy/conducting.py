"""A whole run of the organiser: an ordinary experiment whose clients are at hospitals."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from wardround.config import Config
from wardround.data.roles import NOT_HOSPITALS, PROXY
from wardround.deploy.agreement import agree_on_federation, check_dropping, check_networks
from wardround.deploy.live_file import Live, announcing
from wardround.deploy.remote import Channel, Remote
from wardround.deploy.survey.conducting import require_agreement
from wardround.engine.checkpoint import Checkpoints
from wardround.engine.experiment import Experiment
from wardround.engine.host import Host
from wardround.engine.judging.pictures import PICTURES
from wardround.engine.outcome import Outcome
from wardround.engine.run_folder import check_folder
from wardround.engine.transports.local import InProcess, Spilling
from wardround.errors import ConfigError
from wardround.files import file_name, take_lock, write_text
from wardround.methods import build_method


def conduct(
    channel: Channel,
    config: Config,
    *,
    names: Sequence[str],
    resume: bool = False,
    overwrite: bool = False,
    from_round: int | None = None,
    proposals: Mapping[str, Any] | None = None,
    job: str = "",
    pictures_at: Callable[[str], Path] | None = None,
    on_experiment: Callable[[Experiment], None] | None = None,
    on_done: Callable[[Path], None] | None = None,
) -> Outcome:
    """Run an experiment whose clients are at hospitals; everything lands in the run folder.

    proposals: common names and a preparation for each hospital, which all must accept before it begins;
    on_experiment: gets the experiment before it starts, to be able to stop it; on_done: gets the folder of a
    run that is done, before its end is announced.
    """
    folder = config.folder
    check_folder(config, resume, overwrite)  # what is there stays as it is
    with claim(folder):
        live = Live(folder / "live.json", job=job, rounds=config.rounds, run=None)
        with announcing(live):
            refuse_pooled(config)
            check_names(names)
            run = run_id(folder, resume)
            done = Checkpoints(folder / "checkpoints").check(from_round) if resume else 0
            live.say(run=run, first_round=done)
            remote = Remote(
                channel,
                config,
                run=run,
                names=names,
                live=live,
                exchange=folder / "exchange",
                resumes=resume,
                own=open_own_client(config),
                pictures_at=pictures_at,
            )
            if proposals and not resume:
                require_agreement(remote, proposals)
            remote.register()
            federation = agree_on_federation(remote.facts, remote.hospitals)
            check_dropping(config, remote.facts)
            federation = replace(federation, proxy=config.data.proxy)
            check_networks(config, federation, remote.hospitals)
            experiment = Experiment(config, hospitals=remote, federation=federation)
            if on_experiment is not None:
                on_experiment(experiment)
            outcome = experiment.run(resume=resume, overwrite=overwrite, from_round=from_round)
            remote.strays()  # counted, though no round reports them any more
            if outcome.status == "done" and on_done is not None:
                on_done(folder)
            live.facts["state"] = outcome.status
    return outcome


def claim(folder: Path) -> IO[str]:
    """One process at a time conducts a run; a second must not touch the first one's files."""
    taken = f"{folder} is in use by another process."
    return take_lock(folder / ".conducting", taken=taken, advice="Set another output.")


def check_names(names: Sequence[str]) -> None:
    """Every hospital once, and under a name that is not reserved."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"hospital '{name}' is named twice. Every hospital needs a name of its own.")
        if not name or name in NOT_HOSPITALS:
            raise ConfigError(f"'{name}' cannot be the name of a hospital.")


def refuse_pooled(config: Config) -> None:
    if build_method(config).pooled:
        raise ConfigError(
            f"method '{config.method.get('name')}' pools all cases in one place, which hospitals do not "
            "allow. Use it with wardround train, on cases you hold yourself."
        )


def run_id(folder: Path, resume: bool) -> str:
    """The name under which hospitals keep what belongs to this run; it stays when the run is resumed."""
    path = folder / "run_id.txt"
    if resume and path.exists():
        return path.read_text(encoding="utf-8").strip()
    run = secrets.token_hex(8)
    write_text(path, run + "\n")
    return run


def open_own_client(config: Config) -> InProcess | None:
    """The server's own labelled cases, for methods that need some."""
    if "proxy" not in build_method(config).needs or config.data.proxy is None:
        return None
    if config.data.hospitals:
        raise ConfigError(
            f"data.proxy is '{config.data.proxy}', but with data.hospitals the organiser has no cases. "
            "Set data.federation to a federation.yaml with that centre instead."
        )
    host = Host(config, config.folder / "clients", [PROXY])
    return InProcess(host, Spilling(config.folder / "exchange" / "own"))  # not among hospitals' replies


def find_rehearsed_pictures(kits: Path, folder: Path, name: str) -> Path:
    """Where a hospital on this machine leaves its pictures of a run."""
    run = run_id(folder, resume=True)
    return kits / name / "state" / file_name(run) / file_name(name) / PICTURES
