import math
from pathlib import Path

import torch
from helpers import params, vectors
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx, mark, raises

from wardround.aggregation.mean import layerwise_mean, mean
from wardround.aggregation.weights import by_samples, map_to_clients, normalise, renormalise, uniform
from wardround.clients.gate import content_complaint
from wardround.messages import Message, Reply
from wardround.models.norm import from_moments, to_moments
from wardround.params import Params

FEDAVG = vectors("fedavg")


def replies(case: dict) -> list[Reply]:  # type: ignore[type-arg]
    inputs = case["inputs"]
    return [
        Reply(
            Params({k: torch.tensor(numbers(v), dtype=torch.float64) for k, v in state.items()}),
            client=f"c{index}",
            num_examples=count,
        )
        for index, (state, count) in enumerate(zip(inputs["client_state"], inputs["n"], strict=True))
    ]


def numbers(value: object) -> object:
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return float(value) if isinstance(value, str) else value


@mark.parametrize(
    "name",
    ["sample_weighted", "uniform", "zero_sample_client_dropped", "nonfinite_update_dropped", "single_client"],
)
def test_golden_means(name: str) -> None:
    case = FEDAVG[name]
    # the engine's two rules: nobody without cases is asked, no reply with NaN passes the gate
    good = [r for r in replies(case) if r.num_examples > 0 and content_complaint(Message(r.params)) is None]
    weights = uniform(good) if case["inputs"].get("weighting") == "uniform" else by_samples(good)

    averaged = mean([reply.params for reply in good], weights)

    by_name = map_to_clients(good, weights)
    assert [by_name.get(f"c{i}", 0.0) for i in range(len(case["inputs"]["n"]))] == approx(
        case["expected"]["weights"], abs=1e-6
    )
    for key, expected in case["expected"]["state"].items():
        assert torch.allclose(averaged[key], torch.tensor(expected, dtype=torch.float64), atol=1e-6)


def test_golden_batchnorm_buffers_averaged_pooled_and_counted() -> None:
    case = FEDAVG["batchnorm_buffers"]
    states = [
        params(
            running_mean=torch.tensor(state["running_mean"], dtype=torch.float64),
            running_var=torch.tensor(state["running_var"], dtype=torch.float64),
            num_batches_tracked=state["num_batches_tracked"],
        )
        for state in case["inputs"]["client_state"]
    ]
    weights = normalise(case["inputs"]["n"])
    stats = [("running_mean", "running_var")]

    averaged = mean(states, weights)
    pooled = from_moments(mean([Params(to_moments(s, stats)) for s in states], weights), stats)

    expected = case["expected"]
    assert averaged["running_mean"].tolist() == approx(expected["running_mean"])
    assert averaged["running_var"].tolist() == approx(expected["running_var_averaged"])
    assert pooled["running_var"].tolist() == approx(expected["running_var_pooled_moments"])
    assert averaged["num_batches_tracked"].item() == expected["num_batches_tracked_max"]
    assert averaged["num_batches_tracked"].dtype == torch.int64


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=80))
def test_normalised_weights_sum_to_one(values: list[float]) -> None:
    weights = normalise(values)

    assert abs(math.fsum(weights) - 1) <= 1e-12
    assert min(weights) >= 0


@mark.parametrize("bad", [[-1.0, 2.0], [math.nan, 1.0], [math.inf, 1.0]])
def test_negative_or_non_finite_weights_are_refused(bad: list[float]) -> None:
    with raises(ValueError, match="finite and not negative"):
        normalise(bad)


@given(st.integers(1, 7), st.integers(0, 2**32))
def test_identical_replies_leave_the_model_as_it_is(count: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    one = params(w=torch.randn(50, generator=draw))
    weights = normalise(torch.rand(count, generator=draw, dtype=torch.float64).tolist())

    assert torch.equal(mean([one] * count, weights)["w"], one["w"])


def test_a_sum_of_many_small_terms_keeps_float64_accuracy() -> None:
    items = [params(w=[1.0]), *[params(w=[1e-8])] * 1000]

    assert mean(items)["w"].item() == approx((1 + 1000e-8) / 1001, rel=1e-7)


def test_every_tensor_may_have_weights_of_its_own() -> None:
    items = [params(a=[0.0], b=[0.0]), params(a=[1.0], b=[1.0])]

    out = layerwise_mean(items, {"a": [0.5, 0.5], "b": [0.0, 1.0]})

    assert (out["a"].item(), out["b"].item()) == (0.5, 1.0)


def test_stored_replies_give_the_same_bytes(tmp_path: Path) -> None:
    items = [params(w=torch.randn(9), n=torch.tensor(i)) for i in range(4)]
    for index, item in enumerate(items):
        Message(params=item).save(tmp_path / f"{index}.safetensors")
    stored = [Message.load(tmp_path / f"{index}.safetensors").params for index in range(4)]

    assert mean([s for s in stored if s is not None]).sha256() == mean(items).sha256()


def test_mistakes_of_the_caller_are_named() -> None:
    with raises(ValueError, match="at least one"):
        mean([])
    with raises(ValueError, match="1 items but 2 weights"):
        mean([params(w=[1.0])], [0.5, 0.5])


def test_remembered_weights_are_renormalised_over_those_present() -> None:
    present = [Reply(client="a"), Reply(client="c")]

    assert renormalise({"a": 0.2, "b": 0.5, "c": 0.3}, present) == approx([0.4, 0.6])
