"""Krum and Multi-Krum: golden vectors, ties, too few replies, whole runs."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from helpers import config, run, vectors
from pytest import approx, mark, raises

from wardround.aggregation.robust import find_lowest, krum_scores, squared_distances
from wardround.clients import Clients
from wardround.errors import ConfigError
from wardround.messages import Reply, ServerState
from wardround.methods.krum import Krum, MultiKrum
from wardround.params import Params

GOLDEN = vectors("krum")
FIVE = {"phantom": {"hospitals": 5, "size": 16, "cases": 4}}


def models(rows: Sequence[Sequence[float]]) -> list[Params]:
    return [Params({"w": torch.tensor(row, dtype=torch.float64)}) for row in rows]


def after_round(method: Krum, sent: Sequence[Params]) -> ServerState:
    """One round in which the clients return these models; their sizes differ, which must not matter."""
    replies = [Reply(params, client=str(k), num_examples=k + 1) for k, params in enumerate(sent)]
    state = ServerState(params=sent[0].zeros(), trainable=("w", "b"))
    return method.run_round(state, cast(Clients, SimpleNamespace(ask=lambda task, message: replies)))


# Golden vectors


def test_krum_is_the_golden_one() -> None:
    case = GOLDEN["seven_clients_two_byzantine"]
    sent, expected = models(case["inputs"]["client_w"]), case["expected"]
    after = after_round(Krum(f=case["inputs"]["f"]), sent)

    scores = krum_scores(squared_distances(sent, ["w"]), case["inputs"]["f"])
    assert len(sent) - case["inputs"]["f"] - 2 == expected["neighbours"]
    assert scores == approx(expected["scores"], abs=1e-6)
    assert list(after.notes["krum_scores"].values()) == scores
    assert after.notes["weights"] == {str(k): float(k == expected["selected"]) for k in range(7)}
    assert after.params["w"].tolist() == approx(expected["state"], abs=1e-6)


def test_multi_krum_is_the_golden_one() -> None:
    case = GOLDEN["multi_krum_m3"]
    after = after_round(
        MultiKrum(f=case["inputs"]["f"], m=case["inputs"]["m"]), models(case["inputs"]["client_w"])
    )

    expected = case["expected"]
    assert [int(k) for k, weight in after.notes["weights"].items() if weight] == expected["selected"]
    assert after.notes["weights"]["0"] == 1 / 3
    assert after.params["w"].tolist() == approx(expected["state"], abs=1e-6)


def test_every_golden_case_is_tested() -> None:
    assert set(GOLDEN) == {"seven_clients_two_byzantine", "multi_krum_m3"}


# The rule


def test_scores_by_hand() -> None:
    # 0, 1, 2, 4 and 100 on a line, f = 1: each counts its 5 - 1 - 2 = 2 nearest others.
    sent = models([[0.0], [1.0], [2.0], [4.0], [100.0]])
    scores = krum_scores(squared_distances(sent, ["w"]), 1)

    assert scores == [1 + 4, 1 + 1, 1 + 4, 4 + 9, 96**2 + 98**2]
    assert after_round(Krum(), sent).params["w"].tolist() == [1.0]


def test_the_first_wins_a_tie() -> None:
    assert find_lowest([3.0, 1.0, 1.0, 0.5], 2) == [1, 3]
    after = after_round(Krum(), models([[1.0]] * 5))
    assert after.notes["weights"] == {"0": 1.0, "1": 0.0, "2": 0.0, "3": 0.0, "4": 0.0}


def test_multi_krum_keeps_all_but_f_and_never_more() -> None:
    assert MultiKrum(f=1).num_kept(5) == 4
    assert MultiKrum(f=1, m=2).num_kept(5) == 2
    assert MultiKrum(f=1, m=50).num_kept(5) == 4
    after = after_round(MultiKrum(), models([[1.0], [2.0], [3.0], [2.0], [-500.0]]))
    assert after.params["w"].tolist() == [2.0] and after.notes["weights"]["4"] == 0


def test_running_statistics_do_not_count_as_distance_and_come_from_the_chosen() -> None:
    sent = [
        Params({"w": torch.tensor([x]), "running_mean": torch.tensor([far]), "count": torch.tensor(number)})
        for x, far, number in [(0.0, 8e8, 1), (1.0, -8e8, 2), (2.0, 5.0, 3), (4.0, 0.0, 4), (99.0, 0.0, 5)]
    ]
    after = after_round(Krum(), sent)

    assert after.params["w"].tolist() == [1.0]
    assert after.params["running_mean"].tolist() == [-8e8] and after.params["count"].item() == 2


def test_the_largest_numbers_do_not_break_the_distances() -> None:
    huge = torch.finfo(torch.float32).max
    sent = [Params({"w": torch.full((1000,), value)}) for value in (1.0, 1.1, 0.9, 1.0, huge)]
    after = after_round(MultiKrum(), sent)

    assert after.notes["weights"]["4"] == 0 and after.params["w"][0].item() == approx(1.0)


@mark.parametrize("num", [1, 2, 3, 4])
def test_with_too_few_replies_the_median_is_taken_and_the_notes_say_so(num: int) -> None:
    rows = [[1.0], [2.0], [60.0], [3.0]][:num]
    for method in (Krum(), MultiKrum()):
        after = after_round(method, models(rows))
        assert after.params["w"].item() == {1: 1.0, 2: 1.5, 3: 2.0, 4: 2.5}[num]
        (warning,) = after.notes["warnings"]
        assert f"{method.title}: {num} replies are fewer than 2f + 3 = 5, so the median was taken" in warning
        assert sum(after.notes["weights"].values()) == approx(1, abs=1e-12)


def test_enough_replies_depend_on_f() -> None:
    assert "warnings" not in after_round(Krum(f=0), models([[1.0], [2.0], [4.0]])).notes
    assert "warnings" in after_round(Krum(f=2), models([[1.0]] * 6)).notes


# Whole runs


def test_multi_krum_without_bad_clients_is_fedavg_with_equal_weights(tmp_path: Path) -> None:
    off = run(tmp_path / "off", method={"name": "multikrum", "f": 0})
    fedavg = run(tmp_path / "fedavg", method={"name": "fedavg", "weighting": "uniform"})

    assert off.params_sha256 == fedavg.params_sha256


def test_five_hospitals_are_enough_for_one_bad_client(tmp_path: Path) -> None:
    krum = run(tmp_path / "krum", method={"name": "krum"}, data=FIVE)
    many = run(tmp_path / "many", method={"name": "multikrum"}, data=FIVE, rounds=1)

    for record in krum.records:
        assert not record["warnings"]
        best = min(record["krum_scores"], key=record["krum_scores"].get)
        assert record["weights"] == {name: float(name == best) for name in record["weights"]}
    assert sorted(many.records[0]["weights"].values()) == [0, 0.25, 0.25, 0.25, 0.25]


def test_three_hospitals_get_the_median(tmp_path: Path) -> None:
    krum = run(tmp_path / "krum", method={"name": "krum"})
    median = run(tmp_path / "median", method={"name": "median"})

    assert krum.params_sha256 == median.params_sha256
    assert all("the median was taken instead" in record["warnings"][0] for record in krum.records)


@mark.parametrize("wrong", [{"f": -1}, {"m": 0}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with raises(ConfigError, match=f"method.{next(iter(wrong))}"):
        config(tmp_path, method={"name": "multikrum", **wrong})
