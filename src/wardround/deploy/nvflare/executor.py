"""The hospital's side of a job: FLARE's process that calls the site."""

from __future__ import annotations

import logging
import time
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.apis.signal import Signal

from wardround.deploy.nvflare.job import SLOT
from wardround.deploy.nvflare.shareable import clear_content, from_shareable, to_shareable
from wardround.deploy.processes import end_with_parent
from wardround.deploy.site import open_site

SERVER = "server"  # as FLARE calls it
LARGE = 16 * 2**20
TURN_SECONDS = 0.1
log = logging.getLogger(__name__)


def wait_for_turn(fl_ctx: FLContext, letter: str, abort_signal: Signal) -> None:
    """Large replies go to the server one after the other: its memory holds one, not one of each hospital."""
    while not abort_signal.triggered:
        question = Shareable()
        question.set_header(ReservedHeaderKey.TASK_ID, letter)
        replies = fl_ctx.get_engine().send_aux_request(
            targets=[SERVER], topic=SLOT, request=question, timeout=5.0, fl_ctx=fl_ctx, optional=True
        )
        answer = (replies or {}).get(SERVER)
        if isinstance(answer, Shareable) and answer.get_return_code() == ReturnCode.OK:
            return
        time.sleep(TURN_SECONDS)


class WardroundExecutor(Executor):  # type: ignore[misc]
    """Passes each request to the site and returns its answer; nothing a site does can end the job."""

    def __init__(self) -> None:
        super().__init__()
        self._site: Any = None
        end_with_parent()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            self._open()

    def _open(self) -> Any:
        """The site, opened once: models and data stay warm for the whole job."""
        if self._site is None:
            self._site = open_site()
        return self._site

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        try:
            request = from_shareable(shareable)
            clear_content(shareable)  # FLARE keeps this object until the answer is sent
            reply = self._open().answer(request)
            del request
            if reply.num_bytes >= LARGE:
                wait_for_turn(fl_ctx, shareable.get_header(ReservedHeaderKey.TASK_ID), abort_signal)
            return to_shareable(reply)
        except Exception as error:  # a site answers even its failures; this is for what is wrong around it
            log.exception("the request could not be answered")
            return make_reply(ReturnCode.EXECUTION_EXCEPTION, headers={"reason": type(error).__name__})
