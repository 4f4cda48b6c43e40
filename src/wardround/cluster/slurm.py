"""SLURM, through submitit: each run is a job of `sbatch`.

submitit writes its job as a pickle; it holds the command line and nothing else, and we read none.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wardround.cluster.jobs import cell_command
from wardround.errors import ConfigError

ASK_SECONDS = 30.0  # between two calls of sacct, each of which is for all jobs
NO_LIMIT = 10**6  # minutes


class SlurmCluster:
    """options: of sbatch, by their long names; `executor: local` runs jobs on this machine, without SLURM."""

    name = "slurm"

    def __init__(self, submitit: Any, options: Mapping[str, Any]) -> None:
        self._submitit = submitit
        self._options = {key: value for key, value in options.items() if key != "executor"}
        self._is_local = options.get("executor") == "local"
        self._asked = 0.0
        logging.getLogger("submitit").setLevel(logging.ERROR)
        if not self._is_local and submitit.SlurmExecutor.affinity() < 0:
            raise ConfigError(
                "srun is not installed here: start this on a login node of the SLURM cluster. "
                "Without one, --on-options executor=local tries the same on this machine."
            )

    def submit(self, name: str, request: Path, folder: Path) -> Any:
        if self._is_local:
            executor = self._submitit.LocalExecutor(folder / "slurm")
            executor.update_parameters(timeout_min=NO_LIMIT, stderr_to_stdout=True)
        else:
            executor = self._submitit.SlurmExecutor(folder / "slurm")
            executor.update_parameters(
                job_name=f"wardround-{name}",
                time=None,  # theirs is five minutes; among the options, if there is one
                stderr_to_stdout=True,
                additional_parameters=self._options,
            )
        # a job that submits jobs must not pass its own limits on
        is_job = "SLURM_JOB_ID" in os.environ
        environment = self._submitit.helpers.clean_env() if is_job else contextlib.nullcontext()
        try:
            with environment:
                return executor.submit(self._submitit.helpers.CommandFunction(cell_command(str(request))))
        except Exception as error:  # what sbatch says
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigError(
                f"SLURM refuses the job of '{name}': {lines[-1]}. Change --on-options; where it limits how "
                "many jobs you may submit, give --jobs."
            ) from None

    def find_end(self, job: Any) -> str | None:
        if time.monotonic() - self._asked > ASK_SECONDS:
            self._asked = time.monotonic()
            job.get_info(mode="force")  # asks for all
        state = str(job.state).lower()
        return state if job.done() or state.startswith("preempted") else None

    def describe(self, job: Any) -> str:
        return f"SLURM job {job.job_id} (log: {job.paths.stdout})"

    def cancel(self, job: Any) -> None:
        job.cancel(check=False)

    def close(self) -> None: ...
