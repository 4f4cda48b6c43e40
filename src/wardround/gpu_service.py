"""CUDA's multi-process service, for runs that share one GPU.

Without it, kernels of different processes take turns; with it they run side by side, so that small networks
fill the GPU together. It belongs to the batch that started it: its pipes and logs are in a folder that only
this user can enter. A child process (`python -m wardround.gpu_service`) ends it when the batch ends or is
killed. Where the service is missing or fails, runs go on without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from wardround.child_process import ChildProcess, connect
from wardround.machine import kill

log = logging.getLogger(__name__)

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS, VISIBLE_GPUS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"
SWITCH = "WARDROUND_MPS"  # "off" in the environment: never start it
QUIT_SECONDS = 5.0

# A process that uses the GPU: libcuda alone, which starts sooner than PyTorch.
PROBE = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
"""


class GpuService:
    """The service of one batch."""

    def __init__(self) -> None:
        self._environment: dict[str, str] | None = None  # None: not tried yet
        self._keeper: ChildProcess | None = None

    def start(self) -> dict[str, str]:
        """Start it the first time; variables of processes that use it, none where it cannot be used."""
        if self._environment is None:
            self._environment = self._start()
        return self._environment

    def _start(self) -> dict[str, str]:
        if os.environ.get(SWITCH) == "off" or PIPES in os.environ:  # the user has one of his own
            return {}
        if shutil.which(CONTROL) is None:
            log.info("%s is not installed: runs that share the GPU take turns", CONTROL)
            return {}
        folder = Path(tempfile.mkdtemp(prefix="wardround-mps-"))  # 0700
        environment = {PIPES: str(folder / "pipes"), LOGS: str(folder / "logs")}
        for path in environment.values():
            Path(path).mkdir()
        self._keeper = ChildProcess("wardround.gpu_service", quiet=True)
        self._keeper.ask({"folder": str(folder), "environment": environment})
        # the service counts only the GPUs that it sees
        seen = {VISIBLE_GPUS: "0"} if os.environ.get(VISIBLE_GPUS) else {}
        try:
            call([CONTROL, "-d"], environment)
            call([CONTROL], environment, "get_server_list\n")
            call([sys.executable, "-c", PROBE], environment | seen)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("CUDA's multi-process service fails (%s): runs that share the GPU take turns", error)
            self.stop()
            return {}
        return environment | seen

    def stop(self) -> None:
        """End it; the processes that use it have ended."""
        if self._keeper is not None:
            self._keeper.stop()
            self._keeper = None


def call(command: list[str], environment: Mapping[str, str], text: str = "", seconds: float = 20.0) -> None:
    """Run a command to its end; CalledProcessError or TimeoutExpired where it fails."""
    subprocess.run(
        command,
        input=text,
        stdout=subprocess.DEVNULL,  # no pipe: the service stays behind and would hold it open
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=seconds,
        check=True,
        env={**os.environ, **environment},
    )


def main() -> None:
    """Wait until the batch has gone, then end its service and remove the folder."""
    requests, answer = connect()
    setup = next(requests, None)
    if setup is None:
        return
    answer({})
    for _ in requests:  # there are no others: the loop ends when the batch ends, or is killed
        pass
    environment = setup["environment"]
    try:
        call([CONTROL], environment, "quit\n", QUIT_SECONDS)
    except (OSError, subprocess.SubprocessError):
        kill_service(Path(environment[PIPES]))
    shutil.rmtree(setup["folder"], ignore_errors=True)


def kill_service(pipes: Path) -> None:
    """End a service that does not listen, or is not there."""
    with contextlib.suppress(OSError, ValueError):
        kill(int((pipes / f"{CONTROL}.pid").read_text(encoding="ascii")))


if __name__ == "__main__":
    main()
