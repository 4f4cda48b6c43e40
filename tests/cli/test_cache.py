"""wardround cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wardround.cli import app


def test_the_cache_command_says_where_kernels_are_and_clears_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARDROUND_CACHE", str(tmp_path))
    place = tmp_path / "kernels" / "inductor"
    place.mkdir(parents=True)
    (place / "network.py").write_text("compiled")
    shown = json.loads(CliRunner().invoke(app, ["cache", "--json"]).output)
    assert (shown["kernels"], shown["files"], shown["bytes"]) == (str(tmp_path / "kernels"), 1, 8)
    done = CliRunner().invoke(app, ["cache", "--clear"])
    assert done.exit_code == 0 and "Files removed: 1" in done.output and not place.exists()
