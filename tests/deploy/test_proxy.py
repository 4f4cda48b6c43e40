"""The proxy of a hospital's network: found, used by every connection, and its password told to nobody."""

from collections.abc import Iterator
from pathlib import Path

from pytest import LogCaptureFixture, MonkeyPatch, fixture, importorskip, mark, raises

importorskip("grpc")

from deploy.connect_proxy import ConnectProxy
from wardround.deploy.kits.kit import Kit, read_kit
from wardround.deploy.preflight import CheckFailed, PreflightContext
from wardround.deploy.preflight.connection import check_name, check_port, check_tls
from wardround.deploy.proxy import find_proxy, parse_proxy
from wardround.deploy.rpc.client import Connection
from wardround.deploy.rpc.server import HospitalServer
from wardround.errors import ConfigError

USER = "wards:s3cret"


@fixture
def proxy() -> Iterator[ConnectProxy]:
    made = ConnectProxy(user=USER)
    yield made
    made.close()


@fixture
def north(mine: Path) -> Kit:
    return read_kit(mine / "north")


@fixture
def server(mine: Path, tmp_path: Path) -> Iterator[HospitalServer]:
    (tmp_path / "exchange").mkdir()
    running = HospitalServer(read_kit(mine / "organiser"), tmp_path / "exchange")
    running.start()
    yield running
    running.stop()


def say(kit: Kit, proxy: str) -> None:
    kit.site_file.write_text(f"data: phantom\nproxy: {proxy}\n")


def test_hospital_and_preflight_go_through_the_proxy_and_its_password_is_told_to_nobody(
    proxy: ConnectProxy, north: Kit, server: HospitalServer, caplog: LogCaptureFixture
) -> None:
    say(north, f"http://{USER}@localhost:{proxy.port}")
    context = PreflightContext(north)
    said = [check_name(context), check_port(context), check_tls(context)]
    assert (
        said[0].startswith("the proxy localhost is")
        and f"through the proxy localhost:{proxy.port}" in said[1]
    )
    before = len(proxy.asked)
    connection = Connection(north)
    connection.hello()
    connection.beat()
    connection.close()
    assert len(proxy.asked) == before + 1 and set(proxy.asked) == {f"localhost:{north.port}"}
    assert "s3cret" not in " ".join([*said, caplog.text, repr(find_proxy(north)), str(find_proxy(north))])


def test_a_proxy_that_does_not_let_us_through_is_named(proxy: ConnectProxy, north: Kit) -> None:
    say(north, f"http://wards:wrong@localhost:{proxy.port}")
    with raises(CheckFailed, match="does not lead to localhost port .* 407 Proxy Authentication") as told:
        check_port(PreflightContext(north))
    assert "wrong" not in f"{told.value.found} {told.value.todo}"


def test_site_yaml_comes_before_the_environment_and_none_is_past_every_proxy(
    north: Kit, monkeypatch: MonkeyPatch, tmp_path: Path
) -> None:
    file = north.folder / "kit.json"
    file.write_text(file.read_text().replace("localhost", "organiser.example.org"))
    north = read_kit(north.folder)
    for name in ("http_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://wide.example.org:3128")
    assert str(find_proxy(north)) == "wide.example.org:3128"
    say(north, "own.example.org")
    assert str(find_proxy(north)) == "own.example.org:80"
    say(north, "none")
    assert find_proxy(north) is None
    say(north, "http://u:p@own.example.org")
    north.site_file.chmod(0o644)
    with raises(ConfigError, match="holds the password of a proxy.*chmod 600"):
        find_proxy(north)
    north.site_file.unlink()
    monkeypatch.setenv("no_proxy", "example.org")
    assert find_proxy(north) is None


@mark.parametrize(
    "text",
    ["https://u:s3cret@x.org", "http://u:s3cret@x.org:99999", "http://u:s3cret@", "http://x.org/s3cret"],
)
def test_an_address_that_is_none_is_refused_without_being_repeated(text: str) -> None:
    with raises(ValueError, match="it is not .*address.*write it as http://proxy.example.org:3128") as told:
        parse_proxy(text)
    assert "s3cret" not in str(told.value)
