"""Who takes part in a round."""

from pathlib import Path
from typing import Any

from helpers import Watcher, run, settings
from pytest import LogCaptureFixture, mark, raises

import wardround as wr
from wardround.engine.checkpoint import (
    load_memory,
)
from wardround.errors import ConfigError


def test_half_of_the_clients_take_part_and_the_draw_is_fixed_by_the_seed(tmp_path: Path) -> None:
    four = {"phantom": {"hospitals": 4, "size": 16, "cases": 5}}
    seen = []
    for name in ("a", "b"):
        watcher = Watcher()
        wr.run(settings(tmp_path / name, rounds=6, participation=0.5, data=four), listener=watcher)
        seen.append(watcher.rounds)

    assert seen[0] == seen[1]
    assert all(len(present) == 2 for present in seen[0])
    assert len({tuple(present) for present in seen[0]}) > 1


def test_an_unknown_participant_is_named(tmp_path: Path) -> None:
    with raises(ConfigError, match="participation names 'noth', which is not a client. Did you mean 'north'"):
        run(tmp_path / "run", participation=["noth"])


def test_more_min_clients_than_clients_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, match="min_clients is 9, but there are only 3"):
        run(tmp_path / "run", min_clients=9)


def test_who_takes_part_must_be_enough_and_fit_the_method(tmp_path: Path) -> None:
    with raises(ConfigError, match="min_clients is 3, but participation names only 2"):
        run(tmp_path / "a", participation=["north", "east"], min_clients=3)
    with raises(ConfigError, match="trains on everybody's cases. Leave participation out"):
        run(tmp_path / "b", participation=["north", "east"], method={"name": "centralised"})


def test_a_client_without_cases_is_not_asked_to_train_and_named_before_the_test(
    tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    result = run(tmp_path / "run", data={"phantom": {"hospitals": 3, "size": 16, "cases": [8, 0, 8]}})

    assert set(result.records[0]["weights"]) == {"north", "south"}
    assert set(result.test.clients["dice"]) == {"north", "south"}
    assert "no test case at 'east': the results will have no row for it" in caplog.text


def test_one_client_alone_is_local_training(tmp_path: Path) -> None:
    one = {"phantom": {"hospitals": 1, "size": 16, "cases": 8}}
    together = run(tmp_path / "fedavg", data=one)
    alone = run(tmp_path / "local", data=one, method={"name": "local"}, evaluate={"metrics": ["dice"]})

    own = load_memory(sorted((tmp_path / "local/clients/north").glob("memory-*"))[-1])["own"]
    assert own.sha256() == together.outcome.state.params.sha256()
    assert alone.table.rows == together.table.rows


@mark.parametrize("method", ["fedavg", "fedmix", "feddg", "harmofl", "fedevi", "aaw", "scaffold", "feddyn"])
def test_a_client_that_is_held_out_adds_to_nothing(tmp_path: Path, method: str) -> None:
    def of(name: str, cases: list[int], **more: Any) -> Any:
        data = {"phantom": {"hospitals": len(cases), "size": 16, "cases": cases}}
        return run(tmp_path / name, method={"name": method}, data=data, **more)

    three = of("three", [8, 10, 6], participation=["north", "east"])
    assert three.params_sha256 == of("two", [8, 10]).params_sha256
