"""Promises every method keeps; a new one is covered the day it is listed in METHODS."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers import Watcher, config, personal_models, run, settings, spoil
from pytest import MonkeyPatch, TempPathFactory, fixture, mark, raises

import wardround as wr
from wardround.clients import Answer
from wardround.config_file import load_config
from wardround.data.federation import Federation
from wardround.data.opening import open_federation
from wardround.data.phantom.cases import PhantomSettings, list_hospitals
from wardround.data.roles import POOLED
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.methods import METHODS, OBJECTIVES
from wardround.methods.base import Method
from wardround.params import Params

EXCEPT = {
    ("local", "weights"): "nothing is averaged, so there are no weights to record",
    ("centralised", "alone"): "its only client is called 'pooled', and batches are drawn by client name",
    ("centralised", "lost"): "only 'pooled' is asked to train, and a round without it cannot go on",
    ("centralised", "refused"): "only 'pooled' is asked to train, and a round without it cannot go on",
    (
        "fedma",
        "identical",
    ): "clients start from networks of their own (independent_init), so first replies differ",
    ("fedlaw", "identical"): "its learned gamma scales the model even when all replies are alike",
    ("fedprox", "alone"): "the pull towards the received model acts on one client too",
    ("feddyn", "alone"): "its penalty acts on one client too, and the server adds h",
    ("fedsam", "alone"): "it takes its gradient at the worst point nearby, one client or many",
    ("ditto", "alone"): "the personal model is tied to the global one and draws batches of its own",
    ("fedproto", "alone"): "from the second round on its loss has the prototype term",
    ("fedrcl", "alone"): "its loss has a contrastive term",
    (
        "fedmix_supervision",
        "alone",
    ): "its model holds a second network; the first equals FedAvg's, see its own test",
    ("fedavgm", "alone"): "the server's momentum carries the model beyond what its only client returned",
    ("fedadam", "alone"): "the server steps along the client's change with an optimizer of its own",
    ("fedyogi", "alone"): "the server steps along the client's change with an optimizer of its own",
    ("fedadagrad", "alone"): "the server steps along the client's change with an optimizer of its own",
    ("harmofl", "alone"): "its steps are perturbed, and the common amplitude is a tensor of its model",
    ("feduaa", "unlabelled"): "its objective is its own; see its needs_labels",
    ("fedevi", "unlabelled"): "its scores need a Dirichlet model, which the two objectives do not train",
    ("feduaa", "dice"): "its threshold needs a Dirichlet model, so its check refuses any other objective",
    ("fedevi", "dice"): "its scores need a Dirichlet model, so its check refuses any other objective",
}
PROMISES: set[str] = set()

KINDS = {"reference", "objective", "aggregation", "personal", "robust", "server optimizer"}
KEEP = {"learning_rate": 0.01, "state": "keep"}


def promise(name: str) -> Any:
    """Parametrise a test over all methods that make this promise."""
    PROMISES.add(name)
    return mark.parametrize("method", [method for method in METHODS if (method, name) not in EXCEPT])


def hospitals(method: str, *cases: int, **changes: Any) -> dict[str, Any]:
    """A hospital for each number of cases, and the server's own cases for a method that needs some."""
    all_cases = [*cases, *([8] if "proxy" in METHODS[method].needs else [])]
    made = PhantomSettings(hospitals=len(all_cases), size=16, cases=all_cases, **changes)
    proxy = list_hospitals(made)[-1] if len(all_cases) > len(cases) else None
    return {"phantom": made.model_dump(), "proxy": proxy}


def plain(folder: Path, method: str, **changes: Any) -> dict[str, Any]:
    """Settings of a tiny run of one method with its own objective; kept moments show memory that is lost."""
    given = {"method": {"name": method}, "data": hospitals(method, 8, 10, 14), "optimizer": KEEP}
    return settings(folder, **{**given, **network(method), **changes})


def network(method: str, name: str = "unet2d") -> dict[str, Any]:
    """The tiny U-Net, with batch norm for the method that keeps it."""
    norm = {"norm": "batch"} if method == "fedbn" else {}
    return {"model": {"name": name, "base_filters": 2, "levels": 2, **norm}}


@fixture(scope="module")
def whole(tmp_path_factory: TempPathFactory) -> Callable[[str], Any]:
    """One uninterrupted run a method, made when it is first asked for."""
    made: dict[str, Any] = {}

    def given(method: str) -> Any:
        if method not in made:
            made[method] = wr.run(plain(tmp_path_factory.mktemp(method) / "run", method, rounds=3))
        return made[method]

    return given


def fingerprints(result: Any) -> dict[str, str]:
    """Of the server's model and of every client's."""
    own = {name: model.sha256() for name, model in personal_models(result).items()}
    return {"the server": result.params_sha256, **own}


def all_finite(result: Any) -> bool:
    models = [result.outcome.state.params, *personal_models(result).values()]
    return all(bool(torch.isfinite(tensor).all()) for model in models for tensor in model.values())


def valid(weights: Mapping[str, float]) -> bool:
    return min(weights.values()) >= 0 and abs(math.fsum(weights.values()) - 1) <= 1e-12


def recorded_weights(method: str, result: Any) -> list[dict[str, float]]:
    """The weights of each round; of a method that records none, none."""
    if (method, "weights") in EXCEPT:
        assert all("weights" not in record for record in result.records)
        return []
    return [record["weights"] for record in result.records]


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in ("seconds", "exchanges")} for record in records]


# The card


@mark.parametrize("method", METHODS)
def test_a_method_has_a_card(method: str) -> None:
    kind = METHODS[method]

    assert kind.title and kind.sends and kind.kind in KINDS
    assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")  # written, not a dataclass's own
    assert kind.objective in OBJECTIVES
    assert all(callable(getattr(kind, task)) for task in kind.tasks)


@mark.parametrize("objective", OBJECTIVES)
def test_an_objective_has_a_card(objective: str) -> None:
    kind = OBJECTIVES[objective]

    assert kind.title
    assert kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(")


def test_titles_are_told_apart() -> None:
    for listed in (METHODS, OBJECTIVES):
        assert len({kind.title for kind in listed.own.values()}) == len(
            listed.own
        )  # not those of other tests


# The promises


@promise("weights")
def test_weights_are_not_negative_and_sum_to_one(method: str, whole: Callable[[str], Any]) -> None:
    records = whole(method).records

    assert len(records) == 3
    for record in records:
        assert valid(record["weights"])
        assert set(record["weights"]) == ({POOLED} if METHODS[method].pooled else {"east", "north", "south"})


@promise("steps")
def test_local_steps_are_the_same_work_at_every_client(method: str, tmp_path: Path) -> None:
    taken: dict[str, int] = {}

    class Counting(Watcher):
        def on_progress(self, client: str, step: int, steps: int) -> None:
            taken[client] = taken.get(client, 0) + 1
            assert step <= steps

    given = plain(tmp_path / "run", method, local_steps=3, rounds=2)
    result = wr.run(given, listener=Counting())

    assert all_finite(result)
    assert result.summary["num_refused"] == result.summary["num_lost"] == 0
    times = 2 if method == "ditto" else 1  # the global model and the personal one
    pooled = {POOLED: 2 * 3 * 3}
    assert taken == (pooled if METHODS[method].pooled else dict.fromkeys(taken, 2 * 3 * times))


@promise("average")
def test_an_average_of_models_is_made_or_refused(method: str, tmp_path: Path) -> None:
    given = plain(tmp_path / "run", method, model_average={"name": "swa", "share": 1.0})
    if METHODS[method].kind == "personal" or method == "local":
        with raises(ConfigError, match="in part its own"):
            load_config(given)
        return
    result = wr.run(given)

    assert all_finite(result)
    assert result.summary["num_refused"] == result.summary["num_lost"] == 0


@promise("traffic")
def test_what_leaves_a_client_is_counted_and_is_what_the_card_says(
    method: str, whole: Callable[[str], Any]
) -> None:
    result, kind = whole(method), METHODS[method]
    lines = [json.loads(line) for line in (result.folder / "egress.jsonl").read_text().splitlines()]
    sent = [line for line in lines if line["phase"] == "round" and line["task"] in kind.tasks]
    extras = {name.split("/")[1] for line in sent for name in line["tensors"] if name.startswith("extras/")}
    scalars = {name for line in sent for name in line["scalars"] if not name.startswith("loss/")}
    exchanges = [(r["round"], e) for r in result.records for e in r["exchanges"]]
    setup = result.folder / "setup.json"
    before = json.loads(setup.read_text())["exchanges"] if setup.exists() else []
    counted = [
        (number, e["task"], name, size)
        for number, e in [*((0, e) for e in before), *exchanges]
        for name, size in e["bytes_up"].items()
    ]

    assert extras | scalars <= kind.up
    assert bool(kind.up) or kind.sends.startswith("nothing") or kind.pooled
    assert sorted(counted) == sorted((x["round"], x["task"], x["client"], x["bytes"]) for x in sent)
    if not kind.up and kind.shared is Method.shared:  # the model and nothing else
        model = Params.of(build_model(result.config)).num_bytes
        assert {size for _, _, _, size in counted} == {model}


@promise("sum")
def test_a_secure_sum_is_the_plain_mean_within_its_error_or_is_refused(method: str, tmp_path: Path) -> None:
    secure = {**plain(tmp_path / "secure", method, rounds=1), "privacy": {"secure_sum": True}}
    if not METHODS[method].secure_sum:
        with raises(ConfigError, match="does not work with privacy.secure_sum"):
            load_config(secure)
        return
    found, clear = wr.run(secure), wr.run(plain(tmp_path / "clear", method, rounds=1))

    error = max(told["error"] for told in found.records[0]["secure_sum"])
    for name, tensor in clear.outcome.state.params.items():
        rounding = 4 * torch.finfo(torch.float32).eps * max(1.0, float(tensor.abs().max()))
        assert (found.outcome.state.params[name] - tensor).abs().max() <= error + rounding
    assert found.summary["num_refused"] == found.summary["num_lost"] == 0


@promise("identical")
def test_identical_replies_leave_the_model_as_it_is(method: str, tmp_path: Path) -> None:
    result = wr.run(plain(tmp_path / "run", method, optimizer={"name": "sgd", "learning_rate": 0.0}))

    first = Params.trainable(build_model(result.config))
    for model in [result.outcome.state.params, *personal_models(result).values()]:
        assert model.only(first).sha256() == first.sha256()


@promise("order")
def test_the_order_of_clients_does_not_matter(
    method: str, whole: Callable[[str], Any], tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    before = fingerprints(whole(method))

    def reversed_names(*arguments: Any) -> Federation:
        federation = open_federation(*arguments)
        return replace(federation, names=federation.names[::-1])

    for user in ("host", "experiment"):
        monkeypatch.setattr(f"wardround.engine.{user}.open_federation", reversed_names)

    assert fingerprints(wr.run(plain(tmp_path / "run", method, rounds=3))) == before


@promise("alone")
def test_one_client_alone_equals_local_training_with_the_same_objective(method: str, tmp_path: Path) -> None:
    one = {"data": hospitals(method, 8), **network(method)}
    together = wr.run(plain(tmp_path / "together", method, **one))
    objective = {"name": METHODS[method].objective}
    alone = wr.run(plain(tmp_path / "alone", "local", objective=objective, **one))

    own = {name: model.sha256() for name, model in personal_models(alone).items()}
    assert {name: model.sha256() for name, model in personal_models(together).items()} == own
    assert together.table.rows == alone.table.rows


@promise("bytes")
def test_same_seed_gives_the_same_bytes(method: str, whole: Callable[[str], Any], tmp_path: Path) -> None:
    again = wr.run(plain(tmp_path / "run", method, rounds=3))

    assert fingerprints(again) == fingerprints(whole(method))
    assert timeless(again.records) == timeless(whole(method).records)


@promise("resume")
def test_saved_and_resumed_equals_uninterrupted(
    method: str, whole: Callable[[str], Any], tmp_path: Path
) -> None:
    broken = plain(tmp_path / "run", method, rounds=3)
    crash_at = POOLED if METHODS[method].pooled else "north"
    with raises(KeyboardInterrupt):
        wr.run(broken, listener=Watcher(crash_in_round=2, crash_at=crash_at))

    resumed = wr.run(broken, resume=True)

    assert fingerprints(resumed) == fingerprints(whole(method))
    assert timeless(resumed.records) == timeless(whole(method).records)
    assert resumed.table.rows == whole(method).table.rows


@promise("participation")
def test_half_of_the_clients_are_enough_for_a_round(method: str, tmp_path: Path) -> None:
    four = hospitals(method, 6, 8, 10, 6)
    result = wr.run(plain(tmp_path / "run", method, rounds=6, participation=0.5, data=four))

    assert len(result.records) == 6 and all_finite(result)
    for weights in recorded_weights(method, result):
        assert valid(weights) and len(weights) == (1 if METHODS[method].pooled else 2)


@promise("lost")
def test_a_lost_client_is_counted_and_the_rest_make_a_finite_model(
    method: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    for task in METHODS[method].tasks:
        with monkeypatch.context() as patch:
            spoil(patch, "east", lambda answer: Answer("east", failure="RuntimeError: boom"), task)
            result = wr.run(plain(tmp_path / task, method))

        exchanges = [e for record in result.records for e in record["exchanges"]]
        asked = [e for e in exchanges if e["task"] == task and "east" in e["bytes_down"]]
        assert result.summary["num_lost"] == len(asked) and result.summary["num_refused"] == 0
        assert asked or task != "train"
        assert all_finite(result)
        for weights in recorded_weights(method, result):
            assert valid(weights) and ("east" in weights) == (task != "train")


def with_nan(answer: Answer) -> Answer:
    """NaN in the first tensor that was sent, or in a number where none was."""
    sent = dict(answer.message.optional_params or {})
    if not sent:
        return replace(answer, message=replace(answer.message, scalars={"number": math.nan}))
    name = next(name for name, tensor in sent.items() if tensor.is_floating_point())
    sent[name] = torch.full_like(sent[name], math.nan)
    return replace(answer, message=replace(answer.message, params=Params(sent)))


@promise("refused")
def test_a_reply_of_nan_is_counted_and_the_rest_make_a_finite_model(
    method: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    spoil(monkeypatch, "east", with_nan)
    result = wr.run(plain(tmp_path / "run", method))

    assert [list(record["refused"]) for record in result.records] == [["train/east"]] * 2
    assert result.summary["num_refused"] == 2 and all_finite(result)
    for weights in recorded_weights(method, result):
        assert valid(weights) and "east" not in weights


@promise("3D")
def test_a_method_also_runs_on_volumes(method: str, tmp_path: Path) -> None:
    result = wr.run(
        plain(
            tmp_path / "run",
            method,
            rounds=1,
            batch_size=2,
            data=hospitals(method, 4, 4, dimensions=3),
            **network(method, "unet3d"),
        )
    )

    assert all_finite(result)
    assert all(valid(weights) for weights in recorded_weights(method, result))


@promise("dice")
def test_a_method_works_with_the_plain_dice_objective(method: str, tmp_path: Path) -> None:
    result = wr.run(plain(tmp_path / "run", method, rounds=1, objective={"name": "dice"}))

    assert all_finite(result)
    assert all(valid(weights) for weights in recorded_weights(method, result))


@mark.parametrize("method", [method for method, promised in EXCEPT if promised == "dice"])
def test_a_method_that_cannot_use_dice_says_so_when_the_configuration_is_read(
    method: str, tmp_path: Path
) -> None:
    with raises(ConfigError, match=f"method '{method}'.*'dice'"):
        config(tmp_path, method={"name": method}, objective={"name": "dice"})


@promise("unlabelled")
def test_clients_without_labels_take_part_or_the_method_says_why_not(method: str, tmp_path: Path) -> None:
    data = hospitals(method, 8, 10, 14, unlabelled=("east", "north"))
    chosen = {"rounds": 2, "objective": {"name": "pseudo_labels", "warmup": 0.0, "limit": 1.0}}
    if METHODS[method].needs_labels:
        with raises(ConfigError, match=rf"training cases without a label, which method '{method}' cannot"):
            wr.run(plain(tmp_path / "run", method, data=data, **chosen))
        return
    given = plain(tmp_path / "run", method, data=data, **chosen)
    if method == "fedmix_supervision":  # labels them itself, with any objective
        given["method"]["annotation"] = dict.fromkeys(("east", "north"), "none")
        given["objective"] = {"name": "dice"}
    result = wr.run(given)

    assert all_finite(result)
    assert all(valid(weights) for weights in recorded_weights(method, result))
    assert list(result.outcome.test.cases) == ["south"]


def test_exceptions_name_a_method_and_a_promise() -> None:
    assert {method for method, _ in EXCEPT} <= set(METHODS)
    assert {promised for _, promised in EXCEPT} <= PROMISES


# Objectives


@mark.parametrize("objective", OBJECTIVES)
def test_an_objective_trains_a_round_under_fedavg(objective: str, tmp_path: Path) -> None:
    result = run(tmp_path / "run", rounds=1, objective={"name": objective})

    assert all_finite(result)
    assert all(math.isfinite(value) for value in flat(result.records[0]["loss"]))
    before = Params.of(build_model(result.config))
    assert result.params_sha256 != before.sha256()


def flat(values: Any) -> list[float]:
    """The numbers of nested dictionaries."""
    if isinstance(values, Mapping):
        return [number for value in values.values() for number in flat(value)]
    return [float(values)]
