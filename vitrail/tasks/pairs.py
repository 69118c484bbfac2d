"""Images with captions: learns to match pictures and words. Recall at 1, 5 and 10, both ways.

The outputs of the model are embeddings of images. What they are compared with, the embeddings of captions, comes from
the same model: `bound` gives the task a `Reader` of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from vitrail.charts import build
from vitrail.charts.kinds import Chart
from vitrail.charts.measure import Measure
from vitrail.config import TokenizerName, TrainConfig, override
from vitrail.errors import UserError, shown
from vitrail.progress import log
from vitrail.tasks.bootstrap import Samples, collect, draws
from vitrail.tasks.captions import caption_problems, joined, pack, unpack
from vitrail.tasks.multiclass import Multiclass
from vitrail.tasks.pair_scores import AT, MEASURES, Match, PairMeter, PairScores, Reader, label_embeddings
from vitrail.tasks.scores import Array, Floats, Meter, Numbers, Scores, Targets
from vitrail.tasks.task import Answer, Columns, Line, Task
from vitrail.tokenizers import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from vitrail.models import Model, ModelConfig
    from vitrail.tasks.objective import Objective

_CONTEXT = {"bytes": 96, "bpe": 64, "clip": 77}  # tokens of a text at most, by default
_MIXED = ("hflip", "mixup", "cutmix", "smoothing")  # a mirrored picture contradicts "left"; captions cannot be mixed
_LEAST_CROP = 0.6  # of the area
_WORDLESS = 'Give the words to choose from, with --labels "cat,dog", or find pictures with `vitrail search`.'


@dataclass(frozen=True)
class Pairs(Task):
    """Each image has a caption, or several."""

    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    context: int = 0  # tokens of a text at most
    dims: int = 0  # of the joint space
    reader: Reader | None = field(default=None, compare=False, repr=False)

    name: ClassVar[str] = "pairs"
    title: ClassVar[str] = "image-text"
    one: ClassVar[str] = "caption"
    many: ClassVar[str] = "captions"
    measures: ClassVar[tuple[Measure, ...]] = MEASURES
    columns: ClassVar[tuple[Measure, ...]] = ()
    choices: ClassVar[Mapping[str, str]] = {"loss": "loss"}
    ranked: ClassVar[str] = ""
    counted: ClassVar[bool] = False
    several: ClassVar[bool] = True
    objectives: ClassVar[tuple[str, ...]] = ("sigmoid", "softmax")
    interchange: ClassVar[bool] = True
    usage: ClassVar[str] = "vitrail search RUN IMAGES 'a sentence'"
    meant: ClassVar[str] = "embeddings"
    worst_title: ClassVar[str] = "Images whose own caption is not the first, worst match first."
    best_title: ClassVar[str] = "Images that find their caption, best match first."

    def __str__(self) -> str:
        return f"{self.title}, {self.tokenizer.kind} tokenizer"

    @property
    def outputs(self) -> int:
        return self.dims

    # In files ---------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        words = {"tokenizer": self.tokenizer.to_json(), "context": self.context, "dims": self.dims}
        return {"task": self.name, "classes": [], **words}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Task:
        tokenizer = Tokenizer.from_json(document["tokenizer"])
        ids = document["config"]["text"]["vocab"] if "config" in document else tokenizer.vocab  # in the card of a model
        if tokenizer.kind != "unknown" and tokenizer.vocab != ids:
            raise UserError(f"The tokenizer has {tokenizer.vocab} tokens, but the model reads {shown(ids)}.")
        return cls((), tokenizer, int(document["context"]), int(document["dims"]))

    # Targets ----------------------------------------------------------------------------------------------

    @classmethod
    def from_text(
        cls, columns: Columns, rows: Sequence[int], where: str, known: Sequence[str] | None = None
    ) -> tuple[Task, Targets]:
        cells = [
            joined([text for cell in its for text in cell.split("\n")]) for its in zip(*columns.values(), strict=True)
        ]
        for row, cell in zip(rows, cells, strict=True):
            if not cell:
                raise UserError(f"{where}: the image in row {row} has no caption. Add one, or remove the row.")
        return cls(), pack(cells)

    @classmethod
    def from_classes(cls, classes: Sequence[str], targets: Mapping[str, Targets]) -> tuple[Task, dict[str, Targets]]:
        """Class names as captions; a name of several lines is several captions."""
        packed = pack([joined(name.split("\n")) for name in classes])
        return cls(), {split: packed[numbers] for split, numbers in targets.items()}

    def tokenized(self, captions: Targets, tokenizer: TokenizerName | None, context: int | None) -> Task:
        """With a tokenizer learnt from training captions; texts beyond the context are cut, which is logged."""
        texts = [text for row in captions for text in unpack(row)]
        kind = tokenizer or "bytes"
        found = Tokenizer.learnt(kind, texts)
        lengths = np.array([found.tokens(text) for text in dict.fromkeys(texts)])
        most = _CONTEXT[kind] if context is None else context
        if most < 3:
            raise UserError(f"'context' must be at least 3 tokens: start, one of the text, and end; but it is {most}.")
        length = min(most, int(lengths.max(initial=3)))
        if cut := int((lengths > length).sum()):
            log.warning(
                "%s of %s different captions are longer than %s tokens and are cut. Use a larger --context, or "
                "--tokenizer bpe.",
                f"{cut:,}",
                f"{len(lengths):,}",
                length,
            )
        return replace(self, tokenizer=found, context=length)

    def check(self, parts: Mapping[str, Targets], source: object) -> None:
        texts = {text for row in parts["train"] for text in unpack(row)}
        if len(texts) < 2:
            raise UserError(f"{source} has only one caption. Images and captions can be matched from two on.")

    def strata(self, targets: Targets, fraction: float) -> Numbers:
        return np.zeros(len(targets), np.int64)

    def reorder(self, targets: Targets, classes: Sequence[str]) -> Targets:
        return targets

    def adopt(self, model: Task, parts: Mapping[str, Targets], source: object) -> dict[str, Targets]:
        return dict(parts)

    def describe(self, targets: Targets) -> Iterator[tuple[str, tuple[str, ...]]]:
        for target in targets:
            texts = unpack(target)
            yield texts[0] if texts else "", ()

    def audit(self, targets: Targets) -> Iterator[tuple[str, Literal["error", "note"], str, list[int]]]:
        texts = [unpack(row) for row in targets]
        yield from caption_problems(texts, lambda text: Tokenizer().tokens(text) > _CONTEXT["bytes"])

    # Training ---------------------------------------------------------------------------------------------

    def architecture(self, body: ModelConfig, options: Mapping[str, Any]) -> ModelConfig:
        """The image tower with a text tower of its size, or trained towers as they are; `loss` is the objective."""
        from vitrail.models.two_tower import two_towers

        changes = {name: value for name, value in options.items() if name != "loss"}
        bias = options.get("loss") != "softmax"
        return two_towers(body, self.tokenizer.vocab, self.context, bias, changes)

    def adapt(self, config: TrainConfig) -> TrainConfig:
        """The recipe for both towers: no mirroring or mixing, crops that keep what captions say, SigLIP's loss."""
        whole = {"balanced_sampling": False, "class_weights": False, "body_lr": 1.0, "layer_decay": 1.0}
        crop = max(config.augment.crop_scale, _LEAST_CROP)
        return override(config, {**dict.fromkeys(_MIXED, 0.0), **whole, "crop_scale": crop, "loss": "sigmoid"})

    def check_settings(self, config: TrainConfig, given: Mapping[str, Any], source: str) -> TrainConfig:
        for name in ("mixup", "cutmix", "smoothing"):
            if getattr(config.augment, name):
                raise UserError(f"--{name} does not apply to captions, which cannot be mixed. Remove it.")
        if config.distillation.teacher is not None:
            raise UserError("--teacher does not apply to captions. Remove it.")
        if config.optim.pass_size < 2:
            raise UserError("Captions are learnt by comparing images: --batch-size must be 2 or more.")
        return super().check_settings(config, given, source)

    def objective(self, model: Any, config: TrainConfig, targets: Targets) -> Objective:
        from vitrail.tasks.contrast import Sigmoid, Softmax

        if model.config.bias and (config.weights is None or config.transfer.freeze == "image"):
            # At first all pairs of a batch but one in B are mismatches. SigLIP's -10 is for batches of thousands.
            model.logit_bias.data.fill_(-math.log(config.optim.pass_size - 1))
        kind = Sigmoid if model.config.bias else Softmax
        captions = [unpack(row) for row in targets]
        return kind(model, captions, self.tokenizer, model.config.text.length, config.optim.model_ema)

    def read_by(self, reader: Reader) -> Task:
        return replace(self, reader=reader)

    def bound(self, model: Any) -> Task:
        from vitrail.tasks.reading import ModelReader

        context = model.config.text.length
        reader = ModelReader(model, self.tokenizer, context)
        return replace(self, context=context, dims=model.config.classes, reader=reader)

    # Answers ----------------------------------------------------------------------------------------------

    def by_words(
        self, outputs: NDArray[np.floating], labels: Sequence[str], templates: Sequence[str] = ("{}",)
    ) -> tuple[Task, Floats]:
        reader = self.words()
        texts = label_embeddings(reader, labels, templates)
        return Multiclass(tuple(labels)), outputs.astype(np.float64) @ texts.T * reader.scale

    def classifier(self, model: Any, labels: Sequence[str], templates: Sequence[str] = ("{}",)) -> tuple[Model, Task]:
        import torch

        from vitrail.models.zero_shot import word_classifier

        texts = label_embeddings(self.words(), labels, templates)
        return word_classifier(model, torch.from_numpy(texts)), Multiclass(tuple(labels))

    def words(self) -> Reader:
        if self.reader is None:
            raise UserError("The text tower of this model is not loaded, so it cannot read words.")
        return self.reader

    def _match(self, outputs: NDArray[np.floating], targets: Targets) -> Match:
        return Match(outputs.astype(np.float64), [unpack(row) for row in targets], self.words())

    def meaning(self, outputs: Tensor) -> Tensor:
        return outputs

    def answers(self, meant: NDArray[np.floating], top: int | None = None) -> list[Answer]:
        self._no_answer()

    def meter(self) -> Meter:
        return PairMeter(self.words)

    def restore(self, document: Mapping[str, Any]) -> Scores:
        names = [f"{way}_r{k}" for way in ("text", "image") for k in AT]
        recalls = {name: document[name] for name in names}
        known = {name: document[name] for name in ("images", "loss", "captions")}
        return PairScores(**known, recalls=recalls, cut=document.get("cut", 0))  # earlier versions did not count

    def losses(self, outputs: NDArray[np.floating], targets: Targets) -> Floats:
        return self._match(outputs, targets).losses

    def right(self, outputs: NDArray[np.floating], targets: Targets) -> NDArray[np.bool_]:
        return np.asarray(self._match(outputs, targets).caption_rank == 0)

    def margins(self, outputs: NDArray[np.floating]) -> Floats:
        raise UserError("Captions have no margin between a first and a second class.")

    def caption(self, meant: NDArray[np.floating], target: Any) -> list[Line]:
        texts, first = unpack(target), self.words().closest(meant)
        if first in texts:
            return [(f"right: {first}", "plain", 3)]
        return [(f"true: {texts[0]}", "plain", 3), (f"found: {first}", "wrong", 3)]

    def said(self, meant: NDArray[np.floating], target: Any) -> tuple[str, str]:
        return self.words().closest(meant), unpack(target)[0]

    def same(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        return np.asarray(np.isclose(given, expected, atol=tolerance).all(axis=1))

    def differ(self, given: Array, expected: Array, tolerance: float) -> NDArray[np.bool_]:
        return ~self.same(given, expected, tolerance)

    def _no_answer(self) -> NoReturn:
        raise UserError(f"A model for images and texts has no classes of its own. {_WORDLESS}")

    # Reports ----------------------------------------------------------------------------------------------

    def charts(self, scores: Any) -> list[Chart]:
        return []

    def sample(self, scores: Any, outputs: NDArray[np.floating] | None, targets: Targets | None) -> Samples:
        if outputs is None or targets is None:
            return Samples()
        match = self._match(outputs, targets)
        each = match.recalls()
        means = {"mean_recall": np.mean(list(each.values()), axis=0), **each, "loss": match.losses}
        return collect([({n: w @ v / len(targets) for n, v in means.items()}, {}) for w in draws(len(targets))])

    def goal(self, data: str) -> str:
        return f"match the images of {data} with their captions"

    def headline(self, data: str, score: str, images: str) -> tuple[str, str]:
        return f"matches images of {data} with their captions: mean recall ", f" on {images}."

    def curves(self, rows: build.Rows, config: TrainConfig, kept: int | None) -> Sequence[Chart]:
        return build.curves(rows, self.measures[0], kept)
