"""Fingerprints: nothing of a single case leaves, and the verdict says what was made to differ."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import SHARED

from wardround.data.fingerprint.case import LEVELS, measure_case
from wardround.data.fingerprint.distance import (
    ASPECTS,
    FingerprintComparison,
    compare,
    join_words,
    save_picture,
)
from wardround.data.fingerprint.hardware import describe_hardware
from wardround.data.fingerprint.measure import Fingerprint, measure_client, measure_clients, summarise
from wardround.data.listing import Entry
from wardround.data.phantom import cases as phantom
from wardround.data.phantom.cases import PhantomSettings
from wardround.data.readers.image_files import Volume, read_image, read_label
from wardround.errors import DataError

Read = Callable[[Entry], tuple[Volume, Volume | None]]


@cache
def phantoms(heterogeneity: float, dimensions: int = 2) -> FingerprintComparison:
    """Three synthetic hospitals of ten cases, compared."""
    size = 32 if dimensions == 2 else 16
    settings = PhantomSettings(heterogeneity=heterogeneity, dimensions=dimensions, size=size, cases=10)  # type: ignore[arg-type]
    scans = {}
    for index, name in enumerate(phantom.list_hospitals(settings)):
        style = phantom.make_hospital(settings, index, 0)
        for number in range(1, 11):
            scan = phantom.make_scan(settings, style, number, 0)
            scans[name, scan.name] = scan

    def read(entry: Entry) -> tuple[Volume, Volume]:
        scan = scans[entry.client, entry.name]
        image = Volume(scan.image.astype(np.float32), np.eye(4), scan.spacing)
        return image, Volume(scan.label[None].astype(np.int64), np.eye(4), scan.spacing)

    entries = [Entry(client, name, (Path("i"),), Path("l"), name) for client, name in scans]
    return compare(measure_clients(entries, read))


def made(
    client: str = "north",
    *,
    cases: int = 8,
    gain: float = 1.0,
    side: int = 8,
    spacing: float = 1.0,
    shape: tuple[int, ...] = (20, 20),
    channels: int = 1,
    affine: bool = True,
    power: float = 1.0,
    minimum: int = 5,
    label: Any = "square",
    labels: Any = None,
) -> Fingerprint:
    """A client whose cases are noise with one square each."""

    def read(entry: Entry) -> tuple[Volume, Volume | None]:
        random = np.random.default_rng(int(entry.name))
        image = gain * random.random((channels, *shape)) ** power
        mask = np.zeros((1, *shape), dtype=np.int64)
        mask[(0, *[slice(side)] * len(shape))] = 1
        where = np.eye(4) if affine else None
        drawn = mask if label == "square" else label(int(entry.name), mask) if label else None
        truth = Volume(drawn, where, (spacing,) * len(shape)) if drawn is not None else None
        return Volume(image.astype(np.float32), where, (spacing,) * len(shape)), truth

    entries = [Entry(client, str(number), (Path("i"),), Path("l"), str(number)) for number in range(cases)]
    return measure_client(entries, read, minimum=minimum, labels=labels)


# What is shared


def test_a_fingerprint_holds_counts_shapes_spacings_quantiles_and_sizes() -> None:
    found = made(spacing=0.5, channels=2)
    assert (found.cases, found.groups, len(found.intensity)) == (8, 8, 2)
    assert [axis.median for axis in found.shape] == [20, 20]
    assert [axis.means for axis in found.spacing] == [(0.5, 0.5)] * 2
    np.testing.assert_allclose(found.intensity[0].mean, np.array(LEVELS) / 100, atol=0.03)
    square = found.foreground["foreground"]
    assert square is not None
    assert square.share == 1.0
    assert (square.fraction.means, square.fraction.cases) == ((0.16, 0.16), 8)
    assert square.volume is not None
    assert square.volume.median == 16.0
    assert list(found.foreground) == ["foreground"], "one class is all there is"
    table = compare([found, made("south", shape=(41, 20), spacing=0.9375, side=16, channels=2)]).as_table()
    assert list(table.rows[1][3:6]) == ["41 x 20", "0.938 x 0.938", "225 mm²"]


def test_contrast_is_the_same_for_any_gain_and_offset() -> None:
    one, other = made(), made(gain=700)
    np.testing.assert_allclose(one.contrast[0].mean, other.contrast[0].mean, atol=0.01)


def test_volumes_are_left_out_where_files_have_no_spacing() -> None:
    square = made(affine=False).foreground["foreground"]
    assert square is not None
    assert square.volume is None


def test_few_cases_only_give_their_bracket_and_are_not_even_read() -> None:
    found = made(cases=4)
    few = "fewer than 5"
    assert found == Fingerprint(client="north", cases=few, groups=few, hardware=describe_hardware())
    assert not found.is_open
    assert made(cases=4, minimum=4).is_open


def test_many_cases_of_few_patients_are_withheld_too() -> None:
    entries = [Entry("north", str(number), (Path("i"),), None, f"p{number % 2}") for number in range(40)]

    def read(entry: Entry) -> tuple[Volume, None]:
        raise AssertionError("nothing is read")

    found = measure_client(entries, read)
    assert (found.cases, found.groups, found.shape) == ("5 or more", "fewer than 5", ())


def test_a_class_that_few_patients_have_is_not_described() -> None:
    def label(number: int, mask: Any) -> Any:
        return mask + (mask * (number < 3))  # class 2 in three cases only

    found = made(label=label, labels={"organ": (1,), "tumour": (2,)})
    assert found.foreground["tumour"] is None
    organ = found.foreground["organ"]
    assert organ is not None
    assert organ.share == 0.6, "a share to a tenth: 5 of 8"


def test_unlabelled_cases_have_no_sizes() -> None:
    assert made(label=None).foreground == {}


def test_an_empty_label_counts_as_a_case_without_the_class() -> None:
    found = made(label=lambda number, mask: mask * (number > 0))
    assert found.foreground["foreground"].share == 0.9  # type: ignore[union-attr]
    assert made(label=lambda number, mask: mask * 0).foreground == {"foreground": None}


def test_few_patients_who_lack_a_class_are_not_told_where_every_count_has_a_minimum() -> None:
    image = Volume(np.ones((1, 8, 8), dtype=np.float32), np.eye(4), (1.0, 1.0))
    cases = []
    for number in range(8):
        mask = np.zeros((1, 8, 8), dtype=np.int64)
        mask[0, : 2 + number % 2, :2] = number > 0  # one patient has nothing
        entry = Entry("north", str(number), (Path("i"),), Path("l"), str(number))
        cases.append(measure_case(entry, image, Volume(mask, np.eye(4), (1.0, 1.0))))

    usual, strict = summarise(cases, 5).foreground["foreground"], summarise(cases, 5, behind=5)
    told = strict.foreground["foreground"]

    assert usual is not None and told is not None
    assert (usual.share, told.share) == (0.9, 1.0)
    assert min(strict.count_bins()) >= 5


def test_no_names_and_no_more_than_three_digits_leave() -> None:
    found = made(gain=1234.5678)
    text = json.dumps(found.as_dict())
    assert not any(f'"{number}"' in text for number in range(8))
    assert all(float(f"{value:.3g}") == value for value in found.intensity[0].mean)
    assert Fingerprint.from_dict(json.loads(text)) == found


def test_not_a_number_voxels_are_passed_over_and_an_image_of_them_refused() -> None:
    entries = [Entry("north", str(number), (Path("i"),), None, str(number)) for number in range(5)]
    image = np.ones((1, 4, 4), dtype=np.float32)
    image[0, 0, 0] = np.nan
    found = measure_client(entries, lambda entry: (Volume(image, None, (1.0, 1.0)), None))
    assert found.intensity[0].mean == (1.0,) * len(LEVELS)
    with pytest.raises(DataError, match="client 'north', case '0': the image has no finite voxel"):
        measure_client(entries, lambda entry: (Volume(image * np.nan, None, (1.0, 1.0)), None))


def test_cases_of_other_dimensions_or_clients_are_refused() -> None:
    entries = [Entry("north", str(number), (Path("i"),), None, str(number)) for number in range(5)]
    shapes = [(1, 4, 4)] * 4 + [(3, 4, 4)]
    with pytest.raises(DataError, match="case '4' has 2 dimensions and 3 channels, but the first .* 2 and 1"):
        measure_client(entries, lambda e: (Volume(np.zeros(shapes[int(e.name)]), None, (1.0, 1.0)), None))
    with pytest.raises(DataError, match="of one client, and these cases are of 2"):
        measure_client([*entries, Entry("south", "a", (Path("i"),), None, "a")], lambda e: made)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"cases": -3},
        {"shape": []},
        {"contrast": []},
        {"client": None},
        {"cases": 5},  # fewer than its histograms are of
        {"groups": 10**6},  # patients, of fewer cases
    ],
)
def test_what_is_not_a_fingerprint_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="This is not a fingerprint"):
        Fingerprint.from_dict({**made().as_dict(), **change})
    with pytest.raises(DataError, match="This is not a fingerprint"):
        Fingerprint.from_dict([])


# How far apart


@pytest.mark.parametrize("dimensions", [2, 3])
def test_the_verdict_separates_alike_hospitals_from_different_ones(dimensions: int) -> None:
    alike, apart = phantoms(0.0, dimensions), phantoms(1.0, dimensions)
    assert alike.verdict.startswith("Clients are alike: a plain average (fedavg) should serve all")
    assert apart.verdict.startswith("Clients differ strongly in brightness and contrast")
    assert "expect a plain average (fedavg) to serve 'south'" in apart.verdict
    for name in ("brightness", "contrast"):
        assert alike.distances[name].max() < ASPECTS[name][0] < ASPECTS[name][1] < apart.distances[name].max()


@pytest.mark.parametrize(
    ("change", "aspect", "distance", "sentence"),
    [
        (
            {"gain": 3.0},
            "brightness",
            None,
            "unprepared, a plain average .* would serve .* A z-score of each case",
        ),
        ({"power": 6.0}, "contrast", None, "expect a plain average"),
        ({"spacing": 3.0, "side": 2}, "spacing", np.log2(3), "Resample all to one spacing"),
        ({"shape": (41, 20)}, "shape", np.log2(2.05), "Bring all to one size"),
        ({"side": 2}, "foreground", 4.0, "strongly in foreground size: expect"),
        ({"cases": 80}, "amount", np.log2(10), "strongly in number of cases: .* will follow 'south'"),
    ],
)
def test_each_aspect_is_measured_and_reported(
    change: Any, aspect: str, distance: float | None, sentence: str
) -> None:
    found = compare([made(), made("south", **change)])
    value = found.distances[aspect][0, 1]
    assert value >= ASPECTS[aspect][1]
    if distance is not None:
        assert value == pytest.approx(distance, abs=0.02)
    assert re.search(sentence, found.verdict), found.verdict


def test_distances_are_symmetric_and_zero_to_oneself() -> None:
    for matrix in phantoms(1.0).distances.values():
        np.testing.assert_array_equal(matrix, matrix.T)
        assert not matrix.diagonal().any()


def test_a_small_client_of_the_same_kind_is_not_called_different_by_chance() -> None:
    def sizes(number: int, mask: Any) -> Any:
        side = 2 + int(np.random.default_rng(number).integers(16))
        mask[:] = 0
        mask[0, :side, :side] = 1
        return mask

    found = compare([made(label=sizes, cases=5), made("south", label=sizes, cases=14)])
    assert found.distances["foreground"].max() < ASPECTS["foreground"][0]


def test_a_large_client_is_not_the_one_a_plain_average_serves_worst() -> None:
    found = compare([made(cases=6), made("b", cases=6, side=2), made("c", cases=40, side=2)])
    assert "to serve 'north', the farthest from the others and 12% of the cases, worst" in found.verdict


def test_a_class_missing_at_a_client_is_reported() -> None:
    labels = {"organ": (1,), "tumour": (2,)}
    found = compare([made(labels=labels), made("south", labels=labels, label=lambda n, mask: 2 * mask)])
    assert "'tumour' is labelled in few or no cases of 'north'." in found.verdict


def test_withheld_clients_are_named_and_not_compared() -> None:
    found = compare([made(), made("tiny", cases=2), made("south")])
    assert found.clients == ("north", "south")
    assert "Not compared, because of too few patients: 'tiny'." in found.verdict
    assert list(found.as_table().rows[1][1:]) == ["fewer than 5", "fewer than 5", *["withheld"] * 9]


@pytest.mark.parametrize("cases", [[], [3], [8], [3, 3], [8, 2]])
def test_fewer_than_two_clients_cannot_be_compared(tmp_path: Path, cases: list[int]) -> None:
    found = compare([made(f"c{n}", cases=count) for n, count in enumerate(cases)])
    assert found.verdict.startswith("Fewer than two clients have enough cases")
    assert len(found.as_table().rows) == len(cases)
    if len(cases) == 1:
        save_picture(found, tmp_path / "one.png")


def test_constant_images_are_a_finite_distance_apart() -> None:
    found = compare([made(gain=0.0), made("south", gain=0.0), made("east")])
    assert all(np.isfinite(matrix).all() for matrix in found.distances.values())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"channels": 3}, "client 'south' has 3 channels, client 'north' 1; one model needs the same"),
        ({"shape": (9, 9, 9)}, "client 'south' has 3 dimensions, client 'north' 2"),
    ],
)
def test_clients_that_cannot_share_a_model_are_refused(change: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        compare([made(), made("south", **change)])


def test_two_fingerprints_of_one_client_are_refused() -> None:
    with pytest.raises(DataError, match="Two fingerprints are of client 'north'"):
        compare([made(), made()])


def test_the_comparison_goes_into_json_table_and_picture(tmp_path: Path) -> None:
    found = phantoms(1.0)
    content = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert content["verdict"] == found.verdict
    assert [Fingerprint.from_dict(one) for one in content["fingerprints"]] == list(found.fingerprints)
    assert len(set(found.as_table().columns)) == len(found.as_table().columns)
    assert found.verdict in str(found.as_table())
    save_picture(found, tmp_path / "fingerprints.png")
    assert (tmp_path / "fingerprints.png").read_bytes()[:4] == b"\x89PNG"


def test_unusual_names_and_many_clients_fit_the_picture(tmp_path: Path) -> None:
    one = made()
    many = [one.model_copy(update={"client": f"_$x^{number}\n病"}) for number in range(21)]
    found = compare(many)
    assert "\n" not in found.verdict
    save_picture(found, tmp_path / "many.png")


def test_words_are_listed_as_people_write_them() -> None:
    assert [join_words(words) for words in (["a"], ["a", "b"], ["a", "b", "c"])] == [
        "a",
        "a and b",
        "a, b and c",
    ]


@pytest.mark.skipif(not (SHARED / "lgg3d").exists(), reason="the shared data are not here")
def test_the_single_patient_centre_of_lgg3d_is_withheld() -> None:
    from wardround.data.federation_file import Source
    from wardround.data.sources import read_source as listing

    entries = listing(Source(path=SHARED / "lgg3d"), Path(__file__).parent).entries
    some = [entry for entry in entries if entry.client in ("TCGA_CS", "TCGA_EZ", "TCGA_FG")]

    def read(entry: Entry) -> tuple[Volume, Volume | None]:
        return read_image(entry.images), read_label(entry.label) if entry.label else None

    found = compare(measure_clients(some, read))
    assert found.withheld == ("TCGA_EZ",)
    assert found.verdict.startswith("Clients differ strongly in image size")
