"""The end and the death of processes: what was accepted is answered, and a killed worker comes back."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from served import by_command, in_thread, until

from vitrail.errors import UserError
from vitrail.serve.server import bind


def test_what_was_accepted_is_answered_before_the_end(trained, files):
    content = files[0].read_bytes()
    go, arriving = threading.Event(), threading.Event()

    def slowly():
        yield content[:50]
        arriving.set()
        assert go.wait(20)
        yield content[50:]

    # As long as an image is on its way, the others wait for it.
    with in_thread(trained, max_wait_ms=5_000, max_batch=64, reload=0) as served, ThreadPoolExecutor(8) as pool:
        slow = pool.submit(served.client.post, "/predict", content=slowly())
        assert arriving.wait(20)
        waiting = [pool.submit(served.post, "/predict", content) for _ in range(7)]
        until(lambda: "vitrail_queue_images 8" in served.get("/metrics").text)
        served.server.should_exit = True
        until(lambda: not _accepts(served.address))
        assert not any(future.done() for future in (slow, *waiting))
        go.set()
        assert [future.result(20).status_code for future in (slow, *waiting)] == [200] * 8


def test_a_request_that_is_not_sent_in_time_is_given_up(trained, files):
    def never():
        yield files[0].read_bytes()[:50]
        threading.Event().wait(4)
        yield b""

    with in_thread(trained, timeout=2.5, reload=0) as served:
        answer = served.client.post("/predict", content=never())
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "slow_request")
        assert "vitrail_queue_images 0" in served.get("/metrics").text
        assert served.predict(files[0].read_bytes())["labels"]


def test_a_killed_worker_comes_back_while_the_other_goes_on(exported, files, tmp_path):
    content, log = files[0].read_bytes(), tmp_path / "log"
    with by_command(log, exported, "--workers", 2) as (served, process):
        until(lambda: log.read_text().count("Model digits") == 2)
        end, answers, lost = threading.Event(), [], []

        def ask():
            # A new connection for each request, so that both workers are asked.
            client = httpx.Client(base_url=served.address, timeout=60, headers={"Connection": "close"})
            while not end.is_set():
                try:
                    answers.append(client.post("/predict", content=content).status_code)
                except httpx.TransportError as error:  # noqa: PERF203  # rare
                    lost.append(error)
            client.close()

        clients = [threading.Thread(target=ask) for _ in range(3)]
        for client in clients:
            client.start()
        until(lambda: len(answers) > 20)
        before = workers(process.pid)
        assert not any("libtorch" in Path(f"/proc/{pid}/maps").read_text() for pid in before)  # ONNX needs none
        os.kill(before[0], signal.SIGKILL)
        killed_at = len(answers)
        until(lambda: len(answers) > killed_at + 50)  # the other one goes on
        until(lambda: log.read_text().count("Model digits") == 3)
        until(lambda: len(workers(process.pid)) == 2)
        end.set()
        for client in clients:
            client.join()
        assert set(answers) == {200}
        assert len(lost) <= len(clients)  # at most what the killed one had taken
        assert before[1] in workers(process.pid)
        assert before[0] not in workers(process.pid)
        counted = served.get("/metrics").text
        line = next(line for line in counted.splitlines() if 'route="/predict",status="200"' in line)
        assert float(line.split()[-1]) >= len(answers) - 1  # also those of the killed one
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert workers(process.pid) == []


def workers(parent: int) -> list[int]:
    """The worker processes of a supervisor."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_child = int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == parent
            if is_child and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # noqa: PERF203  # it has just ended
            continue
    return sorted(found)


def _accepts(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_port_in_use_is_a_user_error():
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(UserError, match="already in use"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_missing_models_are_reported_before_anything_starts(vitrail_says, tmp_path):
    code, _, err = vitrail_says("serve", tmp_path / "nothing", "--port", "0")
    assert (code, "is neither a run folder nor a weights file" in err) == (2, True)
