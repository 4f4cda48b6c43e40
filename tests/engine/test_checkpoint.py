"""What clients remember follows the server by what each request says."""

from __future__ import annotations

from pathlib import Path

from pytest import fixture, mark

from wardround.clients.sync_state import SyncState
from wardround.engine.checkpoint import Checkpoints, MemoryStore


@fixture
def store(tmp_path: Path) -> MemoryStore:
    return MemoryStore(tmp_path / "north")


def done(store: MemoryStore, round: int, sync_state: SyncState, value: float | None = None) -> float | None:
    """A task that adds to what is remembered; what it found there."""
    store.follow(sync_state)
    before = store.load().get("value")
    store.save(round, {"value": round if value is None else value}, len(sync_state.rewinds))
    return before


def test_a_standing_travels_as_plain_facts() -> None:
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
