"""The synthetic hospitals: repeatable, independent of each other, and truly different."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy import ndimage

from wardround.data.cases import ClientData
from wardround.data.phantom import cases as phantom
from wardround.data.phantom.cases import PhantomSettings
from wardround.errors import DataError

SMALL = PhantomSettings(size=32, cases=8)


def fingerprint(client: ClientData) -> str:
    digest = hashlib.sha256()
    for split in (client.train, client.val, client.test):
        digest.update(repr(split.names).encode())
        digest.update(split.images.numpy().tobytes())
        digest.update(split.labels.numpy().tobytes())
    return digest.hexdigest()


def scans(settings: PhantomSettings, name: str, count: int, seed: int = 0) -> list[phantom.PhantomScan]:
    style = phantom.make_hospital(settings, phantom.list_hospitals(settings).index(name), seed)
    return [phantom.make_scan(settings, style, number, seed) for number in range(1, count + 1)]


def lesion_contrast(scan: phantom.PhantomScan) -> float:
    """How much brighter the lesion is than the head around it, in units of the head's brightness."""
    image, lesion = scan.image[0].astype(float), scan.label > 0
    head = (image > 0.35 * np.percentile(image, 95)) & ~lesion
    return float(image[lesion].mean() / np.median(image[head]) - 1)


# Repeatable


@pytest.mark.parametrize("dimensions", [2, 3])
def test_the_same_seed_gives_the_same_bytes(dimensions: int) -> None:
    settings = PhantomSettings(dimensions=dimensions, size=24, cases=4)
    first, second = (phantom.make_client(settings, "east", seed=5) for _ in range(2))
    assert fingerprint(first) == fingerprint(second)


def test_another_seed_gives_other_patients() -> None:
    first, second = (phantom.make_client(SMALL, "east", seed=seed) for seed in (5, 6))
    assert fingerprint(first) != fingerprint(second)
    assert not torch.equal(first.train.labels, second.train.labels)


def test_the_settings_own_seed_goes_before_the_runs() -> None:
    settings = SMALL.model_copy(update={"seed": 5})
    assert fingerprint(phantom.make_client(settings, "north", seed=9)) == fingerprint(
        phantom.make_client(SMALL, "north", seed=5)
    )


def test_a_hospital_does_not_depend_on_how_many_there_are() -> None:
    names = ["north", "south"]
    few = {name: fingerprint(phantom.make_client(SMALL, name, seed=1)) for name in names}
    crowd = SMALL.model_copy(update={"hospitals": 7})
    many = {name: fingerprint(phantom.make_client(crowd, name, seed=1)) for name in reversed(names)}
    assert few == many


def test_a_case_can_be_made_alone() -> None:
    settings = PhantomSettings(size=32, cases=12)
    client = phantom.make_client(settings, "south", seed=3)
    case = phantom.make_case(settings, phantom.make_hospital(settings, 2, 3), 5, 3)
    assert case.name == "south-005" == client.train.names[4]
    assert torch.equal(case.image, client.train.images[4])
    assert torch.equal(case.label, client.train.labels[4])


def test_a_stream_depends_on_its_words_alone() -> None:
    assert phantom.make_generator(1, "north", 2).random() == phantom.make_generator(1, "north", 2).random()
    assert phantom.make_generator(1, "north", 2).random() != phantom.make_generator(1, "north", 3).random()
    # Known in advance, so that another machine or Python gives the same patients.
    digest = hashlib.sha256(b"1/north/2").digest()
    assert (
        phantom.make_generator(1, "north", 2).random()
        == np.random.default_rng(int.from_bytes(digest, "big")).random()
    )


# Hospitals


def test_names_are_four_directions_and_then_numbers() -> None:
    assert phantom.list_hospitals(PhantomSettings(hospitals=2)) == ["north", "east"]
    assert phantom.list_hospitals(PhantomSettings(hospitals=6)) == [
        "north", "east", "south", "west", "hospital-05", "hospital-06",
    ]  # fmt: skip


def test_without_heterogeneity_all_hospitals_have_one_style() -> None:
    settings = PhantomSettings(hospitals=6, heterogeneity=0)
    styles = {replace(phantom.make_hospital(settings, index, seed=0), name="any") for index in range(6)}
    assert len(styles) == 1


def test_hospitals_differ_more_with_more_heterogeneity() -> None:
    def distance(heterogeneity: float) -> float:
        settings = PhantomSettings(heterogeneity=heterogeneity)
        north, south = (phantom.make_hospital(settings, index, seed=0) for index in (0, 2))
        return abs(north.noise - south.noise) + abs(north.lesion_radius - south.lesion_radius)

    assert 0 == distance(0) < distance(0.5) < distance(1) < distance(2)


def test_a_lesion_between_bright_and_dark_stays_visible() -> None:
    for heterogeneity in np.linspace(0, 2, 21):
        settings = PhantomSettings(hospitals=8, heterogeneity=heterogeneity)
        for index in range(8):
            for contrast in phantom.make_hospital(settings, index, seed=0).contrasts:
                assert abs(contrast.lesion) >= 0.2
                assert abs(contrast.core) >= 0.2


def test_further_hospitals_are_drawn_from_the_seed() -> None:
    settings = PhantomSettings(hospitals=6)
    fifth = phantom.make_hospital(settings, 4, seed=1)
    assert fifth == phantom.make_hospital(PhantomSettings(hospitals=9), 4, seed=1)
    assert fifth != phantom.make_hospital(settings, 4, seed=2)
    assert fifth.noise != phantom.make_hospital(settings, 5, seed=1).noise
    assert phantom.make_hospital(settings, 0, seed=1) == phantom.make_hospital(settings, 0, seed=2)


def test_hospitals_look_different() -> None:
    settings = PhantomSettings(hospitals=4)
    contrast, noise, size = {}, {}, {}
    for name in phantom.list_hospitals(settings):
        cases = [scan for scan in scans(settings, name, 12) if scan.label.any()]
        contrast[name] = np.median([lesion_contrast(scan) for scan in cases])
        corners = [scan.image[0, :6, :6] / np.percentile(scan.image, 99) for scan in cases]
        noise[name] = np.median([corner.std() for corner in corners])
        lesions = [(ndimage.label(scan.label)[1], (scan.label > 0).sum()) for scan in cases]
        size[name] = sum(voxels for _, voxels in lesions) / sum(count for count, _ in lesions)

    assert contrast["north"] > 0.3
    assert contrast["south"] > 0.3
    assert contrast["west"] < -0.2  # the same disease is dark there
    assert noise["south"] > 1.5 * noise["north"]
    assert size["north"] > 1.2 * size["south"]


def test_without_heterogeneity_hospitals_look_alike() -> None:
    settings = PhantomSettings(heterogeneity=0)
    contrast = {
        name: np.median([lesion_contrast(scan) for scan in scans(settings, name, 12)])
        for name in phantom.list_hospitals(settings)
    }
    assert max(contrast.values()) - min(contrast.values()) < 0.2


def test_annotators_differ_on_the_same_patient() -> None:
    style = phantom.make_hospital(PhantomSettings(), 0, seed=0)
    volumes = [
        (phantom.make_scan(PhantomSettings(), replace(style, margin=margin), 1, 0).label > 0).sum()
        for margin in (-2.0, 0.0, 2.0)
    ]
    assert volumes[0] < volumes[1] < volumes[2]


# Cases


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("num_classes", [2, 3])
@pytest.mark.parametrize("channels", [1, 2])
def test_cases_have_the_promised_shape_and_classes(dimensions: int, num_classes: int, channels: int) -> None:
    settings = PhantomSettings(
        dimensions=dimensions, size=32, cases=3, num_classes=num_classes, channels=channels
    )
    for name in phantom.list_hospitals(settings):
        client = phantom.make_client(settings, name, seed=2)
        for split in (client.train, client.val, client.test):
            batch = split.batch([0])
            assert batch.image.shape == (1, channels, *[32] * dimensions)
            assert batch.image.dtype == torch.float32
            assert batch.label.shape == (1, *[32] * dimensions)
            assert batch.label.unique().tolist() == list(range(num_classes))
            assert len(split.spacing(0)) == dimensions
            assert all(0 < step < 20 for step in split.spacing(0))


def test_the_third_class_lies_inside_the_second() -> None:
    settings = PhantomSettings(num_classes=3)
    two = scans(settings.model_copy(update={"num_classes": 2}), "east", 5)
    for scan, plain in zip(scans(settings, "east", 5), two, strict=True):
        assert np.array_equal(scan.image, plain.image)
        assert np.array_equal(scan.label > 0, plain.label > 0)


def test_images_are_normalised_per_case_and_channel() -> None:
    settings = PhantomSettings(size=32, cases=3, channels=3)
    images = phantom.make_client(settings, "east", seed=0).train.images
    assert torch.allclose(images.mean(dim=(2, 3)), torch.zeros(()), atol=1e-5)
    assert torch.allclose(images.std(dim=(2, 3), correction=0), torch.ones(()), atol=1e-4)


def test_a_constant_image_is_normalised_to_zero() -> None:
    assert not phantom.normalise(np.full((1, 4, 4), 7, dtype=np.int16)).any()


def test_channels_show_other_tissue_of_the_same_patient() -> None:
    scan = scans(PhantomSettings(channels=4), "north", 1)[0]
    correlation = np.corrcoef(scan.image.reshape(4, -1))
    assert correlation[np.triu_indices(4, 1)].max() < 0.99
    assert correlation.min() > 0.1


@pytest.mark.parametrize("dimensions", [2, 3])
def test_lesions_have_a_plausible_volume(dimensions: int) -> None:
    settings = PhantomSettings(dimensions=dimensions, hospitals=4)
    for name in phantom.list_hospitals(settings):
        for scan in scans(settings, name, 10):
            share = (scan.label > 0).mean()
            assert share == 0 or 0.001 < share < 0.2


def test_lesions_lie_inside_the_head() -> None:
    for name in ("north", "east", "south"):
        for scan in scans(PhantomSettings(), name, 10):
            border = np.ones(scan.label.shape, dtype=bool)
            border[4:-4, 4:-4] = False
            assert not scan.label[border].any()


@pytest.mark.parametrize("size", [16, [48, 80]])
def test_small_and_oblong_grids_work(size: int | list[int]) -> None:
    settings = PhantomSettings(size=size, cases=3, heterogeneity=2.0, num_classes=3)
    for name in phantom.list_hospitals(settings):
        client = phantom.make_client(settings, name, seed=0)
        assert client.train.images.shape[2:] == settings.shape
        assert client.train.labels.flatten(1).any(dim=1).all()


def test_thick_slices_show_in_the_spacing() -> None:
    settings = PhantomSettings(dimensions=3)
    north, south = (phantom.make_hospital(settings, index, 0) for index in (0, 2))
    spacing = [phantom.make_scan(settings, style, 1, 0).spacing for style in (north, south)]
    assert spacing[1][2] == pytest.approx(1.5 * spacing[0][2])
    assert spacing[0][0] == spacing[0][1]


def test_some_cases_are_without_a_lesion_but_never_a_whole_split() -> None:
    settings = PhantomSettings(size=16, cases=60)
    client = phantom.make_client(settings, "north", seed=0)
    for split, expected in ((client.train, 2), (client.val, 1), (client.test, 1)):
        has_lesion = split.labels.flatten(1).any(dim=1)
        assert int((~has_lesion).sum()) == expected
    tiny = PhantomSettings(size=16, cases=3, heterogeneity=2.0)
    for seed in range(10):
        client = phantom.make_client(tiny, "north", seed=seed)
        assert all(split.labels.any() for split in (client.train, client.val, client.test))


# Splits


@pytest.mark.parametrize(
    ("cases", "sizes"),
    [
        (0, (0, 0, 0)),
        (1, (1, 0, 0)),
        (2, (1, 0, 1)),
        (3, (1, 1, 1)),
        (4, (2, 1, 1)),
        (20, (12, 3, 5)),
        (60, (36, 9, 15)),
    ],
)
def test_splits_have_the_promised_sizes(cases: int, sizes: tuple[int, int, int]) -> None:
    settings = PhantomSettings(size=16, cases=cases)
    client = phantom.make_client(settings, "east", seed=0)
    assert phantom.count_split_cases(settings, "east") == sizes
    assert (len(client.train), len(client.val), len(client.test)) == sizes
    names = [*client.train.names, *client.val.names, *client.test.names]
    assert names == [f"east-{number:03d}" for number in range(1, cases + 1)]


def test_every_split_has_a_case_whatever_the_shares() -> None:
    for shares in ((0.98, 0.01, 0.01), (0.01, 0.98, 0.01), (0.01, 0.01, 0.98)):
        for cases in range(3, 30):
            sizes = phantom.count_split_cases(PhantomSettings(cases=cases, split=shares), "north")
            assert sum(sizes) == cases
            assert min(sizes) >= 1


def test_hospitals_have_unequal_numbers_of_cases_unless_set() -> None:
    counts = [
        phantom.count_cases(PhantomSettings(hospitals=5), name) for name in ("north", "south", "hospital-05")
    ]
    assert counts == [60, 32, 30]
    assert phantom.count_cases(PhantomSettings(cases=[4, 5, 6]), "east") == 5


# Settings


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"hospitals": 0}, "hospitals"),
        ({"dimensions": 4}, "dimensions"),
        ({"size": 8}, "size"),
        ({"size": 0}, "size"),
        ({"size": [64, 64, 64]}, "size"),
        ({"cases": [1, 2]}, "cases"),
        ({"cases": -1}, "cases"),
        ({"num_classes": 4}, "num_classes"),
        ({"channels": 5}, "channels"),
        ({"heterogeneity": 2.5}, "heterogeneity"),
        ({"split": [0.5, 0.5, 0.5]}, "split"),
        ({"split": [0.8, 0.0, 0.2]}, "split"),
        ({"colour": "blue"}, "colour"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, object], field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PhantomSettings(**wrong)
    assert {error["loc"][0] for error in caught.value.errors()} == {field}


def test_every_setting_is_described_and_survives_yaml() -> None:
    assert all(field.description for field in PhantomSettings.model_fields.values())
    settings = PhantomSettings(size=[32, 48], cases=[1, 2, 3])
    assert PhantomSettings(**settings.model_dump(mode="json")) == settings


def test_an_unknown_hospital_is_named() -> None:
    with pytest.raises(DataError, match="no synthetic hospital 'nroth'; choose from north, east, south"):
        phantom.make_client(PhantomSettings(), "nroth", seed=0)
