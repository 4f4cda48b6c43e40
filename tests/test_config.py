import math
from pathlib import Path
from typing import Any

from pytest import mark, raises

import wardround as wr
from wardround.config import Config
from wardround.config_file import load_config, resolve
from wardround.errors import ConfigError


def test_every_setting_has_a_default() -> None:
    config = load_config({})

    assert config.rounds == 10
    assert config.method == {"name": "fedavg"}
    assert config.folder == Path("runs/run")


def test_the_quickstart_is_valid() -> None:
    config = load_config(Path(__file__).parents[1] / "configs/quickstart.yaml")

    assert config.name == "quickstart"
    assert config.optimizer.learning_rate == 8e-3


@mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"method": {"name": "fedavgg"}},
            "method.name is 'fedavgg'. Did you mean 'fedavg'? List all: wardround",
        ),
        ({"objective": {"name": "dise"}}, "objective.name is 'dise'. Did you mean 'dice'?"),
        ({"roundz": 3}, "roundz is not a setting. Did you mean 'rounds'?"),
        ({"optimizer": {"lr": 1}}, "optimizer.lr is not a setting. Did you mean 'learning_rate'?"),
        ({"lr": 1}, "lr is not a setting. Did you mean 'optimizer.learning_rate'?"),
        ({"device": "cpu"}, "device is not a setting. Did you mean 'compute.device'?"),
        (
            {"optimizer": {"learning_rat": 3}},
            "optimizer.learning_rat is not a setting. Did you mean 'learning_rate'?",
        ),
        (
            {"method": {"weightin": "uniform"}},
            "method.weightin is not a setting of 'fedavg'. Did you mean 'weighting'?",
        ),
        ({"method": {"weighting": "size"}}, "method.weighting is 'size'; it must be 'samples' or 'uniform'."),
        ({"rounds": -5}, "rounds is -5; it must be greater than or equal to 1."),
        ({"rounds": "many"}, "rounds is 'many'; it must be a valid integer"),
        ({"participation": 1.5}, "participation: it must be above 0 and at most 1"),
        (
            {"evaluate": {"metrics": ["dise"]}},
            "evaluate.metrics is 'dise'. Did you mean 'dice'?",
        ),
        ({"evaluate": {"select": "x"}}, "evaluate.select is 'x'. There are: dice, iou"),
        (
            {"rounds": 2, "evaluate": {"test_after": [1, 3]}},
            "evaluate.test_after names round 3, but there are 2",
        ),
        ({"optimizer": {"name": "adamm"}}, "optimizer.name is 'adamm'; it must be 'adam', 'adamw' or 'sgd'."),
        (
            {"data": {"phantom": {"hospital": 3}}},
            "data.phantom.hospital is not a setting. Did you mean 'hospitals'?",
        ),
        ({"name": ""}, "name is ''"),
    ],
)
def test_a_mistake_gives_one_sentence_with_a_suggestion(values: dict[str, Any], sentence: str) -> None:
    with raises(ConfigError) as caught:
        load_config(values)

    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_file_is_named_in_front_of_the_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rounds: 0\n")

    with raises(ConfigError, match=r"run\.yaml: rounds is 0"):
        load_config(path)


@mark.parametrize(
    ("text", "sentence"),
    [("rounds: [1", "line 1: "), ("- a\n- b\n", "found a list"), ("a: b: c", "line 1: ")],
)
def test_a_file_that_is_not_settings_is_explained(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)

    with raises(ConfigError) as caught:
        load_config(path)
    assert sentence in str(caught.value)


def test_missing_files_folders_and_binary_files_are_explained(tmp_path: Path) -> None:
    with raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    with raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    with raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "binary.yaml")


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")

    assert load_config(tmp_path / "empty.yaml") == load_config({})


def test_overrides_reach_any_depth() -> None:
    config = load_config(
        {}, ["rounds=3", "optimizer.schedule.name=cosine", "model.base_filters=4", "seed=1e1"]
    )

    assert config.rounds == 3 and config.seed == 10
    assert config.optimizer.schedule.name == "cosine"
    assert load_config(config, ["rounds=4"]).rounds == 4
    assert load_config(config) is config


@mark.parametrize("bad", ["rounds", "=3", "rounds.x.y=1", "rounds=[1"])
def test_a_malformed_override_is_explained(bad: str) -> None:
    with raises(ConfigError, match="--set"):
        load_config({"rounds": 2}, [bad])


def test_the_resolved_configuration_reads_back_to_itself() -> None:
    config = load_config({"objective": {"name": "focal_tversky", "alpha": 0.6}, "participation": ["north"]})

    assert resolve(load_config(resolve(config))) == resolve(config)


def test_scientific_notation_without_a_dot_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("optimizer: {learning_rate: 1e-3, weight_decay: 5E-5}\n")

    assert load_config(tmp_path / "x.yaml").optimizer.learning_rate == 1e-3


def test_a_name_with_slashes_stays_inside_the_runs_folder() -> None:
    assert Config(name="../../etc").folder.parent == Path("runs")


def test_a_papers_preset_is_not_a_single_run() -> None:
    with raises(ConfigError, match="describes a paper's table"):
        load_config(Path(__file__).parents[1] / "configs/papers/safcf-table2.yaml")


def test_a_round_has_epochs_or_steps_not_both() -> None:
    with raises(ConfigError, match="local_epochs is 2 as well, but only one can hold"):
        load_config({"local_epochs": 2, "local_steps": 10})
    with raises(ConfigError, match="local_steps"):
        load_config({"local_steps": 0})
    config = load_config({"local_steps": 10, "batch_size": 4})
    assert [config.count_steps(cases) for cases in (0, 1, 100)] == [0, 10, 10]
    assert [load_config({"local_epochs": 2}).count_steps(cases) for cases in (0, 8, 9)] == [0, 2, 4]


def test_a_comparison_is_not_a_single_run(tmp_path: Path) -> None:
    with raises(ConfigError, match="wardround compare"):
        load_config({"rounds": 1, "sweep": {"seeds": 3}})


def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: a\nrounds: 3\ncompute: {threads: 1}\nrounds: 5\n")
    with raises(ConfigError, match="line 4: rounds is set before, in line 2. Keep one of them"):
        load_config(path)
    path.write_text("base: &base {threads: 1, device: cpu}\ncompute: {<<: *base, threads: 2}\n")
    with raises(ConfigError, match="base"):  # unknown, but not repeated
        load_config(path)


@mark.parametrize(
    ("given", "reason"),
    [
        ({"model": {"bn_stats": "pooled"}, "traffic": {"upload": "float16"}}, "until variances vanish"),
        ({"optimizer": {"learning_rate": math.inf}}, "learning_rate is inf; it must be a finite number"),
    ],
)
def test_what_would_spoil_every_number_is_refused(given: dict[str, Any], reason: str) -> None:
    with raises(ConfigError, match=reason):
        load_config(given)


def test_a_run_is_resumed_or_replaced_not_both(tmp_path: Path) -> None:
    with raises(ConfigError, match="give one of them"):
        wr.run({"output": str(tmp_path), "rounds": 1}, resume=True, overwrite=True)
