"""ITK itself agrees on every voxel and its place, in both directions."""

from pathlib import Path

import numpy as np
import pytest

from wardround.data.readers import metaimage, nrrd
from wardround.data.readers.image_files import read_image, read_label

itk = pytest.importorskip("SimpleITK", reason="needs SimpleITK")
TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


def draw_image(seed: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Values (x, y, z) and an oblique, anisotropic affine; every other one left-handed."""
    random = np.random.default_rng(seed)
    axes, _ = np.linalg.qr(random.normal(size=(3, 3)))
    affine = np.eye(4)
    affine[:3, :3] = axes * random.uniform(0.3, 6, 3)
    affine[:3, 3] = random.uniform(-200, 200, 3)
    shape = random.integers(2, 12, 3)
    return random.integers(0, 100, shape).astype(dtype), affine


def as_itk(values: np.ndarray, affine: np.ndarray) -> "itk.Image":
    image = itk.GetImageFromArray(np.ascontiguousarray(values.T))
    lps = TO_RAS @ affine
    sides = np.linalg.norm(lps[:3, :3], axis=0)
    image.SetSpacing(sides.tolist())
    image.SetDirection((lps[:3, :3] / sides).reshape(-1).tolist())
    image.SetOrigin(lps[:3, 3].tolist())
    return image


def affine_of(image: "itk.Image") -> np.ndarray:
    affine = np.eye(4)
    affine[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
    affine[:3, 3] = image.GetOrigin()
    return TO_RAS @ affine


@pytest.mark.parametrize("ending", [".nrrd", ".nhdr", ".mha", ".mhd"])
@pytest.mark.parametrize("packed", [True, False])
def test_what_itk_writes_is_read_as_its_nifti_is(tmp_path: Path, ending: str, packed: bool) -> None:
    for seed, dtype in enumerate(["int16", "uint8", "float32", "int32", "uint16", "float64", "int8"] * 2):
        values, affine = draw_image(seed, dtype)
        itk.WriteImage(as_itk(values, affine), str(tmp_path / f"a{ending}"), packed)
        itk.WriteImage(as_itk(values, affine), str(tmp_path / "a.nii.gz"))
        found, nifti = read_image([tmp_path / f"a{ending}"]), read_image([tmp_path / "a.nii.gz"])
        assert found.affine is not None and nifti.affine is not None
        assert np.array_equal(found.data, nifti.data) and found.data.shape == (1, *values.shape)
        assert np.allclose(found.affine, nifti.affine, rtol=0, atol=1e-4)
        assert np.allclose(found.affine, affine, rtol=0, atol=1e-9)


def test_itk_reads_what_is_written_here(tmp_path: Path) -> None:
    for seed in range(50):
        values, affine = draw_image(seed, "uint8")
        (tmp_path / "a.mha").write_bytes(metaimage.encode(values, affine))
        content = nrrd.encode_segments(values, affine, {1: "liver"}, [(1, 2, 3)])
        (tmp_path / "a.seg.nrrd").write_bytes(content)
        for name in ("a.mha", "a.seg.nrrd"):
            image = itk.ReadImage(str(tmp_path / name))
            assert np.array_equal(itk.GetArrayFromImage(image).T, values)
            assert np.allclose(affine_of(image), affine, rtol=0, atol=1e-9)
            assert np.array_equal(read_label(tmp_path / name).data[0], values)
    assert image.GetMetaData("Segment0_Name") == "liver"


def test_vectors_of_itk_are_channels(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, 4, 5, 2)).astype(np.float32)  # (z, y, x, C)
    image = itk.GetImageFromArray(values, isVector=True)
    maps = np.moveaxis(values.T, 0, 0)
    for ending in (".nrrd", ".mha"):
        itk.WriteImage(image, str(tmp_path / f"a{ending}"))
        assert np.array_equal(read_image([tmp_path / f"a{ending}"]).data, maps)
        encode = nrrd.encode if ending == ".nrrd" else metaimage.encode
        (tmp_path / f"b{ending}").write_bytes(encode(maps, np.eye(4), channels=True))
        assert np.array_equal(itk.GetArrayFromImage(itk.ReadImage(str(tmp_path / f"b{ending}"))), values)
