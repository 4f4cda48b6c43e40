"""A federation small enough for every test: three hospitals, tiny images, a tiny U-Net."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from pytest import raises
from torch import Tensor, nn

import wardround as wr
from wardround.clients import Answer
from wardround.config import Config
from wardround.config_file import load_config
from wardround.data.opening import open_federation
from wardround.data.phantom.cases import PhantomSettings, make_client
from wardround.engine.host import Host
from wardround.engine.memory_store import MemoryStore
from wardround.messages import Message
from wardround.models.base import Segmenter
from wardround.params import Params

VECTORS = Path(__file__).parent / "vectors"
SHARED = (
    Path(__file__).resolve().parents[2] / "shared" / "data"
)  # real sets, where they lie beside the project


def vectors(name: str) -> dict[str, dict[str, Any]]:
    """The cases of a golden-number file, by name."""
    cases = json.loads((VECTORS / f"{name}.json").read_text())["cases"]
    return {case["name"]: case for case in cases}


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """A complete tiny run; keyword arguments replace whole sections."""
    return {
        "name": "tiny",
        "output": str(folder),
        "rounds": 2,
        "batch_size": 4,
        "data": {"phantom": {"hospitals": 3, "size": 16, "cases": 8}},
        "model": {"name": "unet2d", "base_filters": 2, "levels": 2},
        "optimizer": {"learning_rate": 0.01},
        "evaluate": {"metrics": ["dice"], "overlays": 0},
        "compute": {"threads": 1},
        **changes,
    }


def config(folder: Path, **changes: Any) -> Config:
    return load_config(settings(folder, **changes))


def run(folder: Path, **changes: Any) -> Any:
    return wr.run(settings(folder, **changes))


def spoil(monkeypatch: Any, client: str, change: Any, task: str = "train") -> None:
    """Let one client's answers pass through `change(answer)` before they reach the server."""
    honest = Host.run

    def dishonest(self: Host, name: str, asked: str, round: int, message: Any, *rest: Any) -> Answer:
        answer = honest(self, name, asked, round, message, *rest)
        return change(answer) if name == client and asked == task else answer

    monkeypatch.setattr(Host, "run", dishonest)


def params(**tensors: Any) -> Params:
    return Params({name: torch.as_tensor(value) for name, value in tensors.items()})


def own_tensors(result: Any, client: str) -> Params:
    """What a client of a run kept to itself."""
    memory = MemoryStore(result.folder / "clients" / client).load()
    return Params(memory.get("own", {}))


def personal_models(result: Any) -> dict[str, Params]:
    """The model each client of a run is judged with."""
    names = list(open_federation(result.config.data, result.config.seed).names)
    host = Host(result.config, result.folder / "clients", names)
    ask = Message(params=result.outcome.state.params)
    answers = {name: host.run(name, "personal_model", result.config.rounds, ask) for name in names}
    assert all(answer.failure is None for answer in answers.values())
    return {name: answer.message.extras["model"] for name, answer in answers.items()}


def four_cases(dimensions: int, size: int) -> tuple[Tensor, Tensor]:
    """Images and lesion masks, (4, 1, *spatial) each, of made-up cases that have a lesion."""
    made = PhantomSettings(hospitals=1, dimensions=dimensions, size=size, cases=12)
    split = make_client(made, "north", seed=0).train
    batch = split.batch([number for number in range(len(split)) if split.batch([number]).label.any()][:4])
    return batch.image, (batch.label > 0).float()[:, None]


def dice_after_fitting(
    model: Segmenter, image: Tensor, label: Tensor, *, steps: int, learning_rate: float
) -> float:
    """Train on the same cases again and again; their mean Dice in evaluation mode."""
    axes = tuple(range(1, image.dim()))

    def dice(mask: Tensor) -> Tensor:
        return (2 * (mask * label).sum(axes) / (mask + label).sum(axes)).mean()

    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        logits = model.train()(image)
        entropy = nn.functional.binary_cross_entropy_with_logits(logits, label)
        optimizer.zero_grad()
        loss = entropy + 1 - dice(logits.sigmoid())
        torch.stack([loss, *model.extra_losses(len(image)).values()]).sum().backward()
        optimizer.step()
    with torch.no_grad():
        return float(dice((model.eval()(image) > 0).float()))


def whole_and_resumed(folder: Path, **changes: Any) -> tuple[Any, Any]:
    """The same run twice: in one go, and resumed after a crash in its second round."""
    whole = run(folder / "whole", **changes)
    broken = settings(folder / "broken", **changes)
    with raises(KeyboardInterrupt):
        wr.run(broken, listener=Watcher(crash_in_round=2))
    return whole, wr.run(broken, resume=True)


class Stop(Exception):
    """Ends a run from inside, as a crash would."""


class Watcher:
    """A listener that can crash the run while a client of some round trains."""

    def __init__(self, crash_in_round: int | None = None, crash_at: str = "north") -> None:
        self.crash_in_round, self.crash_at = crash_in_round, crash_at
        self.round = 0
        self.rounds: list[list[str]] = []

    def on_start(self, config: Config, first_round: int) -> None: ...

    def on_round(self, round: int, present: Any) -> None:
        self.round = round
        self.rounds.append(list(present))

    def on_progress(self, client: str, step: int, steps: int) -> None:
        if self.round == self.crash_in_round and client == self.crash_at:
            raise KeyboardInterrupt  # the one exception a client's task does not turn into an answer

    def on_record(self, record: Any) -> None: ...


def call(monkeypatch: Any, capsys: Any, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and error output of `wardround ...`, run in this process."""
    from wardround import cli
    from wardround.cli import common

    monkeypatch.setattr(sys, "argv", ["wardround", *arguments])
    for console in (common.out, common.err):
        monkeypatch.setattr(console, "soft_wrap", True)
    with raises(SystemExit) as ended:
        cli.main()
        raise SystemExit(0)
    shown = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), shown.out, shown.err


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 4
    path.write_bytes(content)
