"""From federation.yaml to batches: splits, bad cases, what is kept for the next process, where cases live."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from helpers import run, settings
from PIL import Image
from pytest import LogCaptureFixture, MonkeyPatch, fixture, mark, raises

import wardround.data.serving.client_cache as client_cache
import wardround.data.serving.resident as residence
from wardround.config_file import load_config, resolve
from wardround.data.cases import ClientData, TensorSplit
from wardround.data.federation import Federation
from wardround.data.opening import open_federation
from wardround.data.phantom import files as phantom_files
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.roles import POOLED
from wardround.data.serving.resident import CachedSplit, HostSplit, PatchSplit, Residence
from wardround.data.settings import DataSettings
from wardround.errors import ConfigError, DataError


@fixture(scope="session")
def pictures(tmp_path_factory: Any) -> Path:
    """Two hospitals of eight pictures, 16x16."""
    folder: Path = tmp_path_factory.mktemp("pictures") / "scans"
    phantom_files.write(PhantomSettings(hospitals=2, size=16, cases=8), folder, "png", 1)
    return folder


@fixture(scope="session")
def volumes(tmp_path_factory: Any) -> Path:
    """Two hospitals of six volumes, 16x16x16, which every third case has cut to 16x16x11."""
    import nibabel

    folder: Path = tmp_path_factory.mktemp("volumes") / "scans"
    phantom_files.write(PhantomSettings(hospitals=2, dimensions=3, size=16, cases=6), folder, "nifti", 1)
    for path in sorted(folder.glob("*/*/*.nii.gz")):
        if int(path.name.removesuffix(".nii.gz")[-1]) % 3 == 0:
            volume: Any = nibabel.load(path)
            nibabel.Nifti1Image(np.asarray(volume.dataobj)[:, :, :11], volume.affine).to_filename(path)
    return folder


def written(folder: Path, scans: Path, **changes: Any) -> Path:
    """A federation.yaml over a copy of the scans, which a test may spoil."""
    shutil.copytree(scans, folder / "scans")
    path = folder / "federation.yaml"
    plain = {"sources": [{"path": "scans"}], "labels": {"lesion": [1]}, **changes}
    path.write_text(yaml.safe_dump(plain, sort_keys=False))
    return path


def opened(path: Path, resident: Residence = "auto", **changes: Any) -> Federation:
    return open_federation(DataSettings.model_validate({"federation": path, **changes}), 1, resident)


def everything(data: ClientData) -> list[str]:
    return [*data.train.names, *data.val.names, *data.test.names]


def forbid_checking(monkeypatch: MonkeyPatch) -> None:
    def check(*_: Any, **__: Any) -> None:
        raise AssertionError("a case was opened again")

    monkeypatch.setattr(client_cache, "check", check)


# Opening


def test_a_federation_is_what_the_file_and_the_folders_say(tmp_path: Path, pictures: Path) -> None:
    found = opened(written(tmp_path, pictures))

    assert list(found.names) == ["east", "north"] and found.counts == {"north": 8, "east": 8}
    assert (found.dimensions, found.in_channels, found.num_classes) == (2, 1, 2)
    assert found.regions == {"lesion": (1,)}
    data = found.load("north")
    listed = [
        line.split(",") for line in (pictures / "index.csv").read_text().splitlines() if "north" in line
    ]
    for split in ("train", "val", "test"):
        assert getattr(data, split).names == sorted(stem for _, stem, where in listed if where == split)
    assert isinstance(data.train, TensorSplit)
    image = data.train.batch([0]).image
    assert image.shape == (1, 1, 16, 16) and abs(float(image.mean())) < 1e-4  # z-score is the default


def test_opening_writes_nothing_and_checks_nothing(
    tmp_path: Path, pictures: Path, monkeypatch: MonkeyPatch
) -> None:
    forbid_checking(monkeypatch)
    opened(written(tmp_path, pictures))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["federation.yaml", "scans"]


def test_settings_of_the_run_lie_over_those_of_the_file(tmp_path: Path, pictures: Path) -> None:
    path = written(tmp_path, pictures, prepare={"size": [16, 16], "normalise": "minmax"})
    image = opened(path, prepare={"size": [12, 20]}).load("north").test.batch([0]).image

    assert image.shape == (1, 1, 12, 20) and float(image.min()) == 0 and float(image.max()) <= 1


@mark.parametrize(
    "changes, message",
    [
        ({"prepare": {"siz": [8, 8]}}, "data.prepare.siz is not a setting. Did you mean 'size'"),
        ({"prepare": {"size": "large"}}, "data.prepare.size is 'large'"),
        ({"prepare": {"size": [8, 8, 8]}}, r"prepare.size is \[8, 8, 8\], but the images of .* are 2D"),
        (
            {"prepare": {"size": None, "spacing": [float("nan"), 1]}},
            "prepare.spacing is .*finite numbers above 0",
        ),
        ({"prepare": {"size": None, "spacing": [1, 0]}}, "prepare.spacing is .*finite numbers above 0"),
        ({"patch": [8, 8, 8]}, r"data.patch is \[8, 8, 8\], but the images of .* are 2D; give 2 numbers"),
    ],
    ids=lambda value: None if isinstance(value, str) else json.dumps(value),
)
def test_settings_that_do_not_fit_are_refused_when_opening(
    tmp_path: Path, pictures: Path, changes: dict[str, Any], message: str
) -> None:
    with raises(ConfigError, match=message):
        opened(written(tmp_path, pictures), **changes)


@mark.parametrize(
    "data, message",
    [
        ({"federation": "f.yaml", "phantom": {"size": 32}}, "phantom and federation are both given"),
        ({"patch": [8, 8]}, "patch needs real data: set data.federation"),
        ({"federation": "f.yaml", "patch": [8]}, r"patch is \[8\]; give two numbers for images"),
        ({"federation": "f.yaml", "patch": [8, 0]}, "data.patch.1 is 0"),
    ],
    ids=lambda value: None if isinstance(value, str) else json.dumps(value),
)
def test_cases_come_from_one_place(data: dict[str, Any], message: str) -> None:
    with raises(ConfigError, match=message):
        load_config({"data": data})


def test_where_cases_live_is_one_of_four() -> None:
    with raises(ConfigError, match="compute.resident is 'gpu'"):
        load_config({"compute": {"resident": "gpu"}})


def test_a_written_out_configuration_reads_back() -> None:
    config = load_config({"data": {"federation": "f.yaml", "patch": [8, 8], "prepare": {"size": [9, 9]}}})

    assert load_config(resolve(config)).data == config.data


def test_labels_without_a_meaning_and_a_file_that_is_not_there(tmp_path: Path, pictures: Path) -> None:
    with raises(ConfigError, match=r"does not say what the labels mean; add, for example, labels"):
        opened(written(tmp_path, pictures, labels={}))
    with raises(ConfigError, match="does not exist"):
        opened(tmp_path / "nowhere.yaml")


# Bad cases


def spoil(path: Path) -> None:
    """north: one text file, one label of another shape, one image of three channels; east is well."""
    images, labels = path.parent / "scans/north/images", path.parent / "scans/north/labels"
    files = sorted(images.iterdir())
    files[0].write_text("not a picture")
    Image.fromarray(np.zeros((5, 5), dtype=np.uint8)).save(labels / files[1].name)
    Image.fromarray(np.random.default_rng(1).integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(files[2])


def test_bad_cases_are_left_out_each_with_its_reason(tmp_path: Path, pictures: Path, caplog: Any) -> None:
    path = written(tmp_path, pictures)
    stems = sorted(file.stem for file in (pictures / "north/images").iterdir())
    spoil(path)
    found = opened(path)
    data = found.load("north")

    reasons = dict(found.left_out("north"))
    assert sorted(everything(data)) == stems[3:] and sorted(reasons) == stems[:3]
    assert f"client 'north', case '{stems[0]}'" in reasons[stems[0]]
    assert "16x16 but label is 5x5" in reasons[stems[1]] and "3 channels" in reasons[stems[2]]
    assert "client 'north': 3 of 8 cases are left out. The first: client 'north'" in caplog.text
    assert found.left_out("east") == [] and found.left_out(POOLED) == []
    assert found.counts["north"] == 8  # as listed


def test_the_first_image_may_be_broken(tmp_path: Path, pictures: Path) -> None:
    path = written(tmp_path, pictures)
    sorted((tmp_path / "scans/east/images").iterdir())[0].write_bytes(b"")

    assert opened(path).dimensions == 2


def test_a_client_without_a_usable_case_is_named_and_the_others_go_on(
    tmp_path: Path, pictures: Path, caplog: LogCaptureFixture
) -> None:
    path = written(tmp_path, pictures)
    for file in (tmp_path / "scans/north/images").iterdir():
        file.write_bytes(b"")
    found = opened(path)

    assert not everything(found.load("north"))
    assert "client 'north' has no usable case of 8 and takes no part" in caplog.text
    assert len(everything(found.load("east"))) == 8
    result = run(tmp_path / "run", rounds=1, data={"federation": str(path)})
    assert set(result.summary["test"]["dice"]["clients"]) == {"east"}
    assert result.records[0]["clients"] == ["east"]
    with raises(ConfigError, match="min_clients is 2, but only 'east' can train"):
        run(tmp_path / "two", rounds=1, data={"federation": str(path)}, min_clients=2)
    for file in (tmp_path / "scans/east/images").iterdir():
        file.write_bytes(b"")
    with raises(DataError, match="none of 16 images can be read"):
        opened(path)


def test_a_run_is_refused_before_round_1_where_nobody_has_a_usable_case(
    tmp_path: Path, pictures: Path
) -> None:
    path = written(tmp_path, pictures)
    for file in (tmp_path / "scans").glob("*/labels/*"):
        file.write_bytes(b"")

    with raises(ConfigError, match="no client that takes part has a training case that can be used"):
        run(tmp_path / "run", rounds=1, data={"federation": str(path), "patch": [16, 16]})
    assert (tmp_path / "run" / "left_out.json").exists()
    assert not (tmp_path / "run" / "records.jsonl").exists()


def test_a_client_with_other_channels_than_the_federation_is_left_out(
    tmp_path: Path, pictures: Path, caplog: LogCaptureFixture
) -> None:
    path = written(tmp_path, pictures)
    for file in (tmp_path / "scans/north/images").iterdir():
        Image.open(file).convert("RGB").save(file)

    assert not everything(opened(path).load("north"))
    assert "has 3 channels, but the federation's images have 1" in caplog.text


# The next process


def test_a_second_load_opens_no_scan_again(tmp_path: Path, pictures: Path, monkeypatch: MonkeyPatch) -> None:
    path = written(tmp_path, pictures)
    spoil(path)
    first, reasons = opened(path).load("north"), opened(path).left_out("north")
    forbid_checking(monkeypatch)

    again = opened(path)

    assert torch.equal(again.load("north").train.batch([0, 1]).image, first.train.batch([0, 1]).image)
    assert again.left_out("north") == reasons


@mark.parametrize("change", ["scan", "settings", "split", "cache"])
def test_what_changed_is_checked_again(tmp_path: Path, pictures: Path, change: str) -> None:
    path = written(tmp_path, pictures)
    before = opened(path).load("north")
    name = before.train.names[0]
    if change == "scan":
        (tmp_path / f"scans/north/images/{name}.png").write_bytes(b"")
    elif change == "settings":
        path.write_text(path.read_text() + "prepare: {normalise: minmax}\n")
    elif change == "split":
        rows = (tmp_path / "scans/index.csv").read_text()
        (tmp_path / "scans/index.csv").write_text(rows.replace(f"north,{name},train", f"north,{name},test"))
    else:
        for file in (tmp_path / ".wardround-cache").rglob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:100])  # as a full disk might leave it

    after = opened(path).load("north")

    assert (name in after.train.names) == (change in ("settings", "cache"))
    assert (name in after.test.names) == (change == "split")
    same = torch.equal(before.val.batch([0]).image, after.val.batch([0]).image)
    assert same == (change != "settings")


def test_a_broken_client_cache_is_written_again(tmp_path: Path, pictures: Path) -> None:
    path = written(tmp_path, pictures)
    opened(path).load("north")
    for note in (tmp_path / ".wardround-cache/clients").iterdir():
        note.write_text('{"paths": []')

    assert len(everything(opened(path).load("north"))) == 8


# Splits, partitions


def test_a_held_out_client_is_only_tested(tmp_path: Path, pictures: Path) -> None:
    data = opened(written(tmp_path, pictures, held_out=["east"])).load("east")

    assert (len(data.train), len(data.val), len(data.test)) == (0, 0, 8)


def test_a_patient_the_list_puts_in_two_splits_costs_the_training_case(
    tmp_path: Path, pictures: Path
) -> None:
    path = written(tmp_path, pictures)
    rows = [line.split(",") for line in (tmp_path / "scans/index.csv").read_text().splitlines()]
    north = [row for row in rows[1:] if row[0] == "north"]
    train, test = (next(row[1] for row in north if row[2] == split) for split in ("train", "test"))
    patient = {row[1]: row[1] for row in rows} | {train: "p1", test: "p1"}
    text = "\n".join(
        [",".join([*rows[0], "patient"]), *[",".join([*row, patient[row[1]]]) for row in rows[1:]]]
    )
    (tmp_path / "scans/index.csv").write_text(text + "\n")

    found = opened(path)
    data = found.load("north")

    assert test in data.test.names and train not in everything(data)
    assert [case for case, _ in found.left_out("north")] == [train]


@mark.parametrize("kind", ["iid", "dirichlet"])
def test_a_partition_is_the_same_in_every_process(tmp_path: Path, pictures: Path, kind: str) -> None:
    path = written(tmp_path, pictures, partition={"kind": kind, "clients": 3, "alpha": 0.5})
    one, other = opened(path), opened(path)

    assert len(one.names) == 3 and one.counts == other.counts and sum(one.counts.values()) == 16
    name = one.names[0]
    assert everything(one.load(name)) == everything(other.load(name))
    assert (tmp_path / ".wardround-cache/labels.json").exists() == (kind == "dirichlet")


def test_a_feature_partition_changes_the_images_wherever_they_live(tmp_path: Path, pictures: Path) -> None:
    path = written(tmp_path, pictures)
    plain = opened(path).load("east").test
    path.write_text(path.read_text() + "partition: {kind: feature, shift: intensity, strength: 1.0}\n")

    images = [opened(path, resident=where).load("east").test.batch([0]).image for where in ("host", "disk")]

    assert torch.equal(images[0], images[1])
    assert not torch.allclose(images[0], plain.batch([0]).image, atol=0.1)


# Where cases live


def test_memory_and_disk_give_the_same_bytes(tmp_path: Path, pictures: Path, volumes: Path) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "p").mkdir()
    for path, patch in (
        (written(tmp_path / "p", pictures), None),
        (written(tmp_path / "v", volumes), [8, 8, 8]),
    ):
        host, disk = (opened(path, resident=where, patch=patch).load("north") for where in ("host", "disk"))
        for split in ("train", "val", "test"):
            one, other = getattr(host, split), getattr(disk, split)
            assert one.names == other.names and isinstance(other, CachedSplit)
            draws = [torch.Generator().manual_seed(3) if patch else None for _ in range(2)]
            a, b = one.batch([0], draws[0]), other.batch([0], draws[1])
            assert torch.equal(a.image, b.image) and torch.equal(a.label, b.label)
            assert a.label.dtype == b.label.dtype and one.spacing(0) == other.spacing(0)


def test_auto_leaves_on_disk_what_is_too_large_for_memory(
    tmp_path: Path, pictures: Path, monkeypatch: MonkeyPatch
) -> None:
    path = written(tmp_path, pictures)
    assert isinstance(opened(path).load("north").train, HostSplit)
    monkeypatch.setattr(residence, "free_memory", lambda: 20_000)

    split = opened(path).load("north").train

    assert isinstance(split, CachedSplit) and split.one_shape and not split.draws
    assert split.batch([0, 1]).image.shape == (2, 1, 16, 16)
    assert split.to(torch.device("cpu")).batch([1]).label.dtype == torch.int64


def test_free_memory_is_a_sensible_number() -> None:
    assert 2**20 < residence.free_memory() < 2**50


@mark.parametrize("where, moves", [("auto", False), ("device", True), ("host", False), ("disk", False)])
def test_a_gpu_without_room_leaves_cases_in_memory(where: Any, moves: bool, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 10_000))
    gpu = torch.device("cuda")

    assert residence.may_move(251, gpu, where) == moves
    assert residence.may_move(249, gpu, where) == (moves or where == "auto")
    split = HostSplit(["a"], torch.zeros(1, 1, 9, 9), torch.zeros(1, 9, 9).long(), [(1.0, 1.0)], where)
    if not moves:
        stayed = split.to(gpu)
        assert isinstance(stayed, HostSplit) and stayed.device == gpu and stayed.images.device.type == "cpu"


def test_volumes_of_several_shapes_train_on_patches_and_are_evaluated_whole(
    tmp_path: Path, volumes: Path
) -> None:
    path = written(tmp_path, volumes)
    data = opened(path).load("north")  # no patch is set

    assert isinstance(data.train, PatchSplit) and data.train.patch == (16, 16, 16)
    assert not data.test.one_shape and not data.test.draws
    patches = opened(path, patch=[8, 8, 8], foreground=1.0).load("north").train
    batch = patches.batch(list(range(len(patches))), torch.Generator().manual_seed(1))
    assert batch.image.shape == (len(patches), 1, 8, 8, 8) and bool(
        (batch.label > 0).flatten(1).any(dim=1).all()
    )
    sized = opened(path, prepare={"size": [12, 12, 12]}).load("north").train
    assert isinstance(sized, TensorSplit) and sized.images.shape[1:] == (1, 12, 12, 12)


# Whole runs


def test_a_run_on_real_folders_is_the_same_bytes_from_memory_and_from_disk(
    tmp_path: Path, pictures: Path
) -> None:
    path = written(tmp_path, pictures, held_out=["east"], prepare={"size": [16, 16]})
    spoil(path)

    results = [
        run(tmp_path / where, data={"federation": str(path)}, compute={"resident": where}, rounds=1)
        for where in ("auto", "disk")
    ]

    hashes = {result.summary["params_sha256"] for result in results}
    assert len(hashes) == 1
    assert set(results[0].summary["test"]["dice"]["clients"]) == {"north", "east"}


def test_a_run_on_patches_of_volumes(tmp_path: Path, volumes: Path) -> None:
    changes = {
        "data": {"federation": str(written(tmp_path, volumes)), "patch": [8, 8, 8]},
        "model": {"name": "unet3d", "base_filters": 2, "levels": 2},
        "augmentation": {"spatial": 1.0, "elastic": 0.2, "bias": 0.2},
        "rounds": 1,
    }
    hashes = {run(tmp_path / name, **changes).summary["params_sha256"] for name in ("one", "two")}

    assert len(hashes) == 1 and "data" in settings(tmp_path)
