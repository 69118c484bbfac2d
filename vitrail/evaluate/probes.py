"""What frozen features are worth: simple classifiers on top of them, in three ways that papers use.

`knn` is the weighted k-NN of DINO (https://arxiv.org/abs/2104.14294), `linear` a logistic regression, `fewshot` the
regularised least squares of the ViT paper (https://arxiv.org/abs/2010.11929, section 4.1) as in its authors' code.
All take arrays: features (N, D) and class numbers (N,), to learn from and to be measured on.

Legend: N images, D width, K classes.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from vitrail.charts import build
from vitrail.charts.kinds import Chart
from vitrail.data.dataset import Numbers
from vitrail.data.sources import stratify
from vitrail.errors import UserError
from vitrail.progress import log
from vitrail.tasks.multiclass import ClassScore, Multiclass, class_lines, class_tables
from vitrail.tasks.scores import files_line, rounded

Floats = NDArray[np.float32]

HELD_OUT = 0.2  # share of the training images on which `linear` chooses its regularisation
STRENGTHS = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6)  # of it, per image; the first of equally good ones is taken
_ITERATIONS = 1000
_SIMILARITIES = 2**26  # between images that are in memory at a time
_BIAS = 100.0  # a constant feature so large that the regularisation hardly touches its weight


@dataclass(frozen=True, eq=False)
class ProbeMetrics:
    """How well a classifier on frozen features does. Shares are from 0 to 1; rows of the confusion are true classes."""

    method: Literal["knn", "linear"]
    settings: Mapping[str, float]  # those given and those found
    train_images: int
    images: int
    top1: float
    top5: float
    per_class: list[ClassScore]
    confusion: NDArray[np.int64]
    folder: Path | None = None  # where `evaluate` wrote its files

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON."""
        numbers = {"train_images": self.train_images, "images": self.images, "top1": self.top1, "top5": self.top5}
        return {
            "method": self.method,
            **rounded(numbers),
            "settings": dict(self.settings),
            "per_class": [rounded(asdict(score)) for score in self.per_class],
            "confusion": self.confusion.tolist(),
        }

    def csv(self) -> dict[str, list[list[object]]]:
        """The tables to write, by the names of their files."""
        return class_tables(self.per_class, self.confusion)

    def charts(self) -> list[Chart]:
        return [build.confusion(self.confusion, [score.name for score in self.per_class])]

    def table(self, most: int = 20) -> str:
        """The scores as text: overall, then by class, or the `most` worst classes."""
        title = {"knn": "weighted k-NN", "linear": "linear probe"}[self.method]
        settings = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in self.settings.items())
        lines = [
            f"{title} ({settings})",
            f"training images    {self.train_images:>7,}",
            f"images             {self.images:>7,}",
            f"top-1              {self.top1:>7.2%}",
            f"top-5              {self.top5:>7.2%}",
            "",
        ]
        return "\n".join(lines + class_lines(self.per_class, most) + files_line(self.folder))


@dataclass(frozen=True)
class Shots:
    """The accuracy with so many training images per class: of every draw, and over all of them."""

    shots: int
    mean: float
    std: float  # 0 for a single draw
    top1: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class FewShotMetrics:
    """How well a few images per class suffice, averaged over draws of them."""

    images: int
    draws: int
    shots: list[Shots]
    folder: Path | None = None  # where `evaluate` wrote its files

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain JSON."""
        shots = [rounded(asdict(s)) | {"top1": [round(value, 6) for value in s.top1]} for s in self.shots]
        return {"method": "fewshot", "images": self.images, "draws": self.draws, "shots": shots}

    def csv(self) -> dict[str, list[list[object]]]:
        """The tables to write, by the names of their files."""
        rows: list[list[object]] = [
            [s.shots, draw, f"{value:.6f}"] for s in self.shots for draw, value in enumerate(s.top1, 1)
        ]
        return {"shots": [["shots", "draw", "top1"], *rows]}

    def charts(self) -> list[Chart]:
        numbers, top1 = [s.shots for s in self.shots], [s.top1 for s in self.shots]
        return [build.shots(numbers, top1, [s.mean for s in self.shots], [s.std for s in self.shots], self.images)]

    def table(self) -> str:
        """The scores as text."""
        lines = [
            f"few-shot: least squares on {self.draws} draws of some images per class",
            f"images  {self.images:,}",
            "",
            "images per class    top-1      std",
            *(f"{s.shots:>16,}  {s.mean:>7.2%}  {s.std:>7.2%}" for s in self.shots),
        ]
        return "\n".join(lines + files_line(self.folder))


def knn(
    train_features: ArrayLike,
    train_labels: ArrayLike,
    features: ArrayLike,
    labels: ArrayLike,
    classes: Sequence[str] | None = None,
    *,
    k: int = 20,
    temperature: float = 0.07,
) -> ProbeMetrics:
    """The class for which the `k` nearest training images vote, each by exp(cosine similarity / temperature).

    If there are fewer than `k`, all of them vote.
    """
    if k < 1 or temperature <= 0:
        raise UserError(f"'k' must be 1 or more and 'temperature' above 0, but they are {k} and {temperature}.")
    x, y, test, truth, names = _arrays(train_features, train_labels, features, labels, classes)
    k = min(k, len(x))
    train = torch.nn.functional.normalize(torch.from_numpy(x))
    own = torch.from_numpy(y)
    votes = np.zeros((len(test), len(names)))
    rows = max(_SIMILARITIES // len(x), 1)
    for at in range(0, len(test), rows):
        part = torch.nn.functional.normalize(torch.from_numpy(test[at : at + rows]))
        nearest, which = (part @ train.T).topk(k)
        weights = torch.exp((nearest - nearest[:, :1]).double() / temperature)  # in proportion, and never too large
        counted = torch.zeros(len(part), len(names), dtype=torch.float64)
        votes[at : at + rows] = counted.scatter_add_(1, own[which], weights).numpy()
    return _measured("knn", votes, truth, names, len(x), {"k": k, "temperature": temperature})


def linear(
    train_features: ArrayLike,
    train_labels: ArrayLike,
    features: ArrayLike,
    labels: ArrayLike,
    classes: Sequence[str] | None = None,
    *,
    seed: int = 0,
) -> ProbeMetrics:
    """Logistic regression by L-BFGS on standardised features.

    Of seven strengths of regularisation, the one is taken that does best on a fifth of the training images, held out by
    `seed`; then it is fitted to all of them.
    """
    _check_seed(seed)
    x, y, test, truth, names = _arrays(train_features, train_labels, features, labels, classes)
    keep, held = stratify(y, HELD_OUT, seed)
    if len(np.unique(y)) < 2 or not len(held):
        raise UserError(
            "A linear probe needs training images of two classes or more, and of some class more than one to hold out."
        )
    found = {
        strength: float((fitted.predict(x[held]) == y[held]).mean())
        for strength, fitted in _fits(x[keep], y[keep], STRENGTHS)
    }
    best = max(found, key=found.__getitem__)
    ((_, model),) = _fits(x, y, [best])
    if model[-1].n_iter_.max() >= _ITERATIONS:
        log.warning("The linear probe was stopped after %d iterations, before it converged.", _ITERATIONS)
    logits = model.decision_function(test)  # not the logarithm of probabilities, which may be 0 where all is certain
    if logits.ndim == 1:  # of two classes, for the second and against the first
        logits = np.column_stack([-logits, logits])
    scores = np.full((len(test), len(names)), logits.min() - 1)  # a class without training images comes last
    scores[:, model[-1].classes_] = logits
    return _measured("linear", scores, truth, names, len(x), {"l2": best, "held_out_top1": round(found[best], 6)})


def fewshot(
    train_features: ArrayLike,
    train_labels: ArrayLike,
    features: ArrayLike,
    labels: ArrayLike,
    classes: Sequence[str] | None = None,
    *,
    shots: Sequence[int] = (1, 5, 10),
    draws: int = 5,
    seed: int = 0,
    l2: float = 1024.0,
) -> FewShotMetrics:
    """Least squares from the features of so many images per class to +1 for their class and -1 for the others.

    The images are drawn anew `draws` times, by `seed`; those of few shots are among those of more. `l2` is the
    authors' own, the same for all.
    """
    _check_seed(seed)
    if not shots or min(*shots, draws) < 1 or l2 <= 0:
        raise UserError(
            f"'shots' and 'draws' must be 1 or more and 'l2' above 0, but they are {tuple(shots)}, {draws} and {l2}."
        )
    x, y, test, truth, names = _arrays(train_features, train_labels, features, labels, classes)
    counts = np.bincount(y, minlength=len(names))
    rarest = int(counts.argmin())
    if counts[rarest] < max(shots):
        raise UserError(
            f"{max(shots)} shots take {max(shots)} training images of every class, but '{names[rarest]}' has "
            f"{counts[rarest]}. Ask for fewer, such as --shots {max(counts[rarest], 1)}."
        )
    top1: dict[int, list[float]] = {n: [] for n in shots}
    for draw in range(draws):
        rng = np.random.Generator(np.random.PCG64([seed, draw]))
        shuffled = [rng.permutation(np.flatnonzero(y == number)) for number in range(len(names))]
        for n, results in top1.items():
            chosen = np.concatenate([members[:n] for members in shuffled])
            weights, bias = least_squares(x[chosen], y[chosen], len(names), l2)
            results.append(float(((test @ weights + bias).argmax(axis=1) == truth).mean()))
    return FewShotMetrics(
        images=len(test),
        draws=draws,
        shots=[
            Shots(n, statistics.mean(results), statistics.stdev(results) if draws > 1 else 0.0, tuple(results))
            for n, results in top1.items()
        ],
    )


def least_squares(x: Floats, y: Numbers, classes: int, l2: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weights (D, K) and bias (K,) of the regression of standardised features to ±1, for features as they are."""
    mean, std = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64) + 1e-5
    rows = np.column_stack([(x - mean) / std, np.full(len(x), _BIAS)])
    targets = np.where(y[:, None] == np.arange(classes), 1.0, -1.0)
    if len(rows) < rows.shape[1]:  # the same solution, of the smaller of two systems
        solution = rows.T @ np.linalg.solve(rows @ rows.T + l2 * np.eye(len(rows)), targets)
    else:
        solution = np.linalg.solve(rows.T @ rows + l2 * np.eye(rows.shape[1]), rows.T @ targets)
    weights = solution[:-1] / std[:, None]
    return weights, solution[-1] * _BIAS - mean @ weights


def _fits(x: Floats, y: Numbers, strengths: Sequence[float]) -> Iterator[tuple[float, Any]]:
    """The same regression at one strength of regularisation after the other, each going on where the last ended."""
    from sklearn.exceptions import ConvergenceWarning  # slow to load, for this method only
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=_ITERATIONS, warm_start=True))
    for strength in strengths:
        model[-1].C = 1 / (strength * len(x))  # scikit-learn weighs the sum over images
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # `linear` tells it, where it matters
            model.fit(x, y)
        yield strength, model


def _measured(
    method: Literal["knn", "linear"],
    scores: NDArray[np.float64],
    labels: Numbers,
    classes: Sequence[str],
    train_images: int,
    settings: Mapping[str, float],
) -> ProbeMetrics:
    m = Multiclass(tuple(classes)).measure(scores, labels)
    return ProbeMetrics(method, settings, train_images, m.images, m.top1, m.top5, m.per_class, m.confusion)


def _check_seed(seed: int) -> None:
    if seed < 0:
        raise UserError(f"'seed' must be 0 or more, but it is {seed}.")


def _arrays(
    train_features: ArrayLike,
    train_labels: ArrayLike,
    features: ArrayLike,
    labels: ArrayLike,
    classes: Sequence[str] | None,
) -> tuple[Floats, Numbers, Floats, Numbers, Sequence[str]]:
    """Features, (N, D) float32, and class numbers, (N,), checked; with names for the classes."""
    x, test = np.asarray(train_features, np.float32), np.asarray(features, np.float32)
    y, truth = np.asarray(train_labels), np.asarray(labels)
    for vectors, numbers in ((x, y), (test, truth)):
        if vectors.ndim != 2 or not len(vectors) or numbers.shape != vectors.shape[:1]:
            raise UserError(
                "Features must be an array (N, D), N at least 1, and labels one of (N,), but they are "
                f"{vectors.shape} and {numbers.shape}."
            )
        if not np.issubdtype(numbers.dtype, np.integer) or numbers.min() < 0:
            raise UserError("Labels must be class numbers: whole, from 0 on.")
        if not np.isfinite(vectors).all():
            raise UserError("Features must be finite, but some are not: the weights diverged or are damaged.")
    if x.shape[1] != test.shape[1]:
        raise UserError(f"Features must have one width, but they have {x.shape[1]} and {test.shape[1]}.")
    most = int(max(y.max(), truth.max()))
    names = classes if classes is not None else [str(number) for number in range(most + 1)]
    if most >= len(names):
        raise UserError(f"{len(names)} classes are named, but there is a class of number {most}.")
    return np.ascontiguousarray(x), y.astype(np.int64), np.ascontiguousarray(test), truth.astype(np.int64), names
