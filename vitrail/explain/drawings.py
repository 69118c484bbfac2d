"""The figures of `explain`: each function draws what it can of a subject, or says in a UserError why it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.charts import build
from vitrail.charts.draw import draw
from vitrail.charts.style import short
from vitrail.errors import UserError
from vitrail.explain import figures, relative_drawings
from vitrail.explain.attention import (
    Array,
    attention_distance,
    attention_maps,
    even_distance,
    patch_attention,
    rollout,
    window_attention,
)
from vitrail.explain.faithfulness import faithfulness
from vitrail.explain.filters import first_filters
from vitrail.explain.geometry import Attentive, attends, window_layouts
from vitrail.explain.positions import position_similarity, relative_bias
from vitrail.explain.relevance import relevance
from vitrail.explain.relevance_figure import Pane
from vitrail.explain.relevance_figure import relevances as draw_relevances
from vitrail.explain.subject import Drawing, Subject
from vitrail.explain.windows_figure import windows as draw_windows
from vitrail.models.hybrid import Hybrid
from vitrail.models.pvt import PVT
from vitrail.models.swin import Swin
from vitrail.models.vit import ViT

PAGE = 24  # pictures of one figure
ROWS = 8  # pictures of one figure of relevance
OWN = 8  # pictures of the data whose relevance is shown: to measure it, the model runs some hundred times for each

_LOOKS = {
    "cls": "from the class token",
    "cls_dist": "from the class and the distillation token",
    "cls_gap": "from the class token and all patches",
}


def rollouts(subject: Subject) -> Iterator[Drawing]:
    """Attention rollout over the pictures."""
    maps = np.concatenate([rollout(subject.attentive, images) for images in subject.batches()])
    for at in range(0, len(maps), PAGE):
        page = subject.pictures[at : at + PAGE]
        name = "rollout" if at == 0 else f"rollout-{1 + at // PAGE}"
        arrays = {"rollout": maps[at : at + PAGE], "files": np.array([picture.name for picture in page])}
        views, captions = [picture.view for picture in page], [picture.caption for picture in page]
        drawn = figures.rollouts(views, maps[at : at + PAGE], captions, [picture.wrong for picture in page])
        yield Drawing(name, drawn, arrays)


def relevances(subject: Subject) -> Iterator[Drawing]:
    """What speaks for the class that the model says or that was asked for, and how far that can be believed."""
    if not subject.has_head:
        raise UserError("Relevance speaks for a class, and there is none: the model has no head.")
    shown = subject if subject.given else subject.fewer(OWN)
    for page, images in enumerate(shown.batches(ROWS)):
        pictures = shown.pictures[page * ROWS : (page + 1) * ROWS]
        first, other = _compared(shown, images)
        against = shown.instead is not None
        maps = relevance(shown.model, images, first, other if against else None)
        others = relevance(shown.model, images, other, first if against else None)
        flow = rollout(shown.model, images) if attends(shown.model) else None
        settings = {"seed": shown.seed, "batch_size": shown.batch_size}
        measured = faithfulness(shown.model, images, maps, first, task=shown.card.task, **settings)
        names = [short(name, 11) for name in shown.card.classes] if against else shown.card.classes
        signed = not isinstance(shown.model, ViT | Hybrid)
        panes = [
            [
                *([] if flow is None else [Pane("rollout, any class", flow[i])]),
                Pane(f"{names[a]} over {names[b]}" if against else f"for {names[a]}", maps[i], signed),
                Pane(f"{names[b]} over {names[a]}" if against else f"for {names[b]}", others[i], signed),
            ][: None if len(names) > 1 else -1]
            for i, (a, b) in enumerate(zip(first, other, strict=True))
        ]
        views, captions = [picture.view for picture in pictures], [picture.caption for picture in pictures]
        wrong = [picture.wrong for picture in pictures]
        drawn = draw_relevances(views, panes, captions, measured, shown.card.task, wrong)
        arrays = {"relevance": maps, "other": others, "classes": first, "others": other, **vars(measured)}
        arrays["files"] = np.array([picture.name for picture in pictures])
        yield Drawing("relevance" if page == 0 else f"relevance-{1 + page}", drawn, arrays)


def _compared(subject: Subject, images: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For every image the class that is explained and the one beside it: as asked for, or by what the model says.

    Of numbers none is likelier than another: they come in their order.
    """
    if subject.card.task == "regression":
        order = np.tile(np.arange(len(subject.card.classes)), (len(images), 1))
    else:
        with torch.inference_mode():
            order = subject.model(images).float().argsort(dim=1, descending=True, stable=True).cpu().numpy()
    first = np.full(len(images), subject.target) if subject.target is not None else order[:, 0].copy()
    if subject.instead is not None:
        first = np.where(first == subject.instead, order[:, 1], first)
        return first, np.full(len(images), subject.instead)
    runner_up = order[:, min(1, order.shape[1] - 1)]
    return first, np.where(runner_up == first, order[:, 0], runner_up)


def heads(subject: Subject) -> Iterator[Drawing]:
    """Where every head of every layer looks, a figure for each picture."""
    yield from _maps(subject, "heads", partial(attention_maps, subject.attentive), _looks(subject.attentive))


def _looks(model: Attentive) -> str:
    """Whose attention maps are that of the output."""
    if isinstance(model, PVT):
        return "from all patches on average, in the last stage from the class token"
    pool = model.config.pool if isinstance(model, ViT) else "cls" if isinstance(model, Hybrid) else "gap"
    return _LOOKS.get(pool, "from all patches on average")


def patches(subject: Subject) -> Iterator[Drawing]:
    """Where every head looks from the chosen patch, a figure for each picture."""
    if subject.patch is not None:
        row, column = subject.patch
        look = partial(patch_attention, subject.attentive, row=row, column=column)
        yield from _maps(subject, "patch", look, f"from patch {row},{column}", subject.patch)


def _maps(
    subject: Subject,
    kind: str,
    look: Callable[[Tensor], list[Array]],
    looks: str,
    patch: tuple[int, int] | None = None,
) -> Iterator[Drawing]:
    # of each picture, L times (H, h, w)
    maps = (of_picture for images in subject.batches() for of_picture in zip(*look(images), strict=True))
    digits = len(str(len(subject.pictures)))
    for number, (picture, weights) in enumerate(zip(subject.pictures, maps, strict=True), start=1):
        drawn = figures.heads(picture.view, weights, picture.caption, looks, patch)
        arrays = {f"layer{layer}": of_layer for layer, of_layer in enumerate(weights, start=1)}
        yield Drawing(f"{kind}-{number:0{digits}}-{_plain(picture.name)}", drawn, arrays)


def _plain(name: str) -> str:
    """What a picture is called, as part of a file's name."""
    return re.sub(r"[^\w-]+", "-", Path(name).stem)[:40] or "picture"


def distance(subject: Subject) -> Iterator[Drawing]:
    """How far heads look."""
    model = subject.attentive
    far, even = attention_distance(model, subject.sample()), even_distance(model)
    uniform = f"uniform attention{' within each window' if isinstance(model, Swin) else ''}"
    drawn = draw(build.distance(far, even, model.config.img_size[1], subject.sampled, uniform))
    yield Drawing("distance", drawn, {"distance": far, "even": even, "images": np.array(subject.sampled)})


def windows(subject: Subject) -> Iterator[Drawing]:
    """The windows of a Swin, plain and shifted in every stage, and what the patch in the middle of each looks at."""
    if not isinstance(subject.model, Swin):
        return
    shown = subject.fewer(ROWS)
    layouts = window_layouts(subject.model)
    batches = [window_attention(subject.model, images) for images in shown.batches()]
    kinds = {(layout.grid, layout.shift): number for number, layout in reversed(list(enumerate(layouts)))}
    maps = {number: np.concatenate([batch[number] for batch in batches]) for number in sorted(kinds.values())}
    views, captions = [picture.view for picture in shown.pictures], [picture.caption for picture in shown.pictures]
    drawn = draw_windows(views, maps, layouts, captions)
    yield Drawing("windows", drawn, {f"layer{number + 1}": of_layer for number, of_layer in maps.items()})


def positions(subject: Subject) -> Iterator[Drawing]:
    """What the model knows about places: similarities of position embeddings, or tables of relative biases."""
    model = subject.model
    if not isinstance(model, ViT | Hybrid):
        yield from relative_drawings.positions(subject)
    elif isinstance(model, ViT) and model.config.pos == "relative":
        bias = relative_bias(model)
        yield Drawing("bias", figures.bias(bias), {"bias": bias})
    else:
        similarity = position_similarity(model)
        yield Drawing("positions", figures.similarity(similarity), {"similarity": similarity})


def filters(subject: Subject) -> Iterator[Drawing]:
    """What the first layer looks for."""
    found = first_filters(subject.model)
    yield Drawing("filters", figures.filters(found.values, found.title, found.kind), {"filters": found.values})
