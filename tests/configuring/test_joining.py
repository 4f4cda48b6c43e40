"""Joining: facts of hand-made clients with known numbers, and refusals that name clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wardround.configuring.facts import Facts, Quantiles
from wardround.configuring.joining import join_fingerprints
from wardround.data.fingerprint.measure import MOST_BYTES, Fingerprint, measure_client
from wardround.data.listing import Entry
from wardround.data.readers.image_files import Volume
from wardround.errors import DataError


def measure(
    client: str = "north",
    *,
    cases: int = 6,
    shape: tuple[int, ...] = (12, 10),
    channels: int = 1,
    spacing: tuple[float, ...] | None = None,
    value: Any = None,
    label: Any = None,
    minimum: int = 5,
    orientation: str | None = "RAS",
) -> Fingerprint:
    """A client whose cases have an empty border of one voxel, and a label of two by two voxels."""
    sides = spacing or (1.0,) * len(shape)
    affine = None if spacing is None else np.diag([*spacing, *[1.0] * (4 - len(spacing))])

    def read(entry: Entry) -> tuple[Volume, Volume]:
        number = int(entry.name)
        image = np.zeros((channels, *shape), dtype=np.float32)
        inner = (slice(None), *[slice(1, -1)] * len(shape))
        image[inner] = 100 + number if value is None else value(number, image[inner])
        mask = np.zeros((1, *shape), dtype=np.int64)
        mask[(0, *[slice(2, 4)] * len(shape))] = 1
        drawn = mask if label is None else label(number, mask)
        return Volume(image, affine, sides), Volume(drawn, affine, sides)

    entries = [Entry(client, str(n), (Path("i"),), Path("l"), str(n)) for n in range(cases)]
    return measure_client(
        entries, read, minimum=minimum, labels={"organ": (1,), "tumour": (2,)}, orientation=orientation
    )


def join(*fingerprints: Fingerprint, **names: Any) -> Facts:
    return join_fingerprints(fingerprints, **{"labels": {"organ": (1,), "tumour": (2,)}, **names})


def test_facts_of_two_clients_are_those_of_their_cases_together() -> None:
    facts = join(measure(minimum=1), measure("south", cases=2, shape=(12, 30), minimum=1))

    assert (facts.dimensions, facts.num_train, facts.has_spacing) == (2, 8, False)
    assert facts.shape[0] == Quantiles(10, 10, 10)
    assert facts.shape[1].median == 8
    assert facts.shape[1].high == 28
    assert facts.kept == pytest.approx(np.median([80 / 120] * 6 + [280 / 360] * 2), 1e-5)
    assert facts.presence == {"organ": 1.0, "tumour": 0.0}
    assert facts.sizes["organ"].median == pytest.approx(4 / 80)
    assert "tumour" not in facts.sizes
    assert facts.foreground_extent == (Quantiles(2, 2, 2),) * 2
    values = [100.0, 101, 102, 103, 104, 105, 100, 101]
    assert facts.channels[0].mean == pytest.approx(np.mean(values))
    assert facts.channels[0].sd == pytest.approx(np.std(values), 1e-4)
    assert facts.channels[0].percentile_00_5 == pytest.approx(100, abs=0.1)
    assert facts.channels[0].percentile_99_5 == pytest.approx(105, abs=0.1)
    assert facts.regions == {"organ": (1,), "tumour": (2,)}


def test_anisotropic_volumes_have_their_axes_in_prepared_order() -> None:
    facts = join(measure(shape=(12, 10, 6), spacing=(0.5, 0.5, 4.0)))

    assert [axis.median for axis in facts.spacing] == [0.5, 0.5, 4.0]
    assert [axis.median for axis in facts.shape] == [10, 8, 4]
    assert [axis.median for axis in facts.extent] == [5, 4, 16]
    turned = join(measure(shape=(12, 10, 6), spacing=(0.5, 0.5, 4.0), orientation="SAR"))
    assert [axis.median for axis in turned.spacing] == [4.0, 0.5, 0.5]
    assert [axis.median for axis in turned.shape] == [4, 8, 10]


def test_volumes_of_one_millimetre_have_a_spacing() -> None:
    assert join(measure(shape=(9, 9, 9), spacing=(1.0, 1.0, 1.0))).has_spacing


def test_a_client_with_a_single_case_tells_nothing_of_it_and_takes_part() -> None:
    facts = join(measure(), measure("small", cases=1, shape=(90, 90)))

    assert facts.shape[0].high == 10
    assert [(one.name, one.num_train, one.is_open) for one in facts.clients] == [
        ("north", 6, True),
        ("small", 1, False),
    ]
    assert facts.clients[1].memory > 0, "its machine is known all the same"
    assert facts.notes == ("Not measured, because of too few patients: 'small'. The others decide.",)


def test_nobody_with_enough_patients_is_refused_with_what_to_do() -> None:
    with pytest.raises(DataError, match=r"enough patients .*'north' \(fewer than 5\).* a minimum of 1"):
        join(measure(cases=2), measure("south", cases=3))
    with pytest.raises(DataError, match="enough patients with labelled cases"):
        join(measure(label=lambda number, mask: mask * 0))


# Modalities


def hounsfield(number: int, inner: Any) -> Any:
    return np.linspace(-1000, 400, inner.size).round().reshape(inner.shape)


def test_one_ct_client_among_others_is_refused_with_both_named() -> None:
    with pytest.raises(DataError, match="like CT in Hounsfield units at client 'b' and not at client 'a'"):
        join(measure("a"), measure("b", value=hounsfield))


@pytest.mark.parametrize(
    ("name", "value", "modality", "note"),
    [
        ("image", hounsfield, "ct", "taken for CT by its values"),
        ("CT", hounsfield, "ct", None),
        ("ct_portal", None, "ct", "do not look like Hounsfield units"),
        ("T1", None, "mr", None),
        ("FLAIR", hounsfield, "mr", "by its name; its values do look like Hounsfield units"),
        ("direct", None, "other", None),
    ],
)
def test_a_modality_comes_from_the_name_or_is_guessed_and_said(
    name: str, value: Any, modality: str, note: str | None
) -> None:
    facts = join(measure(value=value), channels=(name,))

    assert facts.channels[0].modality == modality
    assert len(facts.notes) == (note is not None)
    assert note is None or note in facts.notes[0]


def test_three_channels_of_a_picture_are_colours_and_of_a_scan_are_not() -> None:
    facts = join(measure(channels=3))

    assert [channel.modality for channel in facts.channels] == ["rgb"] * 3
    assert facts.notes == ("The three channels are taken for colours by their values, 0 to 255.",)
    scan = join(measure(channels=3, shape=(9, 9, 9), spacing=(1.0, 1.0, 1.0)))
    assert [channel.modality for channel in scan.channels] == ["other"] * 3


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"channels": 2}, "client 'south' has 2 channels, client 'north' 1"),
        ({"shape": (9, 9, 9)}, "client 'south' has 3 dimensions, client 'north' 2"),
    ],
)
def test_clients_of_other_channels_or_dimensions_are_refused_by_name(other: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        join(measure(), measure("south", **other))


def test_spacings_that_only_some_files_have_are_not_used() -> None:
    facts = join(measure(), measure("south", spacing=(0.5, 0.5)))

    assert not facts.has_spacing
    assert facts.notes[0].startswith("Files of 'north' do not say millimetres")


def beside(number: int, mask: Any) -> Any:
    """A tumour after the organ along the second axis, where the number is even."""
    mask[:, 2:4, 6:8] = 2 * (number % 2 == 0)
    return mask


def test_positions_of_classes_are_joined_over_clients() -> None:
    (found,) = join(measure(label=beside, minimum=1), measure("south", label=beside, minimum=1)).positions

    assert (found.classes, found.patients) == (("organ", "tumour"), 6)
    assert (found.before, found.after) == ((0, 6), (0, 0))


def test_positions_of_few_patients_are_not_told() -> None:
    assert measure(label=beside).positions == ()


# What arrives

PAIR = {"classes": ["organ", "tumour"], "patients": 6, "before": [6, 0], "after": [0, 0]}


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [{"means": [1.0] * 100_000, "counts": [1] * 100_000, "sd": 0.0}] * 2},
        {"shape": [{"means": [1.0], "counts": [-5], "sd": 0.0}] * 2},
        {"kept": {"means": [float("nan")], "counts": [5], "sd": 0.0}},
        {"kept": None},
        {"foreground": {str(number): None for number in range(100_000)}},
        {"client": "x" * 1000},
        {"cases": "all of them, and " + "more" * 1000},
        {"cases": 10**12},
        {"modality": ["pet"]},
        {"hardware": {"device": "cpu", "memory": -1, "cores": 1}},
        {"intensity": [{"mean": [0.0] * 7, "sd": [0.0] * 7}] * 2},
        {"positions": [{**PAIR, "before": [6, 6], "after": [0, 5]}]},
        {"positions": [{**PAIR, "before": [6, 0, 0], "after": [0, 0, 0]}]},
        {"positions": [{**PAIR, "before": [-1, 0]}]},
        {"positions": [{**PAIR, "classes": ["organ", "organ"]}]},
        {"positions": [{**PAIR, "classes": ["organ", "spleen"]}]},
        {"positions": [PAIR, {**PAIR, "classes": ["tumour", "organ"]}]},
        {"positions": [{**PAIR, "patients": 10**9, "before": [10**9, 0]}]},
        {"positions": [PAIR] * 100_000},
    ],
)
def test_hostile_content_is_refused(change: dict[str, Any]) -> None:
    plain = measure(label=beside).as_dict()
    content = json.dumps({**plain, **change}).encode()
    with pytest.raises(DataError, match="This is not a fingerprint"):
        Fingerprint.from_bytes(content)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b" " * (MOST_BYTES + 1)])
def test_bytes_that_are_no_fingerprint_are_refused(content: bytes) -> None:
    with pytest.raises(DataError, match="This is not a fingerprint"):
        Fingerprint.from_bytes(content)


def test_what_is_sent_is_what_arrives() -> None:
    told = measure(channels=3)

    assert Fingerprint.from_bytes(told.as_bytes()) == told
