"""Patches of volumes: where they lie, what is beyond the edge, and that the generator alone decides."""

import torch
from pytest import mark, raises

from wardround.data.cases import Case, JoinedSplit
from wardround.data.serving.resident import (
    PatchSplit,
    StoredCase,
    choose_patch,
    choose_start,
    crop_patch,
    join_splits,
    start_limits,
)
from wardround.errors import ConfigError, DataError
from wardround.training.workbench import read_in_order


def stored(name: str, *shape: int, lesion: tuple[int, ...] | None = None, value: int = 1) -> StoredCase:
    """An image in which every voxel knows its place, and a lesion of one voxel."""
    places = torch.cartesian_prod(*[torch.arange(side) for side in shape]).T.reshape(len(shape), *shape)
    label = torch.zeros(shape, dtype=torch.uint8)
    if lesion is not None:
        label[lesion] = value
    voxels = {value: (label == value).nonzero()} if lesion is not None else {}
    return StoredCase(Case(name, places.float(), label, (1.0,) * len(shape)), voxels)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@mark.parametrize("shape, patch", [((40, 30), (8, 12)), ((20, 30, 25), (8, 12, 6))], ids=str)
def test_a_patch_is_that_part_of_image_and_label(shape: tuple[int, ...], patch: tuple[int, ...]) -> None:
    lesion = tuple(side // 2 for side in shape)
    split = PatchSplit([stored("a", *shape, lesion=lesion)], patch, 1.0)

    batch = split.batch([0, 0, 0], draw())

    assert batch.image.shape == (3, len(shape), *patch) and batch.label.shape == (3, *patch)
    assert batch.label.dtype == torch.int64 and batch.image.dtype == torch.float32
    for image, label in zip(batch.image, batch.label, strict=True):
        where = label.nonzero()
        assert image[(slice(None), *where[0])].tolist() == list(lesion)  # the voxel is where it was
        assert where.tolist() == [[side // 2 for side in patch]]  # and in the middle


def test_uniform_patches_reach_every_corner_and_stay_inside() -> None:
    split = PatchSplit([stored("a", 10, 7)], (4, 4), 0.0)

    images = split.batch([0] * 400, draw()).image
    starts = {tuple(image[:, 0, 0].int().tolist()) for image in images}

    assert starts == {(x, y) for x in range(7) for y in range(4)}


def test_the_share_around_foreground_is_the_setting() -> None:
    split = PatchSplit([stored("a", 400, 400, lesion=(3, 390))], (8, 8), 0.3)

    labels = split.batch([0] * 2000, draw()).label

    assert 0.26 < float((labels.sum(dim=(1, 2)) > 0).double().mean()) < 0.34


def test_a_share_of_every_batch_holds_foreground_wherever_its_cases_have_some() -> None:
    sick = [stored(name, 400, 400, lesion=(3, 390)) for name in "abc"]
    split = PatchSplit([*sick, stored("healthy", 400, 400)], (8, 8), 1 / 3, by="batch")

    def count(indices: list[int], seed: int) -> int:
        return int(split.batch(indices, draw(seed)).label.flatten(1).any(dim=1).sum())

    assert {count([0, 1, 2, 3, 0, 1], seed) for seed in range(20)} == {2}
    assert {count([0, 1, 2, 0], seed) for seed in range(20)} == {2}  # rounded up
    assert {count([3, 2], seed) for seed in range(20)} == {1}
    assert count([0], 0) == 1 and count([3, 3, 3], 0) == 0
    which = [split.batch([0, 1, 2], draw(s)).label.flatten(1).any(dim=1).int().argmax() for s in range(20)]
    assert len(set(map(int, which))) == 3  # not always the same place in the batch


def test_pooled_patches_are_one_split_and_the_same_bytes_as_one_by_one() -> None:
    parts = [PatchSplit([stored(name, 20, 30, lesion=(7, 7))], (8, 8), 0.5) for name in "abcdef"]
    joined, apart = join_splits(parts), JoinedSplit(parts)

    assert isinstance(joined, PatchSplit) and joined.names == apart.names
    one, other = (split.batch([3, 0, 5, 1], draw(2)) for split in (joined, apart))
    assert torch.equal(one.image, other.image) and torch.equal(one.label, other.label)
    assert isinstance(join_splits([*parts, PatchSplit(parts[0].cases, (4, 4), 0.5)]), JoinedSplit)


def test_a_rare_class_is_drawn_as_often_as_a_common_one() -> None:
    case = stored("a", 60, 60)
    case.case.label[:30, :30] = 1
    case.case.label[55, 55] = 2
    voxels = {value: (case.case.label == value).nonzero() for value in (1, 2)}
    split = PatchSplit(
        [StoredCase(case.case, {**voxels, 3: torch.zeros(0, 2, dtype=torch.long)})], (4, 4), 1.0
    )

    labels = split.batch([0] * 1000, draw()).label

    assert 0.45 < float((labels == 2).flatten(1).any(dim=1).double().mean()) < 0.55


@mark.parametrize("foreground", [0.0, 1.0])
def test_a_volume_smaller_than_the_patch_is_padded_with_its_edge_and_label_zero(foreground: float) -> None:
    case = stored("thin", 20, 20, 5, lesion=(0, 19, 4), value=2)
    batch = PatchSplit([case], (8, 8, 12), foreground).batch([0] * 50, draw())

    assert batch.image.shape == (50, 3, 8, 8, 12)
    slices = batch.image[:, 2, 0, 0]  # each voxel's own slice number, along the padded axis
    assert all(row.unique().tolist() == [0, 1, 2, 3, 4] for row in slices)
    assert all(row.tolist() == sorted(row.tolist()) for row in slices)
    inside = (batch.label == 2).sum(dim=(1, 2, 3))
    assert inside.max() <= 1 and (foreground == 0 or inside.min() == 1)


def test_a_case_without_foreground_gives_patches_anywhere() -> None:
    split = PatchSplit([stored("healthy", 30, 30)], (8, 8), 1.0)

    assert len(split.batch([0] * 20, draw()).image[:, :, 0, 0].unique(dim=0)) > 5


def test_the_generator_alone_decides_and_cases_do_not_disturb_each_other() -> None:
    cases = [stored("a", 20, 30), stored("b", 40, 25, lesion=(7, 7)), stored("c", 9, 50)]
    split = PatchSplit(cases, (8, 8), 0.5)

    one, same, other = (split.batch([2, 0, 1], draw(seed)) for seed in (1, 1, 2))
    others = PatchSplit([cases[0], stored("x", 33, 44), cases[2]], (8, 8), 0.5).batch([2, 0, 1], draw(1))

    assert torch.equal(one.image, same.image) and torch.equal(one.label, same.label)
    assert not torch.equal(one.image, other.image)
    assert torch.equal(one.image[:2], others.image[:2])


def test_evaluation_takes_whole_cases_one_at_a_time() -> None:
    split = PatchSplit([stored("a", 20, 30), stored("b", 20, 30)], (8, 8), 0.5)

    assert split.draws and not split.one_shape
    assert [tuple(batch.image.shape) for batch in read_in_order(split, 16)] == [(1, 2, 20, 30)] * 2
    with raises(DataError, match=r"'a' \(20x30\) and 'c' \(9x9\) cannot be in one batch"):
        PatchSplit([stored("a", 20, 30), stored("c", 9, 9)], (8, 8), 0.5).batch([0, 1])


def test_a_patch_of_other_dimensions_is_refused_with_the_case() -> None:
    with raises(ConfigError, match="data.patch is 8x8, but case 'a' is 20x30x4; give 3 numbers"):
        PatchSplit([stored("a", 20, 30, 4)], (8, 8), 0.5)


def test_places_at_the_very_ends() -> None:
    case = stored("a", 10, 3, lesion=(9, 0))
    assert start_limits((10, 3), (4, 8)) == [(0, 6), (-5, 0)]
    assert choose_start(case, (4, 8), 1.0, [0.0, 0.999, 0.999, 0.5, 0.5]) == (6, -4)
    assert choose_start(case, (4, 8), 0.0, [0.5, 0.5, 0.5, 0.999999, 0.0]) == (6, -5)
    image, label = crop_patch(case, (6, -5), (4, 8))
    assert image[1, 0].tolist() == [0, 0, 0, 0, 0, 0, 1, 2] and label.nonzero().tolist() == [[3, 5]]


def test_a_change_of_the_images_comes_before_cutting() -> None:
    case = stored("a", 20, 20)
    changed = StoredCase(case.case, {}, lambda image: image - image.mean())

    whole = changed.image
    part = PatchSplit([changed], (4, 4), 0.0).batch([0], draw()).image

    assert bool((whole.unfold(1, 4, 1).unfold(2, 4, 1) == part[0][:, None, None]).all(dim=(0, 3, 4)).any())


def test_a_default_patch_fits_the_volumes() -> None:
    assert choose_patch([(240, 240, 155), (250, 230, 24), (256, 256, 30)]) == (96, 96, 32)
    assert choose_patch([(5, 100), (7, 120), (9, 90)]) == (16, 96)
