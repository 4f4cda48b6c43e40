"""Loaded cases serve the next run only if they are the same cases."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from pytest import MonkeyPatch, fixture

from wardround.data import opening
from wardround.data.cases import ClientData, TensorSplit
from wardround.data.federation import Federation
from wardround.data.opening import open_federation
from wardround.data.phantom import files
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.serving import reuse
from wardround.data.serving.resident import Residence
from wardround.data.serving.reuse import LoadedCases
from wardround.data.settings import DataSettings


@fixture(autouse=True)
def loaded_cases(monkeypatch: MonkeyPatch) -> Iterator[LoadedCases]:
    loaded = LoadedCases()
    loaded.is_on = True
    monkeypatch.setattr(opening, "loaded_cases", loaded)
    yield loaded


def synthetic(seed: int, **changes: Any) -> Federation:
    made = {"hospitals": 2, "size": 16, "cases": 5, **changes}
    return open_federation(DataSettings.model_validate({"phantom": made}), seed)


def test_the_same_settings_and_seed_are_loaded_once(loaded_cases: LoadedCases) -> None:
    first = synthetic(1).load("north")

    assert synthetic(1).load("north") is first
    assert synthetic(2).load("north") is not first
    assert synthetic(1).load("north") is not first  # one federation at a time
    assert synthetic(1, size=32).load("north") is not synthetic(1).load("north")
    loaded_cases.is_on = False
    assert synthetic(1).load("north") is not synthetic(1).load("north")


def test_files_that_changed_are_loaded_again(tmp_path: Path) -> None:
    files.write(PhantomSettings(hospitals=2, size=16, cases=5), tmp_path / "scans", "png", 1)
    path = tmp_path / "federation.yaml"
    path.write_text(yaml.safe_dump({"sources": [{"path": "scans"}], "labels": {"lesion": [1]}}))

    def load(resident: Residence = "auto", **changes: Any) -> ClientData:
        opened = open_federation(DataSettings.model_validate({"federation": path, **changes}), 1, resident)
        assert opened.summarise_scans is not None
        assert opened.summarise_scans().shape == ((32, 32) if changes else (16, 16))
        return opened.load("north")

    first = load()
    assert load("disk") is load("disk") is not first
    assert load() is first and load(prepare={"size": [32, 32]}) is not first
    before, image = load(), next((tmp_path / "scans/north/images").iterdir())
    image.write_bytes(next((tmp_path / "scans/east/images").iterdir()).read_bytes())
    after = load()

    assert isinstance(before.train, TensorSplit) and isinstance(after.train, TensorSplit)
    assert after is not before and not torch.equal(before.train.images, after.train.images)


def test_what_would_take_much_of_the_memory_is_not_kept(monkeypatch: MonkeyPatch) -> None:
    first = synthetic(1).load("north")
    monkeypatch.setattr(reuse, "free_memory", lambda: 10 * reuse.count_bytes(first) + 1)

    assert synthetic(1).load("north") is first
    assert synthetic(1).load("east") is not synthetic(1).load("east")
