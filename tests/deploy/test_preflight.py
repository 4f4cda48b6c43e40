"""preflight names the first thing that is wrong, against small servers that are wrong in one way each."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from helpers import call
from pytest import CaptureFixture, MonkeyPatch, fixture, importorskip, mark, raises

from wardround.data.phantom.cases import PhantomSettings
from wardround.data.phantom.files import write
from wardround.deploy.kits.kit import Kit, open_kit, read_kit
from wardround.deploy.kits.project import Project
from wardround.deploy.processes import claim_kit

importorskip("grpc")

import grpc

from wardround.deploy.kits import provisioning
from wardround.deploy.kits.authority import Authority, write_manifest
from wardround.deploy.preflight import Check, CheckFailed, PreflightContext, TrustFailed
from wardround.deploy.preflight.connection import check_tls, read_answer
from wardround.deploy.preflight.kit import refuse_broken
from wardround.deploy.preflight.sequence import find_failed, preflight
from wardround.errors import ConfigError
from wardround.version import __version__

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
    context.load_verify_locations(kit.authority)
    context.load_cert_chain(kit.own_certificate, kit.own_key)
    return context


@contextlib.contextmanager
def serving(kit: Kit, hello: Callable[[bytes, Any], bytes] | None = None, **said: Any) -> Iterator[list[Any]]:
    """The organiser's end with this kit; hello: what it answers, else the truth and what is `said` instead."""
    calls: list[Any] = []

    def answer(request: bytes, context: Any) -> bytes:
        calls.append((json.loads(request), dict(context.invocation_metadata())["wardround-instance"]))
        if hello is not None:
            return hello(request, context)
        truth = {"time": time.time(), "wardround": __version__, "project": kit.project_id}
        return json.dumps(truth | said).encode()

    credentials = grpc.ssl_server_credentials(
        [(kit.own_key.read_bytes(), kit.own_certificate.read_bytes())], kit.authority.read_bytes(), True
    )
    methods = {"Hello": grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.server(
        ThreadPoolExecutor(2),
        [grpc.method_handlers_generic_handler("wardround.Hospitals", methods)],
        options=[("grpc.so_reuseport", 0)],
    )
    server.add_secure_port(f"127.0.0.1:{kit.port}", credentials)
    server.start()
    try:
        yield calls
    finally:
        server.stop(None).wait()


def reissue(kit: Kit, kits: Path, project: Project, *, start: datetime) -> None:
    """Give a kit a certificate that begins at `start` and is good for ten days, rightly signed."""
    authority = Authority.open(kits / ".authority", project, "127.0.0.1")
    name, host = (kit.server, kit.server) if kit.role == "organiser" else (kit.name, None)
    valid = timedelta(days=10)
    issued = authority.issue(name, "x", role=kit.role, valid=valid, host=host, start=start)
    provisioning.put_certificate(kit, *issued, authority)
    write_manifest(kit, authority)


def take_keys(kit: Kit, other: Path) -> None:
    """Give a kit the key and the certificate of another."""
    for name in ("own.key", "own.crt"):
        shutil.copy(other / "keys" / name, kit.folder / "keys" / name)


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
    with serving(organiser) as calls:
        checks = preflight(north.folder, timeout=TIMEOUT)

    assert calls == [({"wardround": __version__}, "preflight")]  # never taken for the hospital's own process
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


@mark.parametrize(("minutes", "words"), [(20, "20 minutes behind"), (-20, "20 minutes ahead of")])
def test_a_wrong_clock_is_a_warning(minutes: int, words: str, north: Kit, organiser: Kit) -> None:
    with serving(organiser, time=time.time() + 60 * minutes):
        checks = preflight(north.folder, timeout=TIMEOUT)
    clock = next(check for check in checks if check.name == "clock")
    assert clock.state == "warning" and words in clock.found and find_failed(checks) is None


def test_another_version_at_the_server_is_a_warning(north: Kit, organiser: Kit) -> None:
    with serving(organiser, wardround="7.1.0"):
        checks = preflight(north.folder, timeout=TIMEOUT)
    versions = next(check for check in checks if check.name == "versions")
    assert versions.state == "warning" and f"{__version__} here and 7.1.0 at the server" in versions.found
    assert versions.todo == "pip install 'wardround[hospitals]==7.1.0'"


def test_the_hospitals_data_is_looked_at(north: Kit, organiser: Kit, tmp_path: Path) -> None:
    write(PhantomSettings(hospitals=2, size=16, cases=8), tmp_path / "cases", "png", seed=0)
    file = tmp_path / "federation.yaml"
    file.write_text("sources: [{path: cases}]\nlabels: {lesion: [1]}\n")
    with serving(organiser):
        good = preflight(north.folder, data=file, timeout=TIMEOUT)
        bad = preflight(north.folder, data=tmp_path / "none.yaml", timeout=TIMEOUT)

    assert good[-1].state == "ok" and "client 'north': 8 usable cases" in good[-1].found
    assert wrong(bad).name == "data" and "none.yaml does not exist" in wrong(bad).found


def test_little_disk_is_a_warning(north: Kit, organiser: Kit, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**10, 10**10, 10**9))
    with serving(organiser):
        checks = preflight(north.folder, timeout=TIMEOUT)
    disk = next(check for check in checks if check.name == "disk")
    assert disk.state == "warning" and "1.0 GB free" in disk.found


# The kit


def test_a_kit_that_is_not_whole(north: Kit) -> None:
    file = north.folder / "kit.json"
    file.write_text(file.read_text().replace("localhost", "127.0.0.1"))
    found = wrong(preflight(north.folder))
    assert found.name == "kit" and "kit.json is not as it was signed" in found.found

    (north.folder / "README.txt").unlink()
    assert "README.txt is missing" in wrong(preflight(north.folder)).found
    (north.folder / "manifest.json").unlink()
    assert "is not complete" in wrong(preflight(north.folder)).found


def test_a_missing_key(north: Kit) -> None:
    north.own_key.unlink()
    assert "own.key is missing" in wrong(preflight(north.folder)).found


def test_a_manifest_someone_else_wrote(north: Kit) -> None:
    file = north.folder / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["files"]["kit.json"]
    file.write_text(json.dumps(manifest))
    assert "is not signed by the project" in wrong(preflight(north.folder)).found


@mark.parametrize(
    "name", ["custom/", "custom/net.py", "sitecustomize.py", "keys/other.crt", "runs/", ".hidden"]
)
def test_an_added_file_is_refused_by_name(name: str, north: Kit) -> None:
    path = north.folder / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    found = wrong(preflight(north.folder))
    added = north.folder / ("custom" if name.startswith("custom") else name)
    assert found.name == "kit" and f"{added} is not part of the kit" in found.found
    with raises(ConfigError, match="Move it out of the kit"):
        refuse_broken(north)


def test_a_kit_that_python_would_import_from_is_refused(north: Kit, monkeypatch: MonkeyPatch) -> None:
    """Custom networks are looked for in the current folder, and child processes inherit it."""
    refuse_broken(north)
    monkeypatch.chdir(north.state)
    assert f"Python would look for modules in the kit ({north.state})" in wrong(preflight(north.folder)).found
    monkeypatch.chdir(north.folder.parent)
    monkeypatch.syspath_prepend(north.folder)
    with raises(ConfigError, match="Start wardround in another folder.*PYTHONPATH"):
        refuse_broken(north)


@mark.parametrize("name", ["kit.json", "keys/own.key", "keys"])
def test_a_link_in_the_place_of_a_file_is_refused(name: str, north: Kit, tmp_path: Path) -> None:
    path = (north.folder / name).rename(tmp_path / "moved")
    (north.folder / name).symlink_to(path)
    assert f"{name} is a link" in wrong(preflight(north.folder)).found


def test_a_huge_file_in_the_place_of_a_small_one_is_not_read(north: Kit) -> None:
    with (north.folder / "manifest.json").open("wb") as file:
        file.truncate(10**12)  # sparse
    assert "larger than any file of a kit" in wrong(preflight(north.folder)).found


def test_what_belongs_to_the_owner_or_the_desktop_is_no_trouble(north: Kit, organiser: Kit) -> None:
    (north.state / "egress.jsonl").write_text("")
    (north.logs / "join.log").write_text("")
    north.site_file.write_text("data: phantom\n")
    (north.folder / ".DS_Store").write_text("")
    (north.folder / "keys" / "Thumbs.db").write_text("")
    with serving(organiser):
        assert preflight(north.folder, timeout=TIMEOUT)[0].state == "ok"


def test_an_open_key_ends_it_at_once(north: Kit) -> None:
    north.own_key.chmod(0o640)
    found = wrong(preflight(north.folder))
    assert found.name == "kit" and "chmod -R go-rwx" in found.found


# Certificates


def test_dates(north: Kit, kits: Path, project: Project) -> None:
    late = preflight(north.folder, now=datetime.now(UTC) + timedelta(days=400))
    assert wrong(late).name == "certificate" and "expired on" in wrong(late).found
    early = preflight(north.folder, now=datetime.now(UTC) - timedelta(days=2))
    assert "is valid from" in wrong(early).found and wrong(early).todo == "Set this machine's clock."

    reissue(north, kits, project, start=datetime.now(UTC) - timedelta(days=5))
    soon = preflight(north.folder, timeout=TIMEOUT)[1]
    assert soon.state == "warning" and "valid for 4 more days" in soon.found


def test_the_key_of_another(north: Kit, kits: Path) -> None:
    shutil.copy(kits / "south" / "keys" / "own.key", north.own_key)
    assert "own.key is not the key of own.crt" in wrong(preflight(north.folder)).found


@mark.parametrize(
    ("other", "words"), [("south", "of 'south', not of 'north'"), ("organiser", "of 'localhost'")]
)
def test_the_certificate_of_another(other: str, words: str, north: Kit, kits: Path, project: Project) -> None:
    take_keys(north, kits / other)
    write_manifest(north, Authority.open(kits / ".authority", project, "127.0.0.1"))
    assert f"is the certificate {words}" in wrong(preflight(north.folder)).found


def test_a_certificate_of_another_role(north: Kit, kits: Path, project: Project) -> None:
    authority = Authority.open(kits / ".authority", project, "127.0.0.1")
    issued = authority.issue("north", "x", role="organiser", valid=timedelta(days=10))
    provisioning.put_certificate(north, *issued, authority)
    write_manifest(north, authority)
    assert "is the certificate of 'organiser', not of 'hospital'" in wrong(preflight(north.folder)).found


def test_a_certificate_of_another_authority(north: Kit, kits: Path, project: Project, foreign: Path) -> None:
    take_keys(north, foreign / "north")
    write_manifest(north, Authority.open(kits / ".authority", project, "127.0.0.1"))
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
    with serving(read_kit(foreign / "organiser")):
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
    take_keys(north, foreign / "north")
    with serving(organiser):
        assert "closed the connection when it saw our certificate" in refusal(north)


def test_a_server_that_says_why_it_refuses(
    north: Kit, organiser: Kit, kits: Path, project: Project, foreign: Path
) -> None:
    """Ours just closes the connection; a device in between may have words."""

    def explain(connection: socket.socket) -> None:
        with secured_context(organiser).wrap_socket(connection, server_side=True):
            pass

    reissue(north, kits, project, start=datetime.now(UTC) - timedelta(days=20))
    with serving(organiser):
        assert "closed the connection when it saw our certificate" in refusal(north)
    with listening(north.port, explain):
        assert "says that our certificate has expired" in refusal(north)
        take_keys(north, foreign / "north")
        assert "does not accept our certificate (" in refusal(north)


def test_an_expired_server(north: Kit, copy_of: Copy, kits: Path, project: Project) -> None:
    server = copy_of("organiser")
    reissue(server, kits, project, start=datetime.now(UTC) - timedelta(days=20))
    with serving(server):
        found = wrong(preflight(north.folder, timeout=TIMEOUT))
    assert (
        found.name == "encryption"
        and "certificate of the server" in found.found
        and "has expired" in found.found
    )


def test_a_hospital_cannot_pose_as_the_server(north: Kit, copy_of: Copy, kits: Path) -> None:
    server = copy_of("organiser")
    take_keys(server, kits / "south")
    with serving(server):
        assert wrong(preflight(north.folder, timeout=TIMEOUT)).name == "encryption"


def test_the_organiser_cannot_pose_as_a_hospital(north: Kit, organiser: Kit) -> None:
    take_keys(north, organiser.folder)
    with serving(organiser) as calls:
        assert "closed the connection when it saw our certificate" in refusal(north)
    assert calls == []


def test_a_server_that_refuses_this_hospital(north: Kit, organiser: Kit) -> None:
    def refuse(request: bytes, context: Any) -> bytes:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "'north' is not in this\x1b project" + "!" * 1000)
        raise AssertionError

    with (
        serving(organiser, refuse),
        raises(TrustFailed, match="refuses this kit .'north' is not in this. pro") as told,
    ):
        check_tls(PreflightContext(north, timeout=TIMEOUT))
    assert len(told.value.found) < 400


def test_the_server_of_another_project(north: Kit, organiser: Kit) -> None:
    with serving(organiser, project="ab12"), raises(TrustFailed, match="is the server of another project"):
        check_tls(PreflightContext(north, timeout=TIMEOUT))


@mark.parametrize("answer", [b"[]", b"0" * 100_000], ids=["no object", "too large"])
def test_an_answer_that_is_none(answer: bytes, north: Kit, organiser: Kit) -> None:
    with serving(organiser, lambda request, context: answer):
        assert "does not answer as the server of wardround does (" in refusal(north)


def test_every_value_of_an_answer_is_checked() -> None:
    good = {"time": 1.5, "wardround": "1.0", "project": "ab12"}
    assert read_answer(json.dumps(good).encode()) == good
    for change in (
        *({"time": value} for value in (True, -1, 1e300, math.nan, "1", None, [])),
        *({"wardround": value} for value in ("1" * 65, 1, "")),
        {"project": None},
    ):
        assert read_answer(json.dumps(good | change).encode()) is None, change
    for answer in (b"", b"{}", b"[" * 9000, b"\xff", b"0"):
        assert read_answer(answer) is None, answer


def test_a_server_that_does_not_answer(north: Kit, organiser: Kit) -> None:
    ended = threading.Event()
    with (
        serving(organiser, lambda request, context: b"{}" if ended.wait(TIMEOUT) else b""),
        raises(CheckFailed) as told,
    ):
        try:
            check_tls(PreflightContext(north, timeout=0.5))
        finally:
            ended.set()
    assert "accepts our certificate but did not answer within 0.5 s" in str(told.value)


def test_a_server_of_another_kind(north: Kit, organiser: Kit) -> None:
    """The right certificates, but not gRPC."""

    def answer(connection: socket.socket) -> None:
        with secured_context(organiser).wrap_socket(connection, server_side=True) as speaking:
            speaking.sendall(b"HTTP/1.1 404 Not Found\r\n\r\n")

    with listening(north.port, answer):
        assert "(it does not speak HTTP/2)" in refusal(north)


def test_a_plain_server(north: Kit) -> None:
    def plain(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with listening(north.port, plain):
        found = wrong(preflight(north.folder, timeout=TIMEOUT))
    assert found.name == "encryption" and "does not speak TLS" in found.found


def test_a_server_that_hangs_up_at_once(north: Kit) -> None:
    with listening(north.port, lambda connection: connection.recv(4096) and None):
        found = wrong(preflight(north.folder, timeout=TIMEOUT))
    assert found.name == "encryption" and "before either side had proved who it is" in found.found


def test_a_silent_server(north: Kit) -> None:
    with listening(north.port, lambda connection: threading.Event().wait(1.0) and None):
        found = wrong(preflight(north.folder, timeout=0.3))
    assert found.name == "encryption" and "does not speak TLS (no answer within 0.3 s)" in found.found


# The organiser


def test_the_organisers_own_checks(organiser: Kit, foreign: Path) -> None:
    free = preflight(organiser.folder, timeout=TIMEOUT)
    assert [check.name for check in free] == ["kit", "certificate", "port", "disk", "versions"]
    assert find_failed(free) is None and free[2].found.endswith("free")

    with serving(organiser):
        running = preflight(organiser.folder, timeout=TIMEOUT)
    assert "this project's server is running" in running[2].found

    with listening(organiser.port, lambda connection: connection.sendall(b"SSH-2.0\r\n")):
        assert "is taken by another program" in wrong(preflight(organiser.folder, timeout=TIMEOUT)).found
    with serving(read_kit(foreign / "organiser")):
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


@mark.parametrize("name", ["keys/authority.crt", "keys/own.crt", "kit.json"])
@mark.parametrize("harm", ["cut", "gone"])
def test_join_with_a_broken_kit_ends_before_it_connects(
    name: str, harm: str, mine: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    file = mine / "north" / name
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:100])

    code, _, err = call(monkeypatch, capsys, "join", str(mine / "north"))

    assert code == 2 and Path(name).name in err


@mark.parametrize("name", ["keys/own.crt", "keys/own.key"])
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
    claim_kit(open_kit(mine / "organiser")).close()


def test_a_state_that_is_a_file_is_said(
    mine: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    shutil.rmtree(mine / "organiser" / "state")
    (mine / "organiser" / "state").write_text("")

    code, _, err = call(monkeypatch, capsys, "server", str(mine / "organiser"))

    assert code == 2 and "must be a folder that this account may write into" in err
