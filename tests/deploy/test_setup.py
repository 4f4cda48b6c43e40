"""The guided commands: what they ask and write, and that two hospitals need at most eight commands."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from helpers import call
from pytest import CaptureFixture, MonkeyPatch, fixture, importorskip, mark

importorskip("grpc")

from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.deploy.kits.kit import read_kit
from wardround.deploy.processes import free_ports
from wardround.deploy.site_file import load_site

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_hospitals"
ORGANISER = ("organiser", "setup", "--yes", "--no-start", "--host", "127.0.0.1")


def list_commands() -> list[str]:
    """What the example's page has two hospitals and their organiser type."""
    (block,) = re.findall(r"```sh\n(.*?)```", (EXAMPLE / "README.md").read_text(), re.DOTALL)
    return [line for line in block.splitlines() if not line.startswith("#")]


@fixture
def here(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    return tmp_path


def test_two_hospitals_take_at_most_eight_commands_with_three_installations() -> None:
    words = [" ".join(command.split()[1:3]) for command in list_commands()]
    assert [word for word in words if word.endswith("setup")] == ["organiser setup", *["hospital setup"] * 2]
    assert all(command.startswith("wardround ") for command in list_commands()) and len(words) + 3 <= 8


def test_an_invitation_becomes_a_kit_with_rules_cases_and_a_unit(
    here: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    (port,) = free_ports(1)
    code, out, err = call(
        monkeypatch,
        capsys,
        *ORGANISER,
        "--project",
        "demo",
        "--port",
        str(port),
        "--hospitals",
        "north,south",
    )
    assert (code, err) == (0, "") and "kits/north.invitation.json" in out
    assert (here / "kits" / "wardround-organiser.service").exists()
    phantom_files.write(PhantomSettings(hospitals=1, cases=12), here / "scans", "nifti", seed=1)
    (centre,) = [path for path in (here / "scans").iterdir() if path.is_dir()]

    setup = ("hospital", "setup", "kits/north.invitation.json", "--yes", "--no-wait")
    code, _, err = call(monkeypatch, capsys, *setup, "--data", "scans", "--fingerprint", "00 00")
    assert code == 2 and "not the one you were told" in err
    shutil.rmtree(here / "north")
    code, out, err = call(
        monkeypatch, capsys, *setup, "--data", str(centre.parent), "--proxy", "http://proxy.example.org:3128"
    )
    assert code == 0 and "It was not compared" in err and "12 usable cases" in out, err
    kit = read_kit(here / "north")
    site = load_site(kit.site_file)
    assert site.data == here / "north.federation.yaml" and site.proxy == "http://proxy.example.org:3128"
    assert "kind: natural" in site.data.read_text() and "# " in kit.site_file.read_text()
    assert kit.request.exists() and (here / "wardround-north.service").exists()
    assert "Send " in out and "wardround join" in out

    code, out, err = call(monkeypatch, capsys, "sign", "north.request.json")
    assert (code, err) == (0, "") and "Signed for 'north'" in out
    code, out, err = call(monkeypatch, capsys, "enrol", "north")
    assert (code, err) == (0, "") and kit.own_certificate.exists()
    code, out, err = call(monkeypatch, capsys, "enrol", "north", "--renew")
    assert (code, err) == (0, "") and "- Send " in out
    code, out, err = call(monkeypatch, capsys, "revoke", "north")
    assert (code, err) == (0, "") and "'north' is revoked; no server runs now" in out


@mark.parametrize(
    ("words", "sentence"),
    [
        (("organiser", "setup", "--yes"), "Hospitals, with commas: give it with --hospitals"),
        ((*ORGANISER, "--hospitals", "a b"), "'a b' is not a valid name"),
        ((*ORGANISER, "--hospitals", "a", "--port", "99999"), "organiser.port is 99999"),
        (("sign", "nowhere.json"), "kits has no authority|has no authority"),
        (("revoke", "north"), "has no authority"),
        (("hospital", "setup", "nowhere"), "nowhere does not exist"),
        (("enrol", "nowhere"), "nowhere does not exist"),
    ],
)
def test_what_is_missing_or_wrong_is_said_in_a_sentence(
    words: tuple[str, ...],
    sentence: str,
    here: Path,
    monkeypatch: MonkeyPatch,
    capsys: CaptureFixture[str],
) -> None:
    code, _, err = call(monkeypatch, capsys, *words)
    assert code == 2 and re.search(sentence, err) and "Traceback" not in err
    assert not (here / "project.yaml").exists() and not (here / "kits").exists()


def until(claim: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, what
        time.sleep(0.3)


@mark.slow
def test_the_commands_of_the_page_lead_to_a_result_as_they_stand(tmp_path: Path) -> None:
    example = Path(shutil.copytree(EXAMPLE, tmp_path / "example"))
    (port,) = free_ports(1)
    project = example / "project.yaml"
    project.write_text(project.read_text().replace("8002", str(port)))
    subprocess.run(
        [sys.executable, str(example / "make_hospitals.py"), "hospitals"], cwd=tmp_path, check=True
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "wardround").write_text(f'#!/bin/sh\nexec {sys.executable} -m wardround "$@"\n')
    (tmp_path / "bin" / "wardround").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "EXAMPLE": str(example)}
    organiser, *hospitals, sign, submit = list_commands()
    started: list[subprocess.Popen[bytes]] = []

    def start(command: str, log: str) -> None:
        with (tmp_path / log).open("wb") as file:
            started.append(
                subprocess.Popen(
                    ["bash", "-c", f"exec {command}"],
                    cwd=tmp_path,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            )

    def says(log: str, words: str) -> bool:
        return words in (tmp_path / log).read_text()

    try:
        start(organiser, "organiser.log")
        until(lambda: says("organiser.log", "listening"), "the server listens")
        for name, command in zip(("east", "north"), hospitals, strict=True):
            start(command, f"{name}.log")
        for name in ("east", "north"):
            until((tmp_path / f"{name}.request.json").exists, f"{name} asks for its certificate")
        subprocess.run(["bash", "-c", sign], cwd=tmp_path, env=environment, check=True)
        for name in ("east", "north"):
            until(lambda name=name: says("organiser.log", f"{name} is connected"), f"{name} takes part")  # type: ignore[misc]
        subprocess.run(["bash", "-c", submit], cwd=tmp_path, env=environment, check=True, timeout=300)
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(30)
    assert (tmp_path / "kits" / "organiser" / "runs" / "first" / "report.html").exists()
