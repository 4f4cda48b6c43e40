"""Readers: every layout recognised, its cases listed, what is unexpected noted, unsafe names refused."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers import SHARED
from pytest import mark, raises

from wardround.data.federation_file import Source
from wardround.data.listing import FOLD, Listing
from wardround.data.readers import READERS, detect
from wardround.data.readers.common import is_safe, stem_of
from wardround.data.sources import read_source
from wardround.errors import ConfigError, DataError


def touch(root: Path, *names: str) -> None:
    """Empty files: no reader opens an image."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def note(root: Path, facts: Mapping[str, Any], name: str = "dataset.json") -> None:
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(json.dumps(facts))


def listing(path: Path, **how: Any) -> Listing:
    return read_source(Source(path=path, **how), Path())


def names(found: Listing) -> list[tuple[str, str]]:
    return [(entry.client, entry.name) for entry in found.entries]


def said(found: Listing) -> str:
    return "\n".join(found.notes)


# One folder a centre


def centre(root: Path, *stems: str, ending: str = ".png") -> None:
    touch(root, *(f"{part}/{stem}{ending}" for part in ("images", "labels") for stem in stems))


def test_centres_are_clients_and_stems_are_cases(tmp_path: Path) -> None:
    centre(tmp_path / "north", "b", "a")
    centre(tmp_path / "south", "c", ending=".nii.gz")
    assert detect(tmp_path)[0] == "centres"
    found = listing(tmp_path)
    assert names(found) == [("north", "a"), ("north", "b"), ("south", "c")]
    assert found.entries[0].label == (tmp_path / "north/labels/a.png").resolve()
    assert found.entries[0].group == "a" and found.entries[0].split is None and not found.notes


def test_one_centre_alone_is_a_client_by_its_folders_name(tmp_path: Path) -> None:
    centre(tmp_path / "north", "a")
    assert names(listing(tmp_path / "north")) == [("north", "a")]
    assert names(listing(tmp_path / "north", client="Oslo")) == [("Oslo", "a")]


@mark.parametrize(("images", "labels"), [("image", "mask"), ("Images", "Masks"), ("imgs", "gt")])
def test_other_usual_folder_names_are_understood(tmp_path: Path, images: str, labels: str) -> None:
    touch(tmp_path / "x", f"{images}/a.jpg", f"{labels}/a_mask.png")
    (entry,) = listing(tmp_path).entries
    assert entry.label is not None and entry.label.name == "a_mask.png"


def test_numbered_files_are_channels_of_the_case_their_label_names(tmp_path: Path) -> None:
    touch(tmp_path / "x", "images/p_0001.nii.gz", "images/p_0000.nii.gz", "labels/p.nii.gz")
    (entry,) = listing(tmp_path).entries
    assert [path.name for path in entry.images] == ["p_0000.nii.gz", "p_0001.nii.gz"]


def test_numbered_frames_with_labels_of_their_own_are_cases(tmp_path: Path) -> None:
    centre(tmp_path / "x", "frame_0001", "frame_0002")
    assert len(listing(tmp_path).entries) == 2


def test_partners_that_are_missing_are_noted(tmp_path: Path) -> None:
    centre(tmp_path / "x", "a")
    touch(tmp_path / "x", "images/alone.png", "labels/orphan.png", "images/._a.png", "images/notes.txt")
    found = listing(tmp_path)
    assert names(found) == [("x", "a"), ("x", "alone")]
    assert found.entries[1].label is None
    assert "no label: alone" in said(found) and "no image: orphan.png" in said(found)


def test_of_two_files_with_one_stem_the_first_ending_counts_and_a_note_says_so(tmp_path: Path) -> None:
    centre(tmp_path / "x", "a")
    touch(tmp_path / "x", "images/a.nii.gz")
    found = listing(tmp_path)
    assert found.entries[0].images[0].name == "a.nii.gz" and "two files for a" in said(found)


def test_a_case_with_two_labels_is_left_out_and_both_are_named(tmp_path: Path) -> None:
    centre(tmp_path / "x", "a")
    touch(tmp_path / "x", "images/p01.nii.gz", "labels/p01_mask.nii.gz", "labels/p01_seg.nii.gz")
    touch(tmp_path / "x", "images/q_0000.nii.gz", "labels/q-gt.nii.gz", "labels/q_roi.nii.gz")
    found = listing(tmp_path)
    assert names(found) == [("x", "a")]
    assert "case 'p01': several labels (p01_mask.nii.gz, p01_seg.nii.gz); left out" in said(found)
    assert "case 'q': several labels (q-gt.nii.gz, q_roi.nii.gz); left out" in said(found)
    (tmp_path / "index.csv").write_text("centre,stem\nx,a\nx,p01\n")
    listed = said(listing(tmp_path))
    assert "case 'p01': several labels" in listed and "without an image" not in listed


def test_a_label_of_the_images_own_name_counts_and_the_others_are_noted(tmp_path: Path) -> None:
    centre(tmp_path / "x", "a")
    touch(tmp_path / "x", "labels/a_seg.png")
    found = listing(tmp_path)
    assert found.entries[0].label is not None and found.entries[0].label.name == "a.png"
    assert "not used: a_seg.png" in said(found)


def test_the_index_gives_split_group_and_columns(tmp_path: Path) -> None:
    centre(tmp_path / "north", "a", "b", "extra")
    (tmp_path / "index.csv").write_text(
        "\ufeffCentre,Stem,group,split_group,Split,scanner\nnorth,a,g1,s1,Train,3T\nnorth,b,g2,,,\nnorth,lost,,,,\nsouth,z,,,,\n",
        encoding="utf-8",
    )
    found = listing(tmp_path)
    a, b = found.entries
    assert (a.group, a.split, a.columns["scanner"], a.columns["group"]) == ("s1", "train", "3T", "g1")
    assert (b.group, b.split) == ("b", None)
    assert "without an image: lost" in said(found) and "extra" in said(found) and "'south'" in said(found)


def test_a_centre_given_alone_finds_its_rows_in_the_index_beside_it(tmp_path: Path) -> None:
    centre(tmp_path / "north", "a")
    (tmp_path / "index.csv").write_text("centre,stem,patient,split\nnorth,a,p7,test\n")
    (entry,) = listing(tmp_path / "north").entries
    assert (entry.group, entry.split) == ("p7", "test")


@mark.parametrize(
    ("rows", "reason"),
    [
        ("north,a,train\nnorth,a,val\n", "listed twice"),
        ("north,a,sometimes\n", "write train, val or test"),
        ("north,,train\n", "no stem"),
        ("north,a,train,too,many\n", "cells under"),
        ('north,"a,train\n', "not a CSV"),
    ],
)
def test_a_wrong_index_is_named_with_its_reason(tmp_path: Path, rows: str, reason: str) -> None:
    centre(tmp_path / "north", "a")
    (tmp_path / "index.csv").write_text("centre,stem,split\n" + rows)
    with raises(DataError, match=reason):
        listing(tmp_path)


def test_links_in_a_circle_and_unicode_and_spaces_do_no_harm(tmp_path: Path) -> None:
    centre(tmp_path / "Hôpital Nord", "Fall 1 ä")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    (tmp_path / "Hôpital Nord/images/x.png").symlink_to(tmp_path / "Hôpital Nord/images/x.png")
    touch(tmp_path / "Hôpital Nord", "labels/x.png", "images/bad\nname.png")
    found = listing(tmp_path)
    assert names(found) == [("Hôpital Nord", "Fall 1 ä"), ("Hôpital Nord", "x")]
    assert "leads nowhere" in said(found) and "bad\\nname" in said(found)


# Decathlon


MSD = {
    "name": "Hippo",
    "modality": {"0": "T1", "1": "T2"},
    "labels": {"0": "background", "2": "tail", "1": "head"},
}


def decathlon(root: Path, *stems: str) -> None:
    pairs = [{"image": f"./imagesTr/{s}.nii.gz", "label": f"./labelsTr/{s}.nii.gz"} for s in stems]
    note(root, {**MSD, "training": pairs, "test": ["./imagesTs/z.nii.gz"]})
    touch(root, *(f"{part}/{stem}.nii.gz" for part in ("imagesTr", "labelsTr") for stem in stems))


def test_a_decathlon_task_is_one_client_with_channels_and_labels(tmp_path: Path) -> None:
    decathlon(tmp_path / "Task04", "h_02", "h_01")
    touch(tmp_path / "Task04", "imagesTr/._h_01.nii.gz", "imagesTr/new.nii.gz")
    for place in (tmp_path / "Task04", tmp_path / "Task04/dataset.json"):
        assert detect(place)[0] == "msd"
        found = listing(place)
        assert names(found) == [("Hippo", "h_01"), ("Hippo", "h_02")]
    assert found.channels == ("T1", "T2") and found.labels == {"head": (1,), "tail": (2,)}
    assert list(found.labels) == ["head", "tail"] and "new.nii.gz" in said(found)


def test_a_decathlon_list_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    note(
        tmp_path,
        {
            "training": [
                {"image": "../../etc/x.nii.gz", "label": "a.nii.gz"},
                {"image": 5},
                {"image": "a.nii.gz"},
            ]
        },
    )
    found = listing(tmp_path, client="c")
    assert names(found) == [("c", "a")] and said(found).count("left out") == 2


def test_a_case_listed_twice_is_refused(tmp_path: Path) -> None:
    decathlon(tmp_path, "a", "a")
    with raises(DataError, match="'a' twice"):
        listing(tmp_path)


@mark.parametrize("text", ["{", "[1]", '{"training": 3}', "\x00\xff"])
def test_a_broken_dataset_json_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "dataset.json").write_text(text, encoding="latin-1")
    for reader in ("msd", "auto"):
        with raises(DataError):
            listing(tmp_path, reader=reader)


# nnU-Net


def raw(root: Path, labels: Mapping[str, Any], cases: Mapping[str, int], **facts: Any) -> None:
    note(
        root,
        {"channel_names": {"0": "T1", "1": "FLAIR"}, "labels": labels, "file_ending": ".nii.gz", **facts},
    )
    for case, channels in cases.items():
        touch(root, f"labelsTr/{case}.nii.gz", *(f"imagesTr/{case}_{c:04d}.nii.gz" for c in range(channels)))


def test_nnunet_cases_have_a_file_a_channel(tmp_path: Path) -> None:
    raw(tmp_path / "Dataset001_Brain", {"background": 0, "tumour": 1}, {"b": 2, "a": 2, "half": 1})
    found = listing(tmp_path / "Dataset001_Brain")
    assert found.reader == "nnunet" and [name for _, name in names(found)] == ["a", "b", "half"]
    assert [path.name for path in found.entries[0].images] == ["a_0000.nii.gz", "a_0001.nii.gz"]
    assert found.channels == ("T1", "FLAIR") and found.labels == {"tumour": (1,)} and not found.regions
    assert found.entries[2].channels == ("T1",) and len(found.entries[2].images) == 1


def test_nnunet_region_groups_become_classes_and_regions(tmp_path: Path) -> None:
    regions = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3, "ignore": 4}
    raw(tmp_path, regions, {"a": 2})
    found = listing(tmp_path)
    assert found.labels == {"value_1": (1,), "value_2": (2,), "enhancing": (3,)}
    assert found.regions == {"whole": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}
    assert found.ignore == (4,) and "label value 4 ('ignore') marks voxels that nobody annotated" in said(
        found
    )


@mark.parametrize(
    ("order", "told"),
    [
        ([1, 2, 3], ""),
        ([1, 3, 2], "nnU-Net writes label value: 2 as 3, 3 as 2 by its regions_class_order"),
        ([1, 2], "not a value for each of the 3 regions"),
        (None, "regions_class_order is None"),
    ],
)
def test_nnunet_regions_are_held_against_their_class_order(tmp_path: Path, order: Any, told: str) -> None:
    regions = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3}
    raw(tmp_path, regions, {"a": 2}, regions_class_order=order)
    assert told in said(listing(tmp_path)) if told else not listing(tmp_path).notes


def write_folds(root: Path, *named: list[str]) -> None:
    folds = [{"train": [case for case in "abc" if case not in own], "val": own} for own in named]
    (root / "splits_final.json").write_text(json.dumps(folds))


def test_nnunet_folds_are_a_column(tmp_path: Path) -> None:
    raw(tmp_path, {"x": 1}, {"a": 2, "b": 2, "c": 2})
    assert not listing(tmp_path).entries[0].columns
    write_folds(tmp_path, ["b"], ["a"])
    assert [entry.columns[FOLD] for entry in listing(tmp_path).entries] == ["1", "0", ""]


def test_nnunet_folds_that_overlap_are_not_used(tmp_path: Path) -> None:
    raw(tmp_path, {"x": 1}, {"a": 2, "b": 2})
    write_folds(tmp_path, ["a", "b"], ["a"])
    found = listing(tmp_path)
    assert not found.entries[0].columns and "validates cases in several folds and is not used: a." in said(
        found
    )


@mark.parametrize(
    "text", ["{}", "[]", '[{"train": [], "val": []}]', '[{"val": 1}, {"val": []}]', "[1, 2]", "["]
)
def test_nnunet_folds_of_another_form_are_refused(tmp_path: Path, text: str) -> None:
    raw(tmp_path, {"x": 1}, {"a": 2})
    (tmp_path / "splits_final.json").write_text(text)
    with raises(DataError, match="splits_final.json is not"):
        listing(tmp_path)


def test_nnunet_folds_of_other_cases_are_refused(tmp_path: Path) -> None:
    raw(tmp_path, {"x": 1}, {"a": 2})
    write_folds(tmp_path, ["a"], ["z"])
    with raises(DataError, match="names z, which are not in imagesTr"):
        listing(tmp_path)


def test_nnunet_test_cases_count_where_they_have_labels(tmp_path: Path) -> None:
    raw(tmp_path, {"x": 1}, {"a": 2})
    touch(tmp_path, "imagesTs/t_0000.nii.gz", "imagesTs/t_0001.nii.gz")
    assert "has no labels" in said(listing(tmp_path))
    touch(tmp_path, "labelsTs/t.nii.gz")
    assert [entry.split for entry in listing(tmp_path).entries] == [None, "test"]


def test_older_nnunet_with_a_decathlon_list_is_nnunet(tmp_path: Path) -> None:
    decathlon(tmp_path, "a")
    (tmp_path / "imagesTr/a.nii.gz").unlink()
    touch(tmp_path, "imagesTr/a_0000.nii.gz", "imagesTr/a_0001.nii.gz")
    found = listing(tmp_path)
    assert found.reader == "nnunet" and len(found.entries[0].images) == 2 and found.labels["tail"] == (2,)


# A list


def table(tmp_path: Path, text: str, name: str = "cases.csv") -> Path:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path / name


def test_a_csv_list_says_everything(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "Image;MASK;Patient;Split;Site;age\nscans/a b.png;masks/a.png;p1;validation;Nord;61\nscans/c.png;;p1;;Süd;\n",
    )
    assert detect(path)[0] == "table" and detect(tmp_path)[0] == "table"
    a, c = listing(path).entries
    assert (a.client, a.name, a.group, a.split, dict(a.columns)) == (
        "Nord",
        "a b",
        "p1",
        "val",
        {"patient": "p1", "age": "61"},
    )
    assert c.label is None and c.client == "Süd" and "no label: c" in said(listing(path))


def test_channels_are_several_columns_or_several_files_in_one(tmp_path: Path) -> None:
    path = table(tmp_path, "image_flair,image_t1,image_id,label\nf.nii,t.nii,77,l.nii\n")
    found = listing(path, client="x")
    assert found.channels == ("flair", "t1") and [p.name for p in found.entries[0].images] == [
        "f.nii",
        "t.nii",
    ]
    assert found.entries[0].columns == {"image_id": "77"}
    path = table(tmp_path, 'image,label\n"f.nii; t.nii",l.nii\n')
    assert [p.name for p in listing(path).entries[0].images] == ["f.nii", "t.nii"]
    path = table(
        tmp_path, ",".join([*(f"image_{n}" for n in (10, 2)), "label"]) + "\nten.nii,two.nii,l.nii\n"
    )
    assert [p.name for p in listing(path).entries[0].images] == ["two.nii", "ten.nii"]


def test_a_json_list_reads_like_a_csv(tmp_path: Path) -> None:
    rows = [
        {"image": ["a.nii", "b.nii"], "label": "l.nii", "patient": 7, "centre": "n"},
        {"image": "c.nii", "label": None},
    ]
    note(tmp_path, {"cases": rows}, "cases.json")
    first, second = listing(tmp_path / "cases.json", reader="table").entries[::-1]
    assert {first.group, second.group} == {"7", "c"}


def test_equal_file_names_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    path = table(tmp_path, "image,label\np1/t1.nii.gz,p1/m.nii.gz\np2/t1.nii.gz,p2/m.nii.gz\n")
    found = listing(path)
    assert (
        [entry.name for entry in found.entries]
        == ["p1_t1", "p2_t1"]
        == [entry.group for entry in found.entries]
    )


@mark.parametrize(
    ("text", "reason"),
    [
        ("image,label\n../x.png,l.png\n", "leaves the list's folder"),
        ("image,label\na/../../x.png,l.png\n", "leaves the list's folder"),
        ("image,label\n,l.png\n", "no image file"),
        ("picture,label\na,l.png\n", "no column 'image'"),
        ("image,label\n", "lists no cases"),
        ("", "is empty"),
        ("image,image\na,b\n", "same name"),
        ("case,image,label\nx,a.png,l.png\nx,b.png,l.png\n", "'x' of client 'c' twice"),
        ("image,label\na.png,l.png\na.png,l.png\n", "twice"),
        ("case,image,label\n../evil,a.png,l.png\n", "not a usable name"),
        ("centre,image,label\na/b,a.png,l.png\n", "not a usable name"),
        ("image,label,split\na.png,l.png,maybe\n", "line 2: split is 'maybe'"),
    ],
)
def test_a_wrong_list_is_named_with_its_reason(tmp_path: Path, text: str, reason: str) -> None:
    with raises(DataError, match=reason):
        listing(table(tmp_path, text), client="c")


def test_absolute_paths_may_lead_anywhere(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    path = table(tmp_path / "inner", f"image,label\n{tmp_path}/a.png,{tmp_path}/l.png\n")
    assert listing(path).entries[0].images == (tmp_path / "a.png",)


def test_a_column_names_the_clients(tmp_path: Path) -> None:
    path = table(tmp_path, "image,label,scanner\na.png,l.png,GE\nb.png,l.png,Siemens\n")
    assert listing(path, column="Scanner").clients == ["GE", "Siemens"]
    with raises(ConfigError, match="no column 'scaner'. Did you mean 'scanner'"):
        listing(path, column="scaner")


# BIDS


def bids(root: Path) -> None:
    for sub in ("01", "02", "03"):
        touch(root, f"sub-{sub}/anat/sub-{sub}_T1w.nii.gz", f"sub-{sub}/anat/sub-{sub}_FLAIR.nii.gz")
    for sub in ("01", "02"):
        stem = f"derivatives/manual/sub-{sub}/anat/sub-{sub}"
        touch(root, f"{stem}_label-lesion_mask.nii.gz", f"{stem}_desc-brain_mask.nii.gz")


def test_bids_scans_are_channels_and_masks_come_from_derivatives(tmp_path: Path) -> None:
    bids(tmp_path / "ds")
    touch(tmp_path / "ds", "sub-01/anat/sub-01_acq-hi_T2w.nii.gz", "sub-03/anat/sub-03_T1w.json")
    found = listing(tmp_path / "ds")
    assert found.reader == "bids" and found.channels == ("FLAIR", "T1w")
    assert [entry.label is None for entry in found.entries] == [False, False, True]
    assert "Few labelled cases have acq-hi_T2w" in said(found)
    one = found.entries[0]
    assert one.label is not None and one.label.name == "sub-01_label-lesion_mask.nii.gz"
    assert one.client == "ds" and one.group == "sub-01"
    assert "desc-brain_mask are not used" in said(found)


def test_bids_sessions_are_cases_of_one_group_and_sites_are_clients(tmp_path: Path) -> None:
    for session in ("1", "2"):
        stem = f"sub-01/ses-{session}/anat/sub-01_ses-{session}"
        touch(tmp_path, f"{stem}_run-1_T1w.nii.gz", f"{stem}_run-2_T1w.nii.gz", f"{stem}_dseg.nii.gz")
    (tmp_path / "participants.tsv").write_text("participant_id\tsite\tage\nsub-01\tOslo\t60\n")
    found = listing(tmp_path)
    assert names(found) == [("Oslo", "sub-01_ses-1"), ("Oslo", "sub-01_ses-2")]
    assert {entry.group for entry in found.entries} == {"sub-01"} and found.entries[0].columns["age"] == "60"
    assert found.entries[0].images[0].name.endswith("run-1_T1w.nii.gz") and "several runs" in said(found)


def test_bids_takes_the_scans_of_the_space_the_mask_was_drawn_in(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "sub-1/anat/sub-1_T1w.nii.gz",
        "sub-1/anat/sub-1_space-MNI_T1w.nii.gz",
        "sub-1/anat/sub-1_space-MNI_mask.nii.gz",
    )
    (entry,) = listing(tmp_path).entries
    assert entry.images[0].name == "sub-1_space-MNI_T1w.nii.gz"


# All of them


def test_nothing_known_is_explained(tmp_path: Path) -> None:
    with raises(DataError, match="does not exist"):
        detect(tmp_path / "nowhere")
    touch(tmp_path / "odd", "readme.md")
    with raises(DataError, match="It holds: readme.md"):
        detect(tmp_path / "odd")
    raw(tmp_path / "all/Dataset001_A", {"x": 1}, {"a": 2})
    with raises(DataError, match="Give these folders instead"):
        detect(tmp_path / "all")
    touch(tmp_path / "dicom", "p1/IM0001")
    (tmp_path / "dicom/p1/IM0001").write_bytes(b"\0" * 128 + b"DICM")
    with raises(DataError, match="import-dicom"):
        detect(tmp_path / "dicom")


@mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_one_may_not_enter_is_noted(tmp_path: Path) -> None:
    centre(tmp_path / "north", "a")
    centre(tmp_path / "south", "a")
    (tmp_path / "south").chmod(0)
    try:
        assert "cannot be read" in said(listing(tmp_path))
    finally:
        (tmp_path / "south").chmod(0o755)


def test_names_and_stems() -> None:
    assert stem_of("a.b.NII.GZ") == "a.b" and stem_of("x.dcm") is None
    assert [is_safe(n) for n in ("a", "", ".a", "a/b", "a\\b", "a\nb", "x" * 201, "ö 1")] == [True] + [
        False
    ] * 6 + [True]
    assert set(READERS) == {"nnunet", "msd", "bids", "centres", "table", "beside"}


@mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
@mark.parametrize(
    ("name", "cases", "clients"),
    [("polyp4", 1534, 4), ("fundus_odoc", 401, 3), ("lgg3d", 110, 5), ("hippocampus", 133, 1)],
)
def test_the_shared_sets_are_listed_whole(name: str, cases: int, clients: int) -> None:
    found = listing(SHARED / name)
    assert (len(found.entries), len(found.clients), found.notes) == (cases, clients, ())
    assert all(entry.split and entry.label for entry in found.entries)


def test_a_list_from_an_old_excel_is_told_how_to_be_saved(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_bytes("image;label\nMüller.png;Müller_mask.png\n".encode("latin-1"))
    with raises(DataError, match="save it as such"):
        READERS["table"].read(tmp_path / "list.csv", None)


# Folders of splits


@mark.parametrize("words", [("train", "val", "test"), ("Training", "Validation", "TESTING")])
def test_folders_named_as_splits_are_a_centres_splits_and_never_clients(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    for number, word in enumerate(words):
        centre(tmp_path / "all" / "north" / word, f"p{number}", "same")
        touch(tmp_path / "inner", f"images/{word}/p{number}.png", f"masks/{word}/p{number}.png")
        centre(tmp_path / "above" / word / "south", f"p{number}")
    centre(tmp_path / "all" / "south", "q")
    found = listing(tmp_path / "all")
    assert found.clients == ["north", "south"]
    assert [(e.name, e.split) for e in found.of("north")] == [
        ("p0", "train"), ("p1", "val"), ("p2", "test"),
        ("test_same", "test"), ("train_same", "train"), ("val_same", "val"),
    ]  # fmt: skip
    assert len({entry.group for entry in found.of("north")}) == 6
    assert f"client 'north': folders are its splits, not clients: {sorted(words)[0]} (" in said(found)
    for path, client in (("all/north", "north"), ("inner", "inner"), ("above", "south")):
        alone = listing(tmp_path / path)
        assert alone.clients == [client] and {e.split for e in alone.entries} == {"train", "val", "test"}


def test_a_split_beside_centres_is_asked_about(tmp_path: Path) -> None:
    centre(tmp_path / "north", "a")
    centre(tmp_path / "test", "b")
    with raises(DataError, match="holds test, the name of a split, beside north"):
        detect(tmp_path)


def test_centres_may_lie_below_images_and_labels(tmp_path: Path) -> None:
    touch(tmp_path, "images/h1/a.png", "masks/h1/a.png", "images/h2/b.png", "masks/H2/b.png")
    assert "sorted into folders of centres (2): h1, h2" in detect(tmp_path)[1]
    found = listing(tmp_path)
    assert names(found) == [("h1", "a"), ("h2", "b")] and all(entry.label for entry in found.entries)


# Labels called otherwise than their images


@mark.parametrize("label", ["mask_{}", "{}_lesion", "{}.gt", "Expert 1 {}", "{}-tumour_v2"])
def test_labels_are_paired_by_what_their_names_share(tmp_path: Path, label: str) -> None:
    stems = ("p1", "p10", "p_2")
    touch(tmp_path / "north", *(f"images/{stem}.jpg" for stem in stems))
    touch(tmp_path / "north", *(f"masks/{label.format(stem)}.png" for stem in stems))
    found = listing(tmp_path / "north")
    assert {e.name: e.label and e.label.name for e in found.entries} == {
        stem: f"{label.format(stem)}.png" for stem in stems
    }
    assert "3 labels are paired with images by what their names share" in said(found)


def test_two_labels_of_an_image_are_not_chosen_from(tmp_path: Path) -> None:
    touch(tmp_path / "n", "images/a.png", "images/b.png")
    touch(tmp_path / "n", *(f"masks/{stem}_{what}.png" for stem in "ab" for what in ("rater1", "rater2")))
    with raises(DataError, match="case 'a': several labels"):
        listing(tmp_path / "n")


def test_names_that_do_not_pair_are_shown(tmp_path: Path) -> None:
    touch(tmp_path / "n", *(f"images/a{n}.jpg" for n in range(8)), *(f"masks/z{n}.png" for n in range(8)))
    assert "8 images, 8 labels, no pair; e.g. a0.jpg and z0.png." in said(listing(tmp_path / "n"))


def test_dicom_far_down_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "patient/series/1.dcm")
    (tmp_path / "patient/series/1.dcm").write_bytes(bytes(128) + b"DICM")
    with raises(DataError, match="holds DICOM files"):
        detect(tmp_path)
