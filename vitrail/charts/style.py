"""The house style of figures: colours, fonts, headings, file formats."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager

P = ParamSpec("P")

# Two colours of the Okabe-Ito palette, safe for colour-blind readers, and greys.
BLUE, ORANGE = "#0072B2", "#D55E00"
INK, GREY, PALE = "#222222", "#6B6B6B", "#E4E4E4"
SKY = "#6AAED6"
SHADES = LinearSegmentedColormap.from_list(
    "vitrail", [(0, "#F5F6F8"), (0.05, "#DCEAF4"), (0.3, SKY), (0.65, BLUE), (1, "#06365C")]
)
RUNS = (BLUE, ORANGE, "#009E73", "#8A4FA3", "#B58A00", "#5A6570", "#CC79A7")  # for several runs in one chart

# DejaVu comes with matplotlib; Chinese, Japanese and Korean class names need a system font.
_EASTERN = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "WenQuanYi Micro Hei",
    "Microsoft YaHei",
    "Arial Unicode MS",
)

STYLE = {
    "font.family": ["DejaVu Sans", *(name for name in _EASTERN if name in fontManager.get_font_names())],
    "font.size": 9,
    "text.color": INK,
    "text.parse_math": False,  # a class may be called $5
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlepad": 24,
    "grid.color": PALE,
    "grid.linewidth": 0.7,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
}


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorator that draws a figure in the house style."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


def save(figure: Figure, path: Path, format: str = "png") -> None:
    """Writes a figure as PNG, SVG or PDF, with tight margins."""
    with warnings.catch_warnings():
        # Class names in an unsupported script are drawn as boxes; no need to warn.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(path, format=format, dpi=150, bbox_inches="tight", facecolor="white")


def heading(axes: Axes, title: str, note: str) -> None:
    """A bold title with a grey note below it."""
    axes.set_title(title)
    axes.annotate(note, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color=GREY)


def short(name: str, longest: int = 30) -> str:
    """Elides the middle of a long name, since names often differ only at the end."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half].rstrip(' ._-')}…{name[-half:].lstrip(' ._-')}"
