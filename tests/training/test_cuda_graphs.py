"""CUDA graphs on the CPU: a tape in their place, which runs the same operations on the same tensors again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from helpers import config, run
from pytest import MonkeyPatch, mark
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wardround.data.cases import Batch
from wardround.engine import host
from wardround.engine.host import Host
from wardround.losses.objective import Context
from wardround.messages import Message
from wardround.params import Params
from wardround.training import cuda_graphs
from wardround.training.learner import ParameterTerm

STILL = {"flip": 0, "intensity": 0}
EXACT = {"precision": "float32", "deterministic": True}


class Tape(TorchDispatchMode):
    """Operations in order, with the tensors they read and wrote; outside tensors are as before at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self._made: set[int] = set()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self.replays = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, value in zip(function._schema.arguments, args, strict=False):
            written = place.alias_info is not None and place.alias_info.is_write
            written |= place.name in ("running_mean", "running_var")  # which the schema does not say
            for tensor in [t for t in tree_leaves(value) if written and isinstance(t, Tensor)]:
                if tensor.untyped_storage().data_ptr() not in self._made:
                    self._before.setdefault(id(tensor), (tensor, tensor.clone()))
        found = function(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        self._made |= {tensor.untyped_storage().data_ptr() for tensor in results}
        self._operations.append((function, args, kwargs, results))
        return found

    def rewind(self) -> None:
        for tensor, before in self._before.values():
            tensor.copy_(before)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, results in self._operations:
            again = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for home, value in zip(results, again, strict=True):
                if home.data_ptr() != value.data_ptr():
                    home.copy_(value)


class TapeCapture:
    """In the place of `GraphCapture`."""

    tapes: ClassVar[list[Tape]] = []

    def __init__(self, device: torch.device) -> None: ...

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    def capture(self, work: Callable[[], None], what: str) -> Tape:
        tape, stream = Tape(), torch.get_rng_state()
        with tape:
            work()
        with torch.no_grad():
            tape.rewind()
        torch.set_rng_state(stream)
        self.tapes.append(tape)
        return tape

    def release(self) -> None: ...


def use_tapes(monkeypatch: MonkeyPatch) -> list[Tape]:
    """Capture every step from here on; the tapes that are made."""
    choose = host.choose_compute
    monkeypatch.setattr(host, "choose_compute", lambda *a: replace(choose(*a), cuda_graphs=True))
    monkeypatch.setattr(cuda_graphs, "GraphCapture", TapeCapture)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**30, 2**30))
    monkeypatch.setattr(TapeCapture, "tapes", [])
    return TapeCapture.tapes


CAPTURED = [
    {"name": "fedavg"},
    {"name": "fedprox", "mu": 0.5},
    {"name": "fednova", "mu": 0.5},
    {"name": "feddyn", "alpha": 0.5},
    {"name": "ditto", "lam": 0.5},
    {"name": "scaffold"},
    {"name": "fedsam"},
    {"name": "harmofl"},
    {"name": "fedma"},
    {"name": "fedevi"},
]
EAGER = [{"name": "moon"}, {"name": "fedproto"}, {"name": "fedrcl"}, {"name": "fedbr"}, {"name": "feddg"}]


@mark.parametrize("method", [*CAPTURED, *EAGER], ids=lambda method: method["name"])
def test_captured_steps_of_a_method_give_the_bytes_of_eager_ones(
    tmp_path: Path, monkeypatch: MonkeyPatch, method: dict[str, Any]
) -> None:
    settings = {
        "rounds": 2,
        "local_epochs": 3,
        "method": method,
        "model": {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch", "dropout": 0.2},
        "augmentation": STILL,
    }
    expected = run(tmp_path / "eager", **settings)
    tapes = use_tapes(monkeypatch)
    found = run(tmp_path / "captured", **settings)

    assert found.params_sha256 == expected.params_sha256
    for one, other in zip(found.records, expected.records, strict=True):
        assert one["loss"] == other["loss"] and one["validation"] == other["validation"]
    assert (found.folder / "cases.csv").read_bytes() == (expected.folder / "cases.csv").read_bytes()
    if method in CAPTURED:
        assert sum(tape.replays for tape in tapes) > 20


def test_one_graph_serves_every_client_and_round_of_a_parameter_term(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    tapes = use_tapes(monkeypatch)
    made = config(tmp_path, local_epochs=4, method={"name": "fedprox"}, augmentation=STILL)
    here = Host(made, tmp_path / "clients", ["north", "east"])
    start = Params.of(here.bench.model)
    for round in range(3):
        for name in here.names:
            message = Message(params=start.map(lambda tensor: tensor * (1 + round)))  # noqa: B023
            assert here.run(name, "train", round, message).failure is None
    assert here.bench._graphs is not None
    assert len(tapes) == len(here.bench._graphs.steps._captured) <= 2  # one for each batch size


def test_a_step_that_a_graph_could_not_hold_runs_eagerly(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    tapes = use_tapes(monkeypatch)
    client = Host(config(tmp_path, local_epochs=6), tmp_path / "clients", ["north"]).client("north")
    start = Params.of(client.model)
    client.fit(start, add=lambda model, batch, context: batch.image.mean() * 0)
    assert tapes == []
    term = ParameterTerm("size", 0.1, lambda model, fixed: fixed["w"].sum(), {"w": torch.ones(1)})
    client.fit(start, add=term)
    assert tapes != []


def test_a_fit_leaves_nothing_of_its_last_pass(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    use_tapes(monkeypatch)
    client = Host(config(tmp_path, local_epochs=6), tmp_path / "clients", ["north"]).client("north")
    seen = []

    def watch(batch: Batch, context: Context) -> Batch:
        seen.append(weakref.ref(context))
        return batch

    gc.disable()
    try:
        client.fit(Params.of(client.model), on_batch=watch)
        assert seen and seen[0]() is None  # its gradients' nodes belong to another stream than the next pass
    finally:
        gc.enable()


@mark.gpu
@mark.parametrize("method", CAPTURED, ids=lambda method: method["name"])
def test_cuda_graphs_of_a_method_give_the_bytes_of_eager_steps(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    results = [
        run(
            tmp_path / how,
            rounds=3,
            local_epochs=3,
            method=method,
            augmentation=STILL,
            compute={**EXACT, "compile": how},
        )
        for how in ("off", "graphs")
    ]
    assert results[0].params_sha256 == results[1].params_sha256
    assert results[0].records[-1]["loss"] == results[1].records[-1]["loss"]
