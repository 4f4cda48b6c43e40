"""Which mask file is whose, and of which class."""

from pathlib import Path

from pytest import mark

from wardround.data.readers.class_masks import find_class_masks


def find(*stems: str, cases: tuple[str, ...] = ("p1", "p2")) -> dict[str, list[str]]:
    found = find_class_masks(cases, Path("nowhere"), {stem: Path(f"{stem}.png") for stem in stems})
    return {case: sorted(own) for case, own in found.items()}


@mark.parametrize(
    "name", ["{c}_{o}", "{o}_{c}", "{c}-{o}", "{c}_{o}_mask", "{c}_seg-{o}", "mask_{c}_{o}", "{c} {o}"]
)
def test_classes_are_what_names_have_beside_the_case(name: str) -> None:
    stems = [name.format(c=case, o=organ) for case in ("p1", "p2") for organ in ("liver", "left_kidney")]
    assert find(*stems) == {"p1": ["left_kidney", "liver"], "p2": ["left_kidney", "liver"]}


def test_a_case_may_lack_a_class() -> None:
    assert find("p1_liver", "p1_spleen", "p2_liver") == {"p1": ["liver", "spleen"], "p2": ["liver"]}


@mark.parametrize(
    "stems",
    [
        ("p1_lesion", "p2_lesion"),  # one class
        ("p1", "p1_liver", "p1_spleen"),  # a label of the image's own name
        ("p1_mask", "p1_liver", "p1_spleen"),
        ("p1_rater1", "p1_rater2"),
        ("p1_1", "p1_2"),
        ("p1_a", "p1_b"),
        ("p1_observer-1", "p1_observer-2"),
    ],
)
def test_other_files_are_not_taken_for_classes(stems: tuple[str, ...]) -> None:
    assert find(*stems) == {}


def test_the_longest_name_of_a_case_counts() -> None:
    found = find("p1_a_liver", "p1_a_spleen", "p1_liver", "p1_spleen", cases=("p1", "p1_a"))
    assert found == {"p1_a": ["liver", "spleen"], "p1": ["liver", "spleen"]}
