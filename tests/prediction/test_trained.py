"""A run's folder is enough: models come back without the data, whole or personal, or with a sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import personal_models, run, settings

from wardround.data.federation_file import write
from wardround.data.opening import open_federation
from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.preparing.record import PREPARATION, Preparation
from wardround.data.proposing.proposal import propose
from wardround.errors import CheckpointError, ConfigError
from wardround.files import write_json
from wardround.prediction.session import load_models
from wardround.prediction.trained import TrainedModel


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture(scope="module")
def ditto(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(
        tmp_path_factory.mktemp("ditto") / "run",
        method={"name": "ditto"},
        evaluate={"metrics": ["dice"], "overlays": 0, "model": "last"},
    )


def copied(result: Any, folder: Path) -> Path:
    target = folder / "run"
    shutil.copytree(result.folder, target)
    return target


def test_the_tested_model_comes_back(plain: Any) -> None:
    found = TrainedModel.load(plain.folder)
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(found.model.state_dict()[name], tensor)
    assert not found.model.training and found.warnings == ()
    assert found.preparation.classes == ("background", "lesion")
    assert found.preparation.values == (0, 1)


def test_personal_model_is_the_one_the_client_was_tested_with(ditto: Any) -> None:
    expected = personal_models(ditto)
    common = TrainedModel.load(ditto.folder).params
    for client, params in expected.items():
        found = TrainedModel.load(ditto.folder, client=client)
        assert found.client == client
        assert found.params.sha256() == params.sha256() != common.sha256()


def test_wrong_clients_are_named_kindly(plain: Any, ditto: Any) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'north'"):
        TrainedModel.load(ditto.folder, client="nort")
    with pytest.raises(ConfigError, match="common model|common one"):
        TrainedModel.load(plain.folder, client="north")


def test_memory_alone_is_not_offered_as_a_personal_model(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method={"name": "scaffold"}, rounds=1)
    assert any((result.folder / "clients" / "north").iterdir())
    with pytest.raises(
        ConfigError, match="has nothing of a client 'nort'. Clients with a personal model: none"
    ):
        TrainedModel.load(result.folder, client="nort")


def test_best_memory_belongs_to_the_best_round(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method={"name": "ditto"}, rounds=3)
    found = TrainedModel.load(result.folder, client="north")
    best = result.outcome.progress.best_round
    from wardround.engine.memory_store import MemoryStore

    memory = MemoryStore(result.folder / "clients" / "north").load_best(best - 1)
    assert found.params.sha256() == memory["personal"].sha256()


def test_a_run_without_a_common_model_asks_for_a_client(tmp_path: Path) -> None:
    result = run(tmp_path / "run", method={"name": "local"}, rounds=1)
    with pytest.raises(ConfigError, match="--client: east, north, south"):
        TrainedModel.load(result.folder)
    assert TrainedModel.load(result.folder, client="east").params.sha256()


def test_layers_that_stay_at_clients_are_warned_of(tmp_path: Path) -> None:
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, "norm": "batch"}
    result = run(tmp_path / "run", method={"name": "fedbn"}, model=model, rounds=1)
    (warning,) = TrainedModel.load(result.folder).warnings
    assert "stay at the clients" in warning
    assert TrainedModel.load(result.folder, client="north").warnings == ()


@pytest.mark.parametrize("content", [None, "stopped"])
def test_unfinished_run_gives_its_best_model_and_says_so(
    plain: Any, tmp_path: Path, content: str | None
) -> None:
    folder = copied(plain, tmp_path)
    (folder / "result.json").unlink()
    if content:
        write_json(folder / "result.json", {"status": content})
    (warning,) = TrainedModel.load(folder).warnings
    assert ("was stopped" if content else "is not finished") in warning


def test_folders_that_are_no_runs(tmp_path: Path, plain: Any) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        TrainedModel.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no config.yaml"):
        TrainedModel.load(tmp_path)
    folder = copied(plain, tmp_path)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        TrainedModel.load(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 1}', "null"])
def test_damaged_preparation_is_a_sentence(plain: Any, tmp_path: Path, text: str) -> None:
    folder = copied(plain, tmp_path)
    (folder / PREPARATION).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be used"):
        TrainedModel.load(folder)


def test_a_run_of_before_preparations_looks_at_its_data(plain: Any, tmp_path: Path) -> None:
    folder = copied(plain, tmp_path)
    (folder / PREPARATION).unlink()
    assert TrainedModel.load(folder).preparation.in_channels == 1


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on files, and the files; the data are gone by the time the model is loaded."""
    home = tmp_path_factory.mktemp("real")
    made = PhantomSettings(size=16, cases=8)
    phantom_files.write(made, home / "data", "nifti", seed=3)
    proposal = propose([home / "data"])
    write(proposal.file, home / "federation.yaml")
    shutil.copytree(home / "data", home / "kept")
    run(home / "run", data={"federation": str(home / "federation.yaml")})
    federation = open_federation(wr_config(home / "run").data, 42)
    expected = Preparation.of(federation)
    shutil.rmtree(home / "data")
    (home / "federation.yaml").unlink()
    assert Preparation.load(home / "run" / PREPARATION) == expected
    return home / "run", home / "kept"


def wr_config(folder: Path) -> Any:
    from wardround.config_file import load_config

    return load_config(folder / "config.yaml")


def test_the_folder_is_enough_when_the_data_are_gone(real: tuple[Path, Path], tmp_path: Path) -> None:
    import wardround as wr

    folder, data = real
    found = TrainedModel.load(folder)
    assert found.preparation.dimensions == 2
    assert found.preparation.spacing is not None
    scans = sorted((data / "north" / "images").iterdir())[:2]
    first, second = wr.predict(folder, scans)
    assert first.mask.shape == (16, 16, 1) and first.affine is not None
    assert first.probabilities is not None and first.probabilities.shape == (2, 16, 16, 1)
    assert first.name == scans[0].name and second.name == scans[1].name


def test_prediction_is_what_the_run_itself_would_say(real: tuple[Path, Path]) -> None:
    """The prepared file the run trained on and the scan read anew give one mask."""
    import wardround as wr
    from wardround.data.preparing.geometry import invert_label
    from wardround.data.preparing.prepare import prepare_case
    from wardround.data.readers.image_files import read_image

    folder, data = real
    model = TrainedModel.load(folder)
    scan = sorted((data / "south" / "images").iterdir())[0]
    prepared = prepare_case(read_image([scan]), None, model.preparation.settings, model.preparation.labels)
    logits = model.model(prepared.image[None])
    expected = invert_label(model.objective.predict(logits)[0], prepared.geometry)
    (found,) = wr.predict(folder, scan, uncertainty=None, probabilities=False)
    assert (found.mask == expected).all()


def test_settings_of_runs_need_no_data(real: tuple[Path, Path]) -> None:
    """config.yaml still names the federation, which is gone; that is no obstacle."""
    folder, _ = real
    assert not Path(json.loads(json.dumps(str(TrainedModel.load(folder).config.data.federation)))).exists()
    assert settings(folder)["rounds"] == 2


@pytest.mark.parametrize(
    "text", ['{"temperature": "x"}', '{"temperature": -1}', '{"quantiles": 3}', "[]", "{"]
)
def test_damaged_calibration_is_a_sentence(plain: Any, tmp_path: Path, text: str) -> None:
    folder = copied(plain, tmp_path)
    (folder / "calibration.json").write_text(text)
    with pytest.raises(CheckpointError, match="Remove it to predict without"):
        TrainedModel.load(folder)


def test_an_ensemble_of_all_needs_personal_models(plain: Any, tmp_path: Path) -> None:
    folder = copied(plain, tmp_path)
    (folder / "clients" / "north").mkdir(parents=True, exist_ok=True)
    with pytest.raises(ConfigError, match="--ensemble all needs a model of every client"):
        load_models(folder, ensemble=["all"])
