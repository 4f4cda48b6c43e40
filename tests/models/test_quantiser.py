"""The vector quantiser: golden values, gradients, usage, revival."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import vectors
from pytest import approx
from torch import Tensor

from wardround.models.quantiser import VectorQuantiser
from wardround.params import Params

GOLDEN = vectors("baselines")["vector_quantiser"]


def quantiser(codebook: Tensor, **settings: float) -> VectorQuantiser:
    module = VectorQuantiser(*codebook.shape, **settings).to(codebook.dtype)  # type: ignore[arg-type]
    module.codebook.data.copy_(codebook)
    return module


def random_case(num_vectors: int = 40, codes: int = 7, width: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = torch.randn(num_vectors + codes, width, generator=generator, dtype=torch.float64)
    return draw[:num_vectors], draw[num_vectors:]


# Values


def test_it_gives_the_golden_values() -> None:
    given, expected = GOLDEN["inputs"], GOLDEN["expected"]
    codebook, z = torch.tensor(given["codebook"]), torch.tensor(given["z"])
    module = quantiser(codebook, commitment=given["commitment"])
    assert module.nearest(z).tolist() == expected["indices"]
    assert module(z).tolist() == expected["quantised"]
    loss = module.take_loss()
    assert loss is not None
    assert loss.item() == approx(expected["total"], rel=1e-6)
    assert expected["codebook_loss"] + 0.25 * expected["commitment_loss"] == approx(expected["total"])


def test_the_nearest_code_is_the_one_found_by_looking_at_all_of_them() -> None:
    z, codebook = random_case()
    plain = [min(range(7), key=lambda code: float((row - codebook[code]).norm())) for row in z]
    assert quantiser(codebook).nearest(z).tolist() == plain


def test_any_leading_axes_are_kept_and_the_code_comes_out_unchanged() -> None:
    z, codebook = random_case()
    module = quantiser(codebook)
    out = module(z.reshape(2, 4, 5, 5))
    assert torch.equal(out.reshape(-1, 5), codebook[module.nearest(z)])


def test_distances_are_exact_where_a_rounded_product_would_choose_wrongly() -> None:
    z = torch.full((1, 64), 10.0)
    codebook = torch.stack([torch.full((64,), 1.0), torch.full((64,), 1.0 + 2**-12)])
    assert torch.equal(codebook[0].bfloat16(), codebook[1].bfloat16())
    module = quantiser(codebook)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.nearest(z).tolist() == [1]
        out = module(z.bfloat16())
    assert out.dtype == torch.bfloat16
    assert module.loss is not None
    assert module.loss.dtype == torch.float32


# Gradients


def test_the_gradient_passes_straight_through_to_the_features() -> None:
    z, codebook = random_case()
    z.requires_grad_()
    module = quantiser(codebook)
    direction = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).reshape(z.shape)
    (module(z) * direction).sum().backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert torch.equal(z.grad, direction)  # as if the quantiser were not there
    assert module.codebook.grad is None  # codes learn from the loss alone


def test_the_gradients_of_the_loss_are_those_derived_by_hand() -> None:
    z, codebook = random_case()
    z.requires_grad_()
    module = quantiser(codebook, commitment=0.3)
    module(z)
    loss = module.take_loss()
    assert loss is not None
    loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        index = module.nearest(z)
        away = 2 * (z - codebook[index]) / z.numel()
        by_hand = torch.zeros_like(codebook)
        for row, code in enumerate(index.tolist()):
            by_hand[code] -= away[row]
    torch.testing.assert_close(z.grad, 0.3 * away)
    torch.testing.assert_close(module.codebook.grad, by_hand)


def test_both_parts_of_the_loss_agree_with_finite_differences() -> None:
    z, codebook = random_case()
    step = 1e-6

    def value(shift_z: float, shift_code: float) -> float:
        moved, codes = z.clone(), codebook.clone()
        moved[3, 2] += shift_z
        codes[chosen, 2] += shift_code
        module = quantiser(codes, commitment=0.3)
        module(moved)
        loss = module.take_loss()
        assert loss is not None
        return float(loss.detach())

    chosen = int(quantiser(codebook).nearest(z)[3])
    module = quantiser(codebook, commitment=0.3)
    leaf = z.clone().requires_grad_()
    module(leaf)
    loss = module.take_loss()
    assert loss is not None
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None and module.codebook.grad is not None
    slope_z = (value(step, 0) - value(-step, 0)) / (2 * step)
    slope_code = (value(0, step) - value(0, -step)) / (2 * step)
    # the value is (1 + commitment) * mse, of which each side may see its own part only
    assert float(leaf.grad[3, 2]) == approx(slope_z * 0.3 / 1.3, rel=1e-5)
    assert float(module.codebook.grad[chosen, 2]) == approx(slope_code / 1.3, rel=1e-5)


# Bookkeeping


def test_nothing_is_remembered_outside_training() -> None:
    z, codebook = random_case()
    module = quantiser(codebook, revive=1)
    module.eval()(z)
    with torch.no_grad():
        module.train()(z)
    assert module.take_loss() is None
    assert module.usage == {}
    assert torch.equal(module.codebook, codebook)


def test_a_loss_is_given_once() -> None:
    z, codebook = random_case()
    module = quantiser(codebook)
    module(z)
    assert module.take_loss() is not None
    assert module.take_loss() is None


def test_usage_counts_the_codes_of_the_last_pass() -> None:
    codebook = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    module = quantiser(codebook)
    module(torch.tensor([[0.0], [0.1], [1.0], [1.1]]))  # two codes, equally often
    assert module.usage["codebook_perplexity"].item() == approx(2)
    assert module.usage["codebook_share"].item() == 0.5
    module(torch.tensor([[0.0], [0.1], [0.2]]))
    assert module.usage["codebook_perplexity"].item() == approx(1)
    assert module.usage["codebook_share"].item() == 0.25


def test_a_copy_can_be_made_between_forward_and_backward() -> None:
    z, codebook = random_case()
    module = quantiser(codebook)
    module(z)
    copied = copy.deepcopy(module)
    assert copied.loss is None
    assert module.loss is not None
    assert torch.equal(copied.codebook, codebook)


def test_the_codebook_alone_is_its_state() -> None:
    assert list(VectorQuantiser(4, 2, revive=3).state_dict()) == ["codebook"]


def test_first_codes_lie_within_one_over_their_number() -> None:
    torch.manual_seed(0)
    codebook = VectorQuantiser(256, 256).codebook
    assert 0.99 / 256 < codebook.abs().max() <= 1 / 256


# Revival


def test_idle_codes_move_onto_features_and_used_ones_stay() -> None:
    z, codebook = torch.tensor([[0.0], [0.1]]), torch.tensor([[0.0], [9.0], [8.0]])
    module = quantiser(codebook, revive=2)
    module(z)
    assert torch.equal(module.codebook, codebook)  # idle for one pass: not yet
    out = module(z)
    assert out.flatten().tolist() == [0, 0]  # this pass saw the codes as they were
    assert module.codebook[0].item() == 0
    assert {value.item() for value in module.codebook[1:].flatten()} <= {z[0].item(), z[1].item()}
    assert module.idle.tolist() == [0, 0, 0]
    loss = module.take_loss()
    assert loss is not None
    loss.backward()  # type: ignore[no-untyped-call]  # moving codes does not disturb the gradient
    assert module.codebook.grad is not None
    assert module.codebook.grad.flatten().tolist() == approx([-0.1, 0, 0])


def test_a_new_local_training_forgets_who_was_idle() -> None:
    z, codebook = torch.tensor([[0.0]]), torch.tensor([[0.0], [9.0]])
    module = quantiser(codebook, revive=2)
    for _ in range(3):
        module.start_fit()
        module(z)
    assert torch.equal(module.codebook, codebook)


def test_revival_follows_the_seed() -> None:
    z, codebook = random_case()

    def revived(seed: int) -> Tensor:
        torch.manual_seed(seed)
        module = quantiser(torch.cat([codebook, codebook + 100]), revive=1)
        module(z)
        return module.codebook.detach()

    assert torch.equal(revived(1), revived(1))
    assert not torch.equal(revived(1), revived(2))


def test_without_revival_no_random_number_is_drawn() -> None:
    z, codebook = random_case()
    before = torch.get_rng_state()
    quantiser(codebook)(z)  # its first codes are drawn
    after = torch.get_rng_state()
    assert not torch.equal(before, after)
    module = quantiser(codebook)
    before = torch.get_rng_state()
    module(z)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_mean_of_two_revived_codebooks_still_quantises() -> None:
    z, codebook = random_case()
    models = [quantiser(codebook, revive=1), quantiser(codebook, revive=1)]
    for seed, module in enumerate(models):
        torch.manual_seed(seed)
        module(z + seed)
    mean = 0.5 * (Params.of(models[0]) + Params.of(models[1]))
    mean.load_into(models[0])
    assert models[0](z).isfinite().all()


@pytest.mark.parametrize("revive", [0, 2])
def test_it_compiles_into_one_graph_in_training(revive: int) -> None:
    z, codebook = random_case()
    module, plain = quantiser(codebook, revive=revive), quantiser(codebook, revive=revive)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.manual_seed(3)
        expected = plain(z.clone().requires_grad_())
        torch.manual_seed(3)
        assert torch.equal(compiled(z.clone().requires_grad_()), expected)
        ours, theirs = module.take_loss(), plain.take_loss()
        assert ours is not None and theirs is not None
        ours.backward()  # type: ignore[no-untyped-call]
        theirs.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(module.codebook, plain.codebook)
    torch.testing.assert_close(module.codebook.grad, plain.codebook.grad)
    torch.testing.assert_close(module.usage, plain.usage)
