"""Memory of explanations, beyond the model and its batch: `python benchmarks/explain_memory.py`.

ViT-B/16 at 224 pixels, 32 images, each method in its own process; peak resident memory as counted by Linux.
"""

from __future__ import annotations

import multiprocessing
import resource
import time

import torch

from vitrail.explain import attention_distance, attention_maps, relevance, rollout
from vitrail.models import create

METHODS = {
    "forward pass alone": lambda model, images: model(images),
    "rollout": rollout,
    "maps of every head": attention_maps,
    "relevance": lambda model, images: relevance(model, images, 0),
    "attention distance": lambda model, images: attention_distance(model, [images]),
}


def peak() -> float:
    """The peak resident memory of this process, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(name: str) -> None:
    model = create("vit_b16").eval()
    images = torch.randn(32, 3, 224, 224)
    with torch.inference_mode():
        model(images[:1])
    before, start = peak(), time.perf_counter()
    with torch.inference_mode():
        METHODS[name](model, images)
    print(f"{name:<20} {peak() - before:5.2f} GiB  {time.perf_counter() - start:5.1f} s", flush=True)


if __name__ == "__main__":
    for name in METHODS:
        process = multiprocessing.get_context("spawn").Process(target=measure, args=(name,))
        process.start()
        process.join()
