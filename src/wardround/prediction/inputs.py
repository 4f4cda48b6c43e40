"""Inputs: from paths on the command line to scans, each with all of its channels.

    scan.nii.gz  ct.mha  photo.png one scan, or one channel of it (<case>_0000, <case>_0001 or <case>_flair)
    a folder of such files         all of them, sorted by name; else those of its subfolders, one level down
    a folder of DICOM files        every series, converted to NIfTI (needs pydicom)
    study.zip                      what it holds, as a folder
    https://.../studies/1.2.3      a study of a DICOMweb archive, or a series of it (needs dicomweb-client)
    list.txt                       one scan per line, channels separated by tabs; paths relative to the list

An input that cannot be used becomes an `InputProblem`; the others go on.
"""

from __future__ import annotations

import itertools
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from wardround.data.dicom.importing import import_dicom
from wardround.data.dicom.web import STUDY, download, open_archive
from wardround.data.listing import Places
from wardround.data.readers import metaimage, nrrd
from wardround.data.readers.common import holds_dicom, is_dicom, join_names, stem_of
from wardround.data.readers.image_files import ENDINGS, NIFTI, NUMPY, WITH_GEOMETRY, has_known_ending
from wardround.errors import DataError

NUMBERED = re.compile(r"^(?P<case>.+)_(?P<channel>\d{4})$")
NOT_SCANS = re.compile(r"^(labels?|masks?|seg|segmentations?|annotations?)(T[rs])?$", re.IGNORECASE)
LISTS = (".txt", ".lst")
MOST_LINES = 1_000_000
Format = Literal["nifti", "nrrd", "dicom-seg", "rtstruct"]
FORMATS: Mapping[str, str] = {
    "nifti": ".nii.gz",
    "nrrd": nrrd.SEGMENTATION,
    "dicom-seg": ".seg.dcm",
    "rtstruct": ".rtstruct.dcm",
}
DICOM = (".seg.dcm", ".rtstruct.dcm")
MOST_UNPACKED = 2**36  # bytes of a zip; a study has a few gigabytes


@dataclass(frozen=True)
class Scan:
    """One scan: its files in channel order, the file name of its mask, its name in messages.

    series: the DICOM files that a volume was converted from; places: where the run's channels are in it, if
    not all in their order; is_guess: by the name of a lone file, which may hold all channels after all;
    num_channels: that federation.yaml names for it, 0 where it names none.
    """

    files: tuple[Path, ...]
    name: str
    where: str
    series: tuple[Path, ...] = ()
    places: Places = ()
    is_guess: bool = False
    num_channels: int = 0

    @property
    def stem(self) -> str:
        if self.name.endswith(DICOM):
            return self.name.rsplit(".", 2)[0]
        return stem_of(self.name) or self.name

    @property
    def ending(self) -> str:
        return self.name[len(self.stem) :]


@dataclass(frozen=True)
class InputProblem:
    """An input that could not be used, and why, in a sentence."""

    where: str
    reason: str


@dataclass
class FoundScans:
    scans: list[Scan] = field(default_factory=list)
    problems: list[InputProblem] = field(default_factory=list)

    def refuse(self, where: object, reason: str) -> None:
        self.problems.append(InputProblem(str(where), reason))


@dataclass(frozen=True)
class Layout:
    """Number of channels of the run's scans, and their names if known; lacking: a scan may lack some."""

    channels: int
    names: Sequence[str] = ()
    lacking: bool = False

    def describe(self) -> str:
        if self.channels == 1:
            return "one channel (a grey image)"
        of = f" ({', '.join(self.names)})" if self.names else ""
        last = self.channels - 1
        return (
            f"{self.channels} channels{of}: one file with all of them (a fourth axis, or colours), or one "
            f"file per channel, named <case>_0000 to <case>_{last:04d} and given together"
        )

    def parse_channel(self, stem: str) -> tuple[str, int] | None:
        """Case and channel of a file's stem, where it names one."""
        match = NUMBERED.match(stem)
        if match:
            return match["case"], int(match["channel"])
        for number, name in enumerate(self.names):
            for mark in ("_", "-"):
                if stem.casefold().endswith(f"{mark}{name}".casefold()):
                    return stem[: -len(name) - 1], number
        return None


def find_scans(
    inputs: Sequence[str | Path], layout: Layout, workplace: Path, login: Path | None = None
) -> FoundScans:
    """Every scan among the inputs.

    workplace: an empty folder for DICOM series converted to NIfTI; login: of archives, see `open_archive`.
    """
    found = FoundScans()
    single: list[Path] = []
    for said in inputs:
        given = Path(said)
        try:
            if str(said).startswith(("https://", "http://")):
                add_study(str(said), workplace, found, login)
            elif given.is_dir():
                add_folder(given, layout, workplace, found)
            elif not given.exists():
                link = "is a broken link" if given.is_symlink() else "does not exist"
                found.refuse(given, f"{given} {link}.")
            elif given.suffix.lower() == ".zip":
                add_zip(given, layout, workplace, found)
            elif given.suffix.lower() in LISTS:
                add_list(given, layout, found)
            else:
                single.append(given)
        except DataError as error:
            found.refuse(given, str(error))
        except OSError as error:
            found.refuse(given, f"{given} cannot be read: {error.strerror or error}.")
    add_files(single, layout, found)
    return replace(found, scans=make_names_unique(deduplicate(found.scans), found))


def add_files(files: Sequence[Path], layout: Layout, found: FoundScans) -> None:
    """Single files, joined where their names mark them as channels of one scan."""
    cases: dict[tuple[Path, str, str], dict[int, Path]] = {}
    for file in files:
        if not has_known_ending(file):
            if is_dicom(file):
                found.refuse(file, f"{file} is one DICOM file; give the folder of its series.")
            else:
                found.refuse(file, f"{file} is not a format that wardround reads ({', '.join(ENDINGS)}).")
            continue
        stem = stem_of(file.name) or file.name
        channel = layout.parse_channel(stem) if layout.channels > 1 else None
        if channel is None:
            found.scans.append(Scan((file,), name_mask(file.name), str(file)))
            continue
        case, number = channel
        ending = file.name[len(stem) :]
        cases.setdefault((file.parent, case, ending), {})[number] = file
    for (folder, case, ending), parts in cases.items():
        where = str(folder / f"{case}{ending}")
        ordered = tuple(parts[number] for number in sorted(parts))
        places: Places = ()
        if layout.lacking and max(parts) < layout.channels:
            places = tuple(sorted(parts).index(n) if n in parts else -1 for n in range(layout.channels))
        if set(parts) == set(range(layout.channels)):
            found.scans.append(Scan(ordered, name_mask(f"{case}{ending}"), where))
        elif len(parts) == 1:  # the suffix may belong to its name; reading the file will show
            (file,) = parts.values()
            found.scans.append(
                Scan((file,), name_mask(file.name), str(file), places=places, is_guess=bool(places))
            )
        elif places:
            found.scans.append(Scan(ordered, name_mask(f"{case}{ending}"), where, places=places))
        else:
            has = ", ".join(file.name for _, file in sorted(parts.items()))
            found.refuse(where, f"{where}: there are {has}, but this run needs {layout.describe()}.")


def add_folder(
    folder: Path, layout: Layout, workplace: Path, found: FoundScans, *, deeper: bool = True
) -> None:
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    scans = [path for path in files if has_known_ending(path) and not path.is_dir()]
    scans = [path for path in scans if not path.name.lower().endswith(nrrd.SEGMENTATION)]
    if scans:
        add_files(scans, layout, found)
        return
    if any(is_dicom(path) for path in files if path.is_file()) or (not deeper and holds_dicom(folder)):
        add_series(folder, workplace, found)
        return
    if (folder / "images").is_dir():  # a centre's folder, as wardround and its readers know it
        add_folder(folder / "images", layout, workplace, found, deeper=deeper)
        return
    folders = [path for path in files if path.is_dir() and not NOT_SCANS.match(path.name)] if deeper else []
    before = len(found.scans), len(found.problems)
    for inner in folders:
        centre = inner / "images" if (inner / "images").is_dir() else inner
        if any(has_known_ending(path) for path in centre.iterdir()) or holds_dicom(centre):
            add_folder(centre, layout, workplace, found, deeper=False)
    if (len(found.scans), len(found.problems)) == before:
        seen = join_names([path.name for path in files]) or "nothing"
        raise DataError(
            f"{folder} holds no scans ({', '.join(ENDINGS)}, or a DICOM series). It holds: {seen}."
        )


def add_series(folder: Path, workplace: Path, found: FoundScans, where: Path | str | None = None) -> None:
    """Every series of a folder, converted as by `data import-dicom`; where: how messages call it."""
    target = workplace / f"series-{len(list(workplace.iterdir()))}"
    where = where or folder
    imported = import_dicom(folder, target, by_folders=True)
    for note in imported.notes:
        found.refuse(where, f"{where}: {note}")
    for path in imported.written:
        stem = stem_of(path.name) or path.name
        series = imported.volumes[stem].files if stem in imported.volumes else ()
        found.scans.append(Scan((path,), name_mask(path.name), str(where), tuple(series)))


def add_study(address: str, workplace: Path, found: FoundScans, login: Path | None) -> None:
    """Every series of a study in an archive; its files are thrown away after use."""
    parts = STUDY.fullmatch(address)
    if parts is None:
        raise DataError(f"{address} is not a study of an archive: https://<archive>/studies/<its UID>")
    folder = workplace / f"study-{len(list(workplace.iterdir()))}" / parts["study"]
    download(open_archive(parts["archive"], login), parts["study"], folder, only=parts["series"])
    if not folder.exists():
        raise DataError(f"{address} has no series.")
    add_series(folder, workplace, found, address)


def add_zip(path: Path, layout: Layout, workplace: Path, found: FoundScans) -> None:
    """What a zip holds: DICOM series wherever they lie in it, or the scans of a folder."""
    folder = workplace / f"zip-{len(list(workplace.iterdir()))}" / path.stem
    try:
        with zipfile.ZipFile(path) as packed:
            if sum(member.file_size for member in packed.infolist()) > MOST_UNPACKED:
                raise DataError(f"{path} would unpack to more than {MOST_UNPACKED >> 30} GiB.")
            packed.extractall(folder)  # which keeps every file below the folder
    except (zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, EOFError) as error:
        raise DataError(f"{path} cannot be unpacked: {str(error).rstrip('.')}.") from None
    if any(is_dicom(file) for file in folder.rglob("*")):
        add_series(folder, workplace, found, path)
    else:
        add_folder(folder, layout, workplace, found)


def add_list(path: Path, layout: Layout, found: FoundScans) -> None:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()[:MOST_LINES]
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a text file; a list names one scan per line.") from None
    numbered = [(n, line.strip()) for n, line in enumerate(lines, start=1)]
    numbered = [(n, line) for n, line in numbered if line and not line.startswith("#")]
    if not numbered:
        raise DataError(f"{path} is empty; a list names one scan per line.")
    listed = [(n, [path.parent / part.strip() for part in line.split("\t")]) for n, line in numbered]
    if not any(all(file.exists() for file in files) for _, files in listed):
        number, line = numbered[0]
        raise DataError(
            f"{path} is read as a list of scans, but line {number} ('{line[:60]}') is not a file."
        )
    for number, files in listed:
        where = f"{path}, line {number}"
        missing = [file for file in files if not file.is_file()]
        if missing:
            reason = "is a folder; a list names files" if missing[0].is_dir() else "does not exist"
            found.refuse(where, f"{where}: {missing[0]} {reason}.")
        elif len(files) == 1:
            add_files(files, Layout(1), found)
        else:
            marks = [layout.parse_channel(stem_of(file.name) or file.name) for file in files]
            numbers = [mark[1] for mark in marks if mark is not None and mark[1] < layout.channels]
            places: Places = ()
            if layout.lacking and len(set(numbers)) == len(files) < layout.channels:
                places = tuple(numbers.index(n) if n in numbers else -1 for n in range(layout.channels))
            found.scans.append(Scan(tuple(files), name_mask(find_common_name(files)), where, places=places))


def find_common_name(files: Sequence[Path]) -> str:
    """The common start of the names of a scan's channels, or the first name."""
    stems = [stem_of(file.name) or file.name for file in files]
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*stems, strict=False))
    shared = "".join(letters[0] for letters in same).rstrip("_-. 0")
    ending = files[0].name[len(stems[0]) :]
    return f"{shared or stems[0]}{ending}"


def name_mask(name: str) -> str:
    """The file name of a scan's mask: the scan's, with an extension that stores class values exactly."""
    lower = name.lower()
    if lower.endswith((*NIFTI, ".mha", ".png", ".tif", ".tiff")):
        return name
    stem = stem_of(name) or name
    if lower.endswith(nrrd.ENDINGS):
        return f"{stem}{nrrd.SEGMENTATION}"
    if lower.endswith(metaimage.ENDINGS):
        return f"{stem}.mha"
    return f"{stem}.npy" if lower.endswith(NUMPY) else f"{stem}.png"


def name_in_format(found: FoundScans, to: Format) -> FoundScans:
    """The scans with the file names of masks in another format; pictures and arrays are refused."""
    named = FoundScans(problems=list(found.problems))
    for scan in found.scans:
        ending = FORMATS[to]
        if ending in DICOM and not scan.series:
            named.refuse(scan.where, f"{scan.where} is no DICOM volume, to which a mask as {to} would refer.")
        elif scan.files[0].name.lower().endswith(WITH_GEOMETRY):
            named.scans.append(replace(scan, name=f"{scan.stem}{ending}"))
        else:
            named.refuse(
                scan.where, f"{scan.where} is a picture or an array: no mask as {to}. Leave out --to."
            )
    return named


def deduplicate(scans: Sequence[Scan]) -> list[Scan]:
    """A file given twice is one scan."""
    unique = {tuple(file.resolve() for file in scan.files): scan for scan in reversed(scans)}
    return list(unique.values())[::-1]


def make_names_unique(scans: Sequence[Scan], found: FoundScans) -> list[Scan]:
    """Prefix scans of equal name with their folders; refuse those that still share a name."""
    new: dict[int, Scan] = {}
    for places in group_by_mask(scans).values():
        together = [scans[place] for place in places]
        new |= zip(places, add_prefixes(together) if len(together) > 1 else together, strict=True)
    scans = [new[place] for place in range(len(scans))]
    groups = group_by_mask(scans)
    kept: list[Scan] = []
    for place, scan in enumerate(scans):
        others = [scans[other] for other in groups[mask_key(scan)] if other != place]
        if others:
            found.refuse(
                scan.where,
                f"{scan.where} and {others[0].where} would both become {scan.name}; "
                "predict them into two folders.",
            )
        else:
            kept.append(scan)
    return kept


def group_by_mask(scans: Sequence[Scan]) -> dict[str, list[int]]:
    """Positions of scans, grouped by the file name of their masks."""
    groups: dict[str, list[int]] = {}
    for place, scan in enumerate(scans):
        groups.setdefault(mask_key(scan), []).append(place)
    return groups


def mask_key(scan: Scan) -> str:
    """Equal for masks, and maps beside them, that would share a file name (on any file system)."""
    return scan.stem.casefold()


def add_prefixes(scans: Sequence[Scan]) -> list[Scan]:
    """Scans of equal name with as many folder names in front as distinguish them.

    The nearest folders are tried first; a level with one name for all, such as `images`, is skipped.
    """
    homes = [scan.files[0].resolve().parent.parts[:0:-1] for scan in scans]  # nearest first, no root
    levels = list(itertools.zip_longest(*homes, fillvalue=""))
    telling = [level for level in levels if len(set(level)) > 1] or levels[:1]
    fronts = [""] * len(scans)
    for many in range(1, len(telling) + 1):
        fronts = ["_".join(filter(None, parts)) for parts in zip(*telling[many - 1 :: -1], strict=True)]
        if len({front.casefold() for front in fronts}) == len(set(homes)):
            break
    return [
        replace(scan, name=f"{front}_{scan.name}") if front else scan
        for scan, front in zip(scans, fronts, strict=True)
    ]
