"""SAFCF: golden numbers, the objective's edge cases, DSWA's promises, whole runs."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Watcher, config, run, settings, spoil, vectors
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

import wardround as wr
from wardround.clients import Answer, Clients, Registration
from wardround.config_file import resolve
from wardround.data.cases import Batch
from wardround.engine.memory_store import MemoryStore
from wardround.errors import ClientError, ConfigError
from wardround.losses.objective import Context
from wardround.losses.reference import Reference
from wardround.messages import Message, Reply, ServerState
from wardround.methods import build_objective
from wardround.methods.safcf import (
    CFSL,
    SAFCF,
    contrastive,
    modified_dice,
    scale_shares,
    squared_distances,
)
from wardround.methods.safcf_readings import alpha_share, cap_weights, refuse_small
from wardround.models import ModelSettings, build
from wardround.models.base import Output, Segmenter
from wardround.params import Params

GOLDEN = vectors("safcf")
EXACT = {"rel": 1e-9, "abs": 1e-9}  # the file's numbers carry 12 digits

CONTRASTS = [name for name in GOLDEN if name.startswith("contrastive_")]
DSWA = [name for name in GOLDEN if name.startswith("dswa_")]
FORMS: Any = ["margin", "guarded", "literal"]
POOLS: Any = ["flatten", "gap", "voxel"]

every_pool = pytest.mark.parametrize("pool", POOLS)
every_form = pytest.mark.parametrize("form", FORMS)
well_posed = pytest.mark.parametrize("form", ["margin", "guarded"])
both_reductions = pytest.mark.parametrize("reduction", ["per_sample", "batch"])


def golden_features(case: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    h_c, h_p, h_s = (torch.tensor(case["inputs"][key], dtype=torch.float64) for key in ("h_c", "h_p", "h_s"))
    return h_c, h_p, h_s


def features(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Positive features of three cases, 4 channels, 2 x 3 voxels, long enough for log chi."""
    draw = torch.Generator().manual_seed(seed)
    h_c, h_p, h_s = 0.2 + torch.rand(3, 3, 4, 2, 3, generator=draw, dtype=dtype)
    return h_c, h_p, 2 * h_s


class Given(Segmenter):
    """A network whose logits and features are given: the objective's view without a network."""

    def __init__(self, logits: Tensor, h: Tensor) -> None:
        super().__init__(in_channels=1, num_outputs=logits.shape[1], dimensions=2, divisor=1)
        self.logits, self.h = logits, h

    def forward_features(self, x: Tensor) -> Output:
        return Output(logits=self.logits, bottleneck=self.h)

    def encode(self, x: Tensor) -> Tensor:
        return self.h


def context(h_s: Segmenter, h_p: Segmenter | None = None, memory: dict[str, Any] | None = None) -> Context:
    return Context(
        round=1,
        rounds=2,
        num_examples=3,
        memory={} if memory is None else memory,
        generator=torch.Generator(),
        with_features=True,
        global_=Reference(h_s),
        previous=Reference(h_p or h_s),
        has_previous=h_p is not None,
    )


def given_loss(
    objective: CFSL, logits: Tensor, label: Tensor, h_c: Tensor, h_p: Tensor | None, h_s: Tensor
) -> Tensor:
    previous = None if h_p is None else Given(logits, h_p)
    batch = Batch(torch.zeros(len(logits), 1, 2, 3), label)
    return objective.loss(Given(logits, h_c), batch, context(Given(logits, h_s), previous))


# Golden numbers: the objective


@pytest.mark.parametrize("name", CONTRASTS)
def test_the_contrastive_term_gives_the_golden_numbers(name: str) -> None:
    case = GOLDEN[name]
    inputs, expected = case["inputs"], case["expected"]
    h_c, h_p, h_s = golden_features(case)

    found = contrastive(h_c, h_p, h_s, form=inputs["mode"], tau=inputs["tau"], eps_cos=inputs["eps"])

    losses = (1 - inputs["alpha"]) * found.losses
    assert found.beta.flatten().tolist() == pytest.approx(expected["beta"], **EXACT)
    assert losses.tolist() == pytest.approx(expected["loss_per_sample"], **EXACT)
    assert losses.mean().item() == pytest.approx(expected["L_c"], **EXACT)
    if inputs["mode"] != "margin":
        assert found.chi.flatten().tolist() == pytest.approx(expected["chi"], **EXACT)


def test_eq_9_without_its_divisor_or_with_chi_in_its_place_is_the_formula_by_hand() -> None:
    rng = np.random.default_rng(7)
    h_c, h_p, h_s = rng.uniform(0.1, 2.0, (3, 2, 4, 3, 3))  # two cases, four channels
    expected: dict[str, list[float]] = {"log_chi": [], "chi": [], "none": []}
    for c, p, s in zip(h_c, h_p, h_s, strict=True):
        cosine_s = (s * c).sum() / np.sqrt((s * s).sum() * (c * c).sum())
        cosine_p = (c * p).sum() / np.sqrt((c * c).sum() * (p * p).sum())
        beta = (cosine_s - cosine_p) / 0.5
        delta = np.sqrt(((c * c - beta * beta) ** 2).sum())
        eta = (p * c * c + (1 - p) * delta).mean()
        chi = np.sqrt((s * s).sum())
        for divisor, scale in (("log_chi", np.log(chi)), ("chi", chi), ("none", 1.0)):
            expected[divisor].append(eta / scale)

    for divisor, losses in expected.items():
        objective = CFSL(contrast="literal", divisor=divisor)  # type: ignore[arg-type]
        found = objective.compare(*(torch.from_numpy(h) for h in (h_c, h_p, h_s)))
        assert found.losses.tolist() == pytest.approx(losses, rel=1e-6)


def test_a_guarded_divisor_is_at_least_one() -> None:
    h_c, h_p, h_s = (torch.full((1, 1, 2, 2), value) for value in (0.3, 0.2, -9.0))  # chi is 0.0002

    plain, by_chi, by_log = (
        contrastive(h_c, h_p, h_s, form="guarded", divisor=divisor).losses
        for divisor in ("none", "chi", "log_chi")
    )
    assert plain.equal(by_chi) and plain.equal(by_log)


def test_a_divisor_without_anything_to_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"divisor is chi, but contrast: margin .* guarded or literal"):
        run(tmp_path / "run", **SAFCF_RUN, objective={"divisor": "chi"})


def test_alpha_follows_the_golden_recursion_whatever_the_features() -> None:
    case = GOLDEN["alpha_recursion"]
    objective = CFSL(alpha0=case["inputs"]["alpha0"])
    memory: dict[str, Any] = {}

    used = [objective.next_alpha(*features(seed), memory).item() for seed in range(7)]

    assert used[0] == case["inputs"]["alpha0"]
    assert used[1:] == pytest.approx(case["expected"]["alpha_literal"], **EXACT)
    assert memory["alpha"].item() == pytest.approx(used[-1] / 3)


def test_the_share_of_the_server_features_is_the_golden_alpha() -> None:
    m_s, m_c, m_p = (torch.tensor([value]) for value in GOLDEN["alpha_recursion"]["inputs"]["means_s_c_p"])
    expected = GOLDEN["alpha_recursion"]["expected"]["alpha_share"]

    assert alpha_share(m_c, m_p, m_s).item() == pytest.approx(expected, rel=1e-6)
    assert alpha_share(0 * m_c, 0 * m_p, 0 * m_s).item() == 0
    assert alpha_share(-m_c, -m_p, 10 * m_s).item() == pytest.approx(0.99)


def golden_voxels() -> tuple[Tensor, Tensor]:
    inputs = GOLDEN["modified_dice"]["inputs"]
    p = torch.tensor(inputs["p_pred"], dtype=torch.float64)
    return torch.logit(p).reshape(1, 1, 2, 3), torch.tensor(inputs["y_true"]).long().reshape(1, 2, 3)


def test_the_modified_dice_gives_the_golden_numbers() -> None:
    expected = GOLDEN["modified_dice"]["expected"]
    logits, label = golden_voxels()

    assert modified_dice(logits, label).item() == pytest.approx(expected["loss"], **EXACT)
    coefficient = modified_dice(logits, label, literal=True).item()
    assert coefficient == pytest.approx(expected["coefficient_literal"], **EXACT)
    assert CFSL().sample_losses(logits, label).tolist() == pytest.approx([expected["loss"]], **EXACT)


@well_posed
def test_the_whole_objective_gives_the_golden_numbers(form: Any) -> None:
    h_c, h_p, h_s = golden_features(GOLDEN["contrastive_margin_alpha0.0"])
    logits, label = golden_voxels()
    logits, label = logits.repeat(2, 1, 1, 1), label.repeat(2, 1, 1)

    value = given_loss(CFSL(contrast=form, alpha_mode="off"), logits, label, h_c, h_p, h_s)

    assert value.item() == pytest.approx(GOLDEN["cfsl"]["expected"][f"cfsl_{form}"], **EXACT)


# The objective by hand


def test_before_there_is_a_previous_model_margin_is_log_two_without_gradient() -> None:
    h_c, _, h_s = features()
    h_c.requires_grad_()
    logits, label = torch.zeros(3, 1, 2, 3, dtype=torch.float64), torch.ones(3, 2, 3).long()

    value = given_loss(CFSL(lam=1, alpha_mode="off"), logits, label, h_c, None, h_s)
    value.backward()

    assert value.item() == pytest.approx(torch.tensor(2.0).log().item())
    assert h_c.grad is not None and h_c.grad.abs().max() < 1e-15


def test_without_alpha_margin_is_the_loss_of_moon_for_one_previous_model() -> None:
    h_c, h_p, h_s = features()
    towards, away = (torch.cosine_similarity(h_c.flatten(1), h.flatten(1)) / 0.5 for h in (h_s, h_p))

    moon = -torch.log(towards.exp() / (towards.exp() + away.exp()))

    assert contrastive(h_c, h_p, h_s, form="margin").losses.tolist() == pytest.approx(moon.tolist(), rel=1e-6)


def test_one_step_of_margin_widens_the_gap_between_the_two_cosines() -> None:
    h_c, h_p, h_s = features()
    h_c.requires_grad_()
    found = contrastive(h_c, h_p, h_s, form="margin")
    (slope,) = torch.autograd.grad(found.losses.sum(), h_c)

    after = contrastive(h_c.detach() - 0.1 * slope, h_p, h_s, form="margin")

    assert (after.beta > found.beta).all()


def test_the_first_batch_is_damped_by_alpha0_and_the_second_by_a_third_of_it() -> None:
    h_c, h_p, h_s = features()
    logits, label = torch.zeros(3, 1, 2, 3, dtype=torch.float64), torch.ones(3, 2, 3).long()
    batch = Batch(torch.zeros(3, 1, 2, 3), label)
    plain = contrastive(h_c, h_p, h_s, form="margin").losses.mean().item()
    around = context(Given(logits, h_s), Given(logits, h_p))
    objective = CFSL(lam=1, alpha0=0.6)

    values = []
    for around.step in range(3):
        values.append(objective.loss(Given(logits, h_c), batch, around).item())
    again = objective.loss(Given(logits, h_c), batch, around)  # a second pass of the same step
    around.terms["contrast"] = around.terms["contrast"] - again

    assert again.item() == values[-1]
    assert values == pytest.approx([plain * (1 - 0.6 / 3**n) for n in range(3)])
    assert around.terms["contrast"].item() == pytest.approx(sum(values))
    assert set(around.terms) == {"dice", "contrast", "beta"}


@both_reductions
def test_pooled_by_channel_means_is_the_same_as_features_that_are_their_means(reduction: Any) -> None:
    h = features()
    means = [f.mean(dim=(2, 3), keepdim=True) for f in h]
    squashed = [f.sigmoid().mean(dim=(2, 3), keepdim=True).logit() for f in h]

    for form in FORMS:
        pooled = contrastive(*h, form=form, pool="gap", reduction=reduction)
        expected = contrastive(*(squashed if form == "guarded" else means), form=form, reduction=reduction)
        assert pooled.losses.tolist() == pytest.approx(expected.losses.tolist(), rel=1e-9)


def test_by_voxel_every_voxel_has_its_own_cosine() -> None:
    h_c, h_p, h_s = features()
    expected = torch.cosine_similarity(h_s, h_c, dim=1) / 0.5 - torch.cosine_similarity(h_c, h_p, dim=1) / 0.5

    found = contrastive(h_c, h_p, h_s, form="margin", pool="voxel")

    assert found.beta.flatten().tolist() == pytest.approx(expected.flatten().tolist(), abs=1e-7)
    losses = torch.nn.functional.softplus(-expected).flatten(1).mean(dim=1)
    assert found.losses.tolist() == pytest.approx(losses.tolist(), rel=1e-6)


@every_form
@pytest.mark.parametrize("pool", ["flatten", "gap"])
def test_sums_over_the_batch_are_sums_over_one_long_case(form: Any, pool: Any) -> None:
    h = features()
    if pool == "gap":
        h = tuple(f.mean(dim=(2, 3), keepdim=True) for f in h)  # type: ignore[assignment]
    long = [f.transpose(0, 1).flatten(1).reshape(1, 4, -1) for f in h]

    batch = contrastive(*h, form=form, reduction="batch")

    assert batch.losses.mean().item() == pytest.approx(contrastive(*long, form=form).losses.item())


def test_an_empty_truth_gives_one_and_no_gradient_and_smooth_nr_counts_false_alarms() -> None:
    logits = torch.tensor([[[[-1.0, 2.0]]]], dtype=torch.float64, requires_grad=True)
    label = torch.zeros(1, 1, 2).long()

    value = modified_dice(logits, label)
    (slope,) = torch.autograd.grad(value, logits)
    assert value.item() == 1.0 and slope.abs().max() < 1e-15

    value = modified_dice(logits, label, smooth_nr=True)
    (slope,) = torch.autograd.grad(value, logits)
    assert 0.9 < value.item() < 1 and (slope > 0).all()
    blank = torch.full((1, 1, 1, 2), -100.0)
    assert modified_dice(blank, label, smooth_nr=True).item() == 0


def test_several_classes_are_the_mean_over_the_foreground_ones() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, 5, generator=draw, dtype=torch.float64)
    label = torch.randint(0, 3, (2, 4, 5), generator=draw)
    p = torch.softmax(logits, dim=1)
    by_hand = []
    for number in (1, 2):
        y = (label == number).double()
        overlap = 2 * (y * p[:, number]).sum(dim=(1, 2))
        by_hand.append(1 - overlap / (y.sum(dim=(1, 2)) + p[:, number].square().sum(dim=(1, 2)) + 1e-5))

    assert CFSL().sample_losses(logits, label).tolist() == pytest.approx(
        ((by_hand[0] + by_hand[1]) / 2).tolist()
    )


def test_the_printed_dice_is_one_less_the_loss_and_falls_when_the_overlap_falls() -> None:
    logits, label = golden_voxels()
    assert CFSL(dice_literal=True).dice(logits, label).item() == pytest.approx(
        1 - CFSL().dice(logits, label).item()
    )


def test_the_literal_form_stops_where_the_logarithm_turns_the_loss_around() -> None:
    case = GOLDEN["contrastive_literal_chi_below_one"]
    assert case["expected"]["L_c"] < 0

    with pytest.raises(ClientError, match=r"chi = \|h_s\| is 0\.162, .* Use contrast: margin or guarded"):
        objective = CFSL(contrast="literal")
        refuse_small(objective.compare(*golden_features(case)).chi)


# Gradients


@every_form
@every_pool
@both_reductions
def test_the_contrastive_gradient_is_right(form: Any, pool: Any, reduction: Any) -> None:
    h_c, h_p, h_s = features()
    h_c.requires_grad_()

    assert torch.autograd.gradcheck(
        lambda h: contrastive(h, h_p, h_s, form=form, pool=pool, reduction=reduction).losses, h_c
    )


@pytest.mark.parametrize("num_outputs", [1, 3])
@pytest.mark.parametrize("options", [{}, {"smooth_nr": True}, {"dice_literal": True}, {"reduction": "batch"}])
@pytest.mark.parametrize("alpha_mode", ["literal", "share"])
def test_the_whole_gradient_is_right(num_outputs: int, options: Any, alpha_mode: Any) -> None:
    h_c, h_p, h_s = features()
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(3, num_outputs, 2, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    label = torch.randint(0, max(2, num_outputs), (3, 2, 3), generator=draw)
    objective = CFSL(alpha_mode=alpha_mode, **options)
    if alpha_mode == "literal":  # alpha has no gradient; the share would show up in the numerical one
        h_c.requires_grad_()

    assert torch.autograd.gradcheck(
        lambda logits, h: given_loss(objective, logits, label, h, h_p, h_s), (logits, h_c)
    )


def test_alpha_has_no_gradient() -> None:
    h_c, h_p, h_s = features()
    h_c.requires_grad_()
    for mode in ("literal", "share", "off"):
        assert not CFSL(alpha_mode=mode).next_alpha(h_c, h_p, h_s, {}).requires_grad  # type: ignore[arg-type]


# No NaN


ODD_FEATURES = {
    "zeros": (torch.zeros(2, 4, 2, 2),) * 3,
    "current zero": (torch.zeros(2, 4, 2, 2), torch.ones(2, 4, 2, 2), 2 * torch.ones(2, 4, 2, 2)),
    "references zero": (torch.ones(2, 4, 2, 2), torch.zeros(2, 4, 2, 2), torch.zeros(2, 4, 2, 2)),
    "equal": (torch.ones(2, 4, 2, 2),) * 3,
    "large": tuple(
        1e4 * torch.rand(2, 4, 2, 2, generator=torch.Generator().manual_seed(n)) for n in range(3)
    ),
    "tiny": tuple(1e-20 * torch.ones(2, 4, 2, 2) for _ in range(3)),
    "one case": tuple(torch.ones(1, 4, 2, 2) * (n + 1) for n in range(3)),
}


@well_posed
@every_pool
@pytest.mark.parametrize("kind", list(ODD_FEATURES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_features_logits_and_masks_give_finite_losses_and_gradients(
    form: Any, pool: Any, kind: str, dtype: torch.dtype
) -> None:
    h_c, h_p, h_s = (h.to(dtype) for h in ODD_FEATURES[kind])
    size = len(h_c)
    for alpha_mode in ("literal", "share"):
        objective = CFSL(contrast=form, feature_pool=pool, alpha_mode=alpha_mode)  # type: ignore[arg-type]
        for level, mask in [(100.0, 0), (-100.0, 0), (100.0, 1), (-100.0, 1), (0.0, 0)]:
            h = h_c.clone().requires_grad_()
            logits = torch.full((size, 1, 2, 2), level, dtype=dtype, requires_grad=True)
            value = given_loss(objective, logits, torch.full((size, 2, 2), mask), h, h_p, h_s)
            value.backward()
            assert value.dtype == torch.float32 and value.isfinite()
            assert h.grad is not None and h.grad.isfinite().all()
            assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize("form", ["margin", "guarded"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("stem", ["none", "variational"])
@pytest.mark.parametrize(
    "image", [torch.zeros(1, 1, 16, 16), torch.ones(2, 1, 17, 16), torch.randn(2, 1, 16, 16)]
)
def test_a_real_network_gets_finite_gradients(form: Any, autocast: bool, stem: Any, image: Tensor) -> None:
    torch.manual_seed(0)
    chosen = ModelSettings(name="unet2d", base_filters=2, levels=2, stem=stem)
    networks = [build(chosen, in_channels=1, num_outputs=1, dimensions=2) for _ in range(3)]
    model = networks[0].train()
    batch = Batch(image, torch.zeros(len(image), *image.shape[2:]).long())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        around = context(networks[1].eval(), networks[2].eval())
        value = CFSL(contrast=form).loss(model, batch, around)
    value.backward()

    assert value.dtype == torch.float32 and value.isfinite()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert grads and all(grad.isfinite().all() for grad in grads)


# Golden numbers: DSWA


class Told:
    """A transport whose clients return what they are told."""

    def __init__(self, params: dict[str, Params | None], sizes: dict[str, int]) -> None:
        self.params, self.sizes = params, sizes

    def deliver(self, task: str, round: int, messages: Any, sync_state: Any) -> Any:
        for name in messages:
            given = self.params[name]
            if given is None:
                yield Answer(name, failure="no power")
            else:
                yield Answer(name, Message(params=given), num_examples=self.sizes[name], num_steps=1)


def clients_with(rows: dict[str, Params | None], sizes: dict[str, int]) -> Clients:
    spec = next(row for row in rows.values() if row is not None)
    tensors = {name: spec.spec(name) for name in spec}
    registrations = [Registration(name, num_train=sizes[name], tensors=tensors) for name in rows]
    return Clients(Told(rows, sizes), registrations, rounds=1, min_clients=1)


def two_tensors(row: list[float]) -> Params:
    """The golden file's layout: tensor A of 2, tensor B of 3, and a buffer that must not count."""
    values = torch.tensor(row, dtype=torch.float64)
    return Params({"a": values[:2], "b": values[2:], "buffer": 1000 * values[:1], "count": torch.tensor(7)})


def state_of(params: Params, trainable: tuple[str, ...] = ("a", "b")) -> ServerState:
    return ServerState(params, memory={"variational": []}, trainable=trainable)


def replies_of(rows: list[Params], sizes: list[int]) -> list[Reply]:
    return [
        Reply(params=row, client=f"client {index:02d}", num_examples=size)
        for index, (row, size) in enumerate(zip(rows, sizes, strict=True))
    ]


def method_of(inputs: dict[str, Any]) -> SAFCF:
    keys = ("scale_mode", "eps", "eps_mode", "uncertainty")
    return SAFCF(**{key: inputs[key] for key in keys if key in inputs})


@pytest.mark.parametrize("name", DSWA)
def test_dswa_gives_the_golden_numbers(name: str) -> None:
    inputs, expected = GOLDEN[name]["inputs"], GOLDEN[name]["expected"]
    names = [f"client {index}" for index in range(len(inputs["n"]))]
    rows: dict[str, Params | None] = dict(zip(names, map(two_tensors, inputs["client_params"]), strict=True))
    sizes = dict(zip(names, inputs["n"], strict=True))
    first = rows[names[0]]
    assert first is not None

    after = method_of(inputs).run_round(state_of(first), clients_with(rows, sizes))

    notes = after.notes
    assert list(notes["weights"].values()) == pytest.approx(expected["a"], **EXACT)
    for key in ("gamma", "gamma_tilde", "U"):
        if key in expected:
            assert list(notes[key].values()) == pytest.approx(expected[key], **EXACT)
    found = [*after.params["a"].tolist(), *after.params["b"].tolist()]
    assert found == pytest.approx(expected["w_next"], **EXACT)
    assert after.params["buffer"].item() == pytest.approx(1000 * expected["w_next"][0], **EXACT)
    assert after.params["count"].item() == 7 and after.params["count"].dtype == torch.int64
    if name == "dswa_two_clients_cube_law":
        ratio = notes["weights"]["client 0"] / notes["weights"]["client 1"]
        assert ratio == pytest.approx(expected["ratio_a0_over_a1"], **EXACT)
    assert ("warnings" in notes) == (len(names) > 1 and max(expected["a"]) > 0.9)


# DSWA's promises


def random_replies(seed: int, count: int = 4, dtype: torch.dtype = torch.float32) -> list[Reply]:
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 1000, (count,), generator=draw).tolist()
    scale = 10.0 ** torch.randint(-6, 3, (1,), generator=draw).item()
    common = torch.randn(10, generator=draw, dtype=dtype)
    rows = []
    for _ in range(count):
        values = common + scale * torch.randn(10, generator=draw, dtype=dtype)
        rows.append(Params({"a": values[:4].reshape(2, 2), "b": values[4:]}))
    return replies_of(rows, sizes)


ALL_METHODS = [
    SAFCF(scale_mode=scale, uncertainty=uncertainty, eps_mode=eps_mode, eps=eps, max_weight=limit)  # type: ignore[arg-type]
    for scale in ("complement", "proportional", "uniform")
    for uncertainty in ("global", "mean_of_tensor_means", "per_tensor", "off")
    for eps_mode, eps in (("relative", 1e-8), ("additive", 0.0))
    for limit in (None, 0.5)
]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_weights_are_not_negative_and_sum_to_one(count: int) -> None:
    for seed in range(5):
        replies = random_replies(seed, count)
        state = state_of(replies[0].params)
        for method in ALL_METHODS:
            found = method.measure(state, replies)
            for weights in [found.weights, found.gamma_tilde, *found.by_tensor.values()]:
                assert len(weights) == count and min(weights) >= 0
                assert sum(weights) == pytest.approx(1, abs=1e-12)
                if method.max_weight and weights is not found.gamma_tilde:
                    assert max(weights) <= max(method.max_weight, 1 / count) + 1e-12


def test_the_order_of_clients_does_not_matter() -> None:
    for method in ALL_METHODS:
        replies = random_replies(3)
        state = state_of(replies[0].params)
        turned = [replies[index] for index in (2, 0, 3, 1)]
        forwards, backwards = method.measure(state, replies), method.measure(state, turned)
        expected = [forwards.weights[index] for index in (2, 0, 3, 1)]
        assert backwards.weights == pytest.approx(expected, rel=1e-6, abs=1e-12)
        one, other = method.combine(state, replies, forwards), method.combine(state, turned, backwards)
        assert all(torch.allclose(one[name], other[name], rtol=1e-6) for name in one)


def test_identical_replies_change_nothing_and_have_exactly_no_spread() -> None:
    params = random_replies(0)[0].params
    replies = replies_of([params] * 3, [10, 20, 70])
    state = state_of(params)
    for method in ALL_METHODS:
        found = method.measure(state, replies)
        assert not any(found.U)
        if method.max_weight is None:
            assert found.weights == pytest.approx(scale_shares([10, 20, 70], method.scale_mode))
        after = method.combine(state, replies, found)
        assert all(torch.equal(after[name], params[name]) for name in params)


def test_one_client_alone_keeps_its_model() -> None:
    (reply,) = random_replies(5, count=1)
    state = state_of(reply.params)
    for method in ALL_METHODS:
        found = method.measure(state, [reply])
        assert found.weights == [1.0]
        after = method.combine(state, [reply], found)
        assert all(torch.equal(after[name], reply.params[name]) for name in reply.params)


@hypothesis_settings(deadline=None, max_examples=30)
@given(n_1=st.integers(1, 10**6), n_2=st.integers(1, 10**6), seed=st.integers(0, 100))
def test_two_clients_obey_the_cube_law(n_1: int, n_2: int, seed: int) -> None:
    rows = [reply.params for reply in random_replies(seed, 2, torch.float64)]
    found = SAFCF(eps=0).measure(state_of(rows[0]), replies_of(rows, [n_1, n_2]))
    a_1, a_2 = found.weights

    assert a_1 * n_1**3 == pytest.approx(a_2 * n_2**3, rel=1e-6)


def test_the_sizes_of_the_paper_give_the_weights_of_the_specification() -> None:
    sizes = [500, 630, 750]
    rows = [torch.zeros(3, dtype=torch.float64) for _ in sizes]
    for index, row in enumerate(rows):
        row[index] = 1.0  # each as far from the others
    params = [Params({"a": row}) for row in rows]
    state = state_of(params[0], ("a",))
    expected = {
        "complement": [0.403, 0.328, 0.270],
        "proportional": [0.210, 0.320, 0.469],
        "uniform": [1 / 3] * 3,
    }
    for mode, weights in expected.items():
        method = SAFCF(scale_mode=mode)  # type: ignore[arg-type]
        assert method.measure(state, replies_of(params, sizes)).weights == pytest.approx(weights, abs=1.5e-3)


def test_a_relative_epsilon_sees_the_drift_that_an_additive_one_hides() -> None:
    draw = torch.Generator().manual_seed(0)
    base = torch.randn(1000, generator=draw, dtype=torch.float64)
    steps = [1e-5, 1e-5, 3e-5]
    rows = [
        Params({"a": base + step * torch.randn(1000, generator=draw, dtype=torch.float64)}) for step in steps
    ]
    replies, state = replies_of(rows, [100] * 3), state_of(rows[0], ("a",))

    relative, additive = SAFCF(), SAFCF(eps_mode="additive")

    assert relative.measure(state, replies).weights[2] < 0.2
    assert additive.measure(state, replies).weights == pytest.approx([1 / 3] * 3, abs=0.02)


def test_where_a_client_sits_on_the_mean_and_epsilon_is_zero_it_has_all_weight() -> None:
    rows = [Params({"a": torch.tensor([value], dtype=torch.float64)}) for value in (0.0, -1.0, 1.0)]
    replies, state = replies_of(rows, [10, 10, 10]), state_of(rows[0], ("a",))

    assert SAFCF(eps=0).measure(state, replies).weights == [1.0, 0.0, 0.0]
    assert SAFCF(eps=0, max_weight=0.5).measure(state, replies).weights == [0.5, 0.25, 0.25]


def test_a_client_without_cases_has_no_weight() -> None:
    replies = random_replies(1, 3)
    emptied = [*replies[:2], Reply(params=replies[2].params, client="empty", num_examples=0)]
    state = state_of(replies[0].params)
    for method in ALL_METHODS:
        weights = method.weigh(state, emptied)
        assert weights[2] == 0.0
        assert weights[:2] == method.weigh(state, emptied[:2])


def test_integers_take_the_maximum_and_float64_replies_are_left_as_they_were() -> None:
    rows = [two_tensors([float(n), 2.0, 0.0, -1.0, 0.5]) for n in range(3)]
    before = [row.sha256() for row in rows]
    replies, state = replies_of(rows, [1, 2, 3]), state_of(rows[0])
    for method in ALL_METHODS:
        after = method.combine(state, replies, method.measure(state, replies))
        assert after["count"].dtype == torch.int64
    assert [row.sha256() for row in rows] == before


def test_every_tensor_can_have_weights_of_its_own() -> None:
    inputs = GOLDEN["dswa_complement"]["inputs"]
    rows = [two_tensors(row) for row in inputs["client_params"]]
    replies, state = replies_of(rows, inputs["n"]), state_of(rows[0])

    found = SAFCF(uncertainty="per_tensor").measure(state, replies)

    for name in ("a", "b"):
        alone = SAFCF().measure(state_of(rows[0], (name,)), replies)
        assert found.by_tensor[name] == pytest.approx(alone.weights)
    expected = [(2 * a + 3 * b) / 5 for a, b in zip(*found.by_tensor.values(), strict=True)]
    assert found.weights == pytest.approx(expected)
    after = SAFCF(uncertainty="per_tensor").combine(state, replies, found)
    first = sum(weight * row["a"] for weight, row in zip(found.by_tensor["a"], rows, strict=True))
    assert torch.allclose(after["a"], torch.as_tensor(first))
    buffer = sum(weight * row["buffer"] for weight, row in zip(found.weights, rows, strict=True))
    assert torch.allclose(after["buffer"], torch.as_tensor(buffer))


def test_a_lost_client_leaves_the_weights_to_those_that_answered() -> None:
    inputs = GOLDEN["dswa_complement"]["inputs"]
    rows: dict[str, Params | None] = {
        f"c{n}": two_tensors(row) for n, row in enumerate(inputs["client_params"])
    }
    sizes = dict(zip(rows, inputs["n"], strict=True))
    first = rows["c0"]
    assert first is not None

    after = SAFCF().run_round(state_of(first), clients_with({**rows, "c1": None}, sizes))

    two = {name: row for name, row in rows.items() if name != "c1"}
    expected = SAFCF().run_round(state_of(first), clients_with(two, sizes))
    assert after.notes == expected.notes
    assert after.params.sha256() == expected.params.sha256()


def test_replies_on_disk_give_the_same_weights_and_are_read_one_tensor_at_a_time(tmp_path: Path) -> None:
    replies = random_replies(2)
    state = state_of(replies[0].params)
    stored = []
    for reply in replies:
        path = tmp_path / f"{reply.client}.safetensors"
        Message(params=reply.params).save(path)
        stored.append(Reply(Message.load(path).params, client=reply.client, num_examples=reply.num_examples))
    for method in ALL_METHODS:
        assert method.measure(state, stored) == method.measure(state, replies)


def test_squared_distances_are_those_from_the_weighted_mean() -> None:
    rows = [reply.params for reply in random_replies(4, 3, torch.float64)]
    shares = [0.2, 0.5, 0.3]
    stacked = torch.stack([row["b"] for row in rows])
    centre = (torch.tensor(shares, dtype=torch.float64)[:, None] * stacked).sum(dim=0)
    expected = (stacked - centre).square().sum(dim=1)

    assert squared_distances(rows, shares, ["b"])[0].tolist() == pytest.approx(expected.tolist(), rel=1e-9)


@pytest.mark.parametrize(
    ("weights", "limit", "expected"),
    [
        ([0.9, 0.06, 0.04], 0.5, [0.5, 0.3, 0.2]),
        ([0.7, 0.29, 0.01], 0.4, [0.4, 0.4, 0.2]),
        ([0.5, 0.3, 0.2], 0.1, [1 / 3] * 3),
        ([1.0, 0.0, 0.0], 0.5, [0.5, 0.25, 0.25]),
        ([0.6, 0.4], 0.6, [0.6, 0.4]),
        ([1.0], 0.3, [1.0]),
    ],
)
def test_capped_weights_by_hand(weights: list[float], limit: float, expected: list[float]) -> None:
    assert cap_weights(weights, limit) == pytest.approx(expected)


# Whole runs

SAFCF_RUN: dict[str, Any] = {"method": {"name": "safcf"}}


def test_the_objective_of_safcf_is_cfsl_unless_the_configuration_says_otherwise(tmp_path: Path) -> None:
    assert isinstance(build_objective(config(tmp_path, **SAFCF_RUN)), CFSL)


def test_a_run_records_weights_with_their_ingredients_and_the_loss_terms(tmp_path: Path) -> None:
    result = run(tmp_path / "run", **SAFCF_RUN)

    for record in result.records:
        names = set(record["clients"])
        for key in ("weights", "gamma", "gamma_tilde", "U"):
            assert set(record[key]) == names
        assert sum(record["weights"].values()) == pytest.approx(1)
        assert all({"total", "dice", "contrast", "beta"} <= set(loss) for loss in record["loss"].values())
    first, second = result.records
    assert all(loss["beta"] == 0 for loss in first["loss"].values())  # no previous model yet
    assert any(loss["beta"] != 0 for loss in second["loss"].values())


def test_alpha_is_kept_between_rounds(tmp_path: Path) -> None:
    result = run(tmp_path / "run", **SAFCF_RUN)
    for name in result.records[0]["clients"]:
        memory = MemoryStore(tmp_path / "run/clients" / name).load()
        steps = 2 * -(-round(0.6 * 8) // 4)  # two rounds of an epoch over about five cases
        assert memory["objective"]["alpha"].item() == pytest.approx(0.5 / 3**steps)
        assert "previous" in memory


def test_switched_off_safcf_is_fedavg_with_uniform_weights_bit_for_bit(tmp_path: Path) -> None:
    data = {"phantom": {"hospitals": 3, "size": 16, "cases": [8, 12, 16]}}
    objective = {"name": "cfsl", "lam": 0}
    off = {"name": "safcf", "scale_mode": "uniform", "uncertainty": "off"}
    plain = {"name": "fedavg", "weighting": "uniform"}

    first = run(tmp_path / "a", method=off, objective=objective, data=data)
    second = run(tmp_path / "b", method=plain, objective=objective, data=data)

    assert first.params_sha256 == second.params_sha256
    assert first.table.rows == second.table.rows
    assert run(tmp_path / "c", method={"name": "safcf"}, objective=objective, data=data).params_sha256 != (
        first.params_sha256
    )


def test_lam_zero_leaves_no_trace_of_the_contrastive_settings(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / str(tau), **SAFCF_RUN, objective={"lam": 0, "tau": tau}, rounds=1)
        for tau in (0.5, 0.1)
    ]
    assert runs[0].params_sha256 == runs[1].params_sha256


@pytest.mark.parametrize(
    ("method", "objective"),
    [
        ({"name": "fedavg"}, {"name": "cfsl"}),
        ({"name": "safcf"}, {"name": "dice"}),
        ({"name": "safcf", "uncertainty": "per_tensor", "max_weight": 0.6}, {"contrast": "guarded"}),
        (
            {"name": "safcf", "uncertainty": "mean_of_tensor_means", "scale_mode": "proportional"},
            {"contrast": "literal", "alpha_mode": "share", "smooth_nr": True},
        ),
    ],
)
def test_objective_and_aggregation_combine_freely(tmp_path: Path, method: Any, objective: Any) -> None:
    result = run(tmp_path / "run", method=method, objective=objective)
    assert result.status == "done" and result.summary["num_lost"] == 0


def test_three_classes_train(tmp_path: Path) -> None:
    data = {"phantom": {"hospitals": 2, "size": 16, "cases": 6, "num_classes": 3}}
    assert run(tmp_path / "run", **SAFCF_RUN, data=data).status == "done"


def test_one_participant_is_local_training(tmp_path: Path) -> None:
    names = run(tmp_path / "all", **SAFCF_RUN, rounds=1).records[0]["clients"]
    alone = {"participation": [names[0]], "objective": {"name": "cfsl"}}

    first = run(tmp_path / "a", method={"name": "safcf"}, **alone)
    second = run(tmp_path / "b", method={"name": "fedavg"}, **alone)

    assert first.params_sha256 == second.params_sha256
    assert first.records[0]["weights"] == {names[0]: 1.0}


def test_with_partial_participation_the_present_share_the_weight(tmp_path: Path) -> None:
    result = run(tmp_path / "run", **SAFCF_RUN, rounds=4, participation=0.67)

    assert {len(record["clients"]) for record in result.records} == {2}
    assert len({tuple(record["clients"]) for record in result.records}) > 1
    for record in result.records:
        assert set(record["weights"]) == set(record["clients"])
        assert sum(record["weights"].values()) == pytest.approx(1)


def test_a_client_that_fails_shrinks_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = run(tmp_path / "all", **SAFCF_RUN, rounds=1).records[0]["clients"]
    spoil(monkeypatch, names[1], lambda answer: Answer(answer.client, failure="no power"))

    record = run(tmp_path / "run", **SAFCF_RUN, rounds=1).records[0]

    assert set(record["weights"]) == {names[0], names[2]}
    assert sum(record["weights"].values()) == pytest.approx(1)


def test_a_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "rounds": 3,
        "method": {"name": "safcf", "variational": "moment_match"},
        "model": {
            "name": "unet2d",
            "base_filters": 2,
            "levels": 2,
            "stem": "variational",
            "variational": {"prior": "global"},
        },
    }
    whole = run(tmp_path / "whole", **changes)
    broken = settings(tmp_path / "broken", **changes)
    with pytest.raises(KeyboardInterrupt):
        wr.run(broken, listener=Watcher(3, whole.records[0]["clients"][1]))

    again = wr.run(broken, resume=True)

    assert again.params_sha256 == whole.params_sha256
    assert again.records[2]["weights"] == whole.records[2]["weights"]
    assert again.records[2]["loss"] == whole.records[2]["loss"]


def test_replies_kept_on_disk_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tmp_path / "memory", **SAFCF_RUN)
    monkeypatch.setattr("wardround.engine.transports.local.Spilling.__init__.__defaults__", (0,))

    assert run(tmp_path / "disk", **SAFCF_RUN).params_sha256 == first.params_sha256


def test_a_concentrated_weight_is_recorded_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"phantom": {"hospitals": 2, "size": 16, "cases": [6, 30]}}
    with caplog.at_level(logging.WARNING):
        record = run(tmp_path / "run", **SAFCF_RUN, data=data, rounds=1).records[0]

    (sentence,) = record["warnings"]
    assert "of the aggregation weight" in sentence and sentence in caplog.text
    assert "method.max_weight limits it" in sentence


# Configuration


def test_a_network_without_features_is_refused_when_the_configuration_is_read(tmp_path: Path) -> None:
    model = {"name": "user_nets:Flat", "stem": "variational"}
    for changes in (SAFCF_RUN, {"objective": {"name": "cfsl"}}):
        with pytest.raises(
            ConfigError, match="needs encoder features, which model 'user_nets:Flat' does not"
        ):
            config(tmp_path, **changes, model=model)
    config(tmp_path, **SAFCF_RUN, objective={"name": "dice"}, model=model)


def test_moment_matching_without_gaussian_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Set model\.stem to variational"):
        config(tmp_path, method={"name": "safcf", "variational": "moment_match"})


@pytest.mark.parametrize(
    ("section", "setting"),
    [
        ("objective", {"lam": 1.5}),
        ("objective", {"tau": 0}),
        ("objective", {"alpha0": 1}),
        ("objective", {"contrast": "moon"}),
        ("objective", {"eps_dice": 0}),
        ("method", {"eps": -1}),
        ("method", {"max_weight": 0}),
        ("method", {"scale_mode": "size"}),
    ],
)
def test_settings_outside_their_range_are_refused_by_name(tmp_path: Path, section: str, setting: Any) -> None:
    changes = {"method": {"name": "safcf"}, "objective": {"name": "cfsl"}}
    changes[section] = {**changes[section], **setting}
    with pytest.raises(ConfigError, match=rf"{section}\.{next(iter(setting))}"):
        config(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"objective": {"lam": 1}}, "the contrastive term alone cannot train the decoder"),
        ({"objective": {"dice_literal": True}}, "makes the overlap smaller"),
        ({"model": {"norm": "batch"}}, "BatchNorm makes them differ"),
    ],
)
def test_what_is_allowed_but_unwise_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: Any, sentence: str
) -> None:
    with caplog.at_level(logging.WARNING):
        config(tmp_path, **SAFCF_RUN)
        assert not caplog.records
        config(tmp_path, **SAFCF_RUN, **changes)
    assert sentence in caplog.text


def test_a_lambda_of_one_stands_in_every_record(tmp_path: Path) -> None:
    result = run(tmp_path, **SAFCF_RUN, objective={"lam": 1}, rounds=2)
    for record in result.records:
        assert any("cannot train the decoder" in warning for warning in record["warnings"])


def test_the_resolved_settings_are_written_out(tmp_path: Path) -> None:
    plain = resolve(config(tmp_path, **SAFCF_RUN))
    assert plain["method"]["scale_mode"] == "complement" and plain["objective"]["contrast"] == "margin"
    assert plain["model"]["variational"]["estimator"] == "flipout"
    json.dumps(plain)


def test_only_trainable_tensors_are_remembered(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    network[0].bias.requires_grad_(False)  # type: ignore[union-attr]

    state = SAFCF().start(network)

    assert state.trainable == ("0.weight", "1.weight", "1.bias")
    assert "1.running_var" in state.params
