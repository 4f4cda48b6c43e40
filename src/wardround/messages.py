"""Message, Reply, ServerState: everything that is sent or kept between rounds.

A `Message` is the complete list of what can leave a hospital: model tensors (`params`), further
named tensors (`extras`) and numbers (`scalars`). On the wire and on disk it is one safetensors
file whose header carries the scalars as JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from wardround.errors import CheckpointError
from wardround.files import jsonable, parse_json
from wardround.params import NamedTensors, NoParams, Params
from wardround.storage import StoredTensors, save_tensors

SCHEMA = "wardround-message-1"


@dataclass(frozen=True)
class Message:
    """What travels between server and client.

    params: the shared model tensors, whose use raises where the message has none; extras: further tensors
    by name; scalars: numbers, strings, and lists or dictionaries of them.
    """

    params: Params = field(default_factory=NoParams)
    extras: Mapping[str, Params] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)

    def on_host(self) -> Message:
        """The same, with all tensors in the machine's own memory."""
        params = self.params if self.optional_params is None else self.params.to("cpu")
        return replace(self, params=params, extras={k: group.to("cpu") for k, group in self.extras.items()})

    @property
    def optional_params(self) -> Params | None:
        """The params, or None where the message has none."""
        return None if isinstance(self.params, NoParams) else self.params

    def merged(self, other: Message | None) -> Message:
        """This message with another laid over it (what one client gets beyond the rest)."""
        if other is None:
            return self
        return Message(
            params=self.params if other.optional_params is None else other.params,
            extras={**self.extras, **other.extras},
            scalars={**self.scalars, **other.scalars},
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors and of the scalars' JSON text."""
        tensors = sum(group.num_bytes for group in self.tensors().values())
        try:
            return tensors + (len(json.dumps(jsonable(self.scalars))) if self.scalars else 0)
        except ValueError:  # a number of thousands of digits, which the gate refuses
            return tensors

    def tensors(self) -> dict[str, Params]:
        """Every group of tensors by its label: "params", then each extra."""
        model = {} if self.optional_params is None else {"params": self.params}
        return model | {f"extras/{key}": extra for key, extra in self.extras.items()}

    def sha256(self) -> str:
        return hash_content(self.tensors(), self.scalars)

    # Disk

    def save(self, path: Path, *, durable: bool = True) -> None:
        flat: dict[str, Tensor] = {}
        layout: dict[str, list[str]] = {}
        for label, group in self.tensors().items():
            layout[label] = list(group)
            for name in group:
                flat[f"{label}/{name}"] = group[name]
        scalars = json.dumps(dict(self.scalars))
        metadata = {"schema": SCHEMA, "layout": json.dumps(layout), "scalars": scalars}
        save_tensors(path, flat, metadata, durable=durable)

    @classmethod
    def load(cls, path: Path) -> Message:
        """Open a stored message; its tensors are read when used."""
        stored = StoredTensors(path)
        if stored.metadata.get("schema") != SCHEMA:
            raise CheckpointError("this is not a wardround message, or one of another version.")
        try:
            layout = parse_json(stored.metadata["layout"])
            scalars = dict(parse_json(stored.metadata["scalars"]))
            groups = {label: Params(stored.under(f"{label}/", names)) for label, names in layout.items()}
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(f"a message has a damaged header ({error}).") from None
        params = groups.pop("params", NoParams())
        extras = {label.removeprefix("extras/"): group for label, group in groups.items()}
        return cls(params=params, extras=extras, scalars=scalars)


def hash_content(groups: Mapping[str, NamedTensors], scalars: Mapping[str, Any]) -> str:
    """SHA-256 of a message's groups of tensors and its scalars."""
    digest = hashlib.sha256()
    for label, group in groups.items():
        digest.update(f"[{label}]".encode())
        group.update_hash(digest)
    digest.update(json.dumps(jsonable(scalars), sort_keys=True).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Reply(Message):
    """A client's answer, after the gate has checked it.

    The engine fills in who answered and the counts; a method cannot.
    loss: what the training loop saw, by term; annotates: whether its labels say where each class is, empty
    where they say everything, all False where it trains on none.
    """

    client: str = ""
    num_examples: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    loss: Mapping[str, float] = field(default_factory=dict)
    annotates: tuple[bool, ...] = ()


@dataclass(frozen=True)
class ServerState:
    """What the server knows after a round.

    memory: what a method remembers between rounds (Params, numbers, strings, lists, dictionaries);
    notes: what this round should show in the records: weights by client, and their ingredients;
    trainable: names of the tensors that learn, the rest being buffers.
    """

    params: Params
    memory: Mapping[str, Any] = field(default_factory=dict)
    round: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)
    trainable: tuple[str, ...] = ()

    def next(
        self,
        params: Params | None = None,
        memory: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> ServerState:
        """The state after this round; what is not given stays (notes start empty)."""
        return replace(
            self,
            params=self.params if params is None else params,
            memory=self.memory if memory is None else memory,
            round=self.round + 1,
            notes=notes or {},
        )
