"""FedDG: the outline term, one episode against plain autograd, the bank, whole runs."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import params, run, spoil
from scipy import ndimage
from torch import Tensor

from wardround.clients import Answer
from wardround.config import OptimizerSettings
from wardround.data.cases import ClientData, TensorSplit
from wardround.data.serving.augment import Augmentation
from wardround.losses.objective import Context, Dice
from wardround.losses.segmentation import dice_loss
from wardround.messages import Message
from wardround.methods.feddg import (
    FedDG,
    dilate,
    inner_step,
    outline_contrast,
    outline_masks,
    outline_vectors,
)
from wardround.methods.frequency import amplitude_window, clip_to_range, restyle
from wardround.models.unet import unet2d
from wardround.params import Params
from wardround.seeding import generator
from wardround.training.learner import Step
from wardround.training.workbench import FitHooks, FitSettings, Workbench

WIDE = {"name": "feddg", "window": 0.2}  # b = 3 of 16 voxels
ONE = {"phantom": {"hospitals": 1, "size": 16, "cases": 8}}
EMPTY = {"phantom": {"hospitals": 2, "size": 16, "cases": 8, "num_classes": 3}}


def blobs(*shape: Any, seed: Any = 0) -> Any:
    """Random structures, some at the border of the image."""
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).numpy()
    smooth = ndimage.gaussian_filter(noise, [0, *[1.5] * (len(shape) - 1)])
    return torch.from_numpy((smooth > 0.08).astype(np.int64))


# Outlines


@pytest.mark.parametrize("shape", [(3, 20, 17), (2, 11, 12, 10)])
def test_contour_and_ring_are_those_of_scipy(shape: Any) -> None:
    label = blobs(*shape)
    contour, ring = outline_masks(label, num_outputs=1)
    for case, mask in enumerate(label.numpy()):
        eroded = ndimage.binary_erosion(mask, iterations=1)
        grown = ndimage.binary_dilation(mask, iterations=5)
        assert np.array_equal(contour[case, 0].numpy(), mask - eroded)
        assert np.array_equal(ring[case, 0].numpy(), grown - mask)


def test_five_dilations_of_a_voxel_are_a_diamond() -> None:
    point = torch.zeros(1, 1, 13, 13)
    point[0, 0, 6, 6] = 1
    rows, columns = torch.meshgrid(torch.arange(13), torch.arange(13), indexing="ij")
    diamond = (rows - 6).abs() + (columns - 6).abs() <= 5
    assert torch.equal(dilate(point, 5)[0, 0] > 0, diamond)


def test_each_foreground_class_has_outlines_and_background_none() -> None:
    label = torch.zeros(1, 9, 9, dtype=torch.long)
    label[0, 2:6, 2:6] = 2
    masks = outline_masks(label, num_outputs=3)
    assert masks.shape == (2, 1, 2, 9, 9)
    assert masks[:, :, 0].sum() == 0  # class 1 is absent
    assert masks[0, 0, 1].sum() == 12  # the rim of a square of 4 by 4


def test_vectors_are_masked_means_and_zero_without_a_mask() -> None:
    features = torch.arange(8.0).reshape(1, 2, 2, 2)
    masks = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).expand(1, 1, 2, 2)
    vectors = outline_vectors(features, torch.stack([masks, 0 * masks]))
    assert vectors.tolist() == [[[[1.0, 5.0]]], [[[0.0, 0.0]]]]


def slow_contrast(outlines: Any, tau: float) -> Any:
    """The formula with loops over pairs, of contours and rings (2, N, F)."""
    vectors = [*outlines[0], *outlines[1]]
    kind = [0] * len(outlines[0]) + [1] * len(outlines[1])

    def similarity(a: Any, b: Any) -> Any:
        return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))

    losses = []
    for a in range(len(vectors)):
        others = [
            math.exp(similarity(vectors[a], v) / tau)
            for v, k in zip(vectors, kind, strict=True)
            if k != kind[a]
        ]
        for p in range(len(vectors)):
            if p != a and kind[p] == kind[a]:
                own = math.exp(similarity(vectors[a], vectors[p]) / tau)
                losses.append(-math.log(own / (own + sum(others))))
    return np.mean(losses)


def outline_example(batch: Any = 3, classes: Any = 2, width: Any = 4) -> Any:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(2, 2, batch, classes, width, generator=generator, dtype=torch.float64)


def test_the_contrast_is_the_mean_over_pairs_summed_over_classes() -> None:
    inner, outer = outline_example()
    expected = sum(
        slow_contrast(np.concatenate([inner[:, :, k], outer[:, :, k]], axis=1), 0.5) for k in range(2)
    )
    present = torch.ones(3, 2, dtype=torch.bool)
    assert outline_contrast(inner, outer, present, 0.5).item() == pytest.approx(expected, abs=1e-12)


def test_an_image_without_a_class_counts_nowhere() -> None:
    inner, outer = outline_example()
    present = torch.tensor([[True, True], [False, True], [True, True]])
    kept = [0, 2]
    expected = slow_contrast(np.concatenate([inner[:, kept, 0], outer[:, kept, 0]], axis=1), 0.5)
    expected += slow_contrast(np.concatenate([inner[:, :, 1], outer[:, :, 1]], axis=1), 0.5)
    inner[:, 1, 0] = 0
    assert outline_contrast(inner, outer, present, 0.5).item() == pytest.approx(expected, abs=1e-12)


def test_without_any_outline_the_term_is_zero_and_so_is_its_gradient() -> None:
    inner, outer = torch.zeros(2, 2, 3, 1, 4)
    inner.requires_grad_()
    loss = outline_contrast(inner, outer, torch.zeros(3, 1, dtype=torch.bool), 0.05)
    (gradient,) = torch.autograd.grad(loss, [inner])
    assert loss.item() == 0 and torch.equal(gradient, torch.zeros_like(inner))


def test_one_image_alone_has_a_pair_of_contours_and_a_pair_of_rings() -> None:
    contour, ring = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    same = torch.stack([contour, ring]).reshape(2, 1, 1, 2)
    loss = outline_contrast(same, same, torch.ones(1, 1, dtype=torch.bool), 1.0)
    assert loss.item() == pytest.approx(-math.log(math.e / (math.e + 2)))  # cosines 1 and twice 0


# One episode


def test_the_inner_step_is_clamped_entry_by_entry() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, -500.0]])
    assert inner_step(model, 0.1, 100.0)["weight"].tolist() == [[pytest.approx(-0.3), pytest.approx(10.0)]]


def bench_and_batch(norm: Any = "instance") -> Any:
    torch.manual_seed(0)
    model = unet2d(in_channels=1, num_outputs=3, base_filters=2, levels=2, norm=norm).double()
    settings = OptimizerSettings(name="sgd", learning_rate=1.0)
    bench = Workbench(model, Dice(), settings, device=torch.device("cpu"))
    image = torch.randn(3, 1, 16, 16, dtype=torch.float64)
    label = blobs(3, 16, 16) + blobs(3, 16, 16, seed=5)
    label[1] = 0  # an empty mask
    return bench, TensorSplit(list("abc"), image, label, [(1.0, 1.0)] * 3)


class OneBatch:
    """A client whose training is one step on one batch, by SGD at rate 1."""

    name, num_examples, device = "north", 3, torch.device("cpu")

    def __init__(self, bench: Any, split: Any, styles: Any) -> None:
        self.bench = bench
        self.data = ClientData(split, split, split)
        self.memory = {"bank": styles}

    def generator(self, *purpose: Any) -> Any:
        return torch.Generator().manual_seed(1)

    def fit(self, start: Any, step: Any) -> Any:
        context = Context(
            round=0, rounds=1, num_examples=3, memory={}, generator=torch.Generator(), with_features=True
        )
        settings = FitSettings(
            where="here",
            seed=1,
            stream=("s",),
            learning_rate=1.0,
            epochs=1,
            batch_size=3,
            augmentation=Augmentation(flip=0, intensity=0),
        )
        self.fitted = self.bench.fit(self.data.train, start, context, settings, FitHooks(step=step))
        return self.fitted


def episode_gradient(method: Any, bench: Any, split: Any, styles: Any) -> Any:
    """Along what gradient one step of the product moved, and the losses it noted."""
    before = Params.trainable(bench.model)
    client = OneBatch(bench, split, styles)
    method.train(client, Message(params=Params.of(bench.model)))
    return before - Params.trainable(bench.model), client.fitted.loss


@pytest.mark.parametrize("boundary", [0.0, 0.7])
@pytest.mark.parametrize("norm", ["instance", "batch"])
@pytest.mark.parametrize("micro_batch", [None, 2, 1])
def test_a_step_follows_the_gradient_of_both_losses_as_autograd_has_it(
    boundary: Any, norm: Any, micro_batch: Any
) -> None:
    """l_in(w) + l_out(w - beta clamp(g)), g constant, in one graph with functional_call.

    In pieces (of 3 cases: 2 and 1, or 1 each): their sum by share, each with outlines of its own.
    """
    bench, split = bench_and_batch(norm)
    bench.micro_batch = micro_batch
    styles = params(**{"east/amplitude": 3 * torch.rand(2, 1, 5, 5, dtype=torch.float64)})
    method = FedDG(window=0.13, boundary=boundary, inner_learning_rate=0.5, clip=0.01, temperature=0.3)
    model = bench.model
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    gradient, losses = episode_gradient(method, bench, split, styles)

    order = torch.randperm(3, generator=generator(1, "s", "order", 0))
    image, label = split.images[order], split.labels[order]
    other = method.restyle(image, list(styles.values()), torch.Generator().manual_seed(1))
    assert not torch.equal(other, image)

    model.train()

    class Features(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any) -> Any:
            return self.model.forward_features(x)

    def forward(tensors: Any, x: Any) -> Any:
        named = {f"model.{name}": tensor for name, tensor in {**buffers, **tensors}.items()}
        return torch.func.functional_call(Features(), named, (x,))

    pieces = torch.arange(3).split(micro_batch or 3)
    inner = [forward(weights, image[cases]) for cases in pieces]

    def by_share(terms: Any) -> Any:
        return sum(len(cases) / 3 * term for cases, term in zip(pieces, terms, strict=True))

    def dice(passes: Any) -> Any:
        return by_share(dice_loss(o.logits, label[cases]) for o, cases in zip(passes, pieces, strict=True))

    l_in = dice(inner)
    g = torch.autograd.grad(l_in, list(weights.values()), retain_graph=True)
    fast = {name: w - 0.5 * d.clamp(-0.01, 0.01) for (name, w), d in zip(weights.items(), g, strict=True)}
    outer = [forward(fast, other[cases]) for cases in pieces]
    l_out = dice(outer)
    masks = outline_masks(label, 3)
    present = (masks.flatten(3).sum(3) > 0).all(dim=0)
    outlines = by_share(
        outline_contrast(
            outline_vectors(at_w.decoder, masks[:, cases]),
            outline_vectors(shifted.decoder, masks[:, cases]),
            present[cases],
            0.3,
        )
        for at_w, shifted, cases in zip(inner, outer, pieces, strict=True)
    )
    l_out = l_out + boundary * outlines
    (l_in + l_out).backward()

    assert not present.all() and present.any() and outlines > 0
    assert any(bool((d.abs() > 0.01).any()) for d in g)  # the clamp bites
    for name, weight in weights.items():
        assert torch.allclose(gradient[name], weight.grad, rtol=0, atol=1e-10), name
    assert losses["total"] == pytest.approx(l_in.item())
    assert losses["outer"] == pytest.approx(l_out.item())
    if boundary:
        assert losses["outlines"] == pytest.approx(outlines.item())


def test_running_statistics_come_from_the_inner_pass_alone() -> None:
    plain, split = bench_and_batch("batch")
    context = Context(round=0, rounds=1, num_examples=3, memory={}, generator=torch.Generator())
    step = Step(
        plain,
        split.batch(torch.tensor([0, 1, 2])),
        context,
        lambda m, b, c: m(b.image).mean(),
        taken_apart=True,
    )
    plain.model.train()
    step.backward()
    expected = {name: b.clone() for name, b in plain.model.named_buffers()}

    bench, split = bench_and_batch("batch")
    styles = params(**{"east/amplitude": torch.rand(2, 1, 5, 5, dtype=torch.float64)})
    episode_gradient(FedDG(window=0.13), bench, split, styles)
    for name, buffer in bench.model.named_buffers():
        assert torch.allclose(buffer.double(), expected[name].double(), atol=1e-12), name


# Styles


def test_full_mixing_of_frequency_zero_is_the_release() -> None:
    """The mean becomes the other's, clipped to the image's own range."""
    image = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]])
    method = FedDG(window=0, mixing="full")
    style = amplitude_window(torch.full((1, 1, 2, 2), 4.0), 0)
    assert method.restyle(image, [style], torch.Generator()).flatten().tolist() == [2.0, 3.0, 4.0, 6.0]


def test_uniform_mixing_draws_a_client_then_one_of_its_images_and_a_share() -> None:
    image = 5 * torch.randn(200, 1, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    styles = [
        torch.full((1, 1, 1, 1), 10.0).double(),
        torch.tensor([20.0, 30.0, 40.0]).double().reshape(3, 1, 1, 1),
    ]
    mixed = FedDG(window=0).restyle(image, styles, torch.Generator().manual_seed(2))

    draw = torch.Generator().manual_seed(2)
    giver = torch.randint(2, (200,), generator=draw)
    place, share = torch.rand(2, 200, generator=draw)
    assert 70 < giver.sum() < 130  # clients alike, however much each gave
    for case in range(200):
        style = styles[0][0] if giver[case] == 0 else styles[1][int(place[case] * 3)]
        alone = restyle(image[case : case + 1], style[None], share[case].double())
        assert torch.allclose(mixed[case], clip_to_range(alone, image[case : case + 1])[0])


# Whole runs


def test_outer_false_is_fedavg_and_nothing_is_pooled(tmp_path: Path) -> None:
    off = run(tmp_path / "off", method={"name": "feddg", "outer": False})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg"})
    assert off.params_sha256 == fedavg.params_sha256
    assert not (tmp_path / "off" / "setup.json").exists()


def test_one_client_has_nobody_to_learn_from_and_is_fedavg(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", method=WIDE, data=ONE)
    assert alone.params_sha256 == run(tmp_path / "fedavg", data=ONE).params_sha256


def test_with_nothing_in_the_bank_it_is_fedavg(tmp_path: Path, monkeypatch: Any) -> None:
    for client in ("east", "north", "south"):
        spoil(monkeypatch, client, lambda a: Answer(a.client, failure="gone"), "contribute")
    nothing = run(tmp_path / "nothing", method=WIDE)
    assert nothing.params_sha256 == run(tmp_path / "fedavg").params_sha256


def test_who_gave_nothing_still_learns_from_the_others(tmp_path: Path, monkeypatch: Any) -> None:
    spoil(monkeypatch, "east", lambda a: Answer(a.client, failure="gone"), "contribute")
    result = run(tmp_path / "run", method=WIDE)
    assert all("outer" in loss for loss in result.records[0]["loss"].values())


def test_amplitudes_travel_once_and_only_the_window(tmp_path: Path) -> None:
    """8 cases, 4 to train on: one image each, 7 x 7 frequencies of 4 bytes; each receives two."""
    result = run(tmp_path / "run", method=WIDE)
    contributed = json.loads((tmp_path / "run" / "setup.json").read_text())["exchanges"]
    assert [exchange["task"] for exchange in contributed] == ["contribute"]
    assert set(contributed[0]["bytes_up"].values()) == {7 * 7 * 4}
    first, second = (record["exchanges"][0]["bytes_down"] for record in result.records)
    assert {first[name] - second[name] for name in first} == {2 * 7 * 7 * 4}


def test_other_styles_change_the_model_and_terms_are_recorded(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method=WIDE)
    assert result.params_sha256 != run(tmp_path / "fedavg").params_sha256
    for loss in result.records[1]["loss"].values():
        assert loss["outer"] > 0 and loss["outlines"] > 0
    assert result.records[0]["warnings"] == []


def test_without_the_boundary_term_two_passes_do(tmp_path: Path) -> None:
    result = run(tmp_path / "run", rounds=1, method={**WIDE, "boundary": 0})
    assert all("outlines" not in loss and loss["outer"] > 0 for loss in result.records[0]["loss"].values())


@pytest.mark.parametrize("boundary", [0.0, 0.1])
def test_pieces_of_a_batch_train_like_the_batch(tmp_path: Path, boundary: float) -> None:
    """All but the outline term is a mean over cases; that term sees two cases at a time, not four."""
    changes: dict[str, Any] = {
        "method": {**WIDE, "boundary": boundary},
        "optimizer": {"name": "sgd", "learning_rate": 0.05},
        "data": {"phantom": {"hospitals": 3, "size": 16, "cases": 7}},  # 4 to train on: one step a round
    }
    whole = run(tmp_path / "whole", **changes)
    pieces = run(tmp_path / "pieces", compute={"threads": 1, "micro_batch": 2}, **changes)
    last = pieces.outcome.state.params
    for name, tensor in whole.outcome.state.params.items():
        torch.testing.assert_close(last[name], tensor, rtol=0, atol=0.02 if boundary else 1e-6)
    assert not any(record["lost"] for record in pieces.records)
    found, expected = pieces.records[0]["loss"], whole.records[0]["loss"]  # from one model
    assert list(found) == list(expected) == ["east", "north", "south"]
    for client, losses in expected.items():
        assert found[client]["total"] == pytest.approx(losses["total"], rel=1e-6)
        objective = [one["outer"] - boundary * one.get("outlines", 0.0) for one in (found[client], losses)]
        assert objective[0] == pytest.approx(objective[1], rel=1e-6)
        assert not boundary or 0 < found[client]["outlines"] < losses["outlines"]  # fewer negatives


def test_a_piece_as_large_as_the_batch_gives_the_same_bytes(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", method=WIDE)
    one_piece = run(tmp_path / "piece", method=WIDE, compute={"threads": 1, "micro_batch": 4})
    assert one_piece.params_sha256 == whole.params_sha256
    assert one_piece.records[-1]["loss"] == whole.records[-1]["loss"]


def test_where_memory_runs_out_the_clients_go_on_in_pieces(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """Memory runs out in the outer pass, in the middle of an episode."""
    honest = Step.backward

    def tight(self: Step, batch: Any = None, **how: Any) -> Tensor:
        if batch is not None and self._learner.micro_batch is None:
            raise torch.OutOfMemoryError("no room")
        return honest(self, batch, **how)

    in_pieces = run(tmp_path / "pieces", method=WIDE, compute={"threads": 1, "micro_batch": 2})
    monkeypatch.setattr(Step, "backward", tight)
    backed_off = run(tmp_path / "run", method=WIDE)
    assert "out of memory on cpu; from here on 2 cases" in caplog.text
    assert backed_off.params_sha256 == in_pieces.params_sha256
    assert not any(record["lost"] for record in backed_off.records)


def test_a_window_that_says_nothing_is_warned_of_in_the_first_round(tmp_path: Path) -> None:
    """Phantoms are z-scored, and 16 voxels leave of L = 0.01 frequency 0 alone."""
    first, second = run(tmp_path / "run", method={"name": "feddg"}).records
    assert "z-scored" in first["warnings"][0] and second["warnings"] == []


def test_empty_masks_and_absent_classes_leave_a_finite_model(tmp_path: Path, monkeypatch: Any) -> None:
    honest = FedDG.train

    def without_labels(self: FedDG, client: Any, message: Any) -> Any:
        client.data.train.labels.zero_()
        return honest(self, client, message)

    monkeypatch.setattr(FedDG, "train", without_labels)
    result = run(tmp_path / "run", method=WIDE, data=EMPTY, objective={"name": "dice_bce"})
    assert all(loss["outlines"] == 0 for loss in result.records[0]["loss"].values())
    assert all(torch.isfinite(tensor).all() for tensor in result.params.values())


def giving(monkeypatch: Any, client: str, amplitude: Tensor, name: str = "amplitude") -> None:
    """Let a client give these amplitudes in place of its own."""
    message = Message(extras={"bank": Params({name: amplitude})})
    spoil(monkeypatch, client, lambda answer: replace(answer, message=message), "contribute")


def test_amplitudes_of_another_size_are_passed_over_by_the_others(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    giving(monkeypatch, "east", torch.ones(1, 1, 9, 9))
    result = run(tmp_path / "run", rounds=1, method=WIDE)

    assert not result.records[0]["lost"] and len(result.records[0]["weights"]) == 3
    assert "'east/amplitude' are (1, 9, 9), but those of its own images (1, 7, 7)" in caplog.text


def test_a_client_whose_images_nobody_shares_is_lost_with_a_sentence(
    tmp_path: Path, monkeypatch: Any
) -> None:
    giving(monkeypatch, "east", torch.ones(1, 1, 9, 9))
    giving(monkeypatch, "south", torch.ones(1, 1, 9, 9))
    result = run(tmp_path / "run", rounds=1, method=WIDE)

    lost = result.records[0]["lost"]
    assert list(lost) == ["train/north"] and "Bring all images to one size" in lost["train/north"]


@pytest.mark.parametrize(
    ("amplitude", "name"),
    [
        (torch.ones(1, 1, 7, 7), "other"),
        (torch.ones(()), "amplitude"),
        (torch.ones(0, 1, 7, 7), "amplitude"),
        (torch.ones(99, 1, 7, 7), "amplitude"),
        (torch.ones(1, 1, 7, 7).double(), "amplitude"),
        (-torch.ones(1, 1, 7, 7), "amplitude"),
        (torch.full((1, 1, 7, 7), 3e38), "amplitude"),
    ],
)
def test_amplitudes_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: Any, amplitude: Tensor, name: str
) -> None:
    giving(monkeypatch, "east", amplitude, name)
    result = run(tmp_path / "run", rounds=1, method=WIDE)

    assert list(result.outcome.state.memory["bank"]) == ["north", "south"]
    assert not result.records[0]["lost"] and len(result.records[0]["weights"]) == 3


def test_softmax_of_several_classes_and_evidential_outputs_work_too(tmp_path: Path) -> None:
    result = run(tmp_path / "run", rounds=1, method=WIDE, data=EMPTY, objective={"name": "evidential"})
    assert all(math.isfinite(loss["outlines"]) for loss in result.records[0]["loss"].values())
