"""Research: your own data in memory, your own model and your own augmentation.

Cells as in a notebook: they draw rings and discs into an array, train a small network on them with noise as
augmentation, and compare it with vitrail's default ViT on the same images:

    python examples/research.py --images 2000 --epochs 20
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import vitrail

# %% Settings

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--images", type=int, default=2000)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--out", type=Path, default=Path("research"))
args = parser.parse_args()

# %% Data: discs and rings of any place and size, in one array

rng = np.random.default_rng(0)
labels = np.array(["disc", "ring"])[rng.integers(0, 2, args.images)]
y, x = np.mgrid[:24, :24]
centre = rng.uniform(7, 17, (2, args.images, 1, 1))
distance = np.hypot(y - centre[0], x - centre[1])
radius = rng.uniform(4, 7, (args.images, 1, 1))
inside = (distance < radius) & ((distance > 0.6 * radius) | (labels == "disc")[:, None, None])
images = (60 * rng.random(inside.shape) + 150 * inside).astype(np.uint8)
held_out = args.images // 5
train, val = (images[held_out:], labels[held_out:]), (images[:held_out], labels[:held_out])

# %% A model that knows nothing of vitrail


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 5, stride=2, padding=2)
        self.second = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(32, 2)

    def forward(self, images: Tensor) -> Tensor:
        x = self.second(self.first(images).relu()).relu()
        return self.head(x.amax(dim=(2, 3)))


# %% Augmentation of a batch, and a look at every epoch


def noise(images: Tensor) -> Tensor:
    return images + 0.1 * torch.randn_like(images)


# %% Train both, on the same images

how = {"val": val, "epochs": args.epochs, "out": args.out, "overwrite": True, "augment": noise}
torch.manual_seed(0)
runs = {
    "own": vitrail.train(train, model=Small(), img_size=24, lr=3e-3, opt="adamw", name="own", **how),
    "vit": vitrail.train(train, name="vit", **how),
}

# %% Compare

for name, run in runs.items():
    print(f"{name}: top-1 {run.scores['top1']:.1%}, {sum(p.numel() for p in run.model().parameters()):,} parameters")
for answer in runs["own"].predict(images[:3], top=1):
    print(answer.file, answer.labels[0], f"{answer.probabilities[0]:.0%}")
print(vitrail.report(list(runs.values()), out=args.out / "comparison.html"))
