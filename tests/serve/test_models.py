"""New versions are swapped in while requests are answered, and none is lost."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch
from served import in_thread, until

import vitrail
from vitrail.weights import open_run, save


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run, to be overwritten."""
    return shutil.copytree(trained, tmp_path / "run")


class Clients:
    """Some clients that ask again and again, and keep every answer."""

    def __init__(self, served, content, count=4):
        self._served, self._content, self.answers, self._end = served, content, [], threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _ask(self):
        while not self._end.is_set():
            self.answers.append(self._served.post("/predict", self._content))


def test_a_new_version_is_swapped_in_without_losing_a_request(run, files):
    content = files[0].read_bytes()

    def labels():
        (answer,) = vitrail.Predictor(run)(content)
        return list(answer.labels)

    expected = [labels()]
    with in_thread(f"m={run}", reload=0.05) as served:
        versions = [served.get("/model").json()["version"]]
        with Clients(served, content) as clients:
            until(lambda: len(clients.answers) > 20)
            model, card = open_run(run)
            with torch.no_grad():
                model.head.weight.neg_()
            save(run / "model.safetensors", model, card)
            expected.append(labels())
            until(lambda: served.get("/model").json()["version"] != versions[0])
            versions.append(served.get("/model").json()["version"])
            after = len(clients.answers)
            until(lambda: len(clients.answers) > after + 20)
        assert expected[0] != expected[1]
        for answer in clients.answers:
            assert answer.status_code == 200
            found = answer.json()
            assert found["predictions"][0]["labels"] == expected[versions.index(found["version"])]
        assert {answer.json()["version"] for answer in clients.answers} == set(versions)
        assert 'vitrail_reloads_total{model="m",result="swapped"} 1' in served.get("/metrics").text


def test_a_damaged_new_version_is_refused_and_the_old_one_stays(run, files):
    with in_thread(f"m={run}", reload=0.05) as served:
        version = served.get("/model").json()["version"]
        good = (run / "model.safetensors").read_bytes()
        (run / "model.safetensors").write_bytes(good[:1000])
        until(lambda: 'result="failed"} 1' in served.get("/metrics").text)
        assert served.get("/model").json()["version"] == version
        assert served.predict(files[0].read_bytes())["labels"]
        (run / "model.safetensors").write_bytes(good)  # repaired
        until(lambda: 'result="swapped"} 1' in served.get("/metrics").text)
        assert served.get("/model").json()["version"] == version
