"""What the engine costs beyond the training itself.

The same training twice in one run: as a plain PyTorch loop with a state-dict average, and through
`wardround.run` with everything it does besides (gate, ledger, records, checkpoints). Same model, same
data, same batches a client, no validation in either. Rounds of the two alternate in blocks, so that a
noisy machine disturbs both alike; the ratio of the medians counts.

    python benchmarks/engine_overhead.py            # 1.9 M parameters, 4 clients, 10 rounds
    python benchmarks/engine_overhead.py --large    # 20 M parameters, one batch a client
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import wardround as wr
from wardround.engine.host import Host, build_model
from wardround.losses.segmentation import dice_bce_loss


def settings(folder: Path, large: bool, rounds: int, threads: int) -> dict[str, Any]:
    # 60 % of the cases train: 40 a client (5 batches of 8), or 8 (one batch) for the large model
    return {
        "name": "overhead",
        "output": str(folder),
        "rounds": rounds,
        "batch_size": 8,
        "data": {"phantom": {"hospitals": 4, "size": 64, "cases": 14 if large else 67}},
        "model": {"name": "unet2d", "base_filters": 51 if large else 16, "levels": 5},
        "augmentation": {"flip": 0, "intensity": 0},
        "evaluate": {"every": 1000, "metrics": ["dice"], "overlays": 0},
        "compute": {"threads": threads, "device": "cpu"},
    }


def plain_rounds(config: wr.Config, host: Host, rounds: int) -> list[float]:
    """Federated averaging as one would write it in an afternoon."""
    model = build_model(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.optimizer.learning_rate)
    params = copy.deepcopy(model.state_dict())
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        states, sizes = [], []
        for name in host.names:
            split = host.client(name).data.train
            model.load_state_dict(params)
            optimizer.state.clear()
            model.train()
            for indices in torch.randperm(len(split)).split(config.batch_size):
                batch = split.batch(indices)
                optimizer.zero_grad()
                dice_bce_loss(model(batch.image), batch.label).backward()
                optimizer.step()
            states.append({key: value.clone() for key, value in model.state_dict().items()})
            sizes.append(len(split))
        total = sum(sizes)
        params = {
            key: sum(n / total * state[key] for n, state in zip(sizes, states, strict=True)) for key in params
        }
        seconds.append(time.perf_counter() - started)
    return seconds


class Clock:
    """Takes the time between the records of a run."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_start(self, config: wr.Config, first_round: int) -> None:
        self._last = time.perf_counter()

    def on_round(self, round: int, present: Any) -> None: ...

    def on_progress(self, client: str, step: int, steps: int) -> None: ...

    def on_record(self, record: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--large", action="store_true", help="20 M parameters, one batch a client")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=3, help="how often the two take turns")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    plain: list[float] = []
    ours: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        make = lambda number: settings(  # noqa: E731
            Path(folder) / str(number), options.large, options.rounds, options.threads
        )
        config = wr.load_config(make("plain"))
        names = ["east", "north", "south", "west"]
        host = Host(config, Path(folder) / "clients", names)
        for name in names:
            host.client(name)
        plain_rounds(config, host, 1)  # warm up
        for block in range(options.blocks):
            plain += plain_rounds(config, host, options.rounds)[1:]
            clock = Clock()
            wr.run(make(block), listener=clock)
            ours += clock.seconds[1:-1]  # the last round is followed by a validation
        parameters = sum(p.numel() for p in build_model(config).parameters())
    result = {
        "parameters": parameters,
        "clients": 4,
        "rounds": options.rounds * options.blocks,
        "batches_a_client": -(-len(host.client("north").data.train) // 8),
        "plain_seconds_a_round": statistics.median(plain),
        "wardround_seconds_a_round": statistics.median(ours),
        "ratio": statistics.median(ours) / statistics.median(plain),
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"U-Net, {parameters:,} parameters, 4 clients, {result['batches_a_client']} batches each, 64x64")
    print(f"plain loop   {result['plain_seconds_a_round']:.3f} s a round")
    print(f"wardround    {result['wardround_seconds_a_round']:.3f} s a round")
    print(f"ratio        {result['ratio']:.3f}")


if __name__ == "__main__":
    main()
