"""Preprocessing: from a stored image to the model's input, the same in training, evaluation, export and serving.

Images are resized with torch. `pixels_by_pillow` and `normalise_array` do the same without it, for ONNX Runtime. torch
is imported where it is used, so that model cards can be read without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from PIL import Image

from vitrail.config import Size, coerce, unknown_setting
from vitrail.data.pixels import WHITE, Pixels, UnreadableImage, bits_of, fit
from vitrail.errors import UserError
from vitrail.tasks.placement import Placement, fitted

if TYPE_CHECKING:
    from torch import Tensor

Fit = Literal["crop", "pad"]
Resizing = Literal["bicubic", "bilinear", "lanczos"]
_MOST_VALUES = 2**28  # height x width x channels: 8192x8192 pixels in colour are fewer
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocess:
    """Size, crop and normalisation of a model's input; saved with the weights."""

    img_size: Size
    channels: int
    crop: float = 1.0  # share of height and width that the centre crop keeps
    mean: tuple[float, ...] = (0.5,)  # per channel, or one for all; of pixels in 0..1, or of raw floats
    std: tuple[float, ...] = (0.5,)
    bits: int = 8  # per pixel value: 8, 16, or 32 for floats
    interpolation: Resizing = "bicubic"
    # Cover the input and crop the centre, or fit the whole image into it and pad with zeros. Not in `repr`, which
    # fingerprints of earlier versions contain.
    fit: Fit = field(default="crop", repr=False)

    def __post_init__(self) -> None:
        if self.channels < 1:
            raise UserError(f"'channels' must be at least 1, but it is {self.channels}.")
        if (count := self.img_size[0] * self.img_size[1] * self.channels) > _MOST_VALUES:
            raise UserError(f"An input may have at most {_MOST_VALUES:,} values, but it has {count:,}.")
        if self.bits not in WHITE:
            raise UserError(f"'bits' must be 8, 16, or 32 for floats, but it is {self.bits}.")
        if self.interpolation not in get_args(Resizing):
            known = ", ".join(get_args(Resizing))
            raise UserError(f"'interpolation' must be one of {known}, but it is {self.interpolation!r}.")
        if not 0.01 <= self.crop <= 1:  # the image is resized to the input's size divided by it
            raise UserError(f"'crop' must be from 0.01 to 1, but it is {self.crop}.")
        if self.fit not in get_args(Fit):
            raise UserError(f"'fit' must be one of {', '.join(get_args(Fit))}, but it is {self.fit!r}.")
        if self.fit == "pad" and self.crop != 1:
            raise UserError(f"'crop' must be 1 if images are padded, but it is {self.crop}. Use --crop 1.")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.channels):
                raise UserError(
                    f"'{name}' must have one number, or one for each of {self.channels} channels, but it is {values}."
                )
            if not np.isfinite(values).all():
                raise UserError(f"'{name}' must be finite, but it is {values}.")
        if min(self.std) <= 0:
            raise UserError(f"'std' must be above 0, but it is {self.std}.")

    @property
    def dtype(self) -> type[np.uint8] | type[np.float32]:
        """The dtype of `pixels`. Above 8 bits it is float32, which holds 16 bits exactly."""
        return np.uint8 if self.bits == 8 else np.float32

    def pixels(self, image: Pixels) -> Pixels:
        """Images (..., H, W, C) of any size as (..., C, h, w): resized to cover the model's size, then centre-cropped.

        Sizes are rounded as in torchvision's `Resize` and `CenterCrop`. With `fit="pad"`, the whole image is shown.
        """
        if self.fit == "pad":
            return self.place(image, self.placement(*image.shape[-3:-1]))
        image = self._trim(image)
        (h, w), (y, x) = self._cover(*image.shape[-3:-1])
        resized = self._resize(image, (h, w))
        return np.ascontiguousarray(resized[..., y : y + self.img_size[0], x : x + self.img_size[1]])

    def pixels_by_pillow(self, image: Pixels) -> Pixels:
        """`pixels` of one image without torch. Pillow and torch round differently: values differ by at most 1."""
        if self.fit == "pad":
            _, _, h, w = self.placement(*image.shape[:2]).shown
            y, x, image = 0, 0, self._fit(image)
        else:
            image = self._fit(self._trim(image))
            (h, w), (y, x) = self._cover(*image.shape[:2])
        resized = _by_pillow(image.transpose(2, 0, 1), (h, w), self.interpolation)
        if self.bits == 16:
            resized = resized.clip(0, WHITE[16])  # bicubic overshoots
        cropped = resized[:, y : y + self.img_size[0], x : x + self.img_size[1]]
        if self.fit == "pad":
            cropped = np.pad(cropped, ((0, 0), (0, self.img_size[0] - h), (0, self.img_size[1] - w)))
        return np.ascontiguousarray(np.broadcast_to(cropped, (self.channels, *self.img_size)))

    def placement(self, height: int, width: int) -> Placement:
        """How `pixels` places an image of this size into the model's input."""
        if self.fit == "pad":
            return fitted((height, width), self.img_size)
        (h, w), (y, x) = self._cover(height, width)
        box = (y * height // h, x * width // w, self.img_size[0] * height // h, self.img_size[1] * width // w)
        return Placement((height, width), self.img_size, box, (0, 0, *self.img_size))

    def place(self, image: Pixels, placement: Placement) -> Pixels:
        """Images (..., H, W, C) as (..., C, h, w), placed in the model's input."""
        (top, left, height, width), (y, x, h, w) = placement.box, placement.shown
        resized = self._resize(image[..., top : top + height, left : left + width, :], (h, w))
        if (h, w) != self.img_size:
            placed = np.zeros((*resized.shape[:-2], *self.img_size), resized.dtype)
            placed[..., y : y + h, x : x + w] = resized
            resized = placed
        return np.ascontiguousarray(resized[..., ::-1] if placement.mirror else resized)

    def with_margin(self, images: Pixels) -> Pixels:
        """Images (B, h, w, C) of the model's size with a black margin, which the centre crop removes again."""
        (h, w), (y, x) = self._cover(*(int(side / self.crop) for side in self.img_size))
        rows, columns = (y, h - y - self.img_size[0]), (x, w - x - self.img_size[1])
        return np.pad(images, ((0, 0), rows, columns, (0, 0))) if (h, w) != self.img_size else images

    def crop_pixels(self, image: Pixels, box: tuple[int, int, int, int]) -> Pixels:
        """A box (y, x, height, width) of images (..., H, W, C), resized to (..., C, h, w)."""
        y, x, h, w = box
        return np.ascontiguousarray(self._resize(image[..., y : y + h, x : x + w, :], self.img_size))

    def keeps(self, images: Pixels) -> bool:
        """Whether `pixels` would only transpose an array of images (N, H, W, C)."""
        return images.shape[1:] == (*self.img_size, self.channels) and bits_of(images) == self.bits and self.crop == 1

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels (B, C, H, W) as float32 with the mean subtracted, divided by the standard deviation."""
        import torch

        white = WHITE[self.bits]
        mean = torch.tensor(self.mean, dtype=torch.float32, device=pixels.device).view(-1, 1, 1) * white
        std = torch.tensor(self.std, dtype=torch.float32, device=pixels.device).view(-1, 1, 1) * white
        images = torch.empty(pixels.shape, device=pixels.device)
        # In blocks small enough to stay in the CPU cache between operations.
        step = max(2**17 // max(pixels[:1].numel(), 1), 1)
        for part, image in zip(torch.split(pixels, step), torch.split(images, step), strict=True):
            image.copy_(part).sub_(mean).div_(std)
        return images

    def normalise_array(self, pixels: Pixels) -> Pixels:
        """`normalise` without torch."""
        white = np.float32(WHITE[self.bits])
        mean, std = (np.array(values, np.float32).reshape(-1, 1, 1) * white for values in (self.mean, self.std))
        images = np.empty(pixels.shape, np.float32)
        for raw, image in zip(pixels, images, strict=True):  # one after the other, so that they stay in the CPU cache
            np.subtract(raw, mean, out=image, dtype=np.float32)
            image /= std
        return images

    def restore(self, images: Tensor) -> Tensor:
        """The inverse of `normalise`; pixels of blended images are rounded."""
        import torch

        white = WHITE[self.bits]
        mean = torch.tensor(self.mean, dtype=torch.float32, device=images.device).view(-1, 1, 1) * white
        std = torch.tensor(self.std, dtype=torch.float32, device=images.device).view(-1, 1, 1) * white
        pixels = images * std + mean
        if self.bits == 32:
            return pixels
        pixels = pixels.round_().clamp_(0, white)
        return pixels.to(torch.uint8) if self.bits == 8 else pixels

    def frame(self, pixels: Tensor) -> Tensor:
        """Pixels (B, C, H, W) of another size, on any device, resized and cropped as by `pixels`."""
        if self.fit == "pad":
            import torch.nn.functional as F

            _, _, h, w = self.placement(*pixels.shape[-2:]).shown
            return F.pad(self._scale(pixels, (h, w)), (0, self.img_size[1] - w, 0, self.img_size[0] - h))
        (h, w), (y, x) = self._cover(*pixels.shape[-2:])
        return self._scale(pixels, (h, w))[..., y : y + self.img_size[0], x : x + self.img_size[1]]

    def __call__(self, image: Pixels) -> Tensor:
        """An image (H, W, C) as the model's input, (C, h, w) float32."""
        import torch

        return self.normalise(torch.from_numpy(self.pixels(image))[None])[0]

    @classmethod
    def from_json(cls, document: Mapping[str, object]) -> Preprocess:
        """The inverse of `dataclasses.asdict` or its JSON; UserError for unknown, missing or ill-typed values."""
        known = [each.name for each in fields(cls)]
        unknown_setting(document, known)
        for name in known:
            if name not in document and name not in ("bits", "interpolation", "fit"):  # absent in older files
                raise UserError(f"The preprocessing setting '{name}' is missing.")
        return cls(
            img_size=coerce(cls, "img_size", document["img_size"]),
            channels=coerce(cls, "channels", document["channels"]),
            crop=coerce(cls, "crop", document["crop"]),
            mean=coerce(cls, "mean", document["mean"]),
            std=coerce(cls, "std", document["std"]),
            bits=coerce(cls, "bits", document.get("bits", 8)),
            interpolation=coerce(cls, "interpolation", document.get("interpolation", "bicubic")),
            fit=coerce(cls, "fit", document.get("fit", "crop")),
        )

    def _fit(self, image: Pixels) -> Pixels:
        """The image with the model's channels and bits; grey keeps one channel, which is cheaper to repeat later."""
        grey = image.shape[-1] == 1 and self.channels == 3
        try:
            return fit(image, 1 if grey else self.channels, self.bits).astype(self.dtype, copy=False)
        except UnreadableImage as error:
            raise UserError(
                f"The model expects {self.channels} channels of {self.bits} bits, but got {error}."
            ) from error

    def _resize(self, image: Pixels, size: Size) -> Pixels:
        """Antialiased resizing as in Pillow, but faster; (..., H, W, C) to (..., C, h, w)."""
        import torch

        image = self._fit(image)
        if not image.flags.writeable or min(image.strides) < 0:
            image = image.copy()  # torch cannot share its memory
        images = torch.from_numpy(image).movedim(-1, -3)
        batch = self._scale(images.reshape(-1, *images.shape[-3:]), size)
        return batch.expand(-1, self.channels, -1, -1).view(*images.shape[:-3], self.channels, *size).numpy()

    def _scale(self, batch: Tensor, size: Size) -> Tensor:
        import torch.nn.functional as F

        if size == batch.shape[-2:]:
            return batch
        if self.interpolation == "lanczos":
            scaled = _lanczos(batch.cpu(), size).to(batch.device)
        elif batch.device.type == "cpu":
            scaled = F.interpolate(batch, size, mode=self.interpolation, antialias=True)
        else:  # it resizes floats only
            scaled = F.interpolate(batch.float(), size, mode=self.interpolation, antialias=True)
            if self.bits == 8:
                scaled = scaled.round_().clamp_(0, WHITE[8]).to(batch.dtype)
        return scaled.clamp(0, WHITE[16]) if self.bits == 16 else scaled  # bicubic overshoots

    def _trim(self, image: Pixels) -> Pixels:
        """Cuts the ends off very long images before enlarging; the centre crop would drop them anyway."""
        height, width = image.shape[-3:-1]
        h, w = self.img_size
        rows = max(8 * h * width // w, 1)
        columns = max(8 * w * height // h, 1)
        y, x = max(height - rows, 0) // 2, max(width - columns, 0) // 2
        return image[..., y : height - y, x : width - x, :]

    def _cover(self, height: int, width: int) -> tuple[Size, Size]:
        """The size to resize an image to, and the corner of the centre crop in it."""
        h, w = (int(side / self.crop) for side in self.img_size)
        if h * width >= w * height:
            w = h * width // height
        else:
            h = w * height // width
        return (h, w), (round((h - self.img_size[0]) / 2), round((w - self.img_size[1]) / 2))


def _lanczos(images: Tensor, size: Size) -> Tensor:
    """Images (B, C, H, W) resized with Pillow, as not every version of torch supports Lanczos."""
    import torch

    resized = _by_pillow(images.flatten(0, 1).numpy(), size, "lanczos")
    return torch.from_numpy(resized).view(*images.shape[:2], *size)


def _by_pillow(planes: Pixels, size: Size, interpolation: Resizing) -> Pixels:
    """Planes (N, H, W) of uint8 or float32, resized."""
    if planes.shape[1:] == size:
        return planes
    how = Image.Resampling[interpolation.upper()]
    return np.stack(
        [np.asarray(Image.fromarray(np.ascontiguousarray(plane)).resize(size[::-1], how)) for plane in planes]
    )
