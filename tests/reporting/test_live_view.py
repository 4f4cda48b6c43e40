"""The live server answers this machine's browser, and nobody and nothing else."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from helpers import run, settings
from pytest import fixture
from typer.testing import CliRunner

import wardround as wr
from wardround.cli import app
from wardround.cli.report import draw_source, sparkline
from wardround.reporting import live_view as watch
from wardround.reporting import open_source
from wardround.reporting.live_view import LiveReport, serve


@fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    target = tmp_path_factory.mktemp("watch") / "run"
    run(target)
    return target


@fixture
def served(folder: Path) -> Any:
    with serve(folder, until_done=False) as page:
        yield page


def ask(served: LiveReport, path: str = "", method: str = "GET", **headers: str) -> tuple[int, str, Any]:
    place = urlsplit(served.url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    try:
        connection.request(method, path if path.startswith("/") else place.path + path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_the_page_and_its_status_are_served(served: LiveReport) -> None:
    status, page, headers = ask(served)

    assert status == 200 and page.startswith("<!doctype html>")
    assert (
        headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        and headers["Cache-Control"] == "no-store"
    )
    facts = json.loads(ask(served, "status.json")[1])
    assert facts["done"] is True
    assert f'data-live="{facts["state"]}"' in page and "connect-src &#x27;self&#x27;" in page


def test_only_this_machine_is_served(served: LiveReport) -> None:
    assert urlsplit(served.url).hostname == "127.0.0.1"
    assert served._server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1", "", "localhost.evil.example"]
)
def test_another_host_name_is_refused(served: LiveReport, host: str) -> None:
    status, text, _ = ask(served, Host=host)

    assert status == 421 and "<html" not in text


def test_localhost_with_the_port_is_fine(served: LiveReport) -> None:
    assert ask(served, Host=f"localhost:{urlsplit(served.url).port}")[0] == 200


@pytest.mark.parametrize(
    "path", ["/", "/status.json", "config.yaml", "../", "?x=1", "%2e%2e/config.yaml", "//", "status.json/"]
)
def test_other_paths_do_not_exist(served: LiveReport, path: str) -> None:
    assert ask(served, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
def test_only_get_is_answered(served: LiveReport, method: str) -> None:
    assert ask(served, method=method)[0] in (405, 501)


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    with serve(tmp_path / "later", until_done=False) as page:
        assert "Waiting for the run to start" in ask(page)[1]
        assert json.loads(ask(page, "status.json")[1])["done"] is False
        run(tmp_path / "later")
        assert "Mean test Dice" in ask(page)[1]


def test_a_damaged_run_is_told_and_the_server_lives(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: [")
    with serve(tmp_path, until_done=False) as page:
        assert ask(page)[0] == 503
        (tmp_path / "config.yaml").write_text("name: mended")
        (tmp_path / "records.jsonl").write_text("")
        assert ask(page)[0] == 200


def test_it_ends_by_itself_once_the_last_page_was_seen(folder: Path) -> None:
    page = serve(folder, until_done=True)
    ask(page)
    waiting = threading.Thread(target=page.wait)
    waiting.start()
    waiting.join(5)

    assert not waiting.is_alive()
    with pytest.raises(OSError):
        ask(page)


def test_it_ends_without_a_browser_after_a_while(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.1)
    page = serve(folder, until_done=True)
    waiting = threading.Thread(target=page.wait)
    waiting.start()
    waiting.join(5)

    assert not waiting.is_alive()


def test_the_browser_is_opened_when_asked(folder: Path, monkeypatch: Any) -> None:
    opened: list[str] = []
    monkeypatch.setattr(watch.webbrowser, "open", opened.append)
    with serve(folder, open_browser=True, until_done=False) as page:
        assert opened == [page.url]


# Command line


def test_watching_in_a_pipe_gives_a_line_a_round(folder: Path) -> None:
    done = CliRunner().invoke(app, ["watch", str(folder), "--terminal"])

    assert done.exit_code == 0, done.output
    assert "tiny: round 1/2" in done.output and "tiny: round 2/2 validation dice" in done.output


def test_watching_prints_the_address_and_ends_with_the_run(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(watch, "GRACE_SECONDS", 0.1)
    done = CliRunner().invoke(app, ["watch", str(folder)])

    assert done.exit_code == 0, done.output
    assert "at http://127.0.0.1:" in done.output and "The run is done." in done.output


def test_watching_nothing_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["watch", str(tmp_path)])

    assert "contains neither a run nor a comparison" in str(done.exception)


def test_the_terminal_view_shows_clients_and_rounds(folder: Path) -> None:
    from rich.console import Console

    console = Console(record=True, width=100)
    console.print(draw_source(open_source(folder)))
    text = console.export_text()

    assert "round 2 of 2" in text and "north" in text and "weight" in text


def test_the_terminal_view_of_a_comparison_shows_its_cells(tmp_path: Path) -> None:
    from rich.console import Console

    from wardround.comparison import compare

    compare(settings(tmp_path), methods=["fedavg"], seeds=1, output=tmp_path / "grid", overrides=["rounds=1"])
    console = Console(record=True, width=100)
    console.print(draw_source(open_source(tmp_path / "grid")))

    assert "1 of 1 cells" in console.export_text()
    assert (
        "fedavg, seed 42: done"
        in CliRunner().invoke(app, ["watch", str(tmp_path / "grid"), "--terminal"]).output
    )


def test_sparklines_take_any_numbers() -> None:
    assert sparkline([]) == sparkline([float("nan")]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"


def test_a_stopped_run_that_goes_on_is_running(tmp_path: Path) -> None:
    from wardround.comparison.runs import read_run

    wr.run(settings(tmp_path / "run"))
    result = json.loads((tmp_path / "run/result.json").read_text())
    (tmp_path / "run/result.json").write_text(json.dumps({**result, "status": "stopped", "rounds": 1}))

    assert read_run(tmp_path / "run").status == "running"
