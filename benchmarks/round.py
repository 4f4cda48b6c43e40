"""A whole federated round on a GPU, against a plain loop with everything in memory.

3D U-Net with 19.1 M parameters, 4 clients of 23 volumes (32x48x32), batch 4, one epoch a round, bfloat16 and
channels last in all. In one process, one after the other:

- eager: federated averaging as one would write it in an afternoon, on the device;
- recorded: the same, every step one CUDA graph (forward, loss, gradients, optimizer), the fastest plain loop;
- pfl: Apple's pfl-research, where it is installed (`pip install pfl`);
- wardround: `wardround.run` with checkpoints, ledger, gate and records on, from one record to the next.

`keep` means that every client's optimizer goes on with its moments of the round before. Means over rounds
after the first ones count, so that a round which waits for the disk shows.

    python benchmarks/round.py                 # one GPU, about a minute
    python benchmarks/round.py --small         # a small network, also on the CPU
    python benchmarks/round.py --profile       # what the main thread does, by function
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wardround as wr
from wardround.data.in_memory import open_in_memory
from wardround.engine.networks import network_for
from wardround.engine.outcome import SilentListener
from wardround.losses.segmentation import dice_loss
from wardround.training.learner import to_channels_last

NAMES = ["east", "north", "south", "west"]
BATCH, SKIPPED = 4, 8


def make_cases(shape: tuple[int, ...], count: int) -> dict[str, Any]:
    """Noise with a ball in it."""
    grid = torch.meshgrid(*[torch.linspace(-1, 1, side) for side in shape], indexing="ij")
    ball = (torch.stack(grid).square().sum(0) < 0.3).long()
    draw = torch.Generator().manual_seed(1)

    def some(number: int) -> list[tuple[Tensor, Tensor]]:
        return [(torch.randn(1, *shape, generator=draw) + ball, ball) for _ in range(number)]

    return {name: {"train": some(count), "val": some(2), "test": some(2)} for name in NAMES}


def settings(folder: Path, options: argparse.Namespace, state: str) -> dict[str, Any]:
    return {
        "name": "round",
        "output": str(folder),
        "rounds": options.rounds,
        "batch_size": BATCH,
        "model": {"name": "unet3d", **({"base_filters": 4, "levels": 3} if options.small else {})},
        "objective": {"name": "dice"},
        "optimizer": {"name": "adam", "learning_rate": 1e-3, "state": state},
        "augmentation": {"flip": 0, "intensity": 0},
        "evaluate": {"every": 1000, "metrics": ["dice"], "overlays": 0, "calibrate": False},
        "compute": {"workers": 1},
    }


# Plain loops


class Plain:
    """Federated averaging with everything on the device."""

    def __init__(self, model: nn.Module, cases: Mapping[str, Any], device: torch.device) -> None:
        self.device = device
        self.model = model.to(device).train()
        for parameter in self.model.parameters():
            parameter.data = to_channels_last(parameter.data)
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True, capturable=on_gpu)
        self.data = {
            name: (
                to_channels_last(torch.stack([image for image, _ in own["train"]]).to(device)),
                torch.stack([label for _, label in own["train"]]).to(device),
            )
            for name, own in cases.items()
        }
        self.state = [tensor.detach().clone() for tensor in self.model.state_dict().values()]
        self.moments: dict[str, list[Tensor]] = {}

    def step(self, image: Tensor, label: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.model(image)
        dice_loss(logits.float(), label).backward()
        self.optimizer.step()

    def slots(self) -> list[Tensor]:
        """The optimizer's moments and counters."""
        return [value for state in self.optimizer.state.values() for value in state.values()]

    def run_round(self, keep: bool) -> None:
        live, received = list(self.model.state_dict().values()), []
        for name, (images, labels) in self.data.items():
            torch._foreach_copy_([tensor.detach() for tensor in live], self.state)
            if self.slots() and keep and name in self.moments:
                torch._foreach_copy_(self.slots(), self.moments[name])
            elif self.slots():
                torch._foreach_zero_(self.slots())
            for indices in torch.randperm(len(images), device=self.device).split(BATCH):
                self.step(images[indices], labels[indices])
            received.append([tensor.detach().clone() for tensor in live])
            if keep:
                self.moments[name] = [slot.clone() for slot in self.slots()]
        total = [tensor.double() if tensor.is_floating_point() else tensor for tensor in received[0]]
        for others in received[1:]:
            torch._foreach_add_(total, others)
        self.state = [
            (tensor / len(received)).to(old.dtype) for tensor, old in zip(total, received[0], strict=True)
        ]


class Recorded(Plain):
    """The same, each step launched as one CUDA graph, captured once for each batch size."""

    def __init__(self, model: nn.Module, cases: Mapping[str, Any], device: torch.device) -> None:
        super().__init__(model, cases, device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._steps = 0

    def step(self, image: Tensor, label: Tensor) -> None:
        self._steps += 1
        if self._steps <= 12:  # libraries choose their algorithms
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                super().step(image, label)
            torch.cuda.current_stream().wait_stream(side)
            return
        if len(image) not in self._graphs:
            held, truth = to_channels_last(image.clone()), label.clone()
            before = [tensor.clone() for tensor in (*self.model.state_dict().values(), *self.slots())]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                super().step(held, truth)
            torch._foreach_copy_(
                [t.detach() for t in (*self.model.state_dict().values(), *self.slots())], before
            )
            self._graphs[len(image)] = (graph, held, truth)
        graph, held, truth = self._graphs[len(image)]
        held.copy_(image)
        truth.copy_(label)
        graph.replay()


def time_rounds(loop: Plain, keep: bool, rounds: int) -> list[float]:
    seconds, device = [], loop.device
    for _ in range(rounds):
        started = time.perf_counter()
        loop.run_round(keep)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds[SKIPPED:]


# wardround


class Clock(SilentListener):
    """Notes when each round was recorded."""

    def __init__(self, profile: cProfile.Profile | None) -> None:
        self.times: list[float] = []
        self._profile = profile

    def on_record(self, record: Mapping[str, Any]) -> None:
        self.times.append(time.perf_counter())
        if self._profile is not None and len(self.times) == SKIPPED:
            self._profile.enable()


def our_seconds(
    folder: Path, options: argparse.Namespace, cases: Mapping[str, Any], state: str
) -> list[float]:
    profile = cProfile.Profile() if options.profile else None
    clock = Clock(profile)
    wr.run(settings(folder, options, state), data=cases, listener=clock)
    if profile is not None:
        profile.disable()
        for order in ("cumulative", "tottime"):
            pstats.Stats(profile).sort_stats(order).print_stats(45)
    times = clock.times[SKIPPED - 1 :]
    print((folder / "environment.json").read_text() if options.profile else "", end="")
    return [after - before for before, after in itertools.pairwise(times)]


def pfl_seconds(model: nn.Module, cases: Mapping[str, Any], device: torch.device, rounds: int) -> list[float]:
    """pfl-research's federated averaging of the same network and cases."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = model.to(device)

        def loss(self, image: Tensor, label: Tensor, eval: bool = False) -> Tensor:
            self.train(not eval)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                logits = self.network(to_channels_last(image))
            return dice_loss(logits.float(), label)

        def metrics(self, image: Tensor, label: Tensor, eval: bool = True) -> dict[str, Any]:
            return {"loss": Weighted(float(self.loss(image, label, eval=eval)) * len(image), len(image))}

    users = {
        name: Dataset(
            (
                torch.stack([image for image, _ in own["train"]]).to(device),
                torch.stack([label for _, label in own["train"]]).to(device),
            )
        )
        for name, own in cases.items()
    }
    order = itertools.cycle(NAMES)
    times: list[float] = []

    class Stop(TrainingProcessCallback):
        def after_central_iteration(self, *arguments: Any, **more: Any) -> Any:
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            return False, more.get("aggregate_metrics") or type(arguments[0])()

    network = Network()
    wrapped = PyTorchModel(
        model=network,
        local_optimizer_create=lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, fused=True),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    federated = FederatedDataset(lambda name: users[name], order.__next__)
    backend = SimulatedBackend(training_data=federated, val_data=federated)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**6,
            train_cohort_size=len(NAMES),
            val_cohort_size=0,
        ),
        backend=backend,
        model=wrapped,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=1e-3, local_batch_size=BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=BATCH),
        callbacks=[Stop()],
    )
    times = times[SKIPPED - 1 :]
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--states", nargs="+", default=["reset", "keep"])
    parser.add_argument("--folder", type=Path, help="where runs are written; default: a temporary folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, count = ((16, 16, 16), 8) if options.small else ((32, 48, 32), 23)
    cases = make_cases(shape, count)
    config = wr.load_config(settings(Path("unused"), options, "reset"))
    federation = open_in_memory(cases, config.seed)
    found: dict[str, float] = {}

    def note(name: str, seconds: list[float]) -> None:
        found[name] = statistics.mean(seconds)
        print(f"{name:20s} {found[name]:.4f} s a round, median {statistics.median(seconds):.4f}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        home = options.folder or Path(folder)
        for state in options.states:
            loops = {"eager": Plain, **({"recorded": Recorded} if device.type == "cuda" else {})}
            for name, kind in loops.items():
                loop = kind(network_for(config, federation), cases, device)
                note(f"{name} {state}", time_rounds(loop, state == "keep", options.rounds))
                del loop
            note(f"wardround {state}", our_seconds(home / state, options, cases, state))
            base = found.get(f"recorded {state}", found[f"eager {state}"])
            found[f"ratio {state}"] = found[f"wardround {state}"] / base
            print(f"ratio {state:14s} {found[f'ratio {state}']:.3f}")
        try:
            note("pfl reset", pfl_seconds(network_for(config, federation), cases, device, options.rounds))
        except ImportError:
            print("pfl is not installed")
    if options.json:
        print(json.dumps({"ratio": found[f"ratio {options.states[0]}"], **found}))


if __name__ == "__main__":
    main()
