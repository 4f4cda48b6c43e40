"""The tutorial, and the way from a PACS and back, typed in as they stand on the page."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import call

from orthanc import ORTHANC, PASSWORD, PLUGIN, USER, run_orthanc
from wardround.data.dicom.web import LOGIN, open_archive, store

PAGE = Path(__file__).parents[1] / "docs/tutorial/first-federation.md"
ARCHIVE = "http://localhost:8042"
PACS = Path(__file__).parents[1] / "docs/how-to/pacs.md"


@pytest.mark.slow
def test_every_command_of_the_tutorial_works_in_an_empty_folder(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (yaml,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "first.yaml").write_text(yaml)
    shown: dict[str, str] = {}
    for command in re.findall(r"^    wardround (.+)$", text, re.MULTILINE):
        done = subprocess.run(
            [sys.executable, "-m", "wardround", *shlex.split(command)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        shown[command] = done.stdout

    assert "140 of 140 cases are usable. Found: no foreground 6" in shown["data check federation.yaml"]
    mean = re.compile(r"\| mean \| ([\d.]+) \|")
    here = float(mean.findall(shown["train first.yaml"])[0])
    assert here == pytest.approx(float(mean.findall(text)[0]), abs=0.02)  # threads may round otherwise
    near, far = (
        float(mean.findall(shown[f"evaluate runs/first elsewhere/{name}"])[0])
        for name in ("hospital-06", "west")
    )
    assert near > 0.6 and far < 0.2
    masks = json.loads((tmp_path / "masks/predictions.json").read_text())["scans"]
    assert "unlike the training hospitals" in masks["west-001.nii.gz"]["warnings"][0]
    assert "elsewhere" in (tmp_path / "runs/alone/report.html").read_text(encoding="utf-8")
    for path in (
        "runs/first/report.html", "runs/first/egress.jsonl", "runs/compared/report.html",
        "masks/west-001.nii.gz", "masks/west-001_uncertainty.nii.gz", "masks/predictions.json",
    ):  # fmt: skip
        assert (tmp_path / path).stat().st_size > 0


@pytest.mark.slow
def test_every_command_from_a_pacs_and_back_works_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("highdicom", reason="needs wardround[dicom]")
    text = PACS.read_text(encoding="utf-8")
    (yaml,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("pacs.yaml").write_text(yaml)
    commands = re.findall(r"^    wardround (.+)$", text, re.MULTILINE)
    here = [command for command in commands if ARCHIVE not in command]
    for command in here:
        code, _, said = call(monkeypatch, capsys, *shlex.split(command))
        assert code == 0, f"{command}: {said}"
    assert "lesion: [1]" in Path("federation.yaml").read_text()
    written = {path.name for path in Path("back").iterdir()}
    assert written == {
        "north-001.seg.dcm", "north-001.rtstruct.dcm", "north-001.seg.nrrd", "predictions.json",
    }  # fmt: skip
    if ORTHANC is None or not PLUGIN.exists():
        return
    monkeypatch.setenv(LOGIN, f"{USER}:{PASSWORD}")
    (tmp_path / "orthanc").mkdir()
    with run_orthanc(tmp_path / "orthanc") as port:
        store(open_archive(f"http://localhost:{port}/dicom-web"), sorted(Path("pacs/north").rglob("*.dcm")))
        for command in commands[len(here) :]:
            address = ARCHIVE.replace("8042", str(port))
            code, _, said = call(monkeypatch, capsys, *shlex.split(command.replace(ARCHIVE, address)))
            assert code == 0, f"{command}: {said}"
    assert len(list(Path("fetched/labels").iterdir())) == len(list(Path("north/labels").iterdir())) == 8
    assert json.loads(Path("sent/predictions.json").read_text())["scans"]["north-001.seg.dcm"]["stored"]
