"""Class names from what people call structures in DICOM, without repeating a word that may name someone.

A name is used where it is one of the terms that DICOM lists for segments (CID 7151: Liver, Left kidney), or
one of radiotherapy (GTV, PTV 2), whatever its spelling; a segment's code says the term where its name does
not. Any other name is free text: it is used only where the user gives it a class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

SIDES = {"left": "left", "l": "left", "lt": "left", "right": "right", "r": "right", "rt": "right"}
RADIOTHERAPY = ("gtv", "ctv", "ptv", "itv", "body", "external", "couch", "oar")
USUAL = (
    "tumour", "tumor", "oedema", "polyp", "optic disc", "optic cup", "parotid", "urinary bladder",
    "whole tumour", "whole tumor", "enhancing tumour", "enhancing tumor", "tumour core", "tumor core",
)  # fmt: skip
VAGUE = ("tissue", "organ", "lesion", "anatomical structure", "morphologically abnormal structure")
ALSO = {"tumour": "neoplasm", "tumor": "neoplasm", "oedema": "edema", "parotid": "parotidgland"}
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def name_class(said: str, code: tuple[str, str] | None, renamed: Mapping[str, str]) -> str | None:
    """The class of a structure; None where its name is free text.

    said: its name in the file; code: the value and scheme of its code, or None; renamed: classes that the
    user gives, by such names in lower case.
    """
    own = renamed.get(said.strip().casefold())
    if own is not None or renamed:
        return own
    known = as_term(said)
    if known is not None or code is None:
        return known
    meanings = (found.meaning for found in list_codes().values() if (found.value, "SCT") == code)
    known = next(meanings, "")
    return None if known.casefold() in VAGUE else as_term(known)


def as_term(said: str) -> str | None:
    """A name in lower case with `_` between words, if it is a known term.

    >>> as_term("Kidney_L"), as_term("GTV2"), as_term("liver Mr Smith")
    ('kidney_left', 'gtv_2', None)
    """
    words = [word.casefold() for word in WORD.findall(said)]
    words = [SIDES.get(word, word) for word in words]
    sides = [word for word in words if word in ("left", "right")]
    numbers = [word for word in words if word.isdecimal()]
    rest = "".join(word for word in words if word not in sides and not word.isdecimal())
    if rest not in list_terms() or len(sides) > 1 or len(numbers) > 1 or any(len(n) > 1 for n in numbers):
        return None
    return "_".join(words)


@cache
def list_codes() -> Mapping[str, Any]:
    """Terms without blanks, in lower case, with their codes."""
    from pydicom.sr.codedict import codes  # type: ignore[import-not-found,unused-ignore]

    return {keyword.casefold(): getattr(codes.cid7151, keyword) for keyword in codes.cid7151.dir()}


@cache
def list_terms() -> frozenset[str]:
    """All that may be the name of a class."""
    return frozenset({*list_codes(), *(term.replace(" ", "") for term in (*RADIOTHERAPY, *USUAL))})


def find_code(name: str) -> Any | None:
    """DICOM's code of a class, its side left out; None where there is none."""
    words = [SIDES.get(word.casefold(), word.casefold()) for word in WORD.findall(name)]
    wanted = "".join(word for word in words if word not in SIDES.values() and not word.isdecimal())
    return list_codes().get(ALSO.get(wanted, wanted))
