"""Presets of the papers' tables: complete, runnable as far as the parts exist, numbers as printed."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from typer.testing import CliRunner

import wardround as wr
from wardround.cli import app, main
from wardround.config_file import parse
from wardround.data.datasets import load_preset
from wardround.errors import ConfigError
from wardround.methods import METHODS
from wardround.methods.fedavg import FedAvg
from wardround.metrics import METRICS
from wardround.models import ModelSettings, build
from wardround.models.variational import VariationalSegmenter
from wardround.papers import cards
from wardround.papers import presets as papers
from wardround.papers.presets import (
    PaperPreset,
    PublishedValue,
    expand,
    list_missing_parts,
    list_names,
    load,
    load_published,
)
from wardround.yaml_file import read_yaml

NAMES = list_names()
AGGREGATES = {"mean", "weighted mean", "merged test set", "all clients"}
RUNS_WITHOUT_NUMBERS = {  # other readings of a row, and figures without printed numbers
    **{f"fedevi-table{number}": {"FedEvi as in its code"} for number in (2, 3)},
    "fedevi-table1": {"FedEvi as in its code", "FedAvg, batch norm"},
    "fedevi-figure-delta": {f"delta={value}" for value in ("0.25", "0.5", "1", "1.25", "1.5")},
    "fedevi-figure-lambda": {f"lam={value}" for value in ("0.001", "0.005", "0.01", "0.05", "0.1")},
    "aaw-table2": {"No FL, each alone, T1", "No FL, each alone, T2"},
    "safcf-table1": {f"FedDice as cited, rounds={rounds}" for rounds in (10, 50, 100)},
    "fsf3a-table1": {f"FedDice as cited, rounds={rounds}" for rounds in (40, 80, 120)},
    "safcf-table4": {"DSWA + CFSL, kl_weight=0"},
}
ROWS_OF_OTHER_TABLES = {"fedevi-table5": {"best competitor, polyp", "best competitor, prostate"}}


def printed(name: str, label: str, column: str, metric: str = "dice") -> float:
    return load(name).published.rows[label][column][metric].mean


def cell(name: str, label: str) -> papers.PresetRun:
    return next(cell for cell in load(name).list_runs() if cell.label == label)


# The collection


def test_every_table_of_the_four_papers_has_a_preset() -> None:
    expected = [f"safcf-table{number}" for number in range(1, 13)]
    expected += [f"safcf-figure{number}" for number in range(3, 12)]
    expected += [f"fsf3a-table{number}" for number in range(1, 5)]
    expected += [f"fedevi-table{number}" for number in range(1, 6)]
    expected += ["fedevi-figure-delta", "fedevi-figure-lambda"]
    expected += [f"fedevi-figure-a{number}" for number in range(1, 4)]
    expected += ["aaw-table1", "aaw-table2"]
    assert expected == NAMES


def test_every_preset_has_printed_numbers_and_nothing_else_has() -> None:
    assert set(papers.load_published()) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_run_is_a_checked_configuration_of_its_own(name: str) -> None:
    preset = load(name)
    runs = expand(preset)
    assert preset.about.endswith(".")
    assert len(runs) == len(preset.list_runs())  # labels differ
    assert len({settings["name"] for settings in runs.values()}) == len(runs)
    for settings in runs.values():
        if not papers.find_unknown_parts(settings):
            parse(settings)


@pytest.mark.parametrize("name", NAMES)
def test_runs_and_printed_rows_have_the_same_labels(name: str) -> None:
    preset = load(name)
    labels, rows = {cell.label for cell in preset.list_runs()}, set(preset.published.rows)
    if name == "aaw-table1":  # a table of data
        assert not labels
        assert rows == {*preset.datasets["T1"].clients, "total"}
    elif preset.figures and name not in RUNS_WITHOUT_NUMBERS:
        assert not rows and preset.published.notes
    else:
        assert rows - ROWS_OF_OTHER_TABLES.get(name, set()) == labels - RUNS_WITHOUT_NUMBERS.get(name, set())


@pytest.mark.parametrize("name", NAMES)
def test_printed_values_are_in_range_and_under_known_names(name: str) -> None:
    preset = load(name)
    clients = {client for federation in preset.datasets.values() for client in federation.clients}
    for row in preset.published.rows.values():
        assert set(row) <= set(preset.published.columns)
        for column, values in row.items():
            assert column in clients | AGGREGATES | set(preset.datasets)
            for metric, value in values.items():
                if preset.published.unit[metric] == "count":
                    continue
                assert metric in METRICS
                assert metric in preset.settings["evaluate"]["metrics"]
                assert 0 <= value.mean <= (1 if preset.published.unit[metric] == "share" else 100)
                assert value.sd is None or 0 < value.sd < 100
        # a preset measures what its table prints, and every row prints all of it
        assert all(set(values) == set(preset.published.unit) for values in row.values())


@pytest.mark.parametrize("name", NAMES)
def test_every_federation_fits_its_network(name: str) -> None:
    preset = load(name)
    for federation in preset.datasets.values():
        assert federation.size is None or len(federation.size) == federation.dimensions
        assert sum(federation.split) == pytest.approx(1)
        network = preset.settings.get("model", {}).get("name", "")
        assert not network.startswith("unet") or f"{federation.dimensions}d" in network


# Settings, as the papers print them


def test_settings_are_those_of_the_papers() -> None:
    safcf, fsf3a, fedevi = (load(f"{name}-table1").settings for name in ("safcf", "fsf3a", "fedevi"))
    assert (safcf["local_epochs"], safcf["batch_size"], safcf["rounds"]) == (40, 8, 100)
    assert safcf["optimizer"]["learning_rate"] == fsf3a["optimizer"]["learning_rate"] == 1e-5
    assert safcf["model"]["stem"] == "variational"
    assert (fsf3a["local_epochs"], fsf3a["batch_size"], fsf3a["rounds"]) == (20, 8, 120)
    assert (fedevi["local_epochs"], fedevi["batch_size"], fedevi["rounds"]) == (2, 8, 200)
    optimizer = parse({"optimizer": fedevi["optimizer"]}).optimizer
    assert (optimizer.learning_rate, optimizer.betas, optimizer.weight_decay) == (1e-3, (0.9, 0.99), 1e-5)
    assert optimizer.schedule.factor(2, 200) == pytest.approx(0.99**2)
    assert optimizer.state == "keep"
    aaw = load("aaw-table2").settings
    assert (aaw["rounds"], aaw["local_epochs"], aaw["optimizer"]["name"]) == (300, 1, "adamw")
    assert (aaw["optimizer"]["learning_rate"], aaw["optimizer"]["weight_decay"]) == (1e-4, 0.01)


def test_the_fundus_table_has_its_own_lambda() -> None:
    lams = [load(f"fedevi-table{number}").settings["objective"]["lam"] for number in (1, 2, 3)]
    assert lams == [1e-2, 1e-2, 1e-5]


def test_tables_of_losses_run_every_loss_for_every_number_of_rounds() -> None:
    runs = expand(load("safcf-table1"))
    assert len(runs) == 8 * 3  # with generalised Dice, which the paper cites and does not run
    assert runs["FedSwAV, rounds=50"]["objective"] == {"name": "swav"}
    assert runs["FedSwAV, rounds=50"]["rounds"] == 50
    assert runs["FedSwAV, rounds=50"]["method"] == {"name": "safcf"}


def test_ablation_rows_combine_loss_and_aggregation() -> None:
    runs = expand(load("safcf-table4"))
    chosen = {label: (run["method"]["name"], run["objective"]["name"]) for label, run in runs.items()}
    assert chosen == {
        "DSWA + Dice": ("safcf", "dice"),
        "CFSL + FedAvg": ("fedavg", "cfsl"),
        "DSWA + CFSL": ("safcf", "cfsl"),
        "DSWA + CFSL, kl_weight=0": ("safcf", "cfsl"),
    }
    stems = {label: parse(run).model.variational.kl_weight for label, run in runs.items()}
    assert stems.pop("DSWA + CFSL, kl_weight=0") == 0 and set(stems.values()) == {"auto"}


def test_figures_of_the_loss_switch_alpha_chi_and_its_logarithm() -> None:
    rows = {run.label: run.settings["objective"] for run in load("safcf-figure6").list_runs()}
    whole = rows["CFSL"]

    assert whole == load("safcf-table4").settings["objective"]
    assert rows["without alpha"] == {**whole, "alpha_mode": "off"}
    assert rows["without chi"] == {**whole, "divisor": "none"}
    assert rows["chi in place of log chi"] == {**whole, "divisor": "chi"}
    assert rows["without alpha and chi"] == {**whole, "alpha_mode": "off", "divisor": "none"}
    for number in (3, 4, 5):
        for run in load(f"safcf-figure{number}").list_runs():
            assert run.label == "alpha as a share" or run.settings["objective"] == rows[run.label]


def test_a_figure_like_a_table_runs_its_rows() -> None:
    figure, table = load("fedevi-figure-a1"), load("fedevi-table1")

    assert figure.datasets == table.datasets and figure.figures == ("cases", "uncertainty")
    assert expand(figure).keys() == expand(table).keys()
    assert {run.settings["rounds"] for run in load("safcf-figure9").list_runs()} == {100}


def test_another_network_keeps_stem_and_norm_of_its_table() -> None:
    models = {label: run["model"] for label, run in expand(load("safcf-table12")).items()}
    assert models == {
        label: {"name": name, "stem": "variational", "norm": "instance"}
        for label, name in (("YoloV9e", "gelan"), ("SAM3D", "sam3d"), ("autoencoder", "autoencoder"))
    }
    for model in models.values():
        with torch.device("meta"):
            network = build(ModelSettings(**model), in_channels=1, num_outputs=1, dimensions=3)
        assert isinstance(network, VariationalSegmenter)
        assert not any(isinstance(module, _BatchNorm) for module in network.modules())


def test_a_grid_over_federations_changes_the_data_and_no_setting() -> None:
    one, other = (cell("fedevi-table5", f"uniform, {name}") for name in ("polyp", "prostate"))
    assert (one.datasets, other.datasets) == ("polyp", "prostate")
    assert {**one.settings, "name": ""} == {**other.settings, "name": ""}
    assert "datasets" not in one.settings


def test_expanding_leaves_the_preset_as_it_was() -> None:
    preset = load("safcf-table11")
    expand(preset)["lam=1"]["objective"]["tau"] = 99
    assert preset.settings["objective"]["lam"] == 0.5
    assert preset.settings["objective"]["tau"] == 0.5


# Numbers, held against a second reading of the papers' tables


def test_every_printed_cell_is_held_as_printed() -> None:
    tables = json.loads((Path(__file__).parent / "printed-tables.json").read_text())
    cells = [
        (name, label, column, metric, value)
        for name, rows in tables.items()
        for label, columns in rows.items()
        for column, values in columns.items()
        for metric, value in values.items()
    ]
    assert len(cells) == 1653
    for name, label, column, metric, value in cells:
        mean, sd = value if isinstance(value, list) else (value, None)
        held = load_published()[name].rows[label][column][metric]
        assert held == PublishedValue(mean=mean, sd=sd), (name, label, column, metric)


def test_the_best_competitor_is_the_second_best_method_of_the_paper() -> None:
    held = load("fedevi-table5").published.rows
    for federation, table, method in (("polyp", 1, "FedUAA"), ("prostate", 2, "FedProto")):
        rows = load(f"fedevi-table{table}").published.rows
        means = {label: row["mean"]["dice"].mean for label, row in rows.items() if label != "FedEvi"}
        assert max(means, key=lambda label: means[label]) == method
        for column, values in held[f"best competitor, {federation}"].items():
            assert values["dice"] == rows[method][column]["dice"]


def test_means_come_with_their_spread() -> None:
    published = load("fedevi-table1").published
    assert published.rows["FedEvi"]["mean"]["dice"] == PublishedValue(mean=86.65, sd=4.51)
    comparable = published.comparable("FedEvi", "mean", "dice")
    assert comparable is not None
    assert comparable.sd is not None
    assert (comparable.mean, comparable.sd) == pytest.approx((0.8665, 0.0451))
    assert published.comparable("FedEvi", "mean", "hd95_pooled") == PublishedValue(mean=23.81, sd=11.98)
    assert published.comparable("FedEvi", "mean", "iou") is None


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_clients_of_fedevi_average_to_the_printed_mean(number: int) -> None:
    for row in load(f"fedevi-table{number}").published.rows.values():
        for metric, mean in row["mean"].items():
            clients = [entry[metric].mean for column, entry in row.items() if column != "mean"]
            assert sum(clients) / len(clients) == pytest.approx(mean.mean, abs=0.011)


def test_centres_of_aaw_average_to_the_printed_mean() -> None:
    preset = load("aaw-table2")
    for label, row in preset.published.rows.items():
        clients = preset.datasets[label[-2:]].clients
        tests = {name: math.ceil(0.2 * (source.printed or 0)) for name, source in clients.items()}
        assert tests == {name: source.test for name, source in clients.items()}
        weighted = sum(row[name]["dice"].mean * number for name, number in tests.items())
        assert weighted / sum(tests.values()) == pytest.approx(row["weighted mean"]["dice"].mean, abs=1.5e-4)


def test_counted_images_add_up_and_are_the_sizes_of_the_federations() -> None:
    preset = load("aaw-table1")
    for column, federation in preset.datasets.items():
        counts = {label: row[column]["images"].mean for label, row in preset.published.rows.items()}
        assert counts.pop("total") == sum(counts.values())
        assert counts == {name: source.printed for name, source in federation.clients.items()}


def test_tables_that_repeat_each_other_agree() -> None:
    for client in ("UCSF-PDGM", "UPenn-GBM", "MSD Brain"):
        last = printed("safcf-table1", "SAFCF, rounds=100", client)
        assert last == printed("safcf-table3", "SAFCF", client)
        assert last == printed("safcf-table4", "DSWA + CFSL", client)
        first = printed("safcf-table1", "SAFCF, rounds=10", client)
        assert first == printed("safcf-table11", "lam=0.5", client)
        own = printed("fsf3a-table1", "FSF3A, rounds=120", client)
        assert own == printed("fsf3a-table2", "FSF3A", client)
        assert own == printed("fsf3a-table4", "ASWA + CLSL", client)
        dice = printed("fsf3a-table1", "FedDice, rounds=120", client)
        assert dice == printed("fsf3a-table4", "ASWA + Dice", client)
    assert printed("safcf-table10", "learning_rate=1e-5", "MSD Brain") == printed(
        "safcf-table1", "SAFCF, rounds=10", "MSD Brain"
    )
    for table, label in enumerate(("polyp", "prostate"), start=1):
        assert printed("fedevi-table4", f"FedEvi, {label}", "mean") == printed(
            f"fedevi-table{table}", "FedEvi", "mean"
        )


# Readings and cautions


def test_show_says_what_the_paper_leaves_open() -> None:
    notes = cards.list_remarks(load("safcf-table3"))["Notes"]
    assert any("sigmoid" in note and "mean in place of the sum in Eq. 6" in note for note in notes)
    assert any("prints no divergence term" in note and "kl_weight=0" in note for note in notes)
    assert not cards.list_readings(load("fsf3a-table1"))


def test_the_tables_of_validation_cases_say_so() -> None:
    validation = [name for name in NAMES if load(name).published.cases == "validation"]
    assert validation == ["safcf-table10", "safcf-table11"]
    assert all("validation" in load(name).about for name in validation)


def impossible(name: str) -> list[str]:
    """Printed pairs with IoU below D/(2-D) or above D, rounding allowed for."""
    found = []
    for label, row in load(name).published.rows.items():
        for column, entry in row.items():
            if "iou" in entry:
                dice, iou = entry["dice"].mean, entry["iou"].mean
                low = (dice - 0.005) / (2 - (dice - 0.005))
                if iou + 0.005 < low or iou - 0.005 > dice + 0.005:
                    found.append(f"{label} {column}")
    return found


def test_a_table_with_impossible_pairs_says_so() -> None:
    pairs = {name: impossible(name) for name in NAMES}
    assert {name: len(found) for name, found in pairs.items() if found} == {
        "safcf-table1": 9, "safcf-table2": 2, "safcf-table4": 3, "safcf-table5": 3, "safcf-table6": 3,
        "safcf-table7": 1, "safcf-table8": 3, "safcf-table9": 2, "safcf-table12": 1,
        "fsf3a-table1": 8, "fsf3a-table4": 1,
    }  # fmt: skip
    assert "SAFCF, rounds=100 UPenn-GBM" in pairs["safcf-table1"]
    for name, found in pairs.items():
        if found:
            assert any("mean IoU" in caution for caution in load(name).published.cautions), name


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("safcf-table4", "FedSimCLR"),
        ("fsf3a-table2", "identical"),
        ("fsf3a-table4", "identical"),
        ("safcf-table2", "FedAvg stands"),
        ("fsf3a-table3", "FedAvg stands"),
        ("safcf-table8", "76%"),
        ("safcf-table11", "no supervised term"),
        ("aaw-table2", "not uniformly better"),
    ],
)
def test_cautions_stand_beside_the_tables_they_concern(name: str, word: str) -> None:
    assert any(word in caution for caution in load(name).published.cautions)


def test_every_table_with_msd_brain_says_how_many_cases_have_labels() -> None:
    for name in NAMES:
        preset = load(name)
        sources = [source for data in preset.datasets.values() for source in data.clients.values()]
        uses = any(source.dataset == "msd_brain" for source in sources)
        assert uses == any("484 of its 750" in caution for caution in preset.published.cautions)
        assert all(source.cases == 484 for source in sources if source.dataset == "msd_brain")


# What is missing


def test_a_method_of_a_later_version_is_named_and_the_rest_still_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(METHODS, "own", {name: kind for name, kind in METHODS.items() if name != "safcf"})
    dswa = cell("safcf-table2", "DSWA")
    assert list_missing_parts(dswa) == ["method 'safcf' needs a later version."]
    dswa.settings["optimizer"]["learning_rat"] = 1
    with pytest.raises(ConfigError, match="learning_rat is not a setting"):
        papers.check_settings(dswa.settings)
    assert "learning_rat" in list_missing_parts(dswa)[1]


def test_a_row_becomes_runnable_the_day_its_method_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "own", {**METHODS.own, "scaffold": FedAvg})
    assert list_missing_parts(cell("safcf-table2", "Scaffold")) == []


def test_an_unknown_network_is_named_and_a_wrong_setting_of_a_known_one_refused() -> None:
    assert papers.find_unknown_parts({"model": {"name": "nosuchnet"}}) == {"model": "nosuchnet"}
    assert papers.find_unknown_parts({"model": {"name": "monai:SegResNet"}}) == {}
    with pytest.raises(ConfigError, match=r"T2, A: model.arguments.a is not known"):
        papers.check_settings({"model": {"name": "unet2d", "arguments": {"a": 1}}}, "T2, A: ")


def test_the_data_sets_a_run_lacks_are_named() -> None:
    preset = load("fedevi-table1")
    assert papers.list_missing_data(preset, preset.list_runs()[0]) == ["polyp"]
    assert any("Data sets: polyp." in sentence for sentence in cards.list_remarks(preset)["Missing"])


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_has_a_card_that_knows_its_client(name: str) -> None:
    for federation in load(name).datasets.values():
        for source in federation.clients.values():
            card = load_preset(source.dataset)
            assert source.client is None or source.client in re.findall(r"\w+", card.clients)


# Files


def test_a_misspelt_preset_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'safcf-table2'"):
        load("safcf-tabel2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"about": ""}, "about is ''"),
        ({"sweep": {"row": {}}}, "sweep.row is not a setting"),
        ({"datasets": {"brain": {"dimensions": 4}}}, "datasets.brain"),
    ],
)
def test_a_broken_preset_file_is_explained(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = read_yaml(papers.find_folder() / "safcf-table2.yaml") | change
    (tmp_path / "safcf-table2.yaml").write_text(json.dumps(broken))
    monkeypatch.setattr(papers, "find_folder", lambda: tmp_path)
    with pytest.raises(ConfigError, match=message):
        load("safcf-table2")


def test_a_sweep_over_an_unknown_federation_is_refused() -> None:
    whole = load("fedevi-table5")
    preset = PaperPreset(**{**vars(whole), "grid": {"datasets": ("polyps",)}})
    with pytest.raises(ConfigError, match="Did you mean 'polyp'"):
        preset.list_runs()


# Runs


@pytest.mark.parametrize(
    ("name", "label", "dimensions"), [("safcf-table2", "DSWA", 3), ("fedevi-table5", "uniform, polyp", 2)]
)
def test_a_run_of_a_preset_trains_on_synthetic_hospitals(
    name: str, label: str, dimensions: int, tmp_path: Path
) -> None:
    settings = expand(load(name))[label]
    small = ["rounds=1", "local_epochs=1", "model.base_filters=2", "model.levels=2", "evaluate.overlays=0"]
    small += [f"data.phantom={{dimensions: {dimensions}, size: 16, cases: 8}}", f"output={tmp_path / 'run'}"]
    result = wr.run(settings, overrides=small)
    assert result.status == "done"
    assert result.config.name == f"{name} {label}"


# The command line


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["papers", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_papers_lists_every_preset() -> None:
    text = shown()
    assert all(f"| {name} |" in text for name in NAMES)
    assert [row["name"] for row in json.loads(shown("--json"))] == NAMES


def test_show_prints_what_runs_what_was_published_and_what_is_missing() -> None:
    text = shown("show", "safcf-table2")
    assert "rounds: 100" in text
    assert "| DSWA | objective.name=dice | yes |" in text
    assert "| DSWA | merged test set | 0.79 ± 0." in text
    assert "Data sets: ucsf_pdgm, upenn_gbm, msd_brain." in text
    assert "FedAvg stands at .51 Dice" in text


def test_show_says_how_many_cases_a_client_has() -> None:
    text = shown("show", "safcf-table8")
    assert "dealt at random in equal parts, 250 cases a client, 190 for training" in text
    assert "One data set dealt evenly, 250 cases a client" in text


def test_show_keeps_the_printed_digits_and_spread() -> None:
    assert "| FedAvg | mean | 76.84 ± 12.46 | 40.12 ± 14.50 |" in shown("show", "fedevi-table1")


def test_show_prints_rows_of_other_clients_as_tables_of_their_own() -> None:
    text = shown("show", "fedevi-table5")
    assert "| run | Kvasir | ETIS | ColonDB | ClinicDB | mean |" in text
    assert "| best competitor, prostate |" in text.partition("| run | BIDMC |")[2]


def test_show_of_a_table_of_data_says_that_nothing_is_trained() -> None:
    text = shown("show", "aaw-table1")
    assert "| total | 723 | 738 |" in text
    assert "no run belongs to it" in text


def test_show_as_json_holds_runs_data_and_numbers() -> None:
    facts = json.loads(shown("show", "fedevi-table4", "--json"))
    assert [run["label"] for run in facts["runs"]][:2] == ["FedAvg, polyp", "FedAvg, prostate"]
    assert facts["runs"][1]["datasets"] == "prostate"
    assert facts["runs"][1]["missing_data"] == ["prostate"]
    assert facts["datasets"]["polyp"]["clients"]["Kvasir"]["train"] == 700
    assert facts["published"]["rows"]["with G, polyp"]["mean"]["dice"] == {"mean": 85.15, "sd": 4.32}


def test_showing_a_misspelt_preset_is_an_error_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["wardround", "papers", "show", "safcf-tabel2"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert "Did you mean 'safcf-table2'?" in capsys.readouterr().err
