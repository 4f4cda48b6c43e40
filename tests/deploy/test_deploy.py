"""The organiser's side over hospitals of the same process: the same bytes as `train`, and every fault named."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from helpers import settings
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch, TempPathFactory, fixture, mark, raises

import wardround as wr
from deploy import loopback
from deploy.loopback import Killed, Loopback, changed, conducted, remote_config, spoilt
from wardround import cli
from wardround.deploy import conducting, limits, remote
from wardround.deploy.conducting import conduct
from wardround.deploy.live_file import Live, RunFailed
from wardround.deploy.remote import Remote
from wardround.deploy.site import Site
from wardround.deploy.wire import Parcel
from wardround.engine.cached_memory import MemoryBudget
from wardround.engine.checkpoint import Checkpoints
from wardround.engine.records import read_lines
from wardround.engine.transports.local import Spilling
from wardround.errors import CheckpointError, ConfigError, TooFewClients
from wardround.methods import METHODS
from wardround.privacy import PrivacySettings

BATCH = {"model": {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}}
PROXY = {"data": {"phantom": {"hospitals": 4, "size": 16, "cases": 8}, "proxy": "west"}}
QUICK = {"evaluate": {"metrics": ["dice"], "overlays": 0, "calibrate": False}}
SHORT = {"evaluate": {"metrics": ["dice"], "overlays": 0, "every": 9, "calibrate": False}}  # fewer exchanges


SECURE = {"privacy": {"secure_sum": True}}


def method(name: str, **more: Any) -> dict[str, Any]:
    return {"method": {"name": name, **more}}


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def live(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "live.json").read_text())
    return found


def records(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / "records.jsonl")


# The same bytes


@mark.parametrize(
    "changes",
    [
        method("fedavg"),
        method("scaffold"),
        method("fedbn") | BATCH,
        method("fedevi"),
        method("safcf"),
        method("harmofl") | BATCH,  # a set-up exchange
        method("fedmix"),  # another, whose answer goes on to the others
        method("fedlaw") | PROXY,  # cases at the organiser
        method("fedavg") | {"traffic": {"upload": "float16", "compress": "zlib"}},
        method("fedavg") | {"traffic": {"upload": "delta", "compress": "zlib"}},
        method("fedavg") | BATCH | {"model": {**BATCH["model"], "bn_stats": "reestimate"}},
        method("fedavg") | BATCH | SECURE,
    ],
    ids=lambda changes: "-".join(str(value) for part in changes.values() for value in part.values())[:40],
)
def test_a_run_at_hospitals_has_the_bytes_of_a_run_on_one_machine(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    here, there = tmp_path / "train", tmp_path / "remote"
    changes = {"rounds": 2, **changes}
    wr.run(settings(here, **changes))
    loop = Loopback(tmp_path / "sites")
    conducted(loop, there, **changes)
    one, other = result(here), result(there)
    assert other["params_sha256"] == one["params_sha256"]
    assert other["test"] == one["test"]
    assert (there / "cases.csv").read_text() == (here / "cases.csv").read_text()
    assert (there / "preparation.json").read_text() == (here / "preparation.json").read_text()
    for number, record in enumerate(records(there), start=1):
        assert record["lost"] == record["refused"] == {}
        for exchange in record["exchanges"]:
            carried = {
                name: count for name, count in exchange["bytes_up"].items() if name in loop.sites
            }  # not the organiser's own
            assert carried == {name: loop.bytes_up[(name, exchange["task"], number)] for name in carried}
    assert live(there)["state"] == "done"


def test_hospitals_choose_the_same_postprocessing_as_one_machine(tmp_path: Path) -> None:
    here, there = tmp_path / "train", tmp_path / "remote"
    changes: dict[str, Any] = {"rounds": 1, "evaluate": {**QUICK["evaluate"], "postprocess": "auto"}}
    wr.run(settings(here, **changes))
    conducted(Loopback(tmp_path / "sites"), there, **changes)
    assert (there / "postprocess.json").read_text() == (here / "postprocess.json").read_text()
    assert result(there)["test"] == result(here)["test"]


@mark.parametrize("name", [name for name, kind in METHODS.items() if not kind().pooled])
def test_every_method_runs_a_round_at_hospitals(name: str, tmp_path: Path) -> None:
    extra = PROXY if "proxy" in METHODS[name]().needs else {}
    outcome = conducted(
        Loopback(tmp_path / "sites"), tmp_path / "run", rounds=1, **method(name), **BATCH, **extra, **SHORT
    )
    assert outcome.status == "done"
    assert result(tmp_path / "run")["num_lost"] == result(tmp_path / "run")["num_refused"] == 0


def test_hospitals_that_are_lost_or_die_in_a_secure_sum_do_not_stop_it(tmp_path: Path) -> None:
    five = {"data": {"phantom": {"hospitals": 5, "size": 16, "cases": 8}}}
    loop = Loopback(tmp_path / "sites", names=("hospital-05", "east", "north", "south", "west"))
    loop.faults[("east", "sum_shares", 1)] = loopback.unheard
    loop.faults[("north", "sum_masked", 1)] = loopback.unsent
    loop.faults[("south", "sum_masked", 2)] = loopback.restarted  # its keys and its model are gone
    loop.faults[("west", "sum_unmask", 2)] = loopback.tampered_header
    conducted(loop, tmp_path / "run", rounds=2, **five, **SECURE, **SHORT)

    first, second = (record["secure_sum"][0] for record in records(tmp_path / "run"))
    assert first["lost"] == ["east", "north"] and second["lost"] == ["south"]
    assert "restarted" in records(tmp_path / "run")[1]["lost"]["sum_masked/south"]


def test_a_hospital_that_demands_secure_sums_answers_no_other_run(tmp_path: Path) -> None:
    rules = loopback.RULES.model_copy(update={"privacy": PrivacySettings(secure_sum=True)})
    loop = Loopback(tmp_path / "sites", north=rules)
    conducted(loop, tmp_path / "run", rounds=1, **SHORT)

    assert records(tmp_path / "run")[0]["clients"] == ["east", "south"]
    assert ("north", "train", 1) not in loop.asked
    assert "privacy.secure_sum: true" in loop.replies["north"].header["more"]["refused"]


def test_a_hospital_that_demands_noise_in_the_sum_answers_where_all_add_it(tmp_path: Path) -> None:
    demands = PrivacySettings(level="client", epsilon=4.0, cases=20, secure_sum=True)
    rules = loopback.RULES.model_copy(update={"privacy": demands})
    loop = Loopback(tmp_path / "sites", north=rules)
    with raises(TooFewClients, match="at least 3|min_clients is 3"):
        conducted(loop, tmp_path / "run", rounds=1, min_clients=3, **SECURE, **SHORT)
    assert "set privacy.level: client in the run" in loop.replies["north"].header["more"]["refused"]

    noised = {"privacy": {"secure_sum": True, "level": "client", "epsilon": 8.0, "cases": 20}}
    conducted(Loopback(tmp_path / "others", north=rules), tmp_path / "noised", rounds=1, **noised, **SHORT)
    [told] = [record["privacy"] for record in records(tmp_path / "noised")]
    assert told["north"]["limit"] == 4.0 and told["north"]["epsilon"] <= 4.0 < told["east"]["epsilon"]


def test_a_hospital_without_a_key_refuses_a_secure_sum(tmp_path: Path) -> None:
    loop = Loopback(tmp_path / "sites")
    for name, site in loop.sites.items():
        loop.sites[name] = Site(name, loop.rules[name], site._state)
    with raises(TooFewClients, match="no key to sign with"):
        conducted(loop, tmp_path / "run", rounds=1, **SECURE)


def test_a_method_that_pools_cases_is_refused(tmp_path: Path) -> None:
    with raises(ConfigError, match="pools all cases in one place"):
        conducted(Loopback(tmp_path / "sites"), tmp_path / "run", **method("centralised"))


# Hospitals that are lost, and come back


def test_a_lost_hospital_returns_with_its_memory(tmp_path: Path) -> None:
    loop, folder = Loopback(tmp_path / "sites", ("east", "north", "south", "west")), tmp_path / "run"
    four = {"data": {"phantom": {"hospitals": 4, "size": 16, "cases": 8}}}
    seen: dict[int, list[str]] = {}

    def follow(task: str, round: int) -> None:
        if task == "train":
            seen.setdefault(round, [path.name for path in files(loop, "south")])
        loop.away = {"south"} if (round, task) in ((2, "evaluate"), (3, "train")) else set()

    loop.on_exchange = follow
    loop.faults[("south", "train", 2)] = loopback.unheard
    loop.faults[("south", "train", 4)] = loopback.restarted
    conducted(loop, folder, rounds=4, min_clients=3, **four, **method("scaffold"), **QUICK)
    kept = "memory-00000.safetensors"
    assert [seen[round] for round in (1, 2, 3, 4)] == [[], [kept], [kept], [kept]]
    assert [path.name for path in files(loop, "south")] == [kept, "memory-00003.safetensors"]
    lost = [record["lost"] for record in records(folder)]
    assert lost[0] == lost[3] == {}
    assert "no answer to 'train'" in lost[1]["train/south"]
    assert "not been heard from" in lost[2]["train/south"]
    assert ("south", "train", 3) not in loop.asked  # nobody waits for one that is away
    assert live(folder)["away"] == {}


def files(loop: Loopback, name: str) -> list[Path]:
    return sorted((loop.folder / name).glob(f"*/{name}/memory-*.safetensors"))


def test_a_round_with_too_few_answers_is_repeated_and_then_the_run_stops(tmp_path: Path) -> None:
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"

    def always(*_: Any) -> Iterator[tuple[str, Parcel]]:
        loop.faults[("south", "train", 2)] = always
        yield from ()

    loop.faults[("south", "train", 2)] = always
    with raises(TooFewClients, match=r"min_clients is 3.*'south': no answer.*after round 1"):
        conducted(loop, folder, min_clients=3, **SHORT)
    assert loop.asked.count(("north", "train", 2)) == 2
    assert live(folder)["state"] == "failed"
    assert "Fix the cause" in live(folder)["reason"]
    loop.faults.clear()
    conducted(loop, folder, min_clients=3, resume=True, **SHORT)
    conducted(Loopback(tmp_path / "others"), tmp_path / "whole", min_clients=3, **SHORT)
    assert result(folder)["params_sha256"] == result(tmp_path / "whole")["params_sha256"]


def test_a_round_whose_statistics_too_few_measure_is_repeated_too(tmp_path: Path) -> None:
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    network = {"model": {**BATCH["model"], "bn_stats": "reestimate"}}
    loop.faults[("south", "norm_stats", 1)] = loopback.unheard
    conducted(loop, folder, rounds=1, min_clients=3, **network, **SHORT)
    assert loop.asked.count(("south", "train", 1)) == loop.asked.count(("south", "norm_stats", 1)) == 2
    assert list(records(folder)[0]["lost"]) == ["norm_stats/south"]


def test_what_a_hospital_remembers_of_an_abandoned_attempt_is_gone_when_it_returns(tmp_path: Path) -> None:
    """Round 2: south works, the others are lost, so the attempt counts for nothing. South is away during the
    second attempt and returns in round 3, with what it remembered after round 1."""
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    after_first: list[bytes] = []

    def lost(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
        after_first.append(files(loop, "south")[-1].read_bytes())
        yield from ()

    def working_then_away(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
        yield name, loop.answer(name, parcel)
        loop.away = {"south"}

    def back(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
        assert [path.name for path in files(loop, "south")][-1] == "memory-00001.safetensors"
        assert parcel.header["more"]["sync_state"]["rewinds"] == [1]
        loop.sites[name] = loop.opened(name)
        reply = loop.answer(name, parcel)
        first, last = files(loop, "south")
        assert (first.name, last.name) == ("memory-00000.safetensors", "memory-00002.safetensors")
        assert first.read_bytes() == after_first[0]
        yield name, reply

    loop.faults[("east", "train", 2)] = loopback.unheard
    loop.faults[("north", "train", 2)] = lost
    loop.faults[("south", "train", 2)] = working_then_away
    loop.faults[("south", "train", 3)] = back
    loop.on_exchange = lambda task, round: loop.away.clear() if (task, round) == ("evaluate", 2) else None
    conducted(loop, folder, rounds=3, min_clients=2, **method("scaffold"), **QUICK)
    assert [place for place in loop.asked if place[1:] == ("train", 2)] == [
        ("east", "train", 2), ("north", "train", 2), ("south", "train", 2),
        ("east", "train", 2), ("north", "train", 2),
    ]  # fmt: skip
    lost = {"train/east", "train/north", "train/south", "evaluate/south"}
    assert set(records(folder)[1]["lost"]) == lost
    assert not loop.faults


# The organiser dies

FEDEVI = {"rounds": 3, **method("fedevi"), **QUICK}


@fixture(scope="module")
def whole(tmp_path_factory: TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("whole")
    conducted(Loopback(folder / "sites"), folder / "run", **FEDEVI)
    return str(result(folder / "run")["params_sha256"])


@mark.parametrize("phase", ["train", "between", "score", "evaluate", "checkpoint", "test"])
def test_a_run_whose_organiser_died_is_resumed_to_the_same_bytes(
    phase: str, whole: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    die_in(phase, loop, monkeypatch)
    with raises(Killed):
        conducted(loop, folder, **FEDEVI)
    assert live(folder)["state"] == "failed"
    monkeypatch.undo()
    loop.faults.clear()
    loop.on_exchange = lambda task, round: None
    loop.sites = {name: loop.opened(name) for name in loop.sites}
    conducted(loop, folder, resume=True, **FEDEVI)
    assert result(folder)["params_sha256"] == whole
    assert [record["round"] for record in records(folder)] == [1, 2, 3]
    assert live(folder)["first_round"] == (3 if phase == "test" else 1)


def die_in(phase: str, loop: Loopback, monkeypatch: MonkeyPatch) -> None:
    """Kill the organiser in this phase of round 2."""
    if phase == "checkpoint":
        honest = Checkpoints._write

        def write(self: Checkpoints, round: int, *rest: Any) -> None:
            if round == 2:
                raise Killed
            honest(self, round, *rest)

        monkeypatch.setattr(Checkpoints, "_write", write)
    elif phase == "between":

        def die(task: str, round: int) -> None:
            if (task, round) == ("score", 2):
                raise Killed

        loop.on_exchange = die
    elif phase == "test":
        loop.faults[("north", "evaluate", 4)] = loopback.killed
    else:
        loop.faults[("north", phase, 2)] = loopback.killed


def test_memory_of_hospitals_follows_a_resumed_run(tmp_path: Path) -> None:
    changes = {"rounds": 3, **method("scaffold"), **SHORT}
    conducted(Loopback(tmp_path / "others"), tmp_path / "whole", **changes)
    loop = Loopback(tmp_path / "sites")
    loop.faults[("south", "train", 2)] = loopback.killed  # all have trained, and remember it
    with raises(Killed):
        conducted(loop, tmp_path / "run", **changes)
    conducted(loop, tmp_path / "run", resume=True, **changes)
    assert result(tmp_path / "run")["params_sha256"] == result(tmp_path / "whole")["params_sha256"]


def test_a_hospital_whose_memory_is_damaged_leaves_the_round_until_the_run_goes_back(tmp_path: Path) -> None:
    changes = {"rounds": 4, **method("scaffold"), **SHORT}
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    conducted(loop, folder, **changes)
    whole = result(folder)["params_sha256"]
    path = loop.memory("north").folder / "memory-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    loop.sites = {name: loop.opened(name) for name in loop.sites}

    conducted(loop, folder, resume=True, from_round=3, **changes)
    reason = records(folder)[3]["lost"]["train/north"]
    assert "memory-00002.safetensors of client 'north' is damaged" in reason and "--from-round 2" in reason
    assert live(folder)["first_round"] == 3

    conducted(loop, folder, resume=True, from_round=2, **changes)
    assert result(folder)["params_sha256"] == whole
    assert [record["lost"] for record in records(folder)] == [{}] * 4


def test_a_hospital_that_is_away_when_a_run_is_resumed_may_still_come_back(tmp_path: Path) -> None:
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    loop.faults[("north", "train", 2)] = loopback.killed
    with raises(Killed):
        conducted(loop, folder, rounds=3, deadline=0.5, **SHORT)
    loop.away = {"south"}
    loop.on_exchange = lambda task, round: loop.away.clear() if round == 2 else None
    conducted(loop, folder, rounds=3, resume=True, deadline=0.5, **SHORT)
    second, third = records(folder)[1:]
    assert list(second["lost"]) == ["train/south"]
    assert third["lost"] == {} and "south" in third["clients"]


def test_what_is_not_there_is_not_resumed_and_what_is_there_not_replaced(tmp_path: Path) -> None:
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    with raises(CheckpointError, match="no checkpoint to resume"):
        conducted(loop, folder, resume=True)
    conducted(loop, folder, rounds=1, **SHORT)
    before = live(folder)
    with raises(ConfigError, match="already holds a run"):
        conducted(loop, folder, rounds=1, **SHORT)
    with conducting.claim(folder), raises(ConfigError, match="in use by another process"):
        conducted(loop, folder, rounds=1, resume=True, **SHORT)
    assert live(folder) == before


# Replies that are refused

BAD = {
    "tampered": (loopback.tampered, "SHA-256"),
    "replayed": (loopback.replayed, ", expected '"),
    "foreign": (loopback.foreign, ", expected '"),
    "nan": (spoilt(float("nan")), "NaN"),
    "too many cases": (changed(more={"num_examples": 10**6}), "registered"),
    "no count": (changed(more={"num_examples": "many"}), "whole number"),
    "no seconds": (changed(more={"seconds": None}), "cannot be read"),
    "endless seconds": (changed(more={"seconds": float("inf")}), "seconds is inf, not between 0 and 1e+08"),
    "seconds before the start": (changed(more={"seconds": -1.0}), "seconds is -1.0, not between"),
    "seconds as truth": (changed(more={"seconds": True}), "seconds is True, not a number"),
    "half a step": (changed(more={"num_steps": 1.5}), "num_steps is 1.5, not a whole number"),
    "steps beyond counting": (changed(more={"num_steps": 10**12}), "num_steps is 1000000000000, not between"),
    "a loss of NaN": (changed(more={"loss": {"total": float("nan")}}), "loss 'total' is nan, not between"),
    "a loss of text": (changed(more={"loss": {"total": "1.0"}}), "loss 'total' is 1.0, not a number"),
    "endless loss": (changed(more={"loss": {str(n): 0.0 for n in range(2000)}}), "1000 terms"),
    "other run": (changed(run="0" * 16), "the message's run is"),
    "other schema": (changed(schema="wardround-parcel-0"), "schema"),
    "more than JSON": (changed(round=1.5), "not a whole number"),
}


@fixture(scope="module")
def refused(tmp_path_factory: TempPathFactory) -> tuple[Path, Loopback]:
    """A run in which north is dishonest in every round from the second on, each time in another way."""
    folder = tmp_path_factory.mktemp("refused")
    loop = Loopback(folder / "sites")
    for round, (fault, _) in enumerate(BAD.values(), start=2):
        loop.faults[("north", "train", round)] = fault
    conducted(loop, folder / "run", rounds=1 + len(BAD), **SHORT)
    return folder / "run", loop


@mark.parametrize("kind", BAD)
def test_a_bad_reply_is_refused_by_name_and_counted_once(kind: str, refused: tuple[Path, Loopback]) -> None:
    folder, loop = refused
    record = records(folder)[1 + list(BAD).index(kind)]
    assert list(record["refused"]) == ["train/north"]
    assert BAD[kind][1] in record["refused"]["train/north"]
    assert record["lost"] == {} and "stray" not in record
    assert set(record["loss"]) == {"east", "south"}
    assert result(folder)["num_refused"] == len(BAD)
    assert not loop.faults


STRAY = {
    "duplicated": (loopback.duplicated, "north: a second answer to 'train'"),
    "uninvited": (loopback.uninvited, "stranger: an unrequested answer to 'train'"),
    "an old one first": (loopback.replayed_first, "north: the message's task is 'evaluate'"),
}


def test_replies_too_many_are_counted_once_and_the_right_one_is_used(tmp_path: Path) -> None:
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    for round, (fault, _) in enumerate(STRAY.values(), start=2):
        loop.faults[("north", "train", round)] = fault
    conducted(loop, folder, rounds=1 + len(STRAY), **QUICK)
    conducted(Loopback(tmp_path / "others"), tmp_path / "honest", rounds=1 + len(STRAY), **QUICK)
    for record, (_, words) in zip(records(folder)[1:], STRAY.values(), strict=True):
        assert len(record["stray"]) == 1 and record["stray"][0].startswith(words)
        assert record["lost"] == record["refused"] == {}
    assert live(folder)["stray"] == len(STRAY)
    assert result(folder)["params_sha256"] == result(tmp_path / "honest")["params_sha256"]


def test_a_late_reply_is_lost_to_its_round_and_counted_once(tmp_path: Path) -> None:
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    loop.faults[("south", "train", 1)] = loopback.delayed
    conducted(loop, folder, deadline=1.5, **SHORT)
    first, second = records(folder)
    assert "within the deadline of 1.5 s" in first["lost"]["train/south"]
    assert first["stray"] == ["south: late: its reply came after the deadline"]
    assert second["lost"] == {} and "stray" not in second
    assert live(folder)["stray"] == 1


def test_a_reply_over_the_cap_is_refused(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"

    def large(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
        reply = loop.answer(name, parcel)
        yield name, loopback.sealed(reply, more={"padding": ["x" * 100_000] * 30})

    monkeypatch.setattr(limits, "REPLY_BYTES", 2_000_000)
    loop.faults[("north", "train", 1)] = large
    conducted(loop, folder, rounds=1, **SHORT)
    assert "at most 2,000,000 are allowed" in records(folder)[0]["refused"]["train/north"]


SENSELESS = [
    {"cases": 3},
    {"cases": ["north"]},
    {"cases": [{"case": "a", "loss": 1.0}]},
    {"cases": [{"case": "a", "loss": "x", "regions": {}}]},
]


def test_scores_that_make_no_sense_are_refused_and_end_nothing(
    tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    rounds = len(SENSELESS)
    for round, scalars in enumerate(SENSELESS, start=1):
        loop.faults[("north", "evaluate", round)] = changed(scalars=scalars)
    loop.faults[("north", "evaluate", rounds + 1)] = changed(scalars=SENSELESS[0])  # the test
    loop.faults[("north", "calibrate", rounds + 1)] = changed(scalars={"first": "x", "voxels": 5})
    conducted(loop, folder, rounds=rounds)
    assert result(folder)["status"] == "done" and not loop.faults
    for found in [*(record["validation"] for record in records(folder)), result(folder)["test"]]:
        assert set(found["dice"]["clients"]) == {"east", "south"}
    assert caplog.text.count("'north', evaluate: reply refused: it cannot be read") == rounds + 1
    assert caplog.text.count("'north', calibrate: reply refused: it cannot be read") == 1


def test_what_a_hospital_may_not_do_is_told_with_its_reason(tmp_path: Path) -> None:
    rules = {
        "east": loopback.RULES.model_copy(update={"tasks": ("evaluate",)}),
        "north": loopback.RULES.model_copy(update={"largest_message": 3_500}),
    }
    loop, folder = Loopback(tmp_path / "sites", **rules), tmp_path / "run"
    conducted(loop, folder, rounds=1, **SHORT)
    lost = records(folder)[0]["lost"]
    assert lost["train/east"].startswith("the hospital refuses: task 'train' is not allowed")
    assert "largest_message" in lost["train/north"]
    assert set(lost) == {"train/east", "train/north", "evaluate/north"}


# Registration


def registered(tmp_path: Path, fault: loopback.Fault, **changes: Any) -> str:
    """Why north takes no part when it registers like this; the others do."""
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    loop.faults[("north", "register", 0)] = fault
    live = Live(folder / "live.json")
    transport = Remote(
        loop,
        remote_config(folder, **changes),
        run="0" * 16,
        names=loop.sites,
        live=live,
        exchange=folder / "x",
    )
    assert {entry.client for entry in transport.register()} == {"east", "south"} == set(transport.facts)
    return transport._gone["north"]


def said(**content: Any) -> loopback.Fault:
    """A registration in which something else is said."""

    def fault(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
        reply = loop.answer(name, parcel)
        scalars = {key: {**reply.header["scalars"][key], **value} for key, value in content.items()}
        yield name, loopback.sealed(reply, scalars=scalars)

    return fault


ABSURD = {
    "no facts": changed(scalars={"facts": 3}),
    "no registration": changed(scalars={"registration": ["north"]}),
    "a billion channels": said(facts={"in_channels": 10**9}),
    "no dimensions": said(facts={"dimensions": 0}),
    "a class too many": said(facts={"regions": {"lesion": [7]}}),
    "a shape of text": said(facts={"shape": ["a", "b"]}),
    "a shape of five sides": said(facts={"shape": [8] * 5}),
    "infinite spacing": said(facts={"spacing": [[1.0, float("inf")], [1.0, 1.0]]}),
    "an unknown way to prepare": said(facts={"prepare": {"normalise": "magic"}}),
    "fewer cases than none": said(registration={"num_train": -1}),
    "more cases than people": said(registration={"num_train": 10**12}),
    "votes for classes that there are not": said(registration={"annotates": [True] * 200 + [False]}),
    "tensors of text": said(registration={"tensors": {"x": "y"}}),
    "a tensor of 5,000 sides": said(registration={"tensors": {"x": [[2**62] * 5000, "F32"]}}),
    "a type that is none": said(registration={"tensors": {"x": [[1], ["F32"]]}}),
}


@mark.parametrize("fault", ABSURD.values(), ids=ABSURD.keys())
def test_an_absurd_registration_is_left_out(fault: loopback.Fault, tmp_path: Path) -> None:
    assert "cannot be read" in registered(tmp_path, fault)


def test_words_of_a_hospital_reach_the_organisers_terminal_as_plain_lines(
    tmp_path: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    """In `status` (live.json) and in the error of `submit`, which quotes it."""
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    rude = "\x1b[2J\x1b]0;owned\x07 fine\r\nerror none\u202e"
    loop.faults |= {
        ("east", "register", 0): said(facts={"prepare": {rude: rude}}),
        ("north", "register", 0): changed(more={"refused": rude}),
        ("south", "register", 0): changed(more={"failure": rude}),
    }
    with raises(TooFewClients):
        conducted(loop, folder, rounds=1, **SHORT)
    reason = live(folder)["reason"]
    assert reason.isprintable() and "fine  error none" in reason

    def fail() -> None:
        raise RunFailed(f"'north': {rude}")

    monkeypatch.setattr(cli, "app", fail)
    with raises(SystemExit):
        cli.main()
    shown = capsys.readouterr().err
    assert all(line.isprintable() for line in shown.splitlines()) and "owned" in shown


def test_a_hospital_that_does_not_register_in_time_takes_no_part(tmp_path: Path) -> None:
    assert "within the deadline of 1 s" in registered(tmp_path, loopback.delayed, deadline=1.0)


def test_a_run_goes_on_without_a_hospital_that_did_not_register(tmp_path: Path) -> None:
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    loop.faults[("north", "register", 0)] = said(facts={"in_channels": 10**9})
    conducted(loop, folder, rounds=1, **SHORT)
    assert {name for name, task, _ in loop.asked if task != "register"} == {"east", "south"}
    assert "in_channels" in live(folder)["away"]["north"]


def test_too_few_registrations_end_the_run_with_every_reason(tmp_path: Path) -> None:
    loop = Loopback(tmp_path / "sites")
    loop.away = {"east"}
    loop.faults[("north", "register", 0)] = loopback.tampered_header
    with raises(
        TooFewClients, match=r"1 hospitals registered.*'east': it has not been heard from.*'north': .*SHA"
    ):
        conducted(loop, tmp_path / "run", min_clients=2, deadline=0.5)
    assert live(tmp_path / "run")["state"] == "failed"


@mark.parametrize(
    "content",
    [
        {"tensors": {"x": [[10**9, 10**9], "F32"]}},
        {"trainable": ["nothing like it"]},
    ],
)
def test_a_hospital_with_another_network_is_named(content: dict[str, Any], tmp_path: Path) -> None:
    loop = Loopback(tmp_path / "sites")
    loop.faults[("north", "register", 0)] = said(registration=content)
    with raises(ConfigError, match="hospital 'north' has a different network: tensor"):
        conducted(loop, tmp_path / "run")


def test_names_of_hospitals_are_checked(tmp_path: Path) -> None:
    config = remote_config(tmp_path / "run")
    for names, words in ((["north", "north"], "named twice"), (["", "north"], "cannot be the name")):
        with raises(ConfigError, match=words):
            conduct(Loopback(tmp_path / "sites"), config, names=names)


def test_hospitals_that_nobody_named_take_no_part(tmp_path: Path) -> None:
    loop = Loopback(tmp_path / "sites")
    conduct(loop, remote_config(tmp_path / "run", rounds=1, **SHORT), names=["north", "south"])
    assert {name for name, _, _ in loop.asked} == {"north", "south"}


# What everybody can see


def test_live_json_says_what_is_waited_for_and_until_when(tmp_path: Path) -> None:
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    seen: list[dict[str, Any]] = []

    def look(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
        seen.append(live(folder))
        yield name, loop.answer(name, parcel)

    for name in loop.sites:
        loop.faults[(name, "train", 2)] = look
    conduct(loop, remote_config(folder, **SHORT), names=sorted(loop.sites), job="a-job")
    assert [facts["waiting_for"] for facts in seen] == [
        ["east", "north", "south"],
        ["north", "south"],
        ["south"],
    ]
    assert {(facts["state"], facts["task"], facts["round"]) for facts in seen} == {("waiting", "train", 2)}
    assert {facts["job"] for facts in seen} == {"a-job"} and seen[0]["rounds"] == 2
    times = [datetime.fromisoformat(facts["until"]) for facts in seen]
    assert (max(times) - min(times)).total_seconds() <= 1  # one deadline, whoever has answered
    done = live(folder)
    assert (done["state"], done["waiting_for"], done["until"]) == ("done", [], None)


def test_a_hospital_that_is_not_there_yet_is_waited_for(tmp_path: Path, caplog: LogCaptureFixture) -> None:
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    loop.away = {"south"}
    seen: list[dict[str, Any]] = []
    alive = loop.alive

    def arriving() -> Any:
        if (folder / "live.json").exists() and live(folder)["waiting_for"]:
            seen.append(live(folder))
            loop.away.clear()
        return alive()

    loop.alive = arriving
    conducted(loop, folder, rounds=1, **SHORT)
    assert (seen[0]["task"], seen[0]["waiting_for"]) == ("register (to connect)", ["south"])
    assert seen[0]["round"] == 0
    assert ("south", "train", 1) in loop.asked


def test_replies_are_not_kept(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """With no room for replies in memory, none of a round's is alive when the next hospital answers."""
    loop, folder = Loopback(tmp_path / "sites"), tmp_path / "run"
    monkeypatch.setattr(remote, "Spilling", lambda path: Spilling(path, MemoryBudget(0)))
    alive: list[int] = []
    arrays: list[weakref.ref[Any]] = []

    def counted(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
        gc.collect()
        alive.append(sum(ref() is not None for ref in arrays))
        reply = loop.sites[name].answer(parcel)
        arrays.extend(weakref.ref(array) for array in reply.arrays.values())
        yield name, reply

    for name in loop.sites:
        loop.faults[(name, "train", 1)] = counted
    conducted(loop, folder, rounds=1, **SHORT)
    gc.collect()
    assert sum(ref() is not None for ref in arrays) == 0
    assert max(alive) <= len(arrays) / 3  # at most the last one
