"""One run: reproducible, resumable, in a folder a person can read."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers import Watcher, config, run, settings
from pytest import LogCaptureFixture, MonkeyPatch, mark, param, raises

import wardround as wr
from wardround.data.federation import Federation
from wardround.data.opening import open_federation
from wardround.engine.experiment import Experiment
from wardround.engine.memory_file import load_memory
from wardround.engine.memory_store import IN_FLIGHT
from wardround.errors import CheckpointError, ConfigError, WardroundError
from wardround.messages import Message, ServerState
from wardround.methods.fedavg import FedAvg
from wardround.params import Params

KEEP = {"learning_rate": 0.01, "state": "keep"}


# Same bytes


def test_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    first, second = run(tmp_path / "a"), run(tmp_path / "b")

    assert first.params_sha256 == second.params_sha256
    assert run(tmp_path / "c", seed=7).params_sha256 != first.params_sha256


def test_the_order_in_which_clients_are_listed_does_not_matter(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    first = run(tmp_path / "a", optimizer=KEEP)

    def reversed_names(*arguments: Any) -> Federation:
        federation = open_federation(*arguments)
        return replace(federation, names=federation.names[::-1])

    for user in ("host", "experiment"):
        monkeypatch.setattr(f"wardround.engine.{user}.open_federation", reversed_names)

    assert run(tmp_path / "b", optimizer=KEEP).params_sha256 == first.params_sha256


@mark.parametrize("method", ["fedavg", param("local", marks=mark.slow)])
def test_worker_processes_give_the_same_bytes_as_one_process(tmp_path: Path, method: str) -> None:
    changes: dict[str, Any] = {"optimizer": KEEP, "method": {"name": method}}
    one = run(tmp_path / "one", **changes)
    two = run(tmp_path / "two", **changes, compute={"threads": 1, "workers": 2})

    assert two.params_sha256 == one.params_sha256
    assert two.table.rows == one.table.rows
    assert (tmp_path / "two/cases.csv").read_text() == (tmp_path / "one/cases.csv").read_text()
    assert not (tmp_path / "two/exchange").exists()


@mark.gpu
@mark.parametrize("device, compile", [("cuda:0", "graphs"), ("auto", "off")])
def test_worker_processes_on_a_gpu_give_the_same_bytes_as_one_process(
    tmp_path: Path, device: str, compile: str
) -> None:
    exact = {"threads": 1, "device": device, "compile": compile, "deterministic": True}
    changes: dict[str, Any] = {"optimizer": KEEP, "method": {"name": "fedevi"}, "local_epochs": 3}
    one = run(tmp_path / "one", **changes, compute={**exact, "workers": 1})
    two = run(tmp_path / "two", **changes, compute={**exact, "workers": 2})

    environment = json.loads((tmp_path / "two/environment.json").read_text())
    assert environment["workers"] == 2 and all(name.startswith("cuda:") for name in environment["devices"])
    assert two.params_sha256 == one.params_sha256
    assert two.records[-1]["validation"] == one.records[-1]["validation"]
    assert (tmp_path / "two/cases.csv").read_text() == (tmp_path / "one/cases.csv").read_text()


def test_replies_on_disk_give_the_same_bytes_as_in_memory(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    first = run(tmp_path / "memory")
    monkeypatch.setattr("wardround.engine.transports.local.Spilling.__init__.__defaults__", (0,))

    assert run(tmp_path / "disk").params_sha256 == first.params_sha256


# Resume

KILL = """
import json, os, signal, sys
import wardround as wr
sys.path.insert(0, {tests!r})
from helpers import Watcher

class Killer(Watcher):
    def on_progress(self, client, step, steps):
        if self.round == self.crash_in_round and client == self.crash_at:
            os.kill(os.getpid(), signal.SIGKILL)

wr.run(json.loads(sys.argv[1]), listener=Killer({round}))
"""


@mark.parametrize("method", ["fedavg", param("local", marks=mark.slow)])
def test_killed_in_the_middle_of_rounds_1_3_and_the_last_then_resumed_gives_the_same_bytes(
    tmp_path: Path, method: str
) -> None:
    changes: dict[str, Any] = {"rounds": 4, "optimizer": KEEP, "method": {"name": method}}
    whole = run(tmp_path / "whole", **changes)
    broken = settings(tmp_path / "broken", **changes)

    for number in (1, 3, 4):
        script = KILL.format(tests=str(Path(__file__).parents[1]), round=number)
        if number == 1:
            done = subprocess.run([sys.executable, "-c", script, json.dumps(broken)], capture_output=True)
        else:
            resumed = script.replace("wr.run(", "wr.run(resume=True, config=")
            done = subprocess.run([sys.executable, "-c", resumed, json.dumps(broken)], capture_output=True)
        assert done.returncode == -9, done.stderr.decode()
        latest = json.loads((tmp_path / "broken/checkpoints/latest.json").read_text())
        assert max(0, number - 1 - IN_FLIGHT) <= latest["round"] <= number - 1

    result = wr.run(broken, resume=True)

    assert result.params_sha256 == whole.params_sha256
    assert result.summary["test"] == whole.summary["test"]
    assert (tmp_path / "broken/cases.csv").read_text() == (tmp_path / "whole/cases.csv").read_text()
    timeless = [{k: v for k, v in r.items() if k not in ("seconds", "exchanges")} for r in result.records]
    assert timeless == [
        {k: v for k, v in r.items() if k not in ("seconds", "exchanges")} for r in whole.records
    ]


def test_stopping_on_request_finishes_the_round_and_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", rounds=3, optimizer=KEEP)
    experiment = Experiment(config(tmp_path / "part", rounds=3, optimizer=KEEP))

    class Stopper(Watcher):
        def on_record(self, record: Any) -> None:
            experiment.stop_requested = True

    experiment.listener = Stopper()
    outcome = experiment.run()
    assert outcome.status == "stopped" and outcome.state.round == 1
    assert json.loads((tmp_path / "part/result.json").read_text())["status"] == "stopped"

    again = wr.run(settings(tmp_path / "part", rounds=3, optimizer=KEEP), resume=True)
    assert again.params_sha256 == whole.params_sha256


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    run(tmp_path / "run")
    (tmp_path / "run/checkpoints/latest.json").write_text("{")

    with raises(CheckpointError, match=r"latest\.json cannot be read"):
        wr.run(settings(tmp_path / "run"), resume=True)


def test_resuming_a_finished_run_repeats_only_its_test(tmp_path: Path) -> None:
    first = run(tmp_path / "run")

    again = wr.run(settings(tmp_path / "run"), resume=True)

    assert again.summary["test"] == first.summary["test"]
    assert len(again.records) == 2
    lines = [json.loads(line) for line in (tmp_path / "run/egress.jsonl").read_text().splitlines()]
    tested = [line for line in lines if line["phase"] == "test"]
    assert len([line for line in tested if line["task"] == "evaluate"]) == 3  # once a client, not twice
    assert len([line for line in tested if line["task"] == "calibrate"]) == 6  # two exchanges


def test_the_api_gives_table_model_and_records(tmp_path: Path) -> None:
    result = run(tmp_path / "run")

    assert [row[0] for row in result.table.rows] == [
        "east",
        "north",
        "south",
        "mean",
        "SD between clients",
        "weighted mean",
        "worst client",
    ]
    assert "| client | Dice |" in str(result.table)
    logits = result.model(torch.zeros(1, 1, 16, 16))
    assert logits.shape == (1, 1, 16, 16) and not result.model.training
    assert [record["round"] for record in result.records] == [1, 2]


# References


def test_centralised_trains_on_everybodys_cases_and_is_tested_at_each(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method={"name": "centralised"})

    record = result.records[0]
    assert record["weights"] == {"pooled": 1.0}
    assert set(result.test.clients["dice"]) == {"east", "north", "south"}


def test_pooled_cases_train_whatever_number_of_clients_a_round_needs(tmp_path: Path) -> None:
    one, other = (
        run(tmp_path / str(n), rounds=1, method={"name": "centralised"}, min_clients=n) for n in (1, 2)
    )

    assert one.params_sha256 == other.params_sha256


def test_centralised_takes_the_steps_of_all_clients_together(tmp_path: Path) -> None:
    """A client without training cases takes none, so it adds none."""
    data = {"phantom": {"hospitals": 3, "size": 16, "cases": 8}}
    counted: list[int] = []

    class Counting(Watcher):
        def on_progress(self, client: str, step: int, steps: int) -> None:
            counted.append(steps)

    changes = {"method": {"name": "centralised"}, "local_steps": 3, "rounds": 2, "data": data}
    result = wr.run(settings(tmp_path / "run", **changes), listener=Counting())

    assert len(counted) == 2 * 3 * 3 and set(counted) == {9}
    assert result.summary["num_refused"] == 0


def test_local_sends_the_start_once_and_nothing_comes_back(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method={"name": "local"})

    first, second = (record["exchanges"][0] for record in result.records)
    assert set(first["bytes_down"].values()) == {result.params.num_bytes}
    assert set(second["bytes_down"].values()) == {0}
    assert set(first["bytes_up"].values()) == {0}


# What a method of one's own may do wrong on the server


def weighing(**weights: Any) -> Any:
    """A round that records these weights, and made its model with them."""

    def spoiled(state: ServerState, after: ServerState) -> ServerState:
        factor = sum(float(weight) for weight in weights.values())
        return replace(after, params=after.params * factor, notes={"weights": weights})

    return spoiled


@mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda state, after: state, "returned a state of the same round; return state.next"),
        (lambda state, after: None, "returned NoneType, not the next state"),
        (lambda state, after: replace(after, params=after.params * float("nan")), "holds NaN"),
        (lambda state, after: replace(after, params=Params(dict(list(after.params.items())[1:]))), "missing"),
        (weighing(east=float("nan"), north=0.5), "the weight of client 'east' is nan, not a finite number"),
        (weighing(east=float("inf")), "the weight of client 'east' is inf"),
        (weighing(east=torch.tensor(1.0)), "the weight of client 'east' is tensor"),
        (weighing(east=-0.5, north=1.5), "the weight of client 'east' is -0.5; weights are not negative"),
        (weighing(east=1.0, north=1.0), "the weights sum to 2, not to one; divide them by their sum"),
        (lambda state, after: replace(after, notes={"weights": [1.0]}), "the weights are a list"),
        (
            lambda state, after: 1 / 0,
            "failed on the server: ZeroDivisionError: .* The exception above shows where",
        ),
    ],
)
def test_what_a_method_makes_of_a_round_is_checked(
    tmp_path: Path, monkeypatch: MonkeyPatch, wrong: Any, reason: str
) -> None:
    right = FedAvg.run_round
    monkeypatch.setattr(FedAvg, "run_round", lambda self, s, c: wrong(s, right(self, s, c)))
    with raises(WardroundError, match=f"round 1, method 'fedavg': .*{reason}"):
        run(tmp_path / "run")


def test_weights_may_be_rounded_and_a_round_may_have_none(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    right = FedAvg.run_round
    for number, weights in enumerate([{"east": 0.33333, "north": 0.66666}, {"east": 1}, {}]):
        monkeypatch.setattr(
            FedAvg,
            "run_round",
            lambda self, s, c, weights=weights: replace(right(self, s, c), notes={"weights": weights}),
        )
        assert run(tmp_path / str(number), rounds=1).records[0]["weights"] == weights


@mark.parametrize(
    "wrong", [3, None, Message(extras={"x": 3}), Message(scalars={"x": torch.ones(2)})], ids=str
)
def test_a_reply_that_cannot_be_sent_loses_its_client_alone(
    tmp_path: Path, monkeypatch: MonkeyPatch, wrong: Any
) -> None:
    right = FedAvg.train
    monkeypatch.setattr(FedAvg, "train", lambda self, c, m: wrong if c.name == "east" else right(self, c, m))
    record = run(tmp_path / "run", rounds=1).records[0]
    assert "what the method's 'train' returned cannot be sent" in record["lost"]["train/east"]
    assert set(record["weights"]) == {"north", "south"}


# Who takes part


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
