"""vitrail and timm compute the same: their losses from the same weights, which `benchmarks/peers.py` compares first."""

from __future__ import annotations

import sys
from typing import Any

from contestants import TESTS, VITRAIL, Shape, Variant, build, training_steps


def loss_curves(shape: Shape, batch: int = 4, steps: int = 10) -> dict[str, Any]:
    """The losses of vitrail and timm from the same weights, in fp32, and their largest relative difference."""
    import torch

    from vitrail.weights.recognise import formats_of

    sys.path.insert(0, str(TESTS))
    torch.manual_seed(0)
    ours, theirs = build(VITRAIL, shape).train(), build("timm", shape).train()
    with torch.no_grad():
        for p in ours.parameters():  # the head starts at zero, where half of the model has no gradient
            p += 0.02 * torch.randn(p.shape)
    write = formats_of("vit")["timm"].write
    assert write is not None
    theirs.load_state_dict({name: value.clone() for name, value in write(ours.state_dict(), ours.config).items()})
    curves = {}
    for library, model, how in ((VITRAIL, ours, ""), ("timm", theirs, "AdamW")):
        step = training_steps(library, model, shape, batch)(Variant(library, how=how))
        curves[library] = [step() for _ in range(steps)]
    pairs = zip(curves[VITRAIL], curves["timm"], strict=True)
    return curves | {"difference": max(abs(a - b) / abs(b) for a, b in pairs)}
