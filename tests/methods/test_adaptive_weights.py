"""AAW: golden vectors, the step, the exchanges, whole runs."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from helpers import Watcher, run, settings, spoil, vectors
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import wardround as wr
from wardround.aggregation.mean import mean
from wardround.clients import Answer, Clients, Registration
from wardround.errors import ConfigError
from wardround.losses.segmentation import cross_entropy_loss, dice_bce_loss, dice_loss
from wardround.messages import Message, Reply, ServerState
from wardround.methods.adaptive_weights import AAW, adapt, differences
from wardround.metrics.summary import Summary, across_clients
from wardround.params import Params

GOLDEN = vectors("aaw")
NAMES = "abcdefghij"
UNEVEN = {"phantom": {"hospitals": 3, "size": 16, "cases": [2, 8, 11]}}  # north trains on 1, validates on 0


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def by_name(values):
    return dict(zip(NAMES, values, strict=False))


def values(weights):
    return list(weights.values())


# Golden vectors


def test_the_loss_is_the_golden_one():
    inputs, expected = GOLDEN["dice_bce"]["inputs"], GOLDEN["dice_bce"]["expected"]
    logits = torch.logit(tensor(inputs["y_prob"]))[None, None]
    label = tensor(inputs["y_true"])[None].long()
    assert dice_loss(logits, label, smooth=0).item() == pytest.approx(expected["L_dice"], abs=1e-11)
    assert cross_entropy_loss(logits, label).item() == pytest.approx(expected["L_bce"], abs=1e-11)
    assert dice_bce_loss(logits, label, smooth=0).item() == pytest.approx(expected["L"], abs=1e-11)


def test_the_first_weights_are_the_golden_ones():
    clients = server(by_name(GOLDEN["init"]["inputs"]["n"]))
    assert values(AAW().first_weights(clients)) == pytest.approx(GOLDEN["init"]["expected"]["a0"], abs=1e-11)


@pytest.mark.parametrize(
    "name",
    ["update_round0", "update_round150", "update_clips_small_client", "zero_gap", "all_clipped_to_zero"],
)
def test_weights_after_a_step_are_the_golden_ones(name):
    inputs, expected = GOLDEN[name]["inputs"], GOLDEN[name]["expected"]
    step = inputs.get("s")
    if step is None:
        step = AAW(step0=inputs["s0"]).step(inputs["t"], server(by_name([1]), rounds=inputs["T"]))
        assert step == pytest.approx(expected["s"])
    gaps = by_name(inputs["G"]) if "G" in inputs else differences(by_name(inputs["Q"]), by_name(inputs["P"]))
    if "G" in expected:
        assert values(gaps) == pytest.approx(expected["G"], abs=1e-11)
    after = adapt(by_name(inputs["a"]), gaps, step)
    assert values(after) == pytest.approx(expected["a_next"], abs=1e-11)


def test_the_step_falls_as_in_the_golden_case():
    inputs = GOLDEN["step_schedule"]["inputs"]
    clients = server(by_name([1, 1]), rounds=inputs["T"])
    steps = [AAW(step0=inputs["s0"]).step(round, clients) for round in inputs["t"]]
    assert steps == pytest.approx(GOLDEN["step_schedule"]["expected"]["s"], abs=1e-12)


def test_a_step_over_the_number_of_clients_is_that_of_feddg_ga():
    inputs = GOLDEN["feddg_ga_variant"]["inputs"]
    method = AAW(step0=inputs["step"], step_scale="1/K")
    step = method.step(0, server(by_name([1, 1, 1])))
    after = adapt(by_name(inputs["a"]), by_name(inputs["G"]), step)
    assert values(after) == pytest.approx(GOLDEN["feddg_ga_variant"]["expected"]["a_next"], abs=1e-11)


def test_the_mean_is_the_golden_one():
    inputs = GOLDEN["aggregate"]["inputs"]
    models = [Params({"w": tensor(row)}) for row in inputs["client_params"]]
    averaged = mean(models, inputs["a"])["w"].tolist()
    assert averaged == pytest.approx(GOLDEN["aggregate"]["expected"]["w_next"], abs=1e-12)


def test_the_printed_averages_are_weighted_by_test_cases():
    case = GOLDEN["table2_weighted_average_T1"]
    for column, expected in case["expected"].items():
        scores = zip(case["inputs"]["test_counts"], case["inputs"][f"dice_{column}"], strict=True)
        clients = {str(i): Summary(dice, 0.0, num, 0, 0) for i, (num, dice) in enumerate(scores)}
        assert across_clients(clients, best=1.0).weighted_mean == pytest.approx(expected, abs=1e-11)


# The step

SHARES = st.lists(st.floats(0.001, 1), min_size=1, max_size=8)
GAPS = st.lists(st.none() | st.floats(-5, 5), min_size=8, max_size=8)


@hypothesis_settings(max_examples=100, deadline=None)
@given(SHARES, GAPS, st.floats(0, 1))
def test_weights_are_never_negative_sum_to_one_and_order_does_not_matter(shares, gaps, step):
    a = {name: share / math.fsum(shares) for name, share in by_name(shares).items()}
    known = {name: gap for name, gap in by_name(gaps).items() if name in a and gap is not None}
    after = adapt(a, known, step)
    assert min(after.values()) >= 0
    assert math.fsum(after.values()) == pytest.approx(1, abs=1e-12)
    assert all(after[name] == a[name] for name in a if name not in known)
    assert adapt(dict(reversed(a.items())), dict(reversed(known.items())), step) == after


@pytest.mark.parametrize("scale", [1e-6, 0.5, 3.0, 1e6])
def test_only_the_ratios_of_gaps_matter(scale):
    a, gaps = by_name([0.5, 0.3, 0.2]), by_name([0.02, -0.05, 0.01])
    scaled = {name: scale * gap for name, gap in gaps.items()}
    assert values(adapt(a, scaled, 0.1)) == pytest.approx(values(adapt(a, gaps, 0.1)), abs=1e-12)


@pytest.mark.parametrize("gaps", [[], [math.nan, math.nan], [math.inf, -math.inf], [0.0, 0.0]])
def test_without_a_usable_gap_weights_stay_exactly(gaps):
    a = by_name([0.7, 0.3])
    assert adapt(a, by_name(gaps), 0.1) == a


def test_a_gap_that_is_not_finite_holds_only_its_own_client():
    a = by_name([0.5, 0.3, 0.2])
    after = adapt(a, by_name([0.1, math.nan, -0.1]), 0.1)
    assert after["b"] == 0.3
    assert after["a"] > 0.5 > 0.2 > after["c"]


def test_a_client_at_zero_comes_back_when_it_loses_from_aggregation():
    a = by_name([0.0, 0.6, 0.4])
    assert adapt(a, by_name([0.2, -0.1, -0.1]), 0.1)["a"] > 0


# Exchanges


class Fake:
    """Clients that move towards a truth of their own; a loss is the distance to it."""

    def __init__(self, sizes, method, lost=()):
        self.sizes, self.method, self.lost = sizes, method, lost

    def loss(self, name, params):
        return float((params["w"] - NAMES.index(name)).abs().sum())

    def deliver(self, task, round, messages, standing):
        for name, message in messages.items():
            if (task, round, name) in self.lost:
                yield Answer(name, failure="gone")
                continue
            if task == "score":
                yield Answer(name, Message(scalars={"Q": self.loss(name, message.params)}))
                continue
            model = Params({"w": 0.5 * message.params["w"] + 0.5 * NAMES.index(name) + 0.1 * round})
            scalars = {"P": self.loss(name, model)}
            if self.method.gap_reference == "previous_global" or (self.method.waits and round > 0):
                scalars["Q"] = self.loss(name, message.params)
            yield Answer(name, Message(model, scalars=scalars), num_examples=self.sizes[name], num_steps=1)


def server(sizes, method=None, rounds=10, lost=()):
    spec = {"w": ((2,), torch.float64)}
    registered = [Registration(name, size, tensors=spec) for name, size in sizes.items()]
    return Clients(Fake(sizes, method or AAW(), lost), registered, rounds=rounds, min_clients=1)


def played(method, sizes, rounds=5, lost=(), present=None):
    """States after each round."""
    clients = server(sizes, method, rounds, lost)
    states = [ServerState(Params({"w": torch.tensor([0.3, 1.1], dtype=torch.float64)}))]
    for round in range(rounds):
        clients.begin_round(round, present[round] if present else list(sizes))
        states.append(method.run_round(states[-1], clients))
    return states[1:]


def by_hand(method, sizes, rounds=5):
    """The same in plain numbers: Algorithm 1 with A1 and A2 mended."""
    names = list(sizes)
    total = sum(sizes.values())
    a = [sizes[name] / total for name in names]
    truth = [NAMES.index(name) for name in names]
    w, history = [0.3, 1.1], []
    for t in range(rounds):
        local = [[0.5 * x + 0.5 * y + 0.1 * t for x in w] for y in truth]
        p = [sum(abs(x - y) for x in model) for model, y in zip(local, truth, strict=True)]
        new = [sum(a_i * model[j] for a_i, model in zip(a, local, strict=True)) for j in range(2)]
        reference = new if method.gap_reference == "new_global" else w
        q = [sum(abs(x - y) for x in reference) for y in truth]
        g = [q_i - p_i for q_i, p_i in zip(q, p, strict=True)]
        history.append((list(a), new))
        step = method.step0 * (1 - t / rounds)
        a = [min(max(a_i + step * g_i / max(map(abs, g)), 0), 1) for a_i, g_i in zip(a, g, strict=True)]
        a = [a_i / sum(a) for a_i in a]
        w = new
    return history


SIZES = {"a": 5, "b": 10, "c": 25}


@pytest.mark.parametrize(
    "chosen",
    [{}, {"q_eval": "separate"}, {"gap_reference": "previous_global"}, {"step0": 0.4}],
)
def test_five_rounds_are_those_of_plain_numbers(chosen):
    method = AAW(**chosen)
    for state, (a, w) in zip(played(method, SIZES), by_hand(method, SIZES), strict=True):
        assert values(state.notes["weights"]) == pytest.approx(a, abs=1e-12)
        assert state.params["w"].tolist() == pytest.approx(w, abs=1e-12)


def test_the_first_round_is_fedavg():
    state = played(AAW(), SIZES, rounds=1)[0]
    assert state.notes["weights"] == {"a": 5 / 40, "b": 10 / 40, "c": 25 / 40}
    assert state.notes["gap"] == {}


def test_identical_replies_leave_the_model_as_it_is():
    method, sizes = AAW(), {"a": 5}
    alone = played(method, sizes)[0].params["w"]
    same = server(SIZES, method)
    same._transport.deliver = lambda task, round, messages, standing: [
        Answer(name, Message(Params({"w": alone})), num_examples=SIZES[name], num_steps=1)
        for name in messages
    ]
    same.begin_round(0, list(SIZES))
    state = method.run_round(ServerState(Params({"w": torch.zeros(2, dtype=torch.float64)})), same)
    assert torch.allclose(state.params["w"], alone, rtol=0, atol=1e-15)


def test_one_client_alone_keeps_all_the_weight():
    for chosen in ({}, {"q_eval": "separate"}, {"gap_reference": "previous_global"}):
        for state in played(AAW(**chosen), {"b": 4}):
            assert state.notes["weights"] == {"b": 1.0}


@pytest.mark.parametrize("chosen", [{}, {"q_eval": "separate"}])
def test_the_order_of_clients_does_not_matter(chosen):
    method = AAW(**chosen)
    shas = {
        played(method, {name: SIZES[name] for name in order})[-1].params.sha256()
        for order in itertools.permutations(SIZES)
    }
    assert len(shas) == 1


def test_a_client_lost_in_the_second_exchange_keeps_its_weight():
    method = AAW(q_eval="separate")
    first, second = played(method, SIZES, rounds=2, lost=[("score", 0, "b")])
    assert first.memory["weights"]["b"] == 10 / 40
    assert second.notes["weights"]["b"] == pytest.approx(10 / 40, abs=1e-15)
    assert second.notes["weights"]["a"] != pytest.approx(5 / 40)


def test_with_piggyback_only_clients_seen_twice_in_a_row_move():
    present = [["a", "b"], ["b", "c"], ["a", "b", "c"]]
    first, second, third = played(AAW(), SIZES, rounds=3, present=present)
    assert list(second.notes["gap"]) == ["b"]
    assert second.memory["weights"] == pytest.approx({"a": 5 / 40, "b": 10 / 40, "c": 25 / 40})
    assert set(third.notes["gap"]) == {"b", "c"}
    assert third.memory["weights"]["a"] == 5 / 40
    assert math.fsum(third.notes["weights"].values()) == pytest.approx(1, abs=1e-12)
    assert "q_eval=separate" in first.notes["warnings"][0]
    assert "warnings" not in second.notes


def test_if_all_present_have_no_weight_their_sizes_count():
    state = ServerState(Params(), memory={"weights": {"a": 0.0, "b": 0.0, "c": 1.0}})
    replies = [Reply(client=name, num_examples=SIZES[name]) for name in "ab"]
    assert AAW().weigh(state, replies) == pytest.approx([1 / 3, 2 / 3])


# Whole runs


def test_a_run_records_losses_gaps_and_step(tmp_path):
    result = run(tmp_path, rounds=3, method={"name": "aaw"})
    first, second, third = result.records
    assert first["Q"] == first["gap"] == {}
    assert first["step"] == 0
    for before, after in itertools.pairwise(result.records):
        for name in ("east", "north", "south"):
            assert after["gap"][name] == after["Q"][name] - before["P"][name]
    assert (second["step"], third["step"]) == pytest.approx((0.1, 0.1 * 2 / 3))
    assert second["weights"] != first["weights"]
    # Q is the loss of the received model: what the validation of the round before shows
    shown = first["validation"]["loss"]["clients"]
    assert second["Q"]["east"] == pytest.approx(shown["east"]["mean"], rel=1e-6)


def test_piggyback_and_separate_give_the_same_bytes(tmp_path):
    shas = [
        run(tmp_path / way, rounds=3, method={"name": "aaw", "q_eval": way}).params_sha256
        for way in ("piggyback", "separate")
    ]
    assert shas[0] == shas[1]


def test_with_step_zero_it_is_fedavg_bit_for_bit(tmp_path):
    sizes = {"phantom": {"hospitals": 3, "size": 16, "cases": [8, 5, 11]}}
    plain = run(tmp_path / "fedavg", rounds=3, data=sizes, method={"name": "fedavg"})
    still = run(tmp_path / "aaw", rounds=3, data=sizes, method={"name": "aaw", "step0": 0})
    assert still.params_sha256 == plain.params_sha256


def test_a_resumed_run_gives_the_same_bytes(tmp_path):
    whole = run(tmp_path / "whole", rounds=3, method={"name": "aaw"})
    broken = settings(tmp_path / "broken", rounds=3, method={"name": "aaw"})
    with pytest.raises(KeyboardInterrupt):
        wr.run(broken, listener=Watcher(crash_in_round=3, crash_at="north"))
    resumed = wr.run(broken, resume=True)
    assert resumed.params_sha256 == whole.params_sha256
    assert [r["weights"] for r in resumed.records] == [r["weights"] for r in whole.records]


def test_a_client_without_validation_cases_keeps_its_weight(tmp_path):
    records = run(tmp_path / "holdout", data=UNEVEN, method={"name": "aaw"}).records
    assert set(records[1]["gap"]) == {"east", "south"}
    assert records[1]["weights"]["north"] == pytest.approx(1 / 12, abs=1e-12)
    method = {"name": "aaw", "validation": "train"}
    records = run(tmp_path / "train", data=UNEVEN, method=method).records
    assert set(records[1]["gap"]) == {"east", "north", "south"}


def test_the_literal_gap_needs_no_second_exchange(tmp_path):
    method = {"name": "aaw", "gap_reference": "previous_global", "q_eval": "separate"}
    record = run(tmp_path, rounds=1, method=method).records[0]
    assert [exchange["task"] for exchange in record["exchanges"]] == ["train"]
    assert set(record["gap"]) == {"east", "north", "south"}


def test_a_client_lost_while_it_is_scored_keeps_its_weight(tmp_path, monkeypatch):
    spoil(monkeypatch, "east", lambda answer: Answer("east", failure="power cut"), task="score")
    records = run(tmp_path, method={"name": "aaw", "q_eval": "separate"}).records
    assert records[1]["weights"]["east"] == pytest.approx(1 / 3, abs=1e-12)


def test_it_moves_weights_by_the_loss_of_any_objective(tmp_path):
    record = run(tmp_path, method={"name": "aaw"}, objective={"name": "evidential"}).records[1]
    assert set(record["gap"]) == {"east", "north", "south"}


@pytest.mark.parametrize("wrong", [{"step0": -0.1}, {"step_scale": "K"}, {"validation": "test"}])
def test_impossible_settings_are_refused(tmp_path, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        wr.load_config(settings(tmp_path, method={"name": "aaw", **wrong}))


@pytest.mark.parametrize("method", ["aaw", "fedga", "fedevi", "feduaa", "fedce"])
def test_hospitals_that_annotate_one_organ_each_have_one_vote_each(method: str, tmp_path: Path) -> None:
    """Whatever their losses or uncertainties, which cannot be compared."""
    organs, annotates = ["skull", "lesion"], {"east": ["skull"], "north": ["lesion"]}
    data = {
        "phantom": {"hospitals": 2, "size": 16, "cases": [8, 16], "organs": organs, "annotates": annotates}
    }
    found = run(tmp_path / "run", data=data, rounds=3, method={"name": method})
    assert [record["weights"] for record in found.records] == [{"east": 0.5, "north": 0.5}] * 3


@pytest.mark.parametrize("method", ["aaw", "fedga"])
def test_a_hospital_without_labels_keeps_the_weight_it_began_with(method: str, tmp_path: Path) -> None:
    """It shares no class's vote, though no label of its leaves a class out."""
    phantom = {
        "hospitals": 3, "size": 16, "cases": 8, "unlabelled": ["south"], "organs": ["skull", "lesion"],
        "annotates": {"east": ["skull"], "north": ["lesion"]},
    }  # fmt: skip
    objective = {"name": "pseudo_labels", "warmup": 0}
    found = run(
        tmp_path / "run", data={"phantom": phantom}, rounds=2, method={"name": method}, objective=objective
    )
    began = found.records[0]["weights"]["south"]
    assert began == pytest.approx(1 / 3, abs=0.05)
    for record in found.records:
        assert record["weights"] == pytest.approx(
            {"east": (1 - began) / 2, "north": (1 - began) / 2, "south": began}
        )
