"""From which side a volume is looked at."""

import numpy as np
import torch
from nibabel.orientations import apply_orientation, axcodes2ornt, ornt_transform
from pytest import approx, mark

from wardround.engine.judging.views import choose_view


def mark_corner(orientation: str) -> torch.Tensor:
    """A 4 x 5 x 6 volume whose values say how far right (100), anterior (10) and superior (1) a voxel is.

    By nibabel, which knows nothing of our views: made in RAS, then reoriented.
    """
    grid = np.indices((4, 5, 6))
    ras = 100 * grid[0] + 10 * grid[1] + grid[2]
    change = ornt_transform(axcodes2ornt(("R", "A", "S")), axcodes2ornt(tuple(orientation)))

    return torch.from_numpy(np.ascontiguousarray(apply_orientation(ras, change)))


@mark.parametrize("orientation", ["RAS", "LPS", "LAS", "SAR", "IPL", "AIR"])
@mark.parametrize(
    ("coarse", "plane", "corner", "down", "right"),
    [
        ("SI", "axial", 340, -10, -100),  # top left: the patient's right, anterior
        ("AP", "coronal", 305, -1, -100),  # top left: right, superior
        ("RL", "sagittal", 45, -1, -10),  # top left: anterior, superior
    ],
)
def test_up_is_anterior_or_superior_and_the_patients_right_is_on_the_left(
    orientation: str, coarse: str, plane: str, corner: int, down: int, right: int
) -> None:
    volume = mark_corner(orientation)
    spacing = [5.0 if code in coarse else 1.0 for code in orientation]
    view = choose_view(volume.shape, spacing, orientation)
    first = view.turn(volume)[0 if orientation[view.axes[0]] in "RAS" else -1]

    assert view.plane == plane
    assert first[0, 0] == corner
    assert first[1, 0] - first[0, 0] == down and first[0, 1] - first[0, 0] == right
    assert view.aspect(spacing) == 1.0


def test_equal_sides_are_shown_in_the_axial_plane() -> None:
    assert choose_view((20, 30, 40), (1.0, 1.0, 1.0), "RAS").plane == "axial"
    assert choose_view((20, 30, 40), (1.0, 1.0, 1.0), "SRA").axes[0] == 0


def test_without_an_orientation_slices_go_along_the_longest_side_or_the_fewest_voxels() -> None:
    assert choose_view((20, 30, 40), (1.0, 3.0, 1.0), None).axes == (1, 0, 2)
    assert choose_view((200, 200, 24), (1.0, 1.0, 1.0), None).axes == (2, 0, 1)
    assert choose_view((16, 16, 16), (1.0, 1.0, 1.0), None).axes == (0, 1, 2)
    assert choose_view((16, 16, 16), (1.0, 1.0, 1.0), None).plane == ""


def test_pixels_keep_the_aspect_of_millimetres() -> None:
    view = choose_view((20, 30, 40), (0.5, 2.0, 6.0), "RAS")  # rows along A, columns along R

    assert view.plane == "axial" and view.aspect((0.5, 2.0, 6.0)) == approx(4.0)
