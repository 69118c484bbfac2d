"""DETR's set loss (https://arxiv.org/abs/2005.12872): predictions and objects are matched one to one, then compared.

The cost of a match is -p(class) + 5·L1 - 2·GIoU; the Hungarian algorithm finds the cheapest matching of each image.
Matched predictions learn the class and the box of their object, all others "no object", with a weight of 0.1.

Legend: B batch, Q predictions, M objects per image, padded, K classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.tasks.iou import centred, giou, pairs
from vitrail.world import world

L1, GIOU = 5.0, 2.0  # weights, in the cost and in the loss
NO_OBJECT = 0.1  # weight of the class "no object"


@torch.no_grad()
def matching(logits: Tensor, boxes: Tensor, kinds: Tensor, objects: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of matched predictions and of their objects, for one image.

    `logits` are (Q, K + 1); `boxes` (Q, 4) and `objects` (M, 4) are corners as shares of the image.
    """
    from scipy.optimize import linear_sum_assignment

    chance = logits.softmax(dim=-1)[:, kinds]
    far = torch.cdist(centred(boxes), centred(objects), p=1)
    cost = -chance + L1 * far - GIOU * giou(*pairs(boxes, objects))
    rows, columns = linear_sum_assignment(cost.nan_to_num().cpu().numpy())  # the loss of what is not finite is NaN
    return torch.as_tensor(rows, device=boxes.device), torch.as_tensor(columns, device=boxes.device)


def set_loss(outputs: Tensor, size: tuple[int, int], objects: Tensor) -> dict[str, Tensor]:
    """The loss of outputs (B, Q, 4 + K + 1), boxes in pixels and logits, for images of this size.

    `objects` (B, M, 6) are class, corners and whether to ignore; the class of padding is -1.
    """
    shares = outputs.new_tensor([size[1], size[0]] * 2)
    boxes, logits = outputs[..., :4] / shares, outputs[..., 4:]
    none = logits.shape[-1] - 1
    wanted = torch.full(logits.shape[:2], none, device=logits.device)
    found, aims = [], []
    for i, listed in enumerate(objects):
        real = listed[(listed[:, 0] >= 0) & (listed[:, 5] == 0)]
        kinds, truth = real[:, 0].long(), real[:, 1:5] / shares
        rows, columns = matching(logits[i], boxes[i], kinds, truth)
        wanted[i, rows] = kinds[columns]
        found.append(boxes[i, rows])
        aims.append(truth[columns])
    weights = torch.ones(none + 1, device=logits.device)
    weights[none] = NO_OBJECT
    classify = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), weights, reduction="sum")
    classify = classify / world().average(weights[wanted].sum())
    ours, theirs = torch.cat(found), torch.cat(aims)
    count = world().count(torch.tensor(len(ours), device=ours.device))
    place = (centred(ours) - centred(theirs)).abs().sum() / count
    fit = (1 - giou(ours, theirs)).sum() / count
    loss = classify + L1 * place + GIOU * fit + 0 * outputs.sum()  # NaN if any output, matched or not, is not finite
    return {"loss": loss, "loss_class": classify, "loss_box": fit}
