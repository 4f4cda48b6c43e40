"""Pairs by what names share, and what is not taken for a pair."""

from pytest import mark

from wardround.data.readers.pairing import match_cores, match_stems


@mark.parametrize(
    ("images", "labels"),
    [
        (["volume-0", "volume-1", "volume-10"], ["segmentation-0", "segmentation-1", "segmentation-10"]),
        (["img0001", "img0002", "img0010"], ["label0001", "label0002", "label0010"]),
        (["img_a_1", "img_b_2"], ["gt_a_1", "gt_b_2"]),
        (["a_img", "b_img"], ["a_mask", "b_mask"]),
    ],
)
def test_words_of_images_and_labels_may_both_differ_from_the_case(
    images: list[str], labels: list[str]
) -> None:
    assert match_cores(images, labels) == dict(zip(images, labels, strict=True))
    assert match_cores(images, labels[::-1]) == dict(zip(images, labels, strict=True))


def test_an_image_without_label_does_not_shift_the_others() -> None:
    images = [f"img{n:04d}" for n in range(1, 12)]
    labels = [f"label{n:04d}" for n in range(1, 10)]
    assert match_cores(images, labels) == dict(zip(images, labels, strict=False))


@mark.parametrize(
    ("images", "labels"),
    [
        (["a0", "a1"], ["z0", "z1"]),  # no word says that these are labels
        (["img1", "img2", "img3"], ["mask7", "mask8", "mask9"]),
        (["img1"], ["mask1"]),
        (["x", "y"], ["x", "y"]),
    ],
)
def test_what_merely_counts_alike_is_no_pair(images: list[str], labels: list[str]) -> None:
    assert match_cores(images, labels) == {}


def test_a_word_inside_a_name_is_found_where_it_is_the_same_for_all() -> None:
    assert match_stems(["s_1", "s_2"], ["s_mask_1", "s_mask_2"]) == (
        {"s_1": "s_mask_1", "s_2": "s_mask_2"},
        {},
    )
