"""Sweeps become rows and cells; every mistake is found before anything runs, and named."""

from pathlib import Path
from typing import Any

from helpers import settings
from pytest import LogCaptureFixture, mark, raises

from wardround.comparison.grid import HoldOut, build_grid, cell_name, list_rows
from wardround.comparison.run import plan_comparison
from wardround.comparison.sweep import parse_seeds, read_sweep
from wardround.config_file import load_config
from wardround.errors import ConfigError


def grid_of(
    sweep: Any = None,
    hold_out: HoldOut | None = None,
    options: Any = None,
    overrides: Any = (),
    **changes: Any,
) -> Any:
    values = {**settings(Path("unused"), **changes), "sweep": sweep or {}}
    held = {} if hold_out is None else {"hold_out": hold_out.names, "leave_one_out": hold_out.each}
    return plan_comparison(values, {**(options or {}), **held, "overrides": overrides})[0]


def labels(sweep: Any, **changes: Any) -> list[str]:
    return [row.label for row in grid_of(sweep, **changes).rows]


# Rows


def test_axes_multiply_and_name_the_rows() -> None:
    sweep = {
        "methods": ["fedavg", "local"],
        "objectives": ["dice", "dice_bce"],
        "optimizer.learning_rate": [0.01],
    }

    assert labels(sweep) == ["fedavg, dice", "fedavg, dice_bce", "local, dice", "local, dice_bce"]


def test_without_a_sweep_the_configuration_is_the_only_row() -> None:
    assert labels({}, method={"name": "local"}) == ["local"]
    assert labels({"objectives": ["dice"]}) == ["dice"]


def test_any_setting_can_be_swept() -> None:
    grid = grid_of({"optimizer.learning_rate": [1e-3, 1e-2], "rounds": [1, 2]})

    assert grid.rows[0].label == "learning_rate=0.001, rounds=1" and len(grid.cells) == 4
    assert grid.cells[3].settings["rounds"] == 2
    assert grid.cells[3].settings["optimizer"]["learning_rate"] == 0.01


def test_a_mapping_has_a_label_and_replaces_what_it_names() -> None:
    entry = {"label": "mine", "method": {"name": "fedevi", "delta": 2.0}, "optimizer.learning_rate": 0.5}
    row = grid_of({"methods": ["fedavg", entry]}).rows[1]

    assert row.label == "mine" and row.method == "fedevi"
    assert row.settings["method"] == {"name": "fedevi", "delta": 2.0}
    assert row.settings["optimizer"] == {"learning_rate": 0.5}


def test_a_row_with_another_network_keeps_stem_and_norm_and_drops_the_old_networks_own() -> None:
    model = {"name": "synergynet", "norm": "instance", "stem": "variational", "arguments": {"heads": 4}}
    changes = {"label": "mine", "model": {"name": "unet2d", "levels": 3}}
    rows = list_rows(read_sweep({"model": model, "sweep": {"models": ["synergynet", changes]}}))

    assert rows[0].settings["model"] == model
    assert rows[1].settings["model"] == {
        "name": "unet2d",
        "norm": "instance",
        "stem": "variational",
        "levels": 3,
    }


def test_a_row_that_changes_more_than_the_table_compares_is_told(caplog: LogCaptureFixture) -> None:
    other = {"label": "fedbn", "method": {"name": "fedbn"}, "model.norm": "batch"}
    grid = grid_of({"methods": ["fedavg", other], "optimizer.learning_rate": [0.01, 0.1]})

    sentence = "Row 'fedbn, learning_rate=0.01' also changes model.norm=batch; other rows do not."
    assert sentence in grid.notes and sentence in caplog.text
    assert len(grid.notes) == 2  # one for each learning rate, none for fedavg
    assert not grid_of({"methods": ["fedavg", "local"], "objectives": ["dice", "dice_bce"]}).notes


def test_a_name_keeps_the_settings_of_the_same_method_and_drops_those_of_others() -> None:
    grid = grid_of({"methods": ["fedavg", "fedevi"]}, method={"name": "fedevi", "delta": 3.0})

    assert [row.settings["method"] for row in grid.rows] == [
        {"name": "fedavg"},
        {"name": "fedevi", "delta": 3.0},
    ]


def test_options_replace_the_file_and_find_its_labels() -> None:
    entry = {"label": "mine", "method": {"name": "fedevi", "delta": 2.0}}
    grid = grid_of(
        {"methods": ["fedavg", entry], "seeds": 5}, options={"methods": ["local", "mine"], "seeds": [7]}
    )

    assert [row.label for row in grid.rows] == ["local", "mine"]
    assert grid.rows[1].settings["method"]["delta"] == 2.0 and list(grid.seeds) == [7]


def test_the_configuration_is_not_changed() -> None:
    values: dict[str, Any] = {
        "optimizer": {"learning_rate": 1.0},
        "sweep": {"optimizer.learning_rate": [2.0]},
    }
    list_rows(read_sweep(values))

    assert values["optimizer"] == {"learning_rate": 1.0}


# What --set says


@mark.parametrize(
    ("axis", "override", "section", "expected"),
    [
        ({"methods": ["fedprox"]}, "method.mu=0.5", "method", [{"name": "fedprox", "mu": 0.5}]),
        (
            {"objectives": ["dice", "dice_bce"]},
            "objective.smooth=0.1",
            "objective",
            [{"name": "dice", "smooth": 0.1}, {"name": "dice_bce", "smooth": 0.1}],
        ),
        (
            {"models": ["unet2d", "unet2d_fedevi"]},
            "model.dropout=0.1",
            "model",
            [
                {"name": "unet2d", "base_filters": 2, "levels": 2, "dropout": 0.1},
                {"name": "unet2d_fedevi", "base_filters": 2, "levels": 2, "dropout": 0.1},
            ],
        ),
    ],
)
@mark.parametrize("by_option", [True, False])
def test_an_override_holds_in_every_named_row(
    axis: Any, override: str, section: str, expected: Any, by_option: bool
) -> None:
    given = {"options": axis} if by_option else {"sweep": axis}
    grid = grid_of(**given, overrides=[override])

    assert [row.settings[section] for row in grid.rows] == expected
    assert [cell.settings[section] for cell in grid.cells] == expected


def test_a_row_of_its_own_settings_keeps_them_and_takes_the_other_overrides() -> None:
    mine = {"label": "mine", "method": {"name": "fedprox", "mu": 7.0}, "optimizer": {"name": "sgd"}}
    grid = grid_of(
        {"methods": ["fedprox", mine]}, overrides=["method.mu=0.5", "optimizer.learning_rate=0.25"]
    )

    assert [row.settings["method"]["mu"] for row in grid.rows] == [0.5, 7.0]
    assert grid.rows[1].settings["optimizer"] == {"name": "sgd", "learning_rate": 0.25}


@mark.parametrize(
    ("sweep", "options", "override", "sentence"),
    [
        ({}, {"methods": ["fedprox", "fedavg"]}, "method.mu=0.5", "--set method.mu: method 'fedavg' has no setting 'mu'.*{label: mine, method: {name: fedprox, mu: 0.5}}"),
        ({}, {"methods": ["fedprox"]}, "method.nonsense=7", "method 'fedprox' has no setting 'nonsense'. It has: mu"),
        ({}, {"methods": ["fedprox"]}, "method.muu=7", "Did you mean 'mu'"),
        ({}, {"methods": ["fedprox"]}, "method.name=fedavg", "--set method.name: --methods names every method"),
        ({"methods": ["fedprox"]}, {}, "method.name=fedavg", "--set method.name: sweep.methods names every method"),
        ({}, {"methods": ["fedprox"]}, "method=fedavg", "--set method: --methods names every method"),
        ({}, {"objectives": ["dice", "cfsl"]}, "objective.tau=0.5", "objective 'dice' has no setting 'tau'"),
        ({}, {"objectives": ["dice"]}, "objective.name=cfsl", "--objectives names every objective"),
        ({}, {"models": ["unet2d"]}, "model.name=unet3d", "--models names every model"),
        ({}, {"models": ["unet2d"]}, "model.nonsense=7", "row 'unet2d': model.nonsense is not a setting"),
        ({"methods": [{"label": "mine", "method": {"name": "fedavg"}}]}, {}, "method.mu=1", "row 'mine': method.mu is not a setting of 'fedavg'"),
        ({"methods": [{"label": "mine", "method": {"name": "fedprox", "mu": 7}}]}, {}, "method.mu=1", "--set method.mu: sweep.methods sets it in every row"),
        ({"rounds": [1, 2]}, {}, "rounds=3", "--set rounds: sweep.rounds sets it in every row"),
    ],
)  # fmt: skip
def test_an_override_that_cannot_hold_is_refused(
    sweep: Any, options: Any, override: str, sentence: str
) -> None:
    with raises(ConfigError, match=sentence):
        grid_of(sweep, options=options, overrides=[override])


# The reference


@mark.parametrize(
    ("methods", "wanted", "expected"),
    [
        (["local", "fedavg"], None, "fedavg"),
        (["local", "fedevi"], None, "local"),
        (["local", "fedevi"], "fedevi", "fedevi"),
        (["fedavg", {"label": "mine", "method": {"name": "fedevi"}}], "fedevi", "mine"),
    ],
)
def test_the_reference_is_found_by_label_or_method(methods: Any, wanted: Any, expected: str) -> None:
    assert grid_of({"methods": methods, "reference": wanted}).reference == expected


# Cells


def test_seeds_count_from_the_seed_of_the_configuration() -> None:
    assert parse_seeds(2, 7) == [7, 8]
    assert [cell.seed for cell in grid_of({"seeds": [3, 1]}).cells] == [3, 1]


def test_synthetic_patients_are_the_same_for_all_seeds() -> None:
    cells = grid_of({"seeds": 2}, seed=5).cells
    plain = load_config(settings(Path("unused"), seed=5))
    first, second = (load_config(cell.settings) for cell in cells)

    assert first.seed != second.seed and first.data == second.data
    assert first.data.phantom.seed is not None and plain.data.phantom.seed is None
    from wardround.data.opening import open_federation

    one = open_federation(plain.data, 5).load("north").test.batch([0]).image
    other = open_federation(second.data, 6).load("north").test.batch([0]).image
    assert bool((one == other).all())  # those of the plain run


def test_patients_of_a_fixed_seed_are_left_alone() -> None:
    phantom = {"hospitals": 2, "size": 16, "cases": 8, "seed": 11}

    assert grid_of({}, data={"phantom": phantom}).cells[0].settings["data"]["phantom"]["seed"] == 11


@mark.parametrize("label", ["<script>", "../../x", "a" * 300, "a/b", "\u202ex", "..", "=1"])
def test_hostile_labels_make_harmless_folder_names(label: str) -> None:
    grid = grid_of({"methods": ["fedavg", {"label": label, "method": {"name": "local"}}]})
    name = grid.cells[1].name

    assert "/" not in name and not name.startswith(".") and len(name) < 100 and name.isascii()
    assert len(load_config(grid.cells[1].settings).name) <= 200


def test_different_cells_have_different_names() -> None:
    names = [
        cell_name(row, 1, fold, held)
        for row in ("a", "a b", "a_b")
        for fold in (None, 1)
        for held in ((), ("n",), ("n", "m"))
    ]

    assert len(set(names)) == len(names)


# Held-out clients


def test_leave_one_out_has_a_cell_for_each_client_in_which_it_does_not_train() -> None:
    grid = grid_of({}, HoldOut(each=True))

    assert {cell.held_out for cell in grid.cells} == {("north",), ("east",), ("south",)}
    for cell in grid.cells:
        assert set(cell.settings["participation"]) == {"north", "east", "south"} - set(cell.held_out)


def test_several_clients_are_held_out_together() -> None:
    cells = grid_of({}, HoldOut(("south", "north"))).cells

    assert len(cells) == 1 and cells[0].settings["participation"] == ["east"]


def test_named_participants_stay_the_only_ones() -> None:
    assert grid_of({}, HoldOut(("north",)), participation=["north", "east"]).cells[0].settings[
        "participation"
    ] == ["east"]


# Mistakes


@mark.parametrize(
    ("sweep", "sentence"),
    [
        ({"methods": []}, "it must be a list of values.$"),
        ({"methods": ["fedavg", "fedavgg"]}, "row 'fedavgg': method.name is 'fedavgg'. Did you mean 'fedavg'"),
        ({"methods": "fedavg"}, "sweep.methods is 'fedavg'; it must be a list"),
        ({"methods": []}, "sweep.methods is \\[\\]; it must be a list"),
        ({"methods": ["fedavg", "fedavg"]}, "sweep.methods has 'fedavg' twice"),
        ({"methods": [{"method": {"name": "local"}}]}, "a mapping with a label"),
        ({"methods": [3]}, "write a name"),
        ({"methods": [{"label": "x", "rounds.deep": 1}]}, "row 'x': 'rounds.deep' goes into a setting that is a single value"),
        ({"method": ["fedavg"]}, "Write sweep.methods"),
        ({"seed": [1]}, "Write sweep.seeds"),
        ({"method_": 3}, "Did you mean 'methods'"),
        ({"roundz": [1]}, "roundz is not a setting"),
        ({"seeds": 0}, "0 seeds or folds"),
        ({"seeds": [1, 1]}, "different whole numbers"),
        ({"seeds": "three"}, "seeds is 'three'"),
        ({"seeds": [True]}, "different whole numbers"),
        ({"folds": 3}, "splits needs real data"),
        ({"folds": 1}, "at least 2"),
        ({"reference": "fedprox"}, "reference is 'fedprox', which is not a row"),
        ([1], "it must map settings to lists"),
        ({"seeds": 1000, "rounds": [1, 2, 3, 4, 5, 6]}, "6000 cells"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(sweep: Any, sentence: str) -> None:
    with raises(ConfigError, match=sentence) as caught:
        grid_of(sweep)

    assert "\n" not in str(caught.value)


@mark.parametrize(
    ("hold_out", "changes", "sentence"),
    [
        (HoldOut(("nort",)), {}, "not a client. Did you mean 'north'"),
        (HoldOut(("north", "east", "south")), {}, "no client is left to train"),
        (HoldOut(("north",), each=True), {}, "not both"),
        (HoldOut(("north",)), {"method": {"name": "local"}}, "has no common model"),
        (HoldOut(("north",)), {"method": {"name": "centralised"}}, "trains on all clients' cases"),
        (HoldOut(("north",)), {"participation": 0.5}, "participation is 0.5"),
        (HoldOut(("north",)), {"participation": ["north"]}, "no client is left to train"),
    ],
)
def test_clients_that_cannot_be_held_out_are_refused(hold_out: HoldOut, changes: Any, sentence: str) -> None:
    with raises(ConfigError, match=sentence):
        grid_of({}, hold_out, **changes)


def test_the_file_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("rounds: 0")

    with raises(ConfigError, match="bad.yaml: row 'fedavg': rounds is 0") as caught:
        plan_comparison(path, {})
    assert str(caught.value).count("bad.yaml") == 1


def test_data_are_looked_at_before_anything_runs(tmp_path: Path) -> None:
    with raises(ConfigError, match="cell 'fedavg, seed 42': .*nowhere"):
        grid_of({}, data={"federation": str(tmp_path / "nowhere.yaml")})


def test_a_warning_is_told_once_a_row(caplog: LogCaptureFixture) -> None:
    objective = {"name": "cfsl", "contrast": "literal"}
    with caplog.at_level("WARNING", logger="wardround.config"):
        grid_of({"seeds": 4}, method={"name": "safcf"}, objective=objective)

    assert len({record.message for record in caplog.records}) == len(caplog.records)


def test_rows_are_needed() -> None:
    with raises(ConfigError, match="nothing to compare"):
        build_grid([])
