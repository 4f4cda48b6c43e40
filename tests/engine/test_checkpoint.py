"""Every kept round continues to the same bytes, and damage is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import flip, run, settings
from pytest import TempPathFactory, fixture, mark, raises

import wardround as wr
from wardround.engine.checkpoint import Checkpoints, keep_models
from wardround.errors import CheckpointError, ConfigError
from wardround.params import Params
from wardround.prediction.trained import TrainedModel
from wardround.storage import StoredTensors, save_tensors


def test_the_server_remembers_its_rewinds(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.rewinds() == ()
    assert checkpoints.add_rewind(2) == (2,)
    assert Checkpoints(tmp_path).add_rewind(1) == (2, 1)
    assert Checkpoints(tmp_path).rewinds() == (2, 1)


# Rounds that are kept

ROUNDS = 6
CHANGES: dict[str, Any] = {"rounds": ROUNDS, "optimizer": {"learning_rate": 0.01, "state": "keep"}}
NEWEST = ("checkpoints/round-00006.safetensors", "clients/north/memory-00005.safetensors")


def changes(method: str) -> dict[str, Any]:
    return {**CHANGES, "method": {"name": method}}


@fixture(scope="module")
def finished(tmp_path_factory: TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run of six rounds, made once a method."""
    folder = tmp_path_factory.mktemp("finished")

    def find(method: str) -> Path:
        if not (folder / method).exists():
            run(folder / method, **changes(method))
        return folder / method

    return find


@fixture
def copied(tmp_path: Path, finished: Callable[[str], Path]) -> Path:
    return shutil.copytree(finished("scaffold"), tmp_path / "run")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def checkpoints_of(folder: Path) -> Checkpoints:
    return Checkpoints(folder / "checkpoints")


def assert_same_run(folder: Path, whole: Path) -> None:
    one, other = wr.Result.load(folder), wr.Result.load(whole)
    assert one.params_sha256 == other.params_sha256
    assert one.summary["test"] == other.summary["test"]
    assert (folder / "cases.csv").read_text() == (whole / "cases.csv").read_text()
    timed = ("seconds", "exchanges")
    timeless = [[{k: v for k, v in r.items() if k not in timed} for r in run.records] for run in (one, other)]
    assert timeless[0] == timeless[1]


@mark.parametrize(("method", "number"), [("scaffold", 4), ("scaffold", 5), ("ditto", 4)])
def test_every_round_that_is_kept_continues_to_the_same_bytes(
    method: str, number: int, tmp_path: Path, finished: Callable[[str], Path]
) -> None:
    folder = shutil.copytree(finished(method), tmp_path / "run")
    assert checkpoints_of(folder).kept() == [4, 5, 6]

    wr.run(settings(folder, **changes(method)), resume=True, from_round=number)

    assert_same_run(folder, finished(method))
    assert checkpoints_of(folder).check() == 6


def test_a_crash_while_going_back_leaves_the_earlier_round(
    copied: Path, finished: Callable[[str], Path]
) -> None:
    checkpoints_of(copied).rewind(4)  # the first of its steps, and no other
    with raises(CheckpointError, match="does not keep round 6; --from-round can be 4"):
        checkpoints_of(copied).check(6)
    wr.run(settings(copied, **changes("scaffold")), resume=True)
    assert_same_run(copied, finished("scaffold"))


@mark.parametrize("damage", [flip, truncate, Path.unlink])
@mark.parametrize("kind", ["state", "memory", "best", "best memory"])
def test_a_damaged_file_is_refused_with_the_round_that_is_whole(
    kind: str, damage: Callable[[Path], None], copied: Path
) -> None:
    index = checkpoints_of(copied).read_index()
    files = {
        "state": NEWEST[0],
        "memory": NEWEST[1],
        "best": f"checkpoints/{index['best_file']}",
        "best memory": next(name for name in index["files"] if name.startswith("clients/north/best")),
    }
    assert set(files.values()) <= index["files"].keys()
    assert len(index["files"]) == 2 + 3 * 2
    damage(copied / files[kind])

    with raises(CheckpointError, match=files[kind]) as refused:
        checkpoints_of(copied).check()

    if kind in ("state", "memory"):
        told = "Round 5 is whole; continue after it with --resume --from-round 5."
        assert str(refused.value).endswith(told)


def test_damage_stops_a_resume_before_anything_changes(copied: Path, finished: Callable[[str], Path]) -> None:
    for name in NEWEST:
        flip(copied / name)
    before = {path: path.read_bytes() for path in copied.rglob("*-0*")}
    before |= {copied / name: (copied / name).read_bytes() for name in ("records.jsonl", "result.json")}
    with raises(CheckpointError, match=r"round-00006\.safetensors is damaged"):
        wr.run(settings(copied, **changes("scaffold")), resume=True)
    assert {path: path.read_bytes() for path in before} == before

    wr.run(settings(copied, **changes("scaffold")), resume=True, from_round=5)
    assert_same_run(copied, finished("scaffold"))


def test_only_an_older_round_is_whole(copied: Path) -> None:
    (copied / NEWEST[0]).unlink()
    flip(copied / "clients/south/memory-00004.safetensors")
    for asked in (None, 5):
        with raises(CheckpointError, match="Round 4 is whole"):
            checkpoints_of(copied).check(asked)
    truncate(copied / "checkpoints/round-00004.safetensors")
    with raises(CheckpointError, match="No other kept round is whole"):
        checkpoints_of(copied).check()


@mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_a_damaged_index_has_a_copy(damage: Callable[[Path], None], copied: Path) -> None:
    damage(copied / "checkpoints/latest.json")
    with raises(CheckpointError, match=r"latest\.json .* Round 6 is whole"):
        wr.run(settings(copied, **changes("scaffold")), resume=True)
    again = wr.run(settings(copied, **changes("scaffold")), resume=True, from_round=6)
    assert again.status == "done" and checkpoints_of(copied).check() == 6

    damage(copied / "checkpoints/round-00005.json")
    with raises(CheckpointError, match=r"00005|does not keep round 5"):
        checkpoints_of(copied).check(5)
    assert checkpoints_of(copied).check() == 6


def test_damaged_rewinds_are_refused(tmp_path: Path) -> None:
    Checkpoints(tmp_path).add_rewind(12)
    path = tmp_path / "rewinds.json"
    path.write_text(path.read_text().replace("12", "13"))
    with raises(CheckpointError, match=r"rewinds\.json is damaged: .* bring it back from a copy"):
        Checkpoints(tmp_path).rewinds()


def test_a_round_that_is_not_kept_cannot_be_chosen(copied: Path) -> None:
    for number in (3, 7, -1):
        with raises(CheckpointError, match=rf"does not keep round {number}; from_round can be 4, 5, 6"):
            wr.run(settings(copied, **changes("scaffold")), resume=True, from_round=number)
    with raises(ConfigError, match="add resume=True"):
        wr.run(settings(copied, **changes("scaffold")), from_round=5)


def test_one_round_may_be_enough(tmp_path: Path) -> None:
    run(tmp_path / "run", **{**changes("scaffold"), "rounds": 3}, checkpoint={"keep": 1})
    index = checkpoints_of(tmp_path / "run").read_index()
    found = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert found == sorted([index["best_file"], "latest.json", "round-00003.json", "round-00003.safetensors"])
    assert len(list((tmp_path / "run/clients/north").glob("memory-*"))) == 1


def test_a_folder_of_an_earlier_version_resumes(copied: Path, finished: Callable[[str], Path]) -> None:
    """It had one round, no checksums, and a plain list of rewinds."""
    for path in copied.rglob("*-0*.safetensors"):
        stored = StoredTensors(path)
        plain = {"format": "wardround-memory-1", "tree": stored.metadata["tree"], "rewinds": "0"}
        save_tensors(path, {name: stored[name] for name in stored}, plain)
    checkpoints = copied / "checkpoints"
    index = json.loads((checkpoints / "round-00005.json").read_text())
    earlier = {key: value for key, value in index.items() if key not in ("files", "sha256")}
    (checkpoints / "latest.json").write_text(json.dumps(earlier))
    (checkpoints / "rewinds.json").write_text("[]")
    for path in checkpoints.glob("round-*.json"):
        path.unlink()

    wr.run(settings(copied, **changes("scaffold")), resume=True)

    assert_same_run(copied, finished("scaffold"))
    assert checkpoints_of(copied).kept() == [5, 6]


# Models alone


@mark.parametrize("method", ["fedavg", "ditto", "scaffold"])
def test_a_run_that_keeps_its_models_alone_predicts_as_before_and_is_not_resumed(
    tmp_path: Path, finished: Callable[[str], Path], method: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished(method), folder)
    loaded = TrainedModel.load(folder, client="north" if method == "ditto" else None)
    expected = Params.of(loaded.model).sha256()
    before = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    for _ in range(2):  # the second time there is nothing left to do
        keep_models(folder)

    again = TrainedModel.load(folder, client="north" if method == "ditto" else None)
    assert Params.of(again.model).sha256() == expected
    assert wr.Result.load(folder).params.sha256() == wr.Result.load(finished(method)).params.sha256()
    assert sum(path.stat().st_size for path in folder.rglob("*.safetensors")) < before / 2
    with raises(CheckpointError, match="keeps its models alone"):
        wr.run(settings(folder, **changes(method)), resume=True)
