"""Contrastive losses: golden vectors, plain loops, edge cases by name."""

import math

import helpers
import numpy as np
import pytest
import torch

from wardround.losses.contrastive import (
    cosines,
    flatten_voxels,
    info_nce,
    local_contrast,
    mean_over_voxels,
    nt_xent,
    region_negatives,
    region_places,
    scale_to_unit,
    sinkhorn_codes,
    swapped_prediction,
    swav,
    take_regions,
)

GOLDEN = helpers.vectors("baselines")
CPU = torch.device("cpu")


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(value, expected):
    return torch.allclose(value, tensor(expected), rtol=1e-6, atol=1e-6)


# Golden vectors


def test_info_nce_gives_the_golden_numbers():
    inputs, expected = GOLDEN["info_nce"]["inputs"], GOLDEN["info_nce"]["expected"]
    query = tensor([inputs["query"]] * 3)
    key = tensor([inputs["positive"], *inputs["negatives"]])
    assert close(cosines(query, key)[0] / inputs["tau"], expected["logits"])
    assert close(info_nce(query, key, inputs["tau"])[0], expected["loss"])


def test_nt_xent_gives_the_golden_numbers():
    inputs, expected = GOLDEN["nt_xent"]["inputs"], GOLDEN["nt_xent"]["expected"]
    z = tensor(inputs["z"])
    rows = nt_xent(z[:2], z[2:], inputs["tau"])
    assert close(rows, expected["per_row"])
    assert close(rows.mean(), expected["loss"])


def test_local_contrast_gives_the_golden_numbers():
    inputs, expected = GOLDEN["local_contrastive"]["inputs"], GOLDEN["local_contrastive"]["expected"]
    all_others = torch.tensor([[1, 2], [0, 2], [0, 1]])
    losses = local_contrast(
        tensor(inputs["view_a"])[None], tensor(inputs["view_b"])[None], all_others, inputs["tau"]
    )
    assert close(losses[0, :3], expected["a_to_b"])
    assert close(losses[0, 3:], expected["b_to_a"])
    assert close(losses.mean(), expected["loss"])


def test_swav_gives_the_golden_numbers():
    inputs, expected = GOLDEN["swav"]["inputs"], GOLDEN["swav"]["expected"]
    a, b, prototypes = (tensor(inputs[name]) for name in ("z_a", "z_b", "prototypes"))
    epsilon, iterations = inputs["sinkhorn_eps"], inputs["sinkhorn_iterations"]
    assert close(sinkhorn_codes(a @ prototypes.T, epsilon, iterations), expected["q_a"])
    assert close(sinkhorn_codes(b @ prototypes.T, epsilon, iterations), expected["q_b"])
    losses = swav(a, b, prototypes, tau=inputs["tau"], epsilon=epsilon, iterations=iterations)
    assert close(losses.mean(), expected["loss"])


# Independent implementations


def plain_info_nce(query, key, tau):
    losses = []
    for i in range(len(query)):
        scores = [math.exp(float(torch.cosine_similarity(query[i], k, dim=0)) / tau) for k in key]
        losses.append(-math.log(scores[i] / sum(scores)))
    return losses


def test_info_nce_agrees_with_plain_loops():
    query, key = random(5, 4), random(5, 4, seed=1)
    assert np.allclose(info_nce(query, key, 0.2), plain_info_nce(query, key, 0.2))


def test_nt_xent_agrees_with_plain_loops():
    first, second = random(3, 4), random(3, 4, seed=1)
    views = torch.cat([first, second])
    for i, loss in enumerate(nt_xent(first, second, 0.5).tolist()):
        scores = torch.exp(torch.cosine_similarity(views[i][None], views) / 0.5)
        others = sum(scores[j] for j in range(6) if j != i)
        assert loss == pytest.approx(-math.log(scores[(i + 3) % 6] / others))


def test_local_contrast_agrees_with_plain_loops():
    a, b = random(2, 13, 6), random(2, 13, 6, seed=1)
    negatives = region_negatives(2, CPU)
    losses = local_contrast(a, b, negatives, 0.1)
    for image in range(2):
        for start, (x, y) in ((0, (a[image], b[image])), (13, (b[image], a[image]))):
            for r in range(13):

                def score(u, v):
                    return math.exp(float(torch.cosine_similarity(u, v, dim=0)) / 0.1)

                positive = score(x[r], y[r])
                rivals = sum(score(x[r], x[q]) + score(x[r], y[q]) for q in negatives[r].tolist())
                expected = -math.log(positive / (positive + rivals))
                assert losses[image, start + r].item() == pytest.approx(expected)


def test_sinkhorn_agrees_with_the_plain_iteration():
    scores = torch.tanh(random(6, 3))
    Q = np.exp(scores.numpy() / 0.05).T  # prototypes x samples, as printed
    Q /= Q.sum()
    for _ in range(3):
        Q /= Q.sum(axis=1, keepdims=True) * 3
        Q /= Q.sum(axis=0, keepdims=True) * 6
    assert np.allclose(sinkhorn_codes(scores, 0.05, 3), (Q * 6).T)


def test_codes_sum_to_one_and_share_the_prototypes_evenly():
    codes = sinkhorn_codes(torch.tanh(random(50, 4)), 0.5, 50)
    assert torch.allclose(codes.sum(dim=1), torch.ones(50, dtype=torch.float64))
    assert torch.allclose(codes.sum(dim=0), torch.full((4,), 12.5, dtype=torch.float64))


def test_codes_carry_no_gradient():
    assert not sinkhorn_codes(random(4, 3).requires_grad_(), 0.05, 3).requires_grad


# Regions


def test_thirteen_flat_and_thirtyfive_solid_regions():
    assert region_places(2).shape == (13, 2)
    assert region_places(3).shape == (35, 3)
    assert len({tuple(place) for place in region_places(3).tolist()}) == 35


@pytest.mark.parametrize(("dimensions", "count"), [(2, 5), (3, 8)])
def test_negatives_are_the_nearest_others(dimensions, count):
    negatives, places = region_negatives(dimensions, CPU), region_places(dimensions)
    assert negatives.shape == (len(places), count)
    for region, chosen in enumerate(negatives.tolist()):
        assert region not in chosen
        distance = (places - places[region]).norm(dim=1)
        rest = [q for q in range(len(places)) if q != region and q not in chosen]
        assert distance[chosen].max() <= distance[rest].min() + 1e-6


def test_regions_are_boxes_of_the_map():
    values = torch.arange(2 * 3 * 11 * 19, dtype=torch.float32).reshape(2, 3, 11, 19)
    regions = take_regions(values)
    assert regions.shape == (2, 13, 9, 3)
    centre = values[:, :, 4:7, 8:11].flatten(2).transpose(1, 2)
    corner = values[:, :, 8:11, 0:3].flatten(2).transpose(1, 2)
    assert torch.equal(regions[:, 4], centre)
    assert torch.equal(regions[:, 6], corner)


def test_solid_regions_are_boxes_too():
    values = torch.arange(2 * 9 * 7 * 5, dtype=torch.float32).reshape(1, 2, 9, 7, 5)
    regions = take_regions(values)
    assert regions.shape == (1, 35, 27, 2)
    assert torch.equal(regions[0, 26], values[0, :, 6:9, 4:7, 2:5].flatten(1).T)


@pytest.mark.parametrize("sides", [(1, 1), (2, 5), (3, 3), (1, 2, 4)])
def test_small_maps_give_regions_as_large_as_they_allow(sides):
    regions = take_regions(torch.rand(1, 2, *sides))
    assert regions.shape[1] == (13 if len(sides) == 2 else 35)
    assert regions.shape[2] == math.prod(min(3, side) for side in sides)


def test_voxels_and_pooling_read_channels():
    values = random(2, 3, 4, 5)
    assert torch.equal(flatten_voxels(values)[7], values[0, :, 1, 2])
    assert torch.allclose(mean_over_voxels(values), values.mean(dim=(2, 3)))


# Edge cases


@pytest.mark.parametrize("loss", [info_nce, nt_xent])
def test_one_case_alone_has_no_contrast_and_no_gradient(loss):
    a, b = random(1, 4).requires_grad_(), random(1, 4, seed=1).requires_grad_()
    value = loss(a, b, 0.07).mean()
    value.backward()
    assert value.item() == 0
    assert not a.grad.any()
    assert not b.grad.any()


def every_loss(a, b, prototypes):
    """All four on the same vectors, added up."""
    negatives = torch.tensor([[(r + 1) % len(a)] for r in range(len(a))])
    return (
        info_nce(a, b, 0.07).mean()
        + nt_xent(a, b, 0.5).mean()
        + local_contrast(a[None], b[None], negatives, 0.1).mean()
        + swav(a, b, prototypes, tau=0.1, epsilon=0.05, iterations=3).mean()
    )


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e15])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_nothing_becomes_infinite_or_nan(scale, precision):
    a, b, prototypes = (random(4, 8, seed=s).to(precision) for s in range(3))
    a, b = (scale * a).requires_grad_(), (scale * b).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        value = every_loss(a, b, prototypes)
    value.backward()
    assert value.dtype == torch.float32
    assert value.isfinite()
    assert a.grad.isfinite().all()
    assert b.grad.isfinite().all()


def test_a_zero_vector_stays_zero_without_gradient():
    vectors = torch.zeros(2, 3, requires_grad=True)
    scale_to_unit(vectors).sum().backward()
    assert not scale_to_unit(vectors).any()
    assert not vectors.grad.any()


def test_equal_vectors_give_the_logarithm_of_their_number():
    same = torch.ones(5, 3)
    assert torch.allclose(info_nce(same, same, 0.07), torch.tensor(math.log(5)))
    assert torch.allclose(nt_xent(same, same, 0.5), torch.tensor(math.log(9)))


def test_autocast_does_not_touch_the_similarities():
    a, b, prototypes = (random(4, 8, seed=s).float() for s in range(3))
    plain = every_loss(a, b, prototypes)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(every_loss(a, b, prototypes), plain)


# Gradients


def test_gradients_are_right():
    a, b = random(3, 4).requires_grad_(), random(3, 4, seed=1).requires_grad_()
    negatives = torch.tensor([[1, 2], [0, 2], [0, 1]])
    assert torch.autograd.gradcheck(lambda a, b: info_nce(a, b, 0.07), (a, b))
    assert torch.autograd.gradcheck(lambda a, b: nt_xent(a, b, 0.5), (a, b))
    assert torch.autograd.gradcheck(lambda a, b: local_contrast(a[None], b[None], negatives, 0.1), (a, b))


def test_swavs_gradient_is_right_while_the_codes_rest():
    a, b, prototypes = (random(4, 3, seed=s).requires_grad_() for s in range(3))
    codes = [sinkhorn_codes(cosines(view, prototypes), 0.05, 3) for view in (a, b)]

    def loss(a, b, prototypes):
        return swapped_prediction(cosines(a, prototypes), cosines(b, prototypes), *codes, 0.1)

    assert torch.autograd.gradcheck(loss, (a, b, prototypes))
    whole = swav(a, b, prototypes, tau=0.1, epsilon=0.05, iterations=3).sum()
    expected = torch.autograd.grad(loss(a, b, prototypes).sum(), (a, b, prototypes))
    for found, wanted in zip(torch.autograd.grad(whole, (a, b, prototypes)), expected, strict=True):
        assert torch.allclose(found, wanted)
