"""What clients remember follows the server by what each request says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers import flip, params
from pytest import MonkeyPatch, fixture, mark, raises

from wardround.clients import SyncState
from wardround.engine.memory_store import MemoryStore
from wardround.errors import CheckpointError
from wardround.storage import StoredTensors


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
