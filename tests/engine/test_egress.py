import json
import time
from pathlib import Path
from typing import Any

import torch
from helpers import run
from pytest import MonkeyPatch, mark

from wardround.engine import egress
from wardround.host_copy import HostCopy
from wardround.messages import Message
from wardround.params import Params
from wardround.storage import StoredTensors


@mark.parametrize("workers", [1, 2])
def test_a_reply_on_disk_stays_until_it_is_hashed(
    tmp_path: Path, monkeypatch: MonkeyPatch, workers: int
) -> None:
    """On a busy machine a hash may be formed when the next round has begun."""
    expected = run(tmp_path / "usual", compute={"threads": 1})
    hash_reply = egress.hash_reply

    def hash_late(*arguments: Any) -> str:
        time.sleep(0.1)
        return hash_reply(*arguments)

    monkeypatch.setattr(egress, "hash_reply", hash_late)
    result = run(tmp_path / "run", compute={"threads": 1, "memory": 0, "workers": workers})

    assert result.params_sha256 == expected.params_sha256
    hashes = [
        sorted(json.loads(line)["sha256"] for line in (folder / "egress.jsonl").read_text().splitlines())
        for folder in (tmp_path / "usual", tmp_path / "run")
    ]
    assert hashes[0] == hashes[1]


def test_a_stored_reply_is_not_read_before_it_is_hashed(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """The thread that trains would wait for the disk."""
    message = Message(params=Params({"w": torch.ones(3)}))
    message.save(tmp_path / "reply.safetensors")
    stored = Message.load(tmp_path / "reply.safetensors")
    reads: list[str] = []
    part = StoredTensors.part
    monkeypatch.setattr(StoredTensors, "part", lambda s, n, *a: reads.append(n) or part(s, n, *a))

    copy = HostCopy(stored.params)
    assert reads == []
    assert egress.hash_reply({"params": copy}, {}) == message.sha256()
    assert reads == ["w"]
