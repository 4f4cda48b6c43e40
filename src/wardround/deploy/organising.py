"""The organiser's commands: submit a run, follow it, query it, stop it."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from wardround.config import Config
from wardround.config_file import load_config, resolve
from wardround.configuring.budget import parse_budget
from wardround.configuring.run_plan import RunPlan, plan_hospitals
from wardround.data.settings import TRAVELLING
from wardround.deploy.conducting import refuse_pooled
from wardround.deploy.job_queue import JobQueue
from wardround.deploy.kits.kit import Kit
from wardround.deploy.live_file import FINAL, Live, follow, is_past_registering, read_live
from wardround.deploy.survey.proposals import HospitalProposal, complete_prepare
from wardround.deploy.survey.proposing import CommonSections
from wardround.deploy.survey.survey_file import SURVEY, Survey, load_survey
from wardround.engine.outcome import Listener
from wardround.engine.run_folder import check_folder
from wardround.errors import ConfigError, WardroundError
from wardround.files import file_name, write_json
from wardround.prediction.evaluating import check_folder as check_evaluation_folder
from wardround.text import suggest

HOSPITALS = "hospitals.json"  # in the run folder: who was asked to take part
GROWTH = 1.25  # cases a hospital may have when it trains, times those it had at the survey
ASK_SECONDS = 1.0  # between two looks whether the run's process is still there


def make_paths_absolute(config: Config) -> Config:
    """The same configuration with paths that are valid in every process of this machine."""
    data, model = config.data, config.model
    changes: dict[str, Any] = {"output": config.folder.absolute()}
    if data.federation is not None:
        changes["data"] = data.model_copy(update={"federation": data.federation.absolute()})
    if model.weights is not None:
        changes["model"] = model.model_copy(update={"weights": model.weights.absolute()})
    return config.model_copy(update=changes)


def place_at_organiser(config: Config, kit: Kit) -> Config:
    """The run in the organiser's kit; cases that are not here are at the hospitals."""
    data = config.data
    if data.federation is not None and not data.federation.exists():
        kept = data.model_dump(mode="json", include={"splits", *TRAVELLING})
        data = type(data).read({"hospitals": True, **kept}, "data.")
    changes = {"data": data, "output": kit.runs / file_name(config.name)}
    return make_paths_absolute(config.model_copy(update=changes))


def refuse_second(config: Config, kit: Kit, overwrite: bool, *, is_evaluation: bool = False) -> None:
    """A run of the same name is continued or replaced, never mixed with another."""
    if is_evaluation:
        check_evaluation_folder(config.folder, overwrite)
        return
    if (config.folder / "config.yaml").exists() and not overwrite:
        raise ConfigError(
            f"{config.folder} already holds a run. Continue it with: wardround submit --resume "
            f"{config.folder.name} --kit {kit.folder}; replace it with --overwrite; or give this one a name "
            "of its own: --set name=..."
        )


class Submission:
    """A run submitted to the server."""

    def __init__(self, queue: JobQueue, config: Config, job: str) -> None:
        self.config = config
        self.job = job
        self._queue = queue
        self._looked = time.monotonic()
        self._stop_wanted = False

    def follow(self, listener: Listener | None, say: Callable[[str], None] = lambda line: None) -> str:
        """Show it until it is done or stopped."""
        return follow(self.config, self.job, listener, ended=self._ended, say=say)

    def stop(self) -> None:
        """Let the run end after this round, with a checkpoint; before the first one, at once.

        The request goes out with the next look: this may be called in the middle of anything.
        """
        self._stop_wanted = True

    def _pass_on_stop(self) -> None:
        facts = read_live(self.config.folder)
        if facts is None or facts.get("job") != self.job or not is_past_registering(facts):
            raise KeyboardInterrupt  # there is no round to finish
        self._stop_wanted = False
        with contextlib.suppress(WardroundError):  # it has just ended
            self._queue.ask(self.job, "stop")

    def _ended(self) -> str | None:
        if self._stop_wanted:
            self._pass_on_stop()
        if time.monotonic() - self._looked < ASK_SECONDS:
            return None
        self._looked = time.monotonic()
        if not self._queue.is_server_running():
            return (
                f"the organiser's server has ended ({self._queue.kit.folder}). The last whole round is safe; "
                "continue with --resume."
            )
        if self._queue.find_state(self.job) != "ended":
            return None
        facts = read_live(self.config.folder)
        if facts is not None and facts.get("job") == self.job and facts["state"] in FINAL:
            return None
        return (
            "the run's process on the server ended; the last whole round is safe. Look at logs/run.log in "
            "the organiser's kit, then continue with --resume."
        )


def parse_hospitals(text: str) -> list[str]:
    """The hospitals of `--hospitals north,south`, each once."""
    names = {name.strip() for name in text.split(",")} - {""}
    if not names:
        raise ConfigError("--hospitals names no hospital. Write it as --hospitals north,south.")
    return sorted(names)


def choose_hospitals(
    queue: JobQueue, config: Config, asked: Sequence[str] | None, *, resume: bool
) -> list[str]:
    """The hospitals named; of a run that is resumed its own; else those that are connected."""
    file = config.folder / HOSPITALS
    if asked:
        names = sorted(asked)
        if not resume:  # after a crash they may be on their way back
            refuse_unknown(names, queue.connected())
    elif resume and file.exists():
        names = json.loads(file.read_text(encoding="utf-8"))
    else:
        names = sorted(queue.connected())
    names = [name for name in names if name not in config.without]
    if len(names) < config.min_clients:
        here = f"connected: {', '.join(names)}" if names else "no hospital is connected"
        raise ConfigError(
            f"min_clients is {config.min_clients}, but {here}. Is `wardround join KIT` running there?"
        )
    return names


def refuse_running(queue: JobQueue, config: Config) -> None:
    """A second job for a run in progress would wait silently, and then be refused."""
    facts = read_live(config.folder)
    if facts is None or facts.get("state") in FINAL:
        return
    if (
        queue.find_state(str(facts.get("job"))) == "ended"
    ):  # live.json cannot tell that its process was killed
        return
    name, kit = config.folder.name, queue.kit.folder
    raise ConfigError(
        f"run '{name}' is in progress. See it with: wardround status --watch --kit {kit}; end it first with: "
        f"wardround stop {name} --kit {kit}"
    )


def refuse_unknown(names: Sequence[str], connected: Collection[str]) -> None:
    """A run would wait for a hospital that never connects, and then fail or continue without it."""
    away = [name for name in names if name not in connected]
    if away:
        here = ", ".join(sorted(connected)) or "none"
        raise ConfigError(
            f"--hospitals names '{away[0]}', which is not connected.{suggest(away[0], sorted(connected))} "
            f"Connected: {here}. Is `wardround join KIT` running there?"
        )


def submit(
    queue: JobQueue,
    config: Config,
    names: Sequence[str],
    *,
    resume: bool = False,
    overwrite: bool = False,
    from_round: int | None = None,
    kits: Path | None = None,
    proposals: Mapping[str, HospitalProposal] | None = None,
    **more: Any,
) -> Submission:
    """Submit a run to the server.

    from_round: resume after this round, not the last; kits: of all hospitals, where they are on this machine
    (a rehearsal); proposals: what each hospital must accept first; more: what makes it a survey or an
    evaluation (`kind`).
    """
    refuse_pooled(config)
    if not more:
        check_folder(config, resume, overwrite)
    proposed = {name: one.model_dump(mode="json") for name, one in (proposals or {}).items()}
    args = {
        "config": resolve(config),
        "names": sorted(names),
        "resume": resume,
        "overwrite": overwrite,
        "from_round": from_round,
        "kits": None if kits is None else str(kits.absolute()),
        "proposals": proposed or None,
        **more,
    }
    write_json(config.folder / HOSPITALS, sorted(names))
    job = queue.make_id()
    Live(config.folder / "live.json", job=job, rounds=config.rounds).say(state="queued")
    queue.submit(job, args)
    return Submission(queue, config, job)


# What a survey proposes


def find_survey(kit: Kit) -> Survey | None:
    """The last survey of the organiser's hospitals, if there was one."""
    path = kit.survey / SURVEY
    return load_survey(path) if path.exists() else None


def configure_survey(kit: Kit) -> Config:
    """The settings of a survey, which hospitals see by its name alone."""
    values = {"name": "survey", "data": {"hospitals": True}, "min_clients": 1, "output": str(kit.survey)}
    return make_paths_absolute(load_config(values))


def use_survey(config: Config, survey: Survey | None) -> Config:
    """The run with what the survey says: names, preparation, numbers of cases; its own settings win."""
    data = config.data
    if survey is None or not data.hospitals:
        return config
    found = {name: one.fingerprint.cases for name, one in survey.hospitals.items()}
    said = {name: math.ceil(GROWTH * cases) for name, cases in found.items() if isinstance(cases, int)}
    limits = config.limits.model_copy(update={"cases": said | config.limits.cases})
    config = config.model_copy(update={"limits": limits})
    if not survey.common.class_names:
        return config
    changes: dict[str, Any] = {}
    if data.common is None:
        changes["common"] = describe_common(survey)
    changes["prepare"] = complete_prepare({**survey.common.prepare, **(data.prepare or {})})
    plain = data.model_dump(mode="json", include={"hospitals", *TRAVELLING})
    return config.model_copy(update={"data": type(data).read({**plain, **changes}, "data.")})


def describe_common(survey: Survey) -> dict[str, Any]:
    return {"classes": survey.common.class_names, "channels": survey.common.channel_names}


def plan_survey(path: Path, name: str, budget: str | None, overrides: Sequence[str] | None) -> RunPlan:
    """A run planned from a survey.json; budget: quick where none is given."""
    found = load_survey(path)
    data = {"hospitals": True, "common": describe_common(found)}
    wanted = parse_budget("quick" if budget is None else budget)
    return plan_hospitals(found.join(), name, path, data, wanted, overrides or [])


def list_proposals(
    config: Config, survey: Survey | None, names: Sequence[str]
) -> dict[str, HospitalProposal]:
    """What each hospital is asked to accept before the run; nothing where the run has no common names."""
    asked = config.data.common
    if asked is None:
        return {}
    common = CommonSections() if survey is None else survey.common
    prepare = config.data.prepare or {}
    if (common.class_names, common.channel_names) != (list(asked.classes), list(asked.channels)):
        same = {"classes": dict(zip(asked.classes, asked.classes, strict=True))}
        same["channels"] = dict(zip(asked.channels, asked.channels, strict=True))
        return {name: HospitalProposal(**same, prepare=prepare) for name in names}
    return {name: common.propose_to(name, prepare) for name in names}


def load_stored_config(kit: Kit, name: str) -> Config:
    """The configuration of a run in the organiser's kit."""
    folder = kit.runs / file_name(name)
    if not (folder / "config.yaml").exists():
        runs = sorted(path.parent.name for path in kit.runs.glob("*/config.yaml"))
        known = f" Its runs: {', '.join(runs)}." if runs else " It has none yet."
        raise ConfigError(f"{kit.folder} has no run '{name}'.{known}")
    return load_config(folder / "config.yaml").model_copy(update={"output": folder.absolute()})
