"""Layouts people have: each is made, and `init` proposes the right clients, cases and splits without an edit."""

from pathlib import Path

import numpy as np
from PIL import Image
from pytest import mark

from wardround.data.proposing.proposal import propose

HOSPITALS = ("north", "south")
CASES = ("p1", "p2", "p3", "p4")

# Layout -> where image and label of a case lie, and whether the folders say its split
LAYOUTS = {
    "images, labels": ("{h}/images/{c}.png", "{h}/labels/{c}.png", False),
    "imgs, gt": ("{h}/imgs/{c}.png", "{h}/gt/{c}.png", False),
    "scans, segmentations": ("{h}/scans/{c}.png", "{h}/segmentations/{c}.png", False),
    "capitals": ("{h}/Images/{c}.png", "{h}/Masks/{c}.png", False),
    "JPEG and PNG": ("{h}/images/{c}.jpg", "{h}/masks/{c}.png", False),
    "ending _mask": ("{h}/images/{c}.png", "{h}/masks/{c}_mask.png", False),
    "ending -seg": ("{h}/images/{c}.png", "{h}/labels/{c}-seg.png", False),
    "prefix": ("{h}/images/{c}.png", "{h}/masks/mask_{c}.png", False),
    "any ending": ("{h}/images/{c}.png", "{h}/masks/{c}_lesion.png", False),
    "dotted ending": ("{h}/images/{c}.png", "{h}/masks/{c}.gt.png", False),
    "hospitals below": ("images/{h}/{c}.png", "masks/{h}/{c}.png", False),
    "splits in hospitals": ("{h}/{s}/images/{c}.png", "{h}/{s}/labels/{c}.png", True),
    "splits below": ("{h}/images/{s}/{c}.png", "{h}/labels/{s}/{c}.png", True),
    "splits above": ("{s}/{h}/images/{c}.png", "{s}/{h}/labels/{c}.png", True),
    "splits in words": ("{h}/{S}/images/{c}.png", "{h}/{S}/labels/{c}.png", True),
}
SPLITS = {"p1": "train", "p2": "train", "p3": "val", "p4": "test"}
WORDS = {"train": "Training", "val": "Validation", "test": "Testing"}


def picture(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).save(path)


@mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_read_without_an_edit(tmp_path: Path, layout: str) -> None:
    image, label, has_splits = LAYOUTS[layout]
    draw = np.random.default_rng(0)
    for hospital in HOSPITALS:
        for case in CASES:
            split = SPLITS[case]
            names = {"h": hospital, "c": case, "s": split, "S": WORDS[split]}
            picture(tmp_path / image.format(**names), draw.integers(0, 255, (32, 32, 3)))
            picture(tmp_path / label.format(**names), np.eye(32))
    proposal = propose([tmp_path])
    assert proposal.file.clients == HOSPITALS and proposal.file.labels == {"class_1": (1,)}
    found = {(entry.client, entry.name): entry for entry in proposal.listing.entries}
    assert sorted(found) == [(hospital, case) for hospital in HOSPITALS for case in CASES]
    for (hospital, case), entry in found.items():
        names = {"h": hospital, "c": case, "s": SPLITS[case], "S": WORDS[SPLITS[case]]}
        assert entry.images == (tmp_path / image.format(**names),)
        assert entry.label == tmp_path / label.format(**names)
        assert entry.split == (SPLITS[case] if has_splits else None)
    assert proposal.file.splits.by == ("column" if has_splits else "ratios") and not proposal.warnings


def test_every_layout_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/own-data.md").read_text(encoding="utf-8")
    for image, label, _ in LAYOUTS.values():
        names = {"h": "north", "c": "p1", "s": "train", "S": "Training"}
        assert f"| `{image.format(**names)}` | `{label.format(**names)}` |" in page
