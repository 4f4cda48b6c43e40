"""Parcels: what goes in comes out to the bit, and whatever else is offered is refused by name."""

import copy
import json
import math
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pytest import fixture, mark, raises

from deploy.loopback import ADDRESS
from wardround.config import TrafficSettings
from wardround.deploy.wire import SCHEMA, TYPES, Parcel, ParcelError, compute_sha256, pack, unpack
from wardround.messages import Message
from wardround.params import Params

LARGE = 10**8
ROUNDED = TrafficSettings(upload="delta_float16", compress="zlib")
EXACT = TrafficSettings(upload="delta", compress="zlib")


def message() -> Message:
    draw = torch.Generator().manual_seed(0)
    params = Params({"w": torch.randn(20, 30, generator=draw), "b": torch.zeros(200), "n": torch.tensor(4)})
    extras = {"control": Params({"w": torch.randn(2, generator=draw)}), "a/b": Params({"c": torch.ones(1)})}
    return Message(params, extras, {"a": 0.1, "cases": [{"hd95": math.inf, "name": "p1"}]})


def packed(traffic: TrafficSettings | None = None, base: Params | None = None) -> Parcel:
    return pack(message(), **ADDRESS, more={"num_examples": 5}, traffic=traffic, base=base)


def opened(parcel: Parcel, **changes: Any) -> tuple[Message, dict[str, Any]]:
    return unpack(parcel, **{**ADDRESS, "largest": LARGE, "unpacked": LARGE, **changes})


def tampered(
    parcel: Parcel, change: Callable[[dict[str, Any], dict[str, Any]], Any], seal: bool = True
) -> Parcel:
    """The parcel after `change(header, arrays)`, by someone who can or cannot mend the SHA-256."""
    header = copy.deepcopy(parcel.header)
    arrays = {name: np.array(array) for name, array in parcel.arrays.items()}
    change(header, arrays)
    if seal and "sha256" in header:
        header["sha256"] = compute_sha256(header, arrays)
    return Parcel(header, arrays)


def flown(parcel: Parcel) -> Parcel:
    """The parcel as an engine delivers it: its header as text, its arrays as copies."""
    return Parcel.read(parcel.text, {name: array.copy() for name, array in parcel.arrays.items()})


# Round trips


SHAPES = st.lists(st.integers(0, 4), max_size=3)
DTYPES = st.sampled_from(list(TYPES.values()))
NAMES = st.text(max_size=6)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Any bits at all, NaN of every kind included."""
    shape, dtype = draw(SHAPES), draw(DTYPES)
    count = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
    if dtype == torch.bool:
        raw = raw % 2
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


GROUPS = st.dictionaries(NAMES, tensors(), max_size=3).map(Params)
SCALARS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.builds(
    Message,
    params=st.none() | GROUPS,
    extras=st.dictionaries(NAMES, GROUPS, max_size=2),
    scalars=st.dictionaries(NAMES, SCALARS, max_size=3),
)


@hypothesis_settings(max_examples=150, deadline=None)
@given(MESSAGES, st.dictionaries(NAMES, SCALARS, max_size=2), st.sampled_from([None, EXACT]))
def test_any_message_comes_back_to_the_bit(sent: Message, more: dict[str, Any], traffic: Any) -> None:
    base = None if sent.optional_params is None else sent.params.map(torch.clone)
    parcel = flown(pack(sent, **ADDRESS, more=more, traffic=traffic, base=base))
    seen, facts = opened(parcel, base=base)
    assert list(seen.tensors()) == list(sent.tensors())
    assert all(list(seen.tensors()[label]) == list(group) for label, group in sent.tensors().items())
    assert seen.sha256() == sent.sha256()
    assert repr(seen.scalars) == repr(dict(sent.scalars))  # NaN is NaN, -0.0 is -0.0, 1.0 is not 1
    assert repr(facts) == repr(more)


@mark.parametrize("traffic", [None, EXACT, ROUNDED])
def test_every_upload_comes_back_and_says_how_large_it_was(traffic: TrafficSettings | None) -> None:
    sent = message()
    base = sent.params + 1e-4
    parcel = packed(traffic, base)
    seen, more = opened(flown(parcel), base=base)
    assert more == {"num_examples": 5}
    assert seen.params.spec("w") == sent.params.spec("w")
    assert torch.allclose(seen.params["w"], sent.params["w"], atol=1e-6)
    assert (seen.sha256() == sent.sha256()) == (traffic is not ROUNDED)
    assert parcel.num_bytes == len(parcel.text) + sum(array.nbytes for array in parcel.arrays.values())
    assert traffic is None or parcel.num_bytes < packed().num_bytes


def test_the_same_message_has_the_same_sha256_and_another_has_another() -> None:
    assert packed().sha256 == packed().sha256
    other = pack(message(), **{**ADDRESS, "round": 4}, more={"num_examples": 5})
    assert other.sha256 != packed().sha256
    swapped = Message(scalars={"b": 1, "a": 2}), Message(scalars={"a": 2, "b": 1})
    assert pack(swapped[0], **ADDRESS).sha256 == pack(swapped[1], **ADDRESS).sha256


def test_names_with_slashes_do_not_collide() -> None:
    extras = {"a": Params({"b/c": torch.zeros(1)}), "a/b": Params({"c": torch.ones(1)})}
    seen, _ = opened(flown(pack(Message(extras=extras), **ADDRESS)))
    assert seen.extras["a"]["b/c"] == 0 and seen.extras["a/b"]["c"] == 1


def test_tensors_on_the_host_travel_without_a_copy() -> None:
    sent = message()
    parcel = pack(sent, **ADDRESS)
    seen, _ = opened(parcel)
    assert parcel.arrays["params/w"].ctypes.data == sent.params["w"].data_ptr() == seen.params["w"].data_ptr()


def test_arrays_that_may_not_be_written_to_are_copied() -> None:
    parcel = flown(packed())
    for array in parcel.arrays.values():
        array.setflags(write=False)
    seen, _ = opened(parcel)
    seen.params["w"].zero_()
    assert parcel.arrays["params/w"].any()


def test_only_replies_heed_the_upload_options() -> None:
    request = pack(message(), **{**ADDRESS, "kind": "request"}, traffic=ROUNDED, base=message().params)
    assert opened(request, kind="request")[0].sha256() == message().sha256()
    assert not any("coding" in facts or "compress" in facts for facts in request.header["tensors"].values())
    score = pack(message(), **{**ADDRESS, "task": "score"}, traffic=ROUNDED, base=message().params)
    assert opened(score, task="score")[0].sha256() == message().sha256()


# What cannot be packed


@mark.parametrize(
    ("bad", "sentence"),
    [
        (Message(Params({"w": torch.zeros(1, dtype=torch.complex64)})), "tensor 'w' has type complex64"),
        (Message(scalars={"a": {1: 2}}), "'a' has a key of type int"),
        (Message(scalars={"a": torch.ones(1)}), "'a' holds a Tensor"),
        (Message(scalars={"a": b"x"}), "'a' holds a bytes"),
        (Message(scalars={"a": 10**5000}), "'a' holds an integer of more than 64 bits"),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_named(bad: Message, sentence: str) -> None:
    with raises(ParcelError, match=sentence):
        pack(bad, **ADDRESS)


def test_numpy_numbers_and_tuples_become_plain() -> None:
    seen, _ = opened(pack(Message(scalars={"a": np.float64(0.5), "b": (1, 2)}), **ADDRESS))
    assert seen.scalars == {"a": 0.5, "b": [1, 2]} and type(seen.scalars["a"]) is float


# What is refused


def change_header(field: str, value: Any) -> Any:
    return lambda header, arrays: header.update({field: value})


def change_tensor(field: str, value: Any, key: str = "params/w") -> Any:
    return lambda header, arrays: header["tensors"][key].update({field: value})


def change_array(function: Callable[[Any], Any], key: str = "params/w") -> Any:
    return lambda header, arrays: arrays.update({key: function(arrays[key])})


def rename(header: dict[str, Any], arrays: dict[str, Any]) -> None:
    arrays["params/v"] = arrays.pop("params/w")


def layout_twice(header: dict[str, Any], arrays: dict[str, Any]) -> None:
    header["layout"][0][1].append("w")


MUTATIONS: dict[str, tuple[Any, str]] = {
    "schema": (change_header("schema", "wardround-parcel-9"), "schema 'wardround-parcel-9', this wardround reads"),
    "no schema": (lambda h, a: h.pop("schema"), "schema 'None'"),
    "kind": (change_header("kind", "request"), "kind is 'request', expected 'reply'"),
    "odd kind": (change_header("kind", "gift"), "kind 'gift', not a request or a reply"),
    "run": (change_header("run", "cd34"), "run is 'cd34', expected 'ab12'"),
    "task": (change_header("task", "score"), "task is 'score', expected 'train'"),
    "round": (change_header("round", 2), "round is '2', expected '3'"),
    "round as text": (change_header("round", "3"), "round is 3, not a whole number"),
    "round as truth": (change_header("round", True), "round is True, not a whole number"),
    "client": (change_header("client", "south"), "client is 'south', expected 'north'"),
    "request": (change_header("request", "beef"), "request is 'beef', expected 'f00d'"),
    "request missing": (lambda h, a: h.pop("request"), "request is None, not text"),
    "unknown field": (change_header("code", "import os"), "unknown field 'code'"),
    "missing field": (lambda h, a: h.pop("more"), "lacks field 'more'"),
    "scalars a list": (change_header("scalars", [1]), "scalars are not a JSON object"),
    "tensors a list": (change_header("tensors", []), "tensors are not a JSON object"),
    "an object in the header": (change_header("more", {"x": object()}), "'x' holds a object"),
    "deep header": (change_header("more", {"x": json.loads("[" * 60 + "]" * 60)}), "nested more than 50 levels"),
    "layout a text": (change_header("layout", "params"), "layout is not a list of groups"),
    "layout of odd groups": (change_header("layout", [["memory", []]]), "layout is not a list of groups"),
    "layout with a number": (change_header("layout", [["params", [1]]]), "names a tensor 1, which is not text"),
    "layout names twice": (layout_twice, "names 'params/w' twice"),
    "layout group twice": (lambda h, a: h["layout"].append(["params", []]), "names a group twice"),
    "missing array": (lambda h, a: a.pop("params/w"), "tensor 'params/w' is missing"),
    "missing description": (lambda h, a: h["tensors"].pop("params/w"), "tensor 'params/w' is missing"),
    "extra array": (lambda h, a: a.update({"params/x": np.ones(2)}), "array 'params/x' is not in the header's layout"),
    "extra description": (lambda h, a: h["tensors"].update(x=1), "array 'x' is not in the header's layout"),
    "name": (rename, "tensor 'params/w' is missing"),
    "number as name": (lambda h, a: a.update({3: np.ones(2)}), "array whose name is 3, not text"),
    "odd description": (change_tensor("loader", "pickle"), "not described by its type and shape"),
    "declared shape": (change_tensor("shape", [30, 20]), r"declared with shape \(30, 20\), but its array has \(20, 30\)"),
    "negative shape": (change_tensor("shape", [-1, 30]), r"declares the invalid shape \[-1, 30\]"),
    "shape of text": (change_tensor("shape", ["20", 30]), "declares the invalid shape"),
    "array's shape": (change_array(lambda a: a.T), r"but its array has \(30, 20\)"),
    "declared type": (change_tensor("dtype", "float64"), "declared as type float64, but its array has float32"),
    "type there is not": (change_tensor("dtype", "object"), "declares the unknown type object"),
    "array's type": (change_array(lambda a: a.astype(np.int64)), "but its array has int64"),
    "byte order": (change_array(lambda a: a.astype(">f4")), "has type >f4, which cannot be sent"),
    "text array": (change_array(lambda a: np.array(["x"])), "has type <U1, which cannot be sent"),
    "records": (change_array(lambda a: np.zeros(2, dtype=[("a", "f4")])), "which cannot be sent"),
    "complex": (change_array(lambda a: a.astype(np.complex64)), "has type complex64, which cannot be sent"),
    "subclass": (change_array(lambda a: np.ma.masked_array(a)), "of type MaskedArray, not a NumPy array"),
    "list": (change_array(lambda a: [1.0]), "of type list, not a NumPy array"),
    "huge declared size": (change_tensor("shape", [2**17, 2**17]), "but its array has"),
    "coding": (change_tensor("coding", "rot13"), "unknown coding 'rot13'"),
    "coding of another type": (change_tensor("coding", "float16:float32"), "unknown coding 'float16:float32'"),
    "coding of an extra": (change_tensor("coding", "float16:float32", "extras/control/w"), "unknown coding"),
    "coding as number": (change_tensor("coding", 7), "unknown coding 7"),
    "compression": (change_tensor("compress", "bz2"), "unknown compression bz2"),
    "not compressed": (change_tensor("compress", "zlib"), "its array is not a row of bytes"),
}  # fmt: skip
UNSEALABLE = {"an object in the header", "list", "number as name"}


@mark.parametrize("name", MUTATIONS)
def test_a_changed_parcel_is_refused_by_name_even_if_its_sha256_was_mended(name: str) -> None:
    change, sentence = MUTATIONS[name]
    for seal in (False, True):
        with raises(ParcelError, match=sentence):
            opened(tampered(packed(), change, seal and name not in UNSEALABLE))


def flip(key: str) -> Any:
    def change(header: Any, arrays: Any) -> None:
        arrays[key].reshape(-1).view(np.uint8)[0] ^= 1

    return change


SILENT: dict[str, Any] = {
    "one bit of an array": flip("params/w"),
    "one bit of a counter": flip("params/n"),
    "a scalar": lambda h, a: h["scalars"].update(a=0.2),
    "a fact": lambda h, a: h["more"].update(num_examples=6),
    "the order of tensors": lambda h, a: h["layout"][0][1].reverse(),
    "two arrays changed places": lambda h, a: a.update({"extras/a%2Fb/c": np.zeros(1, np.float32)}),
    "the sum itself": change_header("sha256", "0" * 64),
    "a sum of another type": change_header("sha256", None),
}


@mark.parametrize("name", SILENT)
def test_a_change_that_fits_everything_else_is_seen_by_the_sha256(name: str) -> None:
    with raises(ParcelError, match="its SHA-256 does not match its content"):
        opened(tampered(packed(), SILENT[name], seal=False))


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_byte_changed_anywhere_is_refused(data: Any) -> None:
    parcel = packed()
    key = data.draw(st.sampled_from(sorted(parcel.arrays)))
    place = data.draw(st.integers(0, parcel.arrays[key].nbytes - 1))
    bits = data.draw(st.integers(1, 255))

    def change(header: Any, arrays: Any) -> None:
        arrays[key].reshape(-1).view(np.uint8)[place] ^= bits

    with raises(ParcelError, match="SHA-256"):
        opened(tampered(parcel, change, seal=False))


PLACES = [(field,) for field in packed().header]
PLACES += [("layout", 0), ("layout", 0, 1), ("tensors", "params/w"), ("tensors", "params/w", "shape")]


@hypothesis_settings(max_examples=100, deadline=None)
@given(SCALARS, st.sampled_from(PLACES))
def test_any_value_in_any_place_of_the_header_is_refused_in_a_sentence(value: Any, place: Any) -> None:
    target: Any = (parcel := packed()).header
    for part in place[:-1]:
        target = target[part]
    before, target[place[-1]] = target[place[-1]], value
    if repr(before) != repr(value):
        with raises(ParcelError):
            opened(parcel)


def test_a_parcel_over_the_cap_is_refused() -> None:
    parcel = packed()
    opened(parcel, largest=parcel.num_bytes)
    with raises(ParcelError, match=r"has [\d,]+ bytes, at most 3,000 are allowed"):
        opened(parcel, largest=3000)


def test_a_small_parcel_that_declares_much_is_refused_before_it_is_unpacked() -> None:
    sent = Message(Params({"w": torch.zeros(1_000_000)}))
    parcel = pack(sent, **ADDRESS, traffic=TrafficSettings(compress="zlib"))
    assert parcel.num_bytes < 100_000
    with raises(ParcelError, match=r"has 4,000,000 bytes unpacked, at most 1,000,000 are allowed"):
        opened(parcel, unpacked=1_000_000)
    with raises(
        ParcelError, match="'params/w' is compressed or recoded; only that of a reply to 'train' may"
    ):
        opened(parcel, unpacked=0)


def test_a_bomb_that_declares_little_is_refused() -> None:
    parcel = pack(
        Message(Params({"w": torch.zeros(1_000_000)})), **ADDRESS, traffic=TrafficSettings(compress="zlib")
    )
    for shape in ([10], [1_000_001]):
        with raises(ParcelError, match="does not decompress to the"):
            opened(tampered(parcel, change_tensor("shape", shape)))
    with raises(ParcelError, match="cannot be decompressed"):
        opened(tampered(parcel, flip("params/w")))
    with raises(ParcelError, match="not a row of bytes"):
        opened(tampered(parcel, change_tensor("shape", [0, 10])))
    with raises(ParcelError, match="more than 64 bits"):
        opened(Parcel({**parcel.header, "round": 10**30}, parcel.arrays))


def test_a_difference_to_a_model_that_was_not_sent_is_refused() -> None:
    base = message().params
    assert base is not None
    for traffic in (EXACT, ROUNDED):
        parcel = packed(traffic, base)
        for other in (None, base.without(["w"]), base.updated({"w": torch.zeros(3)})):
            with raises(ParcelError, match="'params/w' is a difference, but no such tensor was sent"):
                opened(parcel, base=other)


def test_truth_values_are_true_or_false() -> None:
    parcel = flown(pack(Message(Params({"m": torch.tensor([True, False])})), **ADDRESS))
    bad = tampered(parcel, change_array(lambda a: np.array([2, 0], dtype=np.uint8).view(bool), "params/m"))
    with raises(ParcelError, match="neither 0 nor 1"):
        opened(bad)


def test_a_site_refuses_what_is_not_finite_and_a_server_leaves_it_to_its_gate() -> None:
    odd = pack(Message(Params({"w": torch.tensor([1.0, math.nan])})), **ADDRESS)
    assert opened(odd)[0].optional_params is not None
    with raises(ParcelError, match="tensor 'w' holds NaN"):
        opened(odd, finite=True)
    with raises(ParcelError, match="scalar 'hd95' is inf"):
        opened(packed(), finite=True)


def test_a_header_that_is_no_json_object_is_refused() -> None:
    for text in ("{", "\x00", '{"a": 1} {'):
        with raises(ParcelError, match="not readable JSON"):
            Parcel.read(text, {})
    for text in ("[]", "3", "null", '"x"'):
        with raises(ParcelError, match="not a JSON object"):
            opened(Parcel.read(text, {}))
    with raises(ParcelError, match="is not text"):
        Parcel.read(b"{}", {})  # type: ignore[arg-type]
    with raises(ParcelError, match="are not a dictionary by name"):
        opened(Parcel(packed().header, [np.ones(1)]))  # type: ignore[arg-type]


def test_a_stranger_s_words_are_shown_short_and_printable() -> None:
    for nasty in ("\x1b[31m\n" * 100, "é" * 500):
        with raises(ParcelError) as caught:
            opened(tampered(packed(), change_header("run", nasty)))
        assert (
            len(str(caught.value)) < 200 and str(caught.value).isprintable() and str(caught.value).isascii()
        )


def test_a_site_may_leave_open_what_it_cannot_know() -> None:
    seen, _ = unpack(packed(), kind="reply", client="north", largest=LARGE)
    assert seen.sha256() == message().sha256()
    assert packed().header["schema"] == SCHEMA


# Pickles


class Marker:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "executed"


def offers(marker: Path) -> Mapping[str, Any]:
    content = pickle.dumps(Marker(marker))
    objects = np.empty(1, dtype=object)
    objects[0] = Marker(marker)
    return {
        "an object array": objects,
        "an object": Marker(marker),
        "bytes": content,
        "bytes in a void array": np.frombuffer(content, dtype=f"V{len(content)}"),
        "bytes in a text array": np.array([content]),
        "bytes as numbers": np.frombuffer(content, dtype=np.uint8),
    }


def test_the_marker_would_be_written_if_a_pickle_were_loaded(marker: Path) -> None:
    pickle.loads(pickle.dumps(Marker(marker)))  # noqa: S301
    assert marker.exists()


def test_a_pickle_offered_as_anything_is_refused_and_never_executes(marker: Path) -> None:
    for offer in offers(marker).values():
        for compress in (False, True):
            parcel = packed()
            arrays = {**parcel.arrays, "params/w": offer}
            header = copy.deepcopy(parcel.header)
            if compress:
                header["tensors"]["params/w"]["compress"] = "zlib"
            if type(offer) is np.ndarray and not offer.dtype.hasobject:
                header["sha256"] = compute_sha256(header, arrays)
            with raises(ParcelError):
                opened(Parcel(header, arrays))
        with raises(ParcelError):
            opened(Parcel({**packed().header, "more": {"x": offer}}, packed().arrays))
    assert not marker.exists()
