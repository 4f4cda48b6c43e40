"""The report: complete, self-contained, and harmless whatever clients and cases are called."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import run, settings, spoil
from pytest import raises
from typer.testing import CliRunner

import wardround as wr
from wardround.cli import app
from wardround.clients import Answer
from wardround.comparison.runs import read_run
from wardround.configuring.plan import Choice, ConfigurationPlan
from wardround.configuring.plan_file import as_record
from wardround.engine.judging import pictures
from wardround.errors import CheckpointError, ConfigError
from wardround.files import file_name, write_json
from wardround.reporting import build_page, open_source, write_report
from wardround.reporting.charts import area_chart, fit_axis, line_chart
from wardround.reporting.html import data_block, escape, link, name, tag
from wardround.reporting.overlays import encode, encode_all, reduce_slices, trace_outlines
from wardround.reporting.strips import strip_chart
from wardround.storage import StoredTensors, save_tensors

EVIL = {
    "script": "<script>alert(1)</script>",
    "quotes": "\"'><img src=x onerror=alert(1)>",
    "style": "</style><style>*{display:none}</style>",
    "end": "</script><script>alert(1)</script>",
    "comment": "<!--<script>",
    "address": "javascript:alert(1)",
    "rtl": "\u202egnp.eton\u202c שלום",
    "long": "x" * 300,
    "path": "../../etc/passwd",
    "lines": "a\nb\r\x00c\x1b[2J",
    "dollar": "${title} $script",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    data = {"phantom": {"hospitals": 3, "size": 16, "cases": 16}}
    run(folder, data=data, method={"name": "aaw"}, evaluate={"metrics": ["dice", "hd95"], "overlays": 3})
    return folder


def page_of(*folders: Path) -> str:
    return build_page([open_source(folder) for folder in folders])


def test_a_planned_run_shows_its_choices_with_their_reasons(finished: Path, tmp_path: Path) -> None:
    assert "How this run was configured" not in page_of(finished)
    planned = tmp_path / "planned"
    shutil.copytree(finished, planned)
    choices = (
        Choice("data.patch", [40, 56, 40], "the median image"),
        Choice("name", EVIL["script"], EVIL["quotes"]),
    )
    record = as_record(
        ConfigurationPlan(choices, ("Few cases.",)), {"budget": "2h", "notes": ["Taken for CT."]}
    )
    (planned / "plan.yaml").write_text(record)

    page = page_of(planned)

    for text in (
        "How this run was configured",
        "[40, 56, 40]",
        "the median image",
        "Taken for CT.",
        "Few cases.",
    ):
        assert text in page
    assert EVIL["script"] not in page and EVIL["quotes"] not in page


class Checker(html.parser.HTMLParser):
    """Collects elements, text and links, and whether elements are closed in order."""

    VOID = frozenset({"meta", "link", "input", "img", "br", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.mistakes: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.mistakes.append(tag)

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert not checker.mistakes and not checker.open
    return checker


# What the page has


def test_the_page_of_a_run_has_every_section(finished: Path) -> None:
    found = checked(page_of(finished))

    titles = "Result|Learning curves|Aggregation weights|Loss terms|Case by case|Example cases|Calibration"
    more = "Traffic and time|Refused updates and warnings|How the clients differ|How it was made|How to cite"
    for title in f"{titles}|{more}".split("|"):
        assert title in found.text, title
    result = json.loads((finished / "result.json").read_text())
    assert result["params_sha256"] in found.text
    assert "Pan et al., arXiv 2024" in found.text


def test_the_page_asks_nobody_for_anything(finished: Path) -> None:
    page = page_of(finished)

    for element, attributes in checked(page).elements:
        for key in ("src", "href", "xlink:href", "action", "poster", "srcset"):
            value = attributes.get(key) or ""
            if element == "a" and value:
                assert value.startswith(("#", "https://")), value
            elif value:
                assert value.startswith("data:"), (element, value[:40])
    assert "url(" not in page and "@import" not in page
    assert not re.search(r"<[a-z]+[^>]*\s(on[a-z]+|style)=", page)


def test_the_policy_allows_only_this_style_and_this_script(finished: Path) -> None:
    page = page_of(finished)

    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    allowed = policy.group(1).replace("&#x27;", "'")
    assert allowed.startswith("default-src 'none'") and "unsafe" not in allowed
    assert "connect-src 'none'" in allowed
    for element in ("style", "script"):
        content = re.search(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        assert content is not None
        digest = base64.b64encode(hashlib.sha256(content.group(1).encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in allowed


def test_every_picture_and_chart_has_words(finished: Path) -> None:
    found = checked(page_of(finished))

    drawings = [
        attributes for element, attributes in found.elements if element == "svg" and "role" in attributes
    ]
    identifiers = {attributes.get("id") for _, attributes in found.elements}
    assert len(drawings) > 10
    for attributes in drawings:
        named = attributes.get("aria-label") or attributes.get("aria-labelledby")
        assert named
        for identifier in (attributes.get("aria-labelledby") or "").split():
            assert identifier in identifiers


def test_identifiers_are_unique_and_links_inside_arrive(finished: Path) -> None:
    found = checked(page_of(finished))
    identifiers = [attributes["id"] for _, attributes in found.elements if attributes.get("id")]

    assert len(identifiers) == len(set(identifiers))
    for element, attributes in found.elements:
        if element == "a" and (attributes["href"] or "").startswith("#"):
            assert (attributes["href"] or "")[1:] in identifiers


def test_table_heads_have_a_scope_and_can_be_sorted(finished: Path) -> None:
    found = checked(page_of(finished))

    heads = [attributes for element, attributes in found.elements if element == "th"]
    assert heads and all(attributes.get("scope") in ("col", "row") for attributes in heads)
    assert any(attributes.get("aria-sort") == "none" for attributes in heads)


def test_the_same_run_gives_the_same_bytes(finished: Path) -> None:
    assert page_of(finished) == page_of(finished)


def test_several_runs_are_compared_and_the_best_is_marked(finished: Path, tmp_path: Path) -> None:
    data = {"phantom": {"hospitals": 3, "size": 16, "cases": 16}}
    run(tmp_path / "other", name="other", data=data, evaluate={"metrics": ["dice", "hd95"], "overlays": 0})
    page = page_of(finished, tmp_path / "other")

    found = checked(page)
    assert "Side by side" in found.text and "against other" in found.text
    assert "(best)" in found.text
    assert page.count('class="run"') == 2


def test_a_comparison_is_shown_with_its_tests(tmp_path: Path) -> None:
    from wardround.comparison.outcome import write_comparison
    from wardround.comparison.run import plan_comparison

    base = {**settings(tmp_path / "unused"), "rounds": 1}
    grid, _ = plan_comparison(base, {"methods": ["fedavg", "local"], "seeds": 2}, tmp_path / "grid")
    for cell in grid.cells:  # in this process: quicker than one for each
        wr.run({**cell.settings, "output": str(tmp_path / "grid/cells" / cell.name)})
    write_comparison(tmp_path / "grid", grid, {})
    found = checked(page_of(tmp_path / "grid"))

    assert "±" in found.text and "Holm" in found.text
    assert "Tests: Dice against fedavg" in found.text
    assert "fedavg, seed 42" in found.text


def test_a_title_of_its_own_is_shown_as_text(finished: Path, tmp_path: Path) -> None:
    page = write_report([finished], tmp_path / "page.html", title="Three <b>hospitals</b>").read_text()

    assert "<title>Three &lt;b&gt;hospitals&lt;/b&gt; · wardround</title>" in page
    assert "Three <b>" not in page and "Three <b>hospitals</b>" in checked(page).text


def test_runs_of_one_name_are_told_apart(finished: Path, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        run(tmp_path / folder)
    text = checked(page_of(tmp_path / "a", tmp_path / "b")).text

    assert "tiny (a)" in text and "tiny (b)" in text


def test_runs_of_different_length_show_the_range_of_rounds(tmp_path: Path) -> None:
    for rounds in (1, 2):
        run(tmp_path / str(rounds), name=f"of {rounds}", rounds=rounds)
    page = page_of(tmp_path / "2", tmp_path / "1")

    assert "<dt>rounds</dt><dd>1 to 2</dd>" in page
    assert "<dt>rounds</dt><dd>2</dd>" in page_of(tmp_path / "2")


# Evaluations


SEEN = "data: 3 of 8 cases are ones the model has seen <before>."


@pytest.fixture
def evaluated(finished: Path, tmp_path: Path) -> Path:
    """The files `evaluate` writes, about the finished run."""
    folder = tmp_path / "evaluated"
    folder.mkdir()
    for file in ("cases.csv", "config.yaml", "environment.json"):
        (folder / file).write_bytes((finished / file).read_bytes())
    (folder / "records.jsonl").write_text("")
    result = json.loads((finished / "result.json").read_text())
    write_json(folder / "result.json", {**result, "best_round": None})
    about = {"run": [str(finished)], "client": None, "data": "other/data", "split": "all", "tta": False}
    about |= {"grid": "the scan's own", "notes": [SEEN], "problems": {"other/a.nii": "It is <empty>."}}
    write_json(folder / "evaluation.json", about)
    return folder


def test_an_evaluation_says_along_which_axes_images_were_mirrored(evaluated: Path) -> None:
    about = json.loads((evaluated / "evaluation.json").read_text())
    write_json(evaluated / "evaluation.json", {**about, "tta": True, "mirror_axes": [0, 2]})

    assert "<td>yes along axes 0 and 2</td>" in page_of(evaluated)


def test_an_evaluation_shows_what_it_noted_and_no_rounds(evaluated: Path) -> None:
    page = page_of(evaluated)
    found = checked(page)

    assert SEEN in found.text and "other/a.nii: It is <empty>." in found.text
    assert "1 case could not be evaluated" in found.text and "Not evaluated" in found.text
    assert "Mean Dice over 3 clients" in found.text and "Evaluation" in found.text
    assert "<dt>split</dt><dd>all</dd>" in page and "<dt>rounds</dt>" not in page
    for wrong in (
        "test Dice",
        "Test ",
        "test case",
        " of 2",
        "no warnings",
        "seconds in rounds",
        "validation",
    ):
        before_settings = found.text.partition("Configuration, every default")[0]
        assert wrong not in before_settings, wrong
    assert "other/data" in found.text


def test_an_evaluation_without_notes_has_no_notice(evaluated: Path) -> None:
    about = json.loads((evaluated / "evaluation.json").read_text())
    write_json(evaluated / "evaluation.json", {**about, "notes": [], "problems": {}})
    page = page_of(evaluated)

    assert 'class="notice"' not in page and "Not evaluated" not in page
    assert "<dt>could not be evaluated</dt><dd>0</dd>" in page


def test_an_evaluation_beside_its_run_is_named_and_not_paired_with_it(
    finished: Path, evaluated: Path
) -> None:
    page = page_of(finished, evaluated)
    text = checked(page).text

    assert "tiny (evaluated):" in text and SEEN in text
    assert "other data" in text
    assert "<dt>rounds</dt><dd>2</dd>" in page and "mean test Dice" not in text


# States of a run


def test_a_run_under_way_is_shown_as_far_as_it_is(finished: Path, tmp_path: Path) -> None:
    for file in ("config.yaml", "environment.json"):
        (tmp_path / file).write_bytes((finished / file).read_bytes())
    first = (finished / "records.jsonl").read_text().splitlines(keepends=True)[0]
    (tmp_path / "records.jsonl").write_text(first + '{"round": 2, "cut')

    text = checked(page_of(tmp_path)).text
    assert "is running" in text and "after round 1 of 2" in text
    assert "There is no test result yet." in text


def test_a_run_before_its_first_round(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: new\nrounds: 3\n")

    assert "after round 0 of 3" in checked(page_of(tmp_path)).text


def test_refused_replies_and_warnings_are_named(tmp_path: Path, monkeypatch: Any) -> None:
    def nan(answer: Answer) -> Answer:
        params = answer.message.optional_params
        return answer if params is None else answer_with(answer, params * float("nan"))

    spoil(monkeypatch, "north", nan)
    run(tmp_path / "run")
    text = checked(page_of(tmp_path / "run")).text

    assert "Refused replies" in text and "north" in text and "nan" in text.lower()


def answer_with(answer: Answer, params: Any) -> Answer:
    from dataclasses import replace

    return replace(answer, message=replace(answer.message, params=params))


def test_a_run_without_pictures_or_ledger_is_still_a_page(tmp_path: Path) -> None:
    run(tmp_path / "run")
    (tmp_path / "run/egress.jsonl").unlink()
    text = checked(page_of(tmp_path / "run")).text

    assert "Example cases" not in text.replace("Example casesCalibration", "")
    assert "How the clients differ" in text


def test_a_damaged_picture_file_is_left_out(finished: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", evaluate={"metrics": ["dice"], "overlays": 1})
    (tmp_path / "run/clients/north/pictures.safetensors").write_bytes(b"junk")

    assert read_run(tmp_path / "run").files["north"].pictures == ()
    checked(page_of(tmp_path / "run"))


def test_a_fingerprint_is_shown_when_there_is_one(tmp_path: Path) -> None:
    run(tmp_path / "run")
    facts = {"clients": {"north": {"spacing": [1.0, 2.0], "scanner": "<b>", "volume": 3.25}}}
    (tmp_path / "run/fingerprint.json").write_text(json.dumps(facts))

    text = checked(page_of(tmp_path / "run")).text
    assert "Data fingerprint" in text and "<b>" in text and "1.0, 2.0" in text


@pytest.mark.parametrize("content", ["[1, 2]", "{", ""])
def test_odd_result_files_give_a_sentence_or_a_page(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text("name: odd\n")
    (tmp_path / "result.json").write_text(content)
    try:
        checked(page_of(tmp_path))
    except CheckpointError as error:
        assert "result.json cannot be read" in str(error)


# Names from elsewhere


@pytest.fixture(scope="module")
def hostile(finished: Path, tmp_path_factory: Any) -> Path:
    """The finished run with every client, case, reason and warning renamed to something evil."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    folder.mkdir()
    evil = list(EVIL.values())
    clients = dict(zip(("east", "north", "south"), (EVIL["end"], EVIL["rtl"], EVIL["long"]), strict=True))
    for client, other in clients.items():
        target = folder / "clients" / file_name(other)
        target.mkdir(parents=True)
        stored = StoredTensors(finished / "clients" / client / "pictures.safetensors")
        tensors = {key: stored[key] for key in stored}
        save_tensors(
            target / "pictures.safetensors", tensors, {**stored.metadata, "names": json.dumps(evil[:3])}
        )

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {clients.get(key, key): renamed(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [renamed(entry) for entry in value]
        return clients.get(value, value) if isinstance(value, str) else value

    records = [json.loads(line) for line in (finished / "records.jsonl").read_text().splitlines()]
    for record in records:
        record["warnings"] = evil
        record["refused"] = {f"train/{text}": text for text in evil}
        record[EVIL["script"]] = dict.fromkeys(evil, 1.0)
        record["loss"]["east"][EVIL["style"]] = 0.5
    lines = "".join(json.dumps(renamed(record)) + "\n" for record in records)
    (folder / "records.jsonl").write_text(lines)
    result = renamed(json.loads((finished / "result.json").read_text()))
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "environment.json").write_text(json.dumps({"device": EVIL["script"], "commit": EVIL["quotes"]}))
    config = (finished / "config.yaml").read_text().replace("name: tiny", f"name: {json.dumps(EVIL['end'])}")
    (folder / "config.yaml").write_text(config)
    import csv

    rows = list(csv.reader((finished / "cases.csv").read_text().splitlines()))
    with (folder / "cases.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        for place, row in enumerate(rows[1:]):
            writer.writerow([clients[row[0]], f"{place} {evil[place % len(evil)]}", row[2], *row[3:]])
    return folder


def test_hostile_names_stay_text(hostile: Path, finished: Path) -> None:
    found, honest = checked(page_of(hostile)), checked(page_of(finished))

    kinds = {element for element, _ in found.elements}
    assert kinds <= {element for element, _ in honest.elements} | {"ul", "li", "p"}
    assert sum(element == "script" for element, _ in found.elements) == 2
    assert sum(element == "style" for element, _ in found.elements) == 1
    for _, attributes in found.elements:
        assert not [key for key in attributes if key.startswith("on") or key == "style"]
        assert not (attributes.get("href") or "").startswith("javascript")


def test_hostile_names_cannot_turn_or_break_lines(hostile: Path) -> None:
    page = page_of(hostile)

    assert "\u202e" not in page and "\x00" not in page and "\x1b" not in page
    assert all(len(text) < 100 for text in re.findall(r"<bdi[^>]*>([^<]*)</bdi>", page))
    assert page.count("<bdi") > 10


def test_embedded_json_holds_hostile_names_and_is_still_json(hostile: Path) -> None:
    page = page_of(hostile)

    block = re.search(r'<script type="application/json" id="facts">(.*?)</script>', page, re.DOTALL)
    assert block is not None and "<" not in block.group(1)
    facts = json.loads(block.group(1))
    assert EVIL["end"] in facts["groups"][0]["tables"][0]["columns"]


@pytest.mark.parametrize("text", EVIL.values(), ids=EVIL)
def test_text_attributes_and_data_are_escaped(text: str) -> None:
    made = tag("p", text, title=text) + name(text) + data_block("x", {text: text})
    found = checked(made)

    assert [element for element, _ in found.elements] == ["p", "bdi", "script"]
    assert json.loads(re.search(r">([^<]*)</script>", made).group(1)) == {text: text}  # type: ignore[union-attr]


def test_only_https_becomes_a_link() -> None:
    assert "<a " not in link("javascript:alert(1)") and "<a " not in link("data:text/html,x")
    assert link("https://arxiv.org/abs/1").startswith("<a ")


def test_lone_surrogates_do_no_harm() -> None:
    assert escape("a\ud800b").encode() == b"a?b"


# Charts


def test_areas_of_one_colour_are_told_apart_by_gaps() -> None:
    shares = {f"client {number}": [(1.0, 0.05), (2.0, 0.05), (3.0, 0.05)] for number in range(20)}
    areas = re.findall(r'<path d="([^"]*)" class="(area|gap)([^"]*)">', area_chart("Weights", shares))
    styles = [style.strip() for _, kind, style in areas if kind == "area"]
    cuts = [(drawn, style.strip()) for drawn, kind, style in areas if kind == "gap"]

    assert len(styles) == len(set(styles)) == 20
    assert [style for _, style in cuts] == ["d1"] * 8 + ["d2"] * 4
    drawn = cuts[0][0]
    assert drawn.startswith("M0 600.0V550.0M25 600.0V550.0") and drawn.count("M") == 40
    assert "gap" not in area_chart("Weights", dict(list(shares.items())[:8]))


def test_dots_of_a_case_with_several_regions_are_said_to_be_both(tmp_path: Path) -> None:
    data = {"phantom": {"hospitals": 2, "size": 16, "cases": 8, "num_classes": 3}}
    run(tmp_path / "run", data=data)
    several = checked(page_of(tmp_path / "run")).text

    assert "One dot is one test case and region;" in several
    assert "Test Dice of every case and region" in several


def test_dots_of_a_case_with_one_region_are_cases(finished: Path) -> None:
    text = checked(page_of(finished)).text

    assert "One dot is one test case;" in text and "and region" not in text


def with_counts(folder: Path, bins: list[list[float]]) -> str:
    """What the page says where every client counted the same voxels."""
    for path in folder.glob("clients/*/pictures.safetensors"):
        stored = StoredTensors(path)
        tensors = {key: stored[key] for key in stored} | {"calibration": torch.tensor(bins)}
        save_tensors(path, tensors, stored.metadata)
    return checked(page_of(folder)).text


def test_background_is_blamed_only_where_there_is_much_of_it(tmp_path: Path) -> None:
    run(tmp_path / "run", evaluate={"metrics": ["dice"], "overlays": 1})
    sentence = "Most voxels have a probability below 0.1"

    assert sentence in with_counts(tmp_path / "run", [[900.0, 9.0, 0.0], [100.0, 50.0, 90.0]])
    assert sentence not in with_counts(tmp_path / "run", [[100.0, 35.0, 0.0], [100.0, 50.0, 90.0]])
    assert sentence not in with_counts(tmp_path / "run", [[900.0, 63.0, 0.0], [100.0, 50.0, 51.0]])
    assert sentence not in with_counts(tmp_path / "run", [[900.0, 9.0, 0.0]])


def test_reliability_and_risk_have_axis_titles(finished: Path) -> None:
    text = checked(page_of(finished)).text

    assert "predicted probability of foreground" in text and "share that is foreground" in text
    assert "confidence in the predicted class" in text and "share of correct voxels" in text
    assert "share of cases kept without review" in text and "mean 1 - Dice of those kept" in text


def test_charts_survive_odd_numbers() -> None:
    nan, inf = float("nan"), float("inf")
    odd = {"a": [(1.0, nan), (2.0, inf)], "b": [(1.0, 0.5)], "c": []}

    for chart in (
        line_chart("t", odd),
        line_chart("t", {}),
        area_chart("t", {"a": [(1.0, 1.0)]}),
        strip_chart("t", {"a": []}),
    ):
        checked(chart)
        drawn = re.sub(r"<title.*?</title>|<desc.*?</desc>|<table.*?</table>", "", chart, flags=re.DOTALL)
        assert "nan" not in drawn and "inf" not in drawn


@pytest.mark.parametrize("values", [[0.0], [1e-12, 1e-12], [-5.0, 1e9], [0.1, 0.9], [float("nan")]])
def test_axes_hold_their_values(values: list[float]) -> None:
    axis = fit_axis(values)

    assert axis.low < axis.high and 1 <= len(axis.ticks) <= 8
    for value in values:
        if value == value:
            assert axis.low <= value <= axis.high


# Pictures


def test_pictures_say_that_they_are_without_the_temperature(tmp_path: Path) -> None:
    run(tmp_path / "run", evaluate={"metrics": ["dice"], "overlays": 1})
    said = "Entropy maps of predict use the run's temperature"
    write_json(tmp_path / "run/calibration.json", {"temperature": 1.25})
    assert f"{said}, 1.250; these do not." in checked(page_of(tmp_path / "run")).text
    write_json(tmp_path / "run/calibration.json", {"temperature": 1.0})
    assert said not in checked(page_of(tmp_path / "run")).text


def test_outlines_enclose_the_mask() -> None:
    mask = np.zeros((6, 6), dtype=np.uint8)
    mask[2:4, 1:5] = 1

    assert trace_outlines(mask).count("M") == 1 and trace_outlines(mask).endswith("z")
    assert trace_outlines(np.zeros((4, 4), dtype=np.uint8)) == ""
    assert trace_outlines(np.ones((4, 4), dtype=np.uint8)).count("M") == 1
    mask[5, 5] = 2
    assert trace_outlines(mask).count("M") == 2


def test_best_median_and_worst_are_chosen_by_dice() -> None:
    layer = np.zeros((1, 2, 2), dtype=np.uint8)
    scores = {"a": 0.5, "b": 0.9, "c": 0.1, "d": 0.7, "e": float("nan")}
    all_of = [pictures.Picture(key, layer, layer, layer, layer, dice=value) for key, value in scores.items()]

    assert [(p.name, p.kind) for p in pictures.choose(all_of[:4], 3)][::2] == [("b", "best"), ("c", "worst")]
    assert [(p.name, p.kind) for p in pictures.choose(all_of, 5)][-1] == ("e", "worst")
    assert [(p.name, p.kind) for p in pictures.choose(all_of[:3], 1)] == [("a", "median")]
    assert [p.kind for p in pictures.choose(all_of[:1], 3)] == ["median"]
    assert pictures.choose([], 3) == []


def test_the_client_keeps_three_cases_and_what_the_model_was_sure_of(finished: Path) -> None:
    stored = StoredTensors(finished / "clients/north/pictures.safetensors")
    found = pictures.read_pictures(stored)

    assert [picture.kind for picture in found] == ["best", "median", "worst"]
    assert found[0].dice >= found[1].dice >= found[2].dice
    cases = read_run(finished).cases["dice"]
    for picture in found:
        assert picture.dice == pytest.approx(next(v for key, v in cases.items() if key.case == picture.name))
        assert picture.uncertainty is not None and picture.uncertainty.shape == (1, 16, 16)
    bins = stored["calibration"]
    assert bins[:, 0].sum() == len([key for key in cases if key.client == "north"]) * 16 * 16
    assert bool((bins[:, 2] <= bins[:, 0]).all())


def test_pictures_never_travel(finished: Path) -> None:
    tasks = {json.loads(line)["task"] for line in (finished / "egress.jsonl").read_text().splitlines()}
    sent = [json.loads(line) for line in (finished / "egress.jsonl").read_text().splitlines()]

    assert all(not line["tensors"] for line in sent if line["task"] == "pictures")
    assert tasks <= {"train", "evaluate", "pictures", "score", "calibrate"}


def test_pictures_of_older_runs_are_still_read(tmp_path: Path) -> None:
    tensors = {"0/image": torch.rand(4, 5), "0/truth": torch.ones(4, 5, dtype=torch.uint8)}
    tensors["0/prediction"] = torch.zeros(4, 5, dtype=torch.uint8)
    save_tensors(tmp_path / "old.safetensors", tensors, {"names": json.dumps(["p1"])})
    (picture,) = pictures.read_pictures(StoredTensors(tmp_path / "old.safetensors"))

    assert picture.image.shape == (1, 4, 5) and picture.image.dtype == np.uint8
    assert picture.uncertainty is None
    assert encode(picture).uncertainty is None


def test_volumes_are_kept_small() -> None:
    shape = (100, 200, 300)
    truth = torch.zeros(shape, dtype=torch.long)
    truth[60, 50:90, 50:90] = 1
    entropy = torch.zeros(shape, dtype=torch.uint8)
    made = pictures.picture_of("v", torch.rand(1, *shape), truth, truth, entropy, (3.0, 1.0, 0.5))

    assert made.image.shape == (24, 107, 160)
    assert made.places[made.shown] == 60 and made.truth[made.shown].any()
    assert made.depth == 100 and made.aspect == 2.0
    assert reduce_slices(made, 5).places[reduce_slices(made, 5).shown] == 60
    assert len(reduce_slices(made, 1).image) == 1


def test_many_volumes_get_fewer_slices_to_stay_within_the_budget() -> None:
    noise = np.random.default_rng(0).integers(0, 255, (24, 64, 64), dtype=np.uint8)
    mask = (noise > 250).astype(np.uint8)
    one = pictures.Picture("v", noise, mask, mask, noise, places=range(24), depth=24, shown=12)
    encoded, most = encode_all({"0": {"a": [one] * 4}}, budget=300_000)

    assert most < 24
    assert sum(entry.num_bytes for entry in encoded["0"]["a"]) <= 300_000


def test_uncertainty_is_full_at_an_even_guess_and_none_when_sure() -> None:
    even, sure = torch.full((2, 3), 0.5), torch.stack([torch.ones(3), torch.zeros(3)])

    assert pictures.entropy_bytes(even).tolist() == [255, 255, 255]
    assert pictures.entropy_bytes(sure).tolist() == [0, 0, 0]


def test_calibration_counts_by_hand() -> None:
    probabilities = torch.stack(
        [1 - torch.tensor([0.05, 0.55, 0.55, 1.0]), torch.tensor([0.05, 0.55, 0.55, 1.0])]
    )
    found = pictures.count_calibration(probabilities, torch.tensor([0, 1, 0, 1]))

    assert found[:, 0].tolist() == [1, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert found[5, 1].item() == pytest.approx(1.1, abs=1e-6)
    assert found[5, 2].item() == 1 and found[9, 2].item() == 1


# Command line


def test_the_command_writes_the_page_and_says_where(finished: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(finished), "-o", str(tmp_path / "page.html"), "--json"])

    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["bytes"] == (tmp_path / "page.html").stat().st_size < 8_000_000
    assert write_report([finished]) == finished / "report.html"
    assert write_report([finished], tmp_path) == tmp_path / "report.html"


def test_a_folder_that_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with raises(CheckpointError, match="does not exist. Give the folder of a run"):
        write_report([tmp_path / "absent"])
    with raises(CheckpointError, match="contains neither a run nor a comparison"):
        write_report([tmp_path])
    with raises(ConfigError, match="name the folder"):
        write_report([])


def test_a_page_that_cannot_be_written_is_told(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(ConfigError, match="cannot be written"):
        write_report([finished], tmp_path / "file" / "page.html")


def test_an_overwritten_run_takes_its_report_along(finished: Path, tmp_path: Path) -> None:
    run(tmp_path / "run")
    write_report([tmp_path / "run"])
    wr.run(settings(tmp_path / "run"), overwrite=True)

    assert not (tmp_path / "run/report.html").exists()
