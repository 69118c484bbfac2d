"""`ImageLike`: one image, however it is given in Python, and the pixels that a file of it would have.

| given                               | read as                                                        |
|-------------------------------------|----------------------------------------------------------------|
| a path, bytes, a file object        | an image file                                                  |
| a PIL image                         | a picture: upright (EXIF), transparency composited on white    |
| an array (H, W) or (H, W, C)        | a `.npy` file: uint8, 16 bits, or floats, see `data.multiband` |
| a tensor (H, W) or (C, H, W)        | the same, channels first                                       |

Floats that an 8-bit model reads are 0..1 or 0..255, by their maximum, as in a file. Four channels that a model of one
or three reads are RGBA, and composited on white. Nothing here imports torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.images import failures, picture_pixels, read_image
from vitrail.data.multiband import array_pixels, channels_last
from vitrail.data.pixels import Pixels, UnreadableImage, fit
from vitrail.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

ImageLike: TypeAlias = "str | Path | bytes | BinaryIO | Image.Image | NDArray[Any] | Tensor | GivenImage"

KINDS = (
    "a path, bytes, a file object, a PIL image, an array (H, W) or (H, W, C), a tensor (C, H, W), or an iterable of "
    "them"
)


@dataclass(frozen=True, eq=False)
class GivenImage:
    """An image and its name: its path, or e.g. "image 1". It is decoded on access, in any thread."""

    name: str
    content: str | Path | bytes | Image.Image | Pixels | UnreadableImage

    def pixels(self, channels: int | None = None, bits: int | None = None) -> Pixels:
        """The pixels (H, W, C), converted as by `read_image`; raises UnreadableImage."""
        content = self.content
        if isinstance(content, UnreadableImage):
            raise content
        if isinstance(content, Image.Image):
            with failures():
                return picture_pixels(content, channels, bits)
        if not isinstance(content, np.ndarray):
            return read_image(content, channels, bits)
        if bits == 8 and content.dtype == np.float32 and content.min() < 0:
            raise UnreadableImage("values below 0: give pixels, not normalised values")
        if bits == 8 and channels in (1, 3) and content.shape[-1] == 4:
            with failures():
                return picture_pixels(Image.fromarray(fit(content, 4, 8), "RGBA"), channels, bits)
        return fit(content, channels, bits)


def given(images: ImageLike | Iterable[ImageLike], channels: int | None = None) -> Iterator[GivenImage]:
    """One image, the images of a batch (N, H, W, C) or (N, C, H, W), or of any iterable, which is consumed lazily.

    Grey images may also be stacked as (N, H, W); `channels` are those of the model, which tell such a stack from one
    image.
    """
    number = 0
    for image in one_or_many(images):
        for single in image if is_array(image) and _is_stack(image, channels) else (image,):
            number += 1
            yield given_image(single, number)


def given_image(image: Any, number: int = 1) -> GivenImage:
    """An image by its path, or named after its number. A file object is read now, because its owner may close it."""
    name = f"image {number}"
    if isinstance(image, GivenImage):
        return image
    if isinstance(image, str | Path):
        return GivenImage(str(image), image)
    if isinstance(image, bytes | bytearray | memoryview):
        return GivenImage(name, bytes(image))
    try:
        if isinstance(image, Image.Image):
            with failures():
                image.load()  # now, as for a file object
            return GivenImage(name, image)
        if is_array(image):
            values = as_array(image)
            return GivenImage(name, array_pixels(values if is_tensor(image) else channels_last(values)))
    except UnreadableImage as error:
        return GivenImage(name, error)
    if callable(getattr(image, "read", None)):
        try:
            content = image.read()
        except UnicodeDecodeError:
            content = ""
        if isinstance(content, str):
            raise UserError("A file of an image must be opened in binary mode: open(path, 'rb').")
        return GivenImage(name, content)
    if isinstance(image, tuple) and image:
        raise UserError(f"An image must be {KINDS}, but got a tuple. If it is an (image, label) pair, give the image.")
    raise UserError(f"An image must be {KINDS}, but got {shown(image)}.")


def one_or_many(images: Any) -> Iterable[Any]:
    """The images one by one, or in the batches of a loader; raises UserError if there cannot be any."""
    if isinstance(images, str | Path | bytes | bytearray | memoryview | Image.Image | GivenImage):
        return (images,)
    if (is_array(images) and len(images.shape) > 1) or callable(getattr(images, "read", None)):
        return (images,)
    if isinstance(images, Iterable):
        return images
    raise UserError(f"An image must be {KINDS}, but got {shown(images)}.")


def _is_stack(image: Any, channels: int | None) -> bool:
    """Whether an array or tensor holds several images: it has four dimensions, or three of which none are channels."""
    if image.ndim != 3 or channels not in (1, 3, 4):
        return bool(image.ndim == 4)
    first, middle, last = image.shape
    if is_tensor(image):
        return first not in (1, 3, 4)
    one = last in (1, 3, 4) or last < min(first, middle) or first == channels
    return not one


def is_array(thing: object) -> bool:
    """Whether it is a NumPy array, a tensor, or another library's array."""
    if isinstance(thing, Image.Image):
        return False
    return (
        isinstance(thing, np.ndarray) or is_tensor(thing) or (hasattr(thing, "__array__") and hasattr(thing, "shape"))
    )


def is_tensor(thing: object) -> bool:
    """Whether it is a torch tensor; if there is one, torch has been imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.Tensor)


def as_array(thing: Any) -> NDArray[Any]:
    """An array or tensor as a NumPy array, with the channels of a tensor's images moved to the end."""
    if not is_tensor(thing):
        return np.asarray(thing)
    tensor = thing.detach().cpu()
    array: NDArray[Any] = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    return np.moveaxis(array, -3, -1) if array.ndim in (3, 4) else array


def shown(thing: object) -> str:
    """A Python object in an error: its type, and the shape of an array, never its content."""
    if is_array(thing):
        kind = "a tensor" if is_tensor(thing) else "an array"
        return f"{kind} of shape {tuple(getattr(thing, 'shape', ()))}"
    return f"an object of type {type(thing).__name__}"
