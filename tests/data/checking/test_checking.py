"""A fifth of all files broken, in every way at once: each is listed with its reason, the rest goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.checking.broken_files import KINDS, UNUSUAL, break_some, make_case, make_federation
from wardround.data.checking.check import check, check_quickly
from wardround.data.checking.findings import CheckReport
from wardround.data.federation_file import PrepareSettings, load
from wardround.data.listing import Listing
from wardround.data.preparing.cache import Cache
from wardround.data.preparing.pool import prepare_cases
from wardround.data.preparing.prepare import prepare_case
from wardround.data.readers.image_files import read_image, read_label
from wardround.data.sources import list_cases

# The reader passes over what is no file, with a note instead of a finding.
NOTED = {"folder", "pipe"}
CLIENTS, CASES = 3, 50

FILE = """\
version: 1
sources: [{path: data}]
labels: {box: [1]}
splits: {by: ratios}
prepare: {size: [16, 16, 8]}
"""


class Ward:
    """The broken federation, and what was found in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_federation(folder / "data", CLIENTS, CASES)
        for number, name in enumerate(UNUSUAL):
            if not name.startswith("."):
                make_case(folder / "data", "site0", name, 5000 + number)
        healthy = {path for path in self.images() if path.name.removesuffix(".nii.gz") not in UNUSUAL}
        self.broken = break_some(folder / "data", 0.2)
        self.num_images = len(healthy) + len(UNUSUAL)
        (folder / "federation.yaml").write_text(FILE)
        self.before = self.tree()
        self.file = load(folder / "federation.yaml")
        self.listing: Listing = list_cases(self.file, folder)
        self.report: CheckReport = check(self.listing, self.file, base=folder, jobs=2)

    def images(self) -> list[Path]:
        return sorted(self.folder.glob("data/*/images/*.nii.gz"))

    def tree(self) -> dict[str, tuple[int, int]]:
        """Every path with its size and time of change."""
        found = {}
        for place, folders, files in os.walk(self.folder):
            for name in [*folders, *files]:
                stat = (Path(place) / name).lstat()
                found[str(Path(place) / name)] = (stat.st_size, stat.st_mtime_ns)
        return found


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Ward:
    return Ward(tmp_path_factory.mktemp("broken data"))


def test_a_fifth_is_broken_in_every_kind(ward: Ward) -> None:
    assert set(ward.broken.values()) == set(KINDS)
    assert 0.19 <= len(ward.broken) / ward.num_images <= 0.22


def test_each_broken_case_is_listed_with_its_reason(ward: Ward) -> None:
    told = " ".join(ward.listing.notes)
    for (client, case), kind in ward.broken.items():
        reasons = [
            f for f in ward.report.findings if (f.client, f.case, f.severity) == (client, case, "error")
        ]
        if kind in NOTED and not reasons:
            assert case in told, f"{kind}: neither a finding nor a note"
            continue
        assert [found.code for found in reasons] == [KINDS[kind].code], kind
        assert f"case '{case}': " in reasons[0].sentence


def test_nothing_healthy_is_left_out(ward: Ward) -> None:
    usable = {(one.client, one.name) for one in ward.report.usable}
    assert not usable & set(ward.broken)
    healthy = {(f"site{n}", f"s{n}c{m:02}") for n in range(CLIENTS) for m in range(CASES)}
    healthy |= {("site0", name) for name in UNUSUAL}
    assert usable == healthy - set(ward.broken)
    assert {one.split for one in ward.report.usable} == {"train", "val", "test"}


def test_strict_has_something_to_refuse(ward: Ward) -> None:
    assert not ward.report.ok
    assert ward.report.as_dict()["counts"]["error"] >= len(ward.report.left_out) > 0
    assert json.loads(json.dumps(ward.report.as_dict()))["usable"] == len(ward.report.usable)


def test_checking_writes_nothing(ward: Ward) -> None:
    check_quickly(ward.listing, ward.file, base=ward.folder)
    assert ward.tree() == ward.before


def test_a_quick_look_leaves_out_no_more_than_the_whole_check(ward: Ward) -> None:
    few = {
        (one.client, one.name) for one in check_quickly(ward.listing, ward.file, base=ward.folder).left_out
    }
    assert few
    assert few <= {(one.client, one.name) for one in ward.report.left_out}


def test_all_that_is_left_can_be_prepared(ward: Ward) -> None:
    settings = PrepareSettings(size=(16, 16, 8))
    for case in ward.report.usable[::5]:
        assert case.label is not None
        made = prepare_case(read_image(case.images), read_label(case.label), settings, {"box": (1,)})
        assert made.image.isfinite().all()
        assert made.label is not None and made.label.any()


def test_the_cache_takes_all_that_is_left_and_names_the_rest(ward: Ward, tmp_path: Path) -> None:
    good, bad = ward.report.usable[::6], ward.report.left_out
    outcome = prepare_cases(Cache(tmp_path / "cache"), [*good, *bad], ward.file, jobs=1)
    assert {(one.client, one.name) for one in good} <= set(outcome.paths)
    failed = {(client, case): reason for client, case, reason in outcome.failures}
    for case in bad:
        kind = ward.broken[case.client, case.name]
        # Only the check compares a case with the others, or its label's place with the image's.
        if KINDS[kind].code not in ("geometry", "channels", "dimensions"):
            assert failed[case.client, case.name], kind
    assert ward.tree() == ward.before


def wardround(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command line, as a person calls it."""
    command = [sys.executable, "-m", "wardround", *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_a_run_finishes_and_lists_what_it_left_out(ward: Ward) -> None:
    """Exit 0, every broken case with its reason in the run folder, nothing written elsewhere."""
    small = {
        "rounds": 1,
        "output": "run",
        "data": {"federation": "federation.yaml"},
        "model": {"name": "unet3d", "base_filters": 2, "levels": 2},
        "evaluate": {"metrics": ["dice"], "overlays": 0},
        "compute": {"threads": 1},
    }
    (ward.folder / "run.yaml").write_text(json.dumps(small))
    before = ward.tree()

    done = wardround("train", "run.yaml", "--quiet", cwd=ward.folder)

    assert done.returncode == 0, done.stderr
    listed = json.loads((ward.folder / "run/left_out.json").read_text())
    for entry in ward.report.left_out:
        assert f"case '{entry.name}'" in listed[entry.client][entry.name]
    new = {path for path in ward.tree() if path not in before}
    outside = [
        path for path in new if not path.startswith((f"{ward.folder}/run", f"{ward.folder}/.wardround"))
    ]
    assert outside == []
    changed = [path for path, facts in before.items() if Path(path).parts[-1] != ward.folder.name
               and ward.tree().get(path) != facts and path.startswith(f"{ward.folder}/data")]  # fmt: skip
    assert changed == []


def test_strict_exits_2_and_without_it_0(ward: Ward) -> None:
    strict = wardround("data", "check", "federation.yaml", "--strict", "--json", cwd=ward.folder)
    mild = wardround("data", "check", "federation.yaml", cwd=ward.folder)

    assert strict.returncode == 2 and json.loads(strict.stdout)["ok"] is False
    assert mild.returncode == 0 and "left out" in mild.stdout
    assert "Traceback" not in strict.stderr + mild.stderr
