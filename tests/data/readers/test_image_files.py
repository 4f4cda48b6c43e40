"""Every kind of file is read as it lies, and every broken one is explained."""

import gzip
import os
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

from wardround.data.readers import image_files as files
from wardround.data.readers.image_files import read_image, read_label
from wardround.errors import DataError

OBLIQUE = np.array([[0, -2.0, 0.1, 5], [1.0, 0, 0, -3], [0, 0.1, 3.0, 7], [0, 0, 0, 1]])


def save_nifti(path: Path, values: np.ndarray, affine: np.ndarray = OBLIQUE) -> Path:
    nibabel.Nifti1Image(values, affine).to_filename(path)
    return path


def numbers(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.int16).reshape(shape)


# NIfTI


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_nifti_keeps_axes_affine_and_spacing(tmp_path: Path, ending: str) -> None:
    found = read_image([save_nifti(tmp_path / f"scan{ending}", numbers(3, 4, 5))])
    assert found.data.dtype == np.float32 and found.data.shape == (1, 3, 4, 5)
    assert np.array_equal(found.data[0], numbers(3, 4, 5))
    assert np.allclose(found.affine, OBLIQUE) and found.thin is None
    assert np.allclose(found.spacing, [1.0, np.sqrt(4.01), np.sqrt(9.01)])


def test_nifti_fourth_axis_holds_channels(tmp_path: Path) -> None:
    found = read_image([save_nifti(tmp_path / "scan.nii.gz", numbers(3, 4, 5, 2))])
    assert found.channels == 2 and found.spatial == (3, 4, 5)
    assert np.array_equal(found.data[1], numbers(3, 4, 5, 2)[..., 1])


def test_nifti_vector_has_its_channels_on_the_fifth_axis(tmp_path: Path) -> None:
    found = read_image([save_nifti(tmp_path / "scan.nii.gz", numbers(3, 4, 5, 1, 2))])
    assert found.data.shape == (2, 3, 4, 5)


def test_nifti_scaling_is_applied(tmp_path: Path) -> None:
    scan = nibabel.Nifti1Image(numbers(3, 4, 5), OBLIQUE)
    scan.header.set_slope_inter(2, -1024)
    raw = bytearray(scan.to_bytes())
    (tmp_path / "scan.nii").write_bytes(bytes(raw))
    stored = nibabel.load(tmp_path / "scan.nii").get_fdata()
    assert np.array_equal(read_image([tmp_path / "scan.nii"]).data[0], stored)


def test_nifti_in_colours_has_three_channels(tmp_path: Path) -> None:
    values = np.zeros((3, 4, 5), dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])
    values["G"] = 7
    assert [c.max() for c in read_image([save_nifti(tmp_path / "scan.nii.gz", values)]).data] == [0, 7, 0]


def test_nifti_2_is_read(tmp_path: Path) -> None:
    nibabel.Nifti2Image(numbers(3, 4, 5), OBLIQUE).to_filename(tmp_path / "scan.nii.gz")
    assert np.array_equal(read_image([tmp_path / "scan.nii.gz"]).data[0], numbers(3, 4, 5))


def test_a_name_that_lies_about_compression_is_no_obstacle(tmp_path: Path) -> None:
    plain = nibabel.Nifti1Image(numbers(3, 4, 5), OBLIQUE).to_bytes()
    (tmp_path / "plain.nii.gz").write_bytes(plain)
    (tmp_path / "packed.nii").write_bytes(gzip.compress(plain))
    for name in ("plain.nii.gz", "packed.nii"):
        assert read_image([tmp_path / name]).spatial == (3, 4, 5)


@pytest.mark.parametrize(("shape", "thin"), [((4, 5, 1), 2), ((4, 1, 5), 1), ((1, 4, 5), 0)])
def test_a_single_slice_is_2d_and_remembers_its_axis(
    tmp_path: Path, shape: tuple[int, ...], thin: int
) -> None:
    found = read_image([save_nifti(tmp_path / "scan.nii.gz", numbers(*shape), np.diag([1.0, 2, 3, 1]))])
    assert found.spatial == (4, 5) and found.thin == thin
    assert found.spacing == tuple(side for axis, side in enumerate((1.0, 2.0, 3.0)) if axis != thin)


def test_a_2d_nifti_is_2d(tmp_path: Path) -> None:
    found = read_image([save_nifti(tmp_path / "scan.nii.gz", numbers(4, 5), np.diag([1.0, 2, 3, 1]))])
    assert found.spatial == (4, 5) and found.spacing == (1.0, 2.0)


def test_one_file_a_channel(tmp_path: Path) -> None:
    one = save_nifti(tmp_path / "a_0000.nii.gz", numbers(3, 4, 5))
    two = save_nifti(tmp_path / "a_0001.nii.gz", numbers(3, 4, 5) + 100)
    found = read_image([one, two])
    assert found.data.shape == (2, 3, 4, 5) and found.data[1].min() == 100


def test_channels_of_another_shape_or_place_are_refused(tmp_path: Path) -> None:
    one = save_nifti(tmp_path / "a_0000.nii.gz", numbers(3, 4, 5))
    small = save_nifti(tmp_path / "small.nii.gz", numbers(3, 4, 4))
    moved = save_nifti(tmp_path / "moved.nii.gz", numbers(3, 4, 5), OBLIQUE + np.eye(4))
    with pytest.raises(DataError, match="small.nii.gz is 3x4x4 but a_0000.nii.gz is 3x4x5"):
        read_image([one, small])
    with pytest.raises(DataError, match="another affine"):
        read_image([one, moved])


def test_nan_voxels_are_read_for_the_check_to_judge(tmp_path: Path) -> None:
    values = numbers(3, 4, 5).astype(np.float32)
    values[0, 0, 0] = np.nan
    assert np.isnan(read_image([save_nifti(tmp_path / "scan.nii.gz", values)]).data[0, 0, 0, 0])


# Pictures and NumPy


def test_grey_colour_alpha_palette_and_16_bit_pictures(tmp_path: Path) -> None:
    grey = numbers(4, 5).astype(np.uint8)
    colour = np.stack([grey, grey + 1, grey + 2], axis=-1)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(colour).save(tmp_path / "colour.png")
    Image.fromarray(np.dstack([colour, np.full((4, 5), 9, np.uint8)])).save(tmp_path / "alpha.png")
    Image.fromarray(grey).convert("LA").save(tmp_path / "grey_alpha.png")
    Image.fromarray(colour).quantize(16).save(tmp_path / "palette.png")
    Image.fromarray(numbers(4, 5).astype(np.uint16) * 1000).save(tmp_path / "deep.png")
    Image.fromarray(grey > 3).save(tmp_path / "bits.png")
    Image.fromarray(colour).convert("CMYK").save(tmp_path / "cmyk.jpg")
    channels = {path.stem: read_image([path]).channels for path in tmp_path.iterdir()}
    assert channels == {
        "grey": 1, "colour": 3, "alpha": 3, "grey_alpha": 1, "palette": 3, "deep": 1, "bits": 1, "cmyk": 3,
    }  # fmt: skip
    assert np.array_equal(read_image([tmp_path / "alpha.png"]).data, np.moveaxis(colour, -1, 0))
    deep = read_image([tmp_path / "deep.png"])
    assert deep.data.max() == 19000 and deep.affine is None and deep.spacing == (1.0, 1.0)


def test_a_tiff_of_many_pages_is_a_volume(tmp_path: Path) -> None:
    pages = [Image.fromarray(numbers(4, 5).astype(np.float32) + 100 * page) for page in range(3)]
    pages[0].save(tmp_path / "stack.tif", save_all=True, append_images=pages[1:])
    found = read_image([tmp_path / "stack.tif"])
    assert found.spatial == (4, 5, 3) and found.data[0, 0, 0].tolist() == [0, 100, 200]


HELD = {  # EXIF orientation -> how a camera held that way stores an upright picture
    1: lambda upright: upright,
    2: np.fliplr,
    3: lambda upright: np.rot90(upright, 2),
    4: np.flipud,
    5: np.transpose,
    6: np.rot90,
    7: lambda upright: np.rot90(upright, 2).T,
    8: lambda upright: np.rot90(upright, -1),
}


def save_held(path: Path, upright: np.ndarray, orientation: int, mode: str = "L") -> Path:
    picture = Image.fromarray(np.ascontiguousarray(HELD[orientation](upright)))
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture.convert(mode).save(path, exif=exif, quality=100)
    return path


@pytest.mark.parametrize("orientation", HELD)
@pytest.mark.parametrize(("ending", "mode"), [(".jpg", "L"), (".png", "RGB"), (".tif", "L"), (".png", "P")])
def test_pictures_are_turned_upright_as_their_exif_says(
    tmp_path: Path, orientation: int, ending: str, mode: str
) -> None:
    upright = np.zeros((16, 24), np.uint8)
    upright[:8, :8] = upright[8:, :8] = upright[:8, 16:] = 255
    upright[12:] = 0
    path = save_held(tmp_path / f"photo{ending}", upright, orientation, mode)
    for found in (read_image([path]).data, read_label(path).data):
        assert found.shape[1:] == (16, 24)
        assert all(np.array_equal(channel > 128, upright > 0) for channel in found)


def test_sixteen_bits_and_pages_are_turned_upright_too(tmp_path: Path) -> None:
    deep = (np.arange(6, dtype=np.uint16) * 9000).reshape(2, 3)
    path = save_held(tmp_path / "deep.png", deep, 6, "I;16")
    assert np.array_equal(read_image([path]).data[0], deep)
    exif = Image.Exif()
    exif[0x0112] = 6
    pages = [Image.fromarray(np.rot90(np.full((2, 3), n, np.uint8))) for n in range(3)]
    pages[0].save(tmp_path / "pages.tif", save_all=True, append_images=pages[1:], exif=exif)
    with Image.open(tmp_path / "pages.tif") as stored:
        said = [(stored.seek(n), stored.tag_v2.get(0x0112))[1] for n in range(3)]
    assert said == [6, 6, 6] and read_image([tmp_path / "pages.tif"]).spatial == (2, 3, 3)


def test_metadata_that_cannot_be_read_turn_nothing(tmp_path: Path) -> None:
    picture = Image.fromarray(np.eye(16, 24, dtype=np.uint8) * 255)
    picture.save(tmp_path / "odd.png", exif=b"Exif\x00\x00no such thing at all")
    assert read_image([tmp_path / "odd.png"]).spatial == (16, 24)


def test_pages_of_several_sizes_are_refused(tmp_path: Path) -> None:
    small = Image.fromarray(np.zeros((2, 2), np.uint8))
    Image.fromarray(np.zeros((4, 5), np.uint8)).save(
        tmp_path / "stack.tif", save_all=True, append_images=[small]
    )
    with pytest.raises(DataError, match="several sizes"):
        read_image([tmp_path / "stack.tif"])


@pytest.mark.parametrize(
    ("shape", "channels", "spatial"),
    [
        ((8, 9), 1, (8, 9)),
        ((8, 9, 3), 3, (8, 9)),
        ((2, 8, 9), 2, (8, 9)),
        ((8, 9, 10), 1, (8, 9, 10)),
        ((2, 8, 9, 10), 2, (8, 9, 10)),
        ((8, 9, 10, 4), 4, (8, 9, 10)),
        ((6, 8, 9, 10), 6, (8, 9, 10)),
    ],
)
def test_numpy_channels_are_found(
    tmp_path: Path, shape: tuple[int, ...], channels: int, spatial: tuple[int, ...]
) -> None:
    np.save(tmp_path / "scan.npy", numbers(*shape))
    np.savez(tmp_path / "scan.npz", image=numbers(*shape), label=numbers(8, 9))
    for name in ("scan.npy", "scan.npz"):
        found = read_image([tmp_path / name])
        assert (found.channels, found.spatial) == (channels, spatial)
    assert read_label(tmp_path / "scan.npz").spatial == (8, 9)


# Labels


def test_whole_numbers_stored_as_floats_are_a_label(tmp_path: Path) -> None:
    values = (numbers(3, 4, 5) % 3).astype(np.float64)
    found = read_label(save_nifti(tmp_path / "label.nii.gz", values))
    assert found.data.dtype == np.int64 and np.array_equal(found.data[0], values)


def test_fractions_nan_and_one_hot_labels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not whole numbers, such as 0.5"):
        read_label(save_nifti(tmp_path / "half.nii.gz", np.full((3, 4, 5), 0.5, np.float32)))
    with pytest.raises(DataError, match="NaN"):
        read_label(save_nifti(tmp_path / "nan.nii.gz", np.full((3, 4, 5), np.nan, np.float32)))
    with pytest.raises(DataError, match="3x4x5x2.*one value a voxel"):
        read_label(save_nifti(tmp_path / "hot.nii.gz", numbers(3, 4, 5, 2)))


def test_labels_in_equal_colours_palettes_and_bits(tmp_path: Path) -> None:
    mask = (numbers(4, 5) % 3).astype(np.uint8)
    Image.fromarray(np.dstack([mask] * 3)).save(tmp_path / "equal.png")
    Image.fromarray(np.dstack([mask, mask, mask, mask * 0])).save(tmp_path / "equal_alpha.png")
    palette = Image.fromarray(mask)
    palette.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    palette.save(tmp_path / "palette.png")
    for name in ("equal.png", "equal_alpha.png", "palette.png"):
        assert np.array_equal(read_label(tmp_path / name).data[0], mask), name
    Image.fromarray(mask > 0).save(tmp_path / "bits.png")
    assert np.array_equal(read_label(tmp_path / "bits.png").data[0], mask > 0)
    Image.fromarray(np.dstack([mask, mask, mask * 2])).save(tmp_path / "colour.png")
    with pytest.raises(DataError, match="coloured label"):
        read_label(tmp_path / "colour.png")


def test_a_black_and_white_jpeg_label_is_cut_in_the_middle(tmp_path: Path) -> None:
    mask = np.zeros((64, 64), np.uint8)
    mask[20:40, 10:50] = 255
    Image.fromarray(mask).save(tmp_path / "mask.jpg", quality=75)
    assert len(np.unique(np.asarray(Image.open(tmp_path / "mask.jpg")))) > 2  # it rings
    assert np.array_equal(read_label(tmp_path / "mask.jpg").data[0], mask)


def test_a_jpeg_label_of_class_numbers_is_refused(tmp_path: Path) -> None:
    mask = np.zeros((64, 64), np.uint8)
    mask[20:40, 10:50] = 2
    Image.fromarray(mask).save(tmp_path / "mask.jpg")
    with pytest.raises(DataError, match="JPEG, which blurs class values"):
        read_label(tmp_path / "mask.jpg")


# Broken files


def truncated(path: Path, keep: float = 0.5) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])


def broken_files(folder: Path) -> dict[str, str]:
    """File name -> a word of the reason."""
    noise = np.random.default_rng(0).integers(0, 1000, (20, 20, 20)).astype(np.int16)
    (folder / "empty.nii.gz").touch()
    (folder / "empty.png").touch()
    truncated(save_nifti(folder / "truncated.nii.gz", noise))
    truncated(save_nifti(folder / "truncated.nii", noise))
    # only the checksum at the end is missing: all voxels are there
    truncated(save_nifti(folder / "last_bytes.nii.gz", noise), keep=0.9999)
    flipped = save_nifti(folder / "flipped.nii.gz", noise)
    content = bytearray(gzip.decompress(flipped.read_bytes()))
    packed = bytearray(gzip.compress(bytes(content), 0))
    packed[len(packed) // 2] ^= 1
    flipped.write_bytes(bytes(packed))
    (folder / "text.nii.gz").write_text("name,size\n" * 100)
    (folder / "short.nii").write_text("hello")
    (folder / "text.png").write_text("hello")
    Image.fromarray(noise[0].astype(np.uint8)).save(folder / "truncated.png")
    truncated(folder / "truncated.png")
    Image.fromarray(noise[0].astype(np.uint8)).save(folder / "truncated.jpg")
    truncated(folder / "truncated.jpg")
    np.save(folder / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (folder / "text.npy").write_text("hello")
    (folder / "text.npz").write_text("PK\x03\x04 hello")
    (folder / "loop.nii.gz").symlink_to("loop.nii.gz")
    (folder / "dangling.nii.gz").symlink_to("nowhere.nii.gz")
    (folder / "folder.nii.gz").mkdir()
    os.mkfifo(folder / "pipe.nii.gz")
    (folder / "scan.docx").write_text("hello")
    save_nifti(folder / "complex.nii.gz", np.ones((3, 4, 5), np.complex64))
    return {
        "empty.nii.gz": "empty", "empty.png": "empty", "truncated.nii.gz": "too early",
        "truncated.nii": "damaged", "last_bytes.nii.gz": "too early", "flipped.nii.gz": "CRC",
        "text.nii.gz": "not a NIfTI", "short.nii": "not a NIfTI", "text.png": "not a picture",
        "truncated.png": "truncated", "truncated.jpg": "truncated", "objects.npy": "plain NumPy",
        "text.npy": "plain NumPy", "text.npz": "npz", "loop.nii.gz": "symbolic links", "dangling.nii.gz": "link",
        "folder.nii.gz": "folder", "pipe.nii.gz": "regular", "scan.docx": "not a format",
        "complex.nii.gz": "complex", "missing.nii.gz": "does not exist",
    }  # fmt: skip


def test_every_broken_file_is_named_with_its_reason(tmp_path: Path) -> None:
    for name, reason in broken_files(tmp_path).items():
        for read in (lambda path: read_image([path]), read_label):
            with pytest.raises(DataError) as failure:
                read(tmp_path / name)
            sentence = str(failure.value)
            assert name in sentence and reason in sentence, sentence
            assert sentence.endswith(".") and "\n" not in sentence


def test_a_header_that_claims_too_much_is_refused(tmp_path: Path) -> None:
    path = save_nifti(tmp_path / "huge.nii", numbers(3, 4, 5))
    header = bytearray(path.read_bytes())
    header[42:48] = np.array([30000] * 3, "<i2").tobytes()
    path.write_bytes(bytes(header))
    with pytest.raises(DataError, match="30000x30000x30000"):
        read_image([path])


def test_a_flat_affine_is_refused(tmp_path: Path) -> None:
    path = save_nifti(tmp_path / "flat.nii", numbers(3, 4, 5))
    header = bytearray(path.read_bytes())
    header[280:328] = b"\0" * 48  # the three rows of the sform
    path.write_bytes(bytes(header))
    with pytest.raises(DataError, match="broken affine"):
        read_image([path])


def test_names_with_spaces_and_unicode_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "Łódź klinika"
    folder.mkdir()
    assert read_image([save_nifti(folder / "пациент 1 ü.nii.gz", numbers(3, 4, 5))]).spatial == (3, 4, 5)


def test_endings_are_known_in_any_case(tmp_path: Path) -> None:
    assert files.has_known_ending(Path("a.NII.GZ")) and files.has_known_ending(Path("b.Png"))
    assert not files.has_known_ending(Path("a.docx"))
