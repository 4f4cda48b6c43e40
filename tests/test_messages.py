import math
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from helpers import params
from pytest import mark, raises

from wardround.errors import CheckpointError, WardroundError
from wardround.files import file_name, jsonable
from wardround.messages import Message, ServerState
from wardround.params import Params
from wardround.storage import StoredTensors, save_tensors


def full_message() -> Message:
    return Message(
        params=params(w=torch.randn(3, 2), n=torch.tensor(4)),
        extras={"control": params(w=torch.zeros(3, 2)), "a/b": params(x=torch.ones(1))},
        scalars={"gap": -0.25, "cases": [{"dice": 1.0}], "none": None, "inf": math.inf},
    )


def test_a_message_survives_the_disk(tmp_path: Path) -> None:
    message = full_message()
    message.save(tmp_path / "m.safetensors")
    back = Message.load(tmp_path / "m.safetensors")

    assert torch.equal(back.params["w"], message.params["w"])
    assert back.params["n"].dtype == torch.int64
    assert set(back.extras) == {"control", "a/b"}
    assert back.scalars == message.scalars
    assert back.sha256() == message.sha256()


def test_a_stored_message_knows_shapes_without_reading(tmp_path: Path) -> None:
    message = full_message()
    path = tmp_path / "m.safetensors"
    message.save(path)
    loaded = Message.load(path)
    path.write_bytes(path.read_bytes()[:-4])  # the tensors are damaged now, the header is not

    assert loaded.params.spec("w") == ((3, 2), torch.float32)
    assert loaded.num_bytes == message.num_bytes


@mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"\x08\x00\x00\x00\x00\x00\x00\x00[1, 2]  "])
def test_a_damaged_message_is_named_and_nothing_else_happens(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)

    with raises(CheckpointError, match=re.escape(str(path))):
        Message.load(path)


def test_a_tensor_file_that_is_no_message_is_refused(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x.safetensors", {"w": torch.ones(1)}, {})

    with raises(CheckpointError, match="not a wardround message"):
        Message.load(tmp_path / "x.safetensors")


def test_a_truncated_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"w": torch.ones(100)}, {})
    path.write_bytes(path.read_bytes()[:-8])

    with raises(CheckpointError, match="'w'"):
        StoredTensors(path)["w"]


def test_merging_lays_one_clients_part_over_the_common_one() -> None:
    common = Message(params=params(w=[1.0]), scalars={"a": 1, "b": 2})

    assert common.merged(None) is common
    merged = common.merged(Message(scalars={"b": 3}))
    assert merged.params is common.params
    assert merged.scalars == {"a": 1, "b": 3}


def test_using_the_params_of_a_message_without_any_says_so(tmp_path: Path) -> None:
    message = Message(scalars={"a": 1})
    message.save(tmp_path / "m.safetensors")

    assert message.optional_params is None and Message(params(w=[1.0])).optional_params is not None
    assert message == Message(scalars={"a": 1}) != Message(params(w=[1.0]), scalars={"a": 1})
    assert Message.load(tmp_path / "m.safetensors") == replace(message) == deepcopy(message)
    for use in (len, list, bool, Params.sha256, Params.zeros, lambda p: p["w"], lambda p: p.spec("w")):
        with raises(WardroundError, match="the message has no params"):
            use(message.params)


def test_the_next_state_keeps_what_is_not_given() -> None:
    state = ServerState(params(w=[1.0]), memory={"c": 1}, notes={"old": 1})

    after = state.next(params=params(w=[2.0]))

    assert after.round == 1 and after.memory == {"c": 1} and after.notes == {}
    assert state.next(memory={"c": 2}).params is state.params


@mark.parametrize(
    "name", ["../../etc/passwd", "a b", "<script>", "x" * 300, "", "é", "נורת'", "a/b", ".hidden"]
)
def test_any_name_becomes_a_harmless_file_name(name: str) -> None:
    made = file_name(name)

    assert "/" not in made and not made.startswith(".") and 0 < len(made) < 80
    assert made.isascii()


def test_different_names_get_different_files() -> None:
    assert file_name("a/b") != file_name("a_b") != file_name("a b")
    assert file_name("north") == "north"


def test_non_finite_numbers_are_written_as_words() -> None:
    assert jsonable({"a": [math.nan, math.inf, -math.inf, 1.5], "p": Path("x")}) == {
        "a": ["nan", "inf", "-inf", 1.5],
        "p": "x",
    }


def test_files_are_plain_safetensors_for_the_librarys_own_reader(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    tensors = {
        "flag": torch.tensor([True, False, True]),
        "half": torch.randn(3, dtype=torch.bfloat16),
        "wide": torch.randn(2, 2, dtype=torch.float64),
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 4),
        "odd": torch.arange(5, dtype=torch.uint8),
    }
    tensors["twin"] = tensors["wide"]
    save_tensors(tmp_path / "ours.safetensors", tensors, {"who": "wardround"})
    save_file({k: v.clone() for k, v in tensors.items()}, tmp_path / "theirs.safetensors")

    theirs = load_file(tmp_path / "ours.safetensors")
    ours = StoredTensors(tmp_path / "theirs.safetensors")
    for name, tensor in tensors.items():
        for read in (theirs[name], ours[name], StoredTensors(tmp_path / "ours.safetensors")[name]):
            assert torch.equal(read, tensor) and read.dtype == tensor.dtype and read.shape == tensor.shape
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata() == {"who": "wardround"}
