"""The limits of a hospital's machine: what is refused, with which words, and what does not feel them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from helpers import config
from pytest import mark

from wardround.config_file import load_config, resolve
from wardround.data.federation import Federation, ScanSummary
from wardround.deploy.agreement import elsewhere
from wardround.deploy.resources import Resources, largest_kernel, list_numbers, widest_layer
from wardround.deploy.rules import Rules
from wardround.deploy.site_file import SiteFile
from wardround.models import MODELS
from wardround.papers.presets import check_settings, expand, list_names, load

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def cases(*shape: int) -> Federation:
    """Scans of four channels and this shape, which nobody loads."""
    return Federation(
        names=["north"], counts={"north": 30}, dimensions=len(shape), in_channels=4, num_classes=4,
        regions={}, load_one=elsewhere, summarise_scans=lambda: ScanSummary(None, shape),
    )  # fmt: skip


ASKED = {
    "compute.threads": ({"compute": {"threads": 65}}, "is 65, but at most 64"),
    "batch_size": ({"batch_size": 257}, "is 257, but at most 256"),
    "evaluate.batch_size": ({"evaluate": {"batch_size": 10**9}}, "is 1,000,000,000, but at most 256"),
    "evaluate.passes": ({"evaluate": {"passes": 10**9}}, "is 1,000,000,000, but at most 256"),
    "local_epochs": ({"local_epochs": 101}, "is 101, but at most 100"),
    "local_steps": ({"local_steps": 100_001}, "is 100,001, but at most 100,000"),
    "data.patch": ({"data": {"hospitals": True, "patch": [10**5, 10**4]}}, "at most 200,000,000"),
    "data.prepare.size": (
        {"data": {"hospitals": True, "prepare": {"size": ["100000", 1e5]}}},
        "is 10,000,000,000, but",
    ),
}


@mark.parametrize("setting", ASKED)
def test_a_setting_over_its_limit_is_refused_with_both(setting: str, tmp_path: Path) -> None:
    changes, words = ASKED[setting]
    reason = Resources().refuses_config(config(tmp_path, **changes))
    assert reason is not None and setting in reason and words in reason
    assert "(resources." in reason and reason.endswith("in its site.yaml)")
    assert Resources.unlimited().refuses_config(config(tmp_path, **changes)) is None


@mark.parametrize(
    ("section", "content", "place"),
    [
        ("model", {"base_filters": 129}, "model.base_filters"),
        ("model", {"base_filters": "1_000_000"}, "model.base_filters"),
        ("model", {"variational": {"channels": 1e12}}, "model.variational.channels"),
        ("model", {"arguments": {"channels": [8, [16, 10**5]]}}, "model.arguments.channels.1.1"),
        ("objective", {"dimension": 10**6000}, "objective.dimension"),
        ("method", {"bins": float("inf")}, "method.bins"),
    ],
)
def test_a_number_that_would_build_something_huge_is_refused_before_it_is_parsed(
    section: str, content: dict[str, Any], place: str
) -> None:
    reason = Resources().refuses_numbers({section: content})
    limit = "filters" if place == "model.base_filters" else "width"
    assert reason is not None and reason.startswith(f"{place} is ") and f"(resources.{limit} " in reason


def test_a_network_of_a_thousand_layers_is_refused_before_it_is_parsed() -> None:
    reason = Resources().refuses_numbers({"model": {"name": "gelan", "arguments": {"depth": 1000}}})
    assert reason is not None and reason.startswith("model.arguments.depth is 1,000, but at most 128")


def test_settings_without_end_are_not_followed() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert "model.0.0" in str(Resources().refuses_numbers({"model": deep}))
    assert list(list_numbers({"name": "unet2d", "norm": None}, "model")) == []


def test_a_network_that_is_too_large_is_refused_without_being_built(tmp_path: Path) -> None:
    huge = config(tmp_path, model={"name": "unet2d", "base_filters": 128, "levels": 8})
    reason = Resources().refuses_network(huge, cases(64, 64))  # 32 GB, if it had numbers
    assert reason is not None and reason.startswith("the number of parameters of network 'unet2d' is ")


def test_a_layer_over_the_whole_image_is_refused_by_its_kernel_or_its_width(tmp_path: Path) -> None:
    data = {"hospitals": True, "patch": [64, 64, 64]}
    asked = config(tmp_path, data=data, model={"name": "sam3d", "levels": 6})
    reason = Resources().refuses_network(asked, cases(64, 64, 64))
    assert reason is not None and "the largest kernel of network 'sam3d' is 32, but at most 16" in reason
    dense = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(5000, 3, device="meta"))
    assert (widest_layer(dense), largest_kernel(dense)) == (5000, 0)


def test_memory_is_estimated_before_work_and_a_smaller_piece_of_the_batch_helps(tmp_path: Path) -> None:
    small = Resources(memory="2 GB")
    asked = {"model": {"name": "unet2d"}, "batch_size": 16}
    reason = small.refuses_network(config(tmp_path, **asked), cases(256, 256))
    assert reason is not None and "at most 2.0 GB" in reason
    assert reason.endswith("for a batch of 16 of 256x256; set compute.micro_batch lower")
    pieces = config(tmp_path, **asked, compute={"micro_batch": 2})
    assert small.refuses_network(pieces, cases(256, 256)) is None


def test_scans_are_not_blown_up_for_the_organiser(tmp_path: Path) -> None:
    fine = replace(cases(64, 64, 64), prepared_shape=(6400, 6400, 6400))
    asked = config(tmp_path, data={"hospitals": True, "prepare": {"spacing": [0.01, 0.01, 0.01]}})
    reason = Resources().refuses_scans(asked, fine)
    assert reason is not None and "the voxels of a scan with this data.prepare is 262,144,000,000" in reason
    assert Resources().refuses_scans(config(tmp_path, data={"hospitals": True}), fine) is None


def test_too_many_steps_are_refused_without_a_word_about_cases(tmp_path: Path) -> None:
    asked = config(tmp_path, local_epochs=50, batch_size=2)
    assert Resources(steps=500).refuses_steps(asked, num_train=20) is None
    reason = Resources(steps=500).refuses_steps(asked, num_train=21)
    assert reason == (
        "a training task may have at most 500 steps at this hospital (resources.steps in its site.yaml)"
    )


# What does not feel the limits


def test_configurations_and_presets_of_the_papers_pass_the_default_rules() -> None:
    rules = Rules(SiteFile())
    asked = [load_config(CONFIGS / name) for name in ("quickstart.yaml", "methods/fedevi-as-released.yaml")]
    tables = [list(expand(load(name)).values()) for name in list_names()]
    asked += [check_settings(cells[-1]) for cells in tables if cells]  # the paper's own method comes last
    for one in asked:
        assert rules.refuses_request("train", config=resolve(one)) is None
        assert rules.refuses_run(one) is None


@mark.parametrize("name", MODELS)
def test_our_networks_pass_the_default_limits(name: str, tmp_path: Path) -> None:
    solid = 3 in MODELS[name].dimensions
    shape = (128, 128, 128) if solid else (512, 512)
    asked = {"data": {"hospitals": True, "patch": list(shape)}, "batch_size": 2}
    arguments = {"size": "base"} if name == "sam3d" else {}
    model = {"name": name, "arguments": arguments}
    assert Resources().refuses_network(config(tmp_path, **asked, model=model), cases(*shape)) is None
