"""Folders of NRRD and MetaImage are read as folders of NIfTI are, and segments of 3D Slicer go by name."""

import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest

from wardround.data import federation_file
from wardround.data.checking.check import check
from wardround.data.federation_file import FederationFile, Source
from wardround.data.headers import join_segments, match_names
from wardround.data.listing import Entry
from wardround.data.preparing.pool import entry_again, plain_entry
from wardround.data.preparing.prepare import prepare_case
from wardround.data.proposing.proposal import propose
from wardround.data.readers import metaimage, nrrd
from wardround.data.readers.image_files import read_image, read_label
from wardround.data.sources import list_cases

OBLIQUE = np.array([[0, -2.0, 0.1, 5], [1.0, 0, 0, -3], [0, 0.1, 3.0, 7], [0, 0, 0, 1]])
RED = [(255, 0, 0), (0, 255, 0)]


def draw_case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    image = np.random.default_rng(seed).normal(100, 20, (12, 10, 8)).astype(np.float32)
    label = np.zeros(image.shape, dtype=np.uint8)
    label[2:6, 3:7, 2:5], label[7:9, 3:7, 2:5] = 1, 2
    return image + 50 * label, label


def save(path: Path, values: np.ndarray, classes: dict[int, str] | None = None) -> None:
    """In the format its name says; an .mhd with its values beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".nii.gz"):
        nibabel.Nifti1Image(values, OBLIQUE).to_filename(path)
    elif path.name.endswith(".seg.nrrd"):
        path.write_bytes(nrrd.encode_segments(values, OBLIQUE, classes or {}, RED))
    elif path.name.endswith(".nrrd"):
        path.write_bytes(nrrd.encode(values, OBLIQUE))
    else:
        head, mark, block = metaimage.encode(values, OBLIQUE).partition(b"ElementDataFile = LOCAL\n")
        if path.suffix == ".mha":
            path.write_bytes(head + mark + block)
        else:
            path.with_suffix(".zraw").write_bytes(block)
            path.write_bytes(head + f"ElementDataFile = {path.stem}.zraw\n".encode())


def make_hospital(root: Path, ending: str, label_ending: str, seeds: range = range(4)) -> Path:
    for seed in seeds:
        image, label = draw_case(seed)
        save(root / "images" / f"p{seed}{ending}", image)
        save(root / "labels" / f"p{seed}{label_ending}", label, {1: "liver", 2: "spleen"})
    return root


ENDINGS = [
    (".nrrd", ".seg.nrrd"),
    (".nrrd", ".nrrd"),
    (".mha", ".mha"),
    (".mhd", ".mhd"),
    (".nii.gz", ".seg.nrrd"),
]


@pytest.mark.parametrize(("ending", "label_ending"), ENDINGS)
def test_prepared_cases_are_those_of_nifti(tmp_path: Path, ending: str, label_ending: str) -> None:
    proposed = []
    for place, endings in (("nifti", (".nii.gz", ".nii.gz")), ("other", (ending, label_ending))):
        proposed.append(propose([make_hospital(tmp_path / place, *endings)]))
    nifti, other = proposed
    assert other.file.prepare == nifti.file.prepare and other.file.channels == nifti.file.channels
    assert list(other.file.labels.values()) == [(1,), (2,)]
    assert not check(other.listing, other.file).findings
    for one, two in zip(nifti.listing.entries, other.listing.entries, strict=True):
        cases = [
            prepare_case(read_image(e.images), read_label(e.label), nifti.file.prepare, nifti.file.labels)
            for e in (one, two)
            if e.label is not None
        ]
        assert cases[0].image.equal(cases[1].image)
        assert cases[0].label is not None and cases[1].label is not None
        assert cases[0].label.equal(cases[1].label)


def test_names_of_segments_are_the_classes_that_init_proposes(tmp_path: Path) -> None:
    proposal = propose([make_hospital(tmp_path / "north", ".nrrd", ".seg.nrrd")])
    assert proposal.file.labels == {"liver": (1,), "spleen": (2,)}
    federation_file.write(proposal.file, tmp_path / "federation.yaml")
    loaded = federation_file.load(tmp_path / "federation.yaml")
    assert check(list_cases(loaded, tmp_path), loaded).usable


def test_files_that_number_their_segments_differently_are_joined_by_name(tmp_path: Path) -> None:
    root = make_hospital(tmp_path / "north", ".nrrd", ".seg.nrrd")
    _, label = draw_case(1)
    swapped = np.choose(label, [0, 5, 1]).astype(np.uint8)
    save(root / "labels" / "p1.seg.nrrd", swapped, {1: "Spleen", 5: "LIVER"})
    proposal = propose([root])
    assert proposal.file.labels == {"liver": (1,), "spleen": (2,)}
    listing = list_cases(proposal.file, tmp_path)
    entry = listing.entries[1]
    assert entry.labels == {"liver": (5,), "spleen": (1,)} and entry.label is not None
    assert not check(listing, proposal.file).findings
    made = prepare_case(
        read_image(entry.images), read_label(entry.label), proposal.file.prepare, entry.label_map({})
    )
    assert made.label is not None
    assert made.label.unique().tolist() == [0, 1, 2]
    sizes = [int((made.label == number).sum()) for number in (1, 2)]
    assert sizes[0] > sizes[1]  # the liver is the larger box, whatever its value


def test_two_hospitals_that_number_differently_are_joined_by_name(tmp_path: Path) -> None:
    north = make_hospital(tmp_path / "north", ".nrrd", ".seg.nrrd")
    south = make_hospital(tmp_path / "south", ".nrrd", ".seg.nrrd", range(4, 8))
    for path in sorted((south / "labels").iterdir()):
        values = read_label(path).data[0].astype(np.uint8)
        save(path, np.choose(values, [0, 2, 1]).astype(np.uint8), {1: "spleen", 2: "liver"})
    file = propose([north, south]).file
    assert file.labels == {"liver": (1,), "spleen": (2,)}
    listing = list_cases(file, tmp_path)
    assert {entry.client: dict(entry.labels or {}) for entry in listing.entries} == {
        "north": {"liver": (1,), "spleen": (2,)},
        "south": {"liver": (2,), "spleen": (1,)},
    }


def test_segments_without_the_name_of_a_class_go_by_value_and_a_note_says_so(tmp_path: Path) -> None:
    root = make_hospital(tmp_path / "north", ".nrrd", ".seg.nrrd")
    file = FederationFile(sources=(Source(path=root),), labels={"organ": (1, 2)})
    listing = list_cases(file, tmp_path)
    assert {entry.labels for entry in listing.entries} == {None}
    assert any("No segment of these labels has the name of a class" in note for note in listing.notes)
    own = FederationFile(sources=(Source(path=root, labels={"organ": (2,)}),), labels={"organ": (1, 2)})
    assert list_cases(own, tmp_path).entries[0].labels == {"organ": (2,)}


def test_a_segment_of_no_class_is_found_by_the_check(tmp_path: Path) -> None:
    root = make_hospital(tmp_path / "north", ".nrrd", ".seg.nrrd")
    _, label = draw_case(2)
    label[0, 0, 0] = 9
    save(root / "labels" / "p2.seg.nrrd", label, {1: "liver", 2: "spleen", 9: "scribble"})
    file = FederationFile(sources=(Source(path=root),), labels={"liver": (1,), "spleen": (2,)})
    found = [one for one in check(list_cases(file, tmp_path), file).findings if one.severity == "error"]
    assert [(one.case, one.code) for one in found] == [("p2", "label_value")]


def test_values_beside_a_header_belong_to_the_case(tmp_path: Path) -> None:
    root = make_hospital(tmp_path / "north", ".mhd", ".mhd")
    entry = list_cases(FederationFile(sources=(Source(path=root),)), tmp_path).entries[0]
    assert [path.name for path in entry.files] == ["p0.mhd", "p0.mhd", "p0.zraw", "p0.zraw"]
    assert entry_again(plain_entry(entry)).files == entry.files
    (root / "images" / "p0.zraw").unlink()
    file = FederationFile(sources=(Source(path=root),), labels={"liver": (1,), "spleen": (2,)})
    (found,) = check(list_cases(file, tmp_path), file).findings
    assert found.severity == "error" and "p0.zraw, which is not beside it" in found.sentence


def test_image_and_label_of_two_grids_are_refused_as_for_nifti(tmp_path: Path) -> None:
    root = make_hospital(tmp_path / "north", ".mha", ".nrrd")
    _, label = draw_case(0)
    save(root / "labels" / "p0.nrrd", label[:, :, 1:])
    moved = OBLIQUE.copy()
    moved[0, 3] += 4
    (root / "labels" / "p1.nrrd").write_bytes(nrrd.encode(label, moved))
    file = FederationFile(sources=(Source(path=root),), labels={"liver": (1,), "spleen": (2,)})
    found = check(list_cases(file, tmp_path), file).findings
    assert [(one.case, one.code) for one in found if one.severity == "error"] == [
        ("p0", "shape"),
        ("p1", "geometry"),
    ]


def test_a_damaged_table_is_left_to_the_check(tmp_path: Path) -> None:
    root = make_hospital(tmp_path / "north", ".nrrd", ".seg.nrrd")
    shutil.copy(root / "images" / "p0.nrrd", root / "labels" / "p0.seg.nrrd")
    (root / "labels" / "p1.seg.nrrd").write_bytes(b"broken")
    listing = list_cases(FederationFile(sources=(Source(path=root),)), tmp_path)
    assert [entry.labels is None for entry in listing.entries] == [True, True, False, False]


def test_names_are_matched_whatever_their_capitals() -> None:
    assert match_names({"Liver": (3,), "b": (1,)}, {"liver": (1,), "c": (2,)}) == {"liver": (3,), "c": ()}
    entries = [
        Entry("n", "a", (), None, "a", labels={"x": (1,), "y": (2,)}),
        Entry("n", "b", (), None, "b", labels={"Y": (1,), "z": (1,)}),
    ]
    assert join_segments(entries) == {"x": (1,), "y": (2,), "z": (3,)}
