"""preflight names the first thing that is wrong, against small servers that are wrong in one way each."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

from helpers import call
from pytest import CaptureFixture, MonkeyPatch, fixture, importorskip, mark, raises

from wardround.data.phantom.cases import PhantomSettings
from wardround.data.phantom.files import write
from wardround.deploy.kits import Kit, open_kit, read_kit
from wardround.deploy.nvflare.job import REJOIN
from wardround.deploy.processes import Processes
from wardround.deploy.project import Project

importorskip("nvflare")

from wardround.deploy import provisioning
from wardround.deploy.authority import Authority, write_manifest
from wardround.deploy.preflight import Check, CheckFailed, PreflightContext
from wardround.deploy.preflight.connection import check_tls
from wardround.deploy.preflight.sequence import find_failed, preflight

TIMEOUT = 20.0  # none waits for it where all is well
Copy = Callable[[str], Kit]


def wrong(checks: list[Check]) -> Check:
    found = find_failed(checks)
    assert found is not None
    states = [check.state for check in checks]
    assert set(states[states.index("wrong") + 1 :]) <= {"not reached"}
    return found


@contextlib.contextmanager
def listening(port: int, answer: Callable[[socket.socket], None]) -> Iterator[None]:
    """A server that treats each connection in one way."""

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), connection:
                connection.settimeout(TIMEOUT)
                answer(connection)

    with socket.create_server(("127.0.0.1", port)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def secured_context(kit: Kit) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(kit.startup / "rootCA.pem")
    context.load_cert_chain(kit.startup / "server.crt", kit.startup / "server.key")
    return context


def secured(kit: Kit, told: timedelta | None = timedelta()) -> Callable[[socket.socket], None]:
    """The organiser's end: mutual TLS with the organiser's kit; told: how wrong a time it says."""
    context = secured_context(kit)

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as speaking:
            if speaking.recv(4096):
                date = "" if told is None else f"Date: {format_datetime(datetime.now(UTC) + told)}\r\n"
                speaking.sendall(f"HTTP/1.1 404 Not Found\r\n{date}\r\n".encode())

    return answer


def reissue(kit: Kit, kits: Path, project: Project, *, start: datetime, base: str) -> None:
    """Give a kit a certificate that begins at `start` and is good for ten days, rightly signed."""
    authority = Authority.open(kits / ".authority", project, "127.0.0.1")
    name = kit.server if base == "server" else kit.name
    use = "server" if base == "server" else "client"
    issued = authority.issue(name, "x", use=use, valid=timedelta(days=10), start=start)  # type: ignore[arg-type]
    provisioning.put_certificate(kit.startup, base, *issued, authority)
    write_manifest(kit, authority)


@fixture
def north(copy_of: Copy) -> Kit:
    return copy_of("north")


@fixture
def organiser(kits: Path) -> Kit:
    return read_kit(kits / "organiser")


@fixture(scope="session")
def foreign(project: Project, kits: Path) -> Path:
    """Kits of another authority for a project of the same name and place."""
    folder = kits.parent / "foreign"
    provisioning.provision(project, folder, bind="127.0.0.1")
    return folder


# All is well


def test_a_ready_hospital_passes(north: Kit, organiser: Kit) -> None:
    with listening(north.port, secured(organiser)):
        checks = preflight(north.folder, timeout=TIMEOUT)

    assert find_failed(checks) is None
    states = {check.name: check.state for check in checks}
    assert list(states) == [
        "kit",
        "certificate",
        "name",
        "port",
        "encryption",
        "clock",
        "disk",
        "versions",
        "device",
        "data",
    ]
    assert states["data"] == "warning"  # no federation.yaml yet
    found = {check.name: check.found for check in checks}
    assert "accepts our certificate" in found["encryption"] and found["clock"].endswith("s from the server's")


def test_a_server_that_says_no_time_is_no_trouble(north: Kit, organiser: Kit) -> None:
    with listening(north.port, secured(organiser, told=None)):
        checks = preflight(north.folder, timeout=TIMEOUT)
    assert "does not report the time" in next(check.found for check in checks if check.name == "clock")


@mark.parametrize(("minutes", "words"), [(20, "20 minutes behind"), (-20, "20 minutes ahead of")])
def test_a_wrong_clock_is_a_warning(minutes: int, words: str, north: Kit, organiser: Kit) -> None:
    with listening(north.port, secured(organiser, told=timedelta(minutes=minutes))):
        checks = preflight(north.folder, timeout=TIMEOUT)
    clock = next(check for check in checks if check.name == "clock")
    assert clock.state == "warning" and words in clock.found and find_failed(checks) is None


def test_the_hospitals_data_is_looked_at(north: Kit, organiser: Kit, tmp_path: Path) -> None:
    write(PhantomSettings(hospitals=2, size=16, cases=8), tmp_path / "cases", "png", seed=0)
    file = tmp_path / "federation.yaml"
    file.write_text("sources: [{path: cases}]\nlabels: {lesion: [1]}\n")
    with listening(north.port, secured(organiser)):
        good = preflight(north.folder, data=file, timeout=TIMEOUT)
        bad = preflight(north.folder, data=tmp_path / "none.yaml", timeout=TIMEOUT)

    assert good[-1].state == "ok" and "client 'north': 8 usable cases" in good[-1].found
    assert wrong(bad).name == "data" and "none.yaml does not exist" in wrong(bad).found


def test_little_disk_is_a_warning(north: Kit, organiser: Kit, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**10, 10**10, 10**9))
    with listening(north.port, secured(organiser)):
        checks = preflight(north.folder, timeout=TIMEOUT)
    disk = next(check for check in checks if check.name == "disk")
    assert disk.state == "warning" and "1.0 GB free" in disk.found


# The kit


def test_a_kit_that_is_not_whole(north: Kit) -> None:
    file = north.startup / "fed_client.json"
    file.write_text(file.read_text().replace("mtls", "clear"))
    found = wrong(preflight(north.folder))
    assert found.name == "kit" and "fed_client.json is not as it was signed" in found.found

    file.unlink()
    assert "fed_client.json is missing" in wrong(preflight(north.folder)).found
    (north.folder / "manifest.json").unlink()
    assert "is not complete" in wrong(preflight(north.folder)).found


def test_a_missing_key(north: Kit) -> None:
    (north.startup / "client.key").unlink()
    assert "client.key is missing" in wrong(preflight(north.folder)).found


def test_a_manifest_someone_else_wrote(north: Kit) -> None:
    file = north.folder / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["files"]["flare/startup/fed_client.json"]
    file.write_text(json.dumps(manifest))
    assert "is not signed by the project" in wrong(preflight(north.folder)).found


def test_what_the_owner_changed_is_a_warning(north: Kit) -> None:
    (north.flare / "local" / "log_config.json").write_text("{}")
    kit = preflight(north.folder, timeout=TIMEOUT)[0]
    assert kit.state == "warning" and "log_config.json" in kit.found


def test_an_open_key_ends_it_at_once(north: Kit) -> None:
    (north.startup / "client.key").chmod(0o640)
    found = wrong(preflight(north.folder))
    assert found.name == "kit" and "chmod -R go-rwx" in found.found


# Certificates


def test_dates(north: Kit, kits: Path, project: Project) -> None:
    late = preflight(north.folder, now=datetime.now(UTC) + timedelta(days=400))
    assert wrong(late).name == "certificate" and "expired on" in wrong(late).found
    early = preflight(north.folder, now=datetime.now(UTC) - timedelta(days=2))
    assert "is valid from" in wrong(early).found and wrong(early).todo == "Set this machine's clock."

    reissue(north, kits, project, start=datetime.now(UTC) - timedelta(days=5), base="client")
    soon = preflight(north.folder, timeout=TIMEOUT)[1]
    assert soon.state == "warning" and "valid for 4 more days" in soon.found


def test_the_key_of_another(north: Kit, kits: Path) -> None:
    shutil.copy(kits / "south" / "flare" / "startup" / "client.key", north.startup / "client.key")
    assert "client.key is not the key of client.crt" in wrong(preflight(north.folder)).found


def test_the_certificate_of_another(north: Kit, kits: Path, project: Project) -> None:
    authority = Authority.open(kits / ".authority", project, "127.0.0.1")
    for name in ("client.key", "client.crt"):
        shutil.copy(kits / "south" / "flare" / "startup" / name, north.startup / name)
    write_manifest(north, authority)
    assert "is the certificate of 'south', not of 'north'" in wrong(preflight(north.folder)).found


def test_a_certificate_of_another_authority(north: Kit, kits: Path, project: Project, foreign: Path) -> None:
    authority = Authority.open(kits / ".authority", project, "127.0.0.1")
    for name in ("client.key", "client.crt"):
        shutil.copy(foreign / "north" / "flare" / "startup" / name, north.startup / name)
    write_manifest(north, authority)
    found = wrong(preflight(north.folder))
    assert found.name == "certificate" and "was not issued by this project's authority" in found.found


# The way


def test_a_name_nobody_knows(tmp_path: Path, project: Project) -> None:
    lost = project.model_copy(
        update={"organiser": project.organiser.model_copy(update={"host": "nowhere.invalid"})}
    )
    provisioning.provision(lost, tmp_path)
    found = wrong(preflight(tmp_path / "north", timeout=TIMEOUT))
    assert found.name == "name" and "nowhere.invalid cannot be resolved here" in found.found


def test_nothing_listens(north: Kit) -> None:
    found = wrong(preflight(north.folder, timeout=TIMEOUT))
    assert found.name == "port" and "cannot be reached" in found.found and "wardround server" in found.todo


def test_a_server_of_another_authority(north: Kit, foreign: Path) -> None:
    with listening(north.port, secured(read_kit(foreign / "organiser"))):
        found = wrong(preflight(north.folder, timeout=TIMEOUT))
    assert found.name == "encryption" and "certificate of another authority" in found.found
    assert "same project" in found.todo


def refusal(kit: Kit) -> str:
    """What the server says of a kit that takes itself to be in order."""
    with raises(CheckFailed) as told:
        check_tls(PreflightContext(kit, None, datetime.now(UTC), TIMEOUT))
    return str(told.value)


def test_a_kit_of_another_project_is_refused_by_the_server(north: Kit, organiser: Kit, foreign: Path) -> None:
    """The client believes the server, which does not believe the client: TLS tells only afterwards."""
    for kind in ("crt", "key"):
        shutil.copy(foreign / "north" / "flare" / "startup" / f"client.{kind}", north.startup)
    with listening(north.port, secured(organiser)):
        assert "does not accept our certificate (" in refusal(north)


def test_a_server_that_hangs_up_has_refused_too(north: Kit, organiser: Kit) -> None:
    def hang_up(connection: socket.socket) -> None:
        with secured_context(organiser).wrap_socket(connection, server_side=True):
            pass

    with listening(north.port, hang_up):
        assert "closed the connection when it saw our certificate" in refusal(north)


def test_an_expired_hospital_is_told_so_by_the_server(
    north: Kit, organiser: Kit, kits: Path, project: Project
) -> None:
    reissue(north, kits, project, start=datetime.now(UTC) - timedelta(days=20), base="client")
    with listening(north.port, secured(organiser)):
        assert "says that our certificate has expired" in refusal(north)


def test_an_expired_server(north: Kit, copy_of: Copy, kits: Path, project: Project) -> None:
    server = copy_of("organiser")
    reissue(server, kits, project, start=datetime.now(UTC) - timedelta(days=20), base="server")
    with listening(north.port, secured(server)):
        found = wrong(preflight(north.folder, timeout=TIMEOUT))
    assert (
        found.name == "encryption"
        and "certificate of the server" in found.found
        and "has expired" in found.found
    )


def test_a_hospital_cannot_pose_as_the_server(north: Kit, copy_of: Copy, kits: Path) -> None:
    server = copy_of("organiser")
    for kind in ("crt", "key"):
        shutil.copy(
            kits / "south" / "flare" / "startup" / f"client.{kind}", server.startup / f"server.{kind}"
        )
    with listening(north.port, secured(server)):
        assert wrong(preflight(north.folder, timeout=TIMEOUT)).name == "encryption"


def test_a_plain_server(north: Kit) -> None:
    def plain(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with listening(north.port, plain):
        found = wrong(preflight(north.folder, timeout=TIMEOUT))
    assert found.name == "encryption" and "does not speak TLS" in found.found


def test_a_silent_server(north: Kit) -> None:
    with listening(north.port, lambda connection: threading.Event().wait(1.0) and None):
        found = wrong(preflight(north.folder, timeout=0.3))
    assert found.name == "encryption" and "does not speak TLS (no answer within 0.3 s)" in found.found


# The organiser


def test_the_organisers_own_checks(organiser: Kit) -> None:
    free = preflight(organiser.folder, timeout=TIMEOUT)
    assert [check.name for check in free] == ["kit", "certificate", "port", "disk", "versions"]
    assert find_failed(free) is None and free[2].found.endswith("free")

    with listening(organiser.port, secured(organiser)):
        running = preflight(organiser.folder, timeout=TIMEOUT)
    assert "this project's server is running" in running[2].found

    with listening(organiser.port, lambda connection: connection.sendall(b"SSH-2.0\r\n")):
        assert "is taken by another program" in wrong(preflight(organiser.folder, timeout=TIMEOUT)).found


# The command


def test_the_command_exits_with_2_and_names_the_first(
    north: Kit, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, err = call(monkeypatch, capsys, "preflight", str(north.folder))
    assert code == 2
    assert "wrong       port" in out and "not reached data" in out
    assert err.startswith("error port: localhost port")

    code, out, err = call(monkeypatch, capsys, "preflight", str(north.folder), "--json")
    told = json.loads(out)
    assert code == 2 and err == "" and told["ok"] is False
    assert [check["state"] for check in told["checks"]].count("wrong") == 1


def test_the_command_exits_with_0(
    organiser: Kit, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    code, out, err = call(monkeypatch, capsys, "preflight", str(organiser.folder))
    assert (code, err) == (0, "") and "valid until" in out


# Commands that check before they start

JOINS = ["flare/startup/rootCA.pem", "flare/startup/fed_client.json", "flare/local/resources.json"]


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
    free = Processes(mine / "organiser", "server")
    free._lock()
    free._unlock()


def test_a_state_that_is_a_file_is_said(
    mine: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    shutil.rmtree(mine / "organiser" / "state")
    (mine / "organiser" / "state").write_text("")

    code, _, err = call(monkeypatch, capsys, "server", str(mine / "organiser"))

    assert code == 2 and "must be a folder that this account may write into" in err


@mark.parametrize("command", ["server", "preflight"])
def test_a_kit_of_an_older_version_is_named_with_what_to_do(
    command: str,
    mine: Path,
    kits: Path,
    project: Project,
    monkeypatch: MonkeyPatch,
    capsys: CaptureFixture[str],
) -> None:
    organiser = read_kit(mine / "organiser")
    resources = organiser.flare / "local" / "resources.json"
    moved = "wardround.deploy.nvflare.returning.Returning"
    assert REJOIN in resources.read_text()
    resources.write_text(resources.read_text().replace(REJOIN, moved))
    write_manifest(organiser, Authority.open(kits / ".authority", project, "127.0.0.1"))

    code, _, err = call(monkeypatch, capsys, command, str(organiser.folder))

    assert code == 2 and f"made by an older version of wardround: it names {moved}" in err
    assert "run wardround provision again" in err and "Traceback" not in err
