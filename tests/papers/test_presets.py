"""Every preset has the settings its paper prints; the expected values are written down here by hand.

Read off the papers: SAFCF section 4 and Tables 1 to 12, FSF3A section 4 and Tables 1 to 4, FedEvi section 3 and
its public code where the paper is silent, AAW section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from wardround.comparison import presets
from wardround.comparison.presets import PaperPlan, list_preset_rows
from wardround.config_file import parse
from wardround.papers.data import PaperData
from wardround.papers.presets import PresetRun, expand, list_names, load


@dataclass(frozen=True)
class Printed:
    """What a paper says of all runs of a table. rounds: of its rows; splits: how many random ones."""

    rounds: tuple[int, ...]
    epochs: int
    batch: int
    optimizer: str
    rate: float
    size: tuple[int, ...] | None
    metrics: tuple[str, ...]
    split: tuple[int, int, int]
    splits: int
    clients: tuple[int, ...]  # of the federations
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    normalise: str = "zscore"
    tested: str = "last"
    postprocess: str = "none"


FOUR = ("dice", "iou", "precision", "sensitivity")
SAFCF = Printed((100,), 40, 8, "adam", 1e-5, (128, 128, 128), FOUR, (70, 20, 10), 3, (3,))
FSF3A = replace(SAFCF, rounds=(120,), epochs=20, split=(75, 15, 10))
FEDEVI = Printed(
    (200,), 2, 8, "adam", 1e-3, (384, 384), ("dice", "hd95_pooled"), (70, 10, 20), 3, (4,),
    betas=(0.9, 0.99), weight_decay=1e-5, normalise="maximum", tested="best",
    postprocess="largest_component",
)  # fmt: skip
AAW = Printed(
    (300,), 1, 8, "adamw", 1e-4, (256, 256, 80), (*FOUR, "hd95", "assd"), (72, 8, 20), 1, (7, 7),
    weight_decay=0.01,
)  # fmt: skip
EXPECTED = {
    "safcf-table1": replace(SAFCF, rounds=(10, 50, 100)),
    "safcf-table2": SAFCF,
    "safcf-table3": replace(SAFCF, metrics=("dice",)),
    "safcf-table4": SAFCF,
    "safcf-table5": SAFCF,
    "safcf-table6": replace(SAFCF, clients=(5, 10, 30, 50, 80)),
    "safcf-table7": replace(SAFCF, size=None),
    "safcf-table8": replace(SAFCF, split=(76, 16, 8), clients=(1, 1, 1)),  # 190 of 250 train
    "safcf-table9": SAFCF,
    "safcf-table10": replace(SAFCF, rounds=(10,), metrics=("dice",)),
    "safcf-table11": replace(SAFCF, rounds=(10,), metrics=("dice",)),
    "safcf-table12": SAFCF,
    "fsf3a-table1": replace(FSF3A, rounds=(40, 80, 120)),
    "fsf3a-table2": replace(FSF3A, metrics=("dice",)),
    "fsf3a-table3": FSF3A,
    "fsf3a-table4": FSF3A,
    "fedevi-table1": FEDEVI,
    "fedevi-table2": replace(FEDEVI, clients=(6,)),
    "fedevi-table3": replace(FEDEVI, clients=(6,)),
    "fedevi-table4": replace(FEDEVI, clients=(4, 6)),
    "fedevi-table5": replace(FEDEVI, clients=(4, 6)),
    "aaw-table2": AAW,
}
TABLES = [name for name in list_names() if "table" in name]
RATES = {f"learning_rate={text}": float(text) for text in ("0.01", "0.001", "0.0001", "1e-5", "1e-6", "1e-7")}


def test_every_table_that_is_run_is_expected_here() -> None:
    assert {name for name in TABLES if load(name).list_runs()} == set(EXPECTED) and len(TABLES) == 23


@pytest.mark.parametrize("name", EXPECTED)
def test_a_preset_expands_to_the_settings_the_paper_prints(name: str) -> None:
    preset, printed = load(name), EXPECTED[name]
    for label, settings in expand(preset).items():
        config = parse(settings)
        assert config.rounds in printed.rounds, label
        assert (config.local_epochs, config.batch_size) == (printed.epochs, printed.batch), label
        optimizer = config.optimizer
        assert optimizer.name == printed.optimizer and optimizer.betas == printed.betas, label
        assert optimizer.learning_rate == RATES.get(label, printed.rate), label
        assert optimizer.weight_decay == printed.weight_decay, label
        assert tuple(config.evaluate.metrics) == printed.metrics, label
        assert config.evaluate.model == printed.tested, label
        assert config.evaluate.postprocess == printed.postprocess, label
    assert {settings["rounds"] for settings in expand(preset).values()} == set(printed.rounds)
    for federation in preset.datasets.values():
        assert federation.size == printed.size and federation.normalise == printed.normalise
        assert tuple(round(100 * share) for share in federation.split) == printed.split
        assert len(federation.seeds) == printed.splits
    counts = [
        entry.partition.clients if entry.partition and entry.partition.clients else len(entry.clients)
        for entry in preset.datasets.values()
    ]
    assert tuple(counts) == printed.clients


@pytest.mark.parametrize("name", EXPECTED)
def test_the_data_settings_of_a_run_are_the_papers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "find_obstacle", lambda settings: "")  # there are no data
    preset, printed = load(name), EXPECTED[name]
    data = {key: PaperData(Path("x.yaml"), entry.size) for key, entry in preset.datasets.items()}
    rows, seeds, notes = list_preset_rows(preset, [], None, PaperPlan(data))
    assert len(rows) == len(preset.list_runs()) and len(seeds) == printed.splits
    assert not [note for note in notes if note.startswith("Not as in the paper")]
    for row in rows:
        section = row.settings["data"]
        assert section["prepare"].get("size") == (None if printed.size is None else list(printed.size))
        assert section["splits"]["by"] == "repeated"
        assert tuple(round(100 * share) for share in section["splits"]["ratios"]) == printed.split


def run(name: str, label: str) -> PresetRun:
    return next(cell for cell in load(name).list_runs() if cell.label == label)


@pytest.mark.parametrize(
    ("name", "label", "method", "objective"),
    [
        ("safcf-table1", "FedSwAV, rounds=10", {"name": "safcf"}, {"name": "swav"}),
        ("safcf-table2", "FedAvg", {"name": "fedavg", "weighting": "uniform"}, {"name": "dice"}),
        ("safcf-table3", "FedMix", {"name": "fedmix"}, {"name": "dice"}),
        ("fsf3a-table4", "ASWA + Dice", {"name": "fsf3a"}, {"name": "dice"}),
        ("fedevi-table5", "uniform, polyp", {"name": "fedevi", "delta": 1.0, "init": "uniform"}, None),
        ("aaw-table2", "FedAvg + AAW, T2", {"name": "aaw", "step0": 0.1}, {"name": "dice_bce"}),
    ],
)
def test_rows_run_what_they_are_called(name: str, label: str, method: object, objective: object) -> None:
    settings = run(name, label).settings
    assert settings["method"] == method
    assert objective is None or settings["objective"] == objective


def test_own_methods_have_the_printed_constants() -> None:
    assert load("safcf-table1").settings["objective"]["lam"] == 0.5
    assert [cell.settings["objective"]["lam"] for cell in load("safcf-table11").list_runs()] == [
        0, 0.25, 0.5, 0.75, 1,
    ]  # fmt: skip
    fsf3a = load("fsf3a-table1").settings["objective"]
    assert (fsf3a["omega"], fsf3a["tau"]) == (0.5, 0.5)
    assert parse({"optimizer": load("fedevi-table1").settings["optimizer"]}).optimizer.schedule is not None
