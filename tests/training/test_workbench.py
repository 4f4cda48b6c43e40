from pathlib import Path
from typing import Any

import torch
from helpers import config, run
from pytest import approx, mark
from torch import nn

from wardround.config import OptimizerSettings, Schedule
from wardround.data.cases import Batch, Case, TensorSplit
from wardround.data.serving.augment import Augmentation
from wardround.engine.host import Host
from wardround.losses.objective import Context
from wardround.params import Params
from wardround.seeding import generator
from wardround.seeds import derive
from wardround.training import optimizers
from wardround.training.batches import draw_full_batches
from wardround.training.learner import Step


def host(folder: Path, **changes: Any) -> Host:
    """One batch holds all five training cases of a client."""
    return Host(config(folder, batch_size=8, **changes), folder / "clients", ["north", "east", "south"])


# The loop against plain PyTorch


@mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_fit_equals_a_plain_loop(tmp_path: Path, name: str) -> None:
    """The same batches, losses and steps, written out."""
    here = host(
        tmp_path,
        local_epochs=2,
        optimizer={
            "name": name,
            "learning_rate": 0.01,
            "weight_decay": 0.01,
            "momentum": 0.5,
            "clip_norm": 1.0,
        },
        augmentation={"flip": 0, "intensity": 0},
    )
    client = here.client("north")
    start = Params.of(client.model)
    fitted = client.fit(start)

    start.load_into(client.model)
    model = client.model.train()
    if name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.01, 0.5, weight_decay=0.01)
    else:
        kind = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
        optimizer = kind(model.parameters(), 0.01, weight_decay=0.01)
    losses = []
    for epoch in range(2):
        order = torch.randperm(5, generator=generator(42, "train", "north", 0, "order", epoch))
        for indices in order.split(8):
            batch = client.data.train.batch(indices)
            loss = here.objective.loss(model, batch, context())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())

    assert fitted.num_steps == 2 and fitted.num_examples == 5
    assert fitted.sum_learning_rates == approx(0.02)
    assert fitted.loss["total"] == approx(sum(losses) / 2)
    for tensor, expected in zip(fitted.params.values(), model.state_dict().values(), strict=True):
        assert torch.allclose(tensor, expected, atol=1e-6)


def test_local_steps_go_on_through_the_shuffled_orders(tmp_path: Path) -> None:
    """Five cases in batches of three: the second batch ends the first order and begins the second."""
    client = Host(
        config(tmp_path, batch_size=3, local_steps=4), tmp_path / "clients", ["north", "east", "south"]
    ).client("north")
    seen: list[tuple[int, int, bool]] = []

    def on_batch(batch: Batch, context: Context) -> Batch:
        seen.append((context.epoch, context.step, client.is_last_pass(context)))
        return batch

    draw = [torch.randperm(5, generator=generator(42, "train", "north", 0, "order", e)) for e in range(3)]
    expected = torch.cat(draw)[:12].split(3)
    drawn = list(draw_full_batches(5, 3, 4, 42, "train", "north", 0, "order"))
    fitted = client.fit(Params.of(client.model), on_batch=on_batch)

    assert fitted.num_steps == 4
    assert [indices.tolist() for _, indices in drawn] == [indices.tolist() for indices in expected]
    assert [epoch for epoch, _ in drawn] == [0, 0, 1, 1]
    assert seen == [(0, 0, False), (0, 1, False), (1, 2, True), (1, 3, True)]


def test_as_many_steps_as_full_batches_of_an_epoch_are_that_epoch(tmp_path: Path) -> None:
    by_steps, by_epochs = (
        Host(config(tmp_path, batch_size=1, **how), tmp_path, ["north"]).client("north")
        for how in ({"local_steps": 10}, {"local_epochs": 2})
    )
    start = Params.of(by_steps.model)

    assert by_steps.fit(start).params.sha256() == by_epochs.fit(start).params.sha256()


def test_a_client_with_fewer_cases_than_a_batch_takes_its_steps_in_full_batches(tmp_path: Path) -> None:
    client = host(tmp_path, local_steps=3).client("north")
    sizes: list[int] = []

    def on_batch(batch: Batch, context: Context) -> Batch:
        sizes.append(len(batch))
        return batch

    assert client.fit(Params.of(client.model), on_batch=on_batch).num_steps == 3
    assert sizes == [8, 8, 8]
    assert [set(indices.tolist()) for _, indices in draw_full_batches(1, 2, 2, 42)] == [{0}, {0}]
    assert list(draw_full_batches(0, 2, 2, 42)) == []


def context() -> Context:
    return Context(round=0, rounds=1, num_examples=4, memory={}, generator=torch.Generator())


def test_hooks_see_the_batch_the_gradient_and_the_step(tmp_path: Path) -> None:
    client = host(tmp_path).client("north")
    start = Params.of(client.model)
    seen: list[str] = []

    def on_batch(batch: Batch, context: Context) -> Batch:
        seen.append("batch")
        return batch

    def add(model: nn.Module, batch: Batch, context: Context) -> torch.Tensor:
        seen.append("add")
        return context.output.logits.sum() * 0

    def after_backward(model: nn.Module) -> None:
        seen.append("gradient")
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()

    fitted = client.fit(start, on_batch=on_batch, add=add, after_backward=after_backward)

    assert seen == ["batch", "add", "gradient"]
    assert fitted.params.sha256() == start.sha256()  # zero gradients, nothing moves


def test_a_method_may_take_the_step_apart(tmp_path: Path) -> None:
    client = host(tmp_path).client("north")
    start = Params.of(client.model)

    def twice(step: Step) -> None:
        first = step.backward()
        assert torch.equal(step.backward(), first)
        step.apply()

    assert client.fit(start, step=twice).params.sha256() == client.fit(start).params.sha256()


def test_replacing_the_loss_replaces_the_objective(tmp_path: Path) -> None:
    client = host(tmp_path).client("north")
    start = Params.of(client.model)

    def loss(model: nn.Module, batch: Batch, context: Context) -> torch.Tensor:
        context.note("twice", torch.tensor(2.0))
        return 2 * client.loss(model, batch, context)

    doubled, plain = client.fit(start, loss=loss), client.fit(start)

    assert doubled.loss["total"] == approx(2 * plain.loss["total"])
    assert doubled.loss["twice"] == 2.0


def test_evaluation_leaves_model_mode_and_random_streams_untouched(tmp_path: Path) -> None:
    client = host(tmp_path, model={"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}).client(
        "north"
    )
    other = Params.of(client.model) * 0.5
    client.model.train()
    before, stream = Params.of(client.model).sha256(), torch.get_rng_state()

    value = client.evaluate(other)

    assert value is not None and value > 0
    assert Params.of(client.model).sha256() == before
    assert torch.equal(torch.get_rng_state(), stream) and client.model.training
    assert client.evaluate(Params.of(client.model)) != value


def test_without_validation_cases_the_training_cases_serve_or_the_answer_is_none(tmp_path: Path) -> None:
    client = host(tmp_path, data={"phantom": {"hospitals": 3, "size": 16, "cases": [2, 0, 8]}}).client(
        "north"
    )

    assert len(client.data.val) == 0
    assert client.evaluate() is not None
    assert client.evaluate(fallback=False) is None


def test_a_client_with_no_cases_at_all_evaluates_to_none(tmp_path: Path) -> None:
    client = host(tmp_path, data={"phantom": {"hospitals": 3, "size": 16, "cases": [2, 0, 8]}}).client("east")

    assert client.evaluate() is None


def test_references_are_frozen_and_the_first_previous_model_is_the_global_one(tmp_path: Path) -> None:
    here = host(tmp_path)
    here.method.__class__.needs = frozenset({"features", "global", "previous"})  # type: ignore[misc]
    try:
        client = host(tmp_path / "b").client("north")
        start = Params.of(client.model)
        seen = []

        def add(model: nn.Module, batch: Batch, context: Context) -> torch.Tensor:
            now, then = context.global_.encode(batch.image), context.previous.encode(batch.image)
            seen.append((context.has_previous, torch.equal(now, then)))
            assert not now.requires_grad and context.features.requires_grad
            return context.features.sum() * 0

        first = client.fit(start, add=add)
        client.fit(start, add=add)
    finally:
        here.method.__class__.needs = frozenset()  # type: ignore[misc]

    assert seen == [(False, True), (True, False)]
    assert client.memory["previous"].sha256() != first.params.zeros().sha256()


def test_asking_for_what_was_not_declared_is_explained() -> None:
    for name in ("global_", "previous", "features"):
        try:
            getattr(context(), name)
        except LookupError as error:
            assert "needs" in str(error)
        else:
            raise AssertionError(name)


# Optimizers


def test_kept_optimizer_state_survives_export_and_import() -> None:
    model = nn.Linear(3, 1)
    optimizer = optimizers.build(OptimizerSettings(), model)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    exported = optimizers.export_state(optimizer)

    optimizers.import_state(optimizer, {})
    assert not optimizer.state
    optimizers.import_state(optimizer, exported)

    again = optimizers.export_state(optimizer)
    assert exported.keys() == again.keys() and exported
    assert all(torch.equal(exported[key], again[key]) for key in exported)


def test_keeping_the_optimizer_state_changes_the_second_round(tmp_path: Path) -> None:
    kept = run(tmp_path / "kept", optimizer={"learning_rate": 0.01, "state": "keep"})
    reset = run(tmp_path / "reset", optimizer={"learning_rate": 0.01, "state": "reset"})

    assert kept.params_sha256 != reset.params_sha256
    assert kept.records[0]["loss"] == reset.records[0]["loss"]


@mark.parametrize(
    ("settings", "expected"),
    [
        ({"name": "constant"}, [1, 1, 1, 1]),
        ({"name": "step", "gamma": 0.5, "every": 2}, [1, 1, 0.5, 0.5]),
        ({"name": "exponential", "gamma": 0.9}, [1, 0.9, 0.81, 0.729]),
        ({"name": "polynomial", "power": 1.0}, [1, 0.75, 0.5, 0.25]),
        ({"name": "cosine"}, [1, 0.8535533905932737, 0.5, 0.14644660940672627]),
        ({"name": "constant", "warmup": 2}, [1 / 3, 2 / 3, 1, 1]),
    ],
)
def test_schedules_follow_the_round(settings: dict[str, Any], expected: list[float]) -> None:
    schedule = Schedule(**settings)

    assert [schedule.factor(number, 4) for number in range(4)] == approx(expected)


# Data


def test_streams_are_named_and_independent() -> None:
    assert derive(1, "a", 2) == derive(1, "a", 2)
    assert len({derive(1, "a", 2), derive(1, "a2"), derive(12, "a"), derive(2, "a", 2)}) == 4


def test_flipping_moves_image_and_label_together() -> None:
    image = torch.arange(16.0).view(1, 1, 4, 4).repeat(8, 1, 1, 1)
    batch = Batch(image, image[:, 0].long())

    changed, second = Augmentation(flip=1.0, intensity=0)(batch, 1, ("x",))

    assert second is None
    assert torch.equal(changed.image[:, 0].long(), changed.label)
    assert all(not torch.equal(changed.label[i], batch.label[i]) for i in range(8))


def test_two_views_share_the_flip_and_differ_in_intensity() -> None:
    batch = Batch(torch.randn(4, 1, 8, 8), torch.zeros(4, 8, 8, dtype=torch.long))

    first, second = Augmentation(flip=0, intensity=0.3, noise=0.1)(batch, 1, ("x",), views=2)

    assert second is not None and not torch.equal(first.image, second)
    assert float(torch.corrcoef(torch.stack([first.image.flatten(), second.flatten()]))[0, 1]) > 0.9


def test_augmentation_is_fixed_by_its_stream() -> None:
    batch = Batch(torch.randn(4, 1, 8, 8), torch.zeros(4, 8, 8, dtype=torch.long))
    augmentation = Augmentation(noise=0.2)

    one, _ = augmentation(batch, 1, ("x", 0))
    same, _ = augmentation(batch, 1, ("x", 0))
    other, _ = augmentation(batch, 1, ("x", 1))

    assert torch.equal(one.image, same.image) and not torch.equal(one.image, other.image)


def test_splits_stack_join_and_may_be_empty() -> None:
    case = Case("a", torch.ones(1, 4, 4), torch.zeros(4, 4, dtype=torch.uint8), (1.0, 2.0))
    split, empty = TensorSplit.of([case, case]), TensorSplit.of([])

    joined = TensorSplit.join([empty, split, split])

    assert len(joined) == 4 and joined.spacing(3) == (1.0, 2.0)
    assert joined.batch([0, 3]).label.dtype == torch.int64
    assert len(TensorSplit.join([empty])) == 0


# Norm statistics

BATCH = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}


def test_every_policy_for_norm_statistics_trains_and_resumes(tmp_path: Path) -> None:
    results = {
        policy: run(tmp_path / policy, model={**BATCH, "bn_stats": policy})
        for policy in ("average", "pooled", "local", "reestimate")
    }

    weights = {p: r.outcome.state.params["encoder.0.first.conv.weight"] for p, r in results.items()}
    assert torch.equal(weights["average"], weights["pooled"])  # statistics do not touch training itself
    counts = {
        p: r.outcome.state.params["encoder.0.first.norm.num_batches_tracked"] for p, r in results.items()
    }
    assert {int(count) for count in counts.values()} == {
        4
    }  # two rounds of two steps: counted, never averaged
    assert len({r.summary["test"]["loss"]["mean"] for r in results.values()}) == 4


@mark.parametrize("method", [{"name": "local"}, {"name": "fedproto", "aggregate_weights": False}])
@mark.parametrize("objective", ["cfsl", "clsl"])
def test_where_nothing_is_averaged_pooled_statistics_change_no_reference(
    tmp_path: Path, method: dict[str, Any], objective: str
) -> None:
    losses = {}
    for policy in ("average", "pooled"):
        chosen = {"method": method, "objective": {"name": objective}, "model": {**BATCH, "bn_stats": policy}}
        losses[policy] = [record["loss"] for record in run(tmp_path / policy, rounds=3, **chosen).records]

    for before, after in zip(losses["average"], losses["pooled"], strict=True):
        for client, terms in before.items():
            assert after[client] == approx(terms, rel=1e-4, abs=1e-6)


def test_pooled_statistics_hold_the_spread_between_clients(tmp_path: Path) -> None:
    """On the wire second moments travel; the tested model has variances again, larger than the average's."""
    model = {"phantom": {"hospitals": 3, "size": 16, "cases": 8}}
    pooled = run(
        tmp_path / "p", data=model, model={**BATCH, "bn_stats": "pooled"}, rounds=1
    ).model.state_dict()
    average = run(
        tmp_path / "a", data=model, model={**BATCH, "bn_stats": "average"}, rounds=1
    ).model.state_dict()

    names = [name for name in pooled if name.endswith("running_var")]
    assert names
    for name in names:
        assert bool((pooled[name] >= average[name] - 1e-6).all())


def test_local_statistics_stay_with_their_client(tmp_path: Path) -> None:
    run(tmp_path / "run", model={**BATCH, "bn_stats": "local"})
    from wardround.engine.memory_store import MemoryStore

    stats = [MemoryStore(tmp_path / f"run/clients/{name}").load()["own"] for name in ("north", "east")]

    assert all(name.endswith(("running_mean", "running_var")) for name in stats[0])
    assert stats[0].sha256() != stats[1].sha256()


def test_reestimated_statistics_cost_one_more_exchange(tmp_path: Path) -> None:
    result = run(tmp_path / "run", model={**BATCH, "bn_stats": "reestimate"})

    assert [exchange["task"] for exchange in result.records[0]["exchanges"]] == ["train", "norm_stats"]


# Steps taken apart, second models, the server's own cases


def test_passes_at_shifted_parameters_leave_everything_but_gradients_alone(tmp_path: Path) -> None:
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch", "dropout": 0.5}
    client = host(tmp_path, model=model).client("north")
    seen: list[tuple[float, float, float]] = []

    def step(this: Step) -> None:
        before = float(this.backward())
        state, terms = Params.of(this.model), dict(this.context.terms)
        stream = torch.get_rng_state()
        zero = {name: torch.zeros_like(p) for name, p in this.model.named_parameters()}
        with this.shifted(zero):
            same = float(this.backward())
        with this.shifted({name: torch.full_like(p, 0.1) for name, p in this.model.named_parameters()}):
            other = float(this.backward())
        assert Params.of(this.model).sha256() == state.sha256()
        assert torch.equal(torch.get_rng_state(), stream)
        assert this.context.terms.keys() == terms.keys()
        seen.append((before, same, other))
        this.apply()

    client.fit(Params.of(client.model), step=step)

    assert seen and all(before == same != other for before, same, other in seen)  # the same dropout mask


def test_gradients_of_two_passes_add_up(tmp_path: Path) -> None:
    client = host(tmp_path).client("north")

    def gradients(model: nn.Module) -> Params:
        return Params({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    def step(this: Step) -> None:
        this.backward()
        once = gradients(this.model)
        this.backward(accumulate=True)
        twice = gradients(this.model)
        this.backward(add=lambda model, batch, context: 0.0 * context.output.logits.sum())
        assert gradients(this.model).sha256() == once.sha256()
        assert all(torch.allclose(twice[name], 2 * once[name], atol=1e-6) for name in once)

    client.fit(Params.of(client.model), step=step)


def test_a_second_model_has_its_own_moments_and_leaves_the_first_alone(tmp_path: Path) -> None:
    here = host(tmp_path, optimizer={"learning_rate": 0.01, "state": "keep"})
    client = here.client("north")
    start = Params.of(client.model)
    first = client.fit(start)
    moments = client.memory["optimizer"].sha256()

    second = client.fit(start, second=True)

    assert client.fitted is first and client.memory["optimizer"].sha256() == moments
    assert client.memory["optimizer_second"].sha256() != moments  # other batches
    assert second.params.sha256() != first.params.sha256()


def test_other_cases_can_be_trained_on(tmp_path: Path) -> None:
    client = host(tmp_path).client("north")
    one = client.data.train
    chosen = TensorSplit(one.names[:2], one.images[:2], one.labels[:2], [(1.0, 1.0)] * 2)

    assert client.fit(Params.of(client.model), split=chosen).num_examples == 2
