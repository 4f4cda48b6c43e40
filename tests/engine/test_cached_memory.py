"""A memory that stays where it was computed behaves as one on the disk does."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers import params
from pytest import fixture

from wardround.clients import SyncState
from wardround.engine.cached_memory import CachedMemory, MemoryBudget
from wardround.engine.memory_store import MemoryStore


@fixture
def store(tmp_path: Path) -> MemoryStore:
    return MemoryStore(tmp_path / "north", keep=None)


def remember(memory: CachedMemory | MemoryStore, round: int, sync_state: SyncState) -> object:
    """A task that remembers its round; what it found there."""
    memory.follow(sync_state)
    before = memory.load().get("value")
    memory.save(round, {"value": round}, len(sync_state.rewinds))
    return before


def test_it_follows_the_server_as_the_disk_does(store: MemoryStore, tmp_path: Path) -> None:
    plain = MemoryStore(tmp_path / "plain")
    cached = CachedMemory(store, MemoryBudget(10**6))
    requests = [(-1, SyncState()), (0, SyncState()), (0, SyncState((0,))), (1, SyncState((0,), best=0))]
    requests += [(2, SyncState((0,), best=1)), (2, SyncState((0, 2), best=1)), (5, SyncState((0, 2), best=2))]
    for round, sync_state in requests:
        assert remember(cached, round, sync_state) == remember(plain, round, sync_state)
        if sync_state.best is not None:
            assert cached.load_best(sync_state.best) == plain.load_best(sync_state.best)


def test_nothing_is_on_the_disk_before_a_snapshot_is_written(store: MemoryStore) -> None:
    cached = CachedMemory(store, MemoryBudget(10**6))
    remember(cached, 0, SyncState())
    snapshot = cached.snapshot(1)
    remember(cached, 1, SyncState(best=0))  # the writer is late
    assert not store.list_files("memory")
    snapshot.write()
    assert store.load() == {"value": 0}
    cached.snapshot(2).write()
    assert store.load() == {"value": 1} and store.load_best(0) == {"value": 0}


def test_a_task_may_change_what_it_loaded_and_what_it_saved(store: MemoryStore) -> None:
    cached = CachedMemory(store, MemoryBudget(10**6))
    own = {"w": torch.zeros(2), "previous": params(w=1.0), 3: [torch.zeros(1)]}
    cached.save(0, own)
    snapshot = cached.snapshot(1)
    own["w"] += 5
    loaded = cached.load()
    loaded["w"] += 7
    loaded["3"][0] += 7
    snapshot.write()
    for memory in (cached.load(), store.load()):
        assert memory["w"].tolist() == [0, 0] and memory["3"][0].tolist() == [0]  # keys as a file has them


def test_what_does_not_fit_goes_to_the_disk_and_goes_on_there(store: MemoryStore) -> None:
    room = MemoryBudget(100)
    cached = CachedMemory(store, room)
    cached.save(0, {"w": torch.zeros(10)})
    cached.follow(SyncState(best=0))
    cached.save(1, {"w": torch.ones(20)})
    assert store.load()["w"].sum() == 20 and store.load_best(0)["w"].sum() == 0
    assert room.take(100)  # nothing is held any more
    cached.follow(SyncState((1,), best=0))
    assert cached.load()["w"].sum() == 0  # the round began again
    assert CachedMemory(store, MemoryBudget(10)).load()["w"].sum() == 0  # too large when a run is resumed


def test_a_resumed_run_reads_what_was_written(store: MemoryStore) -> None:
    first = CachedMemory(store, MemoryBudget(10**6))
    remember(first, 0, SyncState())
    first.follow(SyncState(best=0))
    first.snapshot(1).write()
    second = CachedMemory(MemoryStore(store.folder, keep=None), MemoryBudget(10**6))
    second.follow(SyncState((1,), best=0))
    assert second.load() == {"value": 0} and second.load_best(0) == {"value": 0}
    assert second.snapshot(1).num_bytes == 0
