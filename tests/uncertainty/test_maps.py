"""Maps, cases and structures: against numpy by hand, and what always holds."""

import math

import mpmath
import numpy as np
import pytest
import torch
from helpers import vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy as scipy_entropy
from torch.distributions import Dirichlet

from wardround import models
from wardround.losses.objective import Dice, FocalTversky
from wardround.methods import OBJECTIVES
from wardround.methods.fedevi import Evidential
from wardround.models import ModelSettings
from wardround.uncertainty import maps
from wardround.uncertainty.maps import (
    Accumulator,
    Predicted,
    case_mean,
    case_means,
    case_uncertainty,
    decompose,
    sampling,
    sources,
    structure_uncertainty,
    tempered,
)

SHAPES = [(1, 7, 5), (3, 7, 5), (3, 4, 5, 6)]


def logits(shape, seed=0, scale=3.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one(objective, values, **options):
    scan = Accumulator(objective, **options)
    scan.add(values)
    return scan.result()


def softmax(z):
    """In numpy, with a zero for the background where there is one logit."""
    z = z.double().numpy()
    z = np.concatenate([np.zeros_like(z), z]) if len(z) == 1 else z
    e = np.exp(z - z.max(axis=0))
    return e / e.sum(axis=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_plain_pass_has_the_entropy_and_the_objectives_own_label(shape):
    z = logits(shape)
    found = one(Dice(), z)

    assert found.kind == "entropy" and found.epistemic is None and found.aleatoric is None
    assert torch.equal(found.label, Dice().predict(z[None])[0]) and found.label.dtype == torch.uint8
    assert np.allclose(found.probabilities.numpy(), softmax(z), atol=1e-6)
    assert np.allclose(found.total.numpy(), scipy_entropy(softmax(z), axis=0), atol=1e-6)
    assert found.total.dtype == found.probabilities.dtype == torch.float32


@pytest.mark.parametrize("shape", SHAPES)
def test_several_passes_are_the_entropy_of_the_mean_and_its_two_parts(shape):
    passes = [logits(shape, seed) for seed in range(5)]
    scan = Accumulator(Dice(), kind="dropout")
    for z in passes:
        scan.add(z)
    found = scan.result()

    p = np.stack([softmax(z) for z in passes])
    total, aleatoric = scipy_entropy(p.mean(axis=0), axis=0), scipy_entropy(p, axis=1).mean(axis=0)
    assert np.allclose(found.total.numpy(), total, atol=1e-6)
    assert np.allclose(found.aleatoric.numpy(), aleatoric, atol=1e-6)
    assert np.allclose(found.epistemic.numpy(), total - aleatoric, atol=2e-6)
    assert (found.epistemic >= 0).all()
    assert np.array_equal(found.label.numpy(), p.mean(axis=0).argmax(axis=0))
    assert found.kind == "dropout"


def test_equal_passes_have_no_epistemic_part():
    z = logits((3, 9, 9))
    scan = Accumulator(Dice())
    for _ in range(7):
        scan.add(z)

    assert scan.result().epistemic.max() < 1e-6
    assert torch.equal(scan.result().label, Dice().predict(z[None])[0])


def test_a_dirichlet_gives_its_own_three_maps_averaged_over_passes():
    objective, passes = Evidential(), [logits((2, 6, 6), seed) for seed in (1, 2)]
    scan = Accumulator(objective)
    for z in passes:
        scan.add(z)
    found = scan.result()

    assert found.kind == "evidential"
    for name in ("total", "epistemic", "aleatoric"):
        parts = [getattr(decompose(objective.alpha(z[None].double())), name)[0] for z in passes]
        assert torch.allclose(getattr(found, name).double(), torch.stack(parts).mean(0), atol=1e-6)
    means = [objective.probabilities(z[None])[0] for z in passes]
    assert torch.allclose(found.probabilities, torch.stack(means).mean(0), atol=1e-6)


def test_pieces_of_a_volume_give_the_same_as_the_whole(monkeypatch):
    z = logits((3, 5, 6, 7))
    whole = one(Dice(), z)
    monkeypatch.setattr(maps, "VOXELS_AT_ONCE", 11)
    pieces = one(Dice(), z)

    assert torch.allclose(whole.total, pieces.total, rtol=0, atol=1e-6)
    assert torch.allclose(whole.probabilities, pieces.probabilities, rtol=0, atol=1e-6)


@pytest.mark.parametrize("objective", [Dice(), Evidential()], ids=["plain", "evidential"])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_temperature_is_a_power_of_the_probabilities_and_keeps_the_label(objective, temperature):
    z = logits((3, 6, 6))
    plain, found = one(objective, z), one(objective, z, temperature=temperature)

    power = plain.probabilities.double() ** (1 / temperature)
    assert torch.allclose(found.probabilities.double(), power / power.sum(dim=0), atol=1e-5)
    assert torch.equal(found.label, plain.label)


def test_temperature_leaves_the_maps_of_a_dirichlet_alone():
    z = logits((3, 6, 6))
    plain, found = one(Evidential(), z), one(Evidential(), z, temperature=3.0)

    for name in ("total", "epistemic", "aleatoric"):
        assert torch.equal(getattr(plain, name), getattr(found, name))


def test_one_logit_and_two_equal_a_sigmoid_under_temperature():
    z = logits((1, 8, 8))
    found = tempered(Dice(), z[None], 2.0)[0, 1]

    assert torch.allclose(found, torch.sigmoid(z[0].double() / 2))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_is_none_is_refused(temperature):
    with pytest.raises(ValueError, match="positive number"):
        Accumulator(Dice(), temperature=temperature)


def test_passes_of_different_shape_and_no_pass_at_all_are_refused():
    scan = Accumulator(Dice())
    with pytest.raises(ValueError, match="no pass"):
        scan.result()
    scan.add(logits((1, 4, 4)))
    with pytest.raises(ValueError, match=r"\(4, 5\)"):
        scan.add(logits((1, 4, 5)))


# What a model offers


def network(**settings):
    torch.manual_seed(0)
    chosen = ModelSettings(name="unet2d", base_filters=4, levels=2, norm="batch", **settings)
    return models.build(chosen, in_channels=1, num_outputs=1, dimensions=2).eval()


def test_sources_are_what_the_model_has_best_first():
    assert sources(network(), Dice()) == ("entropy",)
    assert sources(network(), FocalTversky()) == ("entropy",)  # its alpha is a number, not a Dirichlet's
    assert sources(network(dropout=0.2), Dice()) == ("dropout", "entropy")
    both = network(dropout=0.2, stem="variational")
    assert sources(both, Dice()) == ("samples", "dropout", "entropy")
    assert sources(both, Evidential()) == ("evidential", "samples", "dropout", "entropy")


@pytest.mark.parametrize("kind", ["samples", "dropout"])
def test_inside_sampling_each_pass_differs_and_the_seed_brings_it_back(kind):
    model, x = network(dropout=0.5, stem="variational"), logits((2, 1, 16, 16))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        outside = model(x)
        with sampling(model, kind):
            torch.manual_seed(3)
            first, second = model(x), model.eval()(x)
            torch.manual_seed(3)
            again = model(x)
        after = model(x)

    assert not torch.equal(first, second) and not torch.equal(first, outside)
    assert torch.equal(first, again)
    assert torch.equal(outside, after)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())


def test_eval_samples_do_not_average_inside_a_sample():
    model = network(stem="variational", variational={"eval_samples": 4})
    x = logits((1, 1, 16, 16))
    with torch.no_grad(), sampling(model, "samples"):
        torch.manual_seed(5)
        found = model(x)
        torch.manual_seed(5)
        expected = model.backbone(model.stem.draw(x))

    assert torch.equal(found, expected)
    assert model.settings.eval_samples == 4


def test_sampling_ends_also_after_an_error():
    model = network(dropout=0.5, stem="variational")
    x = logits((1, 1, 16, 16))
    for kind in ("samples", "dropout"):
        with pytest.raises(RuntimeError), sampling(model, kind):
            raise RuntimeError
    with torch.no_grad():
        assert torch.equal(model(x), model(x))


# One number


def predicted(probabilities, label=None):
    p = torch.tensor(probabilities, dtype=torch.float32)
    chosen = p.argmax(dim=0).to(torch.uint8) if label is None else torch.tensor(label, dtype=torch.uint8)
    return Predicted(p, chosen, torch.special.entr(p).sum(dim=0), None, None, "entropy")


def doubt(p, chosen):
    return 1 - 2 * (p * chosen).sum() / ((p**2).sum() + chosen.sum())


def test_case_uncertainty_is_the_dice_loss_against_the_probabilities():
    p = softmax(logits((3, 8, 9)))
    label = p.argmax(axis=0)
    found = predicted(p.tolist())
    chosen = np.stack([label == 1, label == 2])

    assert case_uncertainty(found) == pytest.approx(doubt(p[1:], chosen), abs=1e-6)
    by_class = {number: doubt(p[number], label == number) for number in (1, 2)}
    assert structure_uncertainty(found) == pytest.approx(by_class, abs=1e-6)


def test_a_certain_mask_has_no_doubt_and_a_full_mask_of_halves_has_some():
    assert case_uncertainty(predicted([[0.0, 1.0], [1.0, 0.0]])) == 0
    assert case_uncertainty(predicted([[0.5, 0.5], [0.5, 0.5]], [1, 1])) == pytest.approx(1 - 1 / 1.25)


def test_where_nothing_is_predicted_the_largest_foreground_probability_is_the_doubt():
    assert case_uncertainty(predicted([[0.9, 0.6], [0.1, 0.4]])) == pytest.approx(0.4)
    assert case_uncertainty(predicted([[1.0, 1.0], [0.0, 0.0]])) == 0


def test_an_absent_class_counts_for_itself_but_not_for_the_case():
    found = predicted([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])

    assert case_uncertainty(found) == 0
    assert structure_uncertainty(found) == {1: 0, 2: 0}


def test_more_background_changes_nothing():
    small = predicted([[0.2, 0.7, 1.0], [0.8, 0.3, 0.0]])
    large = predicted([[0.2, 0.7] + 50 * [1.0], [0.8, 0.3] + 50 * [0.0]])

    assert case_uncertainty(large) == pytest.approx(case_uncertainty(small))


def test_two_classes_mixed_up_are_in_doubt_though_the_foreground_is_certain():
    found = predicted([[0.0, 0.0], [0.55, 0.45], [0.45, 0.55]])

    assert case_uncertainty(found) > 0.2


def test_case_mean_weighs_a_map_by_the_foreground():
    p = torch.tensor([[0.1, 0.9], [0.9, 0.1]])
    found = Predicted(p, torch.tensor([1, 0]), torch.zeros(2), torch.tensor([2.0, 5.0]), torch.zeros(2), "x")

    assert case_mean(found, "epistemic") == pytest.approx(0.9 * 2 + 0.1 * 5)
    assert case_mean(predicted([[0.5], [0.5]]), "epistemic") is None


def test_nan_logits_stay_nan_and_do_not_hide():
    z = logits((1, 4, 4))
    z[0, 0, 0] = math.nan
    found = one(Dice(), z)

    assert torch.isnan(found.total[0, 0]) and int(torch.isnan(found.total).sum()) == 1
    assert math.isnan(case_uncertainty(found)) or found.label.sum() == 0


def test_only_evidential_objectives_are_read_as_evidence() -> None:
    assert [n for n, kind in OBJECTIVES.items() if maps.is_dirichlet(kind())] == [
        "evidential",
        "feduaa_evidential",
    ]


# A Dirichlet: golden vectors, sampling, what always holds


GOLDEN = vectors("fedevi")
NUMBERS = st.floats(min_value=-30, max_value=80, allow_nan=False)


def alpha_of(logits):
    """(pixels, classes) -> (1, classes, pixels)."""
    return torch.tensor(logits, dtype=torch.float64).exp().T[None] + 1


@pytest.mark.parametrize("case", ["uncertainty_binary", "uncertainty_three_class"])
def test_uncertainties_are_the_golden_ones(case):
    expected = GOLDEN[case]["expected"]
    found = decompose(alpha_of(GOLDEN[case]["inputs"]["logits"]))
    for field, values in (("U_total", found.total), ("U_epi", found.epistemic), ("U_ale", found.aleatoric)):
        assert values[0].tolist() == pytest.approx(expected[field], abs=1e-11)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=4))
def test_the_parts_sum_to_the_total_and_none_is_negative(logits):
    found = decompose(alpha_of(logits))
    assert torch.allclose(found.total, found.epistemic + found.aleatoric, rtol=0, atol=1e-12)
    for part in (found.total, found.epistemic, found.aleatoric):
        assert (part >= 0).all()
        assert (part <= math.log(3) + 1e-12).all()


def test_aleatoric_uncertainty_is_the_mean_entropy_of_samples():
    alpha = torch.tensor([[[3.0], [1.5], [1.2]]], dtype=torch.float64)
    torch.manual_seed(0)
    rho = Dirichlet(alpha[0, :, 0]).sample((40_000,)).clamp_min(1e-300)
    entropy = -(rho * rho.log()).sum(dim=1).mean()
    assert decompose(alpha).aleatoric.item() == pytest.approx(entropy.item(), abs=3e-3)


def test_more_evidence_of_the_same_kind_lowers_epistemic_uncertainty_alone():
    weak = decompose(torch.tensor([[[2.0], [2.0]]]))
    strong = decompose(torch.tensor([[[2000.0], [2000.0]]]))
    assert strong.epistemic.item() < 1e-3 < weak.epistemic.item()
    assert strong.aleatoric.item() > 0.69


def test_no_evidence_is_the_flat_distribution():
    found = decompose(torch.ones(1, 2, 1))
    assert found.total.item() == pytest.approx(math.log(2))
    assert found.aleatoric.item() == pytest.approx(0.5)


@pytest.mark.parametrize("size", [(6, 5), (3, 4, 5)])
def test_pieces_give_what_the_whole_gives(size):
    alpha = torch.rand(2, 3, *size).exp()
    whole, pieces = decompose(alpha), decompose(alpha, voxels_at_once=11)
    assert whole.total.shape == (2, *size)
    assert torch.equal(whole.epistemic, pieces.epistemic)
    assert torch.equal(whole.aleatoric, pieces.aleatoric)


def test_maps_are_float64_whatever_comes_in():
    assert decompose(torch.ones(1, 2, 3, dtype=torch.bfloat16)).epistemic.dtype == torch.float64


@pytest.mark.parametrize("logits", [(15.0, -15.0), (15.0, 14.0), (10.0, 3.0)])
def test_epistemic_uncertainty_is_exact_where_float32_is_not(logits):
    found = decompose(alpha_of([logits]))
    with mpmath.workdps(60):
        alpha = [1 + mpmath.exp(z) for z in logits]
        total = sum(alpha)
        means = [a / total for a in alpha]
        exact = sum(
            p * (mpmath.digamma(a + 1) - mpmath.digamma(total + 1) - mpmath.log(p))
            for p, a in zip(means, alpha, strict=True)
        )
    assert found.epistemic.item() == pytest.approx(float(exact), rel=1e-6)


def test_a_case_counts_as_the_mean_of_its_voxels():
    assert case_means(torch.tensor([[[1.0, 3.0]], [[0.0, 1.0]]])).tolist() == [2.0, 0.5]
