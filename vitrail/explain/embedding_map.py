"""Embedding map: t-SNE of the features of a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray
from PIL import Image

from vitrail.charts.style import GREY, INK, STYLE, short
from vitrail.data import Split
from vitrail.data.pixels import thumbnail
from vitrail.explain.neighbours import unit
from vitrail.tasks import Task

Points = NDArray[np.float32]  # N 2
Colour = str | tuple[float, float, float]

MOST = 1500  # images on a map; more make it slower, not clearer

# The Okabe-Ito palette without yellow, which is hard to see on white. Colours times marks cover all named groups.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
_MARKS = ("o", "^", "s")
_NAMED = 20
_OTHERS = "#C8C8C8"

_COMPONENTS = 50  # of a PCA, before t-SNE
_PERPLEXITY = 30
_FEWEST = 8  # images that t-SNE needs
_CELLS, _PIXELS = 26, 60  # maximum thumbnails per row, and their size


def embedding_map(features: NDArray[np.floating], seed: int = 0) -> Points:
    """t-SNE embedding, (N, 2), of feature vectors, (N, D), by cosine similarity.

    t-SNE runs on the first principal components, so large distances mean little; fewer than 8 images are placed by
    their principal components alone. Deterministic for given features and seed.
    """
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    directions = unit(features)
    if np.ptp(directions, axis=0).max() < 1e-6:  # identical vectors, or a single one
        return np.zeros((len(directions), 2), np.float32)
    places = PCA(min(_COMPONENTS, *directions.shape), random_state=seed).fit_transform(directions)
    if len(directions) >= _FEWEST and places.shape[1] > 1:
        perplexity = min(_PERPLEXITY, (len(directions) - 1) / 3)
        places = TSNE(perplexity=perplexity, init="pca", random_state=seed, n_jobs=1).fit_transform(places)
    return np.pad(places, ((0, 0), (0, 1)))[:, :2].astype(np.float32)


@dataclass(frozen=True)
class _Groups:
    """Groups of images by which a map is coloured."""

    names: list[str]  # of the largest groups, in class order
    number: NDArray[np.int64]  # group of every image; len(names) for the others
    others: int  # groups without a name

    def colour(self, group: int) -> str:
        return _COLOURS[group % len(_COLOURS)] if group < len(self.names) else _OTHERS

    def mark(self, group: int) -> str:
        return _MARKS[group // len(_COLOURS) % len(_MARKS)] if group < len(self.names) else "."


def _groups(names: Sequence[str], first: NDArray[np.int64]) -> _Groups:
    counts = np.bincount(first, minlength=len(names))
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    named = np.sort(order[:_NAMED])  # in class order, so that maps of the same data share colours
    rank = np.full(len(names), len(named), np.int64)
    rank[named] = np.arange(len(named))
    return _Groups([names[k] for k in named], rank[first], len(order) - len(named))


def embedding_figure(
    places: Points,
    split: Split,
    chosen: NDArray[np.int64],
    task: Task,
    name: str = "",
) -> Figure:
    """The map as coloured points, and as thumbnails: in each cell of a grid the image nearest to its centre.

    `chosen` are the indices of the images in the split. Colours are classes, the first label of a multi-label image, or
    the first value of a regression; images without labels have one colour.
    """
    targets = split.targets[chosen]
    centre, half = _square(places)
    with mpl.rc_context(STYLE):
        width, height, side = 14.0, 7.9, 6.6  # inches
        figure = Figure(figsize=(width, height))
        bottom = (height - 0.65 - side) / height
        left, right = (figure.add_axes((x / width, bottom, side / width, side / height)) for x in (0.25, 7.15))
        for axes in (left, right):
            axes.set(xticks=[], yticks=[])
            axes.set(xlim=(centre[0] - half, centre[0] + half), ylim=(centre[1] - half, centre[1] + half))
            axes.grid(False)
            axes.spines[:].set_visible(False)
        size = float(np.clip(16_000 / len(places), 8, 40))
        colours: list[Colour]
        if not task.classes:
            by, colours = "", [_COLOURS[0]] * len(places)
            left.scatter(places[:, 0], places[:, 1], size, _COLOURS[0], alpha=0.6, linewidths=0)
        elif (grouped := task.groups(targets)) is None:
            by = task.classes[0]
            colours = _by_value(figure, left, places, targets[:, 0], by, size)
        else:
            names, numbers, by = grouped
            colours = _by_group(figure, left, places, _groups(names, numbers), size)
        _thumbnails(right, places, split, chosen, colours, centre, half)
        count = f"{len(places):,}" if len(chosen) == len(split) else f"{len(places):,} of {len(split):,}"
        how = "t-SNE" if len(places) >= _FEWEST else "principal components"
        note = f"{how} of the features of {count} images{f' of {name}' if name else ''}"
        note += f", coloured by {short(by, 40)}" if by else ""
        figure.text(0.25 / width, 1 - 0.3 / height, "Embedding map", fontsize=12, weight="bold")
        figure.text(0.25 / width, 1 - 0.52 / height, note, color=GREY)
    return figure


def _square(places: Points) -> tuple[Points, float]:
    """The centre and half the side of a square around all points, with a margin."""
    low, high = places.min(axis=0), places.max(axis=0)
    return (low + high) / 2, float(max((high - low).max() / 2, 1e-3)) * 1.04


def _by_group(figure: Figure, axes: Axes, places: Points, groups: _Groups, size: float) -> list[Colour]:
    named = range(len(groups.names))
    for group in (len(named), *named):  # the others are drawn first, below
        x, y = places[groups.number == group].T
        if len(x):
            label = short(groups.names[group], 24) if group in named else f"{groups.others} other classes"
            axes.scatter(
                x, y, size, groups.colour(group), marker=groups.mark(group), alpha=0.85, linewidths=0, label=label
            )
    handles, labels = axes.get_legend_handles_labels()
    turn = 0 if groups.others == 0 else 1
    figure.legend(
        handles[turn:] + handles[:turn],
        labels[turn:] + labels[:turn],
        loc="lower center",
        ncols=7,
        fontsize=8,
        markerscale=(30 / size) ** 0.5,
        handletextpad=0.3,
        columnspacing=1.4,
    )
    names = [short(name, 18) for name in groups.names]
    middles = np.array([_middle(places[groups.number == group]) for group in named])
    halo = [withStroke(linewidth=2.5, foreground="white")]
    for name, (x, y) in zip(names, _apart(middles, names, axes), strict=True):
        axes.text(x, y, name, ha="center", va="center", weight="bold", color=INK, path_effects=halo)
    return [groups.colour(group) for group in groups.number]


def _by_value(
    figure: Figure, axes: Axes, places: Points, values: NDArray[np.float32], name: str, size: float
) -> list[Colour]:
    low, high = np.percentile(values, [1, 99])  # robust to outliers
    x, y = places.T
    points = axes.scatter(x, y, size, values, cmap="viridis", vmin=low, vmax=high, linewidths=0)
    bar = figure.colorbar(points, cax=axes.inset_axes((0, -0.045, 0.4, 0.02)), orientation="horizontal")
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=8)
    bar.set_label(short(name, 40), fontsize=8)
    return [(r, g, b) for r, g, b, _ in points.to_rgba(values)]


def _middle(places: Points) -> Points:
    """The point nearest to the median: always a point of the group, even if it has several clusters."""
    return places[np.argmin(((places - np.median(places, axis=0)) ** 2).sum(axis=1))]


def _apart(middles: Points, names: Sequence[str], axes: Axes) -> NDArray[np.float64]:
    """Positions of labels near the centres of their groups; overlapping labels are pushed apart vertically."""
    left, right = axes.get_xlim()
    inch = (right - left) / 6.6
    height = 0.15 * inch
    widths = np.array([0.085 * len(name) * inch for name in names])
    places = middles.astype(np.float64)
    edge = np.minimum(widths / 2, (right - left) / 2)
    places[:, 0] = np.clip(places[:, 0], left + edge, right - edge)
    for _ in range(200):
        moved = False
        for i in range(len(places)):
            for j in range(i):
                dx, dy = places[i] - places[j]
                overlap = height - abs(dy)
                if overlap > 0 and abs(dx) < (widths[i] + widths[j]) / 2:
                    push = (overlap / 2 + 0.01 * height) * (1 if dy >= 0 else -1)
                    places[i, 1] += push
                    places[j, 1] -= push
                    moved = True
        if not moved:
            break
    return places


def _thumbnails(
    axes: Axes,
    places: Points,
    split: Split,
    chosen: NDArray[np.int64],
    colours: Sequence[Colour],
    centre: Points,
    half: float,
) -> None:
    """Draws at most one thumbnail in each cell of a grid, framed in its colour."""
    cells = int(np.clip(round(2.2 * len(places) ** 0.5), 4, _CELLS))
    at = (places - (centre - half)) / (2 * half) * cells
    cell = np.clip(at.astype(np.int64), 0, cells - 1)
    off = ((at - cell - 0.5) ** 2).sum(axis=1)
    canvas = np.ones((cells * _PIXELS, cells * _PIXELS, 3), np.float32)
    taken = set()
    for i in np.argsort(off, kind="stable"):
        column, row = int(cell[i, 0]), cells - 1 - int(cell[i, 1])
        if (row, column) in taken:
            continue
        taken.add((row, column))
        y, x = row * _PIXELS, column * _PIXELS
        canvas[y + 1 : y + _PIXELS - 1, x + 1 : x + _PIXELS - 1] = to_rgb(colours[i])
        inner = _PIXELS - 8
        canvas[y + 4 : y + 4 + inner, x + 4 : x + 4 + inner] = _squared(thumbnail(split.image(int(chosen[i]))), inner)
    low, high = centre - half, centre + half
    axes.imshow(canvas, extent=(low[0], high[0], low[1], high[1]), interpolation="antialiased")


def _squared(image: Image.Image, side: int) -> NDArray[np.float32]:
    """The central square of an image, (side, side, 3), with values from 0 to 1."""
    image = image.convert("RGB")
    edge = min(image.size)
    x, y = (image.width - edge) // 2, (image.height - edge) // 2
    method = Image.Resampling.NEAREST if edge < side else Image.Resampling.BICUBIC
    square = image.resize((side, side), method, (x, y, x + edge, y + edge))
    return np.asarray(square, np.float32) / np.float32(255)
