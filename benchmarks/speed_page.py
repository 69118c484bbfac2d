"""The tables and the first figure of docs/speed.md, from the results of `benchmarks/peers.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from contestants import LIMIT, MODELS, PEERS, VITRAIL, Precision, Shape, Variant, block_products

from vitrail.files import write_text

DOCS = Path(__file__).parent.parent / "docs"
PAGE, FIGURE = DOCS / "speed.md", DOCS / "images" / "speed.png"


@dataclass(frozen=True)
class Result:
    """One measured row, as the tables read it."""

    what: str
    model: str
    batch: int
    macs: int  # of one image, forward
    default: str
    variants: dict[str, Variant]
    seconds: dict[str, list[float]]
    memory: dict[str, float]
    compiling: dict[str, float]
    skipped: dict[str, str]
    profile: dict[str, float]

    @classmethod
    def of(cls, document: dict[str, Any], found: dict[str, Any]) -> Result:
        row = found["row"]
        variants = {name: Variant(**values) for name, values in found["variants"].items()}
        rest = {key: value for key, value in found.items() if key not in ("row", "variants")}
        macs = document["macs"][row["model"]]
        return cls(what=row["what"], model=row["model"], batch=row["batch"], macs=macs, variants=variants, **rest)

    @property
    def shape(self) -> Shape:
        return MODELS[self.model]

    @property
    def label(self) -> str:
        return f"{self.model}, batch {self.batch}"

    @property
    def ours(self) -> list[str]:
        """vitrail's variants, the default first."""
        return [name for name, variant in self.variants.items() if variant.library == VITRAIL]

    def peers(self, precision: str | None = None) -> list[str]:
        return [
            name
            for name, variant in self.variants.items()
            if variant.library in PEERS and precision in (None, variant.precision)
        ]

    def rate(self, name: str) -> float:
        """Images per second."""
        return self.batch / median(self.seconds[name])

    def fastest(self, names: Iterable[str]) -> str | None:
        """The variant that comes closest to vitrail or is furthest ahead of it, within rounds."""
        return min(names, key=lambda name: self.ratio(name)[1], default=None)

    def ratio(self, name: str, ours: str | None = None) -> tuple[float, float, float]:
        """How many times as fast `ours`, by default vitrail's default, is as a variant.

        Quartiles over rounds, the median in the middle.
        """
        pairs = zip(self.seconds[name], self.seconds[ours or self.default], strict=True)
        ratios = [theirs / own for theirs, own in pairs]
        low, middle, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return low, middle, high

    def flops(self, name: str) -> float:
        """Floating-point operations per second: 2 per MAC, and a training step is three forward passes."""
        return (6 if self.what == "training" else 2) * self.macs * self.rate(name)

    def limit(self, how: str, precision: Precision) -> float:
        """Operations per second of a block's matrix products."""
        name = Variant(LIMIT, precision, how).name
        products = sum(inside * outside for inside, outside in block_products(self.shape))
        return 2 * self.batch * self.shape.tokens * products / median(self.seconds[name])

    def share(self, name: str) -> float:
        """The share of the faster of both limits, in the variant's precision, that its matrix products alone reach."""
        precision = self.variants[name].precision
        return self.flops(name) / max(self.limit(how, precision) for how in ("F.linear", "oneDNN"))


def draw(document: dict[str, Any]) -> None:
    """Rewrites the tables of the page and the figure."""
    results = [Result.of(document, found) for found in document["rows"]]
    results.sort(key=lambda r: r.what, reverse=True)  # training first
    compiled = [Result.of(document, found) for found in document.get("compiled", {"rows": []})["rows"]]
    parts = {
        "machine": _machine(document),
        "summary": _summary(results),
        "training": _everyone([r for r in results if r.what == "training"]),
        "inference": _everyone([r for r in results if r.what == "inference"]),
        "compiled": _compiled(document, compiled),
        "limit": _limits(results),
        "memory": _memory(results),
        "profile": _profile([r for r in results if r.profile]),
    }
    fill(parts)
    _figure(results, document["cpu"])
    print(f"{PAGE} and {FIGURE} written")


def fill(parts: dict[str, str]) -> None:
    """Rewrites the parts of the page between markers of their names."""
    page = PAGE.read_text()
    for name, text in parts.items():
        before, opened, rest = page.partition(f"<!-- {name} -->\n")
        _, closed, after = rest.partition(f"<!-- /{name} -->")
        if not closed:
            raise SystemExit(f"{PAGE} must contain '<!-- {name} -->' and '<!-- /{name} -->'.")
        page = f"{before}{opened}{text}\n{closed}{after}"
    write_text(PAGE, page)


def table(head: list[str], lines: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines])


def _machine(document: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in document["versions"].items())
    how = "`python benchmarks/peers.py quick`" if document["quick"] else "`make bench`"
    bf16 = "with" if document["bf16"] else "without"
    equal = " and ".join(f"{found['difference']:.1g} ({model})" for model, found in document["parity"].items())
    lines = [
        f"Measured by {how} in {document['minutes']:.0f} minutes on {document['cpu']}, {bf16} bf16 instructions; "
        f"vitrail trains in {document['default_precision']} by default here. {versions}.",
        "",
        "The same mathematics: from the same weights, the losses of ten training steps of vitrail and timm in fp32 "
        f"differ by at most {equal}, relative.",
        "",
        "![Speed relative to the fastest peer, for training and inference](images/speed.png)",
    ]
    return "\n".join(lines)


def _times(ratio: tuple[float, float, float]) -> str:
    low, middle, high = ratio
    return f"**{middle:.2f}×** ({low:.2f} to {high:.2f})"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _summary(results: list[Result]) -> str:
    """vitrail against the fastest peers: its default against any precision, and in fp32 against fp32."""

    def lines() -> Iterator[list[str]]:
        for r in results:
            for ours in r.ours:
                precision = None if ours == r.default else r.variants[ours].precision
                cells = [r.what, r.label + (f", {precision}" if precision else ""), _number(r.rate(ours))]
                peer = r.fastest(r.peers(precision))
                assert peer is not None
                yield [*cells, peer, _times(r.ratio(peer, ours)), str(len(r.seconds[ours]))]

    return table(["", "model", "vitrail, images/s", "fastest peer", "vitrail is", "rounds"], lines())


def _everyone(results: list[Result]) -> str:
    """Images per second of every variant, one column per row of the benchmark."""
    names = dict.fromkeys(name for r in results for name in (*r.ours, *r.peers()))

    def cell(r: Result, name: str) -> str:
        if name == r.default:
            return f"**{_number(r.rate(name))}**"
        return f"{_number(r.rate(name))} ({r.ratio(name)[1]:.2f}×)" if name in r.seconds else "not measured"

    return table(["", *(r.label for r in results)], ([name, *(cell(r, name) for r in results)] for name in names))


def _compiled(document: dict[str, Any], results: list[Result]) -> str:
    """vitrail, which is not compiled, against every compiled peer."""
    if not results:
        return "Not measured."

    def lines() -> Iterator[list[str]]:
        for r in sorted(results, key=lambda r: r.what, reverse=True):
            for name in (*r.peers(), *r.skipped):
                if name in r.seconds:
                    cells = [_number(r.rate(name)), _times(r.ratio(name)), f"{r.compiling[name]:.0f} s"]
                else:
                    cells = [r.skipped[name], "", ""]
                yield [r.what, r.label, _number(r.rate(r.default)), name, *cells]

    head = ["", "model", "vitrail, images/s", "peer", "images/s", "vitrail is", "compiling"]
    how = f"Measured in {document['compiled']['minutes']:.0f} minutes on {document['compiled']['cpu']}."
    return f"{how}\n\n{table(head, lines())}"


def _limits(results: list[Result]) -> str:
    def lines() -> Iterator[list[str]]:
        for r in results:
            peer = r.fastest(r.peers())
            precision = r.variants[r.default].precision
            limits = [f"{r.limit(how, precision) / 1e9:.0f}" for how in ("F.linear", "oneDNN")]
            theirs = "not measured" if peer is None else f"{r.share(peer):.0%}, {peer}"
            yield [
                r.what,
                r.label,
                precision,
                *limits,
                f"{r.flops(r.default) / 1e9:.0f}, {r.share(r.default):.0%}",
                theirs,
            ]

    head = [
        "",
        "model",
        "precision",
        "`F.linear`, GFLOP/s",
        "oneDNN, GFLOP/s",
        "vitrail, GFLOP/s and share",
        "fastest peer",
    ]
    return table(head, lines())


def _memory(results: list[Result]) -> str:
    libraries = dict.fromkeys(name for r in results for name in r.memory if name != LIMIT)

    def cell(r: Result, library: str) -> str:
        return f"{r.memory[library]:,.0f}" if library in r.memory else "not measured"

    return table(
        ["MiB", *(f"{r.what}, {r.label}" for r in results)],
        ([library, *(cell(r, library) for r in results)] for library in libraries),
    )


def _profile(results: list[Result]) -> str:
    most = {kind: max(r.profile.get(kind, 0.0) for r in results) for r in results for kind in r.profile}
    kinds = sorted(most, key=lambda kind: -most[kind])
    return table(
        ["share of a training step", *(r.label for r in results)],
        ([kind, *(f"{r.profile.get(kind, 0.0):.1%}" for r in results)] for kind in kinds),
    )


def _figure(results: list[Result], cpu: str) -> None:
    """For every row, speed relative to the fastest peer: vitrail and each peer, none compiled."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from vitrail.charts.style import BLUE, GREY, INK, STYLE, save

    colors = {VITRAIL: BLUE, "timm": GREY, "transformers": "#858585", "vit-pytorch": "#9F9F9F"}
    drawn = set()
    halves = [(what, [r for r in results if r.what == what]) for what in ("training", "inference")]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 1.3 + 0.95 * max(len(rows) for _, rows in halves)), layout="constrained")
        for axes, (what, rows) in zip(figure.subplots(1, 2), halves, strict=True):
            for place, r in enumerate(rows):
                best = r.fastest(r.peers())
                assert best is not None
                bars = [(VITRAIL, r.default)]
                for peer in PEERS:
                    name = r.fastest(name for name in r.peers() if r.variants[name].library == peer)
                    bars += [(peer, name)] if name else []
                drawn.update(kind for kind, _ in bars)
                for i, (kind, name) in enumerate(bars):
                    y = place + 0.8 * (i + 0.5) / len(bars) - 0.4
                    speed = r.ratio(best)[1] / r.ratio(name)[1]
                    axes.barh(y, speed, 0.72 / len(bars), color=colors[kind])
                    about = f"{speed:.2f}×, {_number(r.rate(name))} images/s"
                    axes.text(0.02, y, about, va="center_baseline", fontsize=7, color="white")
            axes.axvline(1, color=INK, linewidth=0.7)
            axes.set_yticks(range(len(rows)), [r.label.replace(", batch", "\nbatch") for r in rows])
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.grid(axis="y", visible=False)
            axes.set_title({"training": "Training step", "inference": "Inference"}[what])
            axes.set_xlabel("speed, relative to the fastest peer")
        handles = [Patch(color=color, label=kind) for kind, color in colors.items() if kind in drawn]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), title=cpu, title_fontsize=8)
        save(figure, FIGURE)
