"""FedBN: which tensors stay, what unseen clients get, networks without batch norm, MONAI's networks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers import config, own_tensors, personal_models, run, spoil
from pytest import MonkeyPatch, fixture, mark, raises
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from wardround.aggregation.mean import mean
from wardround.clients import Answer
from wardround.engine.host import Host
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.methods.fedbn import FedBN
from wardround.params import Params

BATCH = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}
UNEVEN = {"phantom": {"hospitals": 3, "size": 16, "cases": [6, 8, 12]}}
MONAI: dict[str, dict[str, Any]] = {
    "monai:UNet": {"channels": [4, 8], "strides": [2], "norm": "batch"},
    "monai:BasicUNet": {"features": [4] * 6, "norm": "batch"},
}


def trained(folder: Path, **changes: Any) -> Any:
    return run(folder, **{"method": {"name": "fedbn"}, "model": BATCH, "data": UNEVEN, **changes})


def equal(a: Params, b: Params) -> bool:
    return a.sha256() == b.sha256()


@fixture(scope="module")
def result(tmp_path_factory: Any) -> Any:
    return trained(tmp_path_factory.mktemp("fedbn") / "run")


# Which tensors stay


@mark.parametrize("name", ["unet2d", "unet2d_fedevi", "unet3d"])
def test_our_networks_keep_exactly_their_batch_norm_layers(name: str, tmp_path: Path) -> None:
    dimensions = 3 if name == "unet3d" else 2
    data = {"phantom": {"hospitals": 2, "size": 16, "cases": 3, "dimensions": dimensions}}
    model = build_model(config(tmp_path, model={**BATCH, "name": name}, data=data))
    kept = FedBN().kept(model)

    num_layers = sum(isinstance(module, _BatchNorm) for module in model.modules())
    assert len(kept) == 5 * num_layers > 0  # weight, bias, running mean and variance, counter
    assert all(".norm." in tensor for tensor in kept)
    assert sorted([*kept, *FedBN().shared(model)]) == sorted(model.state_dict())


@mark.parametrize("name", MONAI)
def test_monais_batch_norm_is_found_by_type(name: str, tmp_path: Path) -> None:
    model = build_model(config(tmp_path, model={"name": name, "arguments": MONAI[name]}))
    kept = FedBN().kept(model)

    assert kept and not any("bn" in tensor for tensor in kept)  # the authors' rule would have kept nothing
    layers = {tensor.rpartition(".")[0] for tensor in kept}
    assert all(isinstance(model.get_submodule(layer), _BatchNorm) for layer in layers)
    assert len(layers) == sum(isinstance(module, _BatchNorm) for module in model.modules())


@mark.parametrize("name", MONAI)
def test_monais_networks_train(name: str, tmp_path: Path) -> None:
    result = trained(
        tmp_path / "run",
        model={"name": name, "arguments": MONAI[name]},
        rounds=1,
        optimizer={"learning_rate": 0.01},
    )

    north, east = own_tensors(result, "north"), own_tensors(result, "east")
    assert set(north) == set(FedBN().kept(build_model(result.config)))
    assert not equal(north, east)


def test_a_batch_norm_inside_a_sequential_stays() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(nn.BatchNorm2d(2), nn.GroupNorm(1, 2)))

    assert FedBN().shared(model) == ["0.weight", "0.bias", "1.1.weight", "1.1.bias"]
    assert FedBN(norm_types=("batch", "group")).shared(model) == ["0.weight", "0.bias"]


# Rounds


def test_norm_tensors_stay_at_the_clients_and_the_rest_is_common(result: Any) -> None:
    state, models = result.outcome.state, personal_models(result)
    kept = FedBN().kept(build_model(result.config))

    for name, model in models.items():
        assert equal(model.only(kept), own_tensors(result, name))
        assert equal(model.without(kept), state.params.without(kept))
    assert not equal(models["north"].only(kept), models["east"].only(kept))


def test_the_server_holds_the_weighted_mean_of_the_norm_tensors(result: Any) -> None:
    weights = result.records[-1]["weights"]
    expected = mean([own_tensors(result, name) for name in weights], list(weights.values()))

    assert len(set(weights.values())) > 1
    assert equal(result.outcome.state.params.only(expected), expected)


def test_the_mean_of_norm_tensors_never_reaches_a_client_that_trained(tmp_path: Path) -> None:
    """Training goes on from a client's own statistics: with a rate of 0 they drift as if it were alone."""
    still = {"name": "sgd", "learning_rate": 0.0}
    together = trained(tmp_path / "together", optimizer=still, rounds=3)
    alone = trained(tmp_path / "alone", optimizer=still, rounds=3, method={"name": "local"})

    for name in ("north", "east", "south"):
        theirs = personal_models(alone)[name].only(own_tensors(together, name))
        assert equal(own_tensors(together, name), theirs)


def test_one_client_alone_trains_locally(tmp_path: Path) -> None:
    one = {"phantom": {"hospitals": 1, "size": 16, "cases": 8}}
    fedbn = trained(tmp_path / "fedbn", data=one)
    local = trained(tmp_path / "local", data=one, method={"name": "local"})

    assert equal(personal_models(fedbn)["north"], personal_models(local)["north"])
    assert equal(personal_models(fedbn)["north"], fedbn.outcome.state.params)


def test_norm_tensors_that_do_not_fit_are_refused_and_the_rest_go_on(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def short(answer: Answer) -> Answer:
        norm = answer.message.extras["norm"]
        fewer = {"norm": norm.only(list(norm)[:2])}
        return replace(answer, message=replace(answer.message, extras=fewer))

    spoil(monkeypatch, "east", short)
    result = trained(tmp_path / "run")

    assert all("is missing" in record["refused"]["train/east"] for record in result.records)


# Clients that never trained


def test_an_unseen_client_gets_the_mean_of_the_others_norm_tensors(tmp_path: Path) -> None:
    result = trained(tmp_path / "run", participation=["north", "east"])

    assert not own_tensors(result, "south")
    assert equal(personal_models(result)["south"], result.outcome.state.params)
    model = build_model(result.config)
    first = Params.of(model).only(FedBN().kept(model))
    assert not equal(result.outcome.state.params.only(first), first)


def test_an_unseen_client_may_measure_statistics_on_its_own_images(tmp_path: Path) -> None:
    method = {"name": "fedbn", "unseen_norm": "reestimate"}
    result = trained(tmp_path / "run", participation=["north", "east"], method=method)
    state, south = result.outcome.state, personal_models(result)["south"]

    measured = {name for name in state.params if "running" in name}
    host = Host(result.config, tmp_path / "other", ["south"])
    assert equal(south, host.client("south").with_own_statistics(state.params))
    assert equal(south.without(measured), state.params.without(measured))
    assert not any(torch.equal(south[name], state.params[name]) for name in measured)
    assert equal(
        personal_models(result)["north"].only(own_tensors(result, "north")), own_tensors(result, "north")
    )


@mark.parametrize("unseen_norm", ["average", "reestimate"])
def test_a_client_without_cases_has_the_mean_too(unseen_norm: str, tmp_path: Path) -> None:
    data = {"phantom": {"hospitals": 3, "size": 16, "cases": [6, 6, 0]}}
    method = {"name": "fedbn", "unseen_norm": unseen_norm}
    result = trained(tmp_path / "run", data=data, method=method, rounds=1)

    assert equal(personal_models(result)["south"], result.outcome.state.params)


# What is odd, and what is refused


@mark.parametrize("norm", ["instance", "none", "group"])
def test_without_batch_norm_it_would_be_fedavg_and_is_refused(norm: str, tmp_path: Path) -> None:
    with raises(ConfigError, match="has no such layer .* so this would be FedAvg. Choose model.norm=batch"):
        config(tmp_path, method={"name": "fedbn"}, model={**BATCH, "norm": norm})


@mark.parametrize(("kind", "norm"), [("group", "group"), ("instance_affine", "instance_affine")])
def test_other_norms_may_stay_too_which_is_reported_as_a_variant(
    kind: str, norm: str, tmp_path: Path
) -> None:
    method = {"name": "fedbn", "norm_types": [kind]}
    result = trained(tmp_path / "run", model={**BATCH, "norm": norm}, method=method, rounds=1)

    (warning,) = result.records[0]["warnings"]
    assert f"{kind} norm stays local" in warning and "report a variant" in warning
    assert {name.rpartition(".")[2] for name in own_tensors(result, "north")} == {"weight", "bias"}


def test_affine_free_instance_norm_has_nothing_to_keep(tmp_path: Path) -> None:
    method = {"name": "fedbn", "norm_types": ["instance_affine"]}
    with raises(
        ConfigError, match="keeps instance_affine norm at the clients, but model 'unet2d' has no such"
    ):
        config(tmp_path, method=method, model={**BATCH, "norm": "instance"})


@mark.parametrize(
    ("model", "kind", "advice"),
    [
        (BATCH, "group", "Choose model.norm=group, or another method.norm_types."),
        (BATCH, "layer", "Choose another method.norm_types."),
        (
            {"name": "user_nets:Small"},
            "group",
            "Choose method.norm_types=[batch], which it has, or another network.",
        ),
        ({"name": "user_nets:Flat"}, "batch", "Give it such layers, by its own argument in model.arguments"),
        ({"name": "monai:SegResNet"}, "batch", "Choose method.norm_types=[group], which it has"),
    ],
)
def test_the_advice_fits_the_network(model: dict[str, Any], kind: str, advice: str, tmp_path: Path) -> None:
    with raises(ConfigError) as caught:
        config(tmp_path, method={"name": "fedbn", "norm_types": [kind]}, model=model)
    assert str(caught.value).partition("so this would be FedAvg. ")[2].startswith(advice)


def test_batch_norm_itself_gives_no_warning(result: Any) -> None:
    assert all(not record["warnings"] for record in result.records)


@mark.parametrize("bn_stats", ["pooled", "local", "reestimate"])
def test_other_rules_for_statistics_are_refused(bn_stats: str, tmp_path: Path) -> None:
    with raises(ConfigError, match=f"'fedbn' keeps norm layers whole.*'{bn_stats}'"):
        config(tmp_path, method={"name": "fedbn"}, model={**BATCH, "bn_stats": bn_stats})


@mark.parametrize("kinds", [[], ["layer"]])
def test_norm_types_must_be_named(kinds: list[str], tmp_path: Path) -> None:
    with raises(ConfigError, match="method.norm_types"):
        config(tmp_path, method={"name": "fedbn", "norm_types": kinds})


def test_what_is_sent_is_the_model_and_the_norm_tensors(result: Any) -> None:
    whole = result.outcome.state.params.num_bytes
    up = [size for r in result.records for e in r["exchanges"] for size in e["bytes_up"].values()]

    assert len(up) == 6 and set(up) == {whole}
