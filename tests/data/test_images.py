"""Every kind of image file is read as a person sees it, or reported with a reason."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from privileges import unprivileged

from vitrail.data.images import EXTENSIONS, UnreadableImage, inspect_image, read_image

ORIENTATION = 0x0112


def picture(h: int = 12, w: int = 16) -> Image.Image:
    """A colour image in which every pixel differs from its neighbours."""
    y, x = np.mgrid[:h, :w]
    return Image.fromarray(np.stack([y * 255 // h, x * 255 // w, (y + x) % 7 * 36], axis=2).astype(np.uint8))


def saved(image: Image.Image, path: Path, **options: object) -> Path:
    image.save(path, **options)
    return path


def reason(path: Path) -> str:
    """Why a file cannot be read, which reading and inspecting must agree on."""
    with pytest.raises(UnreadableImage) as read:
        read_image(path)
    with pytest.raises(UnreadableImage) as inspected:
        inspect_image(path)
    assert str(read.value) == str(inspected.value)
    return str(read.value)


def is_readable(read: Callable[[Path], object], path: Path) -> bool:
    try:
        read(path)
    except UnreadableImage:
        return False
    return True


def test_colour_has_three_channels_and_grey_has_one(tmp_path):
    colour, grey = saved(picture(), tmp_path / "c.png"), saved(picture().convert("L"), tmp_path / "g.png")
    assert np.array_equal(read_image(colour), np.asarray(picture()))
    assert np.array_equal(read_image(str(grey))[:, :, 0], np.asarray(picture().convert("L")))
    assert read_image(grey).shape == (12, 16, 1)
    assert inspect_image(colour).grey is False
    assert inspect_image(grey).grey is True


def test_the_number_of_channels_can_be_forced(tmp_path):
    colour, grey = saved(picture(), tmp_path / "c.png"), saved(picture().convert("L"), tmp_path / "g.png")
    assert np.array_equal(read_image(colour, 1)[:, :, 0], np.asarray(picture().convert("L")))
    three = read_image(grey, 3)
    assert three.shape == (12, 16, 3)
    assert (three == read_image(grey)).all()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("PPM", {}),
        ("WEBP", {}),
    ],
)
def test_a_cut_file_is_unreadable_wherever_it_is_cut(tmp_path, kind, options):
    buffer = io.BytesIO()
    picture(48, 64).save(buffer, kind, **options)
    whole = buffer.getvalue()
    path = tmp_path / "cut.img"
    for share in (0.3, 0.6, 0.9):
        path.write_bytes(whole[: int(len(whole) * share)])
        assert reason(path)
    path.write_bytes(whole)
    assert read_image(path).shape == (48, 64, 3)


def test_the_reason_is_a_few_words(tmp_path):
    whole = saved(picture(48, 64), tmp_path / "whole.jpg").read_bytes()
    for name, content, expected in [
        ("cut.jpg", whole[:-200], "truncated"),
        ("empty.png", b"", "empty file"),
        ("text.png", b"these are words, not pixels", "not an image"),
        ("script.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    ]:
        path = tmp_path / name
        path.write_bytes(content)
        assert reason(path) == expected
    assert reason(tmp_path) == "a folder"
    assert reason(tmp_path / "missing.png") == "no such file or directory"


def test_a_forbidden_file_is_unreadable(tmp_path):
    path = saved(picture(), tmp_path / "secret.png")
    path.chmod(0)
    assert unprivileged(reason, path) == "permission denied"


def test_a_decompression_bomb_is_unreadable_and_a_large_image_is_not(tmp_path, monkeypatch):
    path = saved(picture(12, 16), tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Pillow warns from here and refuses twice as many
    assert read_image(path).shape == (12, 16, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    assert "192 pixels, above the limit" in reason(path)


def test_damaged_bytes_never_raise_anything_else(tmp_path):
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.img"
    outcomes = set()
    for kind in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"):
        buffer = io.BytesIO()
        picture().save(buffer, kind)
        for _ in range(30):
            content = bytearray(buffer.getvalue())
            for at in rng.integers(0, min(len(content), 200), 3):
                content[at] = rng.integers(256)
            path.write_bytes(content)
            outcomes |= {is_readable(read_image, path), is_readable(inspect_image, path)}
    assert outcomes == {True, False}


def test_cmyk_red_is_red(tmp_path):
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    for name in ("red.jpg", "red.tif"):
        image = read_image(saved(red, tmp_path / name))
        assert image.shape == (16, 16, 3)
        assert np.abs(image.astype(int) - (255, 0, 0)).max() <= 3
    assert inspect_image(tmp_path / "red.jpg").grey is False


@pytest.mark.parametrize("name", ["deep.png", "deep.tif", "deep.pgm"])
def test_sixteen_bits_are_kept_or_scaled_not_clipped(tmp_path, name):
    values = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    path = saved(Image.fromarray(values), tmp_path / name)
    assert read_image(path).dtype == np.uint16
    assert np.array_equal(read_image(path)[:, :, 0], values)
    assert np.array_equal(read_image(path, 3), values[:, :, None].repeat(3, axis=2))
    assert read_image(path, bits=8).tolist() == [[[0], [1], [128], [255]]]
    assert (inspect_image(path).grey, inspect_image(path).bits) == (True, 16)


def test_big_endian_sixteen_bits_are_read_too(tmp_path):
    values = np.array([[0, 32768, 65535]], dtype=">u2")
    path = saved(Image.frombytes("I;16B", (3, 1), values.tobytes()), tmp_path / "deep.tif")
    assert read_image(path).tolist() == [[[0], [32768], [65535]]]
    assert read_image(path, bits=8).tolist() == [[[0], [128], [255]]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([0, 100, 255], dtype=np.int32), [0, 100, 255]),
        (np.array([0, 32768, 65535], dtype=np.int32), [0, 128, 255]),
        (np.array([-5, 500_000, 1_000_000], dtype=np.int32), [0, 128, 255]),
        (np.array([0.0, 0.5, 1.0], dtype=np.float32), [0, 128, 255]),
        (np.array([0.0, 100.4, 255.0], dtype=np.float32), [0, 100, 255]),
        (np.array([np.nan, -1.0, 1.0], dtype=np.float32), [0, 0, 255]),
    ],
)
def test_thirty_two_bit_values_are_floats_that_tell_their_own_range(tmp_path, values, expected):
    path = saved(Image.fromarray(values[None]), tmp_path / "deep.tif")
    assert inspect_image(path).bits == 32
    assert read_image(path).dtype == np.float32
    assert np.array_equal(read_image(path)[0, :, 0], np.nan_to_num(values))
    assert read_image(path, bits=8)[0, :, 0].tolist() == expected


def test_one_bit_is_black_and_white(tmp_path):
    path = saved(Image.fromarray(np.array([[True, False]])), tmp_path / "bits.png")
    with Image.open(path) as stored:
        assert stored.mode == "1"
    assert read_image(path).tolist() == [[[255], [0]]]


def palette_image() -> Image.Image:
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putdata([0, 1, 2])
    return image


RED, GREEN, BLUE, WHITE = [255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]


def test_a_palette_is_looked_up(tmp_path):
    assert read_image(saved(palette_image(), tmp_path / "p.png")).tolist() == [[RED, GREEN, BLUE]]


@pytest.mark.parametrize(
    ("name", "transparency", "expected"),
    [
        ("index.png", 1, [RED, WHITE, BLUE]),
        ("alphas.png", b"\xff\x00\x80", [RED, WHITE, [127, 127, 255]]),
        ("index.gif", 1, [RED, WHITE, BLUE]),
    ],
)
def test_transparent_palette_entries_are_white(tmp_path, name, transparency, expected):
    path = saved(palette_image(), tmp_path / name, transparency=transparency)
    assert read_image(path).tolist() == [expected]


def test_alpha_is_composited_on_white(tmp_path):
    rgba = Image.fromarray(np.array([[[0, 0, 0, 0], [0, 0, 0, 128], [9, 8, 7, 255]]], dtype=np.uint8))
    assert read_image(saved(rgba, tmp_path / "rgba.png")).tolist() == [[WHITE, [127, 127, 127], [9, 8, 7]]]
    la = Image.merge("LA", [Image.new("L", (2, 1), 40), Image.fromarray(np.array([[0, 255]], dtype=np.uint8))])
    assert read_image(saved(la, tmp_path / "la.png")).tolist() == [[[255], [40]]]
    assert inspect_image(tmp_path / "la.png").grey is True
    pa = palette_image().convert("PA")
    pa.putalpha(Image.fromarray(np.array([[255, 0, 255]], dtype=np.uint8)))
    path = saved(pa, tmp_path / "pa.tif")
    with Image.open(path) as stored:
        assert stored.mode == "PA"
    assert read_image(path).tolist() == [[RED, WHITE, BLUE]]


def test_four_channels_keep_transparency(tmp_path):
    values = np.array([[[0, 0, 0, 0], [1, 2, 3, 128], [9, 8, 7, 255]]], dtype=np.uint8)
    assert np.array_equal(read_image(saved(Image.fromarray(values), tmp_path / "rgba.png"), 4), values)
    assert read_image(saved(palette_image(), tmp_path / "p.gif", transparency=1), 4)[0, :, 3].tolist() == [255, 0, 255]
    grey = Image.new("L", (1, 1), 40)
    assert read_image(saved(grey, tmp_path / "l.png"), 4).tolist() == [[[40, 40, 40, 255]]]


def test_a_colour_that_stands_for_transparent_is_white(tmp_path):
    colour = saved(palette_image().convert("RGB"), tmp_path / "rgb.png", transparency=(0, 255, 0))
    assert read_image(colour).tolist() == [[RED, WHITE, BLUE]]
    grey = Image.fromarray(np.array([[10, 20, 30]], dtype=np.uint8))
    assert read_image(saved(grey, tmp_path / "l.png", transparency=20)).tolist() == [[[10], [255], [30]]]


@pytest.mark.parametrize("name", ["moving.gif", "moving.png", "moving.webp", "moving.tif"])
def test_the_first_frame_of_an_animation_is_read(tmp_path, name):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    path = saved(frames[0], tmp_path / name, save_all=True, append_images=frames[1:])
    with Image.open(path) as stored:
        assert stored.n_frames == 2
    assert np.abs(read_image(path).astype(int) - RED).max() <= 3


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["turned.png", "turned.tif"])
def test_an_image_is_turned_by_its_exif_data(tmp_path, name, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = saved(picture(), tmp_path / name, exif=exif)
    upright = picture()
    upright.getexif()[ORIENTATION] = orientation
    expected = np.asarray(ImageOps.exif_transpose(upright))
    assert np.array_equal(read_image(path), expected)
    facts = inspect_image(path)
    assert (facts.h, facts.w) == expected.shape[:2] == ((16, 12) if orientation > 4 else (12, 16))
    assert facts.turn == orientation


def test_a_turned_jpeg_has_its_full_size_with_sides_swapped(tmp_path):
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    path = saved(picture(120, 163), tmp_path / "turned.jpg", exif=exif)
    facts = inspect_image(path)
    assert (facts.h, facts.w) == read_image(path).shape[:2] == (163, 120)


def test_broken_exif_data_is_passed_over(tmp_path):
    broken = b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\x01\xff\xff" * 9
    path = saved(picture(), tmp_path / "broken.jpg", exif=broken)
    assert read_image(path).shape == (12, 16, 3)
    assert inspect_image(path).h == 12


def test_pillow_warns_again_after_a_file_was_read(tmp_path, monkeypatch):
    path = saved(picture(), tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read_image, [path] * 200))
    assert list(warnings.filters) == before
    with pytest.raises(Image.DecompressionBombWarning):
        Image.open(path)


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="open files cannot be counted here")
def test_files_are_closed(tmp_path):
    whole = saved(picture(48, 64), tmp_path / "whole.jpg")
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(whole.read_bytes()[:-200])
    before = len(list(Path("/dev/fd").iterdir()))
    read_image(whole)
    inspect_image(whole)
    reason(cut)
    assert len(list(Path("/dev/fd").iterdir())) == before


def test_the_usual_extensions_count_as_images():
    assert {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".npy"} <= EXTENSIONS
    assert not {".txt", ".eps", ".pdf", ".mp4", ""} & EXTENSIONS


# The faster decoder, and images read in small


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request, monkeypatch):
    """Every test with it runs with the faster decoder and without."""
    if request.param == "pillow":
        monkeypatch.setattr("vitrail.data.images.simplejpeg", None)
    else:
        pytest.importorskip("simplejpeg")
    return request.param


def photo(h: int = 150, w: int = 201) -> Image.Image:
    """Textured and smooth parts, as photographs have."""
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image("china.jpg")).crop((100, 100, 400, 324)).resize((w, h))


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


OPTIONS = [
    {"subsampling": 0, "quality": 95},
    {"progressive": True},
    {"xmp": b'<x:xmpmeta tiff:Orientation="6"/>'},
    *({"exif": turned(k)} for k in (3, 5, 6, 8)),
]


@pytest.mark.parametrize(
    ("mode", "channels", "options"),
    [
        *((mode, channels, {}) for mode in ("RGB", "L", "CMYK") for channels in (None, 1, 3)),
        *(("RGB", None, options) for options in OPTIONS),
        ("CMYK", 3, OPTIONS[-1]),
    ],
)
def test_both_decoders_give_the_same_pixels(tmp_path, monkeypatch, mode, options, channels):
    pytest.importorskip("simplejpeg")
    path = saved(photo().convert(mode), tmp_path / "photo.jpg", **options)
    for min_side in (None, 30, 60):
        with monkeypatch.context() as patch:
            fast = read_image(path, channels, min_side=min_side)
            patch.setattr("vitrail.data.images.simplejpeg", None)
            slow = read_image(path, channels, min_side=min_side)
        assert fast.shape == slow.shape
        # The same library decodes for both; another build of it may round otherwise.
        assert np.abs(fast.astype(int) - slow).max() <= 2


def test_a_jpeg_cut_anywhere_is_as_unreadable_for_one_decoder_as_for_the_other(tmp_path, decoder):
    whole = saved(picture(48, 64), tmp_path / "whole.jpg").read_bytes()
    path = tmp_path / "cut.jpg"
    for end in range(1, len(whole), 37):
        path.write_bytes(whole[:end])
        assert reason(path) in ("truncated", "not an image", "damaged (broken JPEG file)"), (decoder, end)


@pytest.mark.parametrize("name", ["photo.jpg", "photo.png", "cmyk.jpg"])
def test_an_image_is_read_in_small_as_long_as_its_shorter_side_suffices(tmp_path, decoder, name):
    path = saved(photo().convert("CMYK" if name == "cmyk.jpg" else "RGB"), tmp_path / name)
    for min_side, factor in ((None, 1), (200, 1), (76, 1), (75, 2), (38, 2), (37, 4), (1, 8)):
        assert read_image(path, min_side=min_side).shape == (-(-150 // factor), -(-201 // factor), 3), (decoder, factor)


@pytest.mark.parametrize("name", ["photo.jpg", "photo.png"])
def test_an_image_in_small_of_twice_the_size_needed_gives_nearly_the_same(tmp_path, decoder, name):
    from sklearn.datasets import load_sample_image

    path = saved(Image.fromarray(load_sample_image("flower.jpg")), tmp_path / name)
    full = Image.fromarray(read_image(path))
    for side in (106, 53):
        size = side * 640 // 427, side
        small = Image.fromarray(read_image(path, min_side=2 * side))
        assert small.height < full.height, decoder
        images = [np.asarray(image.resize(size, Image.Resampling.BICUBIC)).astype(int) for image in (small, full)]
        assert np.abs(images[0] - images[1]).mean() < 2


def test_a_turned_image_is_turned_in_small_too(tmp_path, decoder):
    path = saved(photo(), tmp_path / "turned.jpg", exif=turned(6))
    assert read_image(path, min_side=75).shape == (101, 75, 3), decoder
