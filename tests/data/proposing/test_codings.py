"""Maps of colours and of mask files that `init` proposes, over several sources and in odd cases."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pytest import raises

from wardround.data.proposing.proposal import Proposal, describe, propose
from wardround.errors import DataError

RED, GREEN, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (255, 255, 255), (0, 0, 0)


def save(path: Path, values: NDArray[np.generic]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).save(path)


def centre(folder: Path, *colours: tuple[int, int, int], ground: tuple[int, int, int] = BLACK) -> Path:
    """Four cases whose masks have a square of each colour, each smaller than the one before."""
    draw = np.random.default_rng(len(folder.name))
    for n in range(4):
        label = np.full((32, 32, 3), ground)
        for place, colour in enumerate(colours):
            label[8 * place : 8 * place + 7 - place, :8] = colour
        save(folder / "images" / f"c{n}.png", draw.integers(0, 255, (32, 32, 3)))
        save(folder / "masks" / f"c{n}.png", label)
    return folder


def told(proposal: Proposal) -> str:
    return " ".join(describe(proposal))


def test_sources_of_colours_share_one_map(tmp_path: Path) -> None:
    proposal = propose([centre(tmp_path / "north", RED, GREEN), centre(tmp_path / "south", RED, GREEN)])
    colours = {"#000000": 0, "#ff0000": 1, "#00ff00": 2}
    assert [source.colours for source in proposal.file.sources] == [colours, colours]


def test_the_most_frequent_colour_is_background_where_nothing_is_black(tmp_path: Path) -> None:
    proposal = propose([centre(tmp_path / "north", RED, ground=WHITE)])
    assert proposal.file.sources[0].colours == {"#ffffff": 0, "#ff0000": 1}
    assert "#ffffff (95 % of pixels) is taken for background: a guess" in told(proposal)


def test_a_colour_of_one_hospital_only_is_warned_of(tmp_path: Path) -> None:
    proposal = propose([centre(tmp_path / "north", RED), centre(tmp_path / "south", GREEN)])
    assert "client 'north' has no case with class" in " ".join(proposal.warnings)


def test_colours_here_and_numbers_there_are_a_guess_that_is_said(tmp_path: Path) -> None:
    proposal = propose([centre(tmp_path / "north", RED), centre(tmp_path / "south", (1, 1, 1))])
    assert [source.colours is not None for source in proposal.file.sources] == [True, False]
    assert "Masks of south hold numbers, those of the others colours" in told(proposal)


def test_blurred_masks_are_said_and_not_counted(tmp_path: Path) -> None:
    folder = centre(tmp_path / "north", RED)
    noise = np.random.default_rng(0).integers(0, 255, (32, 32, 3))
    save(folder / "masks" / "c0.png", noise)
    proposal = propose([folder])
    assert proposal.file.sources[0].colours == {"#000000": 0, "#ff0000": 1}
    assert "c0.png holds 1024 colours, but a mask has one a class" in told(proposal)
    for n in range(4):
        save(folder / "masks" / f"c{n}.png", noise)
    with raises(DataError, match="1024 colours, but a mask has one a class"):
        propose([folder])


def test_black_and_white_masks_in_colours_are_read_as_numbers(tmp_path: Path) -> None:
    proposal = propose([centre(tmp_path / "north", WHITE)])
    assert proposal.file.sources[0].colours is None and proposal.file.labels == {"class_1": (255,)}


def organs(folder: Path, *names: str, nested: bool = False) -> Path:
    for n in range(4):
        save(folder / "images" / f"c{n}.png", np.random.default_rng(n).integers(0, 255, (32, 32, 3)))
        for place, name in enumerate(names):
            mask = np.zeros((32, 32))
            mask[8 * place : 32 if nested else 8 * place + 8] = 1
            save(folder / "masks" / f"c{n}_{name}.png", mask)
    return folder


def test_sources_number_masks_of_one_name_alike(tmp_path: Path) -> None:
    north, south = (
        organs(tmp_path / "north", "liver", "spleen"),
        organs(tmp_path / "south", "kidney", "spleen"),
    )
    proposal = propose([north, south])
    assert proposal.file.labels == {"kidney": (1,), "liver": (2,), "spleen": (3,)}
    assert "client 'north' has no case with class 'kidney'" in " ".join(proposal.warnings)


def test_masks_that_overlap_are_ordered_from_large_to_small_and_that_is_said(tmp_path: Path) -> None:
    proposal = propose([organs(tmp_path / "north", "whole", "core", nested=True)])
    source = proposal.file.sources[0]
    assert source.overlap == "later" and source.masks == {"whole": 1, "core": 2}
    assert "Masks overlap: core and whole" in told(proposal) and "drawings of one structure" in told(proposal)
