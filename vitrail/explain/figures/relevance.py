"""Figures of class relevance, with deletion and insertion curves that measure its faithfulness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray
from torch import Tensor

from vitrail.charts.style import BLUE, GREY, INK, ORANGE, short, styled
from vitrail.errors import UserError
from vitrail.explain.attention import rollout
from vitrail.explain.faithfulness import Faithfulness, faithfulness
from vitrail.explain.figures.tiles import HEAT, Array, View, enlarge
from vitrail.explain.geometry import attends
from vitrail.explain.relevance import relevance, signed
from vitrail.explain.subject import Drawing, Subject

ROWS = 8  # pictures per figure
OWN = 8  # pictures if none are given: faithfulness takes about a hundred forward passes for each

_SIDE, _GAP, _TITLE = 1.55, 0.12, 0.3  # inches of a picture, between two, and above a row
_CURVES, _WORDS = 2.3, 1.75  # inches of the curves, and of the text beside them
_HEAD, _FOOT = 0.75, 0.4


def relevances(subject: Subject) -> Iterator[Drawing]:
    """Relevance for the predicted or chosen class, and its faithfulness."""
    if not subject.has_head and subject.card.task.several:
        raise UserError('Class relevance needs words to choose from: --labels "cat,dog".')
    if not subject.has_head:
        raise UserError("Class relevance cannot be drawn: the model has no head.")
    shown = subject if subject.given and not subject.left_out else subject.fewer(OWN)
    for page, images in enumerate(shown.batches(ROWS)):
        pictures = shown.pictures[page * ROWS : (page + 1) * ROWS]
        first, other = _compared(shown, images)
        against = shown.instead is not None
        maps = relevance(shown.model, images, first, other if against else None)
        others = relevance(shown.model, images, other, first if against else None)
        flow = rollout(shown.model, images) if attends(shown.model) else None
        settings = {"seed": shown.seed, "batch_size": shown.batch_size}
        measured = faithfulness(shown.model, images, maps, first, task=shown.card.task, **settings)
        outputs = shown.card.task.output_names
        names = [short(name, 11) for name in outputs] if against else outputs
        two_sided = signed(shown.model)
        panes = [
            [
                *([] if flow is None else [Pane("rollout, any class", flow[i])]),
                Pane(f"{names[a]} over {names[b]}" if against else f"for {names[a]}", maps[i], two_sided),
                Pane(f"{names[b]} over {names[a]}" if against else f"for {names[b]}", others[i], two_sided),
            ][: None if len(names) > 1 else -1]
            for i, (a, b) in enumerate(zip(first, other, strict=True))
        ]
        views, captions = [picture.view for picture in pictures], [picture.caption for picture in pictures]
        wrong = [picture.wrong for picture in pictures]
        drawn = draw_relevances(views, panes, captions, measured, shown.card.task.meant, wrong)
        arrays = {"relevance": maps, "other": others, "classes": first, "others": other, **vars(measured)}
        arrays["files"] = np.array([picture.name for picture in pictures])
        yield Drawing("relevance" if page == 0 else f"relevance-{1 + page}", drawn, arrays)


def _compared(subject: Subject, images: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The class to explain and the one to compare with, for every image: as chosen, or the two likeliest.

    Values of a regression keep their order.
    """
    with torch.inference_mode():
        order = subject.card.task.ranking(subject.model(images).float().cpu().numpy())
    first = np.full(len(images), subject.target) if subject.target is not None else order[:, 0].copy()
    if subject.instead is not None:
        first = np.where(first == subject.instead, order[:, 1], first)
        return first, np.full(len(images), subject.instead)
    runner_up = order[:, min(1, order.shape[1] - 1)]
    return first, np.where(runner_up == first, order[:, 0], runner_up)


# As figures ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pane:
    """A titled map (h, w). Negative values of a signed map are evidence against the class."""

    title: str
    weights: Array
    signed: bool = False


def blend(view: View, pane: Pane) -> View:
    """A grey picture under a heat map (h, w), from its minimum (dark) to its maximum (light).

    A signed map is blue above 0, orange below, and transparent at 0.
    """
    weights, picture = pane.weights, enlarge(view)
    h, w = weights.shape
    y, x = (np.arange(size) * n // size for size, n in zip(picture.shape[:2], (h, w), strict=True))
    if pane.signed:
        colours = np.where(weights[:, :, None] < 0, to_rgb(ORANGE), to_rgb(BLUE))
        cover = 0.85 * np.abs(weights) / max(float(np.abs(weights).max()), 1e-12)
    else:
        span = weights - weights.min()
        colours = colormaps[HEAT](span / max(float(span.max()), 1e-12))[:, :, :3]
        cover = np.full((h, w), 0.6)
    grey = picture.mean(axis=2, keepdims=True) / 255
    share = cover[y][:, x, None]
    return (255 * ((1 - share) * grey + share * colours[y][:, x])).astype(np.uint8)


@styled
def draw_relevances(
    views: Sequence[View],
    panes: Sequence[Sequence[Pane]],
    captions: Sequence[str],
    measured: Faithfulness,
    meant: str = "probabilities",
    wrong: Sequence[bool] = (),
) -> Figure:
    """One row per picture: the picture, its maps, and the curves of its first class map."""
    aspect = views[0].shape[0] / views[0].shape[1]
    across, down = _SIDE / max(aspect, 1), _SIDE * min(aspect, 1)
    count = 1 + len(panes[0])
    width = _GAP + count * (across + _GAP) + 0.6 + _CURVES + _WORDS
    height = _HEAD + len(views) * (down + _TITLE) + _FOOT
    figure = Figure(figsize=(width, height))
    figure.text(_GAP / width, 1 - 0.25 / height, "Class relevance", fontsize=12, weight="bold")
    plain = "maps from minimum (dark) to maximum (light)"
    colours = "blue: evidence for the class, orange: against it" if panes[0][-1].signed else plain
    note = f"{colours}; curves: faithfulness of the first class map, dashed: random order"
    figure.text(_GAP / width, 1 - 0.47 / height, note, color=GREY)
    for row, view in enumerate(views):
        bottom = (height - _HEAD - row * (down + _TITLE) - down) / height
        pictures = [enlarge(view), *(blend(view, pane) for pane in panes[row])]
        titles = [captions[row], *(pane.title for pane in panes[row])]
        for column, (image, title) in enumerate(zip(pictures, titles, strict=True)):
            left = (_GAP + column * (across + _GAP)) / width
            axes = figure.add_axes((left, bottom, across / width, down / height))
            axes.imshow(image, interpolation="antialiased")
            axes.set_axis_off()
            colour = ORANGE if column == 0 and row < len(wrong) and wrong[row] else INK
            axes.set_title(short(title, 27), fontsize=7.5, fontweight="normal", pad=3, color=colour)
        left = (_GAP + count * (across + _GAP) + 0.6) / width
        axes = figure.add_axes((left, bottom, _CURVES / width, 0.94 * down / height))
        _curves(axes, measured, row, meant, last=row == len(views) - 1)
    return figure


def _curves(axes: Axes, measured: Faithfulness, row: int, meant: str, last: bool) -> None:
    """Deletion and insertion curves of one picture, dashed for random orders, with the areas under them."""
    lines = (
        ("insertion", BLUE, measured.insertion, measured.random_insertion),
        ("deletion", ORANGE, measured.deletion, measured.random_deletion),
    )
    for place, (name, colour, curve, control) in enumerate(lines):
        axes.plot(measured.shares, curve[row], color=colour)
        axes.plot(measured.shares, control[row], color=colour, linewidth=1, linestyle=(0, (3, 2)), alpha=0.8)
        areas = measured.area(curve)[row], measured.area(control)[row]
        text = f"{name} {areas[0]:.2f}\n  random {areas[1]:.2f}"
        axes.text(1.05, 0.98 - 0.36 * place, text, transform=axes.transAxes, va="top", fontsize=8, color=colour)
    text = f"score {measured.score[row]:+.2f}"
    axes.text(1.05, 0.26, text, transform=axes.transAxes, va="top", fontsize=9, weight="bold")
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.tick_params(labelsize=7.5, labelbottom=last)
    if meant != "probabilities":
        axes.set_ylabel("output", fontsize=8)
    else:
        axes.set_ylim(-0.02, 1.02)
        axes.set_yticks([0, 0.5, 1])
        axes.set_ylabel("probability", fontsize=8)
    if last:
        axes.set_xlabel("patches removed or shown", fontsize=8)
