"""The bank: everybody gives once, gets the others' part once, and nothing else travels."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Watcher, run, settings, spoil

import wardround as wr
from wardround.clients import Answer, Client
from wardround.engine.memory_store import MemoryStore
from wardround.messages import Message
from wardround.methods import METHODS
from wardround.methods.bank import Banked
from wardround.params import Params

NAMES = ["east", "north", "south"]
GIFT = 3 * 4  # bytes: three float32


@dataclass(frozen=True)
class Gift(Banked):
    """Gives three numbers, and trains as FedAvg. pooling: whether it gives; least: cases a giver needs."""

    title = "Gift"
    sends = "three numbers"
    pooling: bool = True
    least: int = 0

    def uses_bank(self) -> bool:
        return self.pooling

    def make_contribution(self, client: Client, message: Message) -> Params:
        if client.num_examples < self.least:
            return Params()
        return Params({"numbers": torch.full((3,), float(client.num_examples))})

    def train(self, client: Client, message: Message) -> Message:
        self.read_bank(client, message)
        return super().train(client, message)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS.own, "gift", Gift)


def gift(folder: Path, **changes: Any) -> Any:
    return run(folder, **{"method": {"name": "gift"}, "objective": {"name": "dice"}, **changes})


def fedavg(folder: Path, **changes: Any) -> Any:
    return run(folder, method={"name": "fedavg"}, objective={"name": "dice"}, **changes)


def setup(result: Any) -> dict[str, Any]:
    (exchange,) = json.loads((result.folder / "setup.json").read_text())["exchanges"]
    return dict(exchange)


def extra_bytes(result: Any) -> list[dict[str, int]]:
    """What each client was sent beyond the model, round by round."""
    model = result.outcome.state.params.num_bytes
    sent = [exchange["bytes_down"] for record in result.records for exchange in record["exchanges"]]
    return [{client: count - model for client, count in exchange.items()} for exchange in sent]


def kept(result: Any, client: str) -> Params:
    bank: Params = MemoryStore(result.folder / "clients" / client).load().get("bank", Params())
    return bank


def lost(client: str) -> Any:
    return lambda answer: Answer(client, failure="RuntimeError: boom")


def test_everybody_gives_once_and_gets_the_others_part_once(tmp_path: Path) -> None:
    result = gift(tmp_path, rounds=3)

    asked = setup(result)
    assert asked["task"] == "contribute"
    assert asked["bytes_down"] == dict.fromkeys(NAMES, 0) and asked["bytes_up"] == dict.fromkeys(NAMES, GIFT)
    assert extra_bytes(result) == [dict.fromkeys(NAMES, 2 * GIFT), *[dict.fromkeys(NAMES, 0)] * 2]
    assert all(e["task"] == "train" for record in result.records for e in record["exchanges"])
    for client in NAMES:
        assert list(kept(result, client)) == [f"{name}/numbers" for name in NAMES if name != client]
    assert result.params_sha256 == fedavg(tmp_path / "fedavg", rounds=3).params_sha256


def test_the_egress_ledger_names_the_contribution(tmp_path: Path) -> None:
    result = gift(tmp_path, rounds=1)
    lines = [json.loads(line) for line in (result.folder / "egress.jsonl").read_text().splitlines()]
    gifts = [line for line in lines if line["task"] == "contribute"]

    assert [line["client"] for line in gifts] == NAMES
    assert all(line["tensors"] == {"extras/bank/numbers": [3]} for line in gifts)


def test_a_client_lost_before_the_first_round_gives_nothing_but_receives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "east", lost("east"), "contribute")
    result = gift(tmp_path)

    assert extra_bytes(result)[0] == {"east": 2 * GIFT, "north": GIFT, "south": GIFT}
    assert list(kept(result, "north")) == ["south/numbers"]
    assert list(kept(result, "east")) == ["north/numbers", "south/numbers"]


def test_a_contribution_named_like_another_clients_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = Message(extras={"bank": Params({"north/numbers": torch.zeros(3)})})
    spoil(monkeypatch, "east", lambda answer: replace(answer, message=bad), "contribute")
    result = gift(tmp_path)

    assert list(result.outcome.state.memory["bank"]) == ["north", "south"]
    refused = json.loads((result.folder / "setup.json").read_text())["refused"]
    assert refused == {"contribute/east": "the contributed tensor 'north/numbers' has a / in its name"}


def test_a_contribution_of_nan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Message(extras={"bank": Params({"numbers": torch.full((3,), float("nan"))})})
    spoil(monkeypatch, "east", lambda answer: replace(answer, message=bad), "contribute")
    result = gift(tmp_path)

    assert list(result.outcome.state.memory["bank"]) == ["north", "south"]


def test_a_client_that_joins_later_receives_in_its_own_first_round(tmp_path: Path) -> None:
    result = gift(tmp_path, rounds=5, participation=0.5)
    seen: set[str] = set()

    assert setup(result)["bytes_up"] == dict.fromkeys(NAMES, GIFT)  # all give, whoever starts
    for sent in extra_bytes(result):
        assert sent == {client: 0 if client in seen else 2 * GIFT for client in sent}
        seen |= set(sent)
    assert seen == set(NAMES)


def test_a_client_nobody_knew_before_the_first_round_receives_everything() -> None:
    bank = {name: Params({"numbers": torch.zeros(3)}) for name in NAMES}

    assert list(Gift().collect_for("late", bank)) == [f"{name}/numbers" for name in NAMES]
    assert not Gift().collect_for("east", {"east": bank["east"]})


def test_a_client_whose_reply_was_lost_receives_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, "east", lost("east"))
    result = gift(tmp_path)

    assert [sent["east"] for sent in extra_bytes(result)] == [2 * GIFT, 2 * GIFT]
    assert [sent["north"] for sent in extra_bytes(result)] == [2 * GIFT, 0]


def test_the_off_switch_sends_nothing(tmp_path: Path) -> None:
    off = gift(tmp_path / "off", method={"name": "gift", "pooling": False})

    assert not (off.folder / "setup.json").exists()
    assert extra_bytes(off) == [dict.fromkeys(NAMES, 0)] * 2
    assert off.outcome.state.memory == {} and off.records[0]["warnings"] == []
    assert off.params_sha256 == fedavg(tmp_path / "fedavg").params_sha256


def test_a_bank_that_stays_empty_is_said_in_the_records(tmp_path: Path) -> None:
    result = gift(tmp_path, method={"name": "gift", "least": 1000})

    assert setup(result)["bytes_up"] == dict.fromkeys(NAMES, 0)
    assert extra_bytes(result) == [dict.fromkeys(NAMES, 0)] * 2
    for record in result.records:
        (warning,) = record["warnings"]
        assert warning.startswith("Gift: no client contributed before the first round")


def test_one_client_gives_and_has_nobody_to_get_from(tmp_path: Path) -> None:
    result = gift(tmp_path, data={"phantom": {"hospitals": 1, "size": 16, "cases": 8}})

    assert extra_bytes(result) == [{"north": 0}] * 2 and not kept(result, "north")


def test_a_resumed_run_neither_asks_nor_sends_again(tmp_path: Path) -> None:
    whole = gift(tmp_path / "whole", rounds=3)
    broken = settings(tmp_path / "broken", method={"name": "gift"}, objective={"name": "dice"}, rounds=3)
    with pytest.raises(KeyboardInterrupt):
        wr.run(broken, listener=Watcher(crash_in_round=2, crash_at="north"))
    resumed = wr.run(broken, resume=True)

    assert extra_bytes(resumed) == extra_bytes(whole)
    assert resumed.params_sha256 == whole.params_sha256
