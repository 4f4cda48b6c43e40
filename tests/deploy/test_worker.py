"""The hospital's process for one run."""

from pathlib import Path
from typing import Any

from pytest import MonkeyPatch, fixture, importorskip

importorskip("cryptography")

from wardround.deploy import worker
from wardround.deploy.kits.kit import KIT
from wardround.deploy.worker import HospitalWorker, check

Lines = list[dict[str, Any]]


@fixture
def lines() -> Lines:
    return []


def test_cases_that_are_not_the_hospitals_are_told_before_it_connects(mine: Path, lines: Lines) -> None:
    check(mine / "north", lines.append)
    (mine / "north" / "site.yaml").write_text("data: there.yaml\n")
    check(mine / "north", lines.append)

    assert "synthetic cases" in lines[0]["ready"] and lines[0]["largest"] > 10**6
    assert "there.yaml" in lines[1]["wrong"]


def test_a_file_that_is_no_request_is_a_failure_in_one_sentence(
    mine: Path, tmp_path: Path, lines: Lines, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setenv(KIT, str(mine / "north"))
    request, reply = tmp_path / "a.request", tmp_path / "a.reply"
    request.write_bytes(b"no parcel at all")
    about = {"request": str(request), "reply": str(reply), "largest": 10**6}

    HospitalWorker(lines.append).answer(about)

    assert "could not be read" in lines[0]["failed"] and not reply.exists()


def test_a_site_that_breaks_tells_no_secrets(
    mine: Path, tmp_path: Path, lines: Lines, monkeypatch: MonkeyPatch
) -> None:
    def breaks() -> None:
        raise RuntimeError("/data/secret")

    monkeypatch.setattr(worker, "open_site", breaks)
    HospitalWorker(lines.append).answer({"request": str(tmp_path / "a"), "reply": "", "largest": 1})

    assert lines == [{"failed": "its process could not answer (RuntimeError)"}]
