"""Preparing a case, and the way back to its own grid."""

import json

import numpy as np
import pytest
import torch
from helpers import SHARED
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from wardround.data.federation_file import PrepareSettings, check_settings
from wardround.data.preparing.geometry import (
    invert_label,
    invert_probabilities,
    resample_image,
    resample_label,
)
from wardround.data.preparing.prepare import prepare_case, to_classes
from wardround.data.readers.image_files import Volume, read_image, read_label
from wardround.errors import ConfigError, DataError

PLAIN = PrepareSettings(normalise="none")


def volume(
    data: np.ndarray, spacing: tuple[float, ...] | None = None, affine: np.ndarray | None = None
) -> Volume:
    """An image or a label without channels, as a Volume."""
    sides = spacing or (1.0,) * data.ndim
    if affine is not None and spacing is None:
        sides = tuple(float(side) for side in np.linalg.norm(affine[:3, :3], axis=0)[: data.ndim])
    kind = np.int64 if data.dtype.kind in "iu" else np.float32
    return Volume(data[None].astype(kind), affine, sides)


def oblique(rng: np.random.Generator) -> np.ndarray:
    """Any axes order, any flips, any angle, any spacing."""
    axes = Rotation.random(random_state=int(rng.integers(2**31))).as_matrix() * rng.choice([-1, 1], 3)
    affine = np.eye(4)
    affine[:3, :3] = axes * rng.uniform(0.4, 4, 3)
    affine[:3, 3] = rng.uniform(-100, 100, 3)
    return affine


def ball(shape: tuple[int, ...], radius: float, value: int = 1) -> np.ndarray:
    grid = np.stack(np.meshgrid(*[np.arange(side) - (side - 1) / 2.3 for side in shape], indexing="ij"))
    return ((grid**2).sum(0) < radius**2).astype(np.int64) * value


def dice(one: np.ndarray, other: np.ndarray) -> float:
    return float(2 * ((one > 0) & (other > 0)).sum() / ((one > 0).sum() + (other > 0).sum()))


# There and back


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_reorienting_and_cropping_are_undone_exactly_for_any_affine(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(side) for side in rng.integers(2, 12, 3))
    image = np.where(rng.random(shape) < 0.2, rng.random(shape), 0)
    label = rng.integers(0, 4, shape) * (rng.random(shape) < 0.3)
    affine = oblique(rng)
    wanted = PrepareSettings(crop="foreground", orientation=str(rng.choice(["RAS", "LPS", "SAR"])))
    made = prepare_case(volume(image, affine=affine), volume(label, affine=affine), wanted, {})
    record = json.loads(json.dumps(made.geometry))
    assert np.array_equal(invert_label(made.label, record), label)
    back = invert_probabilities(torch.stack([made.label == c for c in range(4)]).float(), record)
    assert np.array_equal(back.argmax(0), label) and np.array_equal(back.sum(0), np.ones(shape))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_padding_and_its_spacing_are_undone_exactly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(side) for side in rng.integers(2, 10, 3))
    label, affine = rng.integers(0, 3, shape), oblique(rng)
    image = volume(rng.random(shape), affine=affine)
    sides = np.linalg.norm(affine[:3, :3], axis=0)
    order = prepare_case(image, None, PLAIN, {}).geometry["order"]
    wanted = PrepareSettings(spacing=tuple(sides[order]), size=(12, 13, 11))
    made = prepare_case(image, volume(label), wanted, {})
    assert made.image.shape == (1, 12, 13, 11) and made.label.shape == (12, 13, 11)
    assert np.array_equal(invert_label(made.label, made.geometry), label)


@pytest.mark.parametrize("factor", [2.0, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_resampling_smooth_shapes_twice_keeps_them(seed: int, factor: float) -> None:
    rng = np.random.default_rng(seed)
    affine = oblique(rng)
    affine[:3, :3] /= np.linalg.norm(affine[:3, :3], axis=0)
    shape = (57, 60, 54)
    label = np.maximum(ball(shape, 22), ball(shape, 19, value=2))
    wanted = PrepareSettings(spacing=(factor,) * 3)
    made = prepare_case(volume(label / 2.0, affine=affine), volume(label), wanted, {})
    assert np.allclose(made.spacing, factor, rtol=0.04)
    back = invert_label(made.label, made.geometry)
    assert back.shape == label.shape
    assert dice(back, label) > 0.97 and dice(back > 1, label > 1) > 0.97
    chances = torch.stack([made.label == c for c in range(3)]).float()
    assert dice(invert_probabilities(chances, made.geometry).argmax(0), label) > 0.97


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.3])
def test_2d_goes_there_and_back(factor: float) -> None:
    label = ball((64, 75), 20)
    wanted = PrepareSettings(spacing=(factor, factor), crop="foreground")
    made = prepare_case(volume(label.astype(float)), volume(label), wanted, {})
    back = invert_label(made.label, made.geometry)
    assert back.shape == (64, 75) and dice(back, label) > 0.97


def test_resizing_to_a_size_and_back() -> None:
    label = ball((64, 75), 20)
    made = prepare_case(volume(label.astype(float)), volume(label), PrepareSettings(size=(32, 48)), {})
    assert made.image.shape == (1, 32, 48) and made.spacing == (2.0, 75 / 48)
    assert dice(invert_label(made.label, made.geometry), label) > 0.97


def test_a_single_slice_comes_back_as_one() -> None:
    scan = Volume(np.ones((1, 4, 5), np.float32), np.diag([1.0, 2, 3, 1]), (1.0, 3.0), thin=1)
    made = prepare_case(scan, Volume(np.eye(4, 5, dtype=np.int64)[None], None, (1.0, 1.0)), PLAIN, {})
    back = invert_label(made.label, made.geometry)
    assert back.shape == (4, 1, 5) and np.array_equal(back[:, 0], np.eye(4, 5))
    assert invert_probabilities(torch.zeros(2, 4, 5), made.geometry).shape == (2, 4, 1, 5)


@pytest.mark.parametrize("crop", ["none", "foreground"])
@pytest.mark.parametrize(("spacing", "cut"), [((1.0, 1.0), 0.76), ((2.0, 1.0), 0.4), ((2.0, 2.0), 0.0)])
def test_what_a_size_cuts_off_labelled_voxels_is_reported(
    crop: str, spacing: tuple[float, float], cut: float
) -> None:
    label = np.ones((10, 10), np.int64)
    wanted = PrepareSettings(spacing=spacing, size=(4, 6), crop=crop)
    if spacing == (2.0, 2.0):
        wanted = wanted.model_copy(update={"size": (5, 5)})
    elif spacing == (2.0, 1.0):
        wanted = wanted.model_copy(update={"size": (5, 6)})
    made = prepare_case(volume(label * 1.0), volume(label), wanted, {})
    assert made.cut == pytest.approx(cut)
    inside = np.zeros((10, 10), np.int64)
    inside[4:6, 4:6] = 1
    assert prepare_case(volume(label * 1.0), volume(inside), wanted, {}).cut == 0


def test_the_share_cut_off_is_that_of_reoriented_scans() -> None:
    """The far end of the first axis of the file, which lies along the third of the prepared grid."""
    affine = np.array([[0, 0, 1.0, 0], [0, -1.0, 0, 0], [-1.0, 0, 0, 0], [0, 0, 0, 1]])
    label = np.zeros((20, 6, 6), np.int64)
    label[10:] = 1
    wanted = PrepareSettings(spacing=(1.0, 1.0, 1.0), size=(6, 6, 12))
    made = prepare_case(volume(label * 1.0, affine=affine), volume(label, affine=affine), wanted, {})
    assert made.cut == pytest.approx(0.4) and int((made.label > 0).sum()) == round(0.6 * label.sum())


def test_halving_one_axis_grows_a_ball_no_more_than_the_docstring_says() -> None:
    grid = np.stack(np.meshgrid(*[np.arange(48) - 23.5] * 3, indexing="ij"))
    for radius, most in ((6, 0.13), (10, 0.09), (20, 0.05)):
        ball = torch.from_numpy(((grid**2).sum(0) <= radius**2).astype(np.uint8))[None]
        grown = 2 * int(resample_label(ball, (48, 48, 24)).sum()) / int(ball.sum()) - 1
        assert 0 <= grown <= most


def test_what_a_centre_crop_cut_away_comes_back_as_background() -> None:
    label = np.ones((10, 10), np.int64)
    made = prepare_case(volume(label * 1.0), volume(label), PrepareSettings(spacing=(1, 1), size=(4, 6)), {})
    back = invert_label(made.label, made.geometry)
    assert back.sum() == 24 and back[3:7, 2:8].all()
    chances = invert_probabilities(torch.stack([made.label == 0, made.label == 1]).float(), made.geometry)
    assert np.array_equal(chances[0], 1 - back) and np.array_equal(chances[1], back)


def test_a_mask_of_another_shape_is_refused() -> None:
    made = prepare_case(volume(np.ones((4, 5))), None, PLAIN, {})
    with pytest.raises(DataError, match="4x4 but the prepared scan was 4x5"):
        invert_label(np.zeros((4, 4), np.uint8), made.geometry)
    with pytest.raises(DataError, match="lacks 'box'"):
        invert_label(made.image[0], {key: value for key, value in made.geometry.items() if key != "box"})


@pytest.mark.skipif(not SHARED.exists(), reason="the shared data are not here")
@pytest.mark.parametrize(
    "centre", ["polyp4/kvasir", "fundus_odoc/papila", "lgg3d/TCGA_CS", "hippocampus/vanderbilt"]
)
def test_real_cases_go_there_and_back(centre: str) -> None:
    picture = sorted((SHARED / centre / "images").iterdir())[0]
    drawing = next((SHARED / centre / "labels").glob(picture.name.split(".")[0] + ".*"))
    image, label = read_image([picture]), read_label(drawing)
    made = prepare_case(image, label, PrepareSettings(crop="foreground"), {})
    assert np.array_equal(invert_label(made.label, made.geometry), label.data[0])
    assert made.image.isfinite().all()


# The grid


def test_axes_are_oriented_as_set() -> None:
    data = np.arange(24.0).reshape(2, 3, 4)
    affine = np.array([[0, 0, -3.0, 0], [1, 0, 0, 0], [0, -2, 0, 0], [0, 0, 0, 1]])  # A, I, L
    made = prepare_case(volume(data, affine=affine), None, PLAIN, {})
    assert np.array_equal(made.image[0], data.transpose(2, 0, 1)[::-1, :, ::-1])
    assert made.spacing == (3.0, 1.0, 2.0)
    still = prepare_case(
        volume(data, affine=affine), None, PrepareSettings(orientation=None, normalise="none"), {}
    )
    assert np.array_equal(still.image[0], data)


def test_a_ramp_stays_where_it_is_in_millimetres() -> None:
    """Resampling keeps voxel centres in place: linear intensities are found again at the new centres."""
    x, y, z = np.meshgrid(np.arange(20) + 0.5, np.arange(24) + 0.5, (np.arange(12) + 0.5) * 2, indexing="ij")
    made = prepare_case(
        volume(x + 10 * y + 100 * z, spacing=(1, 1, 2)), None,
        PrepareSettings(spacing=(2.0, 1.5, 1.0), normalise="none", orientation=None), {},
    )  # fmt: skip
    shape, spacing = made.image.shape[1:], made.spacing
    assert tuple(shape) == (10, 16, 24)
    X, Y, Z = np.meshgrid(
        *[(np.arange(n) + 0.5) * s for n, s in zip(shape, spacing, strict=True)], indexing="ij"
    )
    inside = (slice(1, -1),) * 3  # beyond the last centre there is nothing to see
    # smoothing by 1.5 voxels has a kernel of 3 or 4 members, whose middle is off by up to 0.03 voxels
    assert np.allclose(made.image[0][inside], (X + 10 * Y + 100 * Z)[inside], atol=0.03 * 10, rtol=0)


def test_shrinking_smooths() -> None:
    stripes = torch.tensor([0.0, 1.0]).repeat(32).expand(1, 64, 64)
    assert resample_image(stripes, (16, 16))[0, 1:-1, 1:-1].std() < 1e-6
    volume3d = torch.tensor([0.0, 1.0]).repeat(16).reshape(1, 32, 1, 1).expand(1, 32, 8, 8)
    assert resample_image(volume3d.contiguous(), (8, 8, 8))[0, 1:-1].std() < 1e-6


def test_ties_go_to_the_foreground_and_small_lesions_stay() -> None:
    mask = torch.zeros(1, 8, 8, 8, dtype=torch.uint8)
    mask[0, 2:4, 2:4, 2:4] = 3
    assert resample_label(mask, (4, 4, 4)).sum() == 3
    half = torch.zeros(1, 4, 4, dtype=torch.uint8)
    half[0, ::2] = 1
    assert resample_label(half, (2, 2)).all()


def test_crop_finds_the_body_whatever_the_empty_value_is() -> None:
    for empty in (0.0, -1024.0, 7.0):
        data = np.full((20, 20, 20), empty)
        data[5:9, 6:12, 10:11] = -3.0
        made = prepare_case(volume(data), None, PrepareSettings(crop="foreground", normalise="none"), {})
        assert made.geometry["box"] == [[3, 11], [4, 14], [8, 13]]


def test_crop_keeps_everything_where_nothing_is_empty_or_all_is() -> None:
    noise = np.random.default_rng(0).random((9, 9))
    for data in (noise, np.zeros((9, 9))):
        made = prepare_case(volume(data), None, PrepareSettings(crop="foreground"), {})
        assert made.image.shape == (1, 9, 9)


def test_crop_never_cuts_labelled_voxels() -> None:
    data, label = np.zeros((20, 20)), np.zeros((20, 20), np.int64)
    data[10:12, 10:12], label[1, 18] = 1.0, 1
    made = prepare_case(volume(data), volume(label), PrepareSettings(crop="foreground"), {})
    assert made.label.sum() == 1


def test_padding_is_as_dark_as_the_darkest_voxel() -> None:
    wanted = PrepareSettings(spacing=(1, 1), size=(6, 6), normalise="none")
    made = prepare_case(volume(np.array([[5.0, -2], [3, 4]])), None, wanted, {})
    assert made.image[0, 0, 0] == -2 and made.image[0, 2:4, 2:4].tolist() == [[5, -2], [3, 4]]


# Intensities

IMAGE = np.random.default_rng(1).gamma(2.0, 50.0, (2, 16, 16)).astype(np.float32)


def prepared(kind: str, data: np.ndarray = IMAGE, **more: object) -> np.ndarray:
    wanted = PrepareSettings.model_validate({"normalise": kind, **more})
    return prepare_case(Volume(data.astype(np.float32), None, (1.0, 1.0)), None, wanted, {}).image.numpy()


def test_each_kind_of_scaling() -> None:
    assert np.allclose(prepared("zscore").mean((1, 2)), 0, atol=1e-5)
    assert np.allclose(prepared("zscore").std((1, 2)), 1, atol=1e-4)
    scaled = prepared("percentile", percentiles=(10, 90))
    assert scaled.min() == 0 and scaled.max() == 1 and np.isclose((scaled[0] == 0).mean(), 0.1, atol=0.02)
    assert prepared("minmax").min() == 0 and prepared("minmax").max() == 1
    assert np.allclose(prepared("maximum"), IMAGE / IMAGE.max())
    assert np.allclose(prepared("window", window=(50, 100)), np.clip(IMAGE / 100, 0, 1), atol=1e-6)
    assert np.array_equal(prepared("none"), IMAGE)


def test_ct_is_clipped_and_scaled_by_the_joint_numbers_of_nnunet() -> None:
    """CTNormalization of nnU-Net, written out; a channel without numbers has a z-score of its own."""
    low, high, mean, sd = -20.0, 150.0, 90.5, 35.25
    expected = IMAGE[0].astype(np.float32).copy()
    np.clip(expected, low, high, out=expected)
    expected -= mean
    expected /= max(sd, 1e-8)
    scaled = prepared("ct", IMAGE * 2 - 50, intensities=[[low, high, mean, sd], None])
    other = prepared("ct", intensities=[[low, high, mean, sd]] * 2)

    assert np.array_equal(other[0], expected) and scaled.dtype == np.float32
    assert np.isclose(scaled[0].max(), (high - mean) / sd) and np.isclose(scaled[0].min(), (low - mean) / sd)
    assert np.allclose(scaled[1], prepared("zscore", IMAGE * 2 - 50)[1])
    with pytest.raises(DataError, match="has 2 channels, but prepare.intensities has 1 rows"):
        prepared("ct", intensities=[[low, high, mean, sd]])


def test_zscore_nonzero_leaves_the_outside_at_zero() -> None:
    data = IMAGE * (np.arange(16) < 9)
    scaled = prepared("zscore_nonzero", data)
    assert not scaled[:, :, 9:].any()
    assert np.allclose(scaled[:, :, :9].mean((1, 2)), 0, atol=1e-5)
    assert np.allclose(scaled[:, :, :9].std((1, 2)), 1, atol=1e-4)


@pytest.mark.parametrize("kind", ["zscore", "zscore_nonzero", "percentile", "minmax", "maximum", "window"])
@pytest.mark.parametrize("value", [0.0, 1000.0, -5.0, 1e-30])
def test_constant_images_never_become_nan(kind: str, value: float) -> None:
    scaled = prepared(kind, np.full((2, 8, 8), value), window=(0, 10))
    assert np.isfinite(scaled).all() and np.ptp(scaled) == 0
    if kind not in ("maximum", "window"):
        assert not scaled.any()


def test_nan_voxels_are_refused() -> None:
    with pytest.raises(DataError, match="NaN or infinite"):
        prepared("zscore", np.full((1, 8, 8), np.nan))


# Labels


def test_classes_are_numbered_in_the_order_of_the_labels() -> None:
    values = np.array([0, 255, 4, 9, 0])
    classes, others = to_classes(values, {"vessel": (9,), "lesion": (4, 255)})
    assert classes.tolist() == [0, 2, 2, 1, 0] and classes.dtype == np.uint8 and others == []


def test_an_unlisted_value_is_refused_by_name_unless_allowed() -> None:
    values = np.array([0, 1, 7, 9])
    with pytest.raises(DataError, match=r"value 7.*none of the labels \(lesion \[1\]\)"):
        to_classes(values, {"lesion": (1,)}, background=(9,))
    for allowed in ((7, 9), None):
        classes, others = to_classes(values, {"lesion": (1,)}, background=allowed)
        assert classes.tolist() == [0, 1, 0, 0] and others == [7, 9]


def test_without_labels_values_are_classes() -> None:
    assert to_classes(np.array([0, 3, 255]), {})[0].tolist() == [0, 3, 255]
    for value in (-1, 256):
        with pytest.raises(DataError, match=f"the value {value}"):
            to_classes(np.array([0, value]), {})


def test_zero_may_be_a_class() -> None:
    assert to_classes(np.array([0, 1]), {"a": (0,), "b": (1,)})[0].tolist() == [1, 2]


def test_image_and_label_of_two_shapes_are_refused() -> None:
    with pytest.raises(DataError, match="image is 4x5 but label is 5x4"):
        prepare_case(volume(np.ones((4, 5))), volume(np.ones((5, 4), np.int64)), PLAIN, {})


def test_an_unlabelled_case_has_no_label() -> None:
    assert prepare_case(volume(np.ones((4, 5))), None, PLAIN, {}).label is None


# Settings


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"orientation": "RAX"}, "orientation is 'RAX'"),
        ({"orientation": "RA"}, "orientation is 'RA'"),
        ({"orientation": "RLS"}, "orientation is 'RLS'"),
        ({"spacing": (1.0, 0.0)}, "spacing is"),
        ({"spacing": (float("nan"),)}, "spacing is"),
        ({"size": (0, 5)}, "size is"),
        ({"size": ()}, "size is"),
        ({"percentiles": (50, 5)}, "percentiles are"),
        ({"normalise": "window"}, "window: \\[centre, width\\]"),
        ({"normalise": "window", "window": (0, 0)}, "window: \\[centre, width\\]"),
        ({"normalise": "ct"}, "give prepare.intensities"),
        ({"normalise": "ct", "intensities": [[0, 0, 1, 1]]}, "intensities.0 is .* two percentiles that rise"),
        ({"intensities": [None, [0, 1, 0, 0]]}, "intensities.1 is .* an SD above 0"),
        ({"intensities": [[0, 1, float("nan"), 1]]}, "intensities.0 is"),
    ],
)
def test_settings_nothing_can_be_prepared_with(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_settings(PrepareSettings.model_validate(wrong))
    check_settings(PrepareSettings(orientation="lps"))


@pytest.mark.parametrize("name", ["size", "spacing"])
def test_numbers_for_another_dimension_are_refused(name: str) -> None:
    wanted = PrepareSettings.model_validate({name: (4, 4, 4)})
    with pytest.raises(DataError, match=f"2D, but prepare.{name} has 3 numbers"):
        prepare_case(volume(np.ones((4, 5))), None, wanted, {})


def test_a_spacing_that_explodes_is_refused() -> None:
    with pytest.raises(DataError, match="check its spacing"):
        prepare_case(volume(np.ones((40, 50))), None, PrepareSettings(spacing=(1e-4, 1e-4)), {})


def test_a_flipped_axis_of_one_voxel_is_no_obstacle() -> None:
    """NumPy calls such an axis contiguous although it runs backwards; torch refuses it."""
    affine = np.diag([-1.0, -1.0, 1.0, 1.0])
    data = np.arange(7, dtype=np.float32).reshape(1, 1, 1, 7)
    prepared = prepare_case(Volume(data, affine, (1.0, 1.0, 1.0)), None, PrepareSettings(), {})
    assert tuple(prepared.image.shape) == (1, 1, 1, 7)
