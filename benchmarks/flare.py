"""A run over real NVIDIA FLARE processes on this machine: its own provisioning, a server, the hospitals.

    python benchmarks/flare.py RUN.yaml       # as `wardround rehearse` does it without FLARE

Kits and logs are in OUTPUT/rehearsal/kits. Everything is started here and ended here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml
from nvflare.fuel.flare_api.flare_api import new_secure_session

from wardround.config_file import load_config
from wardround.data.opening import open_federation
from wardround.deploy.nvflare.job import CONTROLLER, EXECUTOR, place_on_server, write_job
from wardround.deploy.processes import free_ports
from wardround.deploy.rehearsal import fix_threads, render_site
from wardround.files import parse_json, write_json

SERVER, ADMIN = "localhost", "admin@org.example"
BUILDERS = ("workspace.WorkspaceBuilder", "static_file.StaticFileBuilder", "cert.CertBuilder")
START_SECONDS = 120.0
END_SECONDS = 3600.0


def provision(folder: Path, names: Sequence[str]) -> Path:
    """Startup kits by FLARE's own command, with wardround's two classes allowed; the folder of all kits."""
    (port,) = free_ports(1)
    people: list[dict[str, Any]] = [{"name": name, "type": "client", "org": "org"} for name in names]
    people.append({"name": SERVER, "type": "server", "org": "org", "fed_learn_port": port})
    people.append({"name": ADMIN, "type": "admin", "org": "org", "role": "lead"})
    builders: list[dict[str, Any]] = [{"path": f"nvflare.lighter.impl.{name}"} for name in BUILDERS]
    builders[1]["args"] = {"config_folder": "config"}
    project = {"api_version": 3, "name": "trial", "description": "", "participants": people}
    (folder / "project.yml").write_text(yaml.safe_dump({**project, "builders": builders}))
    call = "import sys; from nvflare.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", call, "provision", "-p", "project.yml", "-w", "made"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=START_SECONDS)
    kits = (folder / "made" / "trial" / "prod_00").rename(folder / "kits")
    for name in (SERVER, *names):
        local = kits / name / "local"
        text = (local / "resources.json.default").read_text()
        allowed = parse_json(text.replace("/tmp/nvflare", str(folder / "store")))
        allowed["class_allow_list"].append(CONTROLLER if name == SERVER else EXECUTOR)
        write_json(local / "resources.json", allowed)
    return kits


@contextmanager
def processes(kits: Path, names: Sequence[str]) -> Iterator[None]:
    """FLARE's server and clients, as its start scripts start them; all ended with the block."""
    environment = {
        **os.environ,
        "MALLOC_ARENA_MAX": "4",  # as those scripts set it
        "WARDROUND_SITE": str(kits / "{site}" / "site.yaml"),
        "WARDROUND_STATE": str(kits.parent / "state"),
    }
    started = []
    try:
        for name in (SERVER, *names):
            kind = "server" if name == SERVER else "client"
            words = ["-m", f"nvflare.private.fed.app.{kind}.{kind}_train", "-m", str(kits / name)]
            words += [
                "-s",
                f"fed_{kind}.json",
                "--set",
                "secure_train=true",
                "org=org",
                "config_folder=config",
            ]
            words += [] if name == SERVER else [f"uid={name}"]
            with (kits / name / "process.log").open("wb") as log:
                started.append(
                    psutil.Popen(
                        [sys.executable, "-u", *words],
                        cwd=kits / name,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    )
                )
        yield
    finally:
        every = [each for top in started if top.is_running() for each in (*top.children(True), top)]
        for each in every:
            each.kill()
        psutil.wait_procs(every, timeout=10)


def conduct(kits: Path, job: Path, names: Sequence[str]) -> None:
    """Submit the job when all hospitals are there, and wait for its end."""
    session = new_secure_session(ADMIN, str(kits / ADMIN), timeout=START_SECONDS)
    try:
        deadline = time.monotonic() + START_SECONDS
        while len(session.get_system_info().client_info) < len(names):
            if time.monotonic() > deadline:
                raise SystemExit(f"not all hospitals came within {START_SECONDS:g} s")
            time.sleep(0.5)
        job_id = session.submit_job(str(job))
        session.monitor_job(job_id, timeout=END_SECONDS)
        status = session.get_job_meta(job_id)["status"]
    finally:
        session.close()
    if status != "FINISHED:COMPLETED":
        raise SystemExit(f"the job ended as {status}")


def main() -> None:
    config = fix_threads(load_config(Path(sys.argv[1])))
    names = sorted(open_federation(config.data, config.seed).names)
    folder = config.folder.absolute() / "rehearsal"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    kits = provision(folder, names)
    for name in names:
        (kits / name / "site.yaml").write_text(render_site(config, name))
    write_job(folder / "job", place_on_server(config, None), names)
    with processes(kits, names):
        conduct(kits, folder / "job", names)


if __name__ == "__main__":
    main()
