"""The figures of `explain`: each function draws what it can of a subject, or says in a UserError why it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from vitrail.explain import figures
from vitrail.explain.attention import Array, attention_distance, attention_maps, even_distance, patch_attention, rollout
from vitrail.explain.filters import patch_filters
from vitrail.explain.positions import position_similarity, relative_bias
from vitrail.explain.subject import Drawing, Subject

PAGE = 24  # pictures of one figure


def rollouts(subject: Subject) -> Iterator[Drawing]:
    """Attention rollout over the pictures."""
    maps = np.concatenate([rollout(subject.model, images) for images in subject.batches()])
    for at in range(0, len(maps), PAGE):
        page = subject.pictures[at : at + PAGE]
        name = "rollout" if at == 0 else f"rollout-{1 + at // PAGE}"
        arrays = {"rollout": maps[at : at + PAGE], "files": np.array([picture.name for picture in page])}
        views, captions = [picture.view for picture in page], [picture.caption for picture in page]
        drawn = figures.rollouts(views, maps[at : at + PAGE], captions, [picture.wrong for picture in page])
        yield Drawing(name, drawn, arrays)


def heads(subject: Subject) -> Iterator[Drawing]:
    """Where every head of every layer looks, a figure for each picture."""
    looks = "from the class token" if subject.model.config.pool == "cls" else "from all patches on average"
    look = partial(attention_maps, subject.model)
    yield from _maps(subject, "heads", look, looks)


def patches(subject: Subject) -> Iterator[Drawing]:
    """Where every head looks from the chosen patch, a figure for each picture."""
    if subject.patch is not None:
        row, column = subject.patch
        look = partial(patch_attention, subject.model, row=row, column=column)
        yield from _maps(subject, "patch", look, f"from patch {row},{column}", subject.patch)


def _maps(
    subject: Subject,
    kind: str,
    look: Callable[[Tensor], Array],
    looks: str,
    patch: tuple[int, int] | None = None,
) -> Iterator[Drawing]:
    maps = (of_picture for images in subject.batches() for of_picture in look(images))  # L H h w
    digits = len(str(len(subject.pictures)))
    for number, (picture, weights) in enumerate(zip(subject.pictures, maps, strict=True), start=1):
        drawn = figures.heads(picture.view, weights, picture.caption, looks, patch)
        yield Drawing(f"{kind}-{number:0{digits}}-{_plain(picture.name)}", drawn, {"maps": weights})


def _plain(name: str) -> str:
    """What a picture is called, as part of a file's name."""
    return re.sub(r"[^\w-]+", "-", Path(name).stem)[:40] or "picture"


def distance(subject: Subject) -> Iterator[Drawing]:
    """How far heads look."""
    far = attention_distance(subject.model, subject.sample())
    even = even_distance(subject.model)
    drawn = figures.distance(far, even, subject.model.config.img_size[1], subject.sampled)
    yield Drawing("distance", drawn, {"distance": far, "even": np.array(even), "images": np.array(subject.sampled)})


def positions(subject: Subject) -> Iterator[Drawing]:
    """What the model knows about places: similarities of position embeddings, or tables of relative biases."""
    if subject.model.config.pos == "relative":
        bias = relative_bias(subject.model)
        yield Drawing("bias", figures.bias(bias), {"bias": bias})
    else:
        similarity = position_similarity(subject.model)
        yield Drawing("positions", figures.similarity(similarity), {"similarity": similarity})


def filters(subject: Subject) -> Iterator[Drawing]:
    """What the first layer looks for."""
    components = patch_filters(subject.model)
    yield Drawing("filters", figures.filters(components), {"filters": components})
