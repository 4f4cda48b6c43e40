"""FedMA: channels are matched before they are averaged."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers import config, params, run, spoil, vectors
from pytest import MonkeyPatch, approx, mark, raises
from torch import Tensor

from wardround import models
from wardround.aggregation.mean import mean
from wardround.clients import Answer
from wardround.engine.host import Host
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.messages import Message, Reply, ServerState
from wardround.methods.fedma import FedMA, assign_channels, best_order, costs, match, shuffle_entries
from wardround.models import ModelSettings
from wardround.models.channel_groups import ChannelGroup, channel_groups, permute
from wardround.params import Params

LAYER = [("w1", 0, 0), ("b1", 0, 0)]
HIDDEN = {"hidden": ChannelGroup(3, ["w1", "b1"], [*LAYER, ("w2", 1, 0)])}
PAIR = {"hidden": ChannelGroup(2, ["w1", "b1"], [*LAYER, ("w2", 1, 0)])}


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def shuffled_copy(source: Params, groups: dict[str, ChannelGroup], seed: int) -> Params:
    generator = torch.Generator().manual_seed(seed)
    for group in groups.values():
        size = group.size // group.blocks
        blocks = torch.randperm(group.blocks, generator=generator).tolist()
        order = torch.cat([block * size + torch.randperm(size, generator=generator) for block in blocks])
        source = permute(source, group, order)
    return source


def replies(**sent: tuple[int, Params]) -> list[Reply]:
    return [Reply(tensors, client=name, num_examples=count) for name, (count, tensors) in sent.items()]


# Numbers


@mark.parametrize("case", vectors("fedma").values(), ids=lambda case: case["name"])
def test_golden_numbers(case: dict[str, Any]) -> None:
    given = {name: double(value) for name, value in case["inputs"].items()}
    reference = Params({name: given[f"ref_{name}"] for name in ("w1", "b1", "w2")})
    client = Params({name: given[name] for name in ("w1", "b1", "w2")})
    layer = HIDDEN["hidden"].layer  # the vector compares what makes a channel, not who reads it

    cost = costs(client, reference, HIDDEN["hidden"], layer)
    assert cost == approx(np.array(case["expected"]["cost"]), abs=1e-6)
    assert assign_channels(cost).tolist() == case["expected"]["assign"]
    for names in (layer, list(client)):
        aligned, moved = match(client, reference, HIDDEN, names, sweeps=5)
        average = mean([reference, aligned])
        assert moved == 3
        for name, value in case["expected"].items():
            kind, _, tensor = name.partition("_")
            if tensor:
                got = aligned[tensor] if kind == "aligned" else average[tensor]
                assert got.numpy() == approx(np.array(value), abs=1e-6)


def test_two_channels_by_hand() -> None:
    # Channel vectors (w1, b1, w2). Reference: (2, 1, 3), (0, 0, 1). Client: (0.2, 0, 1.2), (2.2, 1.2, 3.2).
    # Squared distances: 1.8² + 1² + 1.8² = 7.48   0.2² + 0 + 0.2² = 0.08
    #                    0.2² + 0.2² + 0.2² = 0.12  2.2² + 1.2² + 2.2² = 11.12
    # In place 7.48 + 11.12 = 18.60, exchanged 0.08 + 0.12 = 0.20: exchange. Weights 30/40 and 10/40.
    large = params(w1=double([[2], [0]]), b1=double([1, 0]), w2=double([[3, 1]]))
    small = params(w1=double([[0.2], [2.2]]), b1=double([0, 1.2]), w2=double([[1.2, 3.2]]))
    names = ("w1", "b1", "w2")
    state = ServerState(large, trainable=names)
    fedma = FedMA()

    cost = costs(small, large, PAIR["hidden"], names)
    assert cost == approx(np.array([[7.48, 0.08], [0.12, 11.12]]))
    assert best_order(cost).tolist() == [1, 0]
    got, moved = fedma.match_replies(state, replies(east=(10, small), north=(30, large)), PAIR, names)
    average = fedma.average(state, got, fedma.weigh(state, got))
    assert moved == {"east": 2, "north": 0}
    assert average["w1"].flatten().tolist() == approx([2.05, 0.05])
    assert average["b1"].tolist() == approx([1.05, 0.0])
    assert average["w2"].flatten().tolist() == approx([3.05, 1.05])


def test_the_match_of_two_layers_is_the_nearest_of_all_orders() -> None:
    random = np.random.default_rng(3)
    reference = {
        name: random.normal(size=size) for name, size in {"a": (3, 4), "b": (2, 3), "c": (1, 2)}.items()
    }
    noisy = {name: value + 0.1 * random.normal(size=value.shape) for name, value in reference.items()}
    first, second = [2, 0, 1], [1, 0]
    client = {"a": noisy["a"][first], "b": noisy["b"][second][:, first], "c": noisy["c"][:, second]}
    groups = {
        "first": ChannelGroup(3, ["a"], [("a", 0, 0), ("b", 1, 0)]),
        "second": ChannelGroup(2, ["b"], [("b", 0, 0), ("c", 1, 0)]),
    }

    distances = {}
    for p, q in itertools.product(itertools.permutations(range(3)), itertools.permutations(range(2))):
        moved = [client["a"][list(p)], client["b"][list(q)][:, list(p)], client["c"][:, list(q)]]
        pairs = zip(moved, reference.values(), strict=True)
        distances[p, q] = sum(float(((x - y) ** 2).sum()) for x, y in pairs)
    p, q = min(distances, key=lambda orders: distances[orders])

    found, moved_channels = match(params(**client), params(**reference), groups, ["a", "b", "c"], sweeps=5)
    assert (p, q) == ((1, 2, 0), (1, 0)) and moved_channels == 5
    assert np.array_equal(found["a"].numpy(), client["a"][list(p)])
    assert np.array_equal(found["b"].numpy(), client["b"][list(q)][:, list(p)])
    assert np.array_equal(found["c"].numpy(), client["c"][:, list(q)])


@mark.parametrize("blocks", [1, 2, 3, 6])
def test_an_assignment_is_the_cheapest_that_keeps_blocks_together(blocks: int) -> None:
    size = 6 // blocks
    allowed = [
        order
        for order in itertools.permutations(range(6))
        if all(len({order[b * size + i] // size for i in range(size)}) == 1 for b in range(blocks))
    ]
    for seed in range(5):
        cost = np.random.default_rng(seed).random((6, 6))
        best = min(allowed, key=lambda order: sum(cost[i, j] for i, j in enumerate(order)))
        assert tuple(assign_channels(cost, blocks).tolist()) == best


def test_equal_channels_stay_where_they_are() -> None:
    assert best_order(np.zeros((4, 4))).tolist() == [0, 1, 2, 3]
    assert best_order(np.ones((4, 4))).tolist() == [0, 1, 2, 3]


# Networks


@mark.parametrize(
    "name, norm",
    [("unet2d", "batch"), ("unet2d", "group"), ("unet2d_fedevi", "instance"), ("unet3d", "none")],
)
def test_a_reordered_and_noised_copy_is_recovered_exactly(name: str, norm: Any) -> None:
    torch.manual_seed(0)
    chosen = ModelSettings(name=name, base_filters=8, levels=3, norm=norm)
    model = models.build(chosen, in_channels=1, num_outputs=1, dimensions=models.MODELS[name].dimensions[0])
    groups, reference, names = channel_groups(model), Params.of(model), list(Params.trainable(model))
    for tensor_name in reference:
        if tensor_name.endswith(("running_mean", "running_var")):
            reference[tensor_name].uniform_(1, 2)  # statistics of unlike channels show that they follow

    def noised(tensor: Tensor) -> Tensor:
        spread = tensor.std() if tensor.numel() > 1 else tensor.abs()
        return tensor + 0.05 * spread * torch.randn_like(tensor)

    noisy = reference.updated({tensor_name: noised(reference[tensor_name]) for tensor_name in names})
    other = shuffled_copy(noisy, groups, seed=1)
    found, moved = match(other, reference, groups, names, sweeps=5)

    assert other.sha256() != noisy.sha256() and moved > 0
    assert found.sha256() == noisy.sha256()


def test_statistics_do_not_decide() -> None:
    torch.manual_seed(0)
    chosen = ModelSettings(base_filters=4, levels=2, norm="batch")
    model = models.build(chosen, in_channels=1, num_outputs=1, dimensions=2)
    reference = Params.of(model)
    buffers = {name: torch.rand_like(t) * 1e3 for name, t in reference.items() if "running" in name}

    _, moved = match(
        reference.updated(buffers), reference, channel_groups(model), list(Params.trainable(model)), 5
    )

    assert buffers and moved == 0


@mark.parametrize("refine", [False, True])
def test_the_largest_client_is_the_reference_then_the_first_by_name(refine: bool) -> None:
    torch.manual_seed(0)
    model = models.build(ModelSettings(base_filters=4, levels=2), in_channels=1, num_outputs=1, dimensions=2)
    groups, first = channel_groups(model), Params.of(model)
    sent = [shuffled_copy(first, groups, seed) for seed in range(3)]
    fedma = FedMA(refine=refine)
    state = fedma.start(model)

    for counts, reference in (((5, 9, 7), 1), ((9, 9, 7), 0)):
        given = replies(**{name: (count, p) for name, count, p in zip("abc", counts, sent, strict=True)})
        for order in itertools.permutations(given):
            got, moves = fedma.match_replies(state, list(order), groups, state.trainable)
            assert {reply.params.sha256() for reply in got} == {sent[reference].sha256()}
            assert [name for name, count in moves.items() if not count] == ["abc"[reference]]


def own_models(folder: Path, seed: int) -> tuple[Host, list[Params]]:
    """Two hospitals' models, each trained from a network of its own."""
    chosen = config(
        folder / str(seed),
        seed=seed,
        method={"name": "fedma"},
        local_epochs=15,
        data={"phantom": {"hospitals": 2, "size": 16, "cases": 16}},
        model={"name": "unet2d", "base_filters": 8, "levels": 2, "norm": "batch"},
    )
    host = Host(chosen, folder / str(seed) / "clients", ["east", "north"])
    start = Params.of(build_model(chosen))
    ask = Message(params=start, scalars={"own_start": True})
    answers = [host.run(name, "train", 0, ask) for name in host.names]
    return host, [answer.message.params for answer in answers]


def test_matching_makes_the_mean_of_independent_networks_better(tmp_path: Path) -> None:
    plain, matched = [], []
    for seed in (0, 1):
        host, (east, north) = own_models(tmp_path, seed)
        model = host.bench.model
        found, moved = match(north, east, channel_groups(model), list(Params.trainable(model)), sweeps=5)
        assert moved > 0
        client = host.client("north")  # statistics are measured anew: those of two networks do not mix
        plain.append(client.evaluate(client.with_own_statistics(mean([east, north]))))
        matched.append(client.evaluate(client.with_own_statistics(mean([east, found]))))

    # over seeds 0 to 7 the loss was lower in every one, on average 0.72 of the plain mean's
    assert np.mean(matched) < 0.9 * np.mean(plain)  # type: ignore[arg-type]


# Rounds


def test_without_own_starts_and_sweeps_it_is_fedavg(tmp_path: Path) -> None:
    off = run(tmp_path / "off", method={"name": "fedma", "sweeps": 0, "independent_init": False})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"})

    assert off.params_sha256 == fedavg.params_sha256


def test_from_a_common_start_no_channel_moves_and_a_warning_says_so(tmp_path: Path) -> None:
    optimizer = {"learning_rate": 0.01, "state": "keep"}
    common = run(
        tmp_path / "common", method={"name": "fedma", "independent_init": False}, optimizer=optimizer
    )
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"}, optimizer=optimizer)

    assert common.params_sha256 == fedavg.params_sha256
    assert all(set(record["channels_moved"].values()) == {0} for record in common.records)
    assert all("FedMA is FedAvg" in record["warnings"][0] for record in common.records)


def test_identical_replies_of_a_common_start_leave_the_model_as_it_is(tmp_path: Path) -> None:
    still = {"name": "sgd", "learning_rate": 0.0}
    result = run(tmp_path / "run", method={"name": "fedma", "independent_init": False}, optimizer=still)

    assert result.params_sha256 == Params.of(build_model(result.config)).sha256()


def test_channels_move_in_the_first_round_and_the_records_count_them(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method={"name": "fedma"}, rounds=1)

    moved = result.records[0]["channels_moved"]
    assert set(moved) == {"east", "north", "south"}
    assert sorted(count > 0 for count in moved.values()) == [False, True, True]  # one is the reference


def test_own_starts_hold_the_same_numbers_in_an_order_of_the_clients_own() -> None:
    start = params(weight=torch.randn(4, 3, 3, 3), bias=torch.zeros(4), running_mean=torch.arange(4.0))
    one, two = (
        shuffle_entries(start, ["weight", "bias"], torch.Generator().manual_seed(seed)) for seed in (1, 2)
    )

    for own in (one, two):
        assert torch.equal(own["weight"].flatten().sort().values, start["weight"].flatten().sort().values)
        assert torch.equal(own["bias"], start["bias"]) and torch.equal(
            own["running_mean"], start["running_mean"]
        )
    assert len({p["weight"].numpy().tobytes() for p in (start, one, two)}) == 3


@mark.parametrize("layerwise", [False, True])
def test_one_client_alone_starts_from_the_common_network(layerwise: bool, tmp_path: Path) -> None:
    one: dict[str, Any] = {"data": {"phantom": {"hospitals": 1, "size": 16, "cases": 8}}}
    fedma = run(tmp_path / "fedma", method={"name": "fedma", "layerwise": layerwise}, **one)
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"}, **one)

    assert fedma.params_sha256 == fedavg.params_sha256
    assert all(list(record["channels_moved"].values()) == [0] for record in fedma.records)


def test_a_client_lost_in_the_first_round_forgets_its_own_network(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    spoil(monkeypatch, "east", lambda answer: Answer("east", failure="RuntimeError: boom"))
    result = run(
        tmp_path / "run", method={"name": "fedma"}, optimizer={"learning_rate": 0.01, "state": "keep"}
    )

    assert result.outcome.state.memory["moved"] == ["east"]  # the others came back since


def test_who_is_told_to_forget_drops_moments_and_previous_model(tmp_path: Path) -> None:
    def second(folder: Path, scalars: dict[str, Any], *without: str) -> str:
        chosen = config(
            folder,
            method={"name": "fedma"},
            objective={"name": "cfsl"},  # compares with the previous model
            optimizer={"learning_rate": 0.01, "state": "keep"},
        )
        host = Host(chosen, folder / "clients", ["north"])
        start = Params.of(build_model(chosen))
        host.run("north", "train", 0, Message(params=start))
        memory = host.store("north").load()
        assert set(without) <= set(memory)
        host.store("north").save(0, {key: value for key, value in memory.items() if key not in without})
        return host.run("north", "train", 1, Message(params=start, scalars=scalars)).message.sha256()

    kept = second(tmp_path / "kept", {})
    told = second(tmp_path / "told", {"forget": True})
    fresh = second(tmp_path / "fresh", {}, "optimizer", "previous")
    assert told == fresh != kept


@mark.parametrize("bn_stats", ["pooled", "reestimate"])
def test_statistics_of_batch_norm_travel_and_are_matched(bn_stats: str, tmp_path: Path) -> None:
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch", "bn_stats": bn_stats}
    result = run(tmp_path / "run", method={"name": "fedma"}, model=model, rounds=1)

    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.outcome.state.params.values())


# Layer by layer


def test_frozen_layers_do_not_move_even_with_weight_decay(tmp_path: Path) -> None:
    optimizer = {"name": "adamw", "learning_rate": 0.01, "weight_decay": 0.1}
    chosen = config(tmp_path, method={"name": "fedma", "layerwise": True}, optimizer=optimizer)
    host = Host(chosen, tmp_path / "clients", ["north"])
    start = Params.of(build_model(chosen))
    layer = channel_groups(host.bench.model)["encoder.0.first.conv"].layer

    answer = host.run("north", "train", 0, Message(params=start, scalars={"frozen": layer}))
    trained = answer.message.params
    assert trained is not None and trained.only(layer).sha256() == start.only(layer).sha256()
    assert all(not torch.equal(trained[name], start[name]) for name in start if name not in layer)


def test_layer_by_layer_has_an_exchange_for_each_layer(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method={"name": "fedma", "layerwise": True}, rounds=1)

    (record,) = result.records
    num_layers = len(result.outcome.state.memory["groups"])
    assert [exchange["task"] for exchange in record["exchanges"]] == ["train"] * (1 + num_layers)
    assert sum(count > 0 for count in record["channels_moved"].values()) == 2
    assert sum(record["weights"].values()) == approx(1)


def test_a_client_lost_between_layers_leaves_the_round_to_the_others(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    asked = []

    def lost_later(answer: Answer) -> Answer:
        asked.append(answer)
        return answer if len(asked) < 3 else replace(answer, failure="RuntimeError: boom")

    spoil(monkeypatch, "east", lost_later)
    result = run(tmp_path / "run", method={"name": "fedma", "layerwise": True}, rounds=1)

    assert len(asked) == 3 and set(result.records[0]["weights"]) == {"north", "south"}


def test_when_all_are_lost_between_layers_what_they_sent_is_matched(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    honest, calls = Host.run, []

    def only_once(self: Host, name: str, task: str, round: int, message: Message, *rest: Any) -> Answer:
        calls.append(task)
        lost = task == "train" and calls.count("train") > 3
        return (
            Answer(name, failure="RuntimeError: boom")
            if lost
            else honest(self, name, task, round, message, *rest)
        )

    monkeypatch.setattr(Host, "run", only_once)
    result = run(tmp_path / "run", method={"name": "fedma", "layerwise": True}, rounds=1)

    assert set(result.records[0]["weights"]) == {"east", "north", "south"}
    assert result.summary["num_lost"] == 3


# Refusals


@mark.parametrize(
    "changes, reason",
    [
        ({"model": {"name": "monai:SegResNet"}}, "method 'fedma'.*'monai:SegResNet'.*unet2d"),
        ({"model": {"norm": "batch", "bn_stats": "local"}}, "method 'fedma'.*bn_stats is local"),
        (
            {"objective": {"name": "infonce"}},
            r"method 'fedma'.*tensor 'projection\.layers\.0\.weight' was added",
        ),
    ],
)
def test_what_cannot_be_matched_is_refused_when_the_configuration_is_read(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with raises(ConfigError, match=reason):
        config(tmp_path, method={"name": "fedma"}, **changes)
