import torch
from helpers import params
from pytest import raises
from torch import nn

from wardround.params import Params


def test_arithmetic_acts_on_floating_tensors_and_leaves_integers() -> None:
    a = params(w=[1.0, 2.0], count=7)
    b = params(w=[3.0, 5.0], count=9)

    total = 2 * (a + b) / 4 - a * 0.5

    assert total["w"].tolist() == [1.5, 2.5]
    assert total["count"].item() == 7


def test_arithmetic_changes_neither_operand() -> None:
    a, b = params(w=[1.0]), params(w=[2.0])

    _ = a + b, a - b, -a, a * 3

    assert a["w"].item() == 1.0 and b["w"].item() == 2.0


def test_different_names_on_two_sides_are_named() -> None:
    with raises(KeyError, match="'b'"):
        _ = params(a=[1.0]) + params(a=[1.0], b=[1.0])


def test_only_without_and_updated_select_by_name() -> None:
    x = params(a=[1.0], b=[2.0])

    assert list(x.only(["b"])) == ["b"]
    assert list(x.without(["b"])) == ["a"]
    assert x.updated(params(b=[5.0], c=[9.0]))["b"].item() == 5.0
    assert "c" not in x.updated(params(c=[9.0]))


def test_params_of_a_model_are_a_copy() -> None:
    model = nn.BatchNorm2d(3)
    taken = Params.of(model)
    model.weight.data += 1

    assert taken["weight"].tolist() == [1.0, 1.0, 1.0]
    assert taken["num_batches_tracked"].dtype == torch.int64
    assert set(Params.trainable(model)) == {"weight", "bias"}


def test_loading_an_unknown_name_is_an_error() -> None:
    with raises(KeyError, match="no tensor 'oops'"):
        params(oops=[1.0]).load_into(nn.Linear(1, 1))


def test_the_hash_sees_names_types_shapes_and_values() -> None:
    base = params(w=[1.0, 2.0])

    assert base.sha256() == params(w=[1.0, 2.0]).sha256()
    different = [params(v=[1.0, 2.0]), params(w=[1.0, 2.5]), params(w=[[1.0, 2.0]])]
    different.append(params(w=torch.tensor([1.0, 2.0], dtype=torch.float64)))
    assert len({base.sha256(), *(other.sha256() for other in different)}) == 5


def test_num_bytes_counts_every_tensor() -> None:
    assert params(w=torch.zeros(2, 3), count=torch.tensor(1)).num_bytes == 24 + 8
