"""The device and its precision."""

from __future__ import annotations

import pytest

from vitrail.device import choose_precision, has_bf16


def test_cpus_without_bf16_instructions_train_in_fp32():
    if has_bf16():
        pytest.skip("this CPU has bf16 instructions")
    assert choose_precision("cpu") == "off"


def test_bf16_needs_to_be_faster(monkeypatch):
    """With the instructions, the measurement decides."""
    monkeypatch.setattr("vitrail.device.has_bf16", lambda: True)
    for speedup, wanted in [(0.9, "off"), (1.8, "bf16")]:
        monkeypatch.setattr("vitrail.device._bf16_speedup", lambda speedup=speedup: speedup)
        assert choose_precision("cpu") == wanted
