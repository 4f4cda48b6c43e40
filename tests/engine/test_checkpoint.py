"""What clients remember follows the server by what each request says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers import params, run, settings
from pytest import MonkeyPatch, TempPathFactory, fixture, mark, raises

import wardround as wr
from wardround.clients import SyncState
from wardround.engine.checkpoint import (
    Checkpoints,
    MemoryStore,
    load_memory,
    pack,
    read_into_memory,
    save_memory,
    unpack,
)
from wardround.errors import CheckpointError, ConfigError
from wardround.params import Params
from wardround.storage import StoredTensors, save_tensors


@fixture
def store(tmp_path: Path) -> MemoryStore:
    return MemoryStore(tmp_path / "north")


def done(store: MemoryStore, round: int, sync_state: SyncState, value: float | None = None) -> float | None:
    """A task that adds to what is remembered; what it found there."""
    store.follow(sync_state)
    before = store.load().get("value")
    store.save(round, {"value": round if value is None else value}, len(sync_state.rewinds))
    return before


def test_a_sync_state_travels_as_a_plain_dictionary() -> None:
    for sync_state in (SyncState(), SyncState((3, 3, 5), 4)):
        assert SyncState.from_dict(sync_state.as_dict()) == sync_state


def test_without_rewinds_memory_goes_from_round_to_round(store: MemoryStore) -> None:
    assert [done(store, round, SyncState()) for round in range(4)] == [None, 0, 1, 2]


def test_a_round_that_begins_again_starts_from_the_memory_before_it(store: MemoryStore) -> None:
    done(store, 0, SyncState())
    done(store, 1, SyncState(), 100.0)
    assert done(store, 1, SyncState((1,)), 200.0) == 0
    assert done(store, 1, SyncState((1, 1)), 300.0) == 0
    assert done(store, 2, SyncState((1, 1))) == 300.0


def test_a_rewind_is_followed_once(store: MemoryStore) -> None:
    done(store, 0, SyncState())
    done(store, 1, SyncState((1,)), 100.0)
    store.follow(SyncState((1,)))
    store.follow(SyncState((1,)))
    assert store.load() == {"value": 100.0}


@mark.parametrize("returns_in", [1, 2, 5])
def test_a_client_that_was_away_catches_up(returns_in: int, store: MemoryStore) -> None:
    """It worked in an attempt at round 1 (from 0) that was given up, and missed what came then."""
    done(store, 0, SyncState())
    done(store, 1, SyncState(), 100.0)
    assert done(store, returns_in, SyncState((1,))) == 0


def test_several_missed_rewinds_go_back_to_the_earliest(store: MemoryStore) -> None:
    done(store, 0, SyncState())
    done(store, 1, SyncState(), 100.0)
    assert done(store, 4, SyncState((1, 3, 2))) == 0


def test_rewinds_of_rounds_it_never_saw_change_nothing(store: MemoryStore) -> None:
    done(store, 0, SyncState())
    assert done(store, 3, SyncState((1, 2))) == 0


def test_set_up_before_the_first_round_is_kept_when_the_first_begins_again(store: MemoryStore) -> None:
    done(store, -1, SyncState(), 7.0)
    done(store, 0, SyncState(), 100.0)
    assert done(store, 0, SyncState((0,))) == 7.0


def test_the_memory_of_the_best_model_is_kept(store: MemoryStore) -> None:
    done(store, 0, SyncState())
    done(store, 1, SyncState(best=0))
    done(store, 2, SyncState(best=1))
    done(store, 3, SyncState(best=1))
    store.follow(SyncState(best=1))
    assert store.load_best(1) == {"value": 1}
    assert store.load() == {"value": 3}


def test_a_best_model_that_was_taken_back_gives_its_place_to_the_one_before(store: MemoryStore) -> None:
    done(store, 0, SyncState())
    done(store, 1, SyncState(best=0))
    store.follow(SyncState(best=1))  # validation of round 1, then the server died before its checkpoint
    store.follow(SyncState((1,), best=0))
    assert store.load_best(0) == {"value": 0}
    assert store.load() == {"value": 0}
    assert store.load_best(1) == {}


def test_a_client_without_memory_has_nothing_to_follow(store: MemoryStore) -> None:
    store.follow(SyncState((0, 1), best=1))
    assert store.load() == {} and store.load_best(1) == {}


def test_the_server_remembers_its_rewinds(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.rewinds() == ()
    assert checkpoints.add_rewind(2) == (2,)
    assert Checkpoints(tmp_path).add_rewind(1) == (2, 1)
    assert Checkpoints(tmp_path).rewinds() == (2, 1)


# Memory on the disk


def test_memory_of_any_shape_survives_the_disk(tmp_path: Path) -> None:
    memory = {
        "previous": Params({"a/b": torch.randn(2), "n": torch.tensor(3)}),
        "scores": [1, 2.5, None, "text", True],
        "deep": {"x": {"y": torch.ones(2)}},
        "empty": Params({}),
    }
    save_memory(tmp_path / "m.safetensors", memory)
    back = load_memory(tmp_path / "m.safetensors")

    assert back["scores"] == memory["scores"]
    assert torch.equal(back["deep"]["x"]["y"], torch.ones(2))
    assert back["previous"].sha256() == memory["previous"].sha256()  # type: ignore[attr-defined]
    assert len(back["empty"]) == 0
    assert read_into_memory(back)["scores"] == memory["scores"]


def test_memory_that_cannot_be_saved_is_named() -> None:
    with raises(TypeError, match="'/x' holds a set"):
        pack({"x": {1}}, {})


def test_packing_and_unpacking_is_the_identity() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"a": [1, {"b": torch.zeros(1)}]}

    assert str(unpack(pack(value, tensors), tensors)) == str(value)


def test_a_memory_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x.safetensors", {"w": torch.ones(1)}, {})
    with raises(CheckpointError, match="not a wardround memory file"):
        load_memory(tmp_path / "x.safetensors")


def test_rewinding_forgets_later_rounds_and_keeps_earlier_ones(tmp_path: Path) -> None:
    store = MemoryStore(tmp_path)
    for number in range(4):
        store.save(number, {"round": number})
        store.keep_best(number)

    store.rewind(3)

    assert store.load() == {"round": 2}
    assert store.load_best(2) == {"round": 2}
    assert store.load_best(3) == {}


def test_what_only_training_needs_is_read_when_it_is_looked_at(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    memory = {"previous": params(w=[1.0, 2.0], n=[3]), "own": params(w=[4.0]), "optimizer": params(m=[5.0])}
    store = MemoryStore(tmp_path)
    store.save(0, memory)
    looked_at: list[str] = []
    read = StoredTensors.part

    def watched(self: StoredTensors, name: str, start: int, stop: int) -> Any:
        looked_at.append(name)
        return read(self, name, start, stop)

    monkeypatch.setattr(StoredTensors, "part", watched)
    found = store.load()
    assert looked_at == ["/own/w"]
    assert list(found["previous"]) == ["w", "n"] and found["previous"].spec("w") == ((2,), torch.float32)
    store.save(0, found)  # over the file it is read from
    store.save(1, found)
    for name, wanted in memory.items():
        assert store.load()[name].sha256() == wanted.sha256()


def test_memories_of_the_rounds_that_are_kept_stay(tmp_path: Path) -> None:
    for keep in (1, 3):
        store = MemoryStore(tmp_path / str(keep), keep=keep)
        for number in range(6):
            store.save(number, {"round": number})
        for done in range(6 - keep, 6):  # the server's last round is 5 while the sixth is under way
            assert store.list_before(done)[0].name == f"memory-{done - 1:05d}.safetensors"
        assert len(list(store.folder.iterdir())) == keep + 1


def test_a_memory_that_changed_on_the_disk_is_refused_by_name(store: MemoryStore) -> None:
    store.save(4, {"value": torch.ones(3)})
    flip(store.folder / "memory-00004.safetensors")
    with raises(CheckpointError) as refused:
        MemoryStore(store.folder).load()
    assert str(refused.value) == (
        "memory-00004.safetensors of client 'north' is damaged: its bytes do not match its SHA-256. "
        "The run can continue after round 4 or before it: --resume --from-round 4."
    )


def test_a_memory_that_cannot_say_when_it_was_written_is_not_dropped_silently(store: MemoryStore) -> None:
    """Whether the server took it back is unknown: the hospital decides, and is told how."""
    store.save(3, {"value": 3})
    store.save(4, {"value": 4})
    path = store.folder / "memory-00004.safetensors"
    path.write_bytes(path.read_bytes()[:90])
    told = r"memory-00004\.safetensors of client 'north' .* Remove it, and resume the run with --from-round 4"
    with raises(CheckpointError, match=told):
        MemoryStore(store.folder).follow(SyncState((4,)))
    path.unlink()
    assert done(store, 4, SyncState((4,))) == 3


def test_an_empty_memory_writes_no_file(tmp_path: Path) -> None:
    MemoryStore(tmp_path).save(0, {})

    assert list(tmp_path.iterdir()) == []


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


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 4
    path.write_bytes(content)


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
        with raises(CheckpointError, match=rf"does not keep round {number}; --from-round can be 4, 5, 6"):
            wr.run(settings(copied, **changes("scaffold")), resume=True, from_round=number)
    with raises(ConfigError, match="add --resume"):
        wr.run(settings(copied, **changes("scaffold")), from_round=5)


def test_one_round_may_be_enough(tmp_path: Path) -> None:
    run(tmp_path / "run", **{**changes("scaffold"), "rounds": 3}, checkpoint={"keep": 1})
    index = checkpoints_of(tmp_path / "run").read_index()
    found = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert found == sorted([index["best_file"], "latest.json", "round-00003.json", "round-00003.safetensors"])
    assert len(list((tmp_path / "run/clients/north").glob("memory-*"))) == 2


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
