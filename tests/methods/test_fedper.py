"""FedPer: which layers stay, what travels, clients that never trained, other networks."""

from pathlib import Path
from typing import Any

from helpers import config, own_tensors, personal_models, run
from pytest import fixture, mark, raises

from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.methods import build_method
from wardround.methods.fedper import FedPer
from wardround.models.base import Segmenter
from wardround.params import Params


def equal(a: Params, b: Params) -> bool:
    return a.sha256() == b.sha256()


@fixture(scope="module", params=["head", "decoder"])
def result(request: Any, tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    return run(folder, method={"name": "fedper", "layers": request.param})


# Which layers stay


def test_head_and_decoder_of_our_networks(tmp_path: Path) -> None:
    model = build_model(config(tmp_path))
    head, decoder = FedPer().kept(model), FedPer(layers="decoder").kept(model)

    assert head == ["head.weight", "head.bias"]
    assert set(head) < set(decoder)
    assert {name.split(".")[0] for name in decoder} == {"decoder", "head"}
    assert {name.split(".")[0] for name in FedPer(layers="decoder").shared(model)} == {"encoder"}


def test_a_stem_in_front_stays_common(tmp_path: Path) -> None:
    stem = {"name": "unet2d", "base_filters": 2, "levels": 2, "stem": "variational"}
    model = build_model(config(tmp_path, model=stem))

    assert FedPer().kept(model) == ["backbone.head.weight", "backbone.head.bias"]
    shared = FedPer(layers="decoder").shared(model)
    assert {name.split(".")[0] for name in shared} == {"stem", "backbone"}
    assert not any(part in name for name in shared for part in ("decoder.", "head."))


def test_the_head_of_a_monai_network_is_its_output_layer(tmp_path: Path) -> None:
    monai = {"name": "monai:BasicUNet", "arguments": {"features": [4] * 6}}
    model = build_model(config(tmp_path, model=monai))
    kept = FedPer().kept(model)

    assert isinstance(model, Segmenter) and len(kept) == 2
    assert all(model.state_dict()[name].shape[0] == model.num_outputs for name in kept)
    result = run(tmp_path / "run", model=monai, method={"name": "fedper"}, rounds=1)
    assert set(own_tensors(result, "north")) == set(kept)


def test_the_decoder_of_a_monai_network_runs_behind_its_encoder(tmp_path: Path) -> None:
    monai = {"name": "monai:BasicUNet", "arguments": {"features": [4] * 6}}
    model = build_model(config(tmp_path, model=monai, method={"name": "fedper", "layers": "decoder"}))
    kept = FedPer(layers="decoder").kept(model)
    assert {name.split(".")[1] for name in kept} == {"upcat_4", "upcat_3", "upcat_2", "upcat_1", "final_conv"}
    shared = FedPer(layers="decoder").shared(model)
    assert {name.split(".")[1] for name in shared} == {"conv_0", "down_1", "down_2", "down_3", "down_4"}


def test_a_network_whose_decoder_is_not_known_is_refused(tmp_path: Path) -> None:
    flat = {"name": "user_nets:Flat"}
    with raises(ConfigError, match="method.layers is 'decoder'.*'user_nets:Flat'.*Choose method.layers=head"):
        config(tmp_path, model=flat, method={"name": "fedper", "layers": "decoder"})
    with raises(ConfigError, match="TappedSegmenter"):
        FedPer(layers="decoder").shared(build_model(config(tmp_path, model=flat)))


# Rounds


def test_personal_layers_stay_and_the_rest_is_common(result: Any) -> None:
    state, models = result.outcome.state, personal_models(result)
    kept = build_method(result.config).kept(build_model(result.config))

    for name, model in models.items():
        assert equal(model.only(kept), own_tensors(result, name))
        assert equal(model.without(kept), state.params.without(kept))
    assert not equal(models["north"].only(kept), models["east"].only(kept))


def test_personal_layers_are_not_sent(result: Any) -> None:
    kept = own_tensors(result, "north")
    up = [size for r in result.records for e in r["exchanges"] for size in e["bytes_up"].values()]

    assert set(up) == {result.outcome.state.params.num_bytes - kept.num_bytes}
    first = Params.of(build_model(result.config))
    assert equal(result.outcome.state.params.only(kept), first.only(kept))  # the server never saw others


@mark.parametrize("layers", ["head", "decoder"])
def test_one_client_alone_trains_locally(layers: str, tmp_path: Path) -> None:
    one = {"phantom": {"hospitals": 1, "size": 16, "cases": 8}}
    fedper = run(tmp_path / "fedper", data=one, method={"name": "fedper", "layers": layers})
    local = run(tmp_path / "local", data=one, method={"name": "local"})

    assert equal(personal_models(fedper)["north"], personal_models(local)["north"])


def test_a_client_that_never_trained_uses_the_initial_layers_and_the_records_say_so(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method={"name": "fedper"}, participation=["north", "east"])

    first = Params.of(build_model(result.config)).only(FedPer().kept(build_model(result.config)))
    assert not own_tensors(result, "south")
    assert equal(personal_models(result)["south"].only(first), first)
    (warning,) = result.records[0]["warnings"]
    assert "a client that never took part is tested with the initial head" in warning


def test_with_everybody_there_is_nothing_to_warn_of(result: Any) -> None:
    assert all(not record["warnings"] for record in result.records)


def test_other_layers_are_refused(tmp_path: Path) -> None:
    with raises(ConfigError, match="method.layers"):
        config(tmp_path, method={"name": "fedper", "layers": "encoder"})
