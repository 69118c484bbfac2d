"""CPUs that announce AMX without describing its tiles."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vitrail import amx

FLAGS = "processor\t: 0\nflags\t\t: fpu amx_bf16 avx512_bf16 amx_tile amx_int8\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
@pytest.mark.parametrize(("text", "announced"), [(FLAGS, True), (FLAGS.replace("amx_tile", ""), False), ("", False)])
def test_amx_is_a_flag_of_the_cpu(monkeypatch, tmp_path, text, announced):
    monkeypatch.setattr(amx.platform, "machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text(text)
    assert amx._announced(str(tmp_path / "cpuinfo")) == announced
    assert not amx._announced(str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("announced", "described", "chosen", "limit"),
    [
        (True, False, None, "AVX512_CORE_FP16"),
        (True, False, "AVX2", "AVX2"),
        (True, True, None, None),
        (False, False, None, None),
    ],
)
def test_onednn_is_limited_where_amx_is_announced_but_not_described(monkeypatch, announced, described, chosen, limit):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", chosen or "")
    if chosen is None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    monkeypatch.setattr(amx, "_announced", lambda: announced)
    monkeypatch.setattr(amx, "_described", lambda: described)
    amx.avoid_broken_amx()
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == limit


def test_products_in_bf16_do_not_end_the_process(monkeypatch):
    """On machines with such CPUs alone, this can fail: there it does without the limit."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    product = "import vitrail, torch; x = torch.ones(64, 256, dtype=torch.bfloat16); print(float((x @ x.T).sum()))"
    found = subprocess.run([sys.executable, "-c", product], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, f"{64.0 * 64 * 256}\n")
