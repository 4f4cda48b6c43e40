"""`wr.run` as people call it: objects in the place of names, what a run keeps of them, and what comes back."""

from __future__ import annotations

import functools
import json
import logging
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import monai
import numpy as np
import pytest
import torch
import yaml
from helpers import Watcher, call, settings
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import wardround as wr
from wardround.errors import CheckpointError, ConfigError, DataError, WardroundError


class Net(nn.Module):
    """Channels in and out are filled in by their names."""

    def __init__(self, in_channels: int, out_channels: int, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, width, 3, padding=1)
        self.last = nn.Conv2d(width, out_channels, 1)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.last(torch.relu(self.first(image)))
        return logits


@dataclass(frozen=True)
class Equal(wr.Method):
    """Every client counts the same, the first one more."""

    title: ClassVar[str] = "Equal weights"

    first: float = 0.0

    def weigh(self, state: wr.ServerState, replies: Sequence[wr.Reply]) -> list[float]:
        rest = (1 - self.first) / len(replies)
        return [rest + (self.first if number == 0 else 0) for number in range(len(replies))]


@dataclass(frozen=True)
class Squared(wr.Objective):
    """The squared error of probabilities."""

    title = "Squared error"
    factor: float = 1.0

    def loss(self, model: nn.Module, batch: wr.Batch, context: wr.Context) -> Tensor:
        return self.sample_losses(context.forward(model, batch.image).logits, batch.label).mean()

    def sample_losses(self, logits: Tensor, label: Tensor) -> Tensor:
        return self.factor * (self.probabilities(logits)[:, 1] - label).square().mean(dim=(1, 2))


class Squares(Dataset[dict[str, Tensor]]):
    """As MONAI's data sets give them; noise: a random transform."""

    def __init__(self, first: int, noise: float = 0.0) -> None:
        self.first, self.noise = first, noise

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        label = torch.zeros(1, 16, 16)
        label[:, 4:10, 3 + index % 4 : 9 + index % 4] = 1
        draw = torch.Generator().manual_seed(self.first + index)
        image = 3 * label + torch.randn(label.shape, generator=draw) + self.noise * torch.randn(label.shape)
        return {"image": image, "label": label}


def tiny(folder: Path, **changes: Any) -> dict[str, Any]:
    """Without a network of ours: the test hands one over."""
    return {key: value for key, value in settings(folder, **changes).items() if key != "model"}


def without_data(folder: Path, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in settings(folder, **changes).items() if key != "data"}


# Objects in the place of names


def test_a_class_of_ones_own_is_the_network(tmp_path: Path) -> None:
    result = wr.run(tiny(tmp_path / "run"), model=Net)

    assert isinstance(result.model.network, Net)  # type: ignore[attr-defined]
    assert result.model(torch.zeros(1, 1, 16, 16)).shape == (1, 1, 16, 16)


def test_a_function_makes_the_network_and_arguments_reach_a_class(tmp_path: Path) -> None:
    def make(in_channels: int, out_channels: int) -> nn.Module:
        return Net(in_channels, out_channels, width=6)

    made = wr.run(tiny(tmp_path / "made"), model=make)
    partly = wr.run(tiny(tmp_path / "partly"), model=functools.partial(Net, width=6))
    asked = wr.run({**tiny(tmp_path / "asked"), "model": {"arguments": {"width": 6}}}, model=Net)

    assert made.params_sha256 == partly.params_sha256 == asked.params_sha256
    assert made.params["network.first.weight"].shape[0] == 6


def test_monais_networks_and_our_methods_keep_their_names(tmp_path: Path) -> None:
    config = wr.load_config(
        tiny(tmp_path / "run"), model=monai.networks.nets.SegResNet, method=wr.METHODS["fedprox"](mu=0.5)
    )

    assert config.model.name == "monai:SegResNet"
    assert config.method == {"name": "fedprox", "mu": 0.5}
    assert not config.objects


def test_a_method_is_a_class_or_an_object_with_its_settings(tmp_path: Path) -> None:
    usual = wr.run(settings(tmp_path / "class"), method=Equal)
    other = wr.run(settings(tmp_path / "object"), method=Equal(first=0.4))

    assert list(usual.records[0]["weights"].values()) == pytest.approx([1 / 3] * 3)
    assert list(other.records[0]["weights"].values()) == pytest.approx([0.6, 0.2, 0.2])
    assert other.config.method["first"] == 0.4


def test_an_objective_is_a_class_or_an_object_and_names_are_names(tmp_path: Path) -> None:
    first = wr.run(settings(tmp_path / "object"), objective=Squared(factor=2.0))
    named = wr.run(
        settings(tmp_path / "named", objective={"name": "cfsl"}), objective="dice", method="fedavg"
    )

    assert first.config.objective["factor"] == 2.0
    assert named.config.objective == {"name": "dice"}
    assert wr.load_config(settings(tmp_path / "x"), objective=Squared).objective.keys() == {"name"}


def test_objects_may_stand_in_the_dictionary_too(tmp_path: Path) -> None:
    asked = tiny(tmp_path / "run", method=Equal(first=0.4), objective=functional.cross_entropy)
    asked["model"] = {"name": Net, "arguments": {"width": 6}}

    result = wr.run(asked)

    assert result.config.method["first"] == 0.4 and result.config.model.arguments == {"width": 6}
    assert asked["model"]["name"] is Net and isinstance(asked["method"], Equal)  # left as they were


def test_settings_in_a_dictionary_are_not_changed_by_overrides(tmp_path: Path) -> None:
    asked = settings(tmp_path / "run", rounds=1)

    wr.run(asked, overrides=["optimizer.learning_rate=0.5"])

    assert asked == settings(tmp_path / "run", rounds=1)


def test_a_dataset_for_each_client_and_everything_at_once(tmp_path: Path) -> None:
    data = {"north": Squares(0), "south": Squares(100)}

    result = wr.run(
        {"name": "mine", "output": str(tmp_path / "run"), "rounds": 2},
        data=data, model=Net, method=Equal, objective=functional.cross_entropy,
    )  # fmt: skip

    assert result.status == "done" and [row[0] for row in result.table.rows][:2] == ["north", "south"]


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({"model": Net(1, 1)}, r"an object of Net. Give the class \(Net\) or a function that makes one"),
        ({"model": 3}, "model is 3; give a name, a subclass of torch.nn.Module or a function"),
        ({"model": dict}, "give a name, a subclass of torch.nn.Module"),
        ({"model": lambda: 3}, "returned 3; it must return a torch.nn.Module"),
        ({"model": lambda c, n: Net(c, n)}, "also needs c, n. What the data decide is called spatial_dims, in_channels"),
        ({"model": "unet2"}, "Did you mean 'unet2d'"),
        ({"method": 3}, "method is 3; give a name, a subclass of wr.Method or an object of one"),
        ({"method": Net}, "give a name, a subclass of wr.Method"),
        ({"method": "SCAFFOLD"}, r"Did you mean 'scaffold'\? List all: list\(wr.METHODS\)"),
    ],
)  # fmt: skip
def test_what_is_not_one_is_refused_with_what_it_should_be(
    tmp_path: Path, objects: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        wr.run(tiny(tmp_path / "run"), **objects)


def test_a_function_that_returns_one_network_twice_is_refused(tmp_path: Path) -> None:
    network = Net(1, 1)

    with pytest.raises(ConfigError, match="returned the same network twice. Make a new one in each call"):
        wr.run(tiny(tmp_path / "run"), model=lambda: network)


def test_a_dataset_with_a_random_transform_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="case 0 is another image each time it is read.*set `augmentation`"):
        wr.run(without_data(tmp_path / "run"), data={"north": Squares(0, noise=0.1)})
    with pytest.raises(DataError, match="1 is not a name; call clients by text, such as '1'"):
        wr.run(without_data(tmp_path / "run"), data={1: Squares(0)})


# What a run keeps of them


def test_a_run_says_what_it_was_given(tmp_path: Path) -> None:
    wr.run(
        without_data(tmp_path / "run"),
        data={"north": Squares(0)},
        method=Equal,
        objective=nn.CrossEntropyLoss(),
    )

    config = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    objects = json.loads((tmp_path / "run/environment.json").read_text())["objects"]
    assert config["method"]["name"].startswith(f"{__name__}:Equal@")
    assert config["objective"]["function"].startswith("torch.nn.modules.loss:CrossEntropyLoss@")
    assert config["data"]["in_memory"]["north"].startswith("8 cases @")
    assert objects == {
        "method.name": config["method"]["name"],
        "objective.function": config["objective"]["function"],
        "data.in_memory.north": config["data"]["in_memory"]["north"],
    }


def test_a_killed_run_resumes_with_the_same_objects(tmp_path: Path) -> None:
    objects: dict[str, Any] = {
        "model": Net,
        "method": Equal(first=0.1),
        "objective": functional.cross_entropy,
    }
    whole = wr.run(tiny(tmp_path / "whole", rounds=3), **objects)
    with pytest.raises(KeyboardInterrupt):
        wr.run(tiny(tmp_path / "run", rounds=3), **objects, listener=Watcher(crash_in_round=2))

    resumed = wr.run(tiny(tmp_path / "run", rounds=3), **objects, resume=True)

    assert resumed.params_sha256 == whole.params_sha256
    assert wr.Result.load(tmp_path / "run").params_sha256 == whole.params_sha256


def test_a_resumed_run_with_another_object_is_refused_by_name(tmp_path: Path) -> None:
    def loss_of(weight: float) -> Any:
        return lambda logits, label: weight * functional.cross_entropy(logits, label)

    asked = without_data(tmp_path / "run", rounds=1)
    wr.run(asked, data={"north": Squares(0)}, objective=loss_of(1.0))
    same = "must be the same; the digits after @ change with its source or its values"

    with pytest.raises(CheckpointError, match=rf"'objective.function' was .*loss_of.lambda@.*{same}"):
        wr.run(asked, data={"north": Squares(0)}, objective=loss_of(2.0), resume=True)
    with pytest.raises(CheckpointError, match=rf"'data.in_memory.north' was '8 cases @.*{same}"):
        wr.run(asked, data={"north": Squares(1)}, objective=loss_of(1.0), resume=True)
    with pytest.raises(CheckpointError, match="'objective.name' was 'loss_function'"):
        wr.run(asked, data={"north": Squares(0)}, resume=True)


def test_a_run_of_an_older_version_that_did_not_write_its_data_down_resumes(tmp_path: Path) -> None:
    asked = without_data(tmp_path / "run", rounds=1)
    first = wr.run(asked, data={"north": Squares(0)})
    path = tmp_path / "run/config.yaml"
    stored = yaml.safe_load(path.read_text())
    stored["data"]["in_memory"] = True
    path.write_text(yaml.safe_dump(stored))

    assert wr.run(asked, data={"north": Squares(0)}, resume=True).params_sha256 == first.params_sha256


def test_more_workers_are_not_started_for_objects_and_that_is_said(
    tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        wr.run(tiny(tmp_path / "run", compute={"workers": 2, "threads": 1}), model=Net)

    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["workers"] == 1
    assert environment["workers_why"] == "what is handed over in Python stays in this process"
    assert (
        "compute.workers is 2, but what is handed over in Python stays in this process: 1 is used."
        in caplog.text
    )


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: MonkeyPatch) -> Path:
    """A folder with a network in a file of its own, as the current one."""
    (tmp_path / "own_nets.py").write_text(
        "from torch import nn\n\n\nclass Own(nn.Module):\n"
        "    def __init__(self, in_channels, out_channels):\n        super().__init__()\n"
        "        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)\n\n"
        "    def forward(self, image):\n        return self.conv(image)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    sys.modules.pop("own_nets", None)
    return tmp_path


def forget_objects(monkeypatch: MonkeyPatch) -> None:
    """As in another process."""
    from wardround.losses import loss_function
    from wardround.methods import METHODS
    from wardround.models.foreign_networks import NETWORKS

    monkeypatch.setattr(loss_function, "_given", {})
    monkeypatch.setattr(METHODS, "_given", {})
    monkeypatch.setattr(NETWORKS, "_given", {})
    sys.modules.pop("own_nets", None)


def test_a_class_in_a_file_is_found_again_by_other_processes_and_a_loss_is_not_needed(
    own_folder: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    from own_nets import Own  # type: ignore[import-not-found]

    trained = wr.run(tiny(own_folder / "run"), model=Own, objective=nn.CrossEntropyLoss())
    forget_objects(monkeypatch)

    loaded = wr.Result.load(own_folder / "run")
    image = torch.ones(1, 1, 16, 16)
    torch.testing.assert_close(loaded.model(image), trained.model(image))
    code, _, error = call(monkeypatch, capsys, "train", "run", "--resume", "--quiet")
    assert code == 2 and "a loss handed over in Python that is not here" in " ".join(error.split())

    forget_objects(monkeypatch)
    path = own_folder / "own_nets.py"
    path.write_text(path.read_text().replace("3, padding=1", "5, padding=2"))
    shutil.rmtree(own_folder / "__pycache__", ignore_errors=True)
    with pytest.raises(ConfigError, match=r"the source of own_nets:Own is another now \(@.*Restore it"):
        _ = wr.Result.load(own_folder / "run").model


def test_a_class_of_a_notebook_is_handed_over_again(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    class Here(Net):
        pass

    Here.__module__ = "__main__"
    trained = wr.run(tiny(tmp_path / "run"), model=Here)
    forget_objects(monkeypatch)

    with pytest.raises(ConfigError, match=r"is not here. Hand it over again: wr.Result.load\(folder, model="):
        _ = wr.Result.load(tmp_path / "run").model
    with pytest.raises(
        CheckpointError, match=r"'model.name' was .*Here@.*, but what is handed over is .*Net@"
    ):
        wr.Result.load(tmp_path / "run", model=Net)
    again = wr.Result.load(tmp_path / "run", model=Here)
    image = torch.ones(1, 1, 16, 16)
    torch.testing.assert_close(again.model(image), trained.model(image))


def test_a_class_that_moved_to_another_file_is_still_the_same(
    own_folder: Path, monkeypatch: MonkeyPatch
) -> None:
    from own_nets import Own

    wr.run(tiny(own_folder / "run"), model=Own)
    forget_objects(monkeypatch)
    (own_folder / "own_nets.py").rename(own_folder / "moved_nets.py")
    from moved_nets import Own as Moved  # type: ignore[import-not-found]

    loaded = wr.Result.load(own_folder / "run", model=Moved)
    assert loaded.config.model.name.startswith("own_nets:") and isinstance(loaded.model.network, Moved)
    resumed = wr.run(tiny(own_folder / "run"), model=Moved, resume=True)
    assert resumed.params_sha256 == loaded.params_sha256


def test_the_classes_of_two_runs_of_a_cell_are_told_apart(tmp_path: Path) -> None:
    def define(kernel: int) -> type[nn.Module]:
        class Cell(nn.Module):
            def __init__(self, in_channels: int, out_channels: int) -> None:
                super().__init__()
                self.conv = nn.Conv2d(in_channels, out_channels, kernel, padding=kernel // 2)

            def forward(self, image: Tensor) -> Tensor:
                logits: Tensor = self.conv(image)
                return logits

        return Cell

    first = wr.run(tiny(tmp_path / "first", rounds=1), model=define(1))
    second = wr.run(tiny(tmp_path / "second", rounds=1), model=define(3))

    assert first.config.model.name != second.config.model.name
    assert first.model.network.conv.kernel_size == (1, 1)  # type: ignore[attr-defined]


# What comes back


def test_a_result_has_a_short_repr_and_an_html_table(tmp_path: Path) -> None:
    result = wr.run(settings(tmp_path / "run", name="<tiny>"), method=Equal)

    assert result.test is not None
    score = f"{result.test.value('dice'):.3f}"
    assert repr(result) == f"<Result <tiny>: Equal, 2 of 2 rounds, test dice {score}, in {tmp_path / 'run'}>"
    page = result._repr_html_()
    assert page.startswith("<table><thead><tr><th>client</th>") and f"<td>{score}</td>" in page
    assert "&lt;tiny&gt;" in page and "<tiny>" not in page


def test_a_result_without_a_test_says_so(tmp_path: Path) -> None:
    result = wr.run(settings(tmp_path / "run", data={"phantom": {"size": 16, "cases": 8}, "test": False}))

    assert "not tested" in repr(result) and "not tested" in result._repr_html_()
    with pytest.raises(LookupError, match="was not tested"):
        _ = result.cases


def test_cases_and_records_are_rows_for_a_data_frame(tmp_path: Path) -> None:
    result = wr.run(settings(tmp_path / "run"))

    assert result.test is not None
    assert set(result.cases[0]) == {"client", "case", "region", "dice"}
    means = [
        np.mean([row["dice"] for row in result.cases if row["client"] == name])
        for name in ("east", "north", "south")
    ]
    assert np.mean(means) == pytest.approx(result.test.value("dice"))
    assert [record["round"] for record in result.records] == [1, 2]


def test_predictions_evaluations_and_comparisons_are_short_too(tmp_path: Path) -> None:
    import nibabel as nib

    result = wr.run(settings(tmp_path / "run"))
    nib.save(nib.Nifti1Image(np.zeros((16, 16), dtype=np.float32), np.eye(4)), tmp_path / "scan.nii.gz")
    (prediction,) = wr.predict(result.folder, [tmp_path / "scan.nii.gz"])
    compared = wr.compare(
        settings(tmp_path / "x", rounds=1), methods=["fedavg"], output=tmp_path / "c", jobs=1
    )

    assert repr(prediction).startswith("<Prediction scan.nii.gz: 16x16, lesion ")
    assert repr(compared) == f"<Comparison tiny: fedavg; 1 runs, in {tmp_path / 'c'}>"
    assert "<table>" in compared._repr_html_()


def test_an_exported_network_is_called_the_users_own(tmp_path: Path) -> None:
    wr.run(tiny(tmp_path / "run", rounds=1), model=Net)

    wr.export(tmp_path / "run", "torch", tmp_path / "out")

    card = (tmp_path / "out/MODEL_CARD.md").read_text()
    assert f"{__name__}:Net@" in card and "of the user's own" in card and "MONAI (Cardoso" not in card


def test_a_comparison_asks_for_import_paths(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="methods has .*Equal.*named by its import path, 'my_file:Name'"):
        wr.compare(settings(tmp_path / "x"), methods=[Equal], output=tmp_path / "c")


# Listeners


def test_a_listener_extends_the_base_and_writes_what_it_needs(tmp_path: Path) -> None:
    class Losses(wr.Listener):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_record(self, record: Any) -> None:
            self.seen.append(record["round"])

    listener = Losses()
    wr.run(settings(tmp_path / "run"), listener=listener)

    assert listener.seen == [1, 2]


def test_a_methods_mistake_is_in_the_traceback(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Broken(wr.Method):
        def weigh(self, state: wr.ServerState, replies: Sequence[wr.Reply]) -> list[float]:
            raise ZeroDivisionError("no replies")

    with pytest.raises(
        WardroundError, match="failed on the server: ZeroDivisionError: no replies. The exception"
    ):
        wr.run(settings(tmp_path / "run"), method=Broken)
