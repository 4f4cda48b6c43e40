"""The hospital's side: what it answers, what it refuses, and that nothing leaves unwritten."""

from __future__ import annotations

import json
import pickle
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from helpers import params, spoil
from pytest import MonkeyPatch, TempPathFactory, approx, fixture, mark, raises

from deploy.loopback import RULES, Loopback, conducted, honest, remote_config, sealed
from wardround.clients import SyncState
from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.deploy import ledger
from wardround.deploy.agreement import make_hospital_config
from wardround.deploy.ledger import LedgerError
from wardround.deploy.parcel_file import write_numbers
from wardround.deploy.resources import Resources
from wardround.deploy.site import Site, choose_device
from wardround.deploy.site_file import SiteFile
from wardround.deploy.wire import Parcel, pack, unpack
from wardround.engine.host import REASON_KEPT
from wardround.engine.memory_store import MemoryStore
from wardround.engine.networks import build_model
from wardround.errors import ConfigError
from wardround.messages import Message
from wardround.params import Params
from wardround.privacy import PrivacySettings

RUN = "0123456789abcdef"
SCAFFOLD = {"method": {"name": "scaffold"}}


def request(
    task: str = "register",
    round: int = -1,
    message: Message | None = None,
    client: str = "north",
    **more: Any,
) -> Parcel:
    """What the organiser would send."""
    config = make_hospital_config(remote_config(Path("nowhere"), **more.pop("changes", {})))
    return pack(
        message or Message(),
        kind="request",
        run=RUN,
        request=secrets.token_hex(16),
        client=client,
        task=task,
        round=round,
        more={"config": config, "sync_state": SyncState().as_dict(), **more},
    )


def training(round: int = 0, **more: Any) -> Parcel:
    """A request to train a round of SCAFFOLD, which leaves something in memory."""
    model = build_model(remote_config(Path("nowhere"), **SCAFFOLD))
    control = Params.trainable(model).zeros()
    message = Message(params=Params.of(model), extras={"control": control})
    return request("train", round, message, changes=SCAFFOLD, **more)


def more_of(reply: Parcel) -> dict[str, Any]:
    more: dict[str, Any] = reply.header["more"]
    return more


def refusal(reply: Parcel) -> str:
    assert not reply.arrays and reply.header["scalars"] == {}
    return str(more_of(reply)["refused"])


@fixture
def site(tmp_path: Path) -> Site:
    return Site("north", RULES, tmp_path / "state")


@fixture
def opened(tmp_path: Path) -> Callable[..., Site]:
    """North under other rules."""

    def open_site(**rules: Any) -> Site:
        return Site("north", RULES.model_copy(update=rules), tmp_path / "state")

    return open_site


# Answering


def test_a_request_is_answered_in_its_own_terms(site: Site) -> None:
    asked = training()
    reply = site.answer(asked)
    header = asked.header
    message, more = unpack(
        reply, kind="reply", run=RUN, request=header["request"], client="north", task="train", round=0,
        largest=10**9,
    )  # fmt: skip
    assert message.optional_params is not None and set(message.extras) == {"control_change"}
    assert set(more) == {"num_examples", "num_steps", "seconds", "loss"}


@mark.parametrize("method", ["fedavg", "scaffold", "fedevi"])
def test_a_hospital_that_registers_builds_the_model_that_the_run_begins_with(
    method: str, tmp_path: Path
) -> None:
    hospitals, found = Loopback(tmp_path / "sites", ("north",)), []

    def compare(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
        built = loop.sites[name].first_model
        assert built is not None
        for number, one in enumerate((built, parcel)):
            write_numbers(tmp_path / str(number), one)
            found.append((tmp_path / str(number)).read_bytes())
        yield from honest(loop, name, parcel)
        assert loop.sites[name].first_model is None

    hospitals.faults[("north", "train", 1)] = compare
    conducted(hospitals, tmp_path / "run", rounds=1, min_clients=1, method={"name": method})
    assert len(found[0]) > 1000 and found[0] == found[1]


def test_a_request_is_answered_once(site: Site, tmp_path: Path) -> None:
    asked = training()
    assert "refused" not in more_of(site.answer(asked))
    assert "a replay" in refusal(site.answer(asked))
    again = Site("north", RULES, tmp_path / "state")
    assert "a replay" in refusal(again.answer(asked))
    assert "refused" not in more_of(again.answer(training(1)))


def test_a_request_of_a_secure_sum_is_answered_once_too(site: Site, tmp_path: Path) -> None:
    asked = request("sum_unmask", 0)
    assert "failure" in more_of(site.answer(asked))  # nothing waits to be summed
    assert "a replay" in refusal(site.answer(asked))
    assert "a replay" in refusal(Site("north", RULES, tmp_path / "state").answer(asked))


def test_what_was_refused_is_not_done_later_either(opened: Callable[..., Site]) -> None:
    asked = training()
    assert "not allowed" in refusal(opened(methods=("fedavg",)).answer(asked))
    assert "a replay" in refusal(opened().answer(asked))


def test_a_request_that_a_crash_interrupted_is_done_when_it_comes_again(
    site: Site, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    asked = training()
    monkeypatch.setattr(Site, "_run_task", crash)
    with raises(Crash):
        site.answer(asked)
    monkeypatch.undo()
    reply = Site("north", RULES, tmp_path / "state").answer(asked)
    other = Site("north", RULES, tmp_path / "elsewhere").answer(asked)
    assert reply.arrays.keys() == other.arrays.keys()
    assert all(np.array_equal(reply.arrays[key], other.arrays[key]) for key in reply.arrays)


def test_a_request_whose_memory_was_written_before_the_crash_is_not_done_twice(
    site: Site, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    asked = training()
    monkeypatch.setattr(Site, "_filter_reply", crash)
    with raises(Crash):
        site.answer(asked)
    monkeypatch.undo()
    (kept,) = (tmp_path / "state").glob("*/north/memory-*")
    content = kept.read_bytes()
    reply = Site("north", RULES, tmp_path / "state").answer(asked)
    assert "its answer was lost" in refusal(reply)
    assert kept.read_bytes() == content


class Crash(BaseException):
    """The process ends here."""


def crash(*_: Any) -> None:
    raise Crash


def test_an_answer_that_cannot_be_sent_is_a_failure_that_is_told(
    site: Site, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(Site, "_filter_reply", lambda *_: (Message(scalars={"odd": {1, 2}}), {}))
    assert "cannot be sent" in more_of(site.answer(request()))["failure"]


# Refusing


def test_a_request_for_another_hospital_is_refused(site: Site) -> None:
    assert "client is 'south', expected 'north'" in refusal(site.answer(request(client="south")))


NOW = datetime.now()
RULED_OUT = {
    "task": ({"tasks": ("evaluate",)}, "task 'train' is not allowed"),
    "method": ({"methods": ("fedavg",)}, "method 'scaffold' is not allowed"),
    "network": ({"networks": ("unet3d",)}, "network 'unet2d' is not allowed"),
    "objective": ({"objectives": ("cross_entropy",)}, "objective 'dice"),
    "run": ({"runs": ("prostate-*",)}, "run 'tiny' is not allowed"),
    "cases": ({"min_cases": 1000}, "at least 1000 training cases"),
    "bytes": ({"largest_message": 100}, "at most 100 B"),
    "hours": (
        {"quiet_hours": (f"{NOW - timedelta(hours=1):%H:%M}-{NOW + timedelta(hours=2):%H:%M}",)},
        "quiet hours",
    ),
}


@mark.parametrize("rule", RULED_OUT)
def test_a_request_outside_the_rules_is_refused_and_nothing_is_done(
    rule: str, opened: Callable[..., Site], tmp_path: Path
) -> None:
    rules, words = RULED_OUT[rule]
    assert words in refusal(opened(**rules).answer(training()))
    assert not list((tmp_path / "state").glob("*/north/memory-*"))


def test_an_answer_that_is_too_large_stays(opened: Callable[..., Site]) -> None:
    asked = training()
    reply = opened(largest_message=asked.num_bytes).answer(asked)
    less = opened(largest_message=asked.num_bytes // 2).answer(training())
    assert "request has" in refusal(less)
    assert more_of(reply).get("refused") is None or "answer has" in refusal(reply)


def test_tables_that_may_not_leave_stay(opened: Callable[..., Site]) -> None:
    model = build_model(remote_config(Path("nowhere")))
    ask = Message(params=Params.of(model), scalars={"split": "val", "metrics": ["dice"]})
    reply = opened(scalars=("loss/*",)).answer(request("evaluate", 0, ask))
    assert "'cases', which may not leave" in refusal(reply)


def test_numbers_that_are_none_are_refused_on_their_way_in(site: Site) -> None:
    asked = request("train", 0, Message(params=params(x=torch.tensor([float("nan")]))))
    assert "NaN" in refusal(site.answer(asked))


def test_a_changed_request_is_refused_and_the_true_one_is_still_answered(site: Site) -> None:
    asked = training()
    header = {**asked.header, "round": 7}
    assert "SHA-256" in refusal(site.answer(Parcel(header, asked.arrays)))
    assert "refused" not in more_of(site.answer(asked))


STRANGE = {
    "no header": lambda asked: Parcel([], {}),  # type: ignore[arg-type]
    "empty header": lambda asked: Parcel({}, {}),
    "no config": lambda asked: sealed(asked, more={"config": None}),
    "no number": lambda asked: sealed(asked, request=None),
    "two words as number": lambda asked: sealed(asked, request="a b"),
    "no run": lambda asked: sealed(asked, run=""),
    "a huge round": lambda asked: Parcel({**asked.header, "round": 2**80}, {}),
    "a round of text": lambda asked: sealed(asked, round="one"),
    "bytes for an array": lambda asked: Parcel(asked.header, {"params/x": b"abc"}),  # type: ignore[dict-item]
    "an object in the header": lambda asked: Parcel(
        {**asked.header, "more": {"config": {"x": object()}}}, {}
    ),
    "a header in a circle": lambda asked: Parcel({**asked.header, "more": in_a_circle()}, {}),
    "a header that never ends": lambda asked: Parcel({**asked.header, "more": {"config": {"x": deep()}}}, {}),
    "nothing for arrays": lambda asked: Parcel(asked.header, None),  # type: ignore[arg-type]
    "an array without a size": lambda asked: Parcel(asked.header, {"params/x": object()}),  # type: ignore[dict-item]
}


def in_a_circle() -> dict[str, Any]:
    more: dict[str, Any] = {"config": {}}
    more["config"]["more"] = more
    return more


def deep() -> list[Any]:
    inner: list[Any] = []
    for _ in range(200_000):
        inner = [inner]
    return inner


@mark.parametrize("kind", STRANGE)
def test_whatever_comes_gets_an_answer(kind: str, site: Site) -> None:
    assert refusal(site.answer(STRANGE[kind](request())))


def test_a_standing_that_makes_no_sense_is_a_failure_that_is_told(site: Site) -> None:
    assert "KeyError" in more_of(site.answer(training(sync_state={})))["failure"]


def test_an_unknown_task_is_told(opened: Callable[..., Site]) -> None:
    reply = opened(tasks=("all",)).answer(request("score", 0))
    assert "task 'score' is not one this method knows" in more_of(reply)["failure"]


@mark.parametrize(
    ("section", "content", "words"),
    [
        ("data", {"federation": "/etc/passwd", "phantom": {}}, "data.federation"),
        ("data", {"folders": {"path": "/etc", "size": [8, 8]}}, "data.folders"),
        ("data", {"splits": {"by": "file", "file": "/etc/passwd"}}, "data.splits"),
        ("model", {"weights": "/etc/passwd"}, "model.weights"),
    ],
)
def test_no_path_of_the_organiser_is_opened(
    section: str, content: dict[str, Any], words: str, site: Site, caplog: Any
) -> None:
    asked = request()
    config = asked.header["more"]["config"]
    config = {**config, section: {**config[section], **content}}
    reply = site.answer(sealed(asked, more={"config": config}))
    assert {"failure", "refused"} & set(more_of(reply)) and not reply.arrays
    assert words in caplog.text


# An organiser who wants one scan


@fixture(scope="module")
def scans(tmp_path_factory: TempPathFactory) -> Path:
    """The federation.yaml of a hospital with 16 pictures, 12 of them to train on."""
    folder: Path = tmp_path_factory.mktemp("hospital")
    phantom_files.write(PhantomSettings(hospitals=2, size=16, cases=16), folder / "scans", "png", 1)
    path = folder / "federation.yaml"
    splits = {"by": "ratios", "ratios": [0.75, 0.125, 0.125]}
    path.write_text(
        yaml.safe_dump({"sources": [{"path": "scans"}], "labels": {"lesion": [1]}, "splits": splits})
    )
    return path


def ask_for(task: str = "train", split: str = "val", **sections: Any) -> Parcel:
    """A request for real cases in which sections of the configuration are as a modified organiser likes."""
    changes = {"data": {"hospitals": True}, "batch_size": 4}
    model = build_model(remote_config(Path("nowhere")))
    message = Message(params=Params.of(model), scalars={"split": split, "metrics": ["dice"]})
    asked = request(task, 0, message, changes=changes)
    config = asked.header["more"]["config"]
    for name, content in sections.items():
        config[name] = {**config[name], **content} if isinstance(content, dict) else content
    return sealed(asked, more={"config": config})


ONE_CASE = {"splits": {"by": "ratios", "ratios": [0.01, 0.0, 0.99]}}
ONE_KERNEL = {
    "name": "monai:UNet", "base_filters": None, "levels": None, "norm": None, "dropout": None,
    "arguments": {"channels": [1, 1], "strides": [1], "kernel_size": 31},
}  # fmt: skip
ONE_STEP = {"name": "sgd", "learning_rate": 1.0, "weight_decay": 1.0}
WAYS = {
    "one training case": ({"data": ONE_CASE}, "the run sets data.splits"),
    "one huge kernel": ({"model": ONE_KERNEL}, "network 'monai:UNet' is not allowed"),
    "one huge layer": ({"model": {"base_filters": 10**6}}, "model.base_filters is 1,000,000, but at most"),
    "one case in a step": ({"batch_size": 1}, "batch_size is 1, but a training step"),
    "one step that counts": ({"optimizer": ONE_STEP}, "let a task forget all but its last steps"),
    "training cases one by one": ({"task": "evaluate", "split": "train"}, "evaluation of split 'train'"),
    "all of it": (
        {"data": ONE_CASE, "model": ONE_KERNEL, "batch_size": 1, "optimizer": ONE_STEP},
        "is not allowed at this hospital",
    ),
}


@mark.parametrize("way", WAYS)
def test_no_way_to_one_scan_is_open_under_default_rules(way: str, scans: Path, tmp_path: Path) -> None:
    asked, words = WAYS[way]
    site = Site("north", SiteFile(data=scans), tmp_path / "state")
    assert words in refusal(site.answer(ask_for(**asked)))
    (line,) = ledger.read(tmp_path / "state" / "egress.jsonl")
    assert words in line["refused"] and line["tensors"] == {}


def test_an_honest_run_is_answered_under_default_rules(scans: Path, tmp_path: Path) -> None:
    site = Site("north", SiteFile(data=scans), tmp_path / "state")
    for task in ("register", "train", "evaluate"):
        assert not {"refused", "failure"} & set(more_of(site.answer(ask_for(task))))
    few = Site("north", SiteFile(data=scans, splits=ONE_CASE["splits"]), tmp_path / "few")
    assert "at least 10 training cases" in refusal(few.answer(ask_for()))


def test_a_network_that_is_allowed_but_too_large_is_refused_before_it_is_built(
    scans: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr("wardround.deploy.site.Host", None)
    site = Site("north", SiteFile(data=scans), tmp_path / "state")
    wide = ask_for(model={"base_filters": 128, "levels": 8})
    assert "the number of parameters of network 'unet2d' is" in refusal(site.answer(wide))


def test_a_model_trained_on_a_few_chosen_cases_stays(
    scans: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    spoil(monkeypatch, "north", lambda answer: replace(answer, num_trained=3))
    site = Site("north", SiteFile(data=scans), tmp_path / "state")
    assert "fewer than 10 cases" in refusal(site.answer(ask_for()))


def test_a_task_that_takes_too_long_ends_at_the_next_step(
    scans: Path, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    ticks = iter(range(100))
    clock = SimpleNamespace(monotonic=lambda: 0.6 * next(ticks))
    monkeypatch.setattr("wardround.deploy.site.time", clock)
    site = Site("north", SiteFile(data=scans, resources=Resources(seconds=1)), tmp_path / "state")
    assert "a task may take at most 1 seconds" in refusal(site.answer(ask_for()))
    assert next(ticks) == 4  # the start, two of three steps, the end


# Nothing is executed


def test_code_that_is_not_allowed_is_never_imported(
    site: Site, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "uninvited_net.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Net: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    asked = request()
    name = "uninvited_net:Net"
    sections = [(key, place) for key in ("model", "method", "objective") for place in ({"name": name}, name)]
    sections += [("evaluate", {"metrics": given}) for given in ([name], name, {name: 1}, 7)]
    sections += [("evaluate", {"select": name}), ("evaluate", name)]
    for key, place in sections:
        config = {**asked.header["more"]["config"], key: place}
        more_of(site.answer(sealed(asked, request=secrets.token_hex(16), more={"config": config})))
    assert "uninvited_net" not in sys.modules
    assert not marker.exists()


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def test_a_pickle_is_never_executed(site: Site, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    trap = Trap(str(marker))
    pickled = pickle.dumps(trap)
    asked = request()
    objects = np.empty(1, dtype=object)
    objects[0] = trap
    offers = [
        Parcel(asked.header, {"params/x": objects}),
        Parcel(asked.header, {"params/x": np.frombuffer(pickled, dtype=np.uint8)}),
        Parcel(asked.header, {"params/x": pickled}),  # type: ignore[dict-item]
        Parcel({**asked.header, "more": pickled}, {}),
        Parcel({**asked.header, "more": {"config": trap}}, {}),
        Parcel(pickled, {}),  # type: ignore[arg-type]
        sealed(asked, more={"config": {**asked.header["more"]["config"], "name": pickled.hex()}}),
        sealed(asked, run=pickled.decode("latin-1")),
    ]
    for offer in offers:
        site.answer(offer)
    assert not marker.exists()
    pickle.loads(pickled).close()  # noqa: S301
    assert marker.exists()  # the trap works


# The ledger


@fixture(scope="module")
def run_over(tmp_path_factory: TempPathFactory) -> Path:
    """The state folders of a small run's hospitals."""
    folder = tmp_path_factory.mktemp("run")
    conducted(Loopback(folder / "sites"), folder / "run", rounds=1)
    return folder


def test_every_reply_has_its_line_and_the_chain_holds(run_over: Path) -> None:
    for name in ("east", "north", "south"):
        path = run_over / "sites" / name / "egress.jsonl"
        assert ledger.verify(path).ok
        lines = list(ledger.read(path))
        assert [line["task"] for line in lines][:3] == ["register", "train", "evaluate"]
        assert {line["name"] for line in lines} == {"tiny"}
        assert (run_over / "run" / "run_id.txt").read_text().strip() == lines[0]["run"]


def test_the_line_is_written_before_the_reply_returns(
    site: Site, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    order: list[str] = []
    append, note = ledger.Ledger.append, Site._note

    def appending(self: Any, *given: Any, **rest: Any) -> Any:
        line = append(self, *given, **rest)
        order.append(f"line {line['sha256']}")
        return line

    def noting(self: Any, run: str, request: str, state: str, **how: Any) -> None:
        order.append(state)
        note(self, run, request, state, **how)

    monkeypatch.setattr(ledger.Ledger, "append", appending)
    monkeypatch.setattr(Site, "_note", noting)
    reply = site.answer(training())
    assert order[1:] == [f"line {reply.sha256}", "answered"]
    last = json.loads((tmp_path / "state" / "egress.jsonl").read_text().splitlines()[-1])
    assert last["sha256"] == reply.sha256 and last["bytes"] == reply.num_bytes


def test_refusals_have_a_line_too(opened: Callable[..., Site], tmp_path: Path) -> None:
    opened(tasks=("evaluate",)).answer(training())
    (line,) = ledger.read(tmp_path / "state" / "egress.jsonl")
    assert "not allowed" in line["refused"] and line["tensors"] == {}


def test_nothing_leaves_when_the_ledger_cannot_be_written(site: Site, tmp_path: Path) -> None:
    site.answer(request())
    path = tmp_path / "state" / "egress.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"register"', b'"evaluate"'))  # somebody was at it
    with raises(LedgerError):
        site.answer(training())
    with raises(LedgerError):
        Site("north", RULES, tmp_path / "state")


def test_a_full_disk_keeps_everything_in(site: Site, tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise LedgerError("no room")

    asked = training()
    monkeypatch.setattr(ledger.Ledger, "append", full)
    with raises(LedgerError):
        site.answer(asked)
    assert (
        asked.header["request"] + " answered" not in (tmp_path / "state" / RUN / "requests.txt").read_text()
    )


# Memory


def test_memory_lies_under_its_run_and_outlives_the_process(site: Site, tmp_path: Path) -> None:
    site.answer(training())
    Site("north", RULES, tmp_path / "state").answer(training(1))
    store = MemoryStore(tmp_path / "state" / RUN / "north")
    names = [path.name for path in sorted(store.folder.glob("memory-*"))]
    assert names == ["memory-00000.safetensors", "memory-00001.safetensors"]


def test_the_threads_a_hospital_sets_count(opened: Callable[..., Site]) -> None:
    before = torch.get_num_threads()
    try:
        opened(threads=2).answer(request())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# The device


@mark.parametrize(("device", "here", "words"), [("cuda", 0, "no GPU here"), ("cuda:2", 2, "has 2 GPUs")])
def test_a_device_that_is_not_there_is_said_before_the_first_request(
    device: str, here: int, words: str, monkeypatch: MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: here > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: here)

    with raises(ConfigError, match=words):
        choose_device(SiteFile(device=device))
    assert choose_device(SiteFile(device="cpu")) == "cpu"
    assert choose_device(SiteFile()) == ("cuda" if here else "cpu")


# Privacy

PRIVATE = PrivacySettings(level="client", epsilon=4.0, cases=20)


def private_training(round: int = 0, **changes: Any) -> Parcel:
    model = build_model(remote_config(Path("nowhere")))
    return request("train", round, Message(params=Params.of(model)), changes={"rounds": 2, **changes})


def test_a_hospital_noises_what_leaves_whatever_the_run_asks_for(opened: Callable[..., Site]) -> None:
    asked = {"privacy": {"level": "case", "epsilon": 99.0, "scores": "show"}}
    facts = more_of(opened(privacy=PRIVATE).answer(private_training(**asked)))

    assert facts["privacy"]["level"] == "client" and facts["privacy"]["limit"] == 4.0
    assert (facts["num_examples"], facts["seconds"], facts["loss"]) == (20, 0.0, {})


def test_a_run_may_ask_for_more_privacy_than_the_hospital(opened: Callable[..., Site]) -> None:
    asked = {"privacy": {"level": "client", "epsilon": 1.0}, "rounds": 1}
    facts = more_of(opened(privacy=PRIVATE).answer(private_training(**asked)))

    assert facts["privacy"]["epsilon"] == approx(1.0, rel=1e-4)


def test_a_spent_budget_outlives_the_process_and_covers_all_runs(opened: Callable[..., Site]) -> None:
    site = opened(privacy=PRIVATE)
    for round in range(2):
        assert "failure" not in more_of(site.answer(private_training(round)))
    other = opened(privacy=PRIVATE)
    asked = private_training(0, name="another")
    asked = replace(asked, header={**asked.header, "run": "fedcba9876543210"})

    reply = other.answer(sealed(asked))
    assert not reply.arrays
    assert (
        "the privacy budget of this hospital is spent: epsilon 4 at delta 1e-05" in more_of(reply)["failure"]
    )


def test_the_ledger_says_what_the_filters_did(opened: Callable[..., Site], tmp_path: Path) -> None:
    opened(privacy=PRIVATE).answer(private_training())

    (line,) = ledger.read(tmp_path / "state" / "egress.jsonl")
    assert [entry["filter"] for entry in line["privacy"]["filters"]] == ["withhold", "client_noise"]


def test_a_private_hospital_registers_its_declared_number_and_no_shapes(opened: Callable[..., Site]) -> None:
    scalars = opened(privacy=PRIVATE).answer(request("register")).header["scalars"]

    told = scalars["registration"]
    assert (told["num_train"], told["num_val"], told["num_test"]) == (20, 0, 0)
    assert scalars["facts"]["shape"] is scalars["facts"]["spacing"] is None


def test_a_private_hospital_tells_no_true_count_of_cases_without_label_or_channel(tmp_path: Path) -> None:
    cases = {"hospitals": 3, "size": 16, "cases": 8, "channels": 2, "unlabelled": ["north"]}
    lacks = {"lacks": {"north": ["channel_0"]}}
    changes = {"data": {"phantom": {**cases, **lacks}}, "objective": {"name": "pseudo_labels"}}
    told = []
    for privacy in (PrivacySettings(), PRIVATE):
        site = Site("north", RULES.model_copy(update={"privacy": privacy}), tmp_path / privacy.level)
        scalars = site.answer(request("register", changes=changes)).header["scalars"]
        told.append((scalars["registration"]["num_unlabelled"], scalars["facts"]["lacks"]))

    assert told == [(5, {"channel_0": 8}), (20, {"channel_0": 20})]


def test_the_limit_of_steps_is_held_against_the_declared_number(opened: Callable[..., Site]) -> None:
    """A run with other numbers of steps would otherwise find the true number of cases by what is refused."""
    limits = Resources.unlimited().model_copy(update={"steps": 5})
    changes = {"batch_size": 2, "local_epochs": 1}  # 3 steps for 5 true cases, 10 for 20 declared ones

    assert "refused" not in more_of(opened(resources=limits).answer(request("register", changes=changes)))
    asked = request("register", changes=changes)
    assert "at most 5 steps" in refusal(opened(resources=limits, privacy=PRIVATE).answer(asked))


@mark.parametrize("place", ["open_own_federation", "collect_facts", "Host.client"])
def test_why_cases_cannot_be_used_stays_at_a_private_hospital(
    opened: Callable[..., Site], monkeypatch: MonkeyPatch, place: str
) -> None:
    def fail(*_: Any) -> None:
        raise ConfigError("7 scans are 384 voxels wide")

    monkeypatch.setattr(f"wardround.deploy.site.{place}", fail)
    told = [
        more_of(opened(privacy=privacy).answer(request()))["failure"]
        for privacy in (PrivacySettings(), PRIVATE)
    ]

    assert told == ["7 scans are 384 voxels wide", REASON_KEPT]


def test_a_method_that_sends_more_is_refused_by_a_private_hospital(opened: Callable[..., Site]) -> None:
    reply = opened(privacy=PRIVATE).answer(training())

    assert "method 'scaffold' does not work with privacy.level: client" in more_of(reply)["failure"]


def test_a_run_over_private_hospitals_ends_with_their_epsilon_in_its_records(tmp_path: Path) -> None:
    rules = {name: RULES.model_copy(update={"privacy": PRIVATE}) for name in ("east", "north")}
    limits = {"refuse_opposite": False, "max_norm": None}  # noise on a few weights points anywhere
    conducted(Loopback(tmp_path / "sites", **rules), tmp_path / "run", rounds=2, limits=limits)

    told = json.loads((tmp_path / "run" / "records.jsonl").read_text().splitlines()[-1])["privacy"]
    assert sorted(told) == ["east", "north"]  # south has none
    assert told["east"]["epsilon"] == told["east"]["total"] == approx(4.0, rel=1e-4)
