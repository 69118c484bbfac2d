"""The objective of detection: the dense loss of heads with points, the set loss of others."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from vitrail.models import Model
from vitrail.models.heads.boxes import BoxHead
from vitrail.tasks.dense_loss import dense_loss
from vitrail.tasks.objective import Batch, Objective
from vitrail.tasks.set_loss import set_loss


class BoxLoss(Objective):
    """The loss of a model with a box head. Targets are objects (B, M, 6), the class of padding is -1.

    `most` is the largest number of objects of a training image.
    """

    def __init__(self, model: Model, most: int, ema: float = 0.0):
        super().__init__(model, ema)
        self.most = max(most, 1)
        head = model.get_submodule("head")
        assert isinstance(head, BoxHead)
        self.points = head.points

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        size = batch.images.shape[-2], batch.images.shape[-1]
        outputs, *auxiliary = (found.float() for found in self.model.heads(batch.images))
        points, objects = self.points(size), batch.targets[:, : self.most]
        if points is not None:
            return dense_loss(outputs, points, objects)
        if is_fake(outputs):  # where memory is counted, there is nothing to match
            return {"loss": sum((each.mean() for each in auxiliary), outputs.mean())}
        found = set_loss(outputs, size, objects)
        return found | {"loss": found["loss"] + sum(set_loss(each, size, objects)["loss"] for each in auxiliary)}
