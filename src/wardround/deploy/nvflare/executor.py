"""The hospital's side of a job: FLARE's process that calls the site."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.apis.signal import Signal

from wardround.deploy.kits.kit import SITE
from wardround.deploy.nvflare.job import LETTER, POLL_SECONDS, SERVER, SLOT
from wardround.deploy.nvflare.shareable import clear_content, from_shareable, to_shareable
from wardround.deploy.nvflare.signing import find_identity
from wardround.deploy.site import Site
from wardround.deploy.site_file import load_site
from wardround.errors import ConfigError, WardroundError
from wardround.files import file_name

STATE = "WARDROUND_STATE"  # environment variable of FLARE's client, beside SITE
LARGE = 16 * 2**20
TURN_SECONDS = 0.1
ANSWER_SECONDS = 5.0  # for the server's answer, which it may hold for a while
log = logging.getLogger(__name__)


def open_site(name: str, startup: Path | None = None) -> Site:
    """The site of a FLARE client; the environment names its rules and the folder for memory and ledger.

    startup: its startup kit, with the key that it signs with in secure sums.

    Several clients of one machine may share the environment: `{site}` in the path of the rules stands for
    the client's name, and each has a folder of its own for its memory.
    """
    rules, state = os.environ.get(SITE), os.environ.get(STATE)
    if not rules or not state:
        raise ConfigError(
            f"{SITE if not rules else STATE} is not set. Set {SITE} to this hospital's site.yaml and "
            f"{STATE} to a folder that only this account can read, then start FLARE's client again."
        )
    folder = Path(state) / file_name(name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    identity = None if startup is None else find_identity(startup)
    return Site(name, load_site(Path(rules.replace("{site}", file_name(name)))), folder, identity)


def ask_server(fl_ctx: FLContext, topic: str, letter: str = "") -> bool:
    """Whether the server says yes."""
    question = Shareable()
    question.set_header(ReservedHeaderKey.TASK_ID, letter)
    replies = fl_ctx.get_engine().send_aux_request(
        targets=[SERVER], topic=topic, request=question, timeout=ANSWER_SECONDS, fl_ctx=fl_ctx, optional=True
    )
    answer = (replies or {}).get(SERVER)
    return isinstance(answer, Shareable) and bool(answer.get_return_code() == ReturnCode.OK)


def wait_for_turn(fl_ctx: FLContext, letter: str, abort_signal: Signal) -> None:
    """Large replies go to the server one after the other: its memory holds one, not one of each hospital."""
    while not abort_signal.triggered and not ask_server(fl_ctx, SLOT, letter):
        time.sleep(TURN_SECONDS)


def wait_for_letter(fl_ctx: FLContext) -> None:
    """Return when there is work; the server holds the question, so that nothing is asked over and over."""
    began = time.monotonic()
    if not ask_server(fl_ctx, LETTER):
        time.sleep(max(0.0, began + POLL_SECONDS - time.monotonic()))  # it was not held


class WardroundExecutor(Executor):  # type: ignore[misc]
    """Passes each request to the site and returns its answer; nothing a site does can end the job."""

    def __init__(self) -> None:
        super().__init__()
        self._site: Site | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Open the site once: models and data stay warm for the whole job."""
        if event_type == EventType.BEFORE_PULL_TASK:
            wait_for_letter(fl_ctx)
        if event_type == EventType.START_RUN:
            try:
                workspace = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT)
                startup = None if workspace is None else Path(workspace.get_startup_kit_dir())
                self._site = open_site(fl_ctx.get_identity_name(), startup)
            except (WardroundError, OSError) as error:
                log.error("wardround takes no part in this job: %s", error)

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        if self._site is None:  # the reason is in the log
            return make_reply(ReturnCode.EXECUTION_EXCEPTION, headers={"reason": "no rules"})
        try:
            request = from_shareable(shareable)
            clear_content(shareable)  # FLARE keeps this object until the answer is sent
            reply = self._site.answer(request)
            del request
            if reply.num_bytes >= LARGE:
                wait_for_turn(fl_ctx, shareable.get_header(ReservedHeaderKey.TASK_ID), abort_signal)
            return to_shareable(reply)
        except Exception as error:  # a site answers even its failures; this is for what is wrong around it
            log.exception("the request could not be answered")
            return make_reply(ReturnCode.EXECUTION_EXCEPTION, headers={"reason": type(error).__name__})
