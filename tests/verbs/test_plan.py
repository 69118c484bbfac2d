"""`vitrail plan` and `vitrail train --plan`."""

from __future__ import annotations

import json
import re

import pytest

import vitrail
from vitrail import UserError
from vitrail.plan import estimate
from vitrail.plan.describe import text
from vitrail.plan.estimate import memory_of
from vitrail.plan.machines import GPUS, machine

SMALL = {"model": "vit_nano4", "img_size": 8, "stem": "patch", "data": 1000, "classes": 10}


def test_a_plan_for_gpus_by_their_peak_rate(vitrail_says):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    code, out, _ = vitrail_says("plan", *words, "--devices", "8xA100", "--price", 2, "--epochs", 3, "--json")
    plan = json.loads(out)
    built = sum(p.numel() for p in vitrail.create("vit_nano4", img_size=8, stem="patch", classes=10).parameters())
    assert (code, plan["parameters"], plan["fits"]) == (0, built, True)
    rate = 8 * 0.4 * 312e12 / plan["operations"]
    assert plan["images_per_second"] == pytest.approx(rate)
    assert plan["epoch_seconds"] == pytest.approx((1000 + 40 / 3) / rate)
    assert plan["price"] == pytest.approx(2 * 8 * 3 * plan["epoch_seconds"] / 3600)
    assert plan["energy_kwh"] == pytest.approx(400 * 8 * 3 * plan["epoch_seconds"] / 3.6e6)
    changes = [row["with"] for row in plan["memory"]]
    assert changes == ["", "--amp off", "--grad-checkpointing", "--shard full", "--lora-rank 8", "--freeze all"]


def test_the_very_run_on_this_machine(vitrail_says, tiny, tmp_path):
    words = [word for name, value in tiny.items() for word in (f"--{name.replace('_', '-')}", value)]
    code, out, _ = vitrail_says("train", "digits", "--plan", "--out", tmp_path, *words)
    assert code == 0
    assert "measured with batches of 64 images" in out
    assert "1,438 images, 1 epochs" in out
    assert not list(tmp_path.iterdir())  # nothing was started


def test_a_step_that_would_take_long_is_not_measured(monkeypatch):
    """Half precision is a hundred times slower than fp32 on a CPU without instructions for it."""
    monkeypatch.setattr(estimate, "_product", lambda _: 1e6)
    assert "a matrix product's speed" in vitrail.plan(**SMALL, device="cpu", amp="fp16").basis


def test_what_to_change_when_it_does_not_fit():
    plan = vitrail.plan(**SMALL, device="T4", batch_size=2**18)
    assert not plan.fits
    page, run = text(plan), plan.variants[0]
    assert "It does not fit into 14.4 GB (90% of 16.0 GB)" in page
    passes = int(re.findall(r"--grad-accum (\d+), the same", page)[0])
    assert 2**18 / passes <= run.batch < 2 * 2**18 / passes
    more = vitrail.plan(**SMALL, device="T4", batch_size=2**18, grad_accum=2 * passes)
    assert more.fits
    assert f"The batch fits with --grad-accum {passes}: fewer" in text(more)
    assert "  --grad-checkpointing\n" in page
    assert plan.variants[0].memory.total > 14.4e9 > next(v for v in plan.variants if "check" in v.change).memory.total


def test_sharding_divides_all_but_the_activations():
    from vitrail.plan.trace import Linear, Trace

    traced = Trace(10, 10, 800, 400, 800, 1600, Linear(0, 10), (Linear(0, 1),), 80, 60, 1.0, False)
    whole, sharded = memory_of(traced, 16, 4), memory_of(traced, 16, 4, shard=True)
    assert whole.total == 800 + 400 + 800 + 1600 + 4 * 10
    assert sharded.total == (800 + 400 + 800 + 1600) / 4 + 2 * 80 + 60 + 4 * 10


def test_machines_are_found_however_they_are_spelled():
    assert machine("a100") is GPUS["A100"]
    assert machine("NVIDIA A100 80GB") is GPUS["A100"]
    assert machine("a100-40gb") is GPUS["A100-40GB"]
    assert machine(devices="8 x h100").count == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "A1000"}, "Did you mean 'A100'"),
        ({"devices": "A100"}, "as in 8xA100"),
        ({"devices": "8xZ80"}, "no GPU 'Z80'"),
        ({"device": "A100", "devices": "8xA100"}, "Remove one of them"),
        ({"device": "T4", "amp": "bf16"}, "Use --amp off or fp16"),
        ({"device": "A100", "shard": "full"}, "several devices"),
        ({"device": "A100", "utilisation": 1.5}, "above 0 and at most 1"),
        ({"data": 0, "device": "A100"}, "at least 1"),
        ({"classes": 10**9, "device": "A100"}, "at most 1,000,000"),
        ({"devices": "8xA100", "batch_size": 4}, "8 devices share each forward pass"),
        ({"data": "digits", "classes": 3, "device": "A100"}, "Remove --classes"),
    ],
)
def test_bad_input(settings, message):
    asked = SMALL | {"classes": None} | settings
    with pytest.raises(UserError, match=message):
        vitrail.plan(**asked)
