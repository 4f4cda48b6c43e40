"""The variational stem: golden moments, its divergence, and everything a network offers through it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import config, run, vectors
from pydantic import ValidationError
from torch import Tensor

from wardround.errors import ConfigError
from wardround.messages import Reply
from wardround.methods.safcf import SAFCF
from wardround.methods.safcf_readings import match_rho
from wardround.models import ModelSettings, build, head_names
from wardround.models.base import Segmenter
from wardround.models.norm import norm_names, reestimate
from wardround.models.variational import (
    VariationalConvolution,
    VariationalSegmenter,
    gaussian_kl,
    variational_pairs,
)
from wardround.params import Params

GOLDEN = vectors("safcf")
ESTIMATORS: Any = ["flipout", "reparam"]
TINY: dict[str, Any] = {"name": "unet2d", "base_filters": 2, "levels": 2}

both_estimators = pytest.mark.parametrize("estimator", ESTIMATORS)


def network(
    dimensions: int = 2, in_channels: int = 1, num_outputs: int = 1, **changes: Any
) -> VariationalSegmenter:
    """A tiny U-Net behind a stem; `variational` holds the stem's own settings."""
    torch.manual_seed(0)
    name = "unet2d" if dimensions == 2 else "unet3d"
    chosen = ModelSettings(**{**TINY, "name": name, "stem": "variational", **changes})
    model = build(chosen, in_channels=in_channels, num_outputs=num_outputs, dimensions=dimensions)
    assert isinstance(model, VariationalSegmenter)
    return model


def golden_layer(estimator: Any) -> tuple[VariationalConvolution, Tensor]:
    """The golden layer and its two inputs; its random bias is the weight of a constant channel."""
    inputs = {
        key: torch.tensor(value) for key, value in GOLDEN["variational_output_moments"]["inputs"].items()
    }
    layer = VariationalConvolution(2, 2, estimator=estimator)
    layer.mu.data = torch.stack([inputs["mu_w"][0], inputs["mu_b"]], dim=1)
    layer.rho.data = torch.stack([inputs["rho_w"][0], inputs["rho_b"]], dim=1)
    return layer, torch.cat([inputs["x"], torch.ones(2, 1)], dim=1)  # (2, channels)


# The layer


@both_estimators
def test_the_outputs_moments_are_the_golden_ones(estimator: Any) -> None:
    expected = GOLDEN["variational_output_moments"]["expected"]
    layer, x = golden_layer(estimator)
    torch.manual_seed(0)
    draws = torch.stack([layer(x[:, :, None, None])[:, :, 0, 0] for _ in range(6000)]).double()

    mean, variance = torch.tensor(expected["mean"]), torch.tensor(expected["var"])
    assert torch.allclose(draws.mean(dim=0), mean.double(), atol=0.015)
    assert torch.allclose(draws.var(dim=0), variance.double(), rtol=0.08)
    assert torch.equal(layer.eval()(x[:, :, None, None])[:, :, 0, 0], layer(x[:, :, None, None])[:, :, 0, 0])
    assert torch.allclose(layer(x[:, :, None, None])[:, :, 0, 0], mean)


def test_flipout_decorrelates_the_cases_of_a_batch_and_reparam_does_not() -> None:
    correlations = {}
    for estimator in ESTIMATORS:
        layer, x = golden_layer(estimator)
        torch.manual_seed(0)
        same = x[:1].expand(2, -1)[:, :, None, None]
        draws = torch.stack([layer(same)[:, 1, 0, 0] for _ in range(4000)])
        correlations[estimator] = torch.corrcoef(draws.T)[0, 1].item()

    assert correlations["reparam"] == pytest.approx(1)
    assert abs(correlations["flipout"]) < 0.1


def test_flipout_is_the_formula_of_its_paper() -> None:
    torch.manual_seed(0)
    layer = VariationalConvolution(3, 5)
    x = torch.randn(2, 3, 4, 4)
    torch.manual_seed(1)
    found = layer(x)

    torch.manual_seed(1)
    r = torch.empty(2, 1, 3).bernoulli_(0.5) * 2 - 1
    s = torch.empty(2, 5, 1).bernoulli_(0.5) * 2 - 1
    change = layer.sigma * torch.randn(5, 3)

    def convolved(x: Tensor, weights: Tensor) -> Tensor:
        return torch.nn.functional.conv2d(x, weights[:, :, None, None])

    noise = convolved(x * r.reshape(2, 3, 1, 1), change) * s.reshape(2, 5, 1, 1)
    assert torch.allclose(found, convolved(x, layer.mu) + noise + layer.bias.reshape(1, 5, 1, 1), atol=1e-6)


def test_all_voxels_of_a_case_see_the_same_weights() -> None:
    torch.manual_seed(0)
    for estimator in ESTIMATORS:
        layer = VariationalConvolution(1, 4, estimator=estimator)
        y = layer(torch.ones(2, 1, 3, 5))
        assert torch.allclose(y, y[:, :, :1, :1].expand_as(y))


def test_the_first_weights_are_those_of_the_specification() -> None:
    torch.manual_seed(0)
    layer = VariationalConvolution(100, 100)
    assert layer.mu.mean().item() == pytest.approx(0, abs=0.01) and layer.mu.std().item() == pytest.approx(
        0.1, rel=0.05
    )
    assert layer.rho.mean().item() == pytest.approx(-3, abs=0.01) and layer.rho.std().item() == pytest.approx(
        0.1, rel=0.05
    )
    assert layer.sigma.mean().item() == pytest.approx(0.049, abs=1e-3)
    assert not layer.bias.any()


@both_estimators
def test_the_layers_gradient_is_right(estimator: Any) -> None:
    layer = VariationalConvolution(2, 3, estimator=estimator).double()
    x = torch.randn(2, 2, 2, 2, dtype=torch.float64)

    def output(mu: Tensor, rho: Tensor, bias: Tensor) -> Tensor:
        torch.manual_seed(3)
        found: Tensor = torch.func.functional_call(layer, {"mu": mu, "rho": rho, "bias": bias}, (x,))
        return found

    assert torch.autograd.gradcheck(output, (layer.mu, layer.rho, layer.bias))


# The divergence


def test_the_divergence_is_the_golden_number() -> None:
    case = GOLDEN["variational_kl"]
    layer = VariationalConvolution(3, 1).double()
    layer.mu.data = torch.tensor([case["inputs"]["mu"]], dtype=torch.float64)
    layer.rho.data = torch.tensor([case["inputs"]["rho"]], dtype=torch.float64)

    assert layer.sigma[0].tolist() == pytest.approx(case["expected"]["sigma"], rel=1e-9)
    assert layer.divergence().item() == pytest.approx(case["expected"]["kl"], rel=1e-9)


def test_the_divergence_agrees_with_torch_and_has_the_right_gradient() -> None:
    draw = torch.Generator().manual_seed(0)
    mu, prior_mu = torch.randn(2, 6, generator=draw, dtype=torch.float64)
    sigma, prior_sigma = 0.1 + torch.rand(2, 6, generator=draw, dtype=torch.float64)
    normal = torch.distributions.Normal
    theirs = torch.distributions.kl_divergence(normal(mu, sigma), normal(prior_mu, prior_sigma)).sum()

    assert gaussian_kl(mu, sigma, prior_mu, prior_sigma).item() == pytest.approx(theirs.item())
    assert torch.autograd.gradcheck(
        lambda mu, sigma: gaussian_kl(mu, sigma, prior_mu, prior_sigma),
        (mu.requires_grad_(), sigma.requires_grad_()),
    )


@pytest.mark.parametrize(("kl_weight", "factor"), [("auto", 1 / 20), (0.3, 0.3), (2, 2.0)])
def test_the_divergence_is_weighted_and_counts_once_a_pass_by_default(kl_weight: Any, factor: float) -> None:
    model = network(variational={"kl_weight": kl_weight})
    losses = model.extra_losses(num_examples=20)
    assert losses["kl"].item() == pytest.approx(factor * model.stem.divergence().item())
    assert losses["kl"].requires_grad


def test_weight_zero_leaves_the_divergence_out() -> None:
    assert network(variational={"kl_weight": 0}).extra_losses(20) == {}


def test_the_global_prior_is_what_training_started_from() -> None:
    model = network(variational={"prior": "global"})
    assert model.stem.divergence() > 0
    model.start_fit()
    assert model.extra_losses(1)["kl"].item() == pytest.approx(0, abs=1e-6)

    with torch.no_grad():
        model.stem.mu.add_(model.stem.sigma)  # each mean moves by one standard deviation
    assert model.extra_losses(1)["kl"].item() == pytest.approx(8 / 2, rel=1e-5)

    standard = network()
    before = standard.stem.divergence().item()
    standard.start_fit()
    assert standard.stem.divergence().item() == before


def test_the_prior_does_not_travel() -> None:
    assert [name for name in network().state_dict() if name.startswith("stem")] == [
        "stem.mu",
        "stem.rho",
        "stem.bias",
    ]


# The network behind it


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("training", [True, False])
def test_every_size_and_every_feature_works_through_the_stem(dimensions: int, training: bool) -> None:
    model = network(dimensions, in_channels=2, num_outputs=3).train(training)
    sides = (9, 6, 5)[:dimensions]
    output = model.forward_features(torch.randn(2, 2, *sides))

    assert model.has_features
    assert output.logits.shape == (2, 3, *sides)
    assert output.decoder is not None and output.decoder.shape[2:] == sides
    assert output.bottleneck is not None and len(output.stages) == 1
    assert model.padded_size(sides) == model.backbone.padded_size(sides) and model.divisor == 2


def test_evaluation_uses_mean_weights_and_draws_nothing() -> None:
    model, x = network().eval(), torch.randn(2, 1, 9, 9)
    stream = torch.get_rng_state()
    first, second = model(x), model(x)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), stream)
    output = model.forward_features(x)
    assert output.bottleneck is not None and torch.equal(model.encode(x), output.bottleneck)

    with torch.no_grad():
        model.stem.rho.fill_(-100.0)  # sigma 0
    assert torch.equal(model(x), first)
    torch.manual_seed(0)
    assert torch.allclose(model.train()(x), first, atol=1e-5)


def test_training_draws_from_torchs_global_stream() -> None:
    model, x = network(), torch.randn(2, 1, 8, 8)
    torch.manual_seed(5)
    first = model(x)
    second = model(x)
    torch.manual_seed(5)
    assert torch.equal(model(x), first)
    assert not torch.equal(first, second)


def test_a_frozen_reference_encodes_with_mean_weights() -> None:
    model = network().train()
    frozen = copy.deepcopy(model).requires_grad_(False).eval()
    x = torch.randn(1, 1, 8, 8)
    assert torch.equal(frozen.encode(x), frozen.encode(x))
    assert not torch.equal(model.encode(x), frozen.encode(x))


def test_samples_are_logits_of_several_weight_draws() -> None:
    model, x = network().eval(), torch.randn(2, 1, 9, 7)
    with torch.no_grad():
        samples = model.sample(x)
        assert samples.shape == (10, 2, 1, 9, 7)
        assert samples.std(dim=0).max() > 0
        one, other = (model.sample(x, 3, torch.Generator().manual_seed(1)) for _ in range(2))
        assert torch.equal(one, other)
        model.stem.rho.fill_(-100.0)
        assert torch.allclose(model.sample(x, 2), model(x).expand(2, -1, -1, -1, -1), atol=1e-5)


def test_several_evaluation_samples_are_averaged_and_leave_the_stream_alone() -> None:
    model, x = network(variational={"eval_samples": 4}).eval(), torch.randn(3, 1, 8, 8)
    plain = network().eval()
    stream = torch.get_rng_state()
    with torch.no_grad():
        logits = model(x)
        assert torch.equal(model(x), logits) and torch.equal(torch.get_rng_state(), stream)
        assert not torch.equal(logits, plain(x))
        assert torch.allclose(model(x[1:2]), logits[1:2], atol=1e-5)  # whatever else is in the batch
        assert torch.equal(model.encode(x), plain.encode(x))  # features keep the mean weights


def test_head_and_norm_layers_are_found_behind_the_stem() -> None:
    model = network(norm="batch")
    assert head_names(model) == ["backbone.head.weight", "backbone.head.bias"]
    assert all(name.startswith("backbone.") for name in norm_names(model)) and norm_names(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reestimate(model, [torch.randn(2, 1, 8, 8)])
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])]
    assert changed and all("running" in name or "num_batches" in name for name in changed)


def test_a_monai_network_takes_the_stem_too() -> None:
    torch.manual_seed(0)
    chosen = ModelSettings(name="monai:BasicUNet", arguments={"features": [4] * 6}, stem="variational")
    model = build(chosen, in_channels=2, num_outputs=3, dimensions=2)
    x = torch.randn(1, 2, 33, 20)

    assert isinstance(model, VariationalSegmenter) and model.has_features
    assert model(x).shape == (1, 3, 33, 20)
    assert head_names(model) == ["backbone.network.final_conv.weight", "backbone.network.final_conv.bias"]
    model.eval()
    assert torch.equal(model.encode(x), model.forward_features(x).bottleneck)  # type: ignore[arg-type]


def test_the_backbones_own_loss_terms_and_start_pass_through() -> None:
    class Own(Segmenter):
        started = False

        def start_fit(self) -> None:
            self.started = True

        def extra_losses(self, num_examples: int) -> dict[str, Tensor]:
            return {"own": torch.tensor(1.0)}

    plain = network()
    inner = Own(in_channels=8, num_outputs=1, dimensions=2, divisor=1)
    model = VariationalSegmenter(inner, plain.settings, in_channels=1)
    model.start_fit()
    assert inner.started and set(model.extra_losses(3)) == {"own", "kl"}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_half_precision_gives_finite_gradients(estimator: Any) -> None:
    model = network(variational={"estimator": estimator})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = model(torch.zeros(1, 1, 8, 8)).float().square().sum() + model.extra_losses(4)["kl"]
    value.backward()
    assert value.isfinite()
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


def test_without_a_stem_the_network_is_the_plain_one() -> None:
    assert not isinstance(
        build(ModelSettings(**TINY), in_channels=1, num_outputs=1, dimensions=2), VariationalSegmenter
    )


# Settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"channels": 0},
        {"kl_weight": -1},
        {"kl_weight": "often"},
        {"estimator": "local"},
        {"eval_samples": 0},
        {"prior": "x"},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        ModelSettings(variational=wrong)  # type: ignore[arg-type]


def test_a_wrong_setting_is_explained_by_name(tmp_path: Path) -> None:
    for value, reason in ((-1, "must be auto, 0 or a positive number"), ("often", "must be a valid number")):
        with pytest.raises(ConfigError, match=rf"model\.variational\.kl_weight.*{reason}"):
            config(tmp_path, model={**TINY, "variational": {"kl_weight": value}})
    with pytest.raises(
        ConfigError, match=r"model\.variational\.chanels is not a setting\. Did you mean 'channels'"
    ):
        config(tmp_path, model={**TINY, "variational": {"chanels": 4}})


# Aggregation


def rows_of(mus: list[float], rhos: list[float]) -> list[Params]:
    return [
        Params({"stem.mu": torch.tensor([mu]), "stem.rho": torch.tensor([rho])})
        for mu, rho in zip(mus, rhos, strict=True)
    ]


def test_moment_matching_by_hand() -> None:
    rows = rows_of([1.0, -1.0], [0.0, 0.0])  # sigma = ln 2, means one away from their mean
    rho = match_rho(rows, [0.5, 0.5], "stem.mu", "stem.rho")
    sigma = torch.nn.functional.softplus(rho.double()).item()
    assert sigma**2 == pytest.approx(torch.tensor(2.0).log().item() ** 2 + 1, rel=1e-6)
    rho = match_rho(rows, [0.25, 0.75], "stem.mu", "stem.rho")
    sigma = torch.nn.functional.softplus(rho.double()).item()
    assert sigma**2 == pytest.approx(
        torch.tensor(2.0).log().item() ** 2 + 0.25 * 1.5**2 + 0.75 * 0.5**2, rel=1e-6
    )


@pytest.mark.parametrize("rho", [-200.0, -30.0, -3.0, 0.0, 50.0])
def test_moment_matching_of_equal_layers_keeps_them(rho: float) -> None:
    rows = rows_of([0.3] * 3, [rho] * 3)
    matched = match_rho(rows, [0.2, 0.3, 0.5], "stem.mu", "stem.rho").item()
    assert matched == pytest.approx(max(rho, -88), rel=0.02 if rho == -200 else 1e-6, abs=1e-6)


def test_the_server_matches_moments_only_when_asked() -> None:
    model = network()
    start = Params.of(model)
    moved = start.updated({"stem.mu": start["stem.mu"] + 1})
    replies = [Reply(params=row, client=str(n), num_examples=5) for n, row in enumerate((start, moved))]
    results = {}
    for choice in ("mean", "moment_match"):
        method = SAFCF(variational=choice)  # type: ignore[arg-type]
        state = method.start(model)
        assert state.memory["variational"] == [list(pair) for pair in variational_pairs(model)]
        results[choice] = method.combine(state, replies, method.measure(state, replies))

    assert torch.allclose(results["mean"]["stem.rho"], start["stem.rho"])
    assert (results["moment_match"]["stem.rho"] > start["stem.rho"] + 1).all()
    others = [name for name in start if name != "stem.rho"]
    assert all(torch.equal(results["mean"][name], results["moment_match"][name]) for name in others)


# Whole runs


@pytest.mark.parametrize("method", [{"name": "fedavg"}, {"name": "safcf", "variational": "moment_match"}])
@pytest.mark.parametrize(
    "stem", [{}, {"prior": "global", "estimator": "reparam", "eval_samples": 3, "channels": 2}]
)
def test_a_run_with_the_stem_records_the_divergence(tmp_path: Path, method: Any, stem: Any) -> None:
    model = {**TINY, "stem": "variational", "variational": stem}
    result = run(tmp_path / "run", model=model, method=method)

    losses = [loss for record in result.records for loss in record["loss"].values()]
    assert all("kl" in loss for loss in losses)
    assert result.model.sample(torch.zeros(1, 1, 16, 16)).shape == (10, 1, 1, 16, 16)  # type: ignore[attr-defined]
    assert run(tmp_path / "again", model=model, method=method).params_sha256 == result.params_sha256
