"""Hospitals that rejoin a running job, or join it late.

FLARE starts a job's process on the hospitals it knows when the job begins, once. A hospital whose machine
or process was restarted registers again, under a new token, and is then left out. This component of the
organiser's server asks every hospital that sends a heartbeat which jobs it runs, and starts the running
job where it is missing: deploy, take the hospital into the job's list, start. The job's own process
learns the new token from that list (`FlareChannel` asks for it).

It also keeps one hospital from ending the job for all: FLARE fails a job when one hospital's job process
fails.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import AdminCommandNames, RunProcessKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.job_scheduler_spec import DispatchInfo
from nvflare.private.admin_defs import Message, MsgHeader, ReturnCode
from nvflare.private.defs import RequestHeader, TrainingTopic
from nvflare.private.fed.utils.fed_utils import set_message_security_data

ASK_SECONDS = 4.0  # between two questions to the same hospital
REPLY_SECONDS = 10.0
log = logging.getLogger(__name__)


class RejoinMonitor(FLComponent):  # type: ignore[misc]
    """Part of the server's own process; named in its local/resources.json."""

    def __init__(self) -> None:
        super().__init__()
        self._signs: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._asked: dict[str, float] = {}
        self._engine: Any = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.SYSTEM_START:
            self._engine = fl_ctx.get_engine()
            threading.Thread(target=self._work, name="wardround-rejoin", daemon=True).start()
        elif event_type == EventType.JOB_STARTED:
            self._release_outcomes()
        elif event_type == EventType.CLIENT_HEARTBEAT_PROCESSED:
            peer = fl_ctx.get_peer_context()
            if peer is not None and self._engine is not None and self._engine.run_processes:
                self._signs.put(peer.get_identity_name())

    def _release_outcomes(self) -> None:
        """A job ends when the server says so; it neither waits for hospitals nor fails with one."""
        runner = self._engine.job_runner
        for job_id in list(self._engine.run_processes):
            for client in list(self._engine.client_manager.clients.values()):
                runner.resolve_client_outcome(job_id, client.name)

    def _work(self) -> None:
        while True:
            hospital = self._signs.get()
            now = time.monotonic()
            if now - self._asked.get(hospital, -ASK_SECONDS) < ASK_SECONDS:
                continue
            self._asked[hospital] = now
            try:
                self._look_after(hospital)
            except Exception:  # retried at its next heartbeat
                log.warning("%s could not rejoin yet", hospital, exc_info=True)

    def _look_after(self, hospital: str) -> None:
        jobs = [job for job in list(self._engine.job_runner.running_jobs.values()) if self._is_running(job)]
        if not jobs:
            return
        running = self._jobs_at(hospital)
        for job in jobs:
            if running is not None and job.job_id not in running and self._is_running(job):
                self._start(hospital, job)

    def _is_running(self, job: Any) -> bool:
        process = self._engine.run_processes.get(job.job_id)
        return process is not None and not process.get(RunProcessKey.PROCESS_FINISHED) and not job.run_aborted

    def _ask(self, hospital: str, message: Message) -> Any:
        """The hospital's reply, or None."""
        client = self._engine.get_client_from_name(hospital)
        if client is None:
            return None
        replies = self._engine.server.admin_server.send_requests_and_get_reply_dict(
            {client.token: message}, timeout_secs=REPLY_SECONDS
        )
        return replies.get(client.token)

    def _jobs_at(self, hospital: str) -> set[str] | None:
        reply = self._ask(hospital, Message(topic=TrainingTopic.CHECK_STATUS, body=""))
        if reply is None:
            return None
        state = json.loads(reply.body)
        return {item["job_id"] for item in state.get("running_jobs", [])}

    def _start(self, hospital: str, job: Any) -> None:
        with self._engine.new_context() as fl_ctx:
            if not self._deploy(hospital, job, fl_ctx):
                return
            offers = self._engine.check_client_resources(job, {hospital: {}}, fl_ctx)
            ready, token = offers.get(hospital, (False, ""))
            if not ready:
                log.warning("%s has no resources for job %s now", hospital, job.job_id)
                return
            self._admit(hospital, job)
            sites = {hospital: DispatchInfo(app_name="app", resource_requirements={}, token=token)}
            replies = self._engine.start_client_job(job, sites, fl_ctx)
        if replies and replies[0].reply is not None:
            log.info("%s rejoined job %s: %s", hospital, job.job_id, replies[0].reply.body)

    def _deploy(self, hospital: str, job: Any, fl_ctx: FLContext) -> bool:
        message = Message(topic=TrainingTopic.DEPLOY, body=job.get_application("app", fl_ctx))
        message.set_header(RequestHeader.REQUIRE_AUTHZ, "true")
        message.set_header(RequestHeader.ADMIN_COMMAND, AdminCommandNames.SUBMIT_JOB)
        message.set_header(RequestHeader.JOB_ID, job.job_id)
        message.set_header(RequestHeader.APP_NAME, "app")
        set_message_security_data(message, job, fl_ctx)
        reply = self._ask(hospital, message)
        done = reply is not None and reply.get_header(MsgHeader.RETURN_CODE, ReturnCode.OK) == ReturnCode.OK
        if not done:
            why = reply.body if reply else "no reply"
            log.warning("%s did not accept job %s: %s", hospital, job.job_id, why)
        return done

    def _admit(self, hospital: str, job: Any) -> None:
        """Put the hospital's current token into the job's list, and drop its former ones."""
        client = self._engine.get_client_from_name(hospital)
        with self._engine.lock:
            process = self._engine.run_processes[job.job_id]
            before = process[RunProcessKey.PARTICIPANTS].items()
            others = {token: other for token, other in before if other.name != hospital}
            process[RunProcessKey.PARTICIPANTS] = members = {**others, client.token: client}
        job.meta[JobMetaKey.JOB_CLIENTS] = [member.to_dict() for member in members.values()]
