"""Names of structures become classes where they are medical terms, and never where they may name someone."""

import pytest

from wardround.data.dicom.class_names import as_term, find_code, name_class

pytest.importorskip("pydicom")


@pytest.mark.parametrize(
    ("said", "term"),
    [
        ("Liver", "liver"),
        ("LIVER", "liver"),
        ("Left kidney", "left_kidney"),
        ("Kidney_L", "kidney_left"),
        ("SpinalCord", "spinal_cord"),
        ("GTV", "gtv"),
        ("PTV 2", "ptv_2"),
        ("tumour", "tumour"),
        ("optic disc", "optic_disc"),
    ],
)
def test_medical_terms_are_used(said: str, term: str) -> None:
    assert as_term(said) == term


@pytest.mark.parametrize(
    "said",
    ["Mayer", "Lewis", "liver Mr Smith", "Liver 1960", "GTV 19600131", "JS", "", "left right kidney", "Müller Leber",
     "liver_Hans", "4711", "Liver;Smith", "L", "Moore"],
)  # fmt: skip
def test_free_text_is_not(said: str) -> None:
    assert as_term(said) is None


def test_a_code_says_the_term_where_the_name_does_not() -> None:
    assert name_class("drawn by Dr Smith", ("10200004", "SCT"), {}) == "liver"
    assert name_class("drawn by Dr Smith", ("10200004", "99SMITH"), {}) is None
    assert name_class("drawn by Dr Smith", ("85756007", "SCT"), {}) is None  # tissue says nothing
    assert name_class("drawn by Dr Smith", None, {}) is None


def test_classes_of_the_user_are_taken_and_others_left_out() -> None:
    renamed = {"gtv js": "tumour"}
    assert name_class(" GTV JS ", None, renamed) == "tumour"
    assert name_class("Liver", None, renamed) is None


def test_codes_are_found_for_classes_whatever_their_side() -> None:
    assert [find_code(name) and find_code(name).value for name in ("liver", "kidney_left", "nonsense")] == [
        "10200004",
        "64033007",
        None,
    ]
