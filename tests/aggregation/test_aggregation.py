"""Rules that work in pieces give what they would give on whole models, in memory, on disk, on any threads."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import params
from pytest import MonkeyPatch, approx, mark
from torch import Tensor

from wardround.aggregation import mean as module
from wardround.aggregation.mean import Piece, layerwise_mean, map_pieces, mean, mean_at_once, split_pieces
from wardround.aggregation.robust import inner_products, squared_distances, trimmed_mean
from wardround.errors import CheckpointError
from wardround.messages import Message, Reply, ServerState
from wardround.methods import safcf
from wardround.params import Params

SIZES = [(), (1,), (7, 5), (0, 3), (3, 11, 13)]


def some(count: int, dtype: torch.dtype = torch.float32) -> list[Params]:
    draw = torch.Generator().manual_seed(count)
    return [
        Params(
            {f"w{k}": torch.randn(size, generator=draw).to(dtype) for k, size in enumerate(SIZES)}
            | {"n": torch.tensor(3 * index)}
        )
        for index in range(count)
    ]


def stored(folder: Path, items: list[Params]) -> list[Params]:
    found = []
    for number, item in enumerate(items):
        Message(params=item).save(folder / f"{number}.safetensors")
        found.append(Message.load(folder / f"{number}.safetensors").params)
    return found


def whole_mean(items: list[Params], weights: list[float]) -> dict[str, Tensor]:
    """The weighted mean as one would write it for whole models."""
    result = {}
    for name in items[0]:
        if not items[0][name].is_floating_point():
            result[name] = torch.stack([item[name] for item in items]).amax(dim=0)
            continue
        total = items[0][name].double() * weights[0]
        for item, weight in zip(items[1:], weights[1:], strict=True):
            total.add_(item[name].double(), alpha=weight)
        result[name] = total.to(items[0][name].dtype)
    return result


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: MonkeyPatch) -> Iterator[int]:
    """Small pieces for one and for two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(module, "PIECE", 16)
    monkeypatch.setattr(module, "WORTH_THREADS", 0)
    yield request.param
    torch.set_num_threads(before)


def test_pieces_cover_every_number_once() -> None:
    item = params(a=torch.arange(10.0).reshape(2, 5), none=torch.zeros(0), b=torch.tensor(7.0))

    found = split_pieces(item, item, 4)

    assert [(piece.name, piece.start, piece.stop) for piece in found] == [
        ("a", 0, 4),
        ("a", 4, 8),
        ("a", 8, 10),
        ("b", 0, 1),
    ]
    assert torch.equal(torch.cat([piece.of(item) for piece in found[:3]]), torch.arange(10.0))


def test_results_come_in_the_order_of_the_pieces(threads: int) -> None:
    found = [Piece("w", start, start + 1) for start in range(100)]

    assert map_pieces(lambda piece: piece.start, found) == list(range(100))


@mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mean_in_pieces_has_the_bytes_of_one_over_whole_models(
    dtype: torch.dtype, threads: int, tmp_path: Path
) -> None:
    items, weights = some(4, dtype), [0.5, 0.0, 0.3, 0.2]
    expected = Params(whole_mean(items, weights)).sha256()

    assert mean(items, weights).sha256() == expected
    assert mean(stored(tmp_path, items), weights).sha256() == expected


def test_pieces_of_the_usual_length_change_no_byte() -> None:
    draw = torch.Generator().manual_seed(0)
    items = [params(w=torch.randn(3 * module.PIECE + 5, generator=draw)) for _ in range(3)]

    assert torch.equal(mean(items, [0.2, 0.3, 0.5])["w"], whole_mean(items, [0.2, 0.3, 0.5])["w"])


def test_tensors_that_do_not_lie_row_by_row_are_averaged_alike(threads: int) -> None:
    plain = [params(w=torch.randn(2, 3, 4, 5)) for _ in range(3)]
    turned = [item.map(lambda t: t.contiguous(memory_format=torch.channels_last)) for item in plain]

    assert mean(turned).sha256() == mean(plain).sha256()


def test_weights_of_single_tensors_reach_their_pieces(threads: int) -> None:
    items = some(2)
    weights = {name: [1.0, 0.0] if name == "w2" else [0.0, 1.0] for name in items[0]}

    out = layerwise_mean(items, weights)

    assert torch.equal(out["w2"], items[0]["w2"]) and torch.equal(out["w4"], items[1]["w4"])


def test_stored_models_are_trimmed_and_compared_as_those_in_memory(threads: int, tmp_path: Path) -> None:
    items = some(5)
    kept, names = stored(tmp_path, items), [name for name in items[0] if name != "n"]

    trimmed, again = trimmed_mean(items, 1), trimmed_mean(kept, 1)
    assert trimmed[0].sha256() == again[0].sha256() and trimmed[1] == again[1]
    assert torch.equal(squared_distances(items, names), squared_distances(kept, names))


def test_distances_and_products_in_pieces_are_those_of_flat_vectors(threads: int, tmp_path: Path) -> None:
    items = some(4)
    names = tuple(name for name in items[0] if name != "n")
    rows = torch.stack([torch.cat([item[name].double().flatten() for name in names]) for item in items])
    state = ServerState(params=items[0], trainable=names)
    changes = rows - rows[0]

    apart = squared_distances(items, names)
    products = inner_products(state, [Reply(item) for item in stored(tmp_path, items)])

    assert apart.numpy() == approx(torch.cdist(rows, rows).square().numpy(), rel=1e-9, abs=1e-9)
    assert products.numpy() == approx((changes @ changes.T).numpy(), rel=1e-9, abs=1e-9)


def test_dswa_in_pieces_does_not_depend_on_threads_or_where_models_lie(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    items = [params(w=torch.randn(2 * module.WORTH_THREADS // 3, 2, generator=draw)) for _ in range(3)]
    shares, before, found = [0.2, 0.3, 0.5], torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found += [
                safcf.squared_distances(given, shares, ["w"]) for given in (items, stored(tmp_path, items))
            ]
    finally:
        torch.set_num_threads(before)

    centre = sum(share * item["w"].double() for share, item in zip(shares, items, strict=True))
    expected = [float((item["w"] - centre).square().sum()) for item in items]
    assert found[0][0].tolist() == approx(expected, rel=1e-12)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_equal_models_are_at_distance_exactly_zero(threads: int) -> None:
    one = some(1)[0]

    assert safcf.squared_distances([one] * 3, [0.3, 0.3, 0.4], ["w2", "w4"]).tolist() == [[0.0] * 3] * 2


def test_a_stored_tensor_is_read_in_parts(tmp_path: Path) -> None:
    whole = torch.arange(20, dtype=torch.int16).reshape(4, 5)
    (item,) = stored(tmp_path, [params(a=torch.tensor(True), w=whole)])

    assert item.part("w", 3, 9).tolist() == list(range(3, 9))
    assert torch.equal(item["w"], whole) and item["a"].item() is True
    assert item.device("w") == torch.device("cpu")


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    (item,) = stored(tmp_path, [params(w=torch.randn(100))])
    path = tmp_path / "0.safetensors"
    path.write_bytes(path.read_bytes()[:-8])

    assert item.part("w", 0, 10).numel() == 10
    with pytest.raises(CheckpointError, match=r"0\.safetensors, tensor 'w': file ends too early"):
        item.part("w", 90, 100)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        mean([item, item])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_mean_of_all_tensors_at_once_has_the_bytes_of_the_mean(dtype: torch.dtype) -> None:
    """A GPU forms it so."""
    draw = torch.Generator().manual_seed(5)
    shapes = {"a": (3, 5, 7), "b": (), "c": (70_000,), "d": (0, 4)}
    items = [
        Params({name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()})
        for _ in range(4)
    ]
    for weights in ([0.1, 0.2, 0.3, 0.4], [0.0, 0.5, 0.0, 0.5]):
        expected = mean(items, weights)
        found = mean_at_once(items, list(shapes), weights)
        assert all(torch.equal(found[name], expected[name]) for name in shapes)
        assert all(found[name].dtype == dtype and found[name].shape == shapes[name] for name in shapes)
