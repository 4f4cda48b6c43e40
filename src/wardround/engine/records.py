"""Lines of JSON: records.jsonl has one a round."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wardround.errors import CheckpointError
from wardround.files import jsonable, parse_json, write_text

if TYPE_CHECKING:  # reading lines must stay quick: these need torch
    from wardround.clients import Exchange
    from wardround.engine.judging.evaluation import Evaluation
    from wardround.messages import ServerState


def append_lines(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Add JSON lines and bring them to the disk."""
    text = "".join(json.dumps(jsonable(value), ensure_ascii=False) + "\n" for value in values)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say which file
        raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; a last one cut off by a crash is left out."""
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        found = [parse_json(line) for line in lines[:-1] if line]
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged line ({error}).") from None
    if not all(isinstance(line, dict) for line in found):
        raise CheckpointError(f"{path} has a damaged line (it is not a JSON object).")
    return found


def keep_lines(path: Path, keep: Callable[[Mapping[str, Any]], bool]) -> None:
    """Drop the lines of rounds that a resumed run will do again."""
    kept = [line for line in read_lines(path) if keep(line)]
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))


def round_record(
    state: ServerState,
    exchanges: Sequence[Exchange],
    *,
    warnings: Sequence[str],
    validation: Evaluation | None,
    best_round: int | None,
    strays: Sequence[tuple[str, str]],
    seconds: float,
    judging: Sequence[Exchange] = (),
) -> dict[str, Any]:
    """A round's line in records.jsonl. judging: exchanges of its validation; only missing replies count."""
    trained = [exchange for exchange in exchanges if exchange.task == "train"]
    record: dict[str, Any] = {
        "round": state.round,
        "clients": sorted({name for exchange in trained for name in exchange.bytes_down}),
        "loss": {name: loss for exchange in trained for name, loss in exchange.loss.items()},
        **state.notes,
    }
    private = {name: told for exchange in exchanges for name, told in exchange.privacy.items()}
    if private:
        record["privacy"] = private
    record["warnings"] = [*record.get("warnings", []), *warnings]
    if validation is not None:
        record["validation"] = validation.as_dict()
        record["best_round"] = best_round
    if strays:
        record["stray"] = [f"{name}: {reason}" for name, reason in strays]
    record["seconds"] = seconds
    return record | describe_exchanges(exchanges, judging)


def describe_exchanges(exchanges: Sequence[Exchange], judging: Sequence[Exchange] = ()) -> dict[str, Any]:
    """Time and bytes of each exchange, by client, and why replies are missing, also while judging."""
    keys = ("task", "seconds", "bytes_down", "bytes_up")
    shown = [{key: getattr(exchange, key) for key in keys} for exchange in exchanges]
    return {"exchanges": shown, **missing_replies([*exchanges, *judging])}


def missing_replies(exchanges: Sequence[Exchange]) -> dict[str, dict[str, str]]:
    """`refused` and `lost`: "task/client" -> reason."""
    return {
        kind: {
            f"{exchange.task}/{name}": reason
            for exchange in exchanges
            for name, reason in getattr(exchange, kind).items()
        }
        for kind in ("refused", "lost")
    }


def brief(value: Any) -> Any:
    """A number or text as it is; of a table only its size."""
    return f"{len(value)} entries" if isinstance(value, list | tuple | Mapping) else value
