"""Kits made once for all tests of deployment, on a port nobody else has."""

import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from pytest import MonkeyPatch, TempPathFactory, fixture, importorskip

from wardround.child_process import ChildProcess
from wardround.deploy.kits.kit import Kit, read_kit
from wardround.deploy.kits.project import Project


def project_of(*hospitals: str, name: str = "demo") -> Project:
    """A project on this machine, on a port of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    return Project.model_validate(
        {
            "project": name,
            "organiser": {"host": "localhost", "port": port},
            "hospitals": list(hospitals),
        }
    )


@fixture(scope="session")
def project() -> Project:
    return project_of("north", "south")


@fixture(scope="session")
def kits(project: Project, tmp_path_factory: TempPathFactory) -> Path:
    """The kits of organiser, north and south, bound to loopback; look, but change a copy only."""
    importorskip("cryptography")
    from wardround.deploy.kits.provisioning import provision

    folder = tmp_path_factory.mktemp("kits")
    provision(project, folder, bind="127.0.0.1")
    return folder


@fixture
def copy_of(kits: Path, tmp_path: Path) -> Callable[[str], Kit]:
    """A kit of one's own, to be damaged."""

    def copy(name: str) -> Kit:
        return read_kit(Path(shutil.copytree(kits / name, tmp_path / name)))

    return copy


@fixture
def mine(kits: Path, tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A copy of the kits, and nothing that would start."""

    def refuse(self: ChildProcess, *_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(ChildProcess, "__init__", refuse)
    monkeypatch.delenv("WARDROUND_KIT", raising=False)
    monkeypatch.setenv("WARDROUND_DATA", "")  # `join --data` sets it; monkeypatch puts it back
    folder = Path(shutil.copytree(kits, tmp_path / "kits"))
    (folder / "north" / "site.yaml").write_text("data: phantom\n")
    return folder
