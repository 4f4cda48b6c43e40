"""Pairs of images and labels that lie in two folders, by what their names share.

pair_files(images, labels, client, notes)    stem -> images and label, labels to choose from, masks of classes
match_stems(images, labels)                  x and mask_x, x_lesion, x.gt, x_mask_7 where x_7 is the image
name_numbered(entries)                       x_0000, x_0002: channels that a case has
match_cores(images, labels)                  volume-7 and segmentation-7, img0007 and label0007
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from wardround.data.listing import Entry
from wardround.data.readers.class_masks import WORDS, Masks, describe_masks, find_class_masks
from wardround.data.readers.common import list_images, note_names, stem_of

LABEL_MARKS = re.compile(r"[_-](mask|label|labels|seg|segmentation|gt|annotation|roi)$", re.IGNORECASE)
CHANNEL_MARK = re.compile(r"^(?P<case>.+)_(?P<channel>\d{4})$")
Pairs = dict[str, tuple[tuple[Path, ...], Path | None]]


def pair_files(
    images: Path, labels: Path, client: str, notes: list[str]
) -> tuple[Pairs, Mapping[str, Sequence[Path]], Masks]:
    """Stem -> images and label, stem -> labels where nothing says which of several is meant, and stem ->
    masks where every class has a file of its own.

    What has no partner is noted; an image alone stays, without label. A label of the image's own name counts
    before `x_mask` and `x_seg`, which are then noted.
    """
    pictures, masks = list_images(images, notes), list_images(labels, [])
    classes = find_class_masks(list_case_names(pictures), labels, masks)
    if classes:
        return pair_masks(pictures, classes, len(masks), client, notes), {}, classes
    masks = list_images(labels, notes)
    own = {stem: path for stem, path in masks.items() if stem in pictures or not LABEL_MARKS.search(stem)}
    marked: dict[str, list[Path]] = {}
    for stem in sorted(set(masks) - set(own)):
        marked.setdefault(LABEL_MARKS.sub("", stem), []).append(masks[stem])
    doubled = {case: paths for case, paths in marked.items() if len(paths) > 1 and case not in own}
    spare = [path.name for case, paths in marked.items() if case in own for path in paths]
    note_names(notes, f"client '{client}': labels beside one of the image's own name are not used", spare)
    found = {**{case: paths[0] for case, paths in marked.items()}, **own}
    cases = group_channels(pictures, found)
    matched, several = match_stems(
        [case for case in cases if case not in found], [stem for stem in found if stem not in cases]
    )
    doubled |= {case: [found[stem] for stem in stems] for case, stems in several.items()}
    if not matched and not doubled and not set(found) & set(cases):
        matched = match_cores(list(cases), list(found))
    if matched:
        case, stem = next(iter(matched.items()))
        notes.append(
            f"client '{client}': {len(matched)} labels are paired with images by what their names share, "
            f"such as {found[stem].name} with {pictures.get(case, images / case).name}; a guess."
        )
    for case, stem in matched.items():
        found[case] = found.pop(stem)
    if pictures and masks and not set(found) & set(cases):
        notes.append(
            f"client '{client}': {len(pictures)} images, {len(masks)} labels, no pair; e.g. "
            f"{min(pictures.values()).name} and {min(masks.values()).name}."
        )
    paired = {case: (files, found.get(case)) for case, files in cases.items()}
    bare = sorted(case for case, (_, label) in paired.items() if label is None)
    note_names(notes, f"client '{client}': {len(bare)} images have no label", bare)
    lost = sorted(path.name for stem, path in found.items() if stem not in cases)
    note_names(notes, f"client '{client}': {len(lost)} labels have no image", lost, "; left out")
    return paired, doubled, {}


def list_case_names(pictures: Iterable[str]) -> list[str]:
    """Names a case may have, by its images: x, and also y where that is y_0000."""
    marks = map(CHANNEL_MARK.match, pictures)
    return [*pictures, *(mark["case"] for mark in marks if mark)]


def pair_masks(
    pictures: Mapping[str, Path], classes: Masks, num_files: int, client: str, notes: list[str]
) -> Pairs:
    """Stem -> images and the first of its masks."""
    firsts = {case: next(iter(own.values())) for case, own in classes.items()}
    paired = {case: (files, firsts.get(case)) for case, files in group_channels(pictures, firsts).items()}
    notes += describe_masks(classes, client)
    bare = sorted(case for case, (_, label) in paired.items() if label is None)
    note_names(notes, f"client '{client}': {len(bare)} images have no label", bare)
    lost = num_files - sum(len(own) for own in classes.values())
    if num_files and lost > 0:
        notes.append(f"client '{client}': {lost} labels have no image or name no class; left out.")
    return paired


def match_stems(images: Sequence[str], labels: Sequence[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Image -> label whose stem is the image's with something before, behind or in it, the same for all:
    mask_x, x_lesion, x.gt, x_mask_7 of x_7. And image -> labels where several such endings fit equally well.

    >>> match_stems(["a", "a1"], ["mask_a", "mask_a1"])
    ({'a': 'mask_a', 'a1': 'mask_a1'}, {})
    """
    found: dict[tuple[str, str], dict[str, str]] = {}
    wanted = set(images)
    for label in labels:
        cuts = [number for number, letter in enumerate(label) if not letter.isalnum()]
        for number in cuts:
            if label[number + 1 :] in wanted:
                found.setdefault((label[: number + 1], ""), {})[label[number + 1 :]] = label
            if label[:number] in wanted:
                found.setdefault(("", label[number:]), {})[label[:number]] = label
        for start, end in pairwise(cuts):  # a word in the middle
            if label[:start] + label[end:] in wanted:
                found.setdefault((label[start : end + 1], "inside"), {})[label[:start] + label[end:]] = label
    if not found:
        return {}, {}
    most = max(len(pairs) for pairs in found.values())
    best = [pairs for pairs in found.values() if len(pairs) == most]
    if len(best) == 1:
        return best[0], {}
    several: dict[str, list[str]] = {}
    for pairs in best:
        for image, label in pairs.items():
            several.setdefault(image, []).append(label)
    single = {image: own[0] for image, own in several.items() if len(own) == 1}
    return single, {image: own for image, own in several.items() if len(own) > 1}


def match_cores(images: Sequence[str], labels: Sequence[str]) -> dict[str, str]:
    """Image -> label where names differ only in what all images, and all labels, begin and end with, and that
    of the labels begins with a word for one.

    >>> match_cores(["volume-7", "volume-12"], ["segmentation-12", "segmentation-7"])
    {'volume-7': 'segmentation-7', 'volume-12': 'segmentation-12'}
    """
    (named, _), (drawn, shared) = find_cores(images), find_cores(labels)
    pairs = {stem: drawn[core] for core, stem in named.items() if core in drawn}
    has_word = any(part.lower().strip("_-. ").startswith(WORDS) for part in shared)
    return pairs if has_word and 2 * len(pairs) > max(len(images), len(labels)) else {}


def find_cores(stems: Sequence[str]) -> tuple[dict[str, str], tuple[str, str]]:
    """Stems by what is left without what all have before and behind, and these two; a number stays whole."""
    if len(stems) < 2:
        return {}, ("", "")
    start = measure_shared(stems)
    while start and stems[0][start - 1].isdigit():
        start -= 1
    rest = [stem[start:] for stem in stems]
    end = measure_shared([stem[::-1] for stem in rest])
    while end and rest[0][-end].isdigit():
        end -= 1
    cores = {stem[: len(stem) - end]: whole for stem, whole in zip(rest, stems, strict=True)}
    shared = stems[0][:start], rest[0][len(rest[0]) - end :]
    return (cores if len(cores) == len(stems) and "" not in cores else {}), shared


def measure_shared(texts: Sequence[str]) -> int:
    """How many letters all texts begin with."""
    low, high = min(texts), max(texts)
    return next((n for n, pair in enumerate(zip(low, high, strict=False)) if len(set(pair)) > 1), len(low))


def group_channels(pictures: Mapping[str, Path], labels: Mapping[str, Path]) -> dict[str, tuple[Path, ...]]:
    """Files by case: `x_0000` and `x_0001` are channels of `x` where the label is called `x`."""
    cases: dict[str, list[Path]] = {}
    for stem in sorted(pictures):
        match = CHANNEL_MARK.match(stem) if stem not in labels else None
        case = match["case"] if match and match["case"] in labels else stem
        cases.setdefault(case, []).append(pictures[stem])
    return {case: tuple(files) for case, files in cases.items()}


def name_numbered(
    entries: Sequence[Entry], names: tuple[str, ...] = ()
) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """Cases of numbered files, with the names of the channels they have where some lack a number; and all
    names, which are channel_0, channel_1 ... where nobody gave others."""
    own = [read_numbers(entry) for entry in entries]
    if not own or not all(own):
        return tuple(entries), names
    every = names or tuple(f"channel_{number}" for number in range(1 + max(map(max, own))))
    if all(numbers == list(range(len(every))) for numbers in own):
        return tuple(entries), names
    named = (tuple(every[number] for number in numbers) for numbers in own)
    return tuple(replace(e, channels=its) for e, its in zip(entries, named, strict=True)), every


def read_numbers(entry: Entry) -> list[int]:
    """The channels that the names of a case's files say; none where one does not."""
    marks = [CHANNEL_MARK.match(stem_of(path.name) or "") for path in entry.images]
    numbers = [int(mark["channel"]) for mark in marks if mark and entry.name.endswith(mark["case"])]
    return numbers if len(numbers) == len(marks) else []
