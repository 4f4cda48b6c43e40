"""Turning, scaling, bending and uneven brightness of whole batches; flips and shading are tested in engine."""

from typing import Any

import numpy as np
import torch
from pytest import mark, raises
from scipy import ndimage

from wardround.config_file import load_config, resolve
from wardround.data.cases import Batch
from wardround.data.serving.augment import (
    DROP_CHANNELS,
    Augmentation,
    Shading,
    apply_bias_field,
    change_contrast,
    draw_bias_field,
    lower_resolution,
    make_rotations,
    make_source_grid,
    resample,
    spline_basis,
)
from wardround.errors import ConfigError

ONLY_SPACE = {"flip": 0, "intensity": 0, "spatial": 1.0}


def smooth(*shape: int, seed: int = 0) -> torch.Tensor:
    noise = np.random.default_rng(seed).normal(size=shape)
    return torch.from_numpy(ndimage.gaussian_filter(noise, [0, 0, *[2] * (len(shape) - 2)]) * 10).float()


def batch(*sides: int, count: int = 3, channels: int = 2) -> Batch:
    image = smooth(count, channels, *sides)
    return Batch(image, (image[:, 0] > 0).long() + (image[:, 1] > 0.5).long())


def by_scipy(image: torch.Tensor, matrix: np.ndarray, order: int) -> np.ndarray:
    """The same map in scipy's words: input place = matrix @ output place + offset."""
    centre = (np.asarray(image.shape) - 1) / 2
    offset = centre - matrix @ centre
    return ndimage.affine_transform(image.numpy(), matrix, offset, order=order, mode="nearest")


@mark.parametrize("sides", [(24, 40), (40, 24), (21, 16, 30)], ids=str)
def test_a_rotation_is_scipys_on_grids_of_unequal_sides(sides: tuple[int, ...]) -> None:
    rotation = make_rotations(torch.tensor([25.0]), len(sides), torch.Generator().manual_seed(3))
    given = batch(*sides, count=1)
    grid = make_source_grid(rotation, None, given.image)

    image = resample(given.image, grid, "bilinear")
    label = resample(given.label[:, None], grid, "nearest")

    matrix = rotation[0].double().numpy()
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(len(sides)), atol=1e-6)
    np.testing.assert_allclose(np.linalg.det(matrix), 1, atol=1e-6)
    assert np.isclose(np.trace(matrix), 2 * np.cos(np.deg2rad(25)) + len(sides) - 2)
    np.testing.assert_allclose(image[0, 0], by_scipy(given.image[0, 0], matrix, 1), atol=2e-3)
    assert float((label[0, 0].numpy() == by_scipy(given.label[0], matrix, 0)).mean()) > 0.999


def test_a_quarter_turn_of_a_square_moves_every_voxel_whole() -> None:
    given = batch(16, 16, count=1)
    grid = make_source_grid(make_rotations(torch.tensor([90.0]), 2, torch.Generator()), None, given.image)

    rotated = resample(given.image, grid, "bilinear")

    assert any(torch.allclose(rotated, torch.rot90(given.image, k, (2, 3)), atol=1e-4) for k in (1, 3))


@mark.parametrize("sides", [(24, 40), (20, 16, 12)], ids=str)
def test_a_scale_is_scipys_and_above_one_makes_things_larger(sides: tuple[int, ...]) -> None:
    given = batch(*sides, count=1)
    matrix = torch.eye(len(sides))[None] / 1.3

    image = resample(given.image, make_source_grid(matrix, None, given.image), "bilinear")

    np.testing.assert_allclose(
        image[0, 1], by_scipy(given.image[0, 1], matrix[0].double().numpy(), 1), atol=2e-3
    )
    ball = torch.zeros(1, 1, 33, 33)
    ball[..., 12:21, 12:21] = 1
    assert (
        resample(ball, make_source_grid(torch.eye(2)[None] / 2, None, ball), "nearest").sum() > 3 * ball.sum()
    )


@mark.parametrize("axis", [0, 1, 2])
def test_thick_slices_change_in_their_plane_alone(axis: int) -> None:
    """Slices of one brightness each, so that a voxel of another slice would show."""
    sides = [16, 16, 16]
    sides[axis] = 4
    level = torch.arange(4.0).view(*[4 if place == axis else 1 for place in range(3)]).expand(sides)
    given = Batch(level.repeat(3, 1, 1, 1, 1), level.long().repeat(3, 1, 1, 1))
    moves = {"spatial": 1, "rotate": 180, "scale": 0.4, "elastic": 0.3, "flip": 0, "intensity": 0}

    still, _ = Augmentation(**moves, slice_axis=axis)(given, 1, ("a",))
    tilted, _ = Augmentation(**moves)(given, 1, ("a",))

    torch.testing.assert_close(still.image, given.image, atol=1e-5, rtol=0)
    assert torch.equal(still.label, given.label)
    assert not torch.allclose(tilted.image, given.image, atol=0.1)


def test_a_slice_rotates_as_scipy_rotates_a_picture() -> None:
    given = batch(12, 12, 3, count=1)
    rotation = make_rotations(torch.tensor([25.0]), 3, torch.Generator(), about=2)

    image = resample(given.image, make_source_grid(rotation, None, given.image), "bilinear")[0, 0]

    plane = rotation[0, :2, :2].double().numpy()
    assert np.isclose(np.trace(plane), 2 * np.cos(np.deg2rad(25))) and rotation[0, 2].tolist() == [0, 0, 1]
    for number in range(3):
        expected = by_scipy(given.image[0, 0, :, :, number], plane, 1)
        np.testing.assert_allclose(image[:, :, number], expected, atol=2e-3)


def test_knots_that_all_move_alike_shift_the_image() -> None:
    given = batch(32, 48, count=1)
    knots = torch.zeros(1, 2, 7, 7)
    knots[:, 1] = 0.25  # a quarter of the knots' distance, which is 48 / 4 voxels

    image = resample(given.image, make_source_grid(torch.eye(2)[None], knots, given.image), "bilinear")

    assert torch.allclose(image[..., :-3], given.image[..., 3:], atol=1e-3)
    assert torch.allclose(spline_basis(37).sum(dim=1), torch.ones(37, dtype=torch.float64))


@mark.parametrize("sides", [(64, 40), (24, 40, 32)], ids=str)
def test_the_strongest_elastic_field_does_not_fold(sides: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(1)
    image = torch.zeros(4, 1, *sides)
    knots = (torch.rand(4, len(sides), *[7] * len(sides), generator=draw) * 2 - 1).sign() * 0.4

    grid = make_source_grid(torch.eye(len(sides)).expand(4, -1, -1), knots, image).double()

    steps = [torch.diff(grid, dim=axis + 1) for axis in range(len(sides))]
    inner = [step[(slice(None), *[slice(0, side - 1) for side in sides])] for step in steps]
    jacobian = torch.stack([step.flip(-1) for step in inner], dim=-1)
    assert float(torch.linalg.det(jacobian).min()) > 0


@mark.parametrize("sides", [(24, 32), (12, 16, 20)], ids=str)
def test_labels_stay_integers_of_the_same_kind_and_follow_the_image(sides: tuple[int, ...]) -> None:
    inside = torch.zeros(6, *sides, dtype=torch.uint8)
    inside[(slice(None), *[slice(side // 4, -(side // 4)) for side in sides])] = 2
    given = Batch(inside[:, None].float(), inside)

    moved, _ = Augmentation(**ONLY_SPACE, rotate=40, scale=0.3, elastic=0.3)(given, 1, ("x",))

    assert moved.label.dtype == torch.uint8 and set(moved.label.unique().tolist()) == {0, 2}
    assert not torch.equal(moved.label, given.label)
    away = (moved.image[:, 0] - 1).abs() > 0.98  # at the very edge of 0 and 2, halves round either way
    assert torch.equal(moved.image[:, 0][away].round(), moved.label[away].float())
    assert float(away.float().mean()) > 0.6


def test_only_drawn_cases_change_and_both_views_show_the_same_place() -> None:
    given = batch(24, 24, count=40, channels=2)
    quiet = Shading(intensity=0)
    augmentation = Augmentation(**{**ONLY_SPACE, "spatial": 0.5}, elastic=0.2, second_view=quiet)

    first, second = augmentation(given, 5, ("x",), views=2)

    kept = [torch.equal(a, b) for a, b in zip(first.image, given.image, strict=True)]
    assert 8 < sum(kept) < 32
    assert second is not None and torch.equal(first.image, second)
    assert kept == [torch.equal(a, b) for a, b in zip(first.label, given.label, strict=True)]


def test_the_stream_alone_decides() -> None:
    given = batch(16, 24)
    augmentation = Augmentation(spatial=0.7, elastic=0.2, bias=0.4, noise=0.1)

    one, same, other = (augmentation(given, 1, ("x", step))[0] for step in (0, 0, 1))

    assert torch.equal(one.image, same.image) and torch.equal(one.label, same.label)
    assert not torch.equal(one.image, other.image)


@mark.parametrize("sides", [(16, 24), (8, 12, 10)], ids=str)
def test_defaults_draw_nothing_new_so_old_runs_keep_their_bytes(sides: tuple[int, ...]) -> None:
    given = batch(*sides, count=8)
    image, label = given.image.clone(), given.label.clone()
    for seed in range(5):
        now, _ = Augmentation()(given, seed, ("x",))
        assert torch.equal(now.image, before(given, seed))
    assert torch.equal(given.image, image) and torch.equal(
        given.label, label
    )  # the case itself is left alone


def before(given: Batch, seed: int) -> torch.Tensor:
    """Flip and intensity as they were before there was anything else."""
    from wardround.seeding import generator

    draw = generator(seed, "x")
    chosen = torch.rand(len(given), generator=draw) < 0.5
    axes = torch.randint(given.label.ndim - 1, (len(given),), generator=draw)
    image = torch.stack(
        [
            scan.flip(int(axis) + 1) if flip else scan
            for scan, flip, axis in zip(given.image, chosen, axes, strict=True)
        ]
    )
    scale, shift = (torch.rand(2, len(image), generator=draw) * 2 - 1) * 0.1
    fit = (-1, *[1] * (image.ndim - 1))
    return image * (1 + scale.view(fit)) + shift.view(fit)


@mark.parametrize("sides", [(40, 24), (16, 12, 20)], ids=str)
def test_the_bias_field_is_smooth_bounded_and_leaves_the_dark_dark(sides: tuple[int, ...]) -> None:
    image = torch.full((5, 2, *sides), 3.0)
    image[(slice(None), slice(None), *[0] * len(sides))] = 1.0  # the darkest voxel

    drawn = draw_bias_field(len(image), image.ndim - 2, float(np.log(1.5)), torch.Generator().manual_seed(2))
    field = (apply_bias_field(image, *drawn) - 1) / 2
    rest = field[..., 1:]

    assert torch.equal(field[(slice(None), slice(None), *[0] * len(sides))], torch.zeros(5, 2))
    assert float(rest.max()) <= 1.5001 and float(rest.min()) >= 1 / 1.5001 and float(rest.std()) > 0.02
    assert torch.equal(field[:, 0], field[:, 1])  # one coil, all channels
    assert float(torch.diff(rest, n=2, dim=-1).abs().max()) < 0.1


def test_a_constant_image_and_single_slices_pass() -> None:
    flat = Batch(torch.zeros(2, 1, 1, 8), torch.zeros(2, 1, 8, dtype=torch.long))
    moved, _ = Augmentation(**ONLY_SPACE, elastic=0.4, bias=1.0)(flat, 1, ("x",))

    assert torch.equal(moved.image, flat.image) and torch.equal(moved.label, flat.label)


@mark.parametrize("asked", [{"rotate": 30}, {"scale": 0.2}, {"elastic": 0.1}, {"slice_axis": 2}], ids=str)
def test_a_rotation_without_a_chance_is_refused(asked: dict[str, Any]) -> None:
    with raises(ConfigError, match=f"{next(iter(asked))} does nothing while spatial is 0"):
        load_config({"augmentation": asked})
    load_config({"augmentation": {**asked, "spatial": 0}})  # said aloud, it is a way to switch it off


def test_a_written_out_configuration_reads_back() -> None:
    config = load_config({"augmentation": {"spatial": 0.3, "rotate": 30}})

    assert load_config(resolve(config)).augmentation == config.augmentation


# nnU-Net's further changes


@mark.parametrize("sides", [(12, 10), (12, 10, 8)], ids=str)
def test_low_resolution_takes_the_nearest_voxels_and_interpolates_back(sides: tuple[int, ...]) -> None:
    image = smooth(2, 2, *sides)
    found = lower_resolution(image, torch.tensor([0.5, 1.0]))
    coarse = image[0][(slice(None), *[slice(1, None, 2)] * len(sides))].double().numpy()  # of two, the later
    places = [np.clip((np.arange(side) + 0.5) / 2 - 0.5, 0, side // 2 - 1) for side in sides]
    grid = np.meshgrid(*places, indexing="ij")
    expected = [ndimage.map_coordinates(channel, grid, order=1, mode="nearest") for channel in coarse]

    np.testing.assert_allclose(found[0], np.stack(expected), atol=1e-5)
    assert torch.allclose(found[1], image[1])


def test_contrast_moves_voxels_from_the_mean_and_stays_in_the_range() -> None:
    image = smooth(3, 2, 16, 16)
    found = change_contrast(image, torch.tensor([0.5, 1.0, 1.25])).numpy()
    for case, factor, given in zip(found, (0.5, 1.0, 1.25), image.numpy(), strict=True):
        mean = given.mean(axis=(1, 2), keepdims=True)
        low, high = (given.min(axis=(1, 2), keepdims=True), given.max(axis=(1, 2), keepdims=True))
        np.testing.assert_allclose(case, np.clip((given - mean) * factor + mean, low, high), atol=1e-5)


def test_gamma_of_the_negative_is_gamma_upside_down() -> None:
    image = smooth(2, 1, 16, 16)
    usual = Shading(intensity=0, gamma=0.5)._shade(-image, torch.Generator().manual_seed(1))
    negative = Shading(intensity=0, gamma=0.5, inverted=1.0)._shade(image, torch.Generator().manual_seed(1))

    assert torch.allclose(negative, -usual, atol=1e-5) and not torch.allclose(negative, image, atol=0.01)


@mark.parametrize("chances", [{"flip": 1}, {"flip": 0, "mirror": 0.5}], ids=str)
def test_images_are_mirrored_along_the_named_axes_alone(chances: dict[str, Any]) -> None:
    given = batch(6, 5, 4, count=32)
    found, _ = Augmentation(**chances, intensity=0, mirror_axes=(2, 0))(given, 1, ("a",))
    seen = set()
    for image, after in zip(given.image, found.image, strict=True):
        every = {axes: image.flip([axis + 1 for axis in axes]) for axes in ((), (0,), (2,), (0, 2))}
        seen |= {axes for axes, view in every.items() if torch.equal(after, view)}

    assert seen == ({(0,), (2,)} if chances["flip"] else {(), (0,), (2,), (0, 2)})


def test_no_axis_to_mirror_along_leaves_images_as_they_are() -> None:
    still = Augmentation(mirror=0.5, intensity=0, mirror_axes=())
    given = batch(6, 5)

    assert still.changes_nothing
    assert torch.equal(still(given, 1, ("a",))[0].image, given.image)


def test_all_axes_by_name_are_the_bytes_of_none_named() -> None:
    given = batch(6, 5, count=8)
    named, unnamed = (
        Augmentation(mirror=0.5, mirror_axes=axes)(given, 1, ("a",))[0] for axes in ((0, 1), None)
    )

    assert torch.equal(named.image, unnamed.image) and torch.equal(named.label, unnamed.label)


def test_axes_to_mirror_along_are_checked() -> None:
    for axes, sentence in (([3], "mirror_axes"), ([0, 0], "name each axis once")):
        with raises(ConfigError, match=sentence):
            load_config({"augmentation": {"mirror_axes": axes}})
    flat = {"augmentation": {"mirror_axes": [2]}, "data": {"phantom": {"dimensions": 2, "size": 32}}}
    with raises(ConfigError, match=r"mirror_axes is \[2\], but the images are 2D; their axes are 0, 1"):
        load_config(flat)
    with raises(ConfigError, match="images are not mirrored"):
        load_config({"augmentation": {"mirror_axes": []}, "evaluate": {"tta": True}})


def test_mirror_chooses_every_axis_by_itself() -> None:
    given = batch(4, 6, count=400)
    found, _ = Augmentation(flip=0, intensity=0, mirror=0.5)(given, 1, ("a",))
    ways = [given.image, given.image.flip(2), given.image.flip(3), given.image.flip(2, 3)]
    counts = [int((found.image == way).flatten(1).all(dim=1).sum()) for way in ways]

    assert sum(counts) == 400 and min(counts) > 70
    assert torch.equal((found.image[:, 0] > 0).long() + (found.image[:, 1] > 0.5).long(), found.label)


CHANCES = {
    "blur": 0.2,
    "low_resolution": 0.25,
    "gamma": 0.3,
    "contrast": 0.15,
    "intensity": 0.15,
    "noise": 0.1,
}
EVERY = {"blur": 1.0, "low_resolution": 0.5, "gamma": 0.5, "contrast": 0.25, "intensity": 0.25, "noise": 0.3}


@mark.parametrize("change", CHANCES)
def test_a_chance_changes_that_share_of_cases_and_leaves_the_others_their_bytes(change: str) -> None:
    image = smooth(300, 1, 12, 12)
    settings = {"intensity": 0.0, change: EVERY[change], "chances": {change: CHANCES[change]}}
    found = Shading(**settings)._shade(image, torch.Generator().manual_seed(1))
    changed = (found != image).flatten(1).any(dim=1)

    assert abs(float(changed.double().mean()) - CHANCES[change]) < 0.06


def test_what_a_case_draws_does_not_depend_on_its_neighbours() -> None:
    chosen = Augmentation(flip=0, mirror=0.5, **EVERY, chances=dict.fromkeys(EVERY, 0.5))
    given = batch(16, 16, count=4)
    others = batch(16, 16, count=4)
    others.image[1:] = smooth(3, 2, 16, 16, seed=9)
    one, same, other = (chosen(b, 3, ("a",))[0].image for b in (given, given, others))

    assert torch.equal(one, same) and torch.equal(one[0], other[0])
    assert not torch.equal(one[1:], other[1:])


def test_a_chance_of_something_unknown_is_refused() -> None:
    with raises(ConfigError, match="augmentation.chances.sharpness"):
        load_config({"augmentation": {"chances": {"sharpness": 0.5}}})


# Channels


def test_absent_channels_stay_absent_in_both_views_and_one_is_always_kept() -> None:
    image = torch.randn(200, 3, 8, 8) + 5
    image[:, 1] = 0
    changes = Augmentation(
        drop_channels=0.9, spatial=1, elastic=0.2, gamma=0.5, blur=1, bias=0.5, noise=0.1, contrast=0.2
    )
    first, second = changes(Batch(image, torch.zeros(200, 8, 8, dtype=torch.long)), 1, ("x",), views=2)
    kept = first.image.flatten(2).any(dim=2)

    assert second is not None and torch.equal(second.flatten(2).any(dim=2), kept)
    assert not kept[:, 1].any() and kept.any(dim=1).all()
    assert 0 < (kept.sum(dim=1) == 2).sum() < 20


def test_channels_are_dropped_where_somebody_lacks_some_or_the_user_says_so() -> None:
    assert Augmentation().for_channels(lacking=False).drop_channels is None
    assert Augmentation().for_channels(lacking=True).drop_channels == DROP_CHANNELS
    assert Augmentation(drop_channels=0).for_channels(lacking=True).drop_channels == 0


def test_dropping_with_chance_0_changes_only_what_is_absent() -> None:
    image = torch.randn(4, 2, 8, 8)
    label = torch.zeros(4, 8, 8, dtype=torch.long)
    plain, _ = Augmentation()(Batch(image, label), 1, ("x",))
    kept, _ = Augmentation(flip=0.5, drop_channels=0, intensity=0)(Batch(image, label), 1, ("x",))
    assert torch.equal(Augmentation(intensity=0)(Batch(image, label), 1, ("x",))[0].image, kept.image)
    assert not torch.equal(plain.image, kept.image)
