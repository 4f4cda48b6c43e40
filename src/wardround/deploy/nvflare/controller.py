"""The organiser's side of a job: FLARE's process that runs the experiment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.apis.wf_comm_spec import WFCommSpec

from wardround.config_file import load_config
from wardround.deploy.conducting import conduct
from wardround.deploy.nvflare.channel import HOLD_SECONDS, FlareChannel
from wardround.deploy.nvflare.job import LETTER, SLOT, read_arguments
from wardround.deploy.run_process import write_run_report
from wardround.errors import WardroundError


class WardroundController(Controller):  # type: ignore[misc]
    """Runs the experiment with the hospitals at the other end of a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.experiment: Any = None
        self._stop_asked = False
        self._abort: Signal | None = None
        self._sync_clients: Callable[[], None] = lambda: None  # until FLARE's engine is there
        self.channel = FlareChannel(self._renew, self._is_ended)

    def set_communicator(self, communicator: WFCommSpec) -> None:
        communicator.controller = self  # FLARE keeps it as a listener
        super().set_communicator(self.channel)

    def start_controller(self, fl_ctx: FLContext) -> None:
        # By default FLARE ends everybody's job when one hospital answers with one of these.
        fl_ctx.get_prop(FLContextKey.RUNNER).ABORT_RETURN_CODES = []
        engine = fl_ctx.get_engine()
        self._sync_clients = engine.sync_clients_from_main_process
        engine.register_aux_message_handler(topic=SLOT, message_handle_func=self._slot)
        engine.register_aux_message_handler(topic=LETTER, message_handle_func=self._letter)
        for command in ("status", "stop"):
            engine.register_app_command(f"wardround.{command}", self._command)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to release: the run ends with `control_flow`."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        self._abort = abort_signal
        try:
            self.conduct(Path(fl_ctx.get_prop(FLContextKey.APP_ROOT)), fl_ctx.get_job_id())
        except WardroundError as error:
            self.system_panic(str(error), fl_ctx)

    def conduct(self, app: Path, job: str) -> None:
        arguments = read_arguments(app)
        conduct(
            self.channel,
            load_config(arguments["config"]),
            names=arguments["names"],
            resume=arguments["resume"],
            job=job,
            on_experiment=self._begin,
            on_done=write_run_report,
        )

    def _begin(self, experiment: Any) -> None:
        self.experiment = experiment
        if self._stop_asked:
            experiment.stop_requested = True

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        self.channel.mailbox.refuse(client.name)

    def _command(self, topic: str, data: Any, fl_ctx: FLContext) -> dict[str, Any]:
        """A command of the organiser; must be quick, FLARE holds a lock meanwhile."""
        if topic == "wardround.stop":
            self._stop_asked = True
            if self.experiment is not None:
                self.experiment.stop_requested = True
        return {"alive": dict(self.channel.alive()), "stopping": self._stop_asked}

    def _slot(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        granted = self.channel.mailbox.may_send(str(request.get_header(ReservedHeaderKey.TASK_ID)))
        return make_reply(ReturnCode.OK if granted else ReturnCode.SERVER_NOT_READY)

    def _is_ended(self) -> bool:
        return self._abort is not None and bool(self._abort.triggered)

    def _renew(self) -> None:
        self._sync_clients()

    def _letter(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        hospital = str(request.get_peer_prop(ReservedKey.IDENTITY_NAME, ""))
        is_there = self.channel.mailbox.wait_for_letter(hospital, HOLD_SECONDS)
        return make_reply(ReturnCode.OK if is_there else ReturnCode.SERVER_NOT_READY)
