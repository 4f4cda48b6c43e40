"""Compute settings: what `auto` chooses, and that none of them changes what is trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import config, run

from wardround.config import ComputeSettings, OptimizerSettings
from wardround.config_file import load_config
from wardround.data.cases import Batch, TensorSplit
from wardround.engine.host import Host
from wardround.engine.networks import build_model
from wardround.errors import ClientError, ConfigError, WardroundError
from wardround.losses.objective import Context, Dice, DiceBCE
from wardround.losses.reference import Reference
from wardround.messages import Message
from wardround.methods import OBJECTIVES
from wardround.methods.safcf import CFSL
from wardround.models.unet import unet2d, unet3d
from wardround.params import Params
from wardround.training import device, optimizers
from wardround.training import workbench as training
from wardround.training.device import Compute, choose, weigh_compile
from wardround.training.learner import Passes
from wardround.training.workbench import Workbench

STILL = {"flip": 0.0, "intensity": 0.0}


def context(**changes: Any) -> Context:
    plain = {"round": 0, "rounds": 1, "num_examples": 4, "memory": {}, "generator": torch.Generator()}
    return Context(**{**plain, **changes})


def bench(objective: Any = None, *, norm: Any = "instance", **compute: Any) -> Workbench:
    torch.manual_seed(3)
    model = unet2d(in_channels=1, num_outputs=1, base_filters=4, levels=3, norm=norm)
    how = Compute(torch.device("cpu"), **compute)
    return Workbench(model, objective or Dice(), OptimizerSettings(), compute=how)


def batch(count: int = 4) -> Batch:
    draw = torch.Generator().manual_seed(1)
    image = torch.randn(count, 1, 16, 16, generator=draw)
    return Batch(image, (image[:, 0] > 0.5).long())


def gradients(chosen: Workbench, given: Context | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    given = given or context()
    chosen.model.train()
    chosen.optimizer.zero_grad(set_to_none=True)
    value = chosen.backward(batch(), given, chosen.objective.loss)
    return float(value), {n: p.grad for n, p in chosen.model.named_parameters() if p.grad is not None}


# What auto chooses


def test_a_cpu_computes_in_float32_as_written() -> None:
    chosen = choose(ComputeSettings(device="cpu"))
    assert (chosen.precision, chosen.compile, chosen.channels_last) == ("float32", "off", False)


def test_a_small_network_runs_as_cuda_graphs_and_a_large_one_compiled_when_that_pays() -> None:
    small, large = unet2d(in_channels=3, num_outputs=2, base_filters=16), unet3d(in_channels=1, num_outputs=1)
    cube = (128, 128, 128)
    assert weigh_compile(True, small, (160, 160), 8, 5000)[:2] == (True, False)
    assert weigh_compile(True, small, (160, 160), 8, 5)[:2] == (False, False)
    assert weigh_compile(True, small, (160, 160), 8, 200_000)[:2] == (True, True)
    assert weigh_compile(True, large, cube, 8, 100)[:2] == (False, False)
    graphs, inductor, why = weigh_compile(True, large, cube, 8, 100_000)
    assert not graphs and inductor and "saves about" in why
    assert weigh_compile(False, large, cube, 8, 100_000)[:2] == (False, False)


def test_kernels_of_an_earlier_run_make_compiling_pay_sooner() -> None:
    small = unet2d(in_channels=3, num_outputs=2, base_filters=16)
    assert weigh_compile(True, small, (160, 160), 8, 30_000)[:2] == (True, False)
    graphs, inductor, why = weigh_compile(True, small, (160, 160), 8, 30_000, loading=8.0)
    assert graphs and inductor and "loading kernels of an earlier run takes 8 s" in why
    assert weigh_compile(True, small, (160, 160), 8, 300, loading=8.0)[:2] == (True, False)


def test_a_gpu_keeps_everything_channels_last_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wardround.training.device.choose_device", lambda settings: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "some GPU")
    network = unet2d(in_channels=1, num_outputs=1, base_filters=4)
    for how in ("off", "graphs", "inductor", "full"):
        assert choose(ComputeSettings(compile=how), network, (64, 64)).channels_last
    assert not choose(ComputeSettings(memory_format="contiguous"), network, (64, 64)).channels_last


def test_graphs_on_a_cpu_are_left_out_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen = choose(ComputeSettings(device="cpu", compile="graphs"))
    assert chosen.compile == "off" and "need a GPU" in caplog.text


def test_environment_json_says_what_was_chosen(tmp_path: Path) -> None:
    import json

    run(tmp_path / "run", rounds=1, compute={"device": "cpu", "micro_batch": 3})
    facts = json.loads((tmp_path / "run" / "environment.json").read_text())["compute"]
    assert facts["precision"] == "float32" and facts["compile"] == "off" and facts["micro_batch"] == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("precision", "half"), ("compile", "yes"), ("micro_batch", 0), ("memory_format", "nhwc")],
)
def test_a_wrong_setting_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"compute.{name}"):
        load_config({"compute": {name: value}})


# Smaller pieces, the same gradient


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 9])
def test_gradients_of_pieces_add_up_to_those_of_the_batch(micro_batch: int) -> None:
    value, expected = gradients(bench())
    piece, found = gradients(bench(micro_batch=micro_batch))
    assert piece == pytest.approx(value, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


def test_noted_terms_of_pieces_are_those_of_the_batch() -> None:
    def reference() -> Reference:
        return Reference(bench().model.eval())

    terms = []
    for micro_batch in (None, 2):
        given = context(with_features=True, global_=reference(), previous=reference(), has_previous=True)
        gradients(bench(CFSL(alpha_mode="off"), micro_batch=micro_batch), given)
        terms.append({name: float(value) for name, value in given.terms.items()})
    assert terms[0] == pytest.approx(terms[1], rel=1e-5)
    assert given.share == 1.0


def test_a_second_view_is_cut_like_the_batch(tmp_path: Path) -> None:
    whole = run(tmp_path / "a", rounds=1, objective={"name": "local_cl"})
    pieces = run(tmp_path / "b", rounds=1, objective={"name": "local_cl"}, compute={"micro_batch": 1})
    assert pieces.records[0]["loss"]["north"]["total"] == pytest.approx(
        whole.records[0]["loss"]["north"]["total"], rel=1e-3
    )


# Checkpointing


@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_activations_computed_again_give_the_same_bytes(norm: str) -> None:
    plain, again = bench(norm=norm), bench(norm=norm, checkpointing=True)
    (_, expected), (_, found) = gradients(plain), gradients(again)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient)
    for name, tensor in plain.model.state_dict().items():  # running statistics moved once
        assert torch.equal(again.model.state_dict()[name], tensor)


def test_checkpointing_keeps_less_for_the_backward_pass() -> None:
    kept = []
    for checkpointing in (False, True):
        chosen, count = bench(checkpointing=checkpointing), 0

        def note(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += tensor.nbytes
            return tensor

        chosen.model.train()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            chosen.model(batch().image)
        kept.append(count)
    assert kept[1] < 0.7 * kept[0]


# Layout


def test_channels_last_trains_the_same_model_and_sends_plain_tensors(tmp_path: Path) -> None:
    plain = run(tmp_path / "a", rounds=1)
    last = run(tmp_path / "b", rounds=1, compute={"memory_format": "channels_last"})
    for name in plain.params:
        assert last.params[name].is_contiguous()
        torch.testing.assert_close(last.params[name], plain.params[name], rtol=1e-3, atol=2e-4)


def test_channels_last_takes_up_kept_optimizer_state(tmp_path: Path) -> None:
    kept = {"learning_rate": 0.01, "state": "keep"}
    plain = run(tmp_path / "a", optimizer=kept)
    last = run(tmp_path / "b", optimizer=kept, compute={"memory_format": "channels_last"})
    assert last.records[-1]["lost"] == {}
    for name in plain.params:
        torch.testing.assert_close(last.params[name], plain.params[name], rtol=1e-2, atol=2e-3)


# Out of memory


class Full(DiceBCE):
    """A loss that takes no more than so many cases at once."""

    room = 2

    def loss(self, model: Any, batch: Batch, context: Context) -> torch.Tensor:
        if len(batch) > self.room:
            raise torch.OutOfMemoryError("no room")
        return super().loss(model, batch, context)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(OBJECTIVES.own, "dice_bce", Full)
    yield
    Full.room = 2


@pytest.mark.usefixtures("little_room")
def test_out_of_memory_backs_off_says_so_and_gives_the_same_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backed_off = run(tmp_path / "a", rounds=1, batch_size=8)
    Full.room = 100
    plain = run(tmp_path / "b", rounds=1, batch_size=8)
    assert "out of memory on cpu; from here on" in caplog.text and "2 cases at a time" in caplog.text
    for name in plain.params:
        torch.testing.assert_close(backed_off.params[name], plain.params[name], rtol=1e-3, atol=2e-4)
    assert backed_off.records[0]["lost"] == {}


def test_evaluation_that_does_not_fit_goes_on_in_pieces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chosen, room = bench(), 2
    kinds = [torch.OutOfMemoryError("no room"), RuntimeError("CUDA error: out of memory")]
    forward, sizes = type(chosen.model).forward, []

    def tight(self: Any, image: torch.Tensor) -> torch.Tensor:
        if len(image) > room:
            raise kinds[len(image) % 2]
        sizes.append(len(image))
        return forward(self, image)

    whole = next(chosen.predictions([batch(7)], None))[0]
    monkeypatch.setattr(type(chosen.model), "forward", tight)
    first, second = batch(7), batch(3)
    pieces = list(chosen.predictions([first, second], None))
    torch.testing.assert_close(torch.cat([logits for logits, _ in pieces[:4]]), whole)
    assert torch.equal(torch.cat([part.label for _, part in pieces[:4]]), first.label)
    assert torch.equal(torch.cat([part.image for _, part in pieces[4:]]), second.image)
    assert sizes == [2, 2, 2, 1, 2, 1]
    assert "out of memory on cpu; from here on 4 cases" in caplog.text and "on 2 cases" in caplog.text
    room = 0
    with pytest.raises(ClientError, match="evaluation: one case alone does not fit .* compute.resident"):
        next(chosen.predictions([batch(2)], None))


@pytest.mark.usefixtures("little_room")
def test_a_case_that_does_not_fit_alone_is_told(tmp_path: Path) -> None:
    Full.room = 0
    from wardround.errors import TooFewClients

    with pytest.raises(TooFewClients, match=r"one case alone does not fit.*compute\.checkpointing"):
        run(tmp_path / "a", rounds=1, retries=0)


def test_a_network_that_does_not_fit_at_all_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Workbench, "__init__", no_room)
    with pytest.raises(WardroundError, match=r"cpu has no room for the network 'unet2d'.*compute\.device"):
        run(tmp_path, rounds=1)


def test_a_run_that_is_over_holds_no_graphs_and_no_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: list[Host] = []
    made = Host.__init__

    def noted(self: Host, *rest: Any, **named: Any) -> None:
        hosts.append(self)
        made(self, *rest, **named)

    monkeypatch.setattr(Host, "__init__", noted)
    run(tmp_path, rounds=2, objective={"name": "cfsl"})
    assert [(host.bench._graphs, host.bench.references, host._clients) for host in hosts] == [(None, [], {})]


# Frozen references


class Counting(Reference):
    """Counts the images that went through the frozen encoder."""

    seen = 0

    def __init__(self, model: Any, encode: Any = None) -> None:
        super().__init__(model, self.counted)

    def counted(self, model: Any, image: torch.Tensor) -> torch.Tensor:
        Counting.seen += len(image)
        found: torch.Tensor = model.encode(image)
        return found


def encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, augmentation: dict[str, float]
) -> tuple[int, Any]:
    monkeypatch.setattr(training, "Reference", Counting)
    Counting.seen = 0
    folder = tmp_path / f"{augmentation['flip']}"
    result = run(folder, rounds=1, local_epochs=3, objective={"name": "cfsl"}, augmentation=augmentation)
    return Counting.seen, result


def test_features_of_cases_that_come_back_are_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, result = encoded(tmp_path, monkeypatch, STILL)
    always, _ = encoded(tmp_path, monkeypatch, {"flip": 0.5, "intensity": 0.0})
    assert always == 3 * once
    monkeypatch.setattr(training, "room_for_features", lambda *_: 0)
    seen, again = encoded(tmp_path / "no", monkeypatch, STILL)
    assert seen == always
    for name in result.params:
        torch.testing.assert_close(result.params[name], again.params[name], rtol=1e-3, atol=2e-4)


def test_a_reference_that_moves_forgets_what_it_saw() -> None:
    model = bench().model.eval()
    reference = Reference(model)
    reference.room = 10**9
    image = batch(2).image
    reference.expect(image, [0, 1])
    first = reference.encode(image)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    assert torch.equal(reference.encode(image), first)
    reference.copy_from(bench().model)
    assert not torch.equal(reference.encode(image), torch.zeros(0)) and reference._kept == {}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_kept_features_lie_in_memory_as_computed_ones(layout: torch.memory_format) -> None:
    """Else a compiled loss would be compiled once more for them, in the middle of a capture."""
    reference = Reference(bench().model.eval())
    reference.room = 10**9
    features = torch.randn(3, 8, 4, 5).contiguous(memory_format=layout)
    reference.expect(torch.zeros(3), [7, 1, 4])
    reference.keep(features)
    reference.expect(torch.zeros(3), [4, 7, 1])
    kept = reference.kept()
    assert kept is not None and torch.equal(kept, features[[2, 0, 1]])
    assert kept.stride() == features.stride()


# Compiled passes


def test_only_full_batches_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def fake(function: Any, dynamic: bool) -> Any:
        def counted(*inputs: Any) -> Any:
            compiled.append(function.__name__)
            return function(*inputs)

        return counted

    monkeypatch.setattr(torch, "compile", fake)
    passes, model = Passes(inductor=True), bench().model
    passes.usual = 4
    for count in (4, 3):
        for with_features in (False, True):
            passes.run(model, batch(count).image, with_features)
        passes.encode(model, batch(count).image)
    assert compiled == ["_logits", "_features", "_bottleneck"]
    plain = passes.run(model, batch(3).image, True)
    torch.testing.assert_close(passes.run(model, batch(4).image, True).logits[:3], plain.logits)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # asked for by torch.compile itself
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("dice", ["dice_loss"]),
        ("cfsl", ["dice", "compare"]),
        ("clsl", ["supervised", "compare"]),
        ("evidential", ["terms"]),
    ],
)
def test_a_compiled_loss_is_the_written_one(name: str, parts: list[str]) -> None:
    """Traced as inductor would see it, gradients too; the kernels themselves are inductor's affair."""
    objective = OBJECTIVES[name]()
    torch.manual_seed(3)
    model = unet2d(in_channels=1, num_outputs=objective.num_outputs(2), base_filters=4, levels=3)
    torch.manual_seed(4)
    other = unet2d(in_channels=1, num_outputs=objective.num_outputs(2), base_filters=4, levels=3)
    traced: list[str] = []

    def compiled(function: Any, logits: torch.Tensor) -> Any:
        traced.append(getattr(function, "func", function).__name__)
        return torch.compile(function, dynamic=False, backend="aot_eager", fullgraph=True)

    found = []
    for compile in (None, compiled):
        frozen = {"global_": Reference(other.eval()), "previous": Reference(model)}
        given = context(round=1, rounds=2, with_features=True, has_previous=True, compiled=compile, **frozen)
        model.zero_grad()
        loss = objective.loss(model, batch(), given)
        loss.backward()
        found.append((loss.detach(), [p.grad for p in model.parameters()]))
    assert traced == parts
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_equal_constants_mean_an_equal_loss(name: str) -> None:
    """Else a step captured in one round or epoch would be wrong in another."""
    objective = OBJECTIVES[name]()
    torch.manual_seed(3)
    model = unet2d(in_channels=1, num_outputs=objective.num_outputs(2), base_filters=4, levels=3)
    objective.start_model(model)
    frozen = Reference(bench().model.eval())
    found: dict[object, float] = {}
    for round, epoch, has_previous in product((0, 1, 8), (0, 1), (False, True)):
        given = context(
            round=round,
            rounds=10,
            with_features=True,
            global_=frozen,
            previous=frozen,
            has_previous=has_previous,
        )
        given.epoch, given.second_view = epoch, batch().image + 0.1
        constants = objective.constants(given)
        assert constants is not None
        key = constants, tuple(objective.numbers(given).items())
        value = float(objective.loss(model, batch(), given).detach())
        assert found.setdefault(key, value) == value
        given.numbers = {name: torch.tensor(number) for name, number in objective.numbers(given).items()}
        assert float(objective.loss(model, batch(), given).detach()) == value  # as a graph finds them


@pytest.mark.gpu
@pytest.mark.parametrize("objective", ["dice_bce", "evidential", "cfsl", "clsl", "swav"])
@pytest.mark.parametrize("augmentation", [STILL, {"flip": 0.5}])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_captured_step_gives_the_bytes_of_an_eager_one(
    tmp_path: Path, objective: str, augmentation: dict[str, Any], layout: str
) -> None:
    exact = {"precision": "float32", "memory_format": layout, "deterministic": True}
    results = [
        run(
            tmp_path / how,
            rounds=3,
            local_epochs=3,
            objective={"name": objective},
            augmentation=augmentation,
            compute={**exact, "compile": how},
        )
        for how in ("off", "graphs")
    ]
    assert results[0].params_sha256 == results[1].params_sha256
    assert results[0].records[-1]["loss"] == results[1].records[-1]["loss"]
    assert results[0].records[-1]["validation"] == results[1].records[-1]["validation"]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("objective", ["cfsl", "clsl"])
def test_steps_are_captured_with_compiled_losses_too(tmp_path: Path, objective: str) -> None:
    settings = {"objective": {"name": objective}, "augmentation": STILL, "local_epochs": 6}
    made = config(tmp_path, rounds=1, compute={"compile": "full"}, **settings)
    host = Host(made, tmp_path / "clients", ["north"])
    for round in range(2):
        answer = host.run("north", "train", round, Message(params=Params.of(host.bench.model)))
        assert answer.failure is None
    assert host.bench._graphs is not None and not host.bench._graphs.steps.gave_up
    assert len(host.bench._graphs.steps._captured) >= 2


def test_a_device_is_started_beside_the_work_only_where_one_gpu_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []
    monkeypatch.setattr(device.threading.Thread, "start", lambda thread: started.append(thread.name))
    device.start_device(ComputeSettings(device="cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device.start_device(ComputeSettings(device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    device.start_device(ComputeSettings(device="cuda", deterministic=True))
    assert started == []
    device.start_device(ComputeSettings(device="cuda"))
    assert started == ["start-device"]


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["keep", "reset"])
def test_a_gpu_trains_with_what_auto_chooses(tmp_path: Path, state: str) -> None:
    optimizer = {"learning_rate": 0.01, "state": state}
    result = run(tmp_path, rounds=3, local_epochs=4, optimizer=optimizer, compute={"device": "cuda"})
    assert result.records[-1]["lost"] == {}


@pytest.mark.gpu
def test_two_models_under_evaluation_at_once_do_not_mix(tmp_path: Path) -> None:
    made = config(tmp_path, rounds=1, compute={"compile": "graphs"})
    host = Host(made, tmp_path / "clients", ["north"])
    client, one = host.client("north"), Params.of(host.bench.model)
    two = one.map(lambda tensor: tensor * 0.5)
    alone = [[logits for logits, _ in client.predictions(client.data.train, params)] for params in (one, two)]
    for _ in range(4):  # from the third pass on they are captured
        together = zip(
            client.predictions(client.data.train, one),
            client.predictions(client.data.train, two),
            strict=True,
        )
        for number, (first, second) in enumerate(together):
            torch.testing.assert_close(first[0], alone[0][number], rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(second[0], alone[1][number], rtol=1e-2, atol=1e-2)
    assert host.bench._graphs is not None and host.bench._graphs.forwards._captured


def test_a_client_keeps_nothing_of_a_step_between_tasks(tmp_path: Path) -> None:
    made = config(tmp_path, rounds=1)
    host = Host(made, tmp_path / "clients", ["north"])
    start = Params.of(build_model(made))
    sizes = []
    for _ in range(3):
        host.client("north").fit(start)
        sizes.append(len(host.bench._references))
    assert sizes == [0, 0, 0]
    assert isinstance(host.client("north").data.train, TensorSplit)


def test_deterministic_is_asked_of_torch_on_a_gpu_alone() -> None:
    torch.use_deterministic_algorithms(False)  # a run before this one may have asked for it
    device.apply(Compute(torch.device("cpu"), deterministic=True))
    assert not torch.are_deterministic_algorithms_enabled()


def test_memory_that_runs_out_leaves_nothing_of_the_first_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SCAFFOLD adds up what its steps saw: those of an attempt that was given up do not count."""
    backward = Workbench.backward
    found = []
    for failing in (1, 3):
        count = 0

        def tight(self: Workbench, *rest: Any, failing: int = failing) -> torch.Tensor:
            nonlocal count
            count += 1
            if count == failing:
                raise torch.OutOfMemoryError("no room")
            return backward(self, *rest)

        monkeypatch.setattr(Workbench, "backward", tight)
        optimizer = {"name": "sgd", "learning_rate": 0.01}
        how = {"rounds": 1, "local_epochs": 3, "optimizer": optimizer, "method": {"name": "scaffold"}}
        found.append(run(tmp_path / str(failing), **how))
    assert found[0].params_sha256 == found[1].params_sha256
    assert (
        found[0].outcome.state.memory["control"].sha256() == found[1].outcome.state.memory["control"].sha256()
    )


def test_sgd_takes_a_parameter_whose_first_gradient_comes_late() -> None:
    """Prototypes of SwAV rest in the first epoch; the fused step would refuse the mixture."""
    results = []
    for fused in (True, False):
        first, second = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.9, fused=fused)
        for step in range(3):
            first.grad = torch.full((3,), 1.0 + step)
            second.grad = torch.full((3,), 2.0) if step else None
            optimizers.complete_momentum(optimizer)
            optimizer.step()
        results.append((first.detach(), second.detach()))
    torch.testing.assert_close(results[0], results[1])


def test_a_network_that_samples_is_sketched_like_any_other() -> None:
    stem = {"stem": "variational", "variational": {"eval_samples": 3}}
    assert load_config({"model": {"name": "unet2d", **stem}, "objective": {"name": "local_cl"}})
