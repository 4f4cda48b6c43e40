"""A preset's federations on disk: clients, classes, splits and sizes are the paper's, or the notes say not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from wardround.data.serving.loading import RealData
from wardround.data.settings import DataSettings
from wardround.errors import ConfigError, DataError
from wardround.papers import data
from wardround.papers.data import PaperData, match_clients, prepare_data
from wardround.papers.presets import load
from wardround.papers.scaling import WHOLE, Scale

SMALL = Scale.parse("0.01")


def prepare(name: str, out: Path, federations: list[str] | None = None) -> dict[str, PaperData]:
    preset = load(name)
    return prepare_data(preset, federations or list(preset.datasets), ["synthetic"], out, SMALL)[0]


def read(data: PaperData, **settings: object) -> RealData:
    assert data.path is not None
    return RealData(data.path, DataSettings(federation=data.path, **settings))  # type: ignore[arg-type]


def test_three_brain_sets_become_one_federation_of_one_channel_and_one_class(tmp_path: Path) -> None:
    data = read(prepare("safcf-table2", tmp_path)["brain"])
    assert data.listing.clients == ["msd_brain", "ucsf_pdgm", "upenn_gbm"]
    assert data.file.labels == {"tumour": (1, 2, 3, 4)} and data.in_channels == 1
    assert data.file.prepare.size == (32, 32, 32) and data.file.prepare.normalise == "zscore"
    assert data.load("msd_brain").train.batch([0]).image.shape == (1, 1, 32, 32, 32)
    assert not data.left_out("upenn_gbm")


def test_clients_of_a_pooled_federation_are_dealt(tmp_path: Path) -> None:
    made = prepare("safcf-table6", tmp_path, ["5 clients"])["5 clients"]
    assert read(made).listing.clients == ["client-01", "client-02"]
    assert "5 clients are 2 here." in made.notes


def test_volumes_are_cut_where_the_paper_trains_on_slices(tmp_path: Path) -> None:
    data = read(prepare("fedevi-table5", tmp_path, ["prostate"])["prostate"])
    assert data.dimensions == 2 and data.file.prepare.slices is not None
    assert data.file.prepare.slices.clip == 99
    volumes = {entry.group for entry in data.listing.of("HK")}
    assert 1 < len(volumes) < len(data.listing.of("HK"))


def test_labels_that_mean_different_things_become_the_cards_classes(tmp_path: Path) -> None:
    data = read(prepare("fedevi-table3", tmp_path)["fundus"])
    assert len(data.listing.clients) == 6
    assert data.file.labels == {"rim": (1,), "cup": (2,)} and data.regions["disc"] == (1, 2)
    assert {int(v) for v in data.load("magrabia").train.batch([0]).label.unique()} == {0, 1, 2}


def test_cases_of_one_video_are_drawn_apart_where_the_paper_draws_frames(tmp_path: Path) -> None:
    made = prepare("fedevi-table1", tmp_path)["polyp"]
    data = read(made)
    assert all(entry.group == entry.name for entry in data.listing.entries)
    assert any("drawn one by one" in note for note in made.notes)


# Data of one's own


def write_centres(folder: Path, names: tuple[str, ...], cases: int = 12) -> Path:
    random = np.random.default_rng(0)
    for name in names:
        for kind in ("images", "labels"):
            (folder / name / kind).mkdir(parents=True)
        for number in range(cases):
            image = random.integers(1, 255, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(image).save(folder / name / "images" / f"{number:02d}.png")
            Image.fromarray((image[..., 0] > 200).astype(np.uint8)).save(
                folder / name / "labels" / f"{number:02d}.png"
            )
    return folder


def test_clients_are_matched_by_name_and_the_paper_s_split_is_applied(tmp_path: Path) -> None:
    folder = write_centres(tmp_path / "mine", ("kvasir", "cvc_colondb", "elsewhere"))
    preset = load("fedevi-table4")
    made, missing = prepare_data(preset, ["polyp", "prostate"], [str(folder)], tmp_path / "out", WHOLE)
    assert list(made) == ["polyp"] and "prostate" in missing[0]
    data = read(made["polyp"])
    assert data.listing.clients == ["colondb", "kvasir"]
    assert Counter(entry.split for entry in data.listing.of("kvasir")) == {"train": 9, "test": 2, "val": 1}
    assert data.file.prepare.size == (384, 384)
    assert "Clients: cvc_colondb as colondb." in made["polyp"].notes
    assert any("Kvasir 12 instead of 1000" in note for note in made["polyp"].notes)
    assert "2 clients instead of 4." in made["polyp"].notes
    assert "Left out, as none of the paper's clients: elsewhere." in made["polyp"].notes


def test_the_notes_say_that_splits_are_not_those_of_the_authors(tmp_path: Path) -> None:
    notes = prepare("fedevi-table1", tmp_path)["polyp"].notes
    assert any("drawn at random" in note and "the authors' lists" in note for note in notes)


def test_every_repeat_is_another_split(tmp_path: Path) -> None:
    made = prepare("fedevi-table1", tmp_path)["polyp"]
    tests = [
        {e.name for e in read(made, splits={"repeat": n}).listing.entries if e.split == "test"}
        for n in range(3)
    ]
    assert len({frozenset(names) for names in tests}) == 3


def test_other_clients_stand_in_only_where_it_is_clear_for_whom(tmp_path: Path) -> None:
    folder = write_centres(tmp_path / "mine", ("north", "south"))
    out = tmp_path / "out"
    made, _ = prepare_data(load("fedevi-table1"), ["polyp"], [str(folder)], out, SMALL)
    assert "Data: mine, in place of the paper's." in made["polyp"].notes
    assert any(note.startswith("Classes: ") and "the paper's: polyp." in note for note in made["polyp"].notes)
    assert {len(read(made["polyp"]).listing.of(name)) for name in ("north", "south")} == {6}  # of 12
    with pytest.raises(DataError, match=r"polyp.*prostate.*--set datasets='polyp'"):
        prepare_data(load("fedevi-table4"), ["polyp", "prostate"], [str(folder)], out, SMALL)


def test_one_client_of_the_paper_is_no_federation_so_the_others_stay(tmp_path: Path) -> None:
    folder = write_centres(tmp_path / "mine", ("cvc_colondb", "north", "south"))
    made, _ = prepare_data(load("fedevi-table1"), ["polyp"], [str(folder)], tmp_path / "out", SMALL)
    assert read(made["polyp"]).listing.clients == ["colondb", "north", "south"]
    assert "3 clients instead of 4." in made["polyp"].notes


def test_images_of_other_dimensions_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_centres(tmp_path / "mine", ("north", "south"), cases=1)
    with pytest.raises(DataError, match=r"brain \(its images are 3D, those given are 2D; choose another"):
        prepare_data(load("safcf-table2"), ["brain"], [str(folder)], tmp_path / "out", SMALL)


@pytest.mark.parametrize("names", [("north", "south"), ("NYU", "MCF")])
def test_one_folder_never_stands_for_two_sets_of_the_same_clients(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    folder = write_centres(tmp_path / "mine", names, cases=1)
    with pytest.raises(DataError, match=r"T1 \(.*is published.*T2 \(.*is published.*--set datasets='T1'"):
        prepare_data(load("aaw-table2"), ["T1", "T2"], [str(folder)], tmp_path / "out", SMALL)


def test_an_output_folder_has_one_data_set(tmp_path: Path) -> None:
    """Its runs name the same files whatever these were made of, so finished ones would stand for other data."""
    preset, out = load("fedevi-table1"), tmp_path / "out"
    mine, yours = (write_centres(tmp_path / name, ("kvasir", "etis")) for name in ("mine", "yours"))
    for _ in range(2):
        prepare_data(preset, ["polyp"], [str(mine)], out, SMALL)
    before = (out / "polyp.csv").read_text(encoding="utf-8")
    for place, scale in ((str(yours), SMALL), ("synthetic", SMALL), (str(mine), WHOLE)):
        with pytest.raises(ConfigError, match=r"has runs on other data: 'polyp'.*mine.*-o"):
            prepare_data(preset, ["polyp"], [place], out, scale)
    assert (out / "polyp.csv").read_text(encoding="utf-8") == before
    faster = Scale({**SMALL.shares, "rounds": 0.5})
    prepare_data(preset, ["polyp"], [str(mine)], out, faster)  # the same data


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    for place in (str(tmp_path / "nowhere"), ""):
        with pytest.raises(ConfigError, match=f"'{place}' does not exist.*synthetic"):
            prepare_data(load("fedevi-table1"), ["polyp"], [place], tmp_path / "o", WHOLE)
    assert not (tmp_path / "o").exists()


def test_a_list_of_cases_is_read_as_data_init_reads_it(tmp_path: Path) -> None:
    folder = write_centres(tmp_path / "mine", ("kvasir", "etis"), cases=6)
    lines = ["image,label,centre"]
    for image in sorted(folder.glob("*/images/*.png")):
        lines.append(f"{image},{image.parents[1] / 'labels' / image.name},{image.parents[1].name}")
    (tmp_path / "cases.csv").write_text("\n".join(lines), encoding="utf-8")
    places = [str(tmp_path / "cases.csv")]
    made, _ = prepare_data(load("fedevi-table1"), ["polyp"], places, tmp_path / "out", SMALL)
    assert read(made["polyp"]).listing.clients == ["etis", "kvasir"]


def test_synthetic_sets_as_large_as_the_papers_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare("fedevi-table1", tmp_path / "small")
    assert not caplog.messages
    monkeypatch.setattr(data, "MANY_VOXELS", 0)
    prepare("fedevi-table1", tmp_path / "large")
    assert "28 cases of synthetic data" in caplog.text and "--scale 0.01" in caplog.text


def test_synthetic_sets_are_there_for_a_federation_that_is_chosen_later(tmp_path: Path) -> None:
    for names in (["polyp"], ["polyp", "prostate"]):
        made, notes = prepare_data(load("fedevi-table5"), names, ["synthetic"], tmp_path, SMALL)
        assert list(made) == names and "synthetic" in notes[0]


def test_names_are_matched_whole_before_in_part() -> None:
    federation = load("safcf-table7").datasets["breast"]
    assert match_clients(federation, ["busi", "busis", "udiat"]) == {
        "busi": "busi", "busis": "busis", "udiat": "udiat",
    }  # fmt: skip
