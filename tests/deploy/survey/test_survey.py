"""A survey of three hospitals with planted differences, over a channel in this process."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch, TempPathFactory, fixture, mark, raises
from rich.console import Console
from typer.testing import CliRunner

from deploy.loopback import Loopback, changed, sealed
from deploy.planted import NAMES, plant
from wardround.cli import app, common
from wardround.cli import survey as cli_survey
from wardround.clients import Registration
from wardround.config import Config, LimitSettings
from wardround.config_file import load_config
from wardround.configuring.run_plan import RunPlan
from wardround.data.fingerprint.hardware import Hardware
from wardround.data.fingerprint.positions import PairPosition
from wardround.deploy import limits, organising
from wardround.deploy.agreement import DataFacts
from wardround.deploy.conducting import conduct
from wardround.deploy.evaluating import conduct_evaluation, configure_evaluation, load_judged
from wardround.deploy.kits.kit import Kit
from wardround.deploy.remote import bound_reply, check_scores
from wardround.deploy.resources import Resources
from wardround.deploy.site_file import SiteFile
from wardround.deploy.survey.answering import answer_survey, open_own_data
from wardround.deploy.survey.conducting import conduct_survey
from wardround.deploy.survey.page import draw_survey
from wardround.deploy.survey.proposals import HospitalProposal, ProposalFolder, read_proposal
from wardround.deploy.survey.proposing import match_channels, match_names
from wardround.deploy.survey.replies import read_surveyed
from wardround.deploy.survey.survey_file import Survey, load_survey
from wardround.deploy.wire import Parcel
from wardround.engine.judging.aggregates import aggregate_rows
from wardround.errors import ConfigError
from wardround.messages import Message, Reply
from wardround.params import Params

MINIMUM = 3
SMALL = ["rounds=1", "local_steps=3", "model.base_filters=4", "evaluate.calibrate=false", "compute.threads=1"]


@fixture(scope="module")
def files(tmp_path_factory: TempPathFactory) -> dict[str, Path]:
    return plant(tmp_path_factory.mktemp("planted"))


def write_rules(files: Mapping[str, Path], **changes: Any) -> dict[str, SiteFile]:
    values = {"min_cases": 5, "min_count": MINIMUM, "accept": "auto", "device": "cpu", **changes}
    return {
        name: SiteFile(data=path, resources=Resources.unlimited(), threads=1, **values)
        for name, path in files.items()
    }


def open_loop(folder: Path, files: Mapping[str, Path], **changes: Any) -> Loopback:
    return Loopback(folder / "sites", NAMES, **write_rules(files, **changes))


def survey_config(folder: Path) -> Config:
    return load_config(
        {"name": "survey", "data": {"hospitals": True}, "output": str(folder / "survey"), "deadline": 60}
    )


class Surveyed:
    """One survey for all tests that only look."""

    def __init__(self, folder: Path, files: Mapping[str, Path]) -> None:
        self.folder = folder
        self.loop = open_loop(folder, files)
        self.fingerprints: dict[str, Parcel] = {}
        answer = self.loop.answer

        def keep(name: str, parcel: Parcel) -> Parcel:
            reply = answer(name, parcel)
            if parcel.header["task"] == "fingerprint":
                self.fingerprints[name] = reply
            return reply

        self.loop.answer = keep  # type: ignore[method-assign]
        self.survey = conduct_survey(self.loop, survey_config(folder), names=list(NAMES))
        self.page = (folder / "survey" / "survey.html").read_text(encoding="utf-8").replace("&#x27;", "'")


@fixture(scope="module")
def surveyed(tmp_path_factory: TempPathFactory, files: dict[str, Path]) -> Surveyed:
    return Surveyed(tmp_path_factory.mktemp("survey"), files)


# What differs


@mark.parametrize(
    "phrase",
    [
        "'east' writes classes in another way: 'Lesion' for 'lesion' and 'Gland' for 'gland'",
        "'east' has its classes in another order: Gland, Lesion",
        "'east' has its channels in another order: adc, t2",
        "class 'cyst' of 'south' is not at all hospitals, and is left out",
        "'cyst' is labelled in few or no training cases of 'south'",
        "'south' differs much in voxel spacing: 2 x 2 x 3 mm",
        "'south' differs much in brightness: 0 / 300 / 418",
        "'south' differs much in foreground size: 4800 mm³. The others: east 1200 mm³; north 1200 mm³",
    ],
)
def test_the_page_names_a_planted_difference(surveyed: Surveyed, phrase: str) -> None:
    assert phrase in surveyed.page


def test_what_is_proposed_fits_all(surveyed: Surveyed) -> None:
    common = surveyed.survey.common

    assert common.class_names == ["lesion", "gland"]
    assert common.channel_names == ["t2", "adc"]
    assert common.classes["east"] == {"lesion": "Lesion", "gland": "Gland"}
    assert common.prepare["spacing"] == [1.0, 1.0, 3.0]
    assert surveyed.survey.decisions == {"east": "accepted", "north": "accepted", "south": "waiting"}


def test_positions_of_classes_have_the_common_names(surveyed: Surveyed) -> None:
    names = {"north": ("gland", "lesion"), "east": ("Lesion", "Gland"), "south": ("cyst", "lesion")}
    told = {
        name: one._replace(
            fingerprint=one.fingerprint.model_copy(
                update={
                    "positions": (
                        PairPosition(classes=names[name], patients=9, before=(9,) * 3, after=(0,) * 3),
                    )
                }
            )
        )
        for name, one in surveyed.survey.hospitals.items()
    }
    (found,) = replace(surveyed.survey, hospitals=told).join().positions

    assert (found.classes, found.patients) == (("lesion", "gland"), 18)
    assert found.before == found.after == (9, 9, 9), "they are in the other order at 'east'"


def test_a_survey_is_read_back_as_it_was(surveyed: Surveyed) -> None:
    again = load_survey(surveyed.folder / "survey" / "survey.json")

    assert again.as_dict() == surveyed.survey.as_dict()


def test_a_spoilt_survey_file_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "survey.json"
    path.write_text('{"version": 1, "hospitals": {"north": {}}}')

    with raises(ConfigError, match="is not a survey"):
        load_survey(path)


# What leaves


def list_counts(value: Any, key: str = "") -> Iterator[int]:
    """Every number of cases in a reply, wherever it stands."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from list_counts(entry, name)
    elif isinstance(value, list):
        for entry in value:
            yield from list_counts(entry, key)
    elif key in ("counts", "cases", "groups", "patients", "num", "num_skipped", "num_infinite", "fewest"):
        yield value


def read_ledger(folder: Path, name: str, task: str) -> dict[str, Any]:
    lines = (folder / "sites" / name / "egress.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if line["task"] == task][-1]


@mark.parametrize("name", NAMES)
def test_no_number_of_a_survey_has_fewer_cases_behind_it_than_the_minimum(
    surveyed: Surveyed, name: str
) -> None:
    left = surveyed.fingerprints[name]
    line = read_ledger(surveyed.folder, name, "fingerprint")

    assert min(list_counts(left.header["scalars"])) >= MINIMUM
    assert line["sha256"] == left.header["sha256"]
    assert line["scalars"]["fewest"] >= MINIMUM
    assert line["bytes"] == left.num_bytes
    assert not left.arrays


def test_a_class_of_few_patients_is_not_described(surveyed: Surveyed) -> None:
    scalars = surveyed.fingerprints["south"].header["scalars"]

    assert scalars["fingerprint"]["foreground"]["cyst"] is None
    assert scalars["facts"]["shape"] is None and scalars["facts"]["spacing"] is None


def test_a_hospital_of_too_few_patients_tells_only_that(tmp_path: Path, files: dict[str, Path]) -> None:
    loop = open_loop(tmp_path, files, min_count=9)

    survey = conduct_survey(loop, survey_config(tmp_path), names=["north"])

    assert "'north' told nothing of the cases: too few patients." in [one.text for one in survey.deviations]
    assert "enough patients" in survey.common.notes[0]
    left = survey.hospitals["north"].fingerprint.as_dict()
    assert left["cases"] == left["groups"] == "fewer than 9"
    assert left["shape"] == [] and left["foreground"] == {}


def test_a_task_that_site_yaml_does_not_list_is_refused(tmp_path: Path, files: dict[str, Path]) -> None:
    loop = open_loop(tmp_path, files, tasks=("train",))

    with raises(ConfigError, match="task 'fingerprint' is not allowed at this hospital"):
        conduct_survey(loop, survey_config(tmp_path), names=["north"])


def test_a_method_that_is_not_allowed_does_not_refuse_a_survey(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    loop = open_loop(tmp_path, files, methods=("fedprox",), networks=("unet2d",))

    assert conduct_survey(loop, survey_config(tmp_path), names=["north"]).hospitals


# What comes


@mark.parametrize(
    ("change", "said"),
    [
        ({"fingerprint": {"version": 2}}, "not a fingerprint"),
        ({"fingerprint": None}, "not a fingerprint"),
        ({"facts": {}}, "KeyError|ValidationError"),
        ({"facts": None}, "TypeError"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused_by_name(
    tmp_path: Path, files: dict[str, Path], change: dict[str, Any], said: str
) -> None:
    loop = open_loop(tmp_path, files)

    def fault(loop: Loopback, name: str, parcel: Parcel) -> Iterator[tuple[str, Parcel]]:
        reply = loop.answer(name, parcel)
        header = {**reply.header, "scalars": {**reply.header["scalars"], **change}}
        yield name, sealed(Parcel(header, reply.arrays))

    loop.faults[("north", "fingerprint", 0)] = fault
    survey = conduct_survey(loop, survey_config(tmp_path), names=["east", "north"])

    assert list(survey.hospitals) == ["east"]
    assert re.search(said, survey.absent["north"])


def test_a_survey_beyond_its_limit_is_refused_before_it_is_read(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    loop = open_loop(tmp_path, files)
    long = ["x" * limits.TEXT] * (limits.SURVEY_BYTES // limits.TEXT + 1)
    loop.faults[("north", "fingerprint", 0)] = changed(scalars={"more": long})

    survey = conduct_survey(loop, survey_config(tmp_path), names=["east", "north"])

    assert "north" in survey.absent
    assert bound_reply("fingerprint", None)["largest"] == limits.SURVEY_BYTES


def test_more_cases_than_a_hospital_can_have_are_refused(surveyed: Surveyed) -> None:
    scalars = json.loads(json.dumps(surveyed.fingerprints["north"].header["scalars"]))
    scalars["fingerprint"]["cases"] = limits.CASES + 1

    with raises(ValueError, match="more than 10000000 cases"):
        read_surveyed("north", scalars)


def test_a_hospital_speaks_under_its_own_name(surveyed: Surveyed) -> None:
    scalars = json.loads(json.dumps(surveyed.fingerprints["north"].header["scalars"]))
    scalars["fingerprint"]["client"] = "east"

    assert read_surveyed("north", scalars).fingerprint.client == "north"


def test_names_of_a_hospital_are_escaped_on_the_page(surveyed: Surveyed) -> None:
    hospitals = dict(surveyed.survey.hospitals)
    one = hospitals["south"]
    classes = ("<script>alert(1)</script>", *one.facts.classes[1:])
    hospitals["south"] = one._replace(facts=one.facts.model_copy(update={"classes": classes}))

    assert "<script>alert" not in draw_survey(Survey(hospitals))


# Agreeing


def test_a_hospital_that_asks_a_person_waits_and_then_remembers(
    tmp_path: Path, files: dict[str, Path]
) -> None:
    loop = open_loop(tmp_path, files, accept="ask")
    first = conduct_survey(loop, survey_config(tmp_path), names=list(NAMES))
    folder = ProposalFolder(tmp_path / "sites" / "north")
    (waiting,) = folder.list_waiting()
    folder.decide(waiting, "declined")
    second = conduct_survey(loop, survey_config(tmp_path), names=list(NAMES))

    assert set(first.decisions.values()) == {"waiting"}
    assert second.decisions["north"] == "declined"


@mark.parametrize(
    "spoilt",
    [
        None,
        {"classes": {}},
        {"classes": {"a": "lesion", "b": "lesion"}},
        {"classes": {"a": "lesion"}, "prepare": {"spacing": "wide"}},
        {"classes": {"a": "lesion"}, "run": "this"},
        {"classes": {"x" * 300: "lesion"}},
    ],
)
def test_a_proposal_that_cannot_be_used_is_refused_at_the_hospital(spoilt: Any) -> None:
    with raises(ConfigError):
        read_proposal(spoilt)


def test_a_run_whose_names_nobody_confirmed_is_refused(tmp_path: Path, files: dict[str, Path]) -> None:
    loop = open_loop(tmp_path, files)
    data = {"hospitals": True, "common": {"classes": ["lesion"], "channels": ["t2"]}}
    config = load_config(
        {
            "name": "sly",
            "data": data,
            "model": {"name": "unet3d"},
            "output": str(tmp_path / "run"),
            "rounds": 1,
        }
    )

    with raises(Exception, match="are not confirmed at this hospital"):
        conduct(loop, config, names=list(NAMES))


def facts(channels: list[str], count: int) -> DataFacts:
    return DataFacts(
        dimensions=2, in_channels=count, num_classes=2, classes=("a",), labels={"a": (1,)}, regions={"a": (1,)},
        channels=channels, prepare={}, patch=None, shape=None, spacing=None,
    )  # fmt: skip


def test_one_name_that_is_left_over_at_each_is_a_guess_that_is_said() -> None:
    names, guesses, lacking = match_names({"a": ["liver", "tumour"], "b": ["liver", "lesion"]}, "class")

    assert names["a"] == {"liver": "liver", "lesion": "tumour"}
    assert guesses == ["class 'tumour' of 'a' is taken for 'lesion'"]
    assert not lacking


def test_a_hospital_that_lacks_what_the_others_share_is_left_out() -> None:
    names, _, lacking = match_names({"a": ["liver"], "b": ["liver"], "c": ["left", "right"]}, "class")

    assert set(names) == {"a", "b"}
    assert lacking == {"c": "it has no class 'liver'"}


def test_unnamed_channels_are_taken_in_their_order() -> None:
    names, guesses, lacking = match_channels(
        {"a": facts(["t2", "adc"], 2), "b": facts([], 2), "c": facts([], 1)}
    )

    assert names["b"] == {"t2": "#1", "adc": "#2"}
    assert guesses == ["the unnamed channels of 'b' are taken for t2 and adc"]
    assert lacking == {"c": "it has 1 channels without names, the others 2"}


def test_a_changed_meaning_is_never_accepted_automatically(tmp_path: Path, files: dict[str, Path]) -> None:
    loop = open_loop(tmp_path, files)
    site = loop.sites["north"]
    asked = HospitalProposal(classes={"gland": "lesion", "lesion": "gland"}, channels={}, prepare={})
    file = open_own_data(loop.rules["north"], site.name).file
    assert ProposalFolder(tmp_path).consider(asked, file, "auto") == "waiting"


# A run and an evaluation


@fixture(scope="module")
def trained(surveyed: Surveyed, files: dict[str, Path]) -> Path:
    """A run planned from the survey, after south has confirmed."""
    folder = ProposalFolder(surveyed.folder / "sites" / "south")
    for waiting in folder.list_waiting():
        folder.decide(waiting, "accepted")
    found = surveyed.survey
    planned = organising.plan_survey(
        surveyed.folder / "survey" / "survey.json", "planned", "20", SMALL
    ).config()
    config = organising.use_survey(planned, found).model_copy(update={"output": surveyed.folder / "run"})
    proposals = {
        n: p.model_dump(mode="json") for n, p in organising.list_proposals(config, found, NAMES).items()
    }
    conduct(open_loop(surveyed.folder, files), config, names=list(NAMES), proposals=proposals)
    return surveyed.folder / "run"


def test_hospitals_with_other_names_and_orders_train_one_model(trained: Path) -> None:
    result = json.loads((trained / "result.json").read_text())

    assert sorted(result["test"]["dice"]["clients"]) == list(NAMES)


def test_counts_of_a_run_are_held_against_the_survey(surveyed: Surveyed, trained: Path) -> None:
    said = {name: one.fingerprint.cases for name, one in surveyed.survey.hospitals.items()}
    config = load_config(trained / "config.yaml")

    assert config.limits.cases == {name: math.ceil(1.25 * cases) for name, cases in said.items()}
    own = config.model_copy(update={"limits": LimitSettings(cases={"north": 3})})
    assert organising.use_survey(own, surveyed.survey).limits.cases["north"] == 3


def test_every_hospital_judges_a_model_and_sums_are_all_that_leaves(
    surveyed: Surveyed, trained: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    loop = open_loop(surveyed.folder, files)
    rules = write_rules(files, scores="aggregate")
    loop.rules["north"] = rules["north"]
    loop.sites["north"] = loop.opened("north")
    config = configure_evaluation(load_judged(trained)).model_copy(update={"output": tmp_path / "judged"})
    found = organising.list_proposals(config, surveyed.survey, NAMES)
    proposals = {name: one.model_dump(mode="json") for name, one in found.items()}

    done = conduct_evaluation(loop, config, names=list(NAMES), model=trained, proposals=proposals)

    left = loop.replies["north"].header["scalars"]
    assert "cases" not in left
    assert min(filter(None, list_counts(left))) >= MINIMUM
    assert read_ledger(surveyed.folder, "north", "evaluate")["scalars"]["fewest"] >= MINIMUM
    assert set(done.evaluation.cases) == {"east", "south"}
    tested = json.loads((trained / "result.json").read_text())["test"]["dice"]["clients"]
    judged = done.evaluation.clients["dice"]
    for name in NAMES:
        assert judged[name].mean == pytest.approx(tested[name]["mean"])
        assert judged[name].sd == pytest.approx(tested[name]["sd"])
    page = (tmp_path / "judged" / "report.html").read_text(encoding="utf-8")
    assert "north sent sums over cases" in page
    assert "north" not in (tmp_path / "judged" / "cases.csv").read_text()


def test_sums_over_more_cases_than_registered_are_refused() -> None:
    rows = [{"case": str(n), "loss": 0.5, "regions": {"a": {"dice": 0.1 * n}}} for n in range(8)]
    sums = {"aggregate": aggregate_rows(rows, 3).model_dump()}
    entry = Registration("north", num_train=0, num_val=0, num_test=7, tensors={}, trainable=())
    reply = Reply(Params({}), {}, sums, client="north", num_examples=1)

    with raises(ValueError, match="sums are over 8 cases, but 7 were registered"):
        check_scores(reply, ["dice"], entry)
    with raises(ValueError, match="neither scores nor sums of them, or both"):
        check_scores(replace(reply, scalars={**sums, "cases": rows}), ["dice"], entry)


# Commands


def test_a_person_sees_what_changes_and_confirms_it(
    copy_of: Callable[[str], Kit], files: dict[str, Path]
) -> None:
    kit = copy_of("north")
    kit.site_file.write_text(f"data: {files['east']}\nclient: east\n")
    asked = HospitalProposal(classes={"lesion": "Lesion", "gland": "Gland"}, channels={}, prepare={})
    folder = ProposalFolder(kit.state)
    folder.decide(asked, "waiting")

    shown = CliRunner().invoke(app, ["confirm", str(kit.folder), "--yes"])

    assert shown.exit_code == 0, shown.output
    assert "class lesion: your Lesion, value 2 in your files" in shown.output
    assert "the classes are in this order: lesion, gland" in shown.output
    assert folder.find(asked.key) == (asked, "accepted")
    assert "Nothing waits" in CliRunner().invoke(app, ["confirm", str(kit.folder)]).output


def test_without_a_configuration_or_a_survey_submit_says_what_to_do(copy_of: Callable[[str], Kit]) -> None:
    kit = copy_of("organiser")

    with raises(ConfigError, match="ask the hospitals first: wardround survey"):
        CliRunner().invoke(app, ["submit", "--kit", str(kit.folder)], catch_exceptions=False)


def test_a_survey_is_shown_in_80_columns(surveyed: Surveyed, monkeypatch: MonkeyPatch) -> None:
    console = Console(width=80, force_terminal=True, color_system=None, file=io.StringIO())
    for module in (cli_survey, common):
        monkeypatch.setattr(module, "out", console)

    cli_survey.show_survey(surveyed.survey)

    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "south: waits for a person there: wardround confirm KIT" in text


def test_a_plan_fits_the_hospital_with_a_third_of_the_memory(surveyed: Surveyed, tmp_path: Path) -> None:
    fine = ["data.prepare.spacing=[0.1, 0.1, 0.3]"]  # so that memory limits the patch of small scans

    def plan(**memory: int) -> RunPlan:
        told = {
            name: one._replace(
                fingerprint=one.fingerprint.model_copy(
                    update={"hardware": Hardware(device="cuda", memory=memory.get(name, 12 * 10**9), cores=8)}
                )
            )
            for name, one in surveyed.survey.hospitals.items()
        }
        Survey(told).save(tmp_path)
        return organising.plan_survey(tmp_path / "survey.json", "run", "20", fine)

    def size(run: RunPlan) -> int:
        return run.config().batch_size * math.prod(run.config().data.patch or ())

    alike, mixed = plan(), plan(north=4 * 10**9)
    small = plan(east=4 * 10**9, north=4 * 10**9, south=4 * 10**9)
    assert size(mixed) == size(small) <= 0.45 * size(alike)
    assert any("since 'north' has 4.0 GB" in warning for warning in mixed.plan.warnings)


def test_a_hospital_tells_no_more_memory_than_its_rules_give_a_run(
    files: dict[str, Path], tmp_path: Path
) -> None:
    site = write_rules(files)["north"].model_copy(update={"resources": Resources(memory=10**9)})
    told, _ = answer_survey("fingerprint", Message(), site, "north", tmp_path)

    assert told.scalars["fingerprint"]["hardware"]["memory"] == 10**9


def test_configure_writes_a_run_from_a_survey(surveyed: Surveyed, tmp_path: Path) -> None:
    made = tmp_path / "run.yaml"
    source = surveyed.folder / "survey" / "survey.json"

    done = CliRunner().invoke(app, ["configure", str(source), "-o", str(made), "--budget", "20"])

    assert done.exit_code == 0, done.output
    assert "wardround submit run.yaml" in made.read_text()
    assert "wardround plan" not in made.read_text()  # it needs cases on this machine
    assert load_config(made).data.common.classes == ("lesion", "gland")  # type: ignore[union-attr]
    with raises(ConfigError, match="how fast the machines of hospitals are is not known"):
        organising.plan_survey(source, "run", "30m", [])
