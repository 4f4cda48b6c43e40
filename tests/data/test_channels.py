"""Channels by name: cases that lack some, or have them in another order, from listing to prediction."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
import yaml
from helpers import run, settings, whole_and_resumed

import wardround as wr
from comparison.here import Here
from wardround import batch
from wardround.configuring.measuring import measure_federation
from wardround.data.channels import find_places, join_channels
from wardround.data.checking.check import check
from wardround.data.federation_file import PrepareSettings, load
from wardround.data.fingerprint.distance import compare
from wardround.data.listing import Entry, Listing
from wardround.data.opening import open_federation
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.phantom.files import write as write_files
from wardround.data.preparing.prepare import prepare_case
from wardround.data.proposing.proposal import propose
from wardround.data.readers.image_files import Volume
from wardround.data.settings import DataSettings
from wardround.data.slices.cutting import cut
from wardround.data.sources import list_cases
from wardround.errors import ConfigError
from wardround.exporting import export
from wardround.exporting.parts import ReadAndPrepare, datalist
from wardround.methods import METHODS
from wardround.prediction.evaluating import evaluate
from wardround.prediction.predicting import Predictor
from wardround.prediction.session import predict_into
from wardround.prediction.trained import TrainedModel
from wardround.reporting.page import write_report

LACKS = {"north": ("channel_0",), "east": ("channel_1",), "south": ("channel_2",)}
THREE: dict[str, Any] = {"hospitals": 3, "size": 16, "cases": 8, "channels": 3}
MISSING = {"phantom": {**THREE, "lacks": LACKS}}
SPLITS = {"by": "ratios", "ratios": [0.5, 0.25, 0.25]}
CHANNELS_OF = {
    "north": ["channel_1", "channel_2"],
    "east": ["channel_0", "channel_2"],
    "south": ["channel_0", "channel_1"],
}


def scan(path: Path, value: float = 1.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(int(value)).normal(value, 1, (4, 4, 4)).astype(np.float32)
    nibabel.Nifti1Image(values, np.eye(4)).to_filename(path)  # type: ignore[no-untyped-call]
    return path


def write(path: Path, **plain: Any) -> Path:
    path.write_text(yaml.safe_dump({"labels": {"lesion": [1]}, **plain}))
    return path


def places(path: Path) -> dict[str, tuple[tuple[int, ...], list[str]]]:
    found = list_cases(load(path), path.parent)
    return {e.name: (e.places, [image.name for image in e.images]) for e in found.entries}


# Names


def test_channels_are_found_by_name_whatever_their_order_and_capitals() -> None:
    wanted = ("t1", "t2", "flair")
    assert find_places(["FLAIR", "T1"], wanted) == (1, -1, 0)
    assert find_places(["t2", "t1", "flair"], wanted) == (1, 0, 2)
    assert find_places(["T1", "T2", "Flair"], wanted) == ()
    assert find_places(["flair", "-", "t1"], wanted) == (2, -1, 0)
    assert find_places(["a", "b", "c"], wanted) == ()  # other words for the same


def test_a_name_that_may_be_an_absent_channel_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Is 'adc' one of them\?.*channels_of: \{north: \[t1, -\]\}"):
        find_places(["t1", "adc"], ["t1", "t2"], "north")


def test_sources_together_have_the_channels_of_all() -> None:
    def of(*names: str) -> Listing:
        return Listing("x", (Entry("a", "a", (Path("a"),), None, "a"),), names)

    assert join_channels([of("t1", "flair"), of("t1", "t2", "Flair")]) == ("t1", "t2", "Flair")
    assert join_channels([of("t1"), of("t2", "t1")]) == ("t2", "t1")
    assert join_channels([of("CT"), of("MR")]) == ("CT",)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"channels": ["t1", "t1"]}, "channels names 't1' twice"),
        (
            {"channels": ["t1"], "channels_of": {"north": ["t3"]}},
            r"channels_of.north names 't3'.*some of: t1",
        ),
        ({"channels": ["t1"], "channels_of": {"north": ["-"]}}, "name one channel or more"),
        ({"channels": ["t1"], "channels_of": {"nort": ["t1"]}}, "Did you mean 'north'"),
        (
            {"channels": ["t1"], "channels_of": {"north": ["t1"]}, "partition": {"kind": "iid"}},
            "partition.kind is iid",
        ),
    ],
)
def test_mistakes_in_names_are_told(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    for part in ("images", "labels"):
        scan(tmp_path / "north" / part / "a.nii")
    path = write(tmp_path / "federation.yaml", sources=[{"path": "north"}], **changes)
    with pytest.raises(ConfigError, match=said):
        list_cases(load(path), tmp_path)


# Layouts that name channels


def test_nnunet_files_are_placed_by_the_names_of_each_hospital(tmp_path: Path) -> None:
    given = {"north": {"0": "T1", "1": "T2", "2": "FLAIR"}, "south": {"0": "FLAIR", "1": "T1"}}
    for hospital, names in given.items():
        for number in names:
            scan(tmp_path / hospital / f"imagesTr/{hospital}1_000{number}.nii.gz")
        scan(tmp_path / hospital / f"labelsTr/{hospital}1.nii.gz")
        facts = {"channel_names": names, "labels": {"background": 0, "lesion": 1}, "file_ending": ".nii.gz"}
        (tmp_path / hospital / "dataset.json").write_text(json.dumps(facts))
    (tmp_path / "north/imagesTr/north1_0001.nii.gz").unlink()  # a case may lack some, too
    path = write(tmp_path / "federation.yaml", sources=[{"path": "north"}, {"path": "south"}])

    assert places(path) == {
        "north1": ((0, -1, 1), ["north1_0000.nii.gz", "north1_0002.nii.gz"]),
        "south1": ((0, -1, 1), ["south1_0001.nii.gz", "south1_0000.nii.gz"]),
    }


def test_a_site_of_a_bids_set_may_lack_a_kind_of_scan(tmp_path: Path) -> None:
    rows = ["participant_id\tsite"]
    for number, site in enumerate(["Oslo", "Oslo", "Bergen"], start=1):
        stem = f"sub-{number}/anat/sub-{number}"
        scan(tmp_path / f"bids/{stem}_T1w.nii.gz")
        if site == "Oslo":
            scan(tmp_path / f"bids/{stem}_FLAIR.nii.gz")
        scan(tmp_path / f"bids/{stem}_dseg.nii.gz")
        rows.append(f"sub-{number}\t{site}")
    (tmp_path / "bids/participants.tsv").write_text("\n".join(rows))
    found = places(write(tmp_path / "federation.yaml", sources=[{"path": "bids"}]))

    assert found["sub-1"][0] == () and found["sub-3"] == ((-1, 0), ["sub-3_T1w.nii.gz"])


def test_a_centre_with_a_file_a_channel_may_lack_one(tmp_path: Path) -> None:
    for centre, kinds in {"north": ("flair", "t1", "t2"), "south": ("flair", "t2")}.items():
        for case in (f"{centre}a", f"{centre}b"):
            for kind in (*kinds, "seg"):
                scan(tmp_path / "scans" / centre / case / f"{case}_{kind}.nii.gz")
    found = places(write(tmp_path / "federation.yaml", sources=[{"path": "scans"}]))

    assert found["northa"][0] == () and found["southa"][0] == (0, -1, 1)


def test_a_list_may_leave_cells_of_channels_empty(tmp_path: Path) -> None:
    names = ("t1.nii", "t2.nii", "seg.nii")
    for name in names:
        scan(tmp_path / name)
    rows = ["image_t1,image_t2,label,case", "t1.nii,t2.nii,seg.nii,a", ",t2.nii,seg.nii,b"]
    (tmp_path / "list.csv").write_text("\n".join(rows))
    found = places(write(tmp_path / "federation.yaml", sources=[{"path": "list.csv"}]))

    assert found == {"a": ((), ["t1.nii", "t2.nii"]), "b": ((-1, 0), ["t2.nii"])}


def test_numbered_files_beside_each_other_tell_what_a_case_lacks(tmp_path: Path) -> None:
    for case, numbers in {"a": (0, 1, 2), "b": (0, 2)}.items():
        for number in numbers:
            scan(tmp_path / f"north/images/{case}_000{number}.nii")
        scan(tmp_path / f"north/labels/{case}.nii")
    found = places(write(tmp_path / "federation.yaml", sources=[{"path": "north"}]))

    assert found["a"][0] == () and found["b"] == ((0, -1, 1), ["b_0000.nii", "b_0002.nii"])


# Preparing


def prepared(channels: int, places: tuple[int, ...] = (), **settings: Any) -> torch.Tensor:
    data = np.random.default_rng(1).normal(5, 2, (channels, 8, 8)).astype(np.float32)
    image = Volume(data, None, (1.0, 1.0))
    return prepare_case(image, None, PrepareSettings(**settings), {}, places=places).image


@pytest.mark.parametrize("normalise", ["zscore", "percentile", "maximum", "none"])
def test_absent_channels_are_zeros_and_the_others_as_if_alone(normalise: str) -> None:
    alone = prepared(2, normalise=normalise, size=(12, 12), spacing=(1, 1))
    filled = prepared(2, (1, -1, 0), normalise=normalise, size=(12, 12), spacing=(1, 1))

    assert torch.equal(filled[0], alone[1]) and torch.equal(filled[2], alone[0])
    assert filled.shape == (3, 12, 12) and not filled[1].any()


def test_joint_intensities_go_with_their_channel() -> None:
    rows = ((0, 10, 5, 1), (0, 10, 5, 2), (0, 10, 5, 4))
    all_three = prepared(3, normalise="ct", intensities=rows)
    some = prepared(3, (0, -1, 2), normalise="ct", intensities=rows)

    assert torch.equal(some[[0, 2]], all_three[[0, 2]]) and not some[1].any()


# data init


def test_init_proposes_what_a_hospital_has_and_asks(tmp_path: Path) -> None:
    made = PhantomSettings.read({**THREE, "size": 24, "lacks": {"north": ("channel_1",)}})
    write_files(made, tmp_path / "scans", "nifti", 1)
    proposal = propose([tmp_path / "scans"])

    assert proposal.file.channels == ("channel_0", "channel_1", "channel_2")
    assert proposal.proposed["channels_of"] == {"north": ["channel_0", "channel_1"]}
    assert any("fewer at some clients (north 2)" in said for said in proposal.guesses)
    report = check(proposal.listing, proposal.file)
    assert {entry.client for entry in report.usable} == {"east", "south"}
    assert "say which it has under channels_of" in report.reasons(report.left_out[0])[0].sentence


# Whole runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three hospitals of files, each without another channel, and a run on them in the folder `run`."""
    folder: Path = tmp_path_factory.mktemp("lacking")
    write_files(PhantomSettings.read(MISSING["phantom"]), folder / "scans", "nifti", 1)
    write(
        folder / "federation.yaml",
        sources=[{"path": "scans"}],
        channels=["channel_0", "channel_1", "channel_2"],
        channels_of=CHANNELS_OF,
        splits=SPLITS,
    )
    run(folder / "run", data={"federation": str(folder / "federation.yaml")})
    return folder


def test_naming_all_channels_gives_the_bytes_of_naming_none(tmp_path: Path) -> None:
    write_files(PhantomSettings.read(THREE), tmp_path / "scans", "nifti", 1)
    names = ["channel_0", "channel_1", "channel_2"]
    given = {"sources": [{"path": "scans"}], "splits": SPLITS}
    plain = write(tmp_path / "plain.yaml", **given)
    named = write(tmp_path / "named.yaml", **given, channels=names, channels_of={"north": names})
    found = [run(tmp_path / path.stem, data={"federation": str(path)}) for path in (plain, named)]

    assert len({result.outcome.state.params.sha256() for result in found}) == 1
    assert "lacking" not in json.loads((tmp_path / "named/preparation.json").read_text())


def test_resumed_and_worker_processes_give_the_same_bytes(tmp_path: Path) -> None:
    whole, resumed = whole_and_resumed(tmp_path, data=MISSING)
    assert whole.outcome.state.params.sha256() == resumed.outcome.state.params.sha256()
    one = run(tmp_path / "one", data=MISSING)
    two = run(tmp_path / "two", data=MISSING, compute={"threads": 1, "workers": 2})
    assert one.outcome.state.params.sha256() == two.outcome.state.params.sha256()


def test_phantoms_lack_channels_without_a_statistic_of_zeros() -> None:
    federation = open_federation(DataSettings.read(MISSING), 1)
    north, full = (
        federation.load("north"),
        open_federation(DataSettings.read({"phantom": THREE}), 1).load("north"),
    )
    mine, theirs = (data.train.batch([0]).image[0] for data in (north, full))

    assert north.lacking and not mine[0].any() and torch.equal(mine[1:], theirs[1:])
    assert federation.lacks["north"] == {"channel_0": 8} and federation.channels[1] == "channel_1"


@pytest.mark.parametrize("method", sorted(name for name in METHODS if METHODS[name].needs_every_channel))
def test_methods_that_mix_images_refuse_with_the_reason(tmp_path: Path, method: str) -> None:
    with pytest.raises(ConfigError, match=f"lack channels.*{method}.*{METHODS[method].needs_every_channel}"):
        wr.run(settings(tmp_path, data=MISSING, method={"name": method}))


@pytest.mark.parametrize("stem", ["none", "variational"])
def test_objectives_of_two_views_and_stems_train(tmp_path: Path, stem: str) -> None:
    model = {"name": "unet2d", "base_filters": 2, "levels": 2, "stem": stem}
    method = {"name": "fsf3a" if stem == "none" else "fedavg"}
    assert run(tmp_path, data=MISSING, model=model, method=method).outcome.state.round == 2


def test_result_and_report_say_who_lacked_what(trained: Path) -> None:
    assert json.loads((trained / "run/result.json").read_text())["lacks"] == {
        name: {channel[0]: 8} for name, channel in sorted(LACKS.items())
    }
    write_report([trained / "run"])
    page = (trained / "run/report.html").read_text()
    assert "channels absent" in page and "Channels that were absent: east channel_1 (8 cases)" in page


def test_a_run_evaluates_sets_that_lack_channels_by_name(trained: Path, tmp_path: Path) -> None:
    done = evaluate(trained / "run", trained / "federation.yaml", output=tmp_path / "there", split="test")
    own = json.loads((trained / "run/result.json").read_text())["test"]["dice"]["clients"]["north"]["mean"]

    assert not done.problems and done.evaluation is not None
    assert json.loads((tmp_path / "there/result.json").read_text())["test"]["dice"]["clients"]["north"][
        "mean"
    ] == pytest.approx(own, abs=0.02)
    said = yaml.safe_load((trained / "federation.yaml").read_text())
    said |= {
        "sources": [{"path": str(trained / "scans")}],
        "channels_of": {**CHANNELS_OF, "north": ["channel_1"]},
    }
    wrong = write(tmp_path / "wrong.yaml", **said)
    problems = evaluate(trained / "run", wrong, output=tmp_path / "wrong", split="test").problems
    assert "has 2 channels, but federation.yaml names 1" in problems[0].reason


def predicted(folder: Path, out: Path, *files: Path, **options: Any) -> Any:
    return predict_into(Predictor([TrainedModel.load(folder)], **options), files, out)


def test_any_subset_of_channels_is_predicted_and_said(trained: Path, tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(16, 16, 1)).astype(np.float32)
    files = []
    for name in ("a_0001", "b_channel_0", "b_channel_2"):
        files.append(tmp_path / f"{name}.nii.gz")
        nibabel.Nifti1Image(values, np.eye(4)).to_filename(files[-1])  # type: ignore[no-untyped-call]
    done = predicted(trained / "run", tmp_path / "masks", *files)
    absent = {name: facts["absent_channels"] for name, facts in done.done.items()}

    assert not done.problems
    assert absent == {"a_0001.nii.gz": ["channel_0", "channel_2"], "b.nii.gz": ["channel_1"]}
    assert "the scan lacks channel_1" in done.done["b.nii.gz"]["warnings"][0]


def test_a_file_with_fewer_channels_needs_their_names(trained: Path, tmp_path: Path) -> None:
    file = sorted((trained / "scans/north/images").iterdir())[0]
    refused = predicted(trained / "run", tmp_path / "a", file)
    assert "If it lacks some, say what it holds: --channels" in refused.problems[0].reason
    done = predicted(trained / "run", tmp_path / "b", file, channels=["channel_1", "channel_2"])
    assert done.done[file.name]["absent_channels"] == ["channel_0"]
    one = predicted(trained / "run", tmp_path / "d", file, channels=["channel_1"])
    assert "has 2 channels, but --channels names 1 (channel_1). Name all" in one.problems[0].reason
    with pytest.raises(ConfigError, match="--channels names 'channel_9'"):
        predicted(trained / "run", tmp_path / "c", file, channels=["channel_9"])


def test_a_run_that_saw_all_channels_refuses_fewer(tmp_path: Path) -> None:
    run(tmp_path / "run", data={"phantom": THREE})
    values = np.zeros((16, 16, 1), dtype=np.float32)
    file = tmp_path / "a_0001.nii.gz"
    nibabel.Nifti1Image(values, np.eye(4)).to_filename(file)  # type: ignore[no-untyped-call]
    done = predicted(tmp_path / "run", tmp_path / "masks", file)
    assert "has 1 channel, but this run needs 3 channels" in done.problems[0].reason


def test_exports_say_what_absent_channels_are(trained: Path, tmp_path: Path) -> None:
    export(trained / "run", "torch", tmp_path / "torch")
    assert json.loads((tmp_path / "torch/model.json").read_text())["preparation"]["lacking"] is True
    assert "a scan may lack some" in (tmp_path / "torch/MODEL_CARD.md").read_text()


def test_a_shift_of_images_leaves_absent_channels_absent(trained: Path, tmp_path: Path) -> None:
    path = write(
        trained / "shifted.yaml",
        **{
            **yaml.safe_load((trained / "federation.yaml").read_text()),
            "partition": {"kind": "feature", "shift": "intensity", "strength": 1.0},
        },
    )
    federation = open_federation(DataSettings.read({"federation": str(path)}), 1)
    assert not federation.load("north").train.batch([0]).image[:, 0].any()


def test_in_one_file_too_another_order_is_put_right(tmp_path: Path) -> None:
    write_files(PhantomSettings.read({**THREE, "hospitals": 1}), tmp_path / "scans", "nifti", 1)
    names = ["channel_0", "channel_1", "channel_2"]

    def first(order: list[str]) -> torch.Tensor:
        path = write(
            tmp_path / "federation.yaml",
            sources=[{"path": "scans/north", "channels": order}],
            channels=names,
            splits=SPLITS,
        )
        federation = open_federation(DataSettings.read({"federation": str(path)}), 1)
        return federation.load("north").train.batch([0]).image[0]

    assert torch.equal(first(names)[[2, 0, 1]], first(names[1:] + names[:1]))


def test_fingerprints_leave_out_what_a_client_lacks(trained: Path) -> None:
    told, facts = measure_federation(trained / "federation.yaml")
    east = next(one for one in told if one.client == "east")

    assert [curve is None for curve in east.intensity] == [False, True, False]
    assert east.modality[1] is None and east.inside[1] is None
    assert [channel.name for channel in facts.channels] == ["channel_0", "channel_1", "channel_2"]
    assert not math.isnan(sum(channel.mean for channel in facts.channels))
    assert compare(told).distances["brightness"].max() < math.inf


def test_slices_keep_what_volumes_lack(tmp_path: Path) -> None:
    made = {**THREE, "dimensions": 3, "hospitals": 2, "cases": 3, "lacks": {"north": ("channel_1",)}}
    write_files(PhantomSettings.read(made), tmp_path / "scans", "nifti", 1)
    path = write(
        tmp_path / "federation.yaml",
        sources=[{"path": "scans"}],
        channels=["a", "b", "c"],
        channels_of={"north": ["c", "a"]},  # stored in another order
    )
    cut(path, tmp_path / "slices")
    assert load(tmp_path / "slices/federation.yaml").channels_of == {"north": ("a", "c")}


def test_a_comparison_says_what_was_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "ChildProcess", Here)
    monkeypatch.setattr(batch, "POLL_SECONDS", 0)
    values = {**settings(tmp_path, data=MISSING), "rounds": 1, "sweep": {"methods": ["fedavg"], "seeds": [1]}}
    values.pop("output")
    found = wr.compare(values, output=tmp_path / "both", jobs=1)

    assert not found.failures
    assert "Channels that were absent: north channel_0" in found.table().markdown()


def test_bundles_prepare_scans_that_lack_channels(trained: Path, tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(16, 16, 1)).astype(np.float32)
    for name in ("a_channel_0", "a_channel_2"):
        file = tmp_path / f"{name}.nii.gz"
        nibabel.Nifti1Image(values, np.eye(4)).to_filename(file)  # type: ignore[no-untyped-call]
    model = TrainedModel.load(trained / "run")
    (item,) = datalist(str(tmp_path), model, str(tmp_path / "work"))
    image = ReadAndPrepare(model)(item)["image"]
    assert image[0].any() and not image[1].any() and torch.equal(image[0], image[2])
