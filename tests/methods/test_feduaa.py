"""FedUAA: golden vectors, the threshold, the objective, whole runs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import config, run, spoil, vectors
from torch import Tensor, nn

from wardround.aggregation.weights import softmax
from wardround.clients import Answer
from wardround.data.cases import Batch
from wardround.engine.host import Host
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.losses.objective import Context
from wardround.messages import Reply
from wardround.methods import OBJECTIVES, build_method
from wardround.methods.feduaa import (
    FedUAA,
    FedUAAEvidential,
    find_near,
    histograms,
    thresholds,
    uncertainty,
    youden,
)
from wardround.models.base import head_names
from wardround.params import Params

GOLDEN = vectors("feduaa")
UNEVEN = {"phantom": {"hospitals": 3, "size": 16, "cases": [2, 8, 11]}}  # north has no validation cases


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OBJECTIVES.own, "feduaa_evidential", FedUAAEvidential)


def found_on(u: Sequence[float], wrong: Sequence[int], bins: int = 1024) -> tuple[float, float] | None:
    counts, least = histograms(torch.tensor(u, dtype=torch.float64), torch.tensor(wrong) > 0, bins)
    return youden(counts, least)


# Golden vectors


def test_every_golden_case_is_tested() -> None:
    assert set(GOLDEN) == {"thresholds_and_weights", "uncertainty_of_one_pixel"}


def test_thresholds_and_weights_are_the_golden_ones() -> None:
    inputs, expected = (GOLDEN["thresholds_and_weights"][key] for key in ("inputs", "expected"))
    replies = []
    for k, (u, wrong) in enumerate(zip(inputs["uncertainty"], inputs["is_error"], strict=True)):
        found = found_on(u, wrong)
        assert (None if found is None else found[1]) == pytest.approx(expected["youden_j"][k], abs=1e-6)
        replies.append(Reply(client=str(k), scalars={} if found is None else {"threshold": found[0]}))
    assert list(thresholds(replies).values()) == pytest.approx(expected["threshold"], abs=1e-6)
    weights = FedUAA().weigh(None, replies)  # type: ignore[arg-type]
    assert weights == pytest.approx(expected["weights"], abs=1e-6)


def test_uncertainty_of_one_pixel_is_the_golden_one() -> None:
    inputs, expected = (GOLDEN["uncertainty_of_one_pixel"][key] for key in ("inputs", "expected"))
    objective = FedUAAEvidential()
    assert objective.evidence == inputs["evidence"]
    alpha = objective.alpha(torch.tensor(inputs["logits"], dtype=torch.float64)[None, :, None])
    evidence = alpha - 1
    assert evidence.flatten().tolist() == pytest.approx(expected["evidence"], abs=1e-6)
    assert alpha.flatten().tolist() == pytest.approx(expected["alpha"], abs=1e-6)
    assert alpha.sum().item() == pytest.approx(expected["S"], abs=1e-6)
    assert uncertainty(alpha).item() == pytest.approx(expected["u"], abs=1e-6)
    assert (evidence / alpha.sum()).flatten().tolist() == pytest.approx(expected["belief"], abs=1e-6)


# The threshold


def by_hand(u: Tensor, wrong: Tensor) -> tuple[float, float]:
    """Every observed u tried in turn, the larger of equals."""
    best = (math.nan, -1.0)
    for threshold in sorted(u.tolist()):
        flagged = u >= threshold
        j = (flagged & wrong).sum() / wrong.sum() - (flagged & ~wrong).sum() / (~wrong).sum()
        if float(j) >= best[1] - 1e-12:
            best = (threshold, float(j))
    return best


def test_the_threshold_of_histograms_is_less_than_a_bin_away() -> None:
    generator = torch.Generator().manual_seed(5)
    wrong = torch.rand(400, generator=generator) < 0.3
    u = (0.5 * torch.rand(400, generator=generator) + 0.3 * wrong).double()
    counts, least = histograms(u, wrong, 1024)
    found = youden(counts, least)
    assert found is not None
    threshold, j = by_hand(u, wrong)
    assert abs(found[0] - threshold) < 1 / 1024 and found[1] == pytest.approx(j, abs=0.02)
    assert int(counts.sum()) == 400


def test_histograms_of_parts_add_up_to_those_of_the_whole() -> None:
    u, wrong = torch.rand(90, dtype=torch.float64), torch.rand(90) < 0.5
    parts = [histograms(u[i::3], wrong[i::3], 16) for i in range(3)]
    counts, least = histograms(u, wrong, 16)
    assert torch.equal(parts[0][0] + parts[1][0] + parts[2][0], counts)
    assert torch.equal(torch.stack([part[1] for part in parts]).amin(dim=0), least)


@pytest.mark.parametrize(
    ("u", "wrong"),
    [
        ([0.2, 0.4], [0, 0]),  # all right
        ([0.2, 0.4], [1, 1]),  # all wrong
        ([0.2, 0.4], [1, 0]),  # certain where it is wrong
        ([0.3, 0.3], [1, 0]),  # nothing to tell them apart
        ([], []),  # no voxel at all
    ],
)
def test_without_a_threshold_that_helps_there_is_none(u: list[float], wrong: list[int]) -> None:
    assert found_on(u, wrong) is None


def test_of_equal_thresholds_the_larger_is_taken_and_no_evidence_is_the_last_bin() -> None:
    assert found_on([0.1, 0.5, 0.6, 0.9], [0, 1, 0, 1]) == pytest.approx((0.9, 0.5))
    assert found_on([0.2, 1.0], [0, 1]) == (1.0, 1.0)


def test_weights_are_a_softmax_and_nonsense_counts_as_not_found() -> None:
    assert softmax([0.3]) == [1.0]
    sent = {"a": 0.2, "b": 7.0, "c": None}
    replies = [Reply(client=name, scalars={"threshold": value}) for name, value in sent.items()]
    assert thresholds([*replies, Reply(client="d")]) == {"a": 0.2, "b": 0.5, "c": 0.5, "d": 0.5}


@pytest.mark.parametrize("dimensions", [2, 3])
def test_near_is_a_square_around_the_foreground(dimensions: int) -> None:
    mask = torch.zeros(2, *[9] * dimensions, dtype=torch.bool)
    mask[(0, *[4] * dimensions)] = True
    assert int(find_near(mask, 2).sum()) == 5**dimensions
    assert torch.equal(find_near(mask, 0), mask)


# The objective


class Constant(nn.Module):
    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, image: Tensor) -> Tensor:
        return self.logits


def test_the_kl_rises_over_the_run() -> None:
    logits = torch.randn(1, 2, 3, 3, generator=torch.Generator().manual_seed(1))
    batch = Batch(torch.zeros(1, 1, 3, 3), torch.tensor([[[0, 1, 1], [0, 0, 1], [0, 0, 0]]]))
    objective = FedUAAEvidential()
    dice, kl = objective.terms(logits, batch.label)
    assert kl is not None and float(kl) > 0
    for round, rise in ((0, 0.25), (1, 0.5), (3, 1.0)):
        context = Context(round=round, rounds=4, num_examples=1, memory={}, generator=torch.Generator())
        loss = objective.loss(Constant(logits), batch, context)
        assert loss.item() == pytest.approx((dice + rise * kl).item(), abs=1e-6)
    context = Context(round=0, rounds=4, num_examples=1, memory={}, generator=torch.Generator())
    sooner = FedUAAEvidential(anneal_rounds=2).loss(Constant(logits), batch, context)
    assert sooner.item() == pytest.approx((dice + 0.5 * kl).item(), abs=1e-6)


def test_the_dice_is_of_expected_probabilities_with_softplus_evidence() -> None:
    logits = torch.tensor([[[1.0, -2.0]], [[0.5, 3.0]]], dtype=torch.float64).permute(1, 0, 2)  # (1, 2, 2)
    label = torch.tensor([[0, 1]])
    e = [[math.log1p(math.exp(z)) for z in row] for row in ((1.0, -2.0), (0.5, 3.0))]
    p = [[(e[c][v] + 1) / (e[0][v] + e[1][v] + 2) for v in range(2)] for c in range(2)]
    overlaps = [p[0][0], p[1][1]]
    ratios = [2 * overlaps[c] / (1 + p[c][0] ** 2 + p[c][1] ** 2) for c in range(2)]
    dice, _ = FedUAAEvidential(smooth=0).terms(logits, label)
    assert dice.item() == pytest.approx(1 - sum(ratios) / 2, abs=1e-9)


# Whole runs


@pytest.mark.parametrize("changes", [{}, {"source": "train"}, {"region": "foreground", "margin": 1}])
def test_a_run_records_thresholds_and_their_softmax(tmp_path: Path, changes: dict[str, Any]) -> None:
    record = run(tmp_path, data=UNEVEN, method={"name": "feduaa", **changes}).records[1]
    assert set(record["threshold"]) == {"east", "north", "south"}
    assert all(0 < value <= 1 for value in record["threshold"].values())
    assert list(record["weights"].values()) == pytest.approx(softmax(list(record["threshold"].values())))


def test_the_threshold_is_that_of_all_voxels_of_the_validation_cases(tmp_path: Path) -> None:
    chosen = config(tmp_path, method={"name": "feduaa"})
    host = Host(chosen, tmp_path, ["east"])
    client = host.client("east")
    params = Params.of(host.bench.model)
    found = FedUAA().threshold(client, params)
    ((logits, batch),) = client.predictions(client.data.val, params)
    alpha = nn.functional.softplus(logits.double()) + 1
    wrong = (logits.argmax(dim=1) != batch.label).flatten()
    threshold, j = by_hand((2 / alpha.sum(dim=1)).flatten(), wrong)
    assert found == pytest.approx(threshold if j > 0 else 0.5, abs=1 / 1024)


def test_a_personal_head_stays_at_the_client(tmp_path: Path) -> None:
    chosen = config(tmp_path, method={"name": "feduaa", "personal_head": True})
    model = build_model(chosen)
    assert set(model.state_dict()) - set(build_method(chosen).shared(model)) == set(head_names(model))
    result = run(tmp_path / "run", method={"name": "feduaa", "personal_head": True})
    before = model.state_dict()
    for name in head_names(model):
        assert torch.equal(result.outcome.state.params[name], before[name])


def test_a_threshold_that_was_not_sent_counts_as_one_half(tmp_path: Path, monkeypatch: Any) -> None:
    def silent(answer: Answer) -> Answer:
        return replace(answer, message=replace(answer.message, scalars={}))

    spoil(monkeypatch, "east", silent)
    assert run(tmp_path, rounds=1, method={"name": "feduaa"}).records[0]["threshold"]["east"] == 0.5


def test_it_also_weighs_models_of_fedevis_objective(tmp_path: Path) -> None:
    record = run(tmp_path, rounds=1, method={"name": "feduaa"}, objective={"name": "evidential"}).records[0]
    assert math.fsum(record["weights"].values()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("wrong", [{"bins": 1}, {"source": "test"}, {"margin": -1}])
def test_impossible_settings_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        config(tmp_path, method={"name": "feduaa", **wrong})


def test_an_objective_without_evidence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'feduaa'.*'dice_bce'"):
        config(tmp_path, method={"name": "feduaa"}, objective={"name": "dice_bce"})
