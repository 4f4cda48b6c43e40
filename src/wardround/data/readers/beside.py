"""Images beside their labels, in one folder a case, or all cases of a centre in one folder.

    <root>/<case>/<case>_flair.nii.gz, <case>_t1.nii.gz, <case>_seg.nii.gz    a file a channel (BraTS)
    <root>/<case>/image.png, mask.png
    <root>/<case>/ct.nii.gz, segmentations/liver.nii.gz, spleen.nii.gz        a file a class
    <root>/<patient>/<slice>.tif, <slice>_mask.tif                            several cases of a patient
    <root>/<case>.png, <case>_mask.png                                        all in one folder

Each of them in one folder a centre too, and below folders called train, val and test. A label is known by a
word of its name (mask, seg, label, gt ...), or by being called as its image with a word added.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from wardround.data.listing import Entry, Listing
from wardround.data.readers.centres import IMAGES, LABELS, find_split, note_unread_lists, tell_apart
from wardround.data.readers.class_masks import ANNOTATOR, APART, WORDS, Masks, describe_masks, strip_word
from wardround.data.readers.common import (
    check_name,
    find_first,
    is_safe,
    join_names,
    list_folders,
    list_images,
    note_names,
)
from wardround.data.readers.image_files import PICTURES

WORD_INSIDE = re.compile(rf"{APART}+(?:{'|'.join(WORDS)})(?={APART})", re.IGNORECASE)
CENTRE = re.compile("hospital|clinic|client|cent(?:re|er)|site|institut|scanner|vendor", re.IGNORECASE)
NUMBERED_WORD = re.compile(rf"{APART}+(?:{'|'.join(WORDS)}){APART}?\d+$", re.IGNORECASE)


@dataclass(frozen=True)
class Bundle:
    """The files of one case: images by the name of their channel, its labels, or its masks by class.

    guessed: its label is known only by a name that is longer than the image's.
    """

    name: str
    images: Mapping[str, Path]
    labels: tuple[Path, ...] = ()
    masks: Mapping[str, Path] = field(default_factory=dict)
    guessed: bool = False

    @property
    def is_labelled(self) -> bool:
        return bool(self.images and (self.labels or self.masks))


@dataclass(frozen=True)
class Home:
    """A folder of cases; patient: its name, where all of them are of one; split: where folders say it."""

    folder: Path
    bundles: tuple[Bundle, ...]
    patient: str | None = None
    split: str | None = None


def recognise(path: Path) -> str | None:
    if not path.is_dir():
        return None
    found = find_centres(path, [])
    homes = [home for own in found.values() for home in own]
    if not homes:
        return None
    what = "one folder a case" if homes[0].patient is not None else "cases of a centre in one folder"
    centres = f"{len(found)} centres ({join_names(found)})" if len(found) > 1 else "one centre"
    return f"labels lie beside their images, {what}: {centres}"


def read(path: Path, client: str | None = None) -> Listing:
    """All centres of a folder; client: the name of a single one."""
    root = path.resolve()
    notes: list[str] = []
    found = find_centres(root, notes)
    if len(found) == 1 and client is not None:
        found = {client: next(iter(found.values()))}
    wanted = choose_channels([[bundle for home in own for bundle in home.bundles] for own in found.values()])
    entries: list[Entry] = []
    for name, homes in found.items():
        check_name(name, str(path))
        notes += note_unread_lists(root, name) if len(found) == 1 else []
        entries += read_centre(name, homes, wanted, notes)
    return Listing("beside", tuple(entries), name_images(entries, wanted), notes=tuple(notes))


def name_images(entries: Sequence[Entry], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the channels; of a single file only where it is a volume that is called ct, say."""
    if not entries:
        return ()
    if len(wanted) == 1 and (wanted[0].lower() in ("", *IMAGES) or is_picture(entries[0].images[0])):
        return ()
    return tuple(name or "image" for name in wanted)


def is_picture(path: Path) -> bool:
    return path.name.lower().endswith(PICTURES)


def choose_channels(centres: Sequence[Sequence[Bundle]]) -> tuple[str, ...]:
    """The channels that most cases have, and those that a centre has beside some of these; the name alone of
    a single image says nothing where names differ."""
    kinds = Counter(tuple(sorted(bundle.images)) for own in centres for bundle in own)
    usual = kinds.most_common(1)[0][0] if kinds else ()
    if len(usual) == 1 and len({kind for kind in kinds if len(kind) == 1}) > 1:
        return ("",)
    for own in centres:
        often = Counter(tuple(sorted(bundle.images)) for bundle in own).most_common(1)
        its = often[0][0] if often else ()
        usual = tuple(sorted({*usual, *its})) if {*usual} & {*its} - {""} else usual
    return usual


def read_centre(client: str, homes: Sequence[Home], wanted: tuple[str, ...], notes: list[str]) -> list[Entry]:
    entries: list[Entry] = []
    masks: Masks = {}
    incomplete, bare = [], []
    for home in homes:
        lone = home.patient is not None and len(home.bundles) == 1
        for bundle in home.bundles:
            name = home.folder.name if lone else bundle.name
            if home.patient is not None and not name.startswith(home.folder.name):
                name = f"{home.folder.name}_{name}"  # slices count again at every patient
            images = (
                tuple(bundle.images.values())
                if wanted == ("",)
                else tuple(bundle.images[channel] for channel in wanted if channel in bundle.images)
            )
            if not is_safe(name) or not images or not len(bundle.images) == len(images) <= len(wanted):
                incomplete.append(name)
                continue
            if len(bundle.labels) > 1:
                files = join_names(path.name for path in bundle.labels)
                notes.append(
                    f"client '{client}', case '{name}': several labels ({files}); left out. Keep one of them."
                )
                continue
            label = next(iter((*bundle.labels, *bundle.masks.values())), None)
            if bundle.masks:
                masks[name] = dict(bundle.masks)
            elif label is None:
                bare.append(name)
            entry = Entry(client, name, images, label, home.patient or name, home.split)
            lacks = wanted != ("",) and len(images) < len(wanted)
            channels = tuple(n or "image" for n in wanted if n in bundle.images) if lacks else ()
            entries.append(replace(entry, masks=bundle.masks, channels=channels))
    guess = next((b.labels[0].name for home in homes for b in home.bundles if b.guessed), None)
    if guess is not None:
        notes.append(f"client '{client}': the file that has a word more, as {guess}, is the label: a guess.")
    shown = f" ({', '.join(wanted)})" if any(wanted) else ""
    note_names(
        notes, f"client '{client}': cases with other images than most{shown}", incomplete, "; left out"
    )
    note_names(notes, f"client '{client}': {len(bare)} images have no label", bare)
    notes += describe_masks(masks, client) if masks else []
    return tell_apart(entries)


# Which folders are whose


def find_centres(root: Path, notes: list[str]) -> dict[str, list[Home]]:
    """Every centre at or below a folder, with its folders of cases."""
    homes = collect_homes(root, notes)
    if homes and not holds_centres(homes):
        several = [home for home in homes if home.patient is not None and len(home.bundles) > 1]
        if several:
            notes.append(
                f"{root}: its folders ({len(homes)}, such as {homes[0].folder.name}) are taken for patients: "
                "a guess. If they are hospitals, give them one by one."
            )
        return {root.name: homes}
    found: dict[str, list[Home]] = {}
    for home in homes:  # all cases of a centre in one folder
        found.setdefault(home.folder.name, []).append(replace(home, patient=None))
    for child in () if homes else list_folders(root, notes):
        split = find_split(child.name)
        for centre in [child] if split is None else list_folders(child, notes):
            own = [replace(home, split=home.split or split) for home in collect_homes(centre, notes)]
            if own:
                found.setdefault(centre.name, []).extend(own)
    return found


def collect_homes(folder: Path, notes: list[str]) -> list[Home]:
    """The folders of cases of one centre: itself, those below it, or those below folders of splits."""
    inner = {child.name.lower(): child for child in list_folders(folder, [])}
    images = find_first(IMAGES, inner)
    own = find_bundles(folder) or (find_bundles(inner[images]) if images else [])
    if any(bundle.is_labelled for bundle in own):
        return [Home(folder, tuple(own))]
    homes = []
    for child in list_folders(folder, notes):
        split = find_split(child.name)
        if split is not None:
            homes += [replace(home, split=split) for home in collect_homes(child, notes)]
        else:
            homes.append(Home(child, tuple(find_bundles(child)), child.name))
    return homes if any(bundle.is_labelled for home in homes for bundle in home.bundles) else []


def holds_centres(homes: Sequence[Home]) -> bool:
    """Whether folders are centres rather than cases or patients: several cases in each, and no names with
    numbers as patients have."""
    inner = [home for home in homes if home.patient is not None and home.bundles]
    if not inner or all(len(home.bundles) == 1 for home in inner):
        return False
    names = [home.folder.name for home in inner]
    return any(CENTRE.search(name) or not any(letter.isdigit() for letter in name) for name in names)


# The cases of one folder


def find_bundles(folder: Path) -> list[Bundle]:
    """The cases whose files lie in this folder, and masks in a folder of labels below it."""
    files = list_images(folder, [])
    if not files:
        return []
    inner = {child.name.lower(): child for child in list_folders(folder, [])}
    below = find_first(LABELS, inner)
    drawn = list_images(inner[below], []) if below else {}
    plain = {stem: base for stem in files if (base := find_base(stem, files)) is not None}
    images = {stem: path for stem, path in files.items() if stem not in plain}
    if drawn and not plain:
        names = {strip_word(stem) or stem: path for stem, path in sorted(drawn.items())}
        labels = tuple(names.values()) if len(names) == 1 else ()
        return [Bundle(folder.name, name_channels(images, folder.name), labels, {} if labels else names)]
    if not plain:
        return pair_by_added_word(images) or [Bundle(folder.name, name_channels(images, folder.name))]
    return group_by_label(folder.name, images, {stem: files[stem] for stem in plain}, plain)


def find_base(stem: str, files: Mapping[str, Path]) -> str | None:
    """A label's name without its word; None for an image.

    A word inside, or with a number behind it, counts where an image is called like the rest: x_mask_7 of x_7,
    x_mask_1 of x.
    """
    base = strip_word(stem)
    others = (WORD_INSIDE.sub("", stem, count=1), NUMBERED_WORD.sub("", stem))
    return base if base is not None else next((o for o in others if o != stem and o in files), None)


def group_by_label(
    folder: str, images: Mapping[str, Path], labels: Mapping[str, Path], bases: Mapping[str, str]
) -> list[Bundle]:
    """Images with the label whose name, without its word, they begin with; the longest such."""
    owners = {stem: find_longest(stem, set(bases.values())) for stem in images}
    if not any(owner is not None for owner in owners.values()):
        if len(set(bases.values())) == 1:
            return [Bundle(folder, name_channels(images, folder), tuple(labels.values()))]
        start = common_words([*bases.values(), *images])
        masks = {base[len(start) :].strip("_-. "): labels[stem] for stem, base in sorted(bases.items())}
        if any(not name or ANNOTATOR.fullmatch(name) for name in masks):
            return [Bundle(folder, name_channels(images, folder))]
        return [Bundle(folder, name_channels(images, start or folder), (), masks)]
    bundles = []
    for base in sorted(set(bases.values())):
        own = {stem: path for stem, path in images.items() if owners[stem] == base}
        drawn = tuple(labels[stem] for stem in sorted(bases) if bases[stem] == base)
        bundles += [Bundle(base or folder, name_channels(own, base), drawn)] if own else []
    alone = [stem for stem, owner in owners.items() if owner is None]
    return [*bundles, *(Bundle(stem, {"": images[stem]}) for stem in alone)]


def find_longest(stem: str, bases: set[str]) -> str | None:
    """The longest base a stem begins or ends with, at a word's border; an empty one takes any."""
    fitting = [
        base
        for base in bases
        if stem == base
        or not base
        or re.match(re.escape(base) + APART, stem)
        or re.search(APART + re.escape(base) + "$", stem)
    ]
    return max(fitting, key=len, default=None)


def name_channels(images: Mapping[str, Path], case: str) -> dict[str, Path]:
    """Images by what their names have beside the case's."""
    starts = {stem: bool(case) and stem.startswith(case) for stem in images}
    return {
        (stem.removeprefix(case) if starts[stem] else stem.removesuffix(case)).strip("_-. "): path
        for stem, path in images.items()
    }


def common_words(texts: Sequence[str]) -> str:
    """What all texts begin with, up to the border of a word."""
    low, high = min(texts), max(texts)
    starts = [low[: match.end()] for match in re.finditer(APART, low)]
    return next((start for start in reversed(starts) if high.startswith(start)), "")


def pair_by_added_word(images: Mapping[str, Path]) -> list[Bundle]:
    """Pairs x and x_lesion, where all files form such pairs and the added word is one and the same."""
    added = {stem: base for stem in images if (base := find_longest(stem, set(images) - {stem})) is not None}
    words = {stem.removeprefix(base) for stem, base in added.items()}
    bases = set(images) - set(added)
    if len(words) != 1 or set(added.values()) != bases or re.fullmatch(r"\W*_?\d+", next(iter(words))):
        return []
    pairs = sorted(added.items())
    return [Bundle(base, {"": images[base]}, (images[stem],), guessed=True) for stem, base in pairs]


def explain_unknown_labels(root: Path) -> str | None:
    """What to do about folders of several images a case none of which is known for a label."""
    for child in list_folders(root, [])[:5]:
        for folder in (child, *list_folders(child, [])[:2]):
            files = list_images(folder, [])
            if len(files) > 1 and not any(bundle.is_labelled for bundle in find_bundles(folder)):
                return (
                    f"{folder} holds {join_names(sorted(path.name for path in files.values()))}, and no name "
                    "says which is the label. Add a word to it, such as _seg or _mask, or write a list (CSV)."
                )
    return None
