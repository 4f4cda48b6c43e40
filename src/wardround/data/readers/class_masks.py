"""Masks of single classes beside a folder of images: which file is whose, and of which class.

labels/p01_liver.nii.gz, labels/p01_spleen.nii.gz      or liver_p01, p01_liver_mask ...
labels/p01/liver.nii.gz, labels/p01/spleen.nii.gz
labels/liver/p01.nii.gz, labels/spleen/p01.nii.gz
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from wardround.data.readers.common import join_names, list_folders, list_images

MOST_MASKS = 255  # prepared labels are bytes
WORDS = (
    "mask", "masks", "label", "labels", "seg", "segm", "segmentation", "segmentations", "gt", "groundtruth",
    "truth", "annotation", "annotations", "roi", "contour", "contours",
)  # fmt: skip
APART = r"[_\-. ]"  # between the words of a file's name
FIRST_WORD = re.compile(rf"^(?:{'|'.join(WORDS)})(?:{APART}+|$)", re.IGNORECASE)
LAST_WORD = re.compile(rf"(?:{APART}+|^)(?:{'|'.join(WORDS)})$", re.IGNORECASE)
# Several drawings of one structure, or parts of it, are no classes: rater1, reader_2, 3
ANNOTATOR = re.compile(
    r"(?:[a-z]|rater|reader|observer|annotator|expert|doctor|user|v)?[_\-. ]?\d+|[a-z]", re.I
)

Masks = dict[str, dict[str, Path]]  # case -> name of a mask -> its file


def strip_word(stem: str) -> str | None:
    """A stem without the word that makes it a label's, before or behind; None where there is none.

    >>> strip_word("p01_seg"), strip_word("mask_p01"), strip_word("p01_t1")
    ('p01', 'p01', None)
    """
    for word in (LAST_WORD, FIRST_WORD):
        if word.search(stem):
            return word.sub("", stem)
    return None


def find_class_masks(cases: Iterable[str], labels: Path, files: Mapping[str, Path]) -> Masks:
    """The masks of each case where classes have files of their own; nothing where they do not.

    cases: names a label may have; files: those that lie in the folder of labels itself, by stem.
    """
    known = set(cases)
    found = split_names(known, files) if files else split_folders(known, labels)
    names = {name for own in found.values() for name in own}
    several = any(len(own) > 1 for own in found.values())
    return found if several and len(names) <= MOST_MASKS else {}


def split_names(cases: set[str], files: Mapping[str, Path]) -> Masks:
    """Masks by what their names have beside the case's; nothing if a file has the case's name alone."""
    found: Masks = {}
    for stem, path in files.items():
        plain = strip_word(stem)
        if stem in cases or plain in cases:
            return {}
        for text in dict.fromkeys((stem, plain or stem)):
            owner = find_owner(text, cases)
            name = name_class(text, owner) if owner is not None else None
            if owner is not None and name is not None:
                found.setdefault(owner, {})[name] = path
                break
    return found


def find_owner(text: str, cases: set[str]) -> str | None:
    """The longest case name that a text begins or ends with, at a word's border."""
    cuts = [place for place, letter in enumerate(text) if re.match(APART, letter)]
    parts = [part for place in cuts for part in (text[:place], text[place + 1 :])]
    return max((part for part in parts if part in cases), key=len, default=None)


def name_class(text: str, case: str) -> str | None:
    """What a file's name says beside the case's; None where that is no name of a class."""
    rest = text.removeprefix(case) if text.startswith(case) else text.removesuffix(case)
    name = rest.strip("_-. ")
    name = strip_word(name) or ("" if strip_word(name) == "" else name)
    return None if not name or ANNOTATOR.fullmatch(name) else name


def split_folders(cases: set[str], labels: Path) -> Masks:
    """Masks in a folder a case, or a folder a class."""
    folders = {folder.name: list_images(folder, []) for folder in list_folders(labels, [])}
    found: Masks = {}
    for name, files in folders.items():
        for stem, path in files.items():
            plain = strip_word(stem)
            if name in cases:
                said = stem.removeprefix(name).strip("_-. ") or stem
                found.setdefault(name, {})[strip_word(said) or said] = path
            else:
                owner = next((text for text in (stem, plain) if text in cases), None)
                owner = owner or find_owner(stem, cases)
                if owner is not None:
                    found.setdefault(owner, {})[name] = path
    return found


def describe_masks(masks: Masks, client: str) -> list[str]:
    """Which classes have masks, and how many cases each; a case without one does not show that class."""
    counts: dict[str, int] = {}
    for own in masks.values():
        for name in own:
            counts[name] = counts.get(name, 0) + 1
    shown = join_names((f"{name} ({count})" for name, count in sorted(counts.items())), 12)
    few = sorted(name for name, count in counts.items() if count < len(masks))
    then = f" A case without a file of a class ({join_names(few)}) counts as one without it." if few else ""
    return [f"client '{client}': every class has mask files of its own: {shown} of {len(masks)} cases.{then}"]
