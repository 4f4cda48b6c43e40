"""FSF3A: golden vectors, independent loops, off switches, whole runs."""

import json
import logging
import math
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wardround as wr
from wardround.clients import Answer, Clients, Registration
from wardround.data.cases import Batch
from wardround.errors import ConfigError
from wardround.losses.objective import Context
from wardround.losses.reference import Reference
from wardround.losses.segmentation import dice_loss
from wardround.messages import Message, Reply, ServerState
from wardround.methods.fedavg import FedAvg
from wardround.methods.fsf3a import (
    CLSL,
    FSF3A,
    axis_disagreement,
    edge_disagreement,
    linear_dice,
    patch_contrast,
    patch_logits,
)
from wardround.models.base import Output, Segmenter
from wardround.models.unet import unet2d, unet3d
from wardround.params import Params

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "fsf3a.json").read_text())
GOLDEN = {case["name"]: case for case in VECTORS["cases"]}
LOG_2 = math.log(2)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(value, expected):
    """Within the tolerance the vector file names."""
    expected = tensor(expected)
    return torch.allclose(value.double(), expected, rtol=VECTORS["rtol"], atol=VECTORS["atol"])


def masks(case):
    """Prediction and truth of a golden case as (1, 1, *spatial)."""
    inputs = GOLDEN[case]["inputs"]
    return tensor(inputs["y_pred"])[None, None], tensor(inputs["y_true"])[None, None]


def features(case):
    """prev, pres, serv of a golden case as (1, C, D, H, W), and the settings beside them."""
    inputs = GOLDEN[case]["inputs"]
    inputs = GOLDEN[inputs["same_as"]]["inputs"] if "same_as" in inputs else inputs
    scale = inputs.get("scale_all_by", 1)
    maps = [scale * tensor(inputs[name])[None] for name in ("prev", "pres", "serv")]
    chosen = {name: inputs[name] for name in ("patch", "stride", "tau", "normalise", "pairing")}
    return maps, chosen


# Golden vectors


def test_dice_gives_the_golden_number():
    p, y = masks("dice")
    assert close(linear_dice(p, y, GOLDEN["dice"]["inputs"]["eps"]), [GOLDEN["dice"]["expected"]["loss"]])


@pytest.mark.parametrize(("border", "field"), [("valid", "valid"), ("pad", "padded")])
def test_gradient_agreement_gives_the_golden_numbers(border, field):
    p, y = masks("gradient_alignment")
    expected = GOLDEN["gradient_alignment"]["expected"]
    axes = torch.stack([axis_disagreement(p, y, axis, border)[0, 0] for axis in (2, 3, 4)])
    assert close(axes, expected[f"per_axis_{field}"])
    assert close(edge_disagreement(p, y, border), [expected[f"L_grad_{field}"]])


@pytest.mark.parametrize(("border", "field"), [("valid", "valid"), ("pad", "padded")])
def test_the_supervised_part_gives_the_golden_number(border, field):
    p, y = masks("spatial_structure")
    case = GOLDEN["spatial_structure"]
    p = p.clamp(1e-300, 1)  # a probability of 0 has no logit
    objective = CLSL(omega=case["inputs"]["omega"], eps_dice=case["inputs"]["eps"], grad_border=border)
    terms = objective.supervised(torch.logit(p), y[:, 0].long())
    assert close(terms["dice"], [case["expected"]["L_dice"]])
    samples = objective.sample_losses(torch.logit(p), y[:, 0].long())
    assert close(samples, [case["expected"][f"L_ssc_{field}"]])


@pytest.mark.parametrize(
    "case", [name for name in GOLDEN if name.startswith("lcp") and "grad" not in name], ids=str
)
def test_patch_contrast_gives_the_golden_numbers(case):
    maps, chosen = features(case)
    expected = GOLDEN[case]["expected"]
    positive, negative = patch_logits(*maps, **chosen)
    patches = patch_contrast(*maps, **chosen)
    assert patches.shape == (1, expected.get("n_patches", 2))
    assert close(positive[0], expected["pos_logit"])
    assert close(negative[0], expected["neg_logit"])
    assert close(patches.mean(), expected["L_lcp"])
    if "per_patch" in expected:
        assert close(patches[0], expected["per_patch"])


def test_patch_contrast_stays_finite_in_float32_where_exp_overflows():
    maps, chosen = features("lcp_overflow_guard")
    patches = patch_contrast(*[values.float() for values in maps], **chosen)
    assert patches.mean().item() == pytest.approx(GOLDEN["lcp_overflow_guard"]["expected"]["L_lcp"])


def test_the_gradient_is_the_golden_one_and_parallel_to_minus_prev():
    (prev, pres, serv), chosen = features("lcp_s1_raw_grad_wrt_pres")
    pres.requires_grad_()
    patch_contrast(prev, pres, serv, **chosen).mean().backward()
    rows = pres.grad[0].flatten(1).T
    assert close(rows, GOLDEN["lcp_s1_raw_grad_wrt_pres"]["expected"]["grad_patches"])
    cosine = torch.cosine_similarity(rows, prev[0].flatten(1).T)
    assert torch.allclose(cosine, -torch.ones_like(cosine))


def test_clsl_gives_the_golden_sum():
    case = GOLDEN["clsl"]
    inputs = case["inputs"]
    p, y = masks("spatial_structure")
    prev, pres, serv = features("lcp_s1_cosine")[0]
    model = Given(torch.logit(p.clamp(1e-300, 1)), pres)
    context = made_context(serv, prev)
    objective = CLSL(gamma=inputs["gamma"], patch=1)
    loss = objective.loss(model, Batch(torch.zeros_like(p), y[:, 0].long()), context)
    assert close(loss, case["expected"]["L_clsl"])
    assert close(context.terms["contrast"], inputs["L_lcp"])


def golden_replies(case):
    inputs = GOLDEN[case]["inputs"]
    sizes = inputs.get("n", [1, 1, 1])
    return [
        Reply(Params({"w": tensor(row)}), client=f"c{k}", num_examples=n)
        for k, (row, n) in enumerate(zip(inputs["client_params"], sizes, strict=True))
    ]


@pytest.mark.parametrize(
    ("case", "method"), [("aswa", FSF3A()), ("uniform_mean_baseline", FedAvg(weighting="uniform"))], ids=str
)
def test_aggregation_gives_the_golden_numbers(case, method):
    replies, expected = golden_replies(case), GOLDEN[case]["expected"]
    state = ServerState(Params({"w": torch.zeros(5, dtype=torch.float64)}))
    weights = method.weigh(state, replies)
    assert close(tensor(weights), expected["a"])
    assert close(method.average(state, replies, weights)["w"], expected["w_next"])


def test_aswa_is_fedavg_by_samples():
    replies = golden_replies("aswa")
    state = ServerState(Params({"w": torch.zeros(5)}))
    assert FSF3A().weigh(state, replies) == FedAvg().weigh(state, replies)


# Independent implementations


class Given(Segmenter):
    """A network that puts out what it was given, whatever it sees."""

    def __init__(self, logits, bottleneck):
        super().__init__(in_channels=1, num_outputs=1, dimensions=logits.ndim - 2, divisor=1)
        self.logits, self.bottleneck = logits, bottleneck
        self.num_encoded = 0

    def _output(self, x):
        return Output(logits=self.logits, bottleneck=self.bottleneck)

    def _bottleneck(self, x):
        self.num_encoded += 1
        return self.bottleneck


def made_context(serv=None, prev=None, *, round=1, has_previous=True):
    references = [Reference(Given(torch.zeros(1, 1, 1, 1), values)) for values in (serv, prev)]
    return Context(
        round=round,
        rounds=9,
        num_examples=1,
        memory={},
        generator=torch.Generator(),
        with_features=True,
        global_=references[0],
        previous=references[1],
        has_previous=has_previous,
    )


def plain_patch_contrast(prev, pres, serv, patch, stride, tau, normalise, pairing):
    """Eqs. 9-11 patch by patch, in NumPy loops."""
    found = []
    size = min(patch, *pres.shape[-2:])
    step = stride or size
    for b in range(len(pres)):
        for d in range(pres.shape[2]):
            for i in range(0, pres.shape[3] - size + 1, step):
                for j in range(0, pres.shape[4] - size + 1, step):
                    P, Q, S = (
                        x[b, :, d, i : i + size, j : j + size].numpy().ravel() for x in (prev, pres, serv)
                    )
                    if normalise:
                        P, Q, S = (x / np.linalg.norm(x) for x in (P, Q, S))
                    pos, neg = {
                        "paper": (P @ Q, P @ S),
                        "moon": (Q @ S, Q @ P),
                        "anchor_pres": (Q @ P, Q @ S),
                    }[pairing]
                    found.append(-np.log(np.exp(pos / tau) / (np.exp(pos / tau) + np.exp(neg / tau))))
    return np.reshape(found, (len(pres), -1))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("pairing", ["paper", "moon", "anchor_pres"])
@pytest.mark.parametrize(("patch", "stride"), [(2, None), (3, 1), (2, 3), (9, None)])
def test_patch_contrast_agrees_with_plain_loops(patch, stride, pairing, normalise):
    generator = torch.Generator().manual_seed(0)
    maps = [torch.rand(2, 3, 2, 5, 7, generator=generator, dtype=torch.float64) for _ in range(3)]
    chosen = {"tau": 0.5, "patch": patch, "stride": stride, "normalise": normalise, "pairing": pairing}
    expected = plain_patch_contrast(*maps, **chosen)
    assert np.allclose(patch_contrast(*maps, **chosen).numpy(), expected, atol=1e-12)


def test_a_flat_map_is_one_slice_of_a_solid_one():
    generator = torch.Generator().manual_seed(1)
    maps = [torch.rand(2, 3, 6, 6, generator=generator) for _ in range(3)]
    chosen = {"patch": 2, "stride": None, "tau": 0.5, "normalise": True, "pairing": "paper"}
    solid = patch_contrast(*[values[:, :, None] for values in maps], **chosen)
    assert torch.equal(patch_contrast(*maps, **chosen), solid)


def test_flat_edges_are_the_mean_over_two_axes():
    generator = torch.Generator().manual_seed(2)
    p = torch.rand(2, 1, 4, 5, generator=generator, dtype=torch.float64)
    y = (torch.rand(2, 1, 4, 5, generator=generator) > 0.5).double()
    rows = ((y[:, :, 1:] - y[:, :, :-1]) - (p[:, :, 1:] - p[:, :, :-1])) ** 2
    columns = ((y[..., 1:] - y[..., :-1]) - (p[..., 1:] - p[..., :-1])) ** 2
    expected = (rows.mean(dim=(1, 2, 3)) + columns.mean(dim=(1, 2, 3))) / 2
    assert torch.allclose(edge_disagreement(p, y), expected)


def test_padded_borders_shrink_each_axis_by_its_missing_difference():
    p, y = torch.rand(1, 1, 4, 5), torch.zeros(1, 1, 4, 5)
    for axis, side in ((2, 4), (3, 5)):
        valid, padded = (axis_disagreement(p, y, axis, border) for border in ("valid", "pad"))
        assert torch.allclose(padded, valid * (side - 1) / side)  # F7


def test_an_axis_of_one_voxel_has_no_edges():
    p, y = torch.rand(2, 1, 1, 4, 4), torch.zeros(2, 1, 1, 4, 4)
    flat = edge_disagreement(p[:, :, 0], y[:, :, 0])
    assert torch.allclose(edge_disagreement(p, y), flat * 2 / 3)


def test_several_classes_average_over_the_foreground():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64)
    label = torch.randint(0, 3, (2, 6, 6), generator=generator)
    p = torch.softmax(logits, dim=1)
    single = [
        linear_dice(p[:, k : k + 1], (label == k)[:, None].double(), 1e-5)
        + 0.5 * edge_disagreement(p[:, k : k + 1], (label == k)[:, None].double())
        for k in (1, 2)
    ]
    assert torch.allclose(CLSL().sample_losses(logits, label), (single[0] + single[1]) / 2)


def test_an_empty_truth_costs_one_and_teaches_nothing_by_dice():
    logits = torch.randn(1, 1, 6, 6, requires_grad=True)
    label = torch.zeros(1, 6, 6, dtype=torch.long)
    loss = CLSL(omega=0).sample_losses(logits, label).sum()
    loss.backward()
    assert loss.item() == 1.0
    assert not logits.grad.any()  # S2: exactly 0


def test_smooth_nr_gives_two_empty_masks_no_loss():
    logits = torch.full((1, 1, 6, 6), -100.0)
    label = torch.zeros(1, 6, 6, dtype=torch.long)
    assert CLSL(smooth_nr=True).sample_losses(logits, label).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("num_outputs", [1, 3])
def test_smooth_nr_without_edges_is_the_dice_loss_bit_for_bit(num_outputs):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, num_outputs, 6, 6, generator=generator)
    label = torch.randint(0, max(2, num_outputs), (3, 6, 6), generator=generator)
    ours = CLSL(omega=0, smooth_nr=True).sample_losses(logits, label)
    assert torch.equal(ours, dice_loss(logits, label, reduce=False))


# The contrast


def directions():
    generator = torch.Generator().manual_seed(5)
    return [torch.rand(1, 8, 4, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


def moved(pairing, normalise=True):
    """prev, pres and serv after some steps of gradient descent on pres alone."""
    prev, pres, serv = directions()
    pres.requires_grad_()
    for _ in range(200):
        patch_contrast(
            prev, pres, serv, patch=4, stride=None, tau=0.5, normalise=normalise, pairing=pairing
        ).mean().backward()
        with torch.no_grad():
            pres -= pres.grad
        pres.grad = None
    return prev, pres.detach(), serv


def cosine(a, b):
    return torch.cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


def test_the_printed_pairs_pull_to_the_previous_model():
    before = directions()
    prev, pres, _ = moved("paper")
    assert cosine(pres, prev) > 0.99 > cosine(before[1], before[0])  # F3


def test_moons_pairs_widen_the_gap_between_received_and_previous():
    prev, pres, serv = directions()
    before = cosine(pres, serv) - cosine(pres, prev)
    prev, pres, serv = moved("moon")
    assert cosine(pres, serv) - cosine(pres, prev) > before + 0.1


def test_raw_products_reward_growing_features_and_cosines_do_not():
    length = directions()[1].norm()
    assert moved("paper", normalise=False)[1].norm() > 1.5 * length  # F4
    assert moved("paper")[1].norm() < 1.5 * length


def flat_batch(batch=2, seed=0, dtype=torch.float32, num_classes=2):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(batch, 1, 16, 16, generator=generator, dtype=dtype)
    return Batch(image, torch.randint(0, num_classes, (batch, 16, 16), generator=generator))


def small_model(seed=0, **settings):
    torch.manual_seed(seed)
    return unet2d(in_channels=1, num_outputs=1, base_filters=4, levels=3, **settings)


def context_for(model, previous=None, **settings):
    reference = Reference(small_model())
    reference.copy_from(model)
    before = Reference(small_model())
    before.copy_from(previous or model)
    facts = {"round": 0, "rounds": 3, "num_examples": 4, "memory": {}, "has_previous": previous is not None}
    return Context(
        **(facts | settings),
        generator=torch.Generator(),
        with_features=True,
        global_=reference,
        previous=before,
    )


def test_the_loss_is_the_sum_of_its_noted_terms():
    model = small_model()
    context = context_for(model, small_model(1))
    loss = CLSL(gamma=0.3, omega=0.2).loss(model, flat_batch(), context)
    terms = context.terms
    assert set(terms) == {"dice", "gradient", "contrast"}
    assert torch.allclose(loss, terms["dice"] + 0.2 * terms["gradient"] + 0.3 * terms["contrast"])


def test_validation_sees_the_supervised_part():
    model, batch = small_model(), flat_batch()
    context = context_for(model, small_model(1))
    CLSL().loss(model, batch, context)
    samples = CLSL().sample_losses(model(batch.image), batch.label)
    assert samples.shape == (2,)
    assert torch.allclose(samples.mean(), context.terms["dice"] + 0.5 * context.terms["gradient"])


def test_before_any_training_the_contrast_is_log_two():
    model = small_model()
    context = context_for(model)
    CLSL().loss(model, flat_batch(), context)
    assert context.terms["contrast"].item() == pytest.approx(LOG_2)  # F6


def test_without_a_previous_model_its_encoder_is_not_run():
    context = made_context(torch.rand(2, 3, 4, 4), torch.rand(2, 3, 4, 4), has_previous=False)
    context.forward(Given(torch.zeros(2, 1, 4, 4), torch.rand(2, 3, 4, 4)), torch.zeros(2, 1, 4, 4))
    CLSL().contrast(torch.zeros(2, 1, 4, 4), context)
    assert (context.global_.model.num_encoded, context.previous.model.num_encoded) == (1, 0)


def test_warm_up_rounds_go_without_the_contrast():
    model, objective = small_model(), CLSL(lcp_warmup_rounds=1)
    first, second = context_for(model), context_for(model, round=1)
    objective.loss(model, flat_batch(), first)
    objective.loss(model, flat_batch(), second)
    assert "contrast" not in first.terms
    assert "contrast" in second.terms


def test_epoch_scope_moves_the_previous_model_at_each_epoch_but_the_first():
    objective, older, model = CLSL(prev_scope="epoch"), small_model(1), small_model()
    context = context_for(model, older)
    image = flat_batch().image
    objective.start_epoch(model, context)
    assert torch.equal(context.previous.encode(image), older.eval().encode(image))
    context.epoch = 1
    objective.start_epoch(model, context)
    assert torch.equal(context.previous.encode(image), model.eval().encode(image))


def test_round_scope_leaves_the_previous_model_alone():
    objective, older, model = CLSL(), small_model(1), small_model()
    context = context_for(model, older, round=1)
    context.epoch = 1
    objective.start_epoch(model, context)
    image = flat_batch().image
    assert torch.equal(context.previous.encode(image), older.eval().encode(image))


# Gradients and extremes


@pytest.mark.parametrize("pairing", ["paper", "moon", "anchor_pres"])
@pytest.mark.parametrize("normalise", [True, False])
def test_the_gradient_of_the_whole_objective_is_right(pairing, normalise):
    generator = torch.Generator().manual_seed(6)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits, pres = random(2, 1, 5, 5), random(2, 3, 4, 4)
    context = made_context(random(2, 3, 4, 4), random(2, 3, 4, 4))
    objective = CLSL(patch=2, pairing=pairing, normalise=normalise)
    label = torch.randint(0, 2, (2, 5, 5), generator=generator)

    def loss(logits, pres):
        return objective.loss(Given(logits, pres), Batch(torch.zeros_like(logits), label), context)

    assert torch.autograd.gradcheck(loss, (logits.requires_grad_(), pres.requires_grad_()))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["confident", "wrong", "empty", "full", "dead", "constant", "huge"])
@pytest.mark.parametrize(
    "options", [{}, {"normalise": False}, {"pairing": "moon"}, {"smooth_nr": True}], ids=str
)
def test_nothing_becomes_infinite_or_nan(case, precision, options):
    generator = torch.Generator().manual_seed(7)
    label = torch.randint(0, 2, (1, 8, 8), generator=generator)
    maps = [torch.rand(1, 4, 4, 4, generator=generator) for _ in range(3)]
    logits = torch.randn(1, 1, 8, 8, generator=generator)
    if case in ("confident", "wrong"):
        logits = (label[:, None] * 200.0 - 100) * (1 if case == "confident" else -1)
    if case in ("empty", "full"):
        label = torch.full_like(label, case == "full")
    if case == "dead":
        maps = [torch.zeros_like(values) for values in maps]
    if case == "constant":
        maps = [torch.ones_like(values) for values in maps]
    if case == "huge":
        maps = [values * 1e4 for values in maps]
    if precision == "bfloat16":
        logits, maps = logits.bfloat16(), [values.bfloat16() for values in maps]
    logits.requires_grad_()
    maps[1].requires_grad_()
    context = made_context(maps[2], maps[0])
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        loss = CLSL(**options).loss(Given(logits, maps[1]), Batch(torch.zeros(1, 1, 8, 8), label), context)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert logits.grad.isfinite().all()
    assert maps[1].grad.isfinite().all()
    if case == "dead":
        assert not maps[1].grad.any()


def test_autocast_changes_the_contrast_of_equal_features_by_nothing():
    maps = [values.float() for values in directions()]
    chosen = {"patch": 2, "stride": None, "tau": 0.5, "normalise": True, "pairing": "paper"}
    plain = patch_contrast(*maps, **chosen)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(patch_contrast(*maps, **chosen), plain)


def test_a_real_network_gives_finite_gradients_in_bfloat16():
    model = small_model()
    context = context_for(model, small_model(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = CLSL().loss(model, flat_batch(batch=1), context)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_volumes_and_three_classes_work():
    torch.manual_seed(0)
    model = unet3d(in_channels=1, num_outputs=3, base_filters=2, levels=2)
    frozen = [Reference(unet3d(in_channels=1, num_outputs=3, base_filters=2, levels=2)) for _ in range(2)]
    context = Context(
        round=1,
        rounds=2,
        num_examples=2,
        memory={},
        generator=torch.Generator(),
        with_features=True,
        global_=frozen[0],
        previous=frozen[1],
        has_previous=True,
    )
    batch = Batch(torch.randn(2, 1, 4, 8, 8), torch.randint(0, 3, (2, 4, 8, 8)))
    loss = CLSL(patch=2).loss(model, batch, context)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# The mean


def replies_of(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        Reply(
            Params({"w": torch.randn(4, generator=generator), "count": torch.tensor(k)}),
            client=f"c{k}",
            num_examples=size,
        )
        for k, size in enumerate(sizes)
    ]


START = ServerState(Params({"w": torch.zeros(4), "count": torch.tensor(0)}))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=12))
def test_weights_are_shares(sizes):
    weights = FSF3A().weigh(START, replies_of(sizes))
    assert min(weights) >= 0
    assert math.fsum(weights) == pytest.approx(1, abs=1e-12)


def test_the_order_of_clients_does_not_matter():
    replies, method = replies_of([3, 5, 9]), FSF3A()
    there = method.average(START, replies, method.weigh(START, replies))
    back = method.average(START, replies[::-1], method.weigh(START, replies[::-1]))
    assert torch.allclose(there["w"], back["w"], atol=1e-7)
    assert torch.equal(there["count"], back["count"])


def test_identical_replies_change_nothing():
    one = replies_of([4])[0]
    replies = [Reply(one.params, client=f"c{k}", num_examples=n) for k, n in enumerate([3, 5, 9])]
    after = FSF3A().average(START, replies, FSF3A().weigh(START, replies))
    assert torch.equal(after["w"], one.params["w"])
    assert after["count"].dtype == torch.int64


class Answering:
    """A transport whose clients return fixed params; some are lost."""

    def __init__(self, sizes, lost=()):
        self.sizes, self.lost = sizes, lost

    def deliver(self, task, round, messages, sync_state):
        for k, name in enumerate(messages):
            if name in self.lost:
                yield Answer(name, failure="the line went dead")
            else:
                params = Params({"w": torch.full((2,), float(k))})
                yield Answer(name, Message(params), num_examples=self.sizes[name], num_steps=1)


def clients_of(sizes, lost=()):
    spec = {"w": ((2,), torch.float32)}
    registrations = [Registration(name, n, tensors=spec) for name, n in sizes.items()]
    return Clients(Answering(sizes, lost), registrations, rounds=2, min_clients=1)


def test_a_lost_client_leaves_the_others_their_proportions():
    clients = clients_of({"a": 2, "b": 6, "c": 4}, lost=["c"])
    after = FSF3A().run_round(ServerState(Params({"w": torch.zeros(2)})), clients)
    assert after.notes["weights"] == {"a": 0.25, "b": 0.75}
    assert torch.allclose(after.params["w"], torch.tensor(0.75))


def test_partial_participation_weighs_those_present():
    clients = clients_of({"a": 2, "b": 6, "c": 4})
    clients.begin_round(0, ["a", "b"])
    after = FSF3A().run_round(ServerState(Params({"w": torch.zeros(2)})), clients)
    assert after.notes["weights"] == {"a": 0.25, "b": 0.75}
    assert after.memory == {}  # nothing is held: the weights follow from the sizes


# Whole runs


def run(folder, resume=False, listener=None, **changes):
    """A tiny run; the last hospital has no validation case."""
    data = {"phantom": {"hospitals": 3, "size": 16, "cases": [8, 6, 2]}}
    config = helpers.settings(folder, **({"data": data, "method": {"name": "fsf3a"}} | changes))
    return wr.run(config, resume=resume, listener=listener)


def test_a_run_records_weights_and_terms_of_every_client(tmp_path):
    result = run(tmp_path / "run")
    assert result.summary["status"] == "done"
    for record in result.records:
        assert record["weights"] == pytest.approx({"north": 5 / 9, "east": 3 / 9, "south": 1 / 9})
        for loss in record["loss"].values():
            assert loss["total"] == pytest.approx(
                loss["dice"] + 0.5 * loss["gradient"] + 0.5 * loss["contrast"], abs=1e-5
            )
    first, second = result.records
    assert first["loss"]["north"]["contrast"] == pytest.approx(LOG_2, abs=0.1)
    assert second["loss"]["north"]["contrast"] != pytest.approx(LOG_2, abs=1e-7)


def test_only_the_model_leaves_a_client(tmp_path):
    result = run(tmp_path / "run")
    lines = [json.loads(line) for line in (result.folder / "egress.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["task"] == "train"]
    assert trained
    assert all(key.startswith("loss/") for line in trained for key in line["scalars"])
    assert all(key.startswith("params/") for line in trained for key in line["tensors"])


def test_the_method_is_fedavg_with_its_objective(tmp_path):
    ours = run(tmp_path / "ours")
    theirs = run(tmp_path / "theirs", method={"name": "fedavg"}, objective={"name": "clsl"})
    assert ours.params_sha256 == theirs.params_sha256


def test_with_both_terms_off_it_is_fedavg_with_its_dice(tmp_path):
    off = {"name": "clsl", "gamma": 0, "omega": 0}
    ours = run(tmp_path / "ours", objective=off)
    theirs = run(tmp_path / "theirs", method={"name": "fedavg"}, objective=off)
    assert ours.params_sha256 == theirs.params_sha256
    assert set(ours.records[0]["loss"]["north"]) == {"total", "dice"}


def test_with_both_terms_off_and_a_smooth_numerator_it_is_fedavg_with_dice(tmp_path):
    off = {"name": "clsl", "gamma": 0, "omega": 0, "smooth_nr": True}
    ours = run(tmp_path / "ours", objective=off)
    theirs = run(tmp_path / "theirs", method={"name": "fedavg"}, objective={"name": "dice"})
    assert ours.params_sha256 == theirs.params_sha256


def test_one_client_alone_is_local_training(tmp_path):
    alone = {"data": {"phantom": {"hospitals": 1, "size": 16, "cases": 8}}}
    ours = run(tmp_path / "ours", **alone)
    theirs = run(tmp_path / "theirs", method={"name": "local"}, objective={"name": "clsl"}, **alone)
    assert ours.records[-1]["loss"] == theirs.records[-1]["loss"]
    assert ours.test.value("dice") == theirs.test.value("dice")


def test_epoch_scope_differs_from_round_scope_only_with_several_epochs(tmp_path):
    def sha(scope, epochs):
        folder = tmp_path / f"{scope}{epochs}"
        return run(
            folder, rounds=1, local_epochs=epochs, objective={"name": "clsl", "prev_scope": scope}
        ).params_sha256

    assert sha("epoch", 1) == sha("round", 1)
    assert sha("epoch", 2) != sha("round", 2)


@pytest.mark.parametrize("scope", ["round", "epoch"])
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path, scope):
    changes = {"local_epochs": 2, "objective": {"name": "clsl", "prev_scope": scope, "pairing": "moon"}}
    whole = run(tmp_path / "whole", **changes)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", listener=helpers.Watcher(crash_in_round=2), **changes)
    resumed = run(tmp_path / "parts", resume=True, **changes)
    assert resumed.params_sha256 == whole.params_sha256


def test_volumes_run_too(tmp_path):
    result = run(
        tmp_path / "run",
        data={"phantom": {"hospitals": 2, "size": 16, "cases": 4, "dimensions": 3}},
        model={"name": "unet3d", "base_filters": 2, "levels": 2},
    )
    assert result.status == "done"


# Configuration


def test_a_negative_weight_is_refused():
    with pytest.raises(ConfigError, match=r"objective.gamma is -1"):
        wr.load_config({"method": {"name": "fsf3a"}, "objective": {"name": "clsl", "gamma": -1}})


def test_batch_norm_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        wr.load_config({"method": {"name": "fsf3a"}, "model": {"norm": "batch"}})
    assert "BatchNorm" in caplog.text


def test_epoch_scope_with_one_local_epoch_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        wr.load_config({"method": {"name": "fsf3a"}, "objective": {"prev_scope": "epoch"}})
    assert "local_epochs is 1" in caplog.text


def test_a_network_without_features_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="encoder features"):
        run(tmp_path / "run", model={"name": "user_nets:Flat"})
