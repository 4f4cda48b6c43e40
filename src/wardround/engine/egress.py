"""egress.jsonl: one JSON line for each message that left a client."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from wardround.engine.records import append_lines, brief
from wardround.host_copy import HostCopy
from wardround.machine import cores
from wardround.messages import Reply, hash_content
from wardround.params import NamedTensors


class Egress:
    """The ledger of what left each client. Hashes are formed beside the training, in a few threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pool = ThreadPoolExecutor(min(4, cores()), thread_name_prefix="egress")
        self._pending: list[tuple[dict[str, Any], Future[str]]] = []
        self._from_files: list[Future[str]] = []  # hashes of replies that lie on the disk
        self._round = 0
        self._phase = "round"

    def begin(self, round: int, phase: str = "round") -> None:
        """Lines to come belong to this round; phase: "test" after the last one.

        Returns when replies that lie on the disk are hashed: their files go with the round.
        """
        wait(self._from_files)
        self._from_files = []
        self._round, self._phase = round, phase

    def record(self, task: str, reply: Reply) -> None:
        """Note a reply; its line is part of the next `take`."""
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "round": self._round,
            "phase": self._phase,
            "client": reply.client,
            "task": task,
            "bytes": reply.num_bytes,
            "num_examples": reply.num_examples,
            "scalars": {name: brief(value) for name, value in reply.scalars.items()}
            | {f"loss/{term}": value for term, value in reply.loss.items()},
            "tensors": {
                f"{label}/{name}": list(group.spec(name)[0])
                for label, group in reply.tensors().items()
                for name in group
            },
        }
        copies = {label: HostCopy(group) for label, group in reply.tensors().items()}
        digest = self._pool.submit(hash_reply, copies, reply.scalars)
        self._pending.append((line, digest))
        if any(group.is_stored for group in reply.tensors().values()):
            self._from_files.append(digest)

    def take(self) -> Callable[[], None]:
        """What writes the lines noted since the last call; another thread may run it."""
        pending, self._pending = self._pending, []

        def write() -> None:
            if pending:
                append_lines(self._path, [{**line, "sha256": digest.result()} for line, digest in pending])

        return write

    def close(self) -> None:
        self.take()()
        self._pool.shutdown()


def describe_fingerprint(client: str, content: bytes, num_examples: int) -> dict[str, Any]:
    """The line of a client's fingerprint, which leaves before the first round."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "round": 0,
        "phase": "round",
        "client": client,
        "task": "fingerprint",
        "bytes": len(content),
        "num_examples": num_examples,
        "scalars": {},
        "tensors": {},
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def hash_reply(copies: Mapping[str, HostCopy], scalars: Mapping[str, Any]) -> str:
    """SHA-256 of a reply whose tensors may be on a GPU."""
    return hash_content({label: NamedTensors(copy.get()) for label, copy in copies.items()}, scalars)
