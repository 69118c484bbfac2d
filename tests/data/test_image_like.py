"""An image gives the same pixels, and every verb the same answer, however it is given."""

from __future__ import annotations

import io

import numpy as np
import pandas
import polars
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.data.image_like import given, given_image
from vitrail.data.images import read_image
from vitrail.data.pixels import UnreadableImage
from vitrail.errors import UserError

GREY = np.random.default_rng(0).integers(0, 256, (9, 7), dtype=np.uint8)
COLOUR = np.random.default_rng(1).integers(0, 256, (9, 7, 3), dtype=np.uint8)
DEEP = np.random.default_rng(2).integers(0, 65536, (9, 7), dtype=np.uint16)


def kinds(path, values):
    """Every way to give the image in a lossless file, by name."""
    array = values if values.ndim == 3 else values[:, :, None]
    tensor = torch.from_numpy(array.transpose(2, 0, 1).copy())
    found = {
        "str": str(path),
        "path": path,
        "bytes": path.read_bytes(),
        "bytearray": bytearray(path.read_bytes()),
        "file": io.BufferedReader(io.BytesIO(path.read_bytes())),
        "stream": io.BytesIO(path.read_bytes()),
        "PIL": Image.open(io.BytesIO(path.read_bytes())),
        "array": values,
        "array with channels": array,
        "tensor": tensor,
        "strided tensor": torch.from_numpy(array).permute(2, 0, 1),
    }
    if values.dtype == np.uint8:
        found |= {
            "floats to 1": (array / 255).astype(np.float32),
            "floats to 255": array.astype(np.float64),
            "integers": array.astype(np.int64),
            "float tensor": tensor / 255,
            "tensor with gradient": (tensor / 255).requires_grad_(),
        }
    return found


@pytest.mark.parametrize("values", [GREY, COLOUR, DEEP], ids=["grey", "colour", "16-bit"])
@pytest.mark.parametrize("wanted", [(1, 8), (3, 8), (3, 16)])
def test_pixels_are_those_of_the_file(values, wanted, tmp_path):
    path = tmp_path / "image.png"
    Image.fromarray(values).save(path)
    expected = read_image(path, *wanted)
    for name, image in kinds(path, values).items():
        if wanted[1] == 16 and ("float" in name or name in ("integers", "tensor with gradient")):
            with pytest.raises(UnreadableImage, match="cannot be converted to 16-bit"):  # as from a .npy file
                given_image(image).pixels(*wanted)
        else:
            assert np.array_equal(given_image(image).pixels(*wanted), expected), name


def test_arrays_are_read_like_npy_files(tmp_path):
    for values in (COLOUR / 3e4, COLOUR.astype(np.float32) - 7, DEEP, GREY > 9, COLOUR.transpose(2, 0, 1)):
        np.save(tmp_path / "image.npy", values)
        assert np.array_equal(given_image(values).pixels(), read_image(tmp_path / "image.npy"))


def test_the_layout_of_a_tensor_is_never_guessed():
    bands = np.random.default_rng(3).integers(0, 256, (4, 6, 9), dtype=np.uint8)  # 4 x 6 pixels of 9 bands
    assert np.array_equal(given_image(torch.from_numpy(bands.transpose(2, 0, 1).copy())).pixels(), bands)


def test_pictures_are_turned_upright_and_composited_like_files(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(COLOUR).save(tmp_path / "turned.png", exif=exif)
    Image.fromarray(np.dstack([COLOUR, GREY])).save(tmp_path / "clear.png")
    for name in ("turned.png", "clear.png"):
        with Image.open(tmp_path / name) as picture:
            assert np.array_equal(given_image(picture).pixels(), read_image(tmp_path / name))
    clear = np.dstack([COLOUR, GREY])
    for channels in (1, 3, 4):
        expected = read_image(tmp_path / "clear.png", channels, 8)
        for image in (clear, clear / 255, torch.from_numpy(clear.transpose(2, 0, 1).copy())):
            assert np.array_equal(given_image(image).pixels(channels, 8), expected)


def test_one_image_and_many_of_any_iterable():
    batch = torch.from_numpy(np.stack([COLOUR, COLOUR[::-1]]).transpose(0, 3, 1, 2).copy())
    for images in (
        [COLOUR, COLOUR[::-1]],
        (image for image in batch),
        batch,
        [batch],
        np.stack([COLOUR, COLOUR[::-1]]),
    ):
        first, second = given(images)
        assert (first.name, second.name) == ("image 1", "image 2")
        assert np.array_equal(first.pixels(), COLOUR)
        assert np.array_equal(second.pixels(), COLOUR[::-1])
    names = ["a.png", "b.png"]
    for series in (np.array(names), pandas.Series(names), polars.Series(names)):
        assert [image.name for image in given(series)] == names
    assert [image.name for image in given(COLOUR)] == ["image 1"]


@pytest.mark.parametrize(
    ("shape", "tensor", "channels", "images"),
    [
        ((5, 9, 7), False, 1, 5),  # grey images
        ((3, 9, 7), False, 1, 3),
        ((3, 9, 7), False, 3, 1),  # channels first, as in a .npy file
        ((50, 9, 9), False, 3, 50),
        ((9, 9, 3), False, 1, 1),
        ((9, 9, 5), False, 1, 1),  # of too many bands
        ((9, 9, 13), False, 13, 1),
        ((13, 9, 9), False, 13, 1),
        ((5, 9, 7), True, 1, 5),
        ((3, 9, 7), True, 1, 1),  # channels come first in a tensor
        ((13, 9, 9), True, 13, 1),
        ((2, 3, 9, 7), True, 3, 2),
    ],
)
def test_a_stack_of_grey_images_is_told_from_one_image(shape, tensor, channels, images):
    array = np.zeros(shape, np.uint8)
    assert len(list(given(torch.from_numpy(array) if tensor else array, channels))) == images


def test_a_file_may_be_closed_before_it_is_decoded(tmp_path):
    Image.fromarray(COLOUR).save(tmp_path / "image.png")

    def opened():
        with (tmp_path / "image.png").open("rb") as file:
            yield file
        with Image.open(tmp_path / "image.png") as picture:
            yield picture

    assert all(np.array_equal(image.pixels(), COLOUR) for image in list(given(opened())))


def test_what_is_no_image_is_an_error_without_its_content():
    for wrong in (7, None, [7], [(COLOUR, 3)], [[COLOUR]]):
        with pytest.raises(UserError, match=r"An image must be a path, bytes, .* but got") as caught:
            list(given(wrong))
        assert len(str(caught.value)) < 300
    with pytest.raises(UserError, match="binary mode"):
        given_image(io.StringIO("text"))
    with pytest.raises(UserError, match="binary mode"):
        given_image(io.TextIOWrapper(io.BytesIO(_png(COLOUR)), encoding="utf-8"))
    for bad, reason in (
        (np.zeros((1, 2, 3, 4, 5)), "shape"),
        (np.zeros((0, 3)), "shape"),
        (torch.zeros(2000), r"shape \(2000,\)"),
        (np.zeros((2, 2), "O"), "type"),
    ):
        with pytest.raises(UnreadableImage, match=reason):
            given_image(bad).pixels()
    with pytest.raises(UnreadableImage, match="not normalised values"):
        given_image((torch.from_numpy(GREY) / 255 - 0.5) / 0.5).pixels(1, 8)
    truncated = Image.open(io.BytesIO(_png(COLOUR)[:-40]))
    with pytest.raises(UnreadableImage):
        given_image(truncated).pixels()


def _png(values):
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, "png")
    return stream.getvalue()


# Verbs -----------------------------------------------------------------------------------------------------


@pytest.fixture
def image(digits):
    return sorted(digits.rglob("*.png"))[17]


def test_predict_and_predictor_answer_the_same_for_every_kind(trained, image):
    predictor = vitrail.Predictor(trained)
    (expected,) = vitrail.predict(trained, [image])
    assert expected.file == str(image)
    for name, kind in kinds(image, read_image(image)).items():
        (answer,) = predictor(kind)
        assert (answer.labels, answer.probabilities) == (expected.labels, expected.probabilities), name
    for kind in (image, str(image), read_image(image)):
        (answer,) = vitrail.predict(trained, kind)
        assert (answer.labels, answer.probabilities) == (expected.labels, expected.probabilities)


def test_embed_takes_every_kind_at_once(trained, image):
    (expected,) = vitrail.embed(trained, image)
    images = kinds(image, read_image(image))
    vectors = list(vitrail.embed(trained, images.values(), batch_size=1))  # or they would differ in the last digit
    assert all(np.array_equal(vector.features, expected.features) for vector in vectors)
    assert [vector.file for vector in vectors[1:4]] == [str(image), "image 3", "image 4"]


def test_a_generator_is_consumed_lazily(trained, image):
    def endless():
        while True:
            yield read_image(image)

    answers = vitrail.predict(trained, endless(), batch_size=2)
    assert [next(answers).file, next(answers).file] == ["image 1", "image 2"]
    answers.close()


def test_a_bad_image_among_others_is_an_answer(trained, image):
    good, bad, last = vitrail.predict(trained, [image, np.zeros((9, 9, 5)), image])
    assert (good.error, last.error) == (None, None)
    assert (bad.file, bad.error) == ("image 2", "5 channels, which cannot be converted to 1")


def test_explain_takes_images_from_memory(trained, image, tmp_path):
    array = read_image(image)
    drawn = vitrail.explain(trained, [array, array], out=tmp_path / "memory", save_data=True)
    named = vitrail.explain(trained, image, out=tmp_path / "file", save_data=True)
    assert drawn.unreadable == named.unreadable == ()
    memory, file = (np.load(tmp_path / where / "rollout.npz") for where in ("memory", "file"))
    for name in file.files:
        if file[name].dtype.kind == "f" and len(file[name]) == 1:
            assert np.allclose(memory[name][0], file[name][0], atol=1e-6)
