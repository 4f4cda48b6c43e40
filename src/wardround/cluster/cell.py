"""The process of one run on a node of a cluster: `python -m wardround.cluster.cell REQUEST.json`.

The request is a file that `jobs` wrote; answers are lines of the .jsonl beside it, as `batch_process` tells
them. It may be started again at any time, by us or by the cluster: the run continues after its last round.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wardround.batch import find_stage, is_in_use
from wardround.batch_process import Send, describe_error, do_run
from wardround.child_process import Line
from wardround.config_file import load_config

LOOK_SECONDS = 1.0


def do_cell(request: Line, send: Send) -> None:
    """What is left of the run, after another process that is still at it has ended."""
    try:
        config = load_config(request["config"], request["overrides"])
        while is_in_use(config.folder):
            time.sleep(LOOK_SECONDS)
        stage = find_stage(config.folder, config)
    except Exception as error:
        send({"end": describe_error(error)})
        return
    if stage == "done":
        send({"end": None})
    else:
        do_run({**request, "resume": stage == "unfinished"}, send)


def end_with_parent() -> None:
    """End this process when the one that started it has gone: the worker was killed, or the job cancelled."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=look, name="wardround-parent", daemon=True).start()


def main() -> None:
    end_with_parent()
    path = Path(sys.argv[1])
    answers = path.with_suffix(".jsonl")
    try:
        request = json.loads(path.read_text(encoding="utf-8"))
        os.chdir(request["working_directory"])
        answers.stat()
    except OSError as error:
        sys.exit(f"node {platform.node()} does not see {error.filename} ({error.strerror})")
    if Path(request["next"]).exists():
        return  # a later job does this run

    def send(line: Mapping[str, Any]) -> None:
        with answers.open("a", encoding="utf-8") as file:  # closed each time: other nodes then see it
            file.write(json.dumps(dict(line)) + "\n")

    logging.getLogger("wardround").setLevel(logging.ERROR)  # run.log has the rest
    send({"node": platform.node(), "pid": os.getpid()})
    do_cell(request, send)


if __name__ == "__main__":
    main()
