"""Probes: simple classifiers on frozen features, by the three usual protocols.

`knn` is DINO's weighted k-NN (https://arxiv.org/abs/2104.14294), `linear` logistic regression, `fewshot` the
regularised least squares of the ViT paper (https://arxiv.org/abs/2010.11929, section 4.1), as in its authors' code.
All take arrays: features (N, D) and class indices (N,), for training and for evaluation.

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
from numpy.typing import ArrayLike, NDArray

from vitrail.charts import build
from vitrail.charts.kinds import Chart
from vitrail.data.dataset import Numbers
from vitrail.data.holdout import stratify
from vitrail.errors import UserError
from vitrail.progress import log
from vitrail.tasks.class_scores import ClassScore, class_lines, class_tables
from vitrail.tasks.multiclass import Multiclass
from vitrail.tasks.scores import files_line, rounded

Floats = NDArray[np.float32]

HELD_OUT = 0.2  # share of the training images that selects the regularisation of `linear`
STRENGTHS = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6)  # candidates, per image; ties go to the first
_ITERATIONS = 1000
_PRIOR, _START = 0.1, 30  # of `logistic`: variance of the weights, iterations
_SIMILARITIES = 2**26  # similarities in memory at a time
_BIAS = 100.0  # a constant feature, large enough that its weight is practically not regularised


@dataclass(frozen=True, eq=False)
class ProbeMetrics:
    """The scores of a classifier on frozen features. Shares are from 0 to 1; rows of the confusion are true classes."""

    method: Literal["knn", "linear"]
    settings: Mapping[str, float]  # given or selected
    train_images: int
    images: int
    top1: float
    top5: float
    per_class: list[ClassScore]
    confusion: NDArray[np.int64]
    folder: Path | None = None  # where `evaluate` wrote them

    def to_json(self) -> dict[str, Any]:
        """All scores, as plain JSON."""
        numbers = {"train_images": self.train_images, "images": self.images, "top1": self.top1, "top5": self.top5}
        return {
            "method": self.method,
            **rounded(numbers),
            "settings": dict(self.settings),
            "per_class": [rounded(asdict(score)) for score in self.per_class],
            "confusion": self.confusion.tolist(),
        }

    def csv(self) -> dict[str, list[list[object]]]:
        """The CSV tables, by file name."""
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
    """The accuracy with a number of training images per class: of each draw, mean and standard deviation."""

    shots: int
    mean: float
    std: float  # 0 for a single draw
    top1: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class FewShotMetrics:
    """Few-shot accuracy, averaged over draws of the training images."""

    images: int
    draws: int
    shots: list[Shots]
    folder: Path | None = None  # where `evaluate` wrote them

    def to_json(self) -> dict[str, Any]:
        """All scores, as plain JSON."""
        shots = [rounded(asdict(s)) | {"top1": [round(value, 6) for value in s.top1]} for s in self.shots]
        return {"method": "fewshot", "images": self.images, "draws": self.draws, "shots": shots}

    def csv(self) -> dict[str, list[list[object]]]:
        """The CSV tables, by file name."""
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
            f"few-shot: least squares, {self.draws} draws",
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
    """Weighted k-NN: the `k` nearest training images vote with exp(cosine similarity / temperature).

    With fewer than `k` training images, all vote.
    """
    import torch  # slow to import, and predictions of an ONNX file do without

    if k < 1 or temperature <= 0:
        raise UserError(f"'k' must be at least 1 and 'temperature' above 0, but they are {k} and {temperature}.")
    x, y, test, truth, names = _arrays(train_features, train_labels, features, labels, classes)
    k = min(k, len(x))
    train = torch.nn.functional.normalize(torch.from_numpy(x))
    own = torch.from_numpy(y)
    votes = np.zeros((len(test), len(names)))
    rows = max(_SIMILARITIES // len(x), 1)
    for at in range(0, len(test), rows):
        part = torch.nn.functional.normalize(torch.from_numpy(test[at : at + rows]))
        nearest, which = (part @ train.T).topk(k)
        weights = torch.exp((nearest - nearest[:, :1]).double() / temperature)  # relative to the nearest: no overflow
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

    The regularisation strength is the best of seven on a fifth of the training images, held out by `seed`; the final
    fit uses all of them.
    """
    _check_seed(seed)
    x, y, test, truth, names = _arrays(train_features, train_labels, features, labels, classes)
    keep, held = stratify(y, HELD_OUT, seed)
    if len(np.unique(y)) < 2 or not len(held):
        raise UserError(
            "A linear probe needs training images of at least two classes, and two of some class, to hold one out."
        )
    found = {
        strength: float((fitted.predict(x[held]) == y[held]).mean())
        for strength, fitted in _fits(x[keep], y[keep], STRENGTHS)
    }
    best = max(found, key=found.__getitem__)
    ((_, model),) = _fits(x, y, [best])
    if model[-1].n_iter_.max() >= _ITERATIONS:
        log.warning("The linear probe did not converge in %d iterations.", _ITERATIONS)
    logits = model.decision_function(test)  # not log-probabilities, which may be -inf
    if logits.ndim == 1:  # binary: one score, for the second class
        logits = np.column_stack([-logits, logits])
    scores = np.full((len(test), len(names)), logits.min() - 1)  # classes without training images rank last
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
    """Ridge regression from the features of a few images per class to +1 for their class and -1 for the others.

    Images are drawn `draws` times by `seed`; smaller draws are subsets of larger ones. `l2` is the authors' value for
    all data.
    """
    _check_seed(seed)
    if not shots or min(*shots, draws) < 1 or l2 <= 0:
        raise UserError(
            f"'shots' and 'draws' must be at least 1 and 'l2' above 0, but they are {tuple(shots)}, {draws} and {l2}."
        )
    x, y, test, truth, names = _arrays(train_features, train_labels, features, labels, classes)
    counts = np.bincount(y, minlength=len(names))
    rarest = int(counts.argmin())
    if counts[rarest] < max(shots):
        raise UserError(
            f"{max(shots)} shots need {max(shots)} training images of each class, but '{names[rarest]}' has "
            f"{counts[rarest]}. Use at most --shots {max(counts[rarest], 1)}."
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
    """Weights (D, K) and bias (K,) of ridge regression on standardised features, rescaled to the raw features."""
    mean, std = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64) + 1e-5
    rows = np.column_stack([(x - mean) / std, np.full(len(x), _BIAS)])
    targets = np.where(y[:, None] == np.arange(classes), 1.0, -1.0)
    if len(rows) < rows.shape[1]:  # the dual form, a smaller system
        solution = rows.T @ np.linalg.solve(rows @ rows.T + l2 * np.eye(len(rows)), targets)
    else:
        solution = np.linalg.solve(rows.T @ rows + l2 * np.eye(rows.shape[1]), rows.T @ targets)
    weights = solution[:-1] / std[:, None]
    return weights, solution[-1] * _BIAS - mean @ weights


def logistic(x: Floats, y: Numbers, classes: int) -> tuple[Floats, Floats]:
    """Weights (K, D) and bias (K,) of logistic regression on standardised features, rescaled to the raw features.

    It is a start, not a result: the regularisation is fixed, and the optimiser stops after a few steps, which give
    the accuracy of many. Classes without images get the lowest score.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    mean, std = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64) + 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = LogisticRegression(C=_PRIOR, max_iter=_START).fit((x - mean) / std, y)
    weights, bias = model.coef_, model.intercept_
    if len(model.classes_) == 2:  # scikit-learn fits one score
        weights, bias = np.concatenate([-weights, weights]) / 2, np.concatenate([-bias, bias]) / 2
    rows = np.zeros((classes, x.shape[1]), np.float32)
    level = np.full(classes, bias.min(), np.float32)
    rows[model.classes_], level[model.classes_] = weights / std, bias - (weights / std) @ mean
    return rows, level


def _fits(x: Floats, y: Numbers, strengths: Sequence[float]) -> Iterator[tuple[float, Any]]:
    """Fits the regression at each regularisation strength, warm-started from the previous one."""
    from sklearn.exceptions import ConvergenceWarning  # slow to import
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=_ITERATIONS, warm_start=True))
    for strength in strengths:
        model[-1].C = 1 / (strength * len(x))  # scikit-learn sums over images
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # `linear` reports it for the final fit
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
        raise UserError(f"'seed' must be at least 0, but it is {seed}.")


def _arrays(
    train_features: ArrayLike,
    train_labels: ArrayLike,
    features: ArrayLike,
    labels: ArrayLike,
    classes: Sequence[str] | None,
) -> tuple[Floats, Numbers, Floats, Numbers, Sequence[str]]:
    """Validated features, (N, D) float32, and class indices, (N,), with the class names."""
    x, test = np.asarray(train_features, np.float32), np.asarray(features, np.float32)
    y, truth = np.asarray(train_labels), np.asarray(labels)
    for vectors, numbers in ((x, y), (test, truth)):
        if vectors.ndim != 2 or not len(vectors) or numbers.shape != vectors.shape[:1]:
            raise UserError(
                "Features must have the shape (N, D), with N at least 1, and labels (N,), but they have "
                f"{vectors.shape} and {numbers.shape}."
            )
        if not np.issubdtype(numbers.dtype, np.integer) or numbers.min() < 0:
            raise UserError("Labels must be class indices: integers from 0.")
        if not np.isfinite(vectors).all():
            raise UserError("Features must be finite, but some are not: the weights diverged or are damaged.")
    if x.shape[1] != test.shape[1]:
        raise UserError(f"Training and test features must have one width, but have {x.shape[1]} and {test.shape[1]}.")
    most = int(max(y.max(), truth.max()))
    names = classes if classes is not None else [str(number) for number in range(most + 1)]
    if most >= len(names):
        raise UserError(f"Labels must be below {len(names)}, the number of class names, but one is {most}.")
    return np.ascontiguousarray(x), y.astype(np.int64), np.ascontiguousarray(test), truth.astype(np.int64), names
