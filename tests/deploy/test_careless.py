"""Commands for real hospitals with broken kits, taken ports and names nobody has: refused before a start."""

import json
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import yaml
from helpers import call, config, settings
from pytest import CaptureFixture, MonkeyPatch, fixture, importorskip, mark, raises

importorskip("nvflare")

from wardround.deploy.kits import open_kit, organisers_kit
from wardround.deploy.nvflare import authority, organising, processes, provisioning, rehearsal
from wardround.deploy.project import Project
from wardround.deploy.site import refuse_device_not_here
from wardround.deploy.site_file import SiteFile
from wardround.errors import ConfigError, WardroundError

JOINS = ["flare/startup/rootCA.pem", "flare/startup/fed_client.json", "flare/local/resources.json"]


@fixture
def mine(kits: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A copy of the kits, and nothing that would start."""

    def refuse(self: processes.Processes) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(processes.Processes, "_launch", refuse)
    monkeypatch.delenv("WARDROUND_KIT", raising=False)
    monkeypatch.setenv("WARDROUND_DATA", "")  # `join --data` sets it; monkeypatch puts it back
    folder = Path(shutil.copytree(kits, tmp_path / "kits"))
    (folder / "north" / "site.yaml").write_text("data: phantom\n")
    return folder


@mark.parametrize("name", JOINS)
@mark.parametrize("harm", ["cut", "gone"])
def test_join_with_a_broken_kit_ends_before_it_connects(
    name: str, harm: str, mine: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    file = mine / "north" / name
    if harm == "gone":
        file.unlink()
    elif "local/" in name:  # the hospital's own to change: said by preflight, not refused
        return
    else:
        file.write_bytes(file.read_bytes()[:200])

    code, _, err = call(monkeypatch, capsys, "join", str(mine / "north"))

    assert code == 2 and Path(name).name in err and "Unpack the kit again" in err


@mark.parametrize("name", ["admin/startup/client.crt", "flare/startup/server.key"])
def test_the_server_with_a_broken_kit_does_not_start(
    name: str, mine: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    file = mine / "organiser" / name
    file.write_bytes(file.read_bytes()[:100])

    code, _, err = call(monkeypatch, capsys, "server", str(mine / "organiser"))

    assert code == 2 and file.name.removesuffix(".key") in err and "https://" not in err


def test_the_server_names_a_port_that_is_taken_and_gives_its_kit_free(
    mine: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    port = open_kit(mine / "organiser").port
    with socket.create_server(("127.0.0.1", port)):
        code, _, err = call(monkeypatch, capsys, "server", str(mine / "organiser"))

    assert code == 2 and f"port {port} is taken by another program here. Find it with: ss -ltnp" in err
    free = processes.Processes(mine / "organiser", "server")
    free._lock()
    free._unlock()


@mark.parametrize("port", [0, 99999, True, "8002"])
def test_a_kit_with_an_impossible_port_is_refused(port: Any, mine: Path) -> None:
    file = mine / "north" / "kit.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "port": port}))

    with raises(ConfigError, match="a value that cannot be right"):
        open_kit(mine / "north")


def test_a_state_that_is_a_file_is_said(
    mine: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    shutil.rmtree(mine / "organiser" / "state")
    (mine / "organiser" / "state").write_text("")

    code, _, err = call(monkeypatch, capsys, "server", str(mine / "organiser"))

    assert code == 2 and "must be a folder that this account may write into" in err


def test_a_wrong_wardround_kit_is_not_passed_over(mine: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.chdir(mine.parent)
    assert organisers_kit(None).folder == mine / "organiser"

    monkeypatch.setenv("WARDROUND_KIT", str(mine / "nowhere"))
    with raises(ConfigError, match="nowhere does not exist"):
        organisers_kit(None)


# provision


def test_nothing_is_renewed_without_the_authority_that_made_it(
    project: Project, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    file = tmp_path / "project.yaml"
    file.write_text(yaml.safe_dump(project.model_dump(mode="json")))

    code, _, err = call(
        monkeypatch, capsys, "provision", str(file), "-o", str(tmp_path / "new"), "--renew", "north"
    )

    assert code == 2 and "nothing can be renewed there" in err and not (tmp_path / "new").exists()


def test_a_file_cannot_be_the_folder_for_kits(project: Project, tmp_path: Path) -> None:
    (tmp_path / "kits").write_text("mine")

    with raises(ConfigError, match="cannot be the folder for the kits"):
        provisioning.provision(project, tmp_path / "kits")
    with raises(ConfigError, match="Give another with -o"):
        provisioning.provision(project, tmp_path / "kits" / "below")


def test_the_authority_knows_everybody_it_made_a_kit_for(
    mine: Path, project: Project, tmp_path: Path
) -> None:
    (mine / "organiser" / "flare" / "startup" / "rootCA.pem").unlink()  # not needed to tell the fingerprint

    issuer, issued = authority.issued_by(mine)

    assert set(issued) == {"organiser", "north", "south"} and authority.fingerprint(issuer)


# submit


class Line:
    """The organiser's line to a server that is not there; answers: whether the run's process does."""

    def __init__(self, *names: str, answers: bool = True) -> None:
        self.kit, self._names, self._answers = Path("kits/organiser"), names, answers

    def connected(self) -> dict[str, float]:
        return dict.fromkeys(self._names, 1.0)

    def command(self, job: str, topic: str) -> dict[str, Any]:
        if not self._answers:
            raise WardroundError("no such run")
        return {}


def test_hospitals_are_named_once_and_by_a_name_that_is_there(tmp_path: Path) -> None:
    line, plain = cast(Any, Line("east", "north")), config(tmp_path)

    assert organising.named(" north, east,north,") == ["east", "north"]
    assert organising.who_takes_part(line, plain, ["east"], resume=False) == ["east"]
    with raises(ConfigError, match="names no hospital"):
        organising.named(" , ")
    with raises(
        ConfigError, match=r"'est', which is not connected. Did you mean 'east'\? Connected: east, n"
    ):
        organising.who_takes_part(line, plain, ["est", "north"], resume=False)
    assert organising.who_takes_part(line, plain, ["west"], resume=True) == ["west"]  # on its way back


@mark.parametrize("state", ["waiting", "working", "starting"])
def test_a_run_that_goes_on_is_not_begun_again(state: str, tmp_path: Path) -> None:
    plain = config(tmp_path / "long")
    organising.refuse_going_on(cast(Any, Line()), plain)  # nothing there yet
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "live.json").write_text(json.dumps({"state": state, "job": "j1"}))

    with raises(ConfigError, match="run 'long' goes on. See it with: wardround status --watch"):
        organising.refuse_going_on(cast(Any, Line()), plain)
    organising.refuse_going_on(cast(Any, Line(answers=False)), plain)  # its process was killed


def test_submit_detached_with_json_prints_one_object(
    mine: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    from wardround.cli import hospitals

    (tmp_path / "run.yaml").write_text("name: polyps\ndata: {hospitals: true}\n")
    monkeypatch.setattr(hospitals, "opened_session", lambda kit: nullcontext(Line("north")))
    monkeypatch.setattr(organising, "submit", lambda *_, **__: SimpleNamespace(job="j1"))

    code, out, err = call(
        monkeypatch,
        capsys,
        *("submit", str(tmp_path / "run.yaml"), "--kit", str(mine / "organiser")),
        *("--detach", "--json", "--set", "min_clients=1"),
    )

    told = json.loads(out)
    assert (code, err, told["run"], told["job"], told["hospitals"]) == (0, "", "polyps", "j1", ["north"])
    assert told["folder"] == str(mine / "organiser" / "runs" / "polyps")


# rehearse


def test_a_second_rehearsal_in_a_folder_leaves_the_first_alone(
    mine: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings(tmp_path / "run")))
    kept = tmp_path / "run" / "rehearsal" / "kits" / "north" / "kit.json"
    with rehearsal.alone_in(tmp_path / "run"):
        kept.parent.mkdir(parents=True)
        kept.write_text("of the first")

        code, _, err = call(monkeypatch, capsys, "rehearse", str(tmp_path / "run.yaml"))

    assert code == 2 and "a rehearsal goes on in" in err and kept.read_text() == "of the first"


def test_a_rehearsal_cannot_be_written_into_a_file(
    mine: Path, tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    (tmp_path / "run").write_text("mine")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings(tmp_path / "run")))

    code, _, err = call(monkeypatch, capsys, "rehearse", str(tmp_path / "run.yaml"))

    assert code == 2 and "cannot hold a run" in err and (tmp_path / "run").read_text() == "mine"


# The hospital's device


@mark.parametrize(("device", "here", "words"), [("cuda", 0, "no GPU here"), ("cuda:2", 2, "has 2 GPUs")])
def test_a_device_that_is_not_there_is_said_before_the_first_request(
    device: str, here: int, words: str, monkeypatch: MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: here > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)

    with raises(ConfigError, match=words):
        refuse_device_not_here(SiteFile(device=device))
    assert refuse_device_not_here(SiteFile(device="cpu")) == "cpu"
    assert refuse_device_not_here(SiteFile()) == ("cuda" if here else "cpu")
