"""ECE and its relatives against loops in numpy; tallies of hospitals add up to the tally of all."""

import json

import numpy as np
import pytest
import torch

from wardround.clients.gate import content_complaint
from wardround.messages import Message
from wardround.uncertainty.calibration import Tally, around, equal_mass, log_probabilities, mean_gap


def made(voxels=4000, classes=3, seed=0, scale=2.0):
    """Scores, truth drawn from them at another temperature, and the predicted class."""
    draw = torch.Generator().manual_seed(seed)
    scores = scale * torch.randn(classes, voxels, generator=draw, dtype=torch.float64)
    truth = torch.multinomial(torch.softmax(scores / 2, dim=0).T, 1, generator=draw)[:, 0]
    return scores, truth, scores.argmax(dim=0)


def tally(scores, truth, predicted, temperature=1.0):
    return Tally.of(log_probabilities(scores, temperature), truth, predicted)


def confidences(scores, truth, predicted):
    p = torch.softmax(scores, dim=0).numpy()
    return p, p[predicted.numpy(), np.arange(p.shape[1])], (truth == predicted).numpy()


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_ece_is_the_loop_over_fifteen_bins(classes):
    scores, truth, predicted = made(classes=classes)
    _, confidence, right = confidences(scores, truth, predicted)
    expected = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())

    assert tally(scores, truth, predicted).ece() == pytest.approx(expected, abs=1e-12)


def test_adaptive_ece_is_that_of_sorted_voxels_in_fifteen_equal_parts():
    scores, truth, predicted = made(voxels=60_000)
    _, confidence, right = confidences(scores, truth, predicted)
    parts = np.array_split(np.argsort(confidence, kind="stable"), 15)
    expected = sum(abs(right[p].mean() - confidence[p].mean()) * len(p) for p in parts) / len(confidence)

    assert tally(scores, truth, predicted).adaptive_ece() == pytest.approx(expected, abs=5e-4)


def test_equal_mass_is_exact_where_every_number_has_its_own_bin():
    draw = np.random.default_rng(0)
    confidence, right = np.sort(draw.uniform(0.5, 1, 150)), draw.integers(0, 2, 150).astype(float)
    grouped = equal_mass(np.ones(150), confidence, right)
    parts = np.split(np.arange(150), 15)
    expected = sum(abs(right[p].mean() - confidence[p].mean()) for p in parts) / 15

    assert grouped[0].tolist() == [10.0] * 15
    assert mean_gap(*grouped) == pytest.approx(expected, abs=1e-12)


def test_brier_and_likelihood_are_the_textbook_ones():
    scores, truth, predicted = made()
    p, _, _ = confidences(scores, truth, predicted)
    one_hot = np.eye(3)[truth.numpy()].T
    found = tally(scores, truth, predicted).summary()

    assert found["brier"] == pytest.approx(((p - one_hot) ** 2).sum(axis=0).mean(), rel=1e-12)
    assert found["nll"] == pytest.approx(-np.log((p * one_hot).sum(axis=0)).mean(), rel=1e-12)
    assert found["voxels"] == 4000


def test_hospitals_tallies_add_up_to_the_tally_of_all_also_after_travelling():
    scores, truth, predicted = made()
    whole = tally(scores, truth, predicted)
    parts = [tally(scores[:, s], truth[s], predicted[s]) for s in (slice(0, 1000), slice(1000, 4000))]
    sent = [json.loads(json.dumps(part.scalars())) for part in parts]
    joined = Tally.from_scalars(sent[0]) + Tally.from_scalars(sent[1])

    for name, value in whole.summary().items():
        assert joined.summary()[name] == pytest.approx(value, rel=1e-12)
    assert [b["count"] for b in joined.reliability()] == [b["count"] for b in whole.reliability()]


def test_what_is_sent_has_no_voxels_and_passes_the_gate():
    scores, truth, predicted = made(voxels=50_000)
    sent = tally(scores, truth, predicted).scalars()

    assert content_complaint(Message(scalars={"before": sent})) is None
    assert len(sent["bins"]) <= 15 and len(sent["fine"]) <= 200


def test_the_right_temperature_makes_a_too_sure_model_calibrated():
    scores, truth, predicted = made(voxels=200_000)  # truth was drawn at temperature 2

    assert tally(scores, truth, predicted, 2.0).ece() < 0.005 < 0.05 < tally(scores, truth, predicted).ece()


def test_an_empty_tally_says_nothing_and_adds_nothing():
    scores, truth, predicted = made()
    whole = tally(scores, truth, predicted)

    assert Tally.empty().summary() == {
        "ece": None,
        "adaptive_ece": None,
        "brier": None,
        "nll": None,
        "voxels": 0,
    }
    assert Tally.empty().reliability() == []
    assert (whole + Tally.empty()).summary() == whole.summary()


def test_a_model_that_is_certain_and_right_has_no_error():
    scores = torch.tensor([[800.0, 0.0], [0.0, 800.0]], dtype=torch.float64)
    found = Tally.of(log_probabilities(scores), torch.tensor([0, 1]), torch.tensor([0, 1]))

    assert found.summary() == {"ece": 0.0, "adaptive_ece": 0.0, "brier": 0.0, "nll": 0.0, "voxels": 2}


def test_a_model_that_is_certain_and_wrong_has_a_finite_loss():
    scores = torch.tensor([[800.0], [0.0]], dtype=torch.float64)
    found = Tally.of(log_probabilities(scores), torch.tensor([1]), torch.tensor([0]))

    assert found.summary() == {"ece": 1.0, "adaptive_ece": 1.0, "brier": 2.0, "nll": 800.0, "voxels": 1}


def test_a_class_that_is_nowhere_changes_nothing_but_its_own_probability():
    scores, truth, predicted = made(classes=2)
    absent = torch.cat([scores, torch.full((1, scores.shape[1]), -60.0)])

    without, found = tally(scores, truth, predicted).summary(), tally(absent, truth, predicted).summary()
    assert found == pytest.approx(without, abs=1e-9)


# Where it is measured


def test_the_box_holds_truth_and_prediction_and_is_a_quarter_wider():
    truth, predicted = torch.zeros(40, 60, dtype=torch.long), torch.zeros(40, 60, dtype=torch.uint8)
    truth[10:18, 20:40] = 1
    predicted[12:22, 20:40] = 2

    assert around(truth, predicted) == (slice(7, 25), slice(15, 45))


def test_the_box_ends_at_the_border_and_one_voxel_has_a_margin_too():
    truth = torch.zeros(6, 7, 8, dtype=torch.long)
    truth[0, 3, 7] = 1

    assert around(truth, truth) == (slice(0, 3), slice(1, 6), slice(5, 8))


def test_an_empty_mask_has_the_whole_scan():
    nothing = torch.zeros(5, 6, dtype=torch.long)

    assert around(nothing, nothing) == (slice(0, 5), slice(0, 6))
