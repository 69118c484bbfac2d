"""BatchNorm over the whole batch, however many processes share it. torch's `SyncBatchNorm` needs GPUs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitrail.world import world


class _Shared(nn.modules.batchnorm._BatchNorm):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training or world().size == 1:
            return super().forward(x)
        others = [dim for dim in range(x.ndim) if dim != 1]
        values = x.float()
        mean = world().average(values.mean(others, keepdim=True))
        variance = world().average((values - mean).square().mean(others, keepdim=True))
        self._track(mean.flatten(), variance.flatten(), world().size * x.numel() // x.shape[1])
        shape = [1, -1] + [1] * (x.ndim - 2)
        scaled = (values - mean) * (variance + self.eps).rsqrt()
        return (scaled * self.weight.view(shape) + self.bias.view(shape)).to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Updates the running statistics, as torch does."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * (count / max(count - 1, 1)), self.momentum)


class BatchNorm1d(_Shared, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over all processes."""


class BatchNorm2d(_Shared, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over all processes."""
