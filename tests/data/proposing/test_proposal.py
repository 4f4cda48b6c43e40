"""Layouts people have: each is made, and `init` proposes the right clients, cases and splits without an edit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import nibabel
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pytest import mark, raises

from wardround.data.checking.check import check
from wardround.data.federation_file import load, write
from wardround.data.proposing.proposal import describe, propose
from wardround.data.readers.label_files import read_case_label
from wardround.data.sources import list_cases
from wardround.errors import DataError

HOSPITALS = ("north", "south")
CASES = ("p1", "p2", "p3", "p4")
SPLITS = {"p1": "train", "p2": "train", "p3": "val", "p4": "test"}
WORDS = {"train": "Training", "val": "Validation", "test": "Testing"}
PLAIN = {"class_1": (1,)}
ORGANS = {"liver": (1,), "spleen": (2,)}
COLOURS = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0]], dtype=np.uint8)  # background, liver, spleen


@dataclass(frozen=True)
class Layout:
    """Where image and label of a case lie: {h} hospital, {c} case, {s} its split, {S} in words, {m} the channel,
    {o} the organ, where files of several make a case."""

    image: str
    label: str
    has_splits: bool = False
    channels: tuple[str, ...] = ("",)
    organs: tuple[str, ...] = ("",)
    labels: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: PLAIN)
    coloured: bool = False
    list_name: str | None = None
    heads: str = ""
    name: str = "{c}"
    guess: str = ""  # a sentence that says what was guessed

    def fill(self, template: str, hospital: str, case: str, channel: str = "", organ: str = "") -> str:
        split = SPLITS[case]
        words = {"h": hospital, "c": case, "s": split, "S": WORDS[split], "m": channel, "o": organ}
        return template.format(**words)


MODALITIES = ("flair", "t1", "t1ce", "t2")
LAYOUTS = {
    "images, labels": Layout("{h}/images/{c}.png", "{h}/labels/{c}.png"),
    "imgs, gt": Layout("{h}/imgs/{c}.png", "{h}/gt/{c}.png"),
    "scans, segmentations": Layout("{h}/scans/{c}.png", "{h}/segmentations/{c}.png"),
    "capitals": Layout("{h}/Images/{c}.png", "{h}/Masks/{c}.png"),
    "JPEG and PNG": Layout("{h}/images/{c}.jpg", "{h}/masks/{c}.png"),
    "ending _mask": Layout("{h}/images/{c}.png", "{h}/masks/{c}_mask.png"),
    "ending -seg": Layout("{h}/images/{c}.png", "{h}/labels/{c}-seg.png"),
    "prefix": Layout("{h}/images/{c}.png", "{h}/masks/mask_{c}.png", guess="paired with images by"),
    "any ending": Layout("{h}/images/{c}.png", "{h}/masks/{c}_lesion.png", guess="paired with images by"),
    "dotted ending": Layout("{h}/images/{c}.png", "{h}/masks/{c}.gt.png", guess="paired with images by"),
    "hospitals below": Layout("images/{h}/{c}.png", "masks/{h}/{c}.png"),
    "splits in hospitals": Layout("{h}/{s}/images/{c}.png", "{h}/{s}/labels/{c}.png", True),
    "splits below": Layout("{h}/images/{s}/{c}.png", "{h}/labels/{s}/{c}.png", True),
    "splits above": Layout("{s}/{h}/images/{c}.png", "{s}/{h}/labels/{c}.png", True),
    "splits in words": Layout("{h}/{S}/images/{c}.png", "{h}/{S}/labels/{c}.png", True),
    "BraTS": Layout("{h}/{c}/{c}_{m}.nii.gz", "{h}/{c}/{c}_seg.nii.gz", channels=MODALITIES),
    "a folder a case": Layout("{h}/{c}/image.png", "{h}/{c}/mask.png"),
    "a folder a case in splits": Layout("{h}/{s}/{c}/{c}.png", "{h}/{s}/{c}/{c}_seg.png", True),
    "a folder a patient": Layout("{h}/{c}/{c}_7.png", "{h}/{c}/{c}_7_mask.png", name="{c}"),
    "mask beside image": Layout("{h}/{c}.png", "{h}/{c}_mask.png"),
    "any word beside image": Layout("{h}/{c}.png", "{h}/{c}_lesion.png", guess="has a word more"),
    "a file a class": Layout(
        "{h}/images/{c}.png",
        "{h}/masks/{c}_{o}.png",
        organs=tuple(ORGANS),
        labels=ORGANS,
        guess="mask files of",
    ),
    "a folder a class": Layout(
        "{h}/images/{c}.png",
        "{h}/masks/{o}/{c}.png",
        organs=tuple(ORGANS),
        labels=ORGANS,
        guess="mask files of",
    ),
    "a folder of classes": Layout(
        "{h}/images/{c}.png",
        "{h}/masks/{c}/{o}.png",
        organs=tuple(ORGANS),
        labels=ORGANS,
        guess="mask files of",
    ),
    "TotalSegmentator": Layout(
        "{h}/{c}/{m}.nii.gz",
        "{h}/{c}/segmentations/{o}.nii.gz",
        channels=("ct",),
        organs=tuple(ORGANS),
        labels=ORGANS,
        guess="mask files of",
    ),
    "coloured masks": Layout(
        "{h}/images/{c}.png",
        "{h}/masks/{c}.png",
        labels={"class_1": (1,), "class_2": (2,)},
        coloured=True,
        guess="#000000 (89 % of pixels) is taken for background: a guess. Others are a class each: "
        "#ff0000 class_1 (8.6 %), #00ff00 class_2 (2.3 %)",
    ),
    "a list": Layout(
        "data/{h}_{c}.png",
        "data/{h}_{c}_label.png",
        True,
        list_name="cases.csv",
        heads="image,label,case,split,centre",
    ),
    "a list of other columns": Layout(
        "data/{h}_{c}.png",
        "data/{h}_{c}_x.png",
        True,
        list_name="cases.csv",
        heads="Foto,Contour,ID,Set,Hospital",
        guess="image from 'foto' (a guess), label from 'contour' (a guess)",
    ),
}


def picture(path: Path, values: NDArray[np.generic]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".nii.gz"):
        stack = np.repeat(values[..., None], 8, axis=2)
        nibabel.save(nibabel.Nifti1Image(stack.astype(np.uint8), np.eye(4)), path)
    else:
        Image.fromarray(values.astype(np.uint8)).save(path)


def draw_truth() -> NDArray[np.uint8]:
    """Two rectangles, of classes 1 and 2."""
    truth = np.zeros((32, 32), dtype=np.uint8)
    truth[4:12, 6:17], truth[20:24, 8:14] = 1, 2
    return truth


def make(root: Path, layout: Layout) -> Path:
    """The files of a layout; what `init` is given."""
    draw = np.random.default_rng(0)
    truth = draw_truth()
    rows = [layout.heads]
    for hospital in HOSPITALS:
        for case in CASES:
            for channel in layout.channels:
                flat = layout.image.endswith(".nii.gz")
                path = root / layout.fill(layout.image, hospital, case, channel)
                picture(path, draw.integers(0, 255, (32, 32) if flat else (32, 32, 3)))
            for number, organ in enumerate(layout.organs, start=1):
                mask = truth == number if layout.organs != ("",) else np.minimum(truth, len(layout.labels))
                path = root / layout.fill(layout.label, hospital, case, organ=organ)
                picture(path, COLOURS[mask] if layout.coloured else mask)
            image, label = (layout.fill(text, hospital, case) for text in (layout.image, layout.label))
            rows.append(f"{image},{label},{case},{SPLITS[case]},{hospital}")
    if layout.list_name is None:
        return root
    (root / layout.list_name).write_text("\n".join(rows))
    return root / layout.list_name


@mark.parametrize("name", LAYOUTS)
def test_a_layout_is_read_without_an_edit(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    proposal = propose([make(tmp_path / "data", layout)])
    assert proposal.file.clients == HOSPITALS and proposal.file.labels == layout.labels
    found = {(entry.client, entry.name): entry for entry in proposal.listing.entries}
    assert sorted(found) == [(hospital, case) for hospital in HOSPITALS for case in CASES]
    for (hospital, case), entry in found.items():
        at = tmp_path / "data"
        assert entry.images == tuple(
            at / layout.fill(layout.image, hospital, case, m) for m in layout.channels
        )
        labels = [at / layout.fill(layout.label, hospital, case, organ=organ) for organ in layout.organs]
        assert entry.label_files == labels and entry.group == case
        assert entry.split == (SPLITS[case] if layout.has_splits else None)
    assert proposal.file.splits.by == ("column" if layout.has_splits else "ratios") and not proposal.warnings
    told = [said for said in (*proposal.remarks,) if layout.guess and layout.guess in said]
    assert bool(told) == bool(layout.guess), proposal.remarks
    if layout.channels != ("",):
        assert proposal.file.channels == layout.channels


@mark.parametrize("name", LAYOUTS)
def test_the_file_that_init_writes_is_used_as_it_is(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    proposal = propose([make(tmp_path / "data", layout)])
    write(proposal.file, tmp_path / "federation.yaml", notes=describe(proposal))
    file = load(tmp_path / "federation.yaml")
    listing = list_cases(file, tmp_path)
    report = check(listing, file, base=tmp_path)
    assert report.ok and len(report.usable) == len(HOSPITALS) * len(CASES)
    label = read_case_label(report.usable[0])
    assert label is not None
    wanted = np.minimum(draw_truth(), len(layout.labels))
    seen = label.data[0] if label.data.ndim == 3 else label.data[0, ..., 0]
    assert np.array_equal(seen, wanted)


# What cannot be read ends in a sentence that says what to do

REFUSED = {
    "coloured JPEG masks": "is a coloured JPEG, which blurs colours; store the label as PNG",
    "masks of several people": "several labels .p1_rater1.png, p1_rater2.png.; left out. Keep one of them",
    "a list that does not say": "Say which has the images and which the labels: --column image=foto",
    "DICOM": "holds DICOM files. Bring them into a centre's folder first: wardround data import-dicom",
    "channels without a label": "p1_ct.png, p1_pet.png, and no name says which is the label. Add a word to it",
    "a hospital of another layout": "south .* not read",
}


@mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_says_what_to_do(tmp_path: Path, name: str) -> None:
    given = tmp_path
    for hospital in HOSPITALS:
        for case in CASES:
            image = tmp_path / hospital / "images" / f"{case}.png"
            if name == "coloured JPEG masks":
                picture(image, np.ones((32, 32)))
                picture(tmp_path / hospital / "masks" / f"{case}.jpg", COLOURS[draw_truth()])
            elif name == "masks of several people":
                picture(image, np.ones((32, 32)))
                for rater in ("rater1", "rater2"):
                    picture(tmp_path / hospital / "masks" / f"{case}_{rater}.png", draw_truth())
            elif name == "DICOM":
                file = tmp_path / hospital / case / "study" / "series" / "IM0001"
                file.parent.mkdir(parents=True)
                file.write_bytes(bytes(128) + b"DICM")
            elif name == "a list that does not say":
                given = tmp_path / "cases.csv"
                given.write_text("foto,drawn\na.png,b.png\n")
            elif name == "channels without a label":
                for channel in ("ct", "pet"):
                    picture(tmp_path / hospital / case / f"{case}_{channel}.png", np.ones((32, 32)))
            else:
                part = "labels" if hospital == "north" else "drawings"
                picture(image, draw_truth() * 9)
                picture(tmp_path / hospital / part / f"{case}.png", draw_truth())
    if name == "a hospital of another layout":
        assert any("south" in note and "not read" in note for note in propose([given]).listing.notes)
        return
    with raises(DataError, match=REFUSED[name]):
        propose([given])


def test_every_layout_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/own-data.md").read_text(encoding="utf-8")
    for layout in LAYOUTS.values():
        image, label = (
            layout.fill(text, "north", "p1", layout.channels[-1], layout.organs[0])
            for text in (layout.image, layout.label)
        )
        assert f"| `{image}` | `{label}`" in page
    assert f"{len(LAYOUTS)} layouts that are read without an edit" in page
