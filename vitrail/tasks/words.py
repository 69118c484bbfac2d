"""What a task has to do with words: nothing, but for images with captions. `Task` inherits these defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from vitrail.config import TokenizerName
from vitrail.errors import UserError
from vitrail.tasks.scores import Floats, Targets

if TYPE_CHECKING:
    from vitrail.models import Model
    from vitrail.tasks.task import Task


class Words:
    """The methods of a task that concern captions, labels in words and texts."""

    several: ClassVar[bool] = False  # an image may have several labels, in rows of their own: captions
    title: ClassVar[str]
    many: ClassVar[str]

    @classmethod
    def from_classes(cls, classes: Sequence[str], targets: Mapping[str, Targets]) -> tuple[Task, dict[str, Targets]]:
        """The task and the targets, by split, of images with one class each, whose names are captions."""
        raise NotImplementedError

    def tokenized(self, captions: Targets, tokenizer: TokenizerName | None, context: int | None) -> Any:
        """The task of captions with the tokenizer for them; no other task has one."""
        for name, given in (("tokenizer", tokenizer), ("context", context)):
            if given is not None:
                raise UserError(f"--{name} applies to captions, but the data has {self.many}. Remove it.")
        return self

    def read_by(self, reader: Any) -> Any:
        """The task with a `pair_scores.Reader` of words; most read none."""
        return self

    def bound(self, model: Model) -> Any:
        """The task with what it needs of a model to compare outputs with targets: the text tower, for captions."""
        return self

    def words(self) -> Any:
        """What embeds texts like the images: a `pair_scores.Reader`."""
        raise UserError(
            f"The model is {self.title} and was not trained with captions, so it cannot read words. Use one that was, "
            "or a CLIP."
        )

    def by_words(
        self,
        outputs: NDArray[np.floating],
        labels: Sequence[str],
        templates: Sequence[str] = ("{}",),
    ) -> tuple[Task, Floats]:
        """The task of choosing between labels, and its outputs, (N, K), from those of the model."""
        self.words()
        raise NotImplementedError

    def classifier(self, model: Model, labels: Sequence[str], templates: Sequence[str] = ("{}",)) -> tuple[Model, Task]:
        """A model that classifies by words: one class for each label, put into the templates."""
        self.words()
        raise NotImplementedError
