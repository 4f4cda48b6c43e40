"""wardround dossier: one page for a data protection officer, true to what is on record."""

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

from helpers import call
from pytest import CaptureFixture, MonkeyPatch, fixture, mark, raises

from wardround.data.phantom.cases import PhantomSettings
from wardround.data.phantom.files import write
from wardround.deploy.dossier import read_facts, read_questions
from wardround.deploy.dossier.page import READERS, draw_dossier, state_facts
from wardround.deploy.kits.kit import Kit
from wardround.deploy.ledger import Ledger, head_path
from wardround.errors import ConfigError, WardroundError
from wardround.files import write_json, write_text

ROOT = Path(__file__).resolve().parents[3]


def line(task: str, round: int = 1, **more: Any) -> dict[str, Any]:
    tensors = {"params/conv.weight": [2, 3]} if task == "train" else {}
    return {
        "run": "a1", "name": "polyps", "round": round, "task": task, "tensors": tensors,
        "types": dict.fromkeys(tensors, "float32"), "bytes": 1500, "sha256": f"{round:064d}",
        "scalars": {"loss/total": 0.5}, "facts": {"num_examples": 30}, **more,
    }  # fmt: skip


@fixture
def hospital(copy_of: Callable[[str], Kit]) -> Kit:
    """A kit from which three messages left, the last one a refusal."""
    kit = copy_of("north")
    book = Ledger(kit.state / "egress.jsonl")
    told = {"level": "case", "epsilon": 1.5, "delta": 1e-5, "scores": "withhold"}
    for entry in (
        line("train", privacy=told),
        line("evaluate"),
        line("train", 2, refused="<b>not</b> allowed"),
    ):
        book.add(entry)
    return kit


def text_of(page: str) -> str:
    return unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script).*?</\1>", " ", page, flags=re.DOTALL)))


def test_a_hospitals_dossier_has_what_left_by_which_rules_and_that_the_ledger_is_whole(hospital: Kit) -> None:
    page = draw_dossier(read_facts(hospital.folder))
    text = text_of(page)

    assert "3 messages, 4.5 kB" in text and "3 lines, unbroken" in text
    assert f"{2:064d}" in text and "params/conv.weight" in text and "2 x 3 float32" in text
    assert "min_cases" in text and "10 (default)" in text.replace("  ", " ")
    assert "epsilon 1.50 at delta 1e-05" in text
    assert "&lt;b&gt;not&lt;/b&gt; allowed" in page and "<b>not" not in page


def test_updates_that_left_masked_are_said_to_be_unreadable_and_others_not(hospital: Kit) -> None:
    assert "Updates left masked" not in " ".join(text_of(draw_dossier(read_facts(hospital.folder))).split())
    Ledger(hospital.state / "egress.jsonl").add({**line("sum_masked"), "run": "b2", "name": "summed"})

    text = " ".join(text_of(draw_dossier(read_facts(hospital.folder))).split())
    assert "Updates left masked, for sums of at least three hospitals (secure summation)." in text
    assert "Updates of other runs left readable." in text


def test_a_changed_ledger_is_said_and_the_exit_code_is_1(
    hospital: Kit, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str], tmp_path: Path
) -> None:
    ledger = hospital.state / "egress.jsonl"
    ledger.write_text(ledger.read_text().replace("1500", "1400", 1))
    target = tmp_path / "page.html"

    code, _, err = call(monkeypatch, capsys, "dossier", str(hospital.folder), "-o", str(target))

    assert code == 1 and "line 1 was edited" in err
    assert "BROKEN" in target.read_text()


def test_no_password_path_or_key_of_a_kit_is_on_the_page(hospital: Kit, tmp_path: Path) -> None:
    write_text(
        hospital.site_file, "data: /secret/place/federation.yaml\nproxy: http://u:hunter2@proxy:3128\n"
    )

    page = draw_dossier(read_facts(hospital.folder))

    assert "hunter2" not in page and "/secret" not in page and str(tmp_path) not in page
    assert "BEGIN" not in page


def test_case_names_that_leave_are_said_to_leave(hospital: Kit) -> None:
    write_text(hospital.site_file, "case_names: keep\n")

    assert "CASES GO BY THEIR NAMES" in draw_dossier(read_facts(hospital.folder))


def test_mean_images_that_left_are_said_to_have_left_and_refused_ones_not(hospital: Kit) -> None:
    book = Ledger(hospital.state / "egress.jsonl")
    book.add(line("contribute", refused="not allowed"))
    assert "MADE FROM IMAGES" not in draw_dossier(read_facts(hospital.folder))
    book.add(line("contribute"))

    assert "MADE FROM IMAGES, task contribute: mean images" in text_of(
        draw_dossier(read_facts(hospital.folder))
    )


def test_phantoms_of_a_kit_are_not_called_health_data(hospital: Kit) -> None:
    assert "Health data:" in draw_dossier(read_facts(hospital.folder))
    write_text(hospital.site_file, "data: phantom\n")

    text = text_of(draw_dossier(read_facts(hospital.folder)))
    assert "Health data:" not in text and "no patient stands behind them" in text


def test_a_hospitals_own_cases_are_counted_and_few_are_not_told(hospital: Kit, tmp_path: Path) -> None:
    folder = tmp_path / "cases"
    write(PhantomSettings(hospitals=1, cases=4, size=16), folder / "scans", "png", seed=0)
    write_text(folder / "federation.yaml", "sources: [{path: scans}]\nlabels: {lesion: [1]}\n")
    write_text(hospital.site_file, f"data: {folder}/federation.yaml\n")

    facts = read_facts(hospital.folder)

    assert facts.cases == [["north", 4]]
    assert "fewer than 5" in text_of(draw_dossier(facts))


def test_one_run_of_a_kit_is_chosen_by_name(hospital: Kit) -> None:
    Ledger(hospital.state / "egress.jsonl").add(line("train", name="prostate", run="b2"))

    assert len(read_facts(hospital.folder).sent) == 4
    assert [message.run for message in read_facts(hospital.folder, "pros*").sent] == ["prostate"]
    with raises(ConfigError, match="no message of a run 'liver'"):
        read_facts(hospital.folder, "liver")


@fixture
def run(tmp_path: Path) -> Path:
    """An organiser's run of two hospitals, one with few cases."""
    folder = tmp_path / "run"
    write_text(
        folder / "config.yaml", "name: shared\nrounds: 1\ndata: {hospitals: true}\nmethod: {name: fedavg}\n"
    )
    lines = [
        {
            **line("train"),
            "client": client,
            "phase": "round",
            "num_examples": count,
            "time": "2026-11-18T10:00:00",
        }
        for client, count in (("north", 30), ("south", 3))
    ]
    write_text(folder / "egress.jsonl", "".join(json.dumps(entry) + "\n" for entry in lines))
    record = {"round": 1, "clients": ["north", "south"], "loss": {}, "weights": {}, "seconds": 1.0}
    write_text(folder / "records.jsonl", json.dumps(record) + "\n")
    return folder


def test_an_organisers_run_lists_hospitals_and_says_that_the_chain_is_elsewhere(run: Path) -> None:
    text = text_of(draw_dossier(read_facts(run)))

    assert "Came from hospitals: 2 messages" in text
    assert "fewer than 5" in text and "The ledger with a chain is at each hospital" in text
    assert "each hospital's own and not on record here" in text
    assert "unless its own rules keep their names" in text


def test_a_simulation_says_that_nothing_left_a_hospital(run: Path) -> None:
    write_text(run / "config.yaml", "name: shared\nrounds: 1\n")

    text = text_of(draw_dossier(read_facts(run)))

    assert "nothing left a hospital" in text and "synthetic phantoms, not patients" in text
    assert "A simulation has no ledger of a hospital" in text and "its own dossier has them" not in text
    assert "no connection was made" in text


def test_a_rehearsal_says_where_its_ledgers_are_and_that_no_connection_left_the_machine(run: Path) -> None:
    write_text(run / "config.yaml", "name: shared\nrounds: 1\n")
    (run / "rehearsal").mkdir()

    text = text_of(draw_dossier(read_facts(run)))

    assert "A rehearsal on one machine: nothing left a hospital" in text
    assert "in the kits of the rehearsal" in text and "no connection left it" in text
    assert "own dossier has them" not in text


def test_under_secure_summation_the_organiser_reads_sums(run: Path) -> None:
    masked = {**line("sum_masked"), "client": "north", "time": "2026-11-18T10:00:01"}
    write_text(run / "egress.jsonl", f"{(run / 'egress.jsonl').read_text()}{json.dumps(masked)}\n")
    text = " ".join(text_of(draw_dossier(read_facts(run))).split())

    assert "Updates left masked, for sums of at least three hospitals (secure summation)." in text
    assert "of updates that left masked (secure summation) sums alone" in text


def test_files_with_slices_of_scans_are_listed(run: Path) -> None:
    write_text(run / "overlays.png", "")
    (run / "rehearsal").mkdir()

    listed = {name: holds for name, _, holds, _ in read_facts(run).files}

    assert all("slices of test cases" in listed[name] for name in ("overlays.png", "rehearsal"))


def test_every_question_is_answered_from_facts_that_exist_or_left_to_the_controller(run: Path) -> None:
    told, questions = state_facts(read_facts(run)), read_questions()

    assert {name for entry in questions for name in entry.get("facts", ())} <= told.keys()
    assert all(entry.keys() <= {"law", "question", "answer", "facts", "yours"} for entry in questions)
    laws = " ".join(entry["law"] for entry in questions)
    for article in (
        "Art. 5",
        "Art. 13 and 14",
        "Art. 25",
        "Art. 30",
        "32",
        "Art. 35",
        "164.514",
        "164.502(b)",
        "164.312(b)",
    ):
        assert article in laws


def test_readers_are_those_of_the_security_page() -> None:
    page = (ROOT / "docs/explanation/security.md").read_text(encoding="utf-8")
    table = page.partition("## Who is who")[2].partition("##")[0]

    assert re.findall(r"^\| \*\*(.+?)\*\*", table, re.MULTILINE) == list(READERS)


@mark.parametrize(
    ("make", "sentence"),
    [
        (lambda folder: folder.mkdir(), "neither a run"),
        (lambda folder: write_json(folder / "kit.json", {"schema": "other"}), "this wardround reads"),
    ],
)
def test_another_folder_is_refused_in_a_sentence(
    make: Callable[[Path], None],
    sentence: str,
    tmp_path: Path,
    monkeypatch: MonkeyPatch,
    capsys: CaptureFixture[str],
) -> None:
    make(tmp_path / "there")

    code, _, err = call(monkeypatch, capsys, "dossier", str(tmp_path / "there"))

    assert code == 2 and sentence in " ".join(err.split()) and "Traceback" not in err


def test_the_organisers_kit_leads_to_its_runs(copy_of: Callable[[str], Kit]) -> None:
    with raises(ConfigError, match="Give one of its runs"):
        read_facts(copy_of("organiser").folder)


def test_a_line_that_wardround_did_not_write_is_refused_by_file(run: Path) -> None:
    write_text(run / "egress.jsonl", '{"client": "north", "round": "first"}\n')

    with raises(WardroundError, match="has a line that wardround did not write"):
        read_facts(run)


def test_an_empty_kit_has_a_page_too(copy_of: Callable[[str], Kit]) -> None:
    kit = copy_of("south")

    assert "Nothing has left." in draw_dossier(read_facts(kit.folder))
    assert not head_path(kit.state / "egress.jsonl").exists()
