"""FedLAW: golden vectors, a derivation by hand, the learning, whole runs."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import config, run, spoil, vectors
from torch import Tensor, nn

from wardround.aggregation.weights import softmax
from wardround.clients import Answer
from wardround.data.cases import Batch, ClientData, TensorSplit
from wardround.data.roles import PROXY
from wardround.engine.host import Host
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.losses.objective import Dice
from wardround.messages import Message, Reply, ServerState
from wardround.methods import build_method
from wardround.methods.fedlaw import NOT_LEARNED, FedLAW, Mixture, combine, first_logits
from wardround.params import Params

GOLDEN = vectors("fedlaw")
DATA = {"phantom": {"hospitals": 3, "size": 16, "cases": [8, 10, 6]}, "proxy": "south"}
FEW = {"name": "fedlaw", "epochs": 3, "server_lr": 0.05}


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Golden vectors


def test_every_golden_case_is_tested() -> None:
    assert set(GOLDEN) == {"forward", "initial"}


def test_the_mixed_model_is_the_golden_one() -> None:
    inputs, expected = (GOLDEN["forward"][key] for key in ("inputs", "expected"))
    items = [Params({"w": double(row)}) for row in inputs["client_w"]]
    weights, gamma = softmax(inputs["lambda_logits"]), math.exp(inputs["gamma_log"])
    assert weights == pytest.approx(expected["lambda"], abs=1e-6)
    assert gamma == pytest.approx(expected["gamma"], abs=1e-6)
    mixed = combine(items, weights, gamma, ["w"])
    assert mixed["w"].tolist() == pytest.approx(expected["state"], abs=1e-6)

    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(2))
    tried = Mixture(model, Dice(), items, {}).tensors(
        double(inputs["lambda_logits"]), double(inputs["gamma_log"])
    )
    assert tried["w"].tolist() == pytest.approx(expected["state"], abs=1e-6)


def test_the_start_is_the_golden_one() -> None:
    inputs, expected = (GOLDEN["initial"][key] for key in ("inputs", "expected"))
    asked: list[Message] = []
    state, clients = one_round(inputs["n"], asked)
    after = FedLAW().run_round(state, clients)
    assert asked[0].scalars["logits"] == pytest.approx(expected["lambda_logits"], abs=1e-6)
    assert first_logits([0.2, 0.3, 0.5]) == pytest.approx(expected["lambda_logits"], abs=1e-6)
    assert list(after.notes["weights"].values()) == pytest.approx(expected["lambda"], abs=1e-6)
    assert after.notes["gamma"] == expected["gamma"]


def one_round(
    sizes: Sequence[int], asked: list[Message], answers: Sequence[Reply] = ()
) -> tuple[ServerState, Any]:
    """A state, and clients of these sizes; what is sent for tuning ends up in `asked`."""
    replies = [
        Reply(Params({"w": double([float(k), 1.0])}), client="abcdef"[k], num_examples=size)
        for k, size in enumerate(sizes)
    ]

    def ask(task: str, message: Message, to: Sequence[str] | None = None) -> list[Reply]:
        if task == "train":
            return replies
        asked.append(message)
        return list(answers)

    return ServerState(Params({"w": double([0.0, 0.0])}), trainable=("w",)), SimpleNamespace(ask=ask)


# By hand: two clients with one weight each, w_1 = 1 and w_2 = 3, on one case with image x and label y.
# The model puts out θ x, the loss is (θ x - y)² / 2.


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, image: Tensor) -> Tensor:
        return image * self.w


class Squares(Dice):
    def sample_losses(self, logits: Tensor, label: Tensor) -> Tensor:
        return (logits[:, 0] - label).square() / 2


def line(*weights: float) -> Mixture:
    return Mixture(Line(), Squares(), [Params({"w": double([weight])}) for weight in weights], {})


def case(x: float, y: float) -> Batch:
    return Batch(double([[x]]), double([y]))


def always(batch: Batch) -> Any:
    def batches(epoch: int) -> Iterator[Batch]:
        yield batch

    return batches


def test_slopes_are_those_derived_on_paper() -> None:
    """λ = (1/2, 1/2), γ = 1: θ = 2. At x = 1, y = 1 the loss is 1/2 and dL/dθ = θ - 1 = 1.

    s_k = dL/dθ γ w_k = (1, 3), their λ mean is 2, so dL/dℓ_k = λ_k (s_k - 2) = (-1/2, 1/2) and
    dL/dg = dL/dθ θ = 2. With γ = 1/2: θ = 1, dL/dθ = 0 and nothing moves. With x = 2: dL/dθ = 2 (4 - 1) = 6.
    """
    even, zero = double([0.5, 0.5]).log(), double(0.0)
    ell, g = line(1.0, 3.0).slopes(even, zero, case(1, 1))
    assert ell.tolist() == pytest.approx([-0.5, 0.5]) and g.item() == pytest.approx(2.0)
    ell, g = line(1.0, 3.0).slopes(even, double(math.log(0.5)), case(1, 1))
    assert ell.tolist() == pytest.approx([0.0, 0.0]) and g.item() == pytest.approx(0.0)
    ell, g = line(1.0, 3.0).slopes(even, zero, case(2, 1))
    assert ell.tolist() == pytest.approx([-3.0, 3.0]) and g.item() == pytest.approx(12.0)
    # unequal weights, λ = (1/4, 3/4): θ = 2.5, dL/dθ = 1.5, s = (1.5, 4.5), mean 3.75
    ell, g = line(1.0, 3.0).slopes(double([0.25, 0.75]).log(), zero, case(1, 1))
    assert ell.tolist() == pytest.approx([0.25 * -2.25, 0.75 * 0.75]) and g.item() == pytest.approx(3.75)


def test_the_first_step_of_adam_is_a_full_one_in_each_direction() -> None:
    """Adam's first step is the learning rate against the sign: ℓ = ln(1/2) ± 0.005, g = -0.005.

    Then λ_1 = 1 / (1 + e^-0.01) = 0.5025, θ = e^-0.005 (λ_1 + 3 λ_2) = 1.985049...
    """
    method = FedLAW(epochs=1)
    ell, g, loss = method.fit(line(1.0, 3.0), first_logits([0.5, 0.5]), always(case(1, 1)), [case(1, 1)])
    assert ell.tolist() == pytest.approx([math.log(0.5) + 0.005, math.log(0.5) - 0.005], abs=1e-9)
    assert g.item() == pytest.approx(-0.005, abs=1e-9)
    theta = math.exp(-0.005) * (3 - 2 / (1 + math.exp(-0.01)))
    assert loss == pytest.approx((theta - 1) ** 2 / 2, abs=1e-9)


def simulated(models: list[float], shares: list[float], x: float, y: float, method: FedLAW) -> list[float]:
    """ℓ and g as FedLAW would learn them: slopes by finite differences, Adam written out, nothing shared."""

    def loss(values: np.ndarray[Any, Any]) -> float:
        lam = np.exp(values[:-1]) / np.exp(values[:-1]).sum()
        return float((np.exp(values[-1]) * (lam * np.array(models)).sum() * x - y) ** 2 / 2)

    start = np.array([*np.log(shares), 0.0])
    best = start.copy()
    phases = [slice(None)] if method.variant == "joint" else [slice(0, -1), slice(-1, None)]
    for phase in phases:
        values, m, v = best.copy(), np.zeros(len(start)), np.zeros(len(start))
        seen = []
        for epoch in range(method.epochs // len(phases)):
            slope = np.zeros(len(start))
            for i in range(len(start)):
                shift = np.eye(len(start))[i] * 1e-6
                slope[i] = (loss(values + shift) - loss(values - shift)) / 2e-6
            m, v = 0.5 * m + 0.5 * slope, 0.999 * v + 0.001 * slope**2
            number = epoch + 1
            move = m / (1 - 0.5**number) / (np.sqrt(v / (1 - 0.999**number)) + 1e-8)
            values[phase] -= (method.server_lr * move)[phase]
            values[-1] = np.clip(values[-1], np.log(method.gamma_min), np.log(method.gamma_max))
            seen.append(values.copy())
            averages = method.variant == "swa" and epoch > 5
            tried = np.mean(seen[5:], axis=0) if averages else values
            if loss(tried) < loss(best):
                best = tried.copy()
    return list(best)


@pytest.mark.parametrize("variant", ["joint", "swa"])
@pytest.mark.parametrize("epochs", [4, 18])
def test_many_epochs_are_those_of_plain_numbers(variant: Any, epochs: int) -> None:
    method = FedLAW(variant=variant, epochs=epochs, server_lr=0.02)
    models, shares = [1.0, 3.0, -0.5], [0.2, 0.5, 0.3]
    ell, g, _ = method.fit(line(*models), first_logits(shares), always(case(1.5, 1)), [case(1.5, 1)])
    assert [*ell.tolist(), g.item()] == pytest.approx(simulated(models, shares, 1.5, 1, method), abs=1e-6)


# The learning


def test_slopes_equal_those_of_autograd_through_a_network(tmp_path: Path) -> None:
    host = Host(config(tmp_path), tmp_path, ["east"])
    client, generator = host.client("east"), torch.Generator().manual_seed(1)
    first = Params.of(host.bench.model)
    items = [first.map(lambda t: t + 0.1 * torch.randn(t.shape, generator=generator)) for _ in range(3)]
    mixture = Mixture(client.model, client.objective, items, {})
    batch = client.data.train.batch([0, 1])
    ell, g = double([0.1, -0.4, 0.3]).requires_grad_(), double(-0.1).requires_grad_()
    expected = torch.autograd.grad(mixture.loss(mixture.tensors(ell, g), batch).mean(), [ell, g])
    found = mixture.slopes(ell.detach(), g.detach(), batch)
    assert found[0].tolist() == pytest.approx(expected[0].tolist(), rel=1e-4, abs=1e-7)
    assert found[1].item() == pytest.approx(expected[1].item(), rel=1e-4)


def test_gamma_stays_in_its_limits_and_can_be_left_out() -> None:
    far, start = case(1, 50), first_logits([0.5, 0.5])
    _, g, _ = FedLAW(server_lr=0.3).fit(line(1.0, 3.0), start, always(far), [far])
    assert math.exp(g.item()) == pytest.approx(1.5)
    _, g, _ = FedLAW(server_lr=0.3).fit(line(1.0, 3.0), start, always(case(1, 0)), [case(1, 0)])
    assert math.exp(g.item()) == pytest.approx(0.5)
    _, g, _ = FedLAW(gamma_min=1, gamma_max=1).fit(line(1.0, 3.0), start, always(far), [far])
    assert g.item() == 0.0


@pytest.mark.parametrize("variant", ["joint", "swa"])
def test_it_stops_at_the_start_where_learning_does_not_help(variant: Any) -> None:
    start = first_logits([0.5, 0.5])
    ell, g, loss = FedLAW(variant=variant).fit(line(1.0, 3.0), start, always(case(1, 9)), [case(1, 2)])
    assert ell.tolist() == start and g.item() == 0.0 and loss == pytest.approx(0)


def proxy_client(split: TensorSplit) -> Any:
    return SimpleNamespace(
        window=None,
        data=ClientData(train=split, val=TensorSplit.of([]), test=TensorSplit.of([])),
        model=Line(),
        objective=Squares(),
        device=torch.device("cpu"),
        memory={},
        seed=lambda *purpose: 0,
    )


def splits(values: Sequence[float]) -> TensorSplit:
    names = [str(number) for number in range(len(values))]
    return TensorSplit(
        names, torch.ones(len(values), 1, dtype=torch.float64), double(values), [(1.0,)] * len(values)
    )


TWO = Message(
    Params(),
    extras={"a": Params({"w": double([1.0])}), "b": Params({"w": double([3.0])})},
    scalars={"logits": first_logits([0.5, 0.5])},
)


def test_one_case_serves_for_learning_and_for_stopping() -> None:
    client = proxy_client(splits([1.0]))
    sent = FedLAW(epochs=1).tune(client, TWO).scalars
    assert sent["log_gamma"] == pytest.approx(-0.005, abs=1e-9) and client.model.w.item() == 0.0
    # two cases: the second alone chooses, and it is best served by the start, θ = 2
    sent = FedLAW(epochs=1).tune(proxy_client(splits([1.0, 2.0])), TWO).scalars
    assert sent["log_gamma"] == 0.0


@pytest.mark.parametrize("values", [[], [math.nan]])
def test_without_a_usable_case_nothing_is_answered(values: list[float]) -> None:
    assert FedLAW(epochs=1).tune(proxy_client(splits(values)), TWO).scalars == {}


def test_the_models_of_the_workbench_stay_as_they_are(tmp_path: Path) -> None:
    method = FedLAW(epochs=2, server_lr=0.1)
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}
    chosen = config(tmp_path, data=DATA, model=model, method={"name": "fedlaw"})
    host = Host(chosen, tmp_path, [PROXY])
    host.bench.model.train()
    before = Params.of(host.bench.model)
    generator = torch.Generator().manual_seed(2)
    noisy = before.map(
        lambda t: t + 0.1 * torch.rand(t.shape, generator=generator) if t.is_floating_point() else t
    )
    message = Message(Params(), {"a": before, "b": noisy}, {"logits": first_logits([0.3, 0.7])})
    sent = method.tune(host.client(PROXY), message).scalars
    assert Params.of(host.bench.model).sha256() == before.sha256() and host.bench.model.training
    assert len(sent["logits"]) == 2 and math.isfinite(sent["loss"])


def test_buffers_are_the_plain_mean_and_counters_the_maximum() -> None:
    items = [
        Params({"w": double([value]), "running_var": double([value]), "count": torch.tensor(int(value))})
        for value in (1.0, 3.0)
    ]
    mixed = combine(items, [0.25, 0.75], 0.5, ["w"])
    assert (mixed["w"].item(), mixed["running_var"].item(), int(mixed["count"])) == (1.25, 2.5, 3)


# The server


def test_a_client_without_cases_is_left_out_before_its_share_is_taken_the_log_of() -> None:
    asked: list[Message] = []
    state, clients = one_round([20, 0, 60], asked)
    after = FedLAW().run_round(state, clients)
    assert list(asked[0].extras) == ["a", "c"] and after.notes["weights"] == {"a": 0.25, "c": 0.75}


def test_what_several_clients_learned_is_averaged_and_nonsense_is_passed_over() -> None:
    good = [
        Reply(client=name, scalars={"logits": logits, "log_gamma": g, "loss": 1.0})
        for name, logits, g in (("a", [0.0, 0.4], 0.2), ("b", [0.2, 0.0], 0.0))
    ]
    bad = [
        Reply(client="c"),
        Reply(client="d", scalars={"logits": [1.0], "log_gamma": 0.0, "loss": 1.0}),
        Reply(client="e", scalars={"logits": [1.0, None], "log_gamma": 0.0, "loss": 1.0}),
        Reply(client="f", scalars={"logits": 1.0, "log_gamma": 0.0, "loss": 1.0}),
        Reply(client="g", scalars={"logits": {"a": 1.0, "b": 1.0}, "log_gamma": 0.0, "loss": 1.0}),
        Reply(client="h", scalars={"logits": [10**400, 1.0], "log_gamma": 0.0, "loss": 1.0}),
        Reply(client="i", scalars={"logits": [1e308, 1e308], "log_gamma": 0.0, "loss": 1e308}),
    ]
    state, clients = one_round([1, 1], [], [*good, *bad])
    after = FedLAW(proxy="clients").run_round(state, clients)
    assert list(after.notes["weights"].values()) == pytest.approx(softmax([0.1, 0.2]))
    assert after.notes["gamma"] == pytest.approx(math.exp(0.1))


@pytest.mark.parametrize(("g", "gamma"), [(1e29, 1.5), (-1e29, 0.5)])
def test_a_huge_gamma_from_a_client_meets_its_limits(g: float, gamma: float) -> None:
    sent = Reply(client="a", scalars={"logits": [0.0, 0.0], "log_gamma": g, "loss": 1.0})
    state, clients = one_round([1, 1], [], [sent])
    assert FedLAW(proxy="clients").run_round(state, clients).notes["gamma"] == gamma


def test_one_client_alone_is_taken_as_it_is() -> None:
    asked: list[Message] = []
    state, clients = one_round([7], asked)
    after = FedLAW().run_round(state, clients)
    assert not asked and after.notes["weights"] == {"a": 1.0} and after.notes["gamma"] == 1.0


# Whole runs


@pytest.mark.parametrize("variant", ["joint", "swa"])
def test_a_run_records_weights_gamma_and_loss(tmp_path: Path, variant: str) -> None:
    result = run(tmp_path, data=DATA, method={**FEW, "variant": variant})
    for record in result.records:
        assert set(record["weights"]) == {"east", "north"} and 0.5 <= record["gamma"] <= 1.5
        assert math.isfinite(record["proxy_loss"])
        trained, tuned = record["exchanges"]
        assert (trained["task"], tuned["task"], list(tuned["bytes_down"])) == ("train", "tune", [PROXY])
        assert tuned["bytes_down"][PROXY] - sum(trained["bytes_up"].values()) < 100
    assert any(record["gamma"] != 1 for record in result.records)


def test_with_no_epochs_it_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    still = run(tmp_path / "fedlaw", data=DATA, method={"name": "fedlaw", "epochs": 0})
    plain = run(tmp_path / "fedavg", data=DATA)
    assert still.params_sha256 == plain.params_sha256
    assert len(still.records[0]["exchanges"]) == 1


def test_if_the_servers_cases_are_lost_it_is_fedavg_with_a_warning(tmp_path: Path, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        spoil(patch, PROXY, lambda answer: Answer(PROXY, failure="power cut"), "tune")
        lost = run(tmp_path / "fedlaw", data=DATA, method=FEW)
    plain = run(tmp_path / "fedavg", data=DATA)
    assert lost.params_sha256 == plain.params_sha256
    assert lost.records[0]["warnings"] == [NOT_LEARNED] and lost.records[0]["gamma"] == 1


def test_a_reply_of_nan_from_the_servers_cases_counts_as_lost(tmp_path: Path, monkeypatch: Any) -> None:
    def spoiled(answer: Answer) -> Answer:
        return replace(answer, message=Message(scalars={**answer.message.scalars, "log_gamma": math.nan}))

    spoil(monkeypatch, PROXY, spoiled, "tune")
    record = run(tmp_path, rounds=1, data=DATA, method=FEW).records[0]
    assert record["warnings"] == [NOT_LEARNED] and "tune/proxy" in record["refused"]


def test_in_simulation_clients_can_learn_the_weights_and_one_may_be_lost(
    tmp_path: Path, monkeypatch: Any
) -> None:
    uneven = {"phantom": {"hospitals": 3, "size": 16, "cases": [2, 8, 11]}}  # north has no validation cases
    spoil(monkeypatch, "east", lambda answer: Answer("east", failure="power cut"), "tune")
    record = run(tmp_path, rounds=1, data=uneven, method={**FEW, "proxy": "clients"}).records[0]
    assert list(record["exchanges"][1]["bytes_up"]) == ["north", "south"] and record["proxy_loss"] > 0
    assert "simulation" in record["warnings"][0]


def test_batch_norm_and_statistics_measured_anew(tmp_path: Path) -> None:
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch", "bn_stats": "reestimate"}
    result = run(tmp_path, rounds=1, data=DATA, model=model, method=FEW)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.outcome.state.params.values())


def test_without_cases_of_the_server_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data.proxy"):
        config(tmp_path, method={"name": "fedlaw"})
    chosen = config(tmp_path, method={"name": "fedlaw", "proxy": "clients"})
    assert len(build_method(chosen).warnings(chosen, build_model(chosen))) == 1


@pytest.mark.parametrize("stats", ["pooled", "local"])
def test_statistics_it_cannot_mix_are_refused(tmp_path: Path, stats: str) -> None:
    with pytest.raises(ConfigError, match=f"bn_stats {stats}"):
        config(tmp_path, data=DATA, method={"name": "fedlaw"}, model={"bn_stats": stats})


@pytest.mark.parametrize(
    "wrong", [{"server_lr": 0}, {"gamma_min": 1.2}, {"gamma_max": 0.9}, {"variant": "both"}]
)
def test_impossible_settings_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        config(tmp_path, data=DATA, method={"name": "fedlaw", **wrong})
