"""Labels beside their images: which files make a case, and which folders are cases, patients or centres."""

from pathlib import Path

from pytest import mark, raises

from wardround.data.listing import Entry, Listing
from wardround.data.readers import beside, detect
from wardround.errors import DataError


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


def read(root: Path) -> Listing:
    assert detect(root)[0] == "beside"
    return beside.read(root)


def names(found: Listing) -> list[tuple[str, str, str]]:
    return [(entry.client, entry.name, entry.group) for entry in found.entries]


def files(entry: Entry) -> tuple[list[str], list[str]]:
    return [path.name for path in entry.images], [path.name for path in entry.label_files]


@mark.parametrize("mark_", ["_seg", "-seg", "_mask", ".label", "-GT"])
def test_channels_are_named_by_what_follows_the_case(tmp_path: Path, mark_: str) -> None:
    kinds = ("t1n", "t2f", "t1c")
    for case in ("BraTS-GLI-00000-000", "BraTS-GLI-00002-000"):
        touch(tmp_path / case, *(f"{case}-{kind}.nii.gz" for kind in kinds), f"{case}{mark_}.nii.gz")
    found = read(tmp_path)
    assert found.channels == ("t1c", "t1n", "t2f") and found.clients == [tmp_path.name]
    images, labels = files(found.entries[1])
    assert images == [f"BraTS-GLI-00002-000-{kind}.nii.gz" for kind in sorted(kinds)]
    assert labels == [f"BraTS-GLI-00002-000{mark_}.nii.gz"]


def test_a_case_that_lacks_a_channel_or_label_stays_and_one_with_other_images_is_left_out(
    tmp_path: Path,
) -> None:
    for case in ("p1", "p2", "p3", "p4", "p5"):
        touch(tmp_path / case, f"{case}_t1.nii", f"{case}_t2.nii", f"{case}_seg.nii")
    touch(tmp_path / "p5", "p5_adc.nii")
    (tmp_path / "p3" / "p3_t2.nii").unlink()
    (tmp_path / "p4" / "p4_seg.nii").unlink()
    found = read(tmp_path)
    assert [(entry.name, entry.label is not None) for entry in found.entries] == [
        ("p1", True),
        ("p2", True),
        ("p3", True),
        ("p4", False),
    ]
    assert found.channels == ("t1", "t2") and [entry.channels for entry in found.entries][1:3] == [
        (),
        ("t1",),
    ]
    said = " ".join(found.notes)
    assert "cases with other images than most (t1, t2): p5; left out" in said
    assert "1 images have no label: p4" in said


def test_two_labels_of_a_case_are_not_chosen_from(tmp_path: Path) -> None:
    touch(tmp_path, "p1/p1.png", "p1/p1_mask.png", "p1/p1_seg.png", "p2/p2.png", "p2/p2_mask.png")
    found = read(tmp_path)
    assert [entry.name for entry in found.entries] == ["p2"]
    assert "case 'p1': several labels (p1_mask.png, p1_seg.png); left out. Keep one" in " ".join(found.notes)


def test_folders_of_several_cases_are_patients_where_their_names_are_numbered(tmp_path: Path) -> None:
    for patient in ("TCGA_01", "TCGA_02"):
        touch(tmp_path / patient, *(f"{patient}_{n}{end}.tif" for n in (1, 2) for end in ("", "_mask")))
    found = read(tmp_path)
    assert names(found)[:2] == [
        (tmp_path.name, "TCGA_01_1", "TCGA_01"),
        (tmp_path.name, "TCGA_01_2", "TCGA_01"),
    ]
    assert "are taken for patients" in " ".join(found.notes)


def test_slices_that_count_again_at_every_patient_are_told_apart(tmp_path: Path) -> None:
    for patient in ("p01", "p02"):
        touch(tmp_path / patient, *(f"slice{n}{end}.png" for n in (1, 2) for end in ("", "_mask")))
    assert names(read(tmp_path))[1:3] == [
        (tmp_path.name, "p01_slice2", "p01"),
        (tmp_path.name, "p02_slice1", "p02"),
    ]


def test_numbered_hospitals_are_centres(tmp_path: Path) -> None:
    for centre in ("hospital1", "hospital2"):
        touch(tmp_path / centre, *(f"{n}{end}.png" for n in (1, 2) for end in ("", "_mask")))
    assert read(tmp_path).clients == ["hospital1", "hospital2"]


def test_cases_that_all_have_two_labels_leave_none(tmp_path: Path) -> None:
    touch(tmp_path / "x", "a.png", "a_mask.png", "a_seg.png")
    assert not read(tmp_path / "x").entries


def test_folders_of_several_cases_are_centres_where_they_are_not(tmp_path: Path) -> None:
    for centre in ("benign", "malignant"):
        touch(tmp_path / centre, *(f"{centre} ({n}){end}.png" for n in (1, 2) for end in ("", "_mask")))
    found = read(tmp_path)
    assert names(found)[0] == ("benign", "benign (1)", "benign (1)")
    assert found.clients == ["benign", "malignant"]


def test_numbers_that_begin_again_in_each_split_are_told_apart(tmp_path: Path) -> None:
    touch(
        tmp_path / "x",
        *(f"{s}/{n}{end}.png" for s in ("train", "test") for n in (1, 2) for end in ("", "_gt")),
    )
    found = read(tmp_path / "x")
    assert [(entry.name, entry.split) for entry in found.entries] == [
        ("test_1", "test"),
        ("test_2", "test"),
        ("train_1", "train"),
        ("train_2", "train"),
    ]


def test_masks_of_classes_may_lie_beside_the_image(tmp_path: Path) -> None:
    for case in ("p1", "p2"):
        touch(tmp_path / case, f"{case}_ct.nii.gz", f"{case}_liver_mask.nii.gz", f"{case}_spleen_mask.nii.gz")
    found = read(tmp_path)
    assert found.channels == ("ct",) and list(found.entries[0].masks) == ["liver", "spleen"]


def test_a_folder_of_images_that_holds_masks_too_is_its_centres(tmp_path: Path) -> None:
    touch(tmp_path / "north", "images/a.png", "images/a_mask.png", "images/b.png", "images/b_mask.png")
    assert names(read(tmp_path / "north"))[0] == ("north", "a", "a")


def test_images_without_a_label_anywhere_are_no_data_set(tmp_path: Path) -> None:
    touch(tmp_path, "p1/p1_ct.nii", "p1/p1_pet.nii", "p2/p2_ct.nii", "p2/p2_pet.nii")
    with raises(DataError, match="no name says which is the label"):
        detect(tmp_path)


def test_words_of_images_and_labels_may_both_differ_from_the_case(tmp_path: Path) -> None:
    touch(tmp_path / "x", *(f"{word}-{n}.nii" for n in (0, 1, 10) for word in ("volume", "segmentation")))
    found = read(tmp_path / "x")
    assert [files(entry) for entry in found.entries] == [
        ([f"volume-{n}.nii"], [f"segmentation-{n}.nii"]) for n in (0, 1, 10)
    ]


def test_a_second_mask_of_an_image_is_no_channel(tmp_path: Path) -> None:
    touch(tmp_path / "x", *("a.png", "a_mask.png", "a_mask_1.png", "b.png", "b_mask.png"))
    found = read(tmp_path / "x")
    assert [entry.name for entry in found.entries] == ["b"]
    assert "case 'a': several labels (a_mask.png, a_mask_1.png); left out" in " ".join(found.notes)


def test_numbered_masks_of_one_case_are_no_classes(tmp_path: Path) -> None:
    touch(
        tmp_path, *(f"{case}/{file}.png" for case in ("p1", "p2") for file in ("photo", "1_mask", "2_mask"))
    )
    with raises(DataError, match="no name says which is the label"):
        detect(tmp_path)
