"""Processes that are killed, hang or are stopped, and a machine that disappears: the result is the undisturbed one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed.launch import environment, run, torchrun
from safetensors.numpy import load_file

import vitrail
from vitrail.train.checkpoint import checkpoint_path, load_checkpoint

# Not Adam, which turns the rounding errors of gradients that are zero, such as those of key biases, into full steps.
SETTINGS: dict[str, Any] = {
    **{"epochs": 4, "batch_size": 64, "save_minutes": 0.0, "model_ema": 0.9, "shift": 1, "opt": "sgd", "lr": 0.02},
}


@pytest.fixture(scope="module")
def undisturbed(small, tmp_path_factory):
    """The weights of the run in one process."""
    run = vitrail.train("digits", out=tmp_path_factory.mktemp("runs"), **small | SETTINGS)
    return load_file(run / "model.safetensors")


@pytest.fixture
def words(small, tmp_path) -> list[str]:
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in (small | SETTINGS).items()]
    return ["train", "digits", f"--out={tmp_path}", "--name=run", *settings]


def same(run: Path, expected: dict[str, Any]) -> None:
    weights = load_file(run / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=1e-5, err_msg=name)


def until(condition: Callable[[], Any], seconds: float = 240) -> Any:
    """What a condition gives once it is true."""
    for _ in range(int(seconds / 0.02)):
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def step(run: Path) -> int:
    """The step of a run's checkpoint, whose shards may be replaced meanwhile."""
    path = checkpoint_path(run)
    return torch.load(path, weights_only=True)["progress"]["step"] if path.exists() else 0


def children(parent: int) -> list[int]:
    """The processes that a process has started, as Linux lists them."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def workers(agent: int, program: bytes = b"vitrail") -> list[int]:
    """The processes of a program that torchrun has started."""

    def ours(pid: int) -> bool:
        try:
            return program in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False

    return sorted(filter(ours, children(agent)))


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_process_that_works_is_waited_for_and_one_that_hangs_is_replaced(tmp_path):
    command = torchrun(2, str(Path(__file__).parent / "hung.py"), max_restarts=1, monitor_interval=0.1)
    env = environment(VITRAIL_TIMEOUT="4")
    message = "vitrail: Process 0 of this command has not answered for 4 seconds."
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, env=env, stderr=log, stdout=log) as agent:
        until(lambda: message in (tmp_path / "log").read_text())
        os.kill(workers(agent.pid, b"hung.py")[0], signal.SIGKILL)  # as torchrun does after half a minute
        assert agent.wait(120) == 0, (tmp_path / "log").read_text()[-5000:]
    text = (tmp_path / "log").read_text()
    assert text.count(message) == 1
    assert text.count("done") == 2


def whole_or_refused(run: Path, copy: Path) -> None:
    """One process reads the shards that two have written; a checkpoint without one of them, or others, is refused."""
    state = load_checkpoint(run, "cpu")
    assert not [name for name, value in state["model"].items() if value.is_meta or not value.isfinite().all()]
    assert state["optimizer 0"]["state"][0]["momentum_buffer"].any()
    for number, damage in enumerate(
        [
            lambda shard, _: shard.unlink(),
            lambda shard, _: shard.write_bytes(shard.read_bytes()[:-1]),
            lambda shard, _: (shard.unlink(), os.mkfifo(shard)),
            lambda shard, _: shutil.rmtree(shard.parent),
            lambda _, path: torch.save(torch.load(path) | {"shards": "../../run"}, path),
            lambda _, path: torch.save(torch.load(path) | {"model": {"a": torch.empty(2**40, device="meta")}}, path),
        ]
    ):
        shutil.copytree(run, other := copy / str(number))
        path = checkpoint_path(other)
        damage(sorted(path.parent.glob("shards-*/*"))[0], path)
        with pytest.raises(vitrail.UserError, match="is corrupt"):
            load_checkpoint(other, "cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_run_is_killed_hangs_and_is_stopped_and_resumes_on_more_processes(words, undisturbed, tmp_path):
    command = torchrun(2, "-m", "vitrail", *words, "--shard=full", max_restarts=3, monitor_interval=0.1)
    env = environment(VITRAIL_TIMEOUT="15", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="10")  # to save a checkpoint
    known: list[int] = []

    def later() -> list[int]:
        """New processes that have gone on with the run."""
        before = step(tmp_path / "run")
        pids = until(lambda: (new := workers(agent.pid)) != known and len(new) == 2 and new)
        until(lambda: step(tmp_path / "run") >= before + 3)
        return pids

    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, env=env, stderr=log, stdout=log) as agent:
        known = later()
        os.kill(known[1], signal.SIGKILL)
        known = later()
        os.kill(known[0], signal.SIGSTOP)
        until(lambda: known[1] not in workers(agent.pid))  # it has given up the other
        os.kill(known[0], signal.SIGKILL)  # as torchrun does after half a minute
        known = later()
        agent.send_signal(signal.SIGINT)
        agent.wait(60)
    text, before = (tmp_path / "log").read_text(), step(tmp_path / "run")
    assert text.count("Resuming after step") == 2
    assert "exists" not in text
    assert "To resume: vitrail train --resume" in text
    assert 9 <= before < 56
    whole_or_refused(tmp_path / "run", tmp_path / "copy")
    done = run(4, "train", "--resume", str(tmp_path / "run"), "--shard", "full")
    assert done.returncode == 0, done.stderr[-5000:]
    assert f"Resuming after step {before}." in done.stderr
    same(tmp_path / "run", undisturbed)


# Two machines

HOSTS = ("10.213.7.1", "10.213.7.2")


@pytest.fixture
def machines():
    """Two network namespaces with a cable between them."""
    if shutil.which("ip") is None:
        pytest.skip("There is no `ip`: install Debian's package iproute2.")
    names = [f"vitrail{os.getpid()}{side}" for side in "ab"]

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"Network namespaces are not permitted here: {done.stderr.strip()}")

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "va", "netns", names[0], "type", "veth", "peer", "name", "vb", "netns", names[1])
        for name, link, host in zip(names, ("va", "vb"), HOSTS, strict=True):
            ip("-n", name, "address", "add", f"{host}/24", "dev", link)
            for each in (link, "lo"):
                ip("-n", name, "link", "set", each, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_a_machine_that_disappears_is_replaced(machines, words, undisturbed, tmp_path):
    def start(number: int) -> subprocess.Popen[str]:
        options = {
            **{"nnodes": 2, "nproc_per_node": 1, "max_restarts": 3, "monitor_interval": 0.1, "rdzv_backend": "c10d"},
            **{"rdzv_endpoint": f"{HOSTS[0]}:29413", "rdzv_id": tmp_path.name, "local_addr": HOSTS[number]},
            "rdzv_conf": f"is_host={1 - number},keep_alive_interval=1,keep_alive_max_attempt=2,last_call_timeout=1",
        }
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "torch.distributed.run", *flags, "-m", "vitrail", *words]
        # Without the second variable, torchrun tells a new machine the address of a store only once.
        env = environment(GLOO_SOCKET_IFNAME=("va", "vb")[number], TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        where = ["ip", "netns", "exec", machines[number]]
        with (tmp_path / f"log{number}").open("a") as log:
            return subprocess.Popen([*where, *command], env=env, stderr=log, stdout=log, text=True)

    agents = [start(0), start(1)]
    try:
        until(lambda: step(tmp_path / "run") >= 5)
        lost = [*workers(agents[1].pid), agents[1].pid]  # `ip netns exec` becomes the command
        for pid in reversed(lost):
            os.kill(pid, signal.SIGKILL)
        agents[1].wait()
        agents.append(start(1))
        for agent in (agents[0], agents[2]):
            assert agent.wait(300) == 0, (tmp_path / "log0").read_text()[-5000:]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
    text = (tmp_path / "log0").read_text() + (tmp_path / "log1").read_text()
    assert "Resuming after step" in text
    same(tmp_path / "run", undisturbed)
