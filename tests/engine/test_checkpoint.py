"""What clients remember follows the server by what each request says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers import params
from pytest import MonkeyPatch, fixture, mark, raises

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
from wardround.errors import CheckpointError
from wardround.params import Params
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
    from wardround.storage import save_tensors

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


def test_an_empty_memory_writes_no_file(tmp_path: Path) -> None:
    MemoryStore(tmp_path).save(0, {})

    assert list(tmp_path.iterdir()) == []
