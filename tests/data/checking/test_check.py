"""The check before training: every broken case is found and named, every healthy one stays."""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import SHARED

from data.checking.broken_files import (
    KINDS,
    UNUSUAL,
    affine_of,
    bomb,
    make_case,
    make_federation,
    save_nifti,
    save_png,
    scan,
)
from wardround.data.checking import facts
from wardround.data.checking.check import check, check_quickly
from wardround.data.checking.findings import CheckReport
from wardround.data.federation_file import FederationFile, PrepareSettings, Source, SplitSettings
from wardround.data.listing import Entry, Listing
from wardround.data.sources import list_cases


def file_with(**settings: Any) -> FederationFile:
    return FederationFile(sources=(Source(path=Path("data")),), **settings)


def entry(folder: Path, client: str, case: str, seed: int = 0, **changes: Any) -> Entry:
    """A healthy case on disk; image, label: other voxels; affine: of both."""
    image, label = scan(seed)
    image, label = changes.pop("image", image), changes.pop("label", label)
    affine = changes.pop("affine", affine_of())
    paths = [folder / client / part / f"{case}.nii.gz" for part in ("images", "labels")]
    save_nifti(paths[0], image, affine)
    save_nifti(paths[1], label, affine)
    made = Entry(client, case, (paths[0],), paths[1], group=case, split="train")
    return replace(made, **changes)


def checked(entries: list[Entry], file: FederationFile | None = None, **settings: Any) -> CheckReport:
    return check(Listing("test", tuple(entries)), file or file_with(), **settings)


def codes(report: CheckReport) -> list[tuple[str, str]]:
    return sorted((found.code, found.severity) for found in report.findings)


def names(entries: tuple[Entry, ...]) -> list[str]:
    return [one.name for one in entries]


# One case


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> CheckReport:
    """Twelve healthy cases and one of every broken kind, checked together."""
    folder = tmp_path_factory.mktemp("ward")
    entries = [entry(folder, "north", f"healthy {n}", n) for n in range(12)]
    for number, (kind, how) in enumerate(KINDS.items()):
        image, label = make_case(folder, "north", f"broken {number}", 100 + number)
        how.breaks(image, label)
        entries.append(Entry("north", kind, (image,), label, kind, "train"))
    return checked(entries, file_with(labels={"box": (1,)}), jobs=2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_broken_kind_is_found_and_left_out(ward: CheckReport, kind: str) -> None:
    (case,) = [one for one in ward.left_out if one.name == kind]
    (reason,) = ward.reasons(case)
    assert reason.code == KINDS[kind].code
    assert reason.sentence.startswith(f"client 'north', case '{kind}': ")
    assert reason.sentence.endswith(".")


def test_healthy_cases_stay(ward: CheckReport) -> None:
    assert names(ward.usable) == [f"healthy {n}" for n in range(12)]
    assert len(ward.left_out) == len(KINDS)
    assert not ward.ok


def test_a_healthy_federation_has_no_findings(tmp_path: Path) -> None:
    make_federation(tmp_path / "data", clients=3, cases=4)
    file = FederationFile(sources=(Source(path=Path("data")),), labels={"box": (1,)})
    report = check(list_cases(file, tmp_path), file, base=tmp_path)
    assert report.findings == ()
    assert report.ok
    assert {one.split for one in report.usable} == {"train", "val", "test"}
    assert report.sentences() == []
    assert "No findings" in report.table().caption


@pytest.mark.parametrize("name", UNUSUAL)
def test_spaces_and_unicode_in_paths_work(tmp_path: Path, name: str) -> None:
    report = checked([entry(tmp_path / name, f"ward {name}", name, 1), entry(tmp_path, "south", "plain", 2)])
    assert [code for code, _ in codes(report)] == ["one_patient", "one_patient"]
    assert len(report.usable) == 2


def test_a_tiny_difference_of_affines_is_repaired(tmp_path: Path) -> None:
    cases = [entry(tmp_path, "north", f"c{n}", n) for n in range(3)]
    for case, apart in zip(cases, (1e-7, 5e-4, 2e-3), strict=True):
        assert case.label is not None
        save_nifti(case.label, scan(0)[1], affine_of((1 + apart, 1, 1)))
    report = checked(cases)
    assert [(f.case, f.severity) for f in report.findings] == [("c1", "repaired"), ("c2", "error")]
    assert names(report.usable) == ["c0", "c1"]


def test_a_case_without_label_is_an_error(tmp_path: Path) -> None:
    report = checked(
        [*(entry(tmp_path, "north", name, n) for n, name in enumerate("ab")), without_label(tmp_path)]
    )
    assert [(f.case, f.code, f.severity) for f in report.findings] == [("bare", "no_label", "error")]


def test_a_case_without_label_trains_where_the_file_says_so_and_is_never_tested(tmp_path: Path) -> None:
    bare = without_label(tmp_path)
    cases = [entry(tmp_path, "north", "a", 1), bare, replace(bare, name="tested", group="t", split="test")]
    cases[2] = replace(cases[2], images=entry(tmp_path, "north", "tested", 7).images)
    report = checked(cases, file_with(unlabelled=("north",)))
    found = [(f.case, f.code, f.severity) for f in report.findings]
    assert found == [("tested", "no_label", "error"), ("", "unlabelled", "warning")]
    assert names(report.usable) == ["a", "bare"]
    assert "1 of 2 usable cases have no label" in report.findings[1].sentence


def without_label(folder: Path) -> Entry:
    return replace(entry(folder, "north", "bare", 5), label=None)


def test_warnings_keep_the_case(tmp_path: Path) -> None:
    thick = affine_of((1, 1, 2.5))
    report = checked(
        [
            entry(tmp_path, "north", "blank label", 1, label=np.zeros((12, 10, 8), np.uint8)),
            entry(tmp_path, "north", "constant", 2, image=np.full((12, 10, 8), 7.0, np.float32)),
            entry(
                tmp_path,
                "north",
                "tiny",
                image=scan(3, (12, 10, 3))[0],
                label=scan(3, (12, 10, 3))[1],
                affine=thick,
            ),
        ]
    )
    assert codes(report) == [("constant", "warning"), ("no_foreground", "warning"), ("tiny", "warning")]
    assert len(report.usable) == 3
    assert report.ok


def test_one_constant_channel_is_named(tmp_path: Path) -> None:
    image = np.stack([scan(1)[0], np.zeros((12, 10, 8), np.float32)], axis=-1)
    report = checked([entry(tmp_path, "north", f"c{n}", image=image + n) for n in range(2)])
    assert "image's channel 1 is 0 everywhere" in report.findings[0].sentence


def test_channels_are_those_of_the_file_else_of_most(tmp_path: Path) -> None:
    two = np.stack([scan(9)[0]] * 2, axis=-1)
    cases = [entry(tmp_path, "north", f"c{n}", n) for n in range(2)]
    cases.append(entry(tmp_path, "north", "two", image=two))
    assert names(checked(cases).left_out) == ["two"]
    report = checked(cases, file_with(channels=("t1", "t2")))
    assert names(report.left_out) == ["c0", "c1"]
    assert "1 channel; federation.yaml names t1, t2: 2." in report.findings[0].sentence


# Label values


def labelled(folder: Path, case: str, *values: int) -> Entry:
    label = np.zeros((12, 10, 8), np.uint8)
    for place, value in enumerate(values):
        label[place] = value
    return entry(folder, "north", case, len(case) + sum(values), label=label)


def test_a_value_most_cases_have_beside_a_class_is_background(tmp_path: Path) -> None:
    cases = [labelled(tmp_path, f"c{n}", 1, 2, *([3] if n == 0 else [])) for n in range(5)]
    report = checked(cases, file_with(labels={"tumour": (1,)}))
    assert names(report.left_out) == ["c0"]
    (told,) = [f for f in report.findings if f.code == "background_value"]
    assert told.sentence.startswith("Label value 2 is in 5 cases")
    assert report.background == (2,)


@pytest.mark.parametrize("said_by", ["federation.yaml", "the reader"])
def test_voxels_to_ignore_are_never_background_and_a_case_without_others_is_left_out(
    tmp_path: Path, said_by: str
) -> None:
    entries = [labelled(tmp_path, case, 1, 4) for case in "abc"] + [labelled(tmp_path, "d", 1)]
    entries.append(labelled(tmp_path, "e", *[4] * 12))
    file = file_with(labels={"lesion": (1,)}, ignore=(4,) if said_by == "federation.yaml" else ())
    told = () if said_by == "federation.yaml" else (4,)
    report = check(Listing("test", tuple(entries), ignore=told), file)
    assert names(report.usable) == ["a", "b", "c", "d"] and report.background == ()
    assert [found.code for found in report.findings if found.severity == "error"] == ["ignored_voxels"]
    assert "all voxels of the label are to be ignored (value 4)" in report.findings[0].sentence


def test_a_mask_of_255_where_1_is_meant_is_an_error_everywhere(tmp_path: Path) -> None:
    report = checked([labelled(tmp_path, f"c{n}", 255) for n in range(4)], file_with(labels={"polyp": (1,)}))
    assert report.usable == ()
    assert ("nothing_left", "error") in codes(report)
    assert "the label has the value 255; federation.yaml names 1." in report.findings[0].sentence


def test_without_a_label_map_any_few_values_will_do(tmp_path: Path) -> None:
    cases = [labelled(tmp_path, f"c{n}", 1, 5, 200) for n in range(3)]
    assert checked(cases).ok
    cases.append(entry(tmp_path, "north", "wide", 4, label=scan(4)[1].astype(np.int16) * 300))
    assert names(checked(cases).left_out) == ["wide"]


def test_a_class_of_value_0_that_leaves_no_background_is_told(tmp_path: Path) -> None:
    cases = [entry(tmp_path, "north", f"p{n}", n) for n in range(2)]
    report = checked(cases, file_with(labels={"tissue": (0,), "box": (1,)}))
    assert codes(report) == [("no_background", "warning")]
    assert "value 0 is class 'tissue'" in report.sentences()[0] and "leave it out" in report.sentences()[0]
    image, label = scan(7)
    label[label == 0] = 255
    other = entry(tmp_path, "north", "inverse", label=label, image=image)
    assert not checked([other, *cases], file_with(labels={"tissue": (0,), "box": (1,)})).count("warning", "")


# What is cut off


@pytest.mark.parametrize("crop", ["none", "foreground"])
def test_labels_that_a_size_cuts_off_are_told_for_each_case(tmp_path: Path, crop: str) -> None:
    image = np.random.default_rng(0).normal(size=(24, 24, 24)).astype(np.float32)
    middle, edge = np.zeros((2, 24, 24, 24), np.uint8)
    middle[10:14, 10:14, 10:14], edge[12:, 10:14, 10:14] = 1, 1
    cases = [
        entry(tmp_path, "north", "p01", image=image, label=edge),
        entry(tmp_path, "north", "p02", image=image + 1, label=middle),
    ]
    prepare = PrepareSettings(spacing=(1.0, 1.0, 1.0), size=(12, 12, 12), crop=crop)
    report = checked(cases, file_with(labels={"box": (1,)}, prepare=prepare), jobs=2)
    (found,) = report.findings
    assert (found.case, found.code, found.severity) == ("p01", "cut_off", "warning")
    assert found.sentence == (
        "client 'north', case 'p01': prepare.size cuts off 50 % of what is labelled; raise it."
    )
    assert "labelled voxels cut off 1" in report.summary() and report.ok
    for harmless in ({"size": (24, 24, 24)}, {"spacing": None}, {"spacing": (2.0, 2.0, 2.0)}, {"size": None}):
        changed = file_with(labels={"box": (1,)}, prepare=prepare.model_copy(update=harmless))
        assert not checked(cases, changed).findings


# Splits


def test_a_patient_in_two_splits_stays_in_test(tmp_path: Path) -> None:
    splits = {"a": "train", "b": "test", "c": "val", "d": "train"}
    cases = [
        entry(tmp_path, "north", name, n, split=split, group="other" if name == "d" else "p1")
        for n, (name, split) in enumerate(splits.items())
    ]
    report = checked(cases)
    assert names(report.usable) == ["b", "d"]
    assert [f.code for f in report.findings if f.severity == "error"] == ["leak", "leak"]
    assert "patient 'p1' is in train and, as case 'b', in test" in report.findings[0].sentence


def test_a_leak_of_the_list_does_not_stop_the_drawing_of_splits(tmp_path: Path) -> None:
    folder = make_federation(tmp_path / "data", clients=1, cases=8)
    with (folder / "index.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("centre", "stem", "patient", "split"))
        for n in range(8):
            rows.writerow(("site0", f"s0c{n:02}", f"p{n // 2}", ("train", "test", "", "", "", "", "", "")[n]))
    file = FederationFile(sources=(Source(path=Path("data")),))
    report = check(list_cases(file, tmp_path), file, base=tmp_path)
    assert [(f.case, f.code) for f in report.findings] == [("s0c00", "leak")]
    assert len(report.usable) == 7
    assert all(one.split is not None for one in report.usable)
    assert check_quickly(list_cases(file, tmp_path), file, base=tmp_path).usable == report.usable


def test_a_list_of_splits_that_is_not_used_cannot_leak(tmp_path: Path) -> None:
    cases = [entry(tmp_path, "north", f"c{n}", n, group="p" + str(n // 2), split="train") for n in range(6)]
    cases[0] = replace(cases[0], split="test")
    report = checked(cases, file_with(splits=SplitSettings(by="ratios")), base=tmp_path)
    assert report.findings == ()
    assert report.usable[0].split == report.usable[1].split


# Identical images


def test_copies_in_one_split_are_told(tmp_path: Path) -> None:
    report = checked([entry(tmp_path, "north", name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))])
    assert [(f.case, f.code, f.severity) for f in report.findings] == [("b", "duplicate", "warning")]
    assert "identical to that of case 'a'." in report.findings[0].sentence
    assert len(report.usable) == 3


def test_a_copy_of_a_test_image_is_not_trained_on(tmp_path: Path) -> None:
    cases = [
        entry(tmp_path, "north", "a", 1, split="train"),
        entry(tmp_path, "north", "b", 2, split="train"),
        entry(tmp_path, "south", "c", 1, split="test"),
        entry(tmp_path, "south", "d", 1, split="val"),
        entry(tmp_path, "south", "e", 3, split="train"),
    ]
    report = checked(cases)
    errors = [(f.client, f.case, f.code) for f in report.findings if f.severity == "error"]
    assert errors == [("south", "d", "duplicate_leak"), ("north", "a", "duplicate_leak")]
    assert names(report.usable) == ["b", "c", "e"]


def test_a_copy_of_a_broken_test_image_stays(tmp_path: Path) -> None:
    cases = [entry(tmp_path, "north", f"c{n}", 1, split="test" if n else "train") for n in range(2)]
    KINDS["label of another shape"].breaks(cases[1].images[0], cases[1].label or Path())
    report = checked(cases)
    assert names(report.usable) == ["c0"]


def test_copies_are_seen_through_compression_and_told_of_other_labels(tmp_path: Path) -> None:
    one, two = entry(tmp_path, "north", "a", 1), entry(tmp_path, "north", "b", 1, label=scan(1)[1] * 2)
    two.images[0].write_bytes(gzip.compress(gzip.decompress(two.images[0].read_bytes()), 9, mtime=77))
    assert "(with another label)" in checked([one, two]).findings[0].sentence


def test_constant_images_are_not_called_copies(tmp_path: Path) -> None:
    blank = np.zeros((12, 10, 8), np.float32)
    report = checked([entry(tmp_path, "north", f"c{n}", image=blank) for n in range(2)])
    assert {f.code for f in report.findings} == {"constant"}


def test_copies_without_a_split_get_advice(tmp_path: Path) -> None:
    report = checked([entry(tmp_path, "north", name, 1, split=None) for name in "ab"])
    assert report.findings[0].sentence.endswith("Give both one patient, so that no split parts them.")


# Across clients


def two_clients(folder: Path, **of_south: Any) -> list[Entry]:
    cases = [entry(folder, "north", f"n{n}", n) for n in range(3)]
    return cases + [entry(folder, "south", f"s{n}", 10 + n, **of_south) for n in range(3)]


def test_a_class_only_one_client_has_is_told(tmp_path: Path) -> None:
    report = checked(two_clients(tmp_path, label=scan(1)[1] * 2))
    assert [(f.client, f.code) for f in report.findings] == [
        ("south", "class_absent"),
        ("north", "class_absent"),
    ]
    report = checked(two_clients(tmp_path), file_with(labels={"box": (1,), "core": (2,)}))
    assert [found.code for found in report.findings] == ["class_nowhere"]  # nobody has it: nothing differs


def test_labels_that_annotates_leaves_out_are_told(tmp_path: Path) -> None:
    labels = {"box": (1,), "core": (2,)}
    cores = two_clients(tmp_path, label=scan(1)[1] * 2)
    told = {"north": ("box",), "south": ("box",)}
    report = checked(cores, file_with(labels=labels, annotates=told))
    assert ("south", "class_hidden") in [(f.client, f.code) for f in report.findings]
    whole = {"north": ("box",), "south": ("all",)}  # the core is part of what south outlines
    regions = {"all": (1, 2), **{name: (n,) for n, name in enumerate(labels, 1)}}
    report = checked(cores, file_with(labels=labels, annotates=whole, regions=regions))
    assert "class_hidden" not in [f.code for f in report.findings]


def test_spacing_and_intensity_that_differ_manyfold_are_told_with_medians(tmp_path: Path) -> None:
    cases = two_clients(tmp_path, affine=affine_of((1, 1, 5)))
    for number, case in enumerate(cases[3:]):
        save_nifti(case.images[0], scan(50 + number)[0] * 100, affine_of((1, 1, 5)))
    report = checked(cases)
    told = {f.code: f.sentence for f in report.findings}
    assert set(told) == {"spacing", "intensity"}
    assert "north 1x1x1, south 1x1x5" in told["spacing"]
    assert "zscore evens that out" in told["intensity"]
    none = file_with(prepare=PrepareSettings(normalise="none"))
    assert "normalise: none keeps that" in checked(cases, none).findings[-1].sentence


def test_spacing_is_compared_whatever_the_direction_of_the_scan(tmp_path: Path) -> None:
    cases = [entry(tmp_path, "north", f"n{n}", n, affine=affine_of((1, 1, 5))) for n in range(3)]
    cases += [entry(tmp_path, "south", f"s{n}", 10 + n, affine=affine_of((5, 1, 1))) for n in range(3)]
    assert checked(cases).findings == ()


def channelled(folder: Path, client: str, factors: tuple[float, ...]) -> list[Entry]:
    cases = []
    for n in range(4):
        image, _ = scan(10 * len(client) + n)
        cases.append(
            entry(folder, client, f"{client}{n}", image=np.stack([image * f for f in factors], axis=-1))
        )
    return cases


def test_another_order_of_channels_is_suspected_softly(tmp_path: Path) -> None:
    usual = channelled(tmp_path, "a", (1, 2, 4)) + channelled(tmp_path, "be", (1, 2, 4))
    report = checked(usual + channelled(tmp_path, "cee", (4, 2, 1)))
    (told,) = report.findings
    assert (told.client, told.code, told.severity) == ("cee", "channel_order", "warning")
    assert "2, 1, 0, elsewhere mostly 0, 1, 2. They may be stored" in told.sentence


def test_channels_of_equal_brightness_have_no_order(tmp_path: Path) -> None:
    assert checked(channelled(tmp_path, "a", (1, 1)) + channelled(tmp_path, "be", (1, 1.0001))).findings == ()


def test_unit_spacing_with_very_different_extents_is_suspected(tmp_path: Path) -> None:
    cases = []
    for n, slices in enumerate((8, 12, 30)):
        image, label = scan(n, (12, 10, slices))
        cases.append(entry(tmp_path, "north", f"c{n}", image=image, label=label))
    report = checked(cases)
    assert codes(report) == [("unit_spacing", "warning")]
    assert "12x10x8 to 12x10x30" in report.findings[0].sentence


def test_patients_at_two_clients_are_told_once(tmp_path: Path) -> None:
    cases = two_clients(tmp_path)
    named = [replace(case, group=f"patient {n % 3}") for n, case in enumerate(cases)]
    (told,) = checked(named).findings
    assert told.sentence.startswith("3 patient names are at more than one client: 'patient 0' (north, south)")


def test_cases_that_are_only_numbered_alike_are_not_patients_at_two_clients(tmp_path: Path) -> None:
    cases = [
        entry(tmp_path, client, f"case_{n}", 10 * len(client) + n) for client in ("a", "bb") for n in range(5)
    ]
    assert checked(cases).findings == ()


def test_a_few_names_in_common_are_told_even_without_patients(tmp_path: Path) -> None:
    cases = [
        entry(tmp_path, client, f"{client}{n}", 10 * len(client) + n)
        for client in ("a", "bb")
        for n in range(5)
    ]
    cases += [entry(tmp_path, client, "TCGA_1", 90 + len(client)) for client in ("a", "bb")]
    assert codes(checked(cases)) == [("shared_patient", "warning")]


def test_a_client_without_training_cases_or_with_one_patient_is_told(tmp_path: Path) -> None:
    cases = two_clients(tmp_path)
    cases.append(entry(tmp_path, "west", "w", 70, split="test"))
    assert codes(checked(cases)) == [("no_training", "warning"), ("one_patient", "warning")]
    report = checked(cases, file_with(held_out=("west",)))
    assert codes(report) == [("one_patient", "warning")]
    assert "its score rests on that one" in report.findings[0].sentence


# Pictures


def picture(folder: Path, case: str, seed: int, shape: tuple[int, ...] = (20, 16, 3)) -> Entry:
    draw = np.random.default_rng(seed)
    image = save_png(folder / "images" / f"{case}.png", draw.integers(0, 255, shape).astype(np.uint8))
    label = save_png(folder / "labels" / f"{case}.png", np.eye(20, 16, dtype=np.uint8))
    return Entry("north", case, (image,), label, case, "train")


def test_a_grey_picture_among_colours_and_a_bomb_are_left_out(tmp_path: Path) -> None:
    cases = [picture(tmp_path, f"c{n}", n) for n in range(3)]
    cases += [
        picture(tmp_path, "grey", 7, (20, 16)),
        picture(tmp_path, "bomb", 8),
        picture(tmp_path, "text", 9),
    ]
    bomb(cases[-2].images[0])
    cases[-1].images[0].write_text("not a picture")
    report = checked(cases, jobs=2)
    assert [(f.case, f.code) for f in report.findings] == [
        ("grey", "channels"),
        ("bomb", "unreadable"),
        ("text", "unreadable"),
    ]
    assert "exceeds limit" in report.findings[1].sentence
    assert names(report.usable) == ["c0", "c1", "c2"]


# How it is done


def test_threads_change_nothing_and_progress_is_told(tmp_path: Path) -> None:
    cases = two_clients(tmp_path, label=scan(1)[1] * 2)
    KINDS["truncated gzip"].breaks(cases[2].images[0], Path())
    facts._remembered.clear()
    alone = checked(cases)
    facts._remembered.clear()
    done: list[tuple[int, int]] = []
    together = checked(cases, jobs=3, watch=lambda now, of, which: done.append((now, of)))
    assert together.findings == alone.findings
    assert done == [(n, 6) for n in range(1, 7)]


def test_facts_are_remembered_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [entry(tmp_path, "north", f"c{n}", n) for n in range(3)]
    opened: list[str] = []
    read = facts.read_image

    def counted(paths: Any) -> Any:
        opened.append(paths[0].name)
        return read(paths)

    monkeypatch.setattr(facts, "read_image", counted)
    checked(cases)
    checked(cases)
    assert len(opened) == 3
    save_nifti(cases[1].images[0], scan(77, (12, 10, 9))[0])
    assert names(checked(cases).left_out) == ["c1"]
    assert opened[3:] == ["c1.nii.gz"]


@pytest.mark.parametrize(
    "error", [MemoryError(), RecursionError("too deep"), KeyError("x"), ValueError("null\0byte")]
)
def test_what_no_reader_foresaw_is_one_bad_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    cases = [entry(tmp_path, "north", f"c{n}", n) for n in range(3)]
    read = facts.read_image

    def failing(paths: Any) -> Any:
        if paths[0].name.startswith("c1"):
            raise error
        return read(paths)

    monkeypatch.setattr(facts, "read_image", failing)
    report = checked(cases)
    assert names(report.left_out) == ["c1"]
    assert type(error).__name__ in report.findings[0].sentence


def test_an_empty_listing_is_checked() -> None:
    report = checked([])
    assert report.ok
    assert report.table().rows == []
    assert report.as_dict()["cases"] == 0


def test_quick_finds_what_needs_no_decoding(tmp_path: Path) -> None:
    kinds = ["0 bytes", "symlink loop", "dangling link", "folder", "0 bytes label", "NaN"]
    cases = []
    for number, kind in enumerate(kinds):
        image, label = make_case(tmp_path, "north", f"c{number}", number)
        KINDS[kind].breaks(image, label)
        cases.append(Entry("north", kind, (image,), label, kind, "train"))
    cases += [without_label(tmp_path), replace(cases[-1], name="leak", group="NaN", split="test")]
    report = check_quickly(Listing("test", tuple(cases)), file_with())
    found = {f.case: f.code for f in report.findings if f.case}
    assert found == {**{kind: KINDS[kind].code for kind in kinds[:5]}, "bare": "no_label", "NaN": "leak"}
    assert names(report.usable) == ["leak"]
    assert report.table().rows[0][6:] == ["", "", "", ""]


# The report


def test_the_most_serious_and_every_kind_come_first(ward: CheckReport) -> None:
    lines = ward.sentences(5)
    assert len(lines) == 6
    assert all(one.startswith("error: ") for one in lines[:5])
    assert lines[5] == f"... and {len(ward.findings) - 5} more"
    kinds = {found.code for found in ward.findings if found.severity == "error"}
    first = ward.sentences(len(kinds))[:-1]
    by_sentence = {f"error: {found.sentence}": found.code for found in ward.findings}
    assert {by_sentence[one] for one in first} == kinds
    assert len(ward.sentences(1000)) == len(ward.findings)


def test_the_report_is_json(ward: CheckReport) -> None:
    plain = json.loads(json.dumps(ward.as_dict(), allow_nan=False))
    assert plain["cases"] == 12 + len(KINDS)
    assert plain["usable"] == 12
    assert {"client": "north", "case": "NaN", "reasons": ["not_finite"]} in plain["left_out"]
    assert len(plain["findings"]) == plain["counts"]["error"] + plain["counts"]["warning"]
    assert set(plain["findings"][0]) == {"client", "case", "code", "severity", "sentence"}


def test_the_table_has_a_row_for_each_client(ward: CheckReport, tmp_path: Path) -> None:
    (row,) = ward.table().rows
    assert row[:4] == ["north", 12 + len(KINDS), f"{12 + len(KINDS)}/0/0", len(KINDS)]
    assert row[6:8] == ["12x10x8", "1x1x1"]
    assert row[9] == "0, 1"
    cases = [replace(case, split=None) for case in two_clients(tmp_path)]
    assert [row[2] for row in checked(cases).table().rows] == ["0/0/0, 3 open"] * 2


def test_names_from_elsewhere_stay_on_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "x\n\x1b[31m.nii.gz"
    report = checked([Entry("no\nrth", "a\u202eb" * 300, (missing,), missing, "g", "train")])
    assert all(found.sentence.isprintable() and len(found.sentence) <= 600 for found in report.findings)


# Real data: the quirks its READMEs name

real = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not here")


def of_set(name: str, *clients: str, **settings: Any) -> CheckReport:
    file = FederationFile(sources=(Source(path=SHARED / name),), clients=clients or None, **settings)
    return check(list_cases(file, SHARED), file, base=SHARED, jobs=2)


@real
def test_repeated_frames_of_polyp4_are_found() -> None:
    report = of_set("polyp4", "cvc_colondb", "etis", labels={"polyp": (1,)})
    with (SHARED / "polyp4" / "index.csv").open() as file:
        pairs = {
            frozenset((row["stem"], row["duplicate_of"].split("/")[1]))
            for row in csv.DictReader(file)
            if row["duplicate_of"]
        }
    copies = [found for found in report.findings if found.code == "duplicate"]
    assert len(copies) == len(pairs) == 37
    assert {found.case for found in copies} <= {stem for pair in pairs for stem in pair}
    assert report.ok  # twins share a split


@real
def test_the_single_patient_and_lost_spacing_of_lgg3d_are_found() -> None:
    report = of_set("lgg3d", labels={"tumour": (1,)}, held_out=("TCGA_EZ",))
    assert [(f.client, f.code) for f in report.findings] == [("TCGA_EZ", "one_patient"), ("", "unit_spacing")]


@real
@pytest.mark.parametrize(
    ("name", "labels"), [("fundus_odoc", {"rim": (1,), "cup": (2,)}), ("hippocampus", {})]
)
def test_clean_sets_have_no_findings(name: str, labels: dict[str, tuple[int, ...]]) -> None:
    report = of_set(name, labels=labels)
    assert report.findings == ()


def test_a_class_that_no_case_has_is_a_finding(tmp_path: Path) -> None:
    entries = [entry(tmp_path, "north", f"p{seed}", seed) for seed in range(3)]
    values = {int(v) for v in np.unique(scan(0)[1])} - {0}
    report = checked(entries, file_with(labels={**{f"c{v}": (v,) for v in values}, "nowhere": (77,)}))
    said = [found.sentence for found in report.findings if found.code == "class_nowhere"]
    assert said == ["No case has class 'nowhere' (77). Correct it under labels."]
    assert "No findings" not in report.summary()


def test_notes_of_the_reader_are_not_followed_by_no_findings(tmp_path: Path) -> None:
    entries = tuple(entry(tmp_path, "north", f"p{seed}", seed) for seed in range(3))
    report = check(Listing("test", entries, notes=("8 labels have no image.",)), file_with())
    assert not report.findings and report.summary() == "3 of 3 cases are usable. See the notes."
