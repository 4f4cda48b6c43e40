"""Ray: each run is a task, which starts a process of ours and waits for it.

A task carries one string, the path of its request.
"""

from __future__ import annotations

import logging
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wardround.cluster.jobs import cell_command
from wardround.errors import ConfigError
from wardround.tables import one_line


def run_process(request: str) -> str:
    """On a node: do a request; how its process ended, in words."""
    # waiting threads must sleep, not spin: runs share the cores
    environment = {**os.environ, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    done = subprocess.run(
        cell_command(request),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
    )
    written = done.stderr.strip().splitlines()
    return f"exit code {done.returncode} on {platform.node()}{': ' + written[-1] if written else ''}"


class RayCluster:
    """options: address, as `ray.init` has it; num_cpus, num_gpus: of one run."""

    name = "ray"

    def __init__(self, ray: Any, options: Mapping[str, Any]) -> None:
        self._ray = ray
        self._resources = {"num_cpus": options.get("num_cpus", 1.0), "num_gpus": options.get("num_gpus", 0.0)}
        self._is_ours = not ray.is_initialized()
        if not self._is_ours:
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            address = options.get("address", "auto")
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise ConfigError(
                f"Ray cannot be reached ({one_line(str(error).strip())[:200]}). Start this on a node of the "
                "cluster (`ray start` makes one), or name it: --on-options address=HOST:PORT."
            ) from None

    def submit(self, name: str, request: Path, folder: Path) -> Any:
        # lost tasks are submitted again by us, as on any cluster
        task = self._ray.remote(run_process).options(name=name, max_retries=0, **self._resources)
        return task.remote(str(request))

    def find_end(self, job: Any) -> str | None:
        if not self._ray.wait([job], timeout=0)[0]:
            return None
        try:
            return str(self._ray.get(job))
        except self._ray.exceptions.TaskCancelledError:
            return "cancelled"
        except Exception as error:
            return type(error).__name__

    def describe(self, job: Any) -> str:
        return f"Ray task {job.task_id().hex()}"

    def cancel(self, job: Any) -> None:
        self._ray.cancel(job, force=True)

    def close(self) -> None:
        if self._is_ours:
            self._ray.shutdown()
