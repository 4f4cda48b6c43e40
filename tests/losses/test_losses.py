"""Contrastive baselines as objectives: terms, heads, views, off switches, whole runs."""

import json
import logging
import math

import helpers
import pytest
import torch

import wardround as wr
from wardround.data.cases import Batch
from wardround.data.serving.augment import Augmentation, Shading, apply_gamma, blur
from wardround.engine.memory_file import load_memory
from wardround.engine.memory_store import MemoryStore
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.losses.contrastive_objectives import InfoNCE, LocalCL, SimCLR, SwAV
from wardround.losses.objective import Context
from wardround.losses.segmentation import dice_loss
from wardround.methods import OBJECTIVES
from wardround.models.unet import unet2d, unet3d
from wardround.params import Params

NAMES = ["infonce", "simclr", "local_cl", "swav"]
KINDS = [InfoNCE, SimCLR, LocalCL, SwAV]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_name = pytest.mark.parametrize("name", NAMES)


def network(objective, num_outputs=1, seed=0, dimensions=2, **settings):
    torch.manual_seed(seed)
    builder = unet2d if dimensions == 2 else unet3d
    model = builder(in_channels=1, num_outputs=num_outputs, base_filters=2, levels=3, **settings)
    objective.start_model(model)
    return model


def made_context(second, **facts):
    defaults = {"round": 0, "rounds": 3, "num_examples": 4, "memory": {}}
    context = Context(**(defaults | facts), generator=torch.Generator(), with_features=True)
    context.second_view = second
    return context


def two_views(batch=3, size=(16, 16), num_classes=2, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(batch, 1, *size, generator=generator, dtype=dtype)
    second = image + 0.2 * torch.randn(image.shape, generator=generator, dtype=dtype)
    return Batch(image, torch.randint(0, num_classes, (batch, *size), generator=generator)), second


# Terms


@every_kind
def test_the_loss_is_the_weighted_sum_of_its_noted_terms(kind):
    objective = kind(lam=0.3)
    model = network(objective)
    batch, second = two_views()
    context = made_context(second)
    loss = objective.loss(model, batch, context)
    assert set(context.terms) == {"dice", "contrast"}
    assert torch.allclose(loss, 0.3 * context.terms["contrast"] + 0.7 * context.terms["dice"])
    assert torch.allclose(context.terms["dice"], dice_loss(model(batch.image), batch.label))
    assert context.terms["contrast"] > 0


@every_kind
def test_validation_sees_dice_alone(kind):
    logits, label = torch.randn(3, 1, 8, 8), torch.randint(0, 2, (3, 8, 8))
    assert torch.equal(kind().sample_losses(logits, label), dice_loss(logits, label, reduce=False))


@every_kind
def test_without_the_contrast_the_loss_is_dice_bit_for_bit(kind):
    objective = kind(lam=0)
    model = network(objective)
    batch, second = two_views()
    context = made_context(second)
    assert torch.equal(objective.loss(model, batch, context), dice_loss(model(batch.image), batch.label))
    assert "contrast" not in context.terms


@every_kind
def test_pre_training_is_contrast_alone_and_then_dice_alone(kind):
    objective = kind(schedule="pretrain", pretrain_rounds=2)
    model = network(objective)
    batch, second = two_views()
    for round, term in enumerate(["contrast", "contrast", "dice"]):
        context = made_context(second, round=round)
        loss = objective.loss(model, batch, context)
        assert set(context.terms) == {term}
        assert torch.equal(loss.detach(), context.terms[term])


@pytest.mark.parametrize("kind", [InfoNCE, SimCLR, SwAV])
def test_the_second_view_sees_the_encoder_alone(kind, monkeypatch):
    objective = kind()
    model = network(objective)
    batch, second = two_views()
    passes = []
    monkeypatch.setattr(model.decoder[0], "forward", watched(model.decoder[0].forward, passes))
    objective.loss(model, batch, made_context(second))
    assert len(passes) == 1


def watched(function, calls):
    def wrapper(*arguments):
        calls.append(arguments)
        return function(*arguments)

    return wrapper


@every_kind
def test_gradients_reach_the_encoder_through_both_views(kind):
    objective = kind(lam=1)
    model = network(objective)
    batch, second = two_views()
    batch.image.requires_grad_()
    second.requires_grad_()
    objective.loss(model, batch, made_context(second, round=1)).backward()
    assert batch.image.grad.any()
    assert second.grad.any()
    assert all(parameter.grad.any() for parameter in model.projection.parameters() if parameter.ndim > 1)


def test_a_missing_second_view_is_named():
    objective = SimCLR()
    with pytest.raises(LookupError, match="two_views"):
        objective.loss(network(objective), two_views()[0], made_context(None))


def test_a_missing_head_is_named():
    model = unet2d(in_channels=1, num_outputs=1, base_filters=2, levels=3)
    batch, second = two_views()
    with pytest.raises(LookupError, match="start_model"):
        SimCLR().loss(model, batch, made_context(second))


# Heads


@pytest.mark.parametrize("kind", [InfoNCE, SimCLR])
def test_pooled_heads_go_from_the_bottleneck_to_128(kind):
    model = network(kind())
    shapes = [tuple(parameter.shape) for parameter in model.projection.parameters()]
    assert shapes == [(8, 8), (8,), (128, 8), (128,)]


def test_swavs_head_brings_its_prototypes():
    assert network(SwAV()).projection.prototypes.shape == (32, 128)


@pytest.mark.parametrize(("blocks", "width"), [(1, 4), (2, 2), (3, 2)])
def test_local_cl_reads_the_decoder_after_so_many_blocks(blocks, width):
    objective = LocalCL(blocks=blocks)  # two blocks exist: 4 channels, then 2
    assert network(objective).projection.layers[0].in_features == width


@every_kind
def test_a_head_changes_neither_the_network_nor_its_statistics(kind):
    torch.manual_seed(0)
    plain = unet2d(in_channels=1, num_outputs=1, base_filters=2, levels=3, norm="batch").train()
    model = network(kind(), norm="batch")
    assert model.training
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert all(name in plain.state_dict() or name.startswith("projection.") for name in model.state_dict())


@every_kind
def test_a_shared_head_travels_and_a_local_one_stays(kind):
    model = network(kind())
    heads = [name for name in model.state_dict() if name.startswith("projection.")]
    assert kind().local_names(model) == []
    assert kind(local_head=True).local_names(model) == heads


def test_prototypes_rest_in_the_first_epoch_of_the_first_round():
    objective = SwAV(freeze_epochs=1)
    model = network(objective)
    batch, second = two_views()
    for round, epoch, rests in [(0, 0, True), (0, 1, False), (1, 0, False)]:
        model.zero_grad(set_to_none=True)
        context = made_context(second, round=round)
        context.epoch = epoch
        objective.loss(model, batch, context).backward()
        assert (model.projection.prototypes.grad is None) == rests


def test_the_length_of_prototypes_does_not_matter():
    objective = SwAV()
    model = network(objective)
    batch, second = two_views()
    before = objective.loss(model, batch, made_context(second))
    with torch.no_grad():
        model.projection.prototypes.mul_(7)
    assert torch.allclose(objective.loss(model, batch, made_context(second)), before)


# Gradients and extremes


@pytest.mark.parametrize("kind", [InfoNCE, SimCLR, LocalCL])
def test_the_gradient_of_the_whole_objective_is_right(kind):
    objective = kind(tau=0.5)
    model = network(objective, norm="none").double()
    batch, second = two_views(batch=2, size=(8, 8), dtype=torch.float64)
    names = [name for name, _ in model.named_parameters() if name.startswith(("encoder.2", "projection"))]
    parameters = dict(model.named_parameters())

    def loss(*values):
        chosen = dict(zip(names, values, strict=True))
        context = made_context(second)
        return torch.func.functional_call(
            Whole(model, objective, batch, context),
            {f"model.{name}": value for name, value in chosen.items()},
            (),
        )

    inputs = tuple(parameters[name].detach().clone().requires_grad_() for name in names)
    assert torch.autograd.gradcheck(loss, inputs, fast_mode=True)


class Whole(torch.nn.Module):
    """A network and its loss in one module, so that parameters can be swapped."""

    def __init__(self, model, objective, batch, context):
        super().__init__()
        self.model, self.objective, self.batch, self.context = model, objective, batch, context

    def forward(self):
        return self.objective.loss(self.model, self.batch, self.context)


@every_kind
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["ordinary", "batch of one", "empty", "constant", "black", "confident"])
def test_nothing_becomes_infinite_or_nan(kind, precision, case):
    objective = kind()
    model = network(objective)
    batch, second = two_views(batch=1 if case == "batch of one" else 3)
    if case == "empty":
        batch.label.zero_()
    if case == "constant":
        batch.image.fill_(1.0)
        second = torch.full_like(second, 2.0)
    if case == "black":
        batch.image.zero_()
        second = torch.zeros_like(second)
    if case == "confident":
        with torch.no_grad():
            model.head.weight.mul_(1e4)
    context = made_context(second)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        loss = objective.loss(model, batch, context)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    if case == "batch of one" and kind in (InfoNCE, SimCLR):
        assert context.terms["contrast"] == 0


@every_kind
def test_dead_features_are_survived(kind):
    objective = kind()
    model = network(objective, norm="none")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    batch, second = two_views()
    objective.loss(model, batch, made_context(second)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@every_kind
def test_volumes_and_three_classes_work(kind):
    objective = kind()
    model = network(objective, num_outputs=3, dimensions=3)
    batch, second = two_views(batch=2, size=(4, 8, 12), num_classes=3)
    loss = objective.loss(model, batch, made_context(second))
    loss.backward()
    assert loss.isfinite()


# Views


def shaded(settings, image, seed=0):
    return settings._shade(image, torch.Generator().manual_seed(seed))


def test_the_first_view_is_the_ordinary_one_and_the_second_differs_by_default():
    batch = two_views()[0]
    ordinary, none = Augmentation()(batch, 1, ("x",))
    first, second = Augmentation()(batch, 1, ("x",), views=2)
    assert none is None
    assert torch.equal(first.image, ordinary.image)
    assert torch.equal(first.label, ordinary.label)
    scale_and_shift_out = [
        (view - view.mean(dim=(2, 3), keepdim=True)) / view.std(dim=(2, 3), keepdim=True)
        for view in (first.image, second)
    ]
    assert (scale_and_shift_out[0] - scale_and_shift_out[1]).abs().mean() > 0.05


def test_views_share_their_flip():
    image = torch.linspace(0, 1, 16).expand(8, 1, 16, 16).clone()
    batch = Batch(image, torch.zeros(8, 16, 16, dtype=torch.long))
    first, second = Augmentation(flip=1.0)(batch, 3, ("x",), views=2)
    for a, b in zip(first.image, second, strict=True):
        assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1] > 0.5


def test_views_are_fixed_by_their_stream():
    batch = two_views()[0]
    views = [Augmentation()(batch, seed, ("x",), views=2)[1] for seed in (1, 1, 2)]
    assert torch.equal(views[0], views[1])
    assert not torch.equal(views[0], views[2])


def test_blurring_is_a_gaussian_of_each_cases_own_width():
    image = torch.zeros(2, 1, 21, 21)
    image[:, :, 10, 10] = 1
    soft = blur(image, torch.tensor([0.0, 1.5]))
    assert torch.allclose(soft[0], image[0])
    assert soft[1].sum().item() == pytest.approx(1)
    place = torch.arange(21.0) - 10
    assert (soft[1, 0].sum(dim=0) @ place.square()).item() == pytest.approx(1.5**2, rel=0.03)


def test_blurring_keeps_a_constant_volume_even_where_it_is_thin():
    volume = torch.full((2, 2, 1, 2, 3), 3.0)
    assert torch.allclose(blur(volume, torch.tensor([0.5, 3.0])), volume)


def test_the_contrast_curve_keeps_darkest_and_brightest_voxel():
    image = two_views()[0].image
    bent = apply_gamma(image, torch.tensor([0.5, 1.0, 2.0]))
    assert torch.allclose(bent.amin(dim=(2, 3)), image.amin(dim=(2, 3)))
    assert torch.allclose(bent.amax(dim=(2, 3)), image.amax(dim=(2, 3)), atol=1e-5)
    assert torch.allclose(bent[1], image[1], atol=1e-5)
    assert (bent[0] >= image[0] - 1e-5).all()
    assert (bent[2] <= image[2] + 1e-5).all()


def test_a_constant_image_stays_finite_and_constant_under_the_curve():
    assert torch.equal(
        apply_gamma(torch.full((2, 1, 4, 4), 5.0), torch.tensor([0.5, 2.0])), torch.full((2, 1, 4, 4), 5.0)
    )


@pytest.mark.parametrize(
    "change", [{"noise": 0.1}, {"gamma": 0.3}, {"blur": 1.0}, {"intensity": 0.1}], ids=str
)
def test_each_kind_of_shading_changes_the_image_alone(change):
    image = two_views()[0].image
    nothing = Shading(intensity=0)
    assert torch.equal(shaded(nothing, image), image)
    assert not torch.equal(shaded(nothing.model_copy(update=change), image), image)


# Whole runs


def chosen(name, **settings):
    return {"name": name, **settings}


@every_name
def test_a_run_trains_and_averages_the_head(tmp_path, name):
    result = helpers.run(tmp_path / "run", objective=chosen(name))
    start = Params.of(build_model(result.config))
    heads = [tensor for tensor in start if tensor.startswith("projection.")]
    after = result.outcome.state.params
    assert heads
    assert any(not torch.equal(after[tensor], start[tensor]) for tensor in heads)
    for loss in result.records[-1]["loss"].values():
        assert loss["total"] == pytest.approx(0.5 * loss["dice"] + 0.5 * loss["contrast"], abs=1e-5)
    assert math.isfinite(result.test.value("dice"))


@every_name
def test_with_lam_zero_a_run_trains_the_network_of_plain_dice(tmp_path, name):
    ours = helpers.run(tmp_path / "ours", objective=chosen(name, lam=0)).outcome.state.params
    theirs = helpers.run(tmp_path / "theirs", objective=chosen("dice")).outcome.state.params
    assert ours.only(theirs).sha256() == theirs.sha256()


@every_name
def test_a_local_head_never_leaves_and_is_never_averaged(tmp_path, name):
    result = helpers.run(tmp_path / "run", objective=chosen(name, local_head=True))
    lines = [json.loads(line) for line in (result.folder / "egress.jsonl").read_text().splitlines()]
    sent = {tensor for line in lines for tensor in line["tensors"]}
    assert sent
    assert not any("projection" in tensor for tensor in sent)
    start, after = Params.of(build_model(result.config)), result.outcome.state.params
    heads = [tensor for tensor in start if tensor.startswith("projection.")]
    assert all(torch.equal(after[tensor], start[tensor]) for tensor in heads)
    own = [MemoryStore(path).load()["own"] for path in sorted((result.folder / "clients").iterdir())]
    assert all(sorted(kept) == sorted(heads) for kept in own)
    assert any(not torch.equal(own[0][tensor], own[1][tensor]) for tensor in heads)


def test_a_local_head_begins_a_round_where_it_ended_the_last(tmp_path):
    """The second round trains by Dice alone, which leaves the head as the round found it."""
    objective = chosen("simclr", local_head=True, schedule="pretrain", pretrain_rounds=1)
    result = helpers.run(tmp_path / "run", objective=objective)
    folder = result.folder / "clients" / "north"
    first, second = (load_memory(path)["own"] for path in sorted(folder.glob("memory-*.safetensors")))
    start = Params.of(build_model(result.config))
    name = "projection.layers.2.weight"
    assert not torch.equal(first[name], start[name])
    assert torch.equal(second[name], first[name])


@pytest.mark.parametrize("local_head", [False, True])
def test_a_resumed_run_ends_with_the_same_bytes(tmp_path, local_head):
    objective = chosen("swav", local_head=local_head)
    whole = helpers.run(tmp_path / "whole", objective=objective)
    with pytest.raises(KeyboardInterrupt):
        crash = helpers.settings(tmp_path / "parts", objective=objective)
        wr.run(crash, listener=helpers.Watcher(crash_in_round=2))
    resumed = wr.run(helpers.settings(tmp_path / "parts", objective=objective), resume=True)
    assert resumed.params_sha256 == whole.params_sha256


def test_a_pre_trained_run_changes_its_loss_after_so_many_rounds(tmp_path):
    result = helpers.run(tmp_path / "run", objective=chosen("simclr", schedule="pretrain", pretrain_rounds=1))
    first, second = (record["loss"]["north"] for record in result.records)
    assert set(first) == {"total", "contrast"}
    assert set(second) == {"total", "dice"}


def test_without_supervision_the_decoder_never_learns(tmp_path):
    result = helpers.run(tmp_path / "run", objective=chosen("simclr", lam=1))
    start, after = Params.of(build_model(result.config)), result.outcome.state.params
    for name in start:
        learned = name.startswith(("encoder.", "projection."))
        assert torch.equal(after[name], start[name]) != learned


def test_a_last_batch_of_one_case_is_no_trouble(tmp_path):
    result = helpers.run(tmp_path / "run", objective=chosen("infonce"), batch_size=4)  # 5 cases: 4 and 1
    assert result.status == "done"


@every_name
def test_every_contrastive_objective_works_under_fsf3a_in_volumes(tmp_path, name):
    result = helpers.run(
        tmp_path / "run",
        rounds=1,
        method={"name": "fsf3a"},
        objective=chosen(name),
        data={"phantom": {"hospitals": 1, "size": 16, "cases": 4, "dimensions": 3}},
        model={"name": "unet3d", "base_filters": 2, "levels": 2},
    )
    assert result.status == "done"


# Configuration


@pytest.mark.parametrize("name", ["infonce", "simclr"])
def test_a_batch_of_one_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match=r"batch_size is 1.*contrasted"):
        wr.load_config({"objective": {"name": name}, "batch_size": 1})
    with pytest.raises(ConfigError, match=r"compute.micro_batch is 1.*contrasted"):
        wr.load_config({"objective": {"name": name}, "compute": {"micro_batch": 1}})


@pytest.mark.parametrize("name", ["local_cl", "swav"])
def test_a_batch_of_one_is_fine_where_regions_or_voxels_are_compared(name):
    assert wr.load_config({"objective": {"name": name}, "batch_size": 1})


@every_name
def test_pre_training_must_leave_a_round_for_the_masks(name):
    objective = {"name": name, "schedule": "pretrain", "pretrain_rounds": 10}
    with pytest.raises(ConfigError, match="pretrain_rounds is 10"):
        wr.load_config({"objective": objective, "rounds": 10})


def test_no_supervision_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        wr.load_config({"objective": {"name": "simclr", "lam": 1}})
    assert "never learned" in caplog.text


@every_name
def test_a_network_without_features_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="encoder features"):
        helpers.run(
            tmp_path / "run",
            objective=chosen(name),
            model={"name": "user_nets:Flat"},
        )


def test_the_registry_knows_all_four():
    assert [OBJECTIVES[name] for name in NAMES] == KINDS
