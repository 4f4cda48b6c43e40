"""Kits that must not work are refused within 10 s, by name, and everybody else trains on; the way through a proxy.

copied     a second process with north's kit, while north takes part
foreign    a kit of another project
expired    a kit whose certificate has run out, and one that runs out during its connection
revoked    `wardround revoke west` while west takes part; then west enrols again
proxy      two hospitals in a network namespace whose only way to the server's port 443 is an HTTP CONNECT proxy
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml
from common import (
    ENVIRONMENT,
    START_SECONDS,
    WARDROUND,
    Beside,
    Checks,
    Command,
    Deployment,
    Failed,
    fingerprint,
    settings,
    since,
    trained,
    until,
)

from wardround.deploy.kits.authority import Authority, write_manifest
from wardround.deploy.kits.kit import Kit, make_private, read_kit
from wardround.deploy.kits.project import load_project
from wardround.deploy.kits.provisioning import provision, put_certificate

NAMES, GUESTS = ["east", "north"], ["brief", "west"]
SECONDS = 10.0  # in which everything here is refused
LASTS = 20  # seconds that the certificate of `brief` is valid
PROXY = Path(__file__).parents[1] / "connect_proxy.py"
CONFIG = settings("beside", rounds=4, data={"phantom": {"hospitals": 2, "size": 32, "cases": 12}})


def is_refused(
    checks: Checks, command: Command, what: str, words: str, began: float, code: int | None = 2
) -> None:
    """The command says these words in time; code: with which it ends, None where it goes on for a while."""
    try:
        until(lambda: re.search(words, command.text), SECONDS, f"{what}: {words}")
    except Failed:
        checks.check(False, f"{what}: {command.text[-300:]}")
        return
    seconds = since(began)
    if code is not None:
        found = command.wait(SECONDS)
        checks.check(found == code, f"{what} ends with exit code {found}")
    line = next(line for line in command.text.splitlines() if re.search(words, line))
    checks.check(seconds <= SECONDS, f"{what} is refused: {line[-160:]}", seconds=seconds)


def wait_for_end_of_start(hospitals: Deployment, command: Command, what: str) -> float:
    """When a join has connected for the first time, or said why not: starting takes seconds of its own."""
    until(lambda: "connects to" in command.text or not command.is_running, START_SECONDS, f"{what} starts")
    return time.monotonic()


def copied(checks: Checks, hospitals: Deployment) -> None:
    """a copied kit"""
    folder = hospitals.folder / "copied" / "north"
    shutil.copytree(hospitals.kits / "north", folder, ignore=shutil.ignore_patterns("*.lock", "exchange"))
    command = hospitals.start("copied", "join", folder)
    began = wait_for_end_of_start(hospitals, command, "the copy")
    is_refused(
        checks,
        command,
        "a copy of north's kit",
        "refused: another process takes part as 'north'",
        began,
        None,
    )
    line = "north: a second process with the same kit was refused"
    until(lambda: line in hospitals.server.text, SECONDS, "the organiser is told")
    until(
        lambda: "refused a second process as 'north'" in hospitals.joined["north"].text,
        SECONDS,
        "north is told",
    )
    checks.check(
        hospitals.joined["north"].is_running,
        "organiser and north are told, and north goes on",
        seconds=since(began),
    )
    code = command.wait(60)
    checks.check(code == 1, f"the copy gives up by itself, with exit code {code}", seconds=since(began))


def foreign(checks: Checks, hospitals: Deployment) -> None:
    """a kit of another project"""
    project = load_project(hospitals.folder / "project.yaml")
    others = provision(project.model_copy(update={"project": "another"}), hospitals.folder / "others")
    began = time.monotonic()
    command = hospitals.start("foreign", "join", next(kit.folder for kit in others if kit.name == "north"))
    is_refused(checks, command, "north of another project", "has a certificate of another authority", began)


def give_certificate(hospitals: Deployment, kit: Kit, start: datetime, valid: timedelta) -> None:
    authority = Authority.load(hospitals.kits / ".authority")
    certificate, key = authority.issue(kit.name, kit.name, role="hospital", valid=valid, start=start)
    put_certificate(kit, certificate, key, authority)
    write_manifest(kit, authority)
    make_private(kit.folder)


def expired(checks: Checks, hospitals: Deployment) -> None:
    """an expired kit"""
    kit = hospitals.kit("brief")
    give_certificate(hospitals, kit, datetime.now(UTC) - timedelta(days=3), timedelta(days=2))
    began = time.monotonic()
    command = hospitals.start("expired", "join", kit.folder)
    is_refused(checks, command, "a kit that has expired", r"own.crt expired on 20\d\d", began)
    start = datetime.now(UTC)
    give_certificate(hospitals, kit, start, timedelta(seconds=LASTS))
    command = hospitals.start("brief", "join", kit.folder)
    until(lambda: "connected to" in command.text, LASTS, "brief connects")
    checks.check(
        "warning: the certificate of 'brief'" in command.text, "join warns of a certificate that ends soon"
    )
    said = hospitals.run("status", "--kit", hospitals.organiser).stdout
    checks.check("brief" in said and "0 days left: ask it to renew" in said, "and so does status")
    ends = time.monotonic() + (start + timedelta(seconds=LASTS) - datetime.now(UTC)).total_seconds()
    until(lambda: time.monotonic() > ends, LASTS + 5.0, "the certificate ends")
    is_refused(
        checks, command, "a certificate that ends meanwhile", "the certificate of 'brief' expired on", ends
    )


def revoked(checks: Checks, hospitals: Deployment) -> None:
    """a revoked kit"""
    command = hospitals.start("west", "join", hospitals.kits / "west")
    until(lambda: "west is connected" in hospitals.server.text, START_SECONDS, "west connects")
    began = time.monotonic()
    done = hospitals.run("revoke", "west", "--kits", hospitals.kits)
    checks.check(done.returncode == 0, f"revoke: {done.stdout.strip()[:100]}", seconds=since(began))
    is_refused(checks, command, "west, which took part", "the certificate of 'west' was revoked", began)
    checks.check(
        "west: its certificate was revoked; its connection is closed" in hospitals.server.text,
        "the organiser reads it too",
    )
    began = time.monotonic()
    again = hospitals.start("west-again", "join", hospitals.kits / "west")
    is_refused(checks, again, "west, started again", "the certificate of 'west' was revoked", began)
    hospitals.run("enrol", hospitals.kits / "west", "--renew")
    hospitals.run("sign", hospitals.kits / "west.request.json", "--kits", hospitals.kits)
    renewed = hospitals.start("west-renewed", "join", hospitals.kits / "west")
    until(lambda: "connected to" in renewed.text, START_SECONDS, "west connects with a new key")
    checks.check(renewed.is_running, "west, enrolled again, takes part")


def together(checks: Checks, hospitals: Deployment) -> None:
    """All of it beside runs of the others, which must not notice."""
    expected = trained(hospitals.folder, CONFIG)
    hospitals.serve()
    hospitals.join_all()
    with Beside(hospitals, CONFIG) as beside:
        for part in (copied, foreign, expired, revoked):
            if checks.wants(part.__name__):
                with checks.part(str(part.__doc__)):
                    part(checks, hospitals)
    beside.check(checks, expected)
    for name in NAMES:
        text = hospitals.joined[name].text
        checks.check(
            text.count("connected to") == 1 and "connection lost" not in text,
            f"{name} was connected throughout",
        )


# The proxy


class Networks:
    """Three network namespaces in a row: organiser - proxy - hospitals; nothing is forwarded between its ends."""

    def __init__(self) -> None:
        self.prefix = f"wr{os.getpid()}"
        self.names = {part: f"{self.prefix}{part}" for part in ("org", "way", "hos")}

    def __enter__(self) -> Networks:
        for name in self.names.values():
            run_ip("netns", "add", name)
            run_ip("-n", name, "link", "set", "lo", "up")
        for end, net in (("org", 1), ("hos", 2)):
            near, far = f"{self.prefix}{end[0]}0", f"{self.prefix}{end[0]}1"
            run_ip(
                "link",
                "add",
                near,
                "netns",
                self.names[end],
                "type",
                "veth",
                "peer",
                far,
                "netns",
                self.names["way"],
            )
            for link, part, last in ((near, end, 1), (far, "way", 2)):
                run_ip("-n", self.names[part], "addr", "add", f"10.77.{net}.{last}/24", "dev", link)
                run_ip("-n", self.names[part], "link", "set", link, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def inside(self, part: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[part]]


def run_ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
    except OSError as error:
        raise Failed(f"skipped: ip cannot be run ({error.strerror})") from None
    if done.returncode != 0:
        raise Failed(f"skipped: network namespaces cannot be made here ({done.stderr.strip()})")


class Placed:
    """A command in a namespace, with its output in a file."""

    def __init__(self, stack: ExitStack, log: Path, command: list[str], **more: str) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**ENVIRONMENT, **more},
            )
        stack.callback(self.process.wait)
        stack.callback(self.process.terminate)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")


def through_proxy(checks: Checks, folder: Path, networks: Networks) -> None:
    """Two hospitals train with a server on port 443, through the proxy alone."""
    config: dict[str, Any] = {**CONFIG, "name": "through", "rounds": 2}
    project = folder / "project.yaml"
    facts = {"project": "way", "organiser": {"host": "10.77.1.1", "port": 443}, "hospitals": NAMES}
    project.write_text(yaml.safe_dump(facts))
    provision(load_project(project), folder / "kits")
    rules = {"data": "phantom", "device": "cpu", "tasks": ["all"], "case_names": "keep", "min_cases": 0}
    address = "http://10.77.2.2:3128"
    for name, more in (("east", {"proxy": address}), ("north", {})):
        (folder / "kits" / name / "site.yaml").write_text(yaml.safe_dump({**rules, **more}))
    kit = read_kit(folder / "kits" / "organiser")
    with ExitStack() as stack:
        server = Placed(
            stack, folder / "server.log", [*networks.inside("org"), *WARDROUND, "server", str(kit.folder)]
        )
        way = Placed(
            stack, folder / "proxy.log", [*networks.inside("way"), sys.executable, str(PROXY), "3128"]
        )
        until(
            lambda: "listening" in server.text and "listening" in way.text,
            START_SECONDS,
            "server and proxy listen",
        )
        look = [*networks.inside("hos"), *WARDROUND, "preflight"]
        plain = subprocess.run(
            [*look, str(folder / "kits" / "north")], env=ENVIRONMENT, capture_output=True, text=True
        )
        checks.check(
            plain.returncode == 2 and "cannot be reached" in plain.stderr, "without the proxy there is no way"
        )
        done = subprocess.run(
            [*look, str(folder / "kits" / "east")], env=ENVIRONMENT, capture_output=True, text=True
        )
        told = "10.77.1.1 port 443 answers through the proxy 10.77.2.2:3128"
        checks.check(done.returncode == 0 and told in done.stdout, f"preflight: {told}")
        for name, more in (("east", {}), ("north", {"https_proxy": address})):
            command = [*networks.inside("hos"), *WARDROUND, "join", str(folder / "kits" / name)]
            Placed(stack, folder / f"{name}.log", command, **more)
        until(lambda: server.text.count("is connected") == 2, START_SECONDS, "both connect through the proxy")
        file = folder / "through.yaml"
        file.write_text(yaml.safe_dump(config))
        began = time.monotonic()
        submit = [
            *networks.inside("org"),
            *WARDROUND,
            "submit",
            str(file),
            "--kit",
            str(kit.folder),
            "--quiet",
        ]
        ran = subprocess.run(submit, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
        checks.check(ran.returncode == 0, f"a run ends with exit code {ran.returncode}", seconds=since(began))
        found, expected = fingerprint(kit.runs / "through"), trained(folder, config)
        checks.check(found == expected, f"its bytes are those of train: {found[:12]}, {expected[:12]}")
        asked = set(re.findall(r"CONNECT (\S+)", way.text))
        checks.check(asked == {"10.77.1.1:443"}, f"the proxy was asked for {', '.join(sorted(asked))} alone")


def main() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    with Checks(__doc__) as checks:
        if not checks.options.only or checks.options.only != "proxy":
            with Deployment(NAMES, checks.options.keep, GUESTS) as hospitals:
                together(checks, hospitals)
        if checks.wants("proxy"):
            with (
                Deployment([*NAMES], checks.options.keep) as hospitals,
                checks.part("through a proxy, on port 443"),
            ):
                try:
                    with Networks() as networks:
                        folder = hospitals.folder / "way"
                        folder.mkdir()
                        through_proxy(checks, folder, networks)
                except Failed as error:
                    if not str(error).startswith("skipped"):
                        raise
                    checks.note(str(error))


if __name__ == "__main__":
    main()
