"""Ditto: two rounds by hand, the global stream is FedAvg's, personal models stay and are used."""

from pathlib import Path
from typing import Any

import torch
from helpers import Watcher, config, run, settings
from pytest import approx, mark, raises

import wardround as wr
from toy import client, pull_to, rounds, state, weights
from wardround.engine.host import Host
from wardround.engine.memory_store import MemoryStore
from wardround.messages import Message
from wardround.methods.ditto import Ditto
from wardround.params import Params

KEEP = {"learning_rate": 0.01, "state": "keep"}


def stored(folder: Path, name: str) -> dict[str, Any]:
    return MemoryStore(folder / "clients" / name).load()


# By hand


def test_two_rounds_are_those_worked_out_by_hand() -> None:
    """F_north = (w - 1)²/2, F_east = (w + 1)², rate 0.1, two steps, lambda 1.

    Global, plain FedAvg from 0:  north 0.1, 0.19; east -0.2, -0.36; mean -0.085
    Personal of north from 0:     0.1, then 0.1 - 0.1 (-0.9 + 0.1) = 0.18
      next round, tied to -0.085: 0.18 - 0.1 (-0.82 + 0.265) = 0.2355,
                                  0.2355 - 0.1 (-0.7645 + 0.3205) = 0.2799
    """
    north = client("north", gradient=pull_to(1.0), steps=2, num_weights=1)
    east = client("east", gradient=pull_to(-1.0, 2.0), steps=2, num_weights=1)
    after = rounds(Ditto(lam=1.0), state([0.0]), [north, east], 2, num_weights=1)

    assert weights(next(after).params) == approx([-0.085], abs=1e-12)
    assert weights(north.memory["personal"]) == approx([0.18], abs=1e-12)
    next(after)
    assert weights(north.memory["personal"]) == approx([0.2799], abs=1e-12)


def test_without_a_tie_the_personal_model_trains_alone() -> None:
    """0.1, 0.19, then from there 0.271, 0.3439: the global model has no say."""
    north = client("north", gradient=pull_to(1.0), steps=2, num_weights=1)
    east = client("east", gradient=pull_to(-1.0), steps=2, num_weights=1)
    list(rounds(Ditto(lam=0.0), state([0.0]), [north, east], 2, num_weights=1))

    assert weights(north.memory["personal"]) == approx([0.3439], abs=1e-12)


def test_a_tighter_tie_brings_the_personal_models_nearer() -> None:
    apart = []
    for lam in (0.0, 1.0, 5.0):
        north = client("north", gradient=pull_to(1.0), steps=4, num_weights=1)
        east = client("east", gradient=pull_to(-1.0), steps=4, num_weights=1)
        list(rounds(Ditto(lam=lam), state([0.0]), [north, east], 5, num_weights=1))
        apart.append(weights(north.memory["personal"])[0] - weights(east.memory["personal"])[0])

    assert apart[0] > apart[1] > apart[2] > 0


# Whole runs


@mark.parametrize("optimizer", [{"learning_rate": 0.01}, KEEP])
def test_the_global_model_is_fedavgs_to_the_last_bit(optimizer: Any, tmp_path: Path) -> None:
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch", "dropout": 0.2}
    chosen = {"rounds": 3, "model": model, "optimizer": optimizer}
    ditto = run(tmp_path / "ditto", method={"name": "ditto"}, **chosen)
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"}, **chosen)

    assert ditto.params_sha256 == fedavg.params_sha256
    for mine, plain in zip(ditto.records, fedavg.records, strict=True):
        assert mine["weights"] == plain["weights"] and mine["loss"] == plain["loss"]
        assert mine["exchanges"][0]["bytes_up"] == plain["exchanges"][0]["bytes_up"]


def test_a_client_is_judged_by_its_personal_model(tmp_path: Path) -> None:
    ditto = run(tmp_path / "ditto", method={"name": "ditto"})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"})

    def losses(result: Any) -> list[float]:
        return [row["loss"] for rows in result.outcome.test.cases.values() for row in rows]

    assert losses(ditto) != losses(fedavg)
    models = [stored(tmp_path / "ditto", name)["personal"].sha256() for name in ("east", "north", "south")]
    assert len({*models, ditto.params_sha256}) == 4


def test_a_client_that_never_trained_uses_the_global_model(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method={"name": "ditto"}, participation=("east", "north"))
    assert not stored(tmp_path / "run", "south")

    host = Host(result.config, tmp_path / "run" / "clients", ["east", "south"])
    ask = Message(params=result.outcome.state.params)
    own = host.run("south", "personal_model", 2, ask).message.extras["model"]
    assert own.sha256() == result.params_sha256
    other = host.run("east", "personal_model", 2, ask).message.extras["model"]
    assert other.sha256() == stored(tmp_path / "run", "east")["personal"].sha256()


def test_local_statistics_of_the_global_model_are_not_laid_over_the_personal_one(tmp_path: Path) -> None:
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch", "bn_stats": "local"}
    chosen = config(tmp_path / "run", model=model, method={"name": "ditto"})
    wr.run(chosen)
    host = Host(chosen, tmp_path / "run" / "clients", ["north"])
    memory = stored(tmp_path / "run", "north")
    north = host.client("north")
    north.memory = dict(memory)
    v = host.method.personal(north, Params.of(host.bench.model))
    seen = torch.cat([logits for logits, _ in north.predictions(north.data.test, v)])

    images = north.data.test.batch(range(len(north.data.test))).image
    v.load_into(host.bench.model)
    host.bench.model.eval()
    assert torch.equal(seen, host.bench.model(images).detach())
    assert any(not torch.equal(memory["own"][name], v[name]) for name in memory["own"])


def test_personal_models_survive_a_resumed_run(tmp_path: Path) -> None:
    method = {"name": "ditto"}
    whole = run(tmp_path / "whole", rounds=3, method=method, optimizer=KEEP)
    broken = settings(tmp_path / "broken", rounds=3, method=method, optimizer=KEEP)
    with raises(KeyboardInterrupt):
        wr.run(broken, listener=Watcher(crash_in_round=2))
    resumed = wr.run(broken, resume=True)

    assert resumed.table.rows == whole.table.rows
    for name in ("east", "north", "south"):
        kept = [stored(tmp_path / run, name)["personal"].sha256() for run in ("whole", "broken")]
        assert kept[0] == kept[1]
