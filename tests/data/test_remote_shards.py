"""Shards at addresses: the same images in the same order as on disk, whatever the server does, in bounded space."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import fsspec  # noqa: F401  # its registry
import numpy as np
import pytest

import vitrail
from vitrail.data import open_data
from vitrail.data.download import cache_folder
from vitrail.data.identity import identity
from vitrail.data.loader import TrainBatches
from vitrail.data.preprocess import Preprocess
from vitrail.data.shards import cache, fetch, split
from vitrail.errors import UserError

pytestmark = pytest.mark.usefixtures("plain_runs")

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "streaming.py"
IMAGES, SHARDS = 960, 48


def program() -> Any:
    spec = importlib.util.spec_from_file_location("streaming", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules["streaming"] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def streaming() -> Any:
    return program()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "_LONGEST_PAUSE", 0.01)


@pytest.fixture(scope="session")
def written(tmp_path_factory, streaming) -> Path:
    """960 images in 48 shards of train, and some of val; each has its number in its first pixel."""
    return streaming.write(tmp_path_factory.mktemp("written"), streaming.Soak(IMAGES, SHARDS))


@pytest.fixture
def server(written, streaming) -> Iterator[Any]:
    """The address of the shards, and the class of the server's answers."""

    class Handler(streaming.Flaky):
        folder, soak = written, streaming.Soak(fail=0, stall=0, patience=0.3)
        counts = dict.fromkeys(streaming.Flaky.counts, 0)
        asked: ClassVar[list[str]] = []

        def do_GET(self) -> None:
            self.asked.append(self.path[1:])
            super().do_GET()

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    Handler.address = f"http://127.0.0.1:{httpd.server_port}"
    yield Handler
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def batches(source, epoch: int = 1, start: int = 0, share: slice = slice(None), **how) -> list[list[int]]:
    """The numbers in the pixels of each batch."""
    loader = TrainBatches(open_data(source, **how).splits["train"], Preprocess((16, 16), 3), 40, seed=5)
    read = loader.read(epoch, [batch[share] for batch in loader.numbers(epoch, start)])
    corners = [pixels[:, :, 0, 0].numpy().astype(int) for pixels, _ in read]
    return [((corner[:, 0] << 16) + (corner[:, 1] << 8) + corner[:, 2]).tolist() for corner in corners]


def held() -> list[Path]:
    return [path for path in (cache_folder() / "remote").iterdir() if "-" in path.name]


def gib(written: Path, shards: float) -> float:
    return shards * max(path.stat().st_size for path in written.glob("*.tar")) / 2**30


# The same data


def test_an_address_gives_the_images_and_the_order_of_the_disk(written, server):
    local, remote = open_data(written), open_data(f"{server.address}/")
    assert (remote.classes, remote.size, remote.channels) == (local.classes, local.size, local.channels)
    assert identity(remote) == identity(local)
    whole = batches(written)
    assert sorted(chain(*whole)) == list(range(IMAGES))
    assert batches(server.address) == whole
    assert batches(server.address, start=5) == whole[5:]
    assert batches(server.address, epoch=2) != whole


def test_processes_share_every_batch_without_overlap(server):
    whole, halves = batches(server.address), (batches(server.address, share=slice(k, None, 2)) for k in (0, 1))
    for one, *parts in zip(whole, *halves, strict=True):
        assert sorted(chain(*parts)) == sorted(one)


def test_an_epoch_needs_few_shards_at_a_time(written):
    train = open_data(written).splits["train"]
    loader = TrainBatches(train, Preprocess((16, 16), 3), 40, seed=5)
    shards = [train.store.shard_numbers(train.rows[batch]) for batch in loader.numbers(0)]
    first, last = {}, {}
    for k, batch in enumerate(shards):
        for shard in batch.tolist():
            first.setdefault(shard, k)
            last[shard] = k
    at_a_time = max(sum(first[shard] <= k <= last[shard] for shard in first) for k in range(len(shards)))
    assert split.WINDOW / 2 < at_a_time <= split.WINDOW + 1 + 2  # 2 shards a batch


def test_machines_that_share_batches_need_different_shards(streaming):
    assert streaming.traffic(1, 300, 50, 500) == 1
    assert streaming.traffic(4, 300, 50, 500) < 1.5  # each its quarter, and the shards on the border


def test_balanced_sampling_keeps_to_the_window(server):
    train = open_data(server.address).splits["train"]
    loader = TrainBatches(train, Preprocess((16, 16), 3), 40, seed=5, balanced=True)
    numbers = np.concatenate(loader.numbers(0))
    assert np.bincount(train.targets[numbers % len(train)]).tolist() == [480, 480]
    arrival = train.store.shard_numbers(train.rows[numbers[:200] % len(train)])
    assert len(np.unique(arrival)) < SHARDS


def test_shards_of_others_are_indexed_once(server):
    pattern = f"{server.address}/train-{{00000..00003}}.tar"
    data = open_data(pattern)
    assert {name: len(part) for name, part in data.splits.items()} == {"train": 64, "val": 16}
    asked = len(server.asked)
    assert open_data(pattern).fingerprint() == data.fingerprint()
    assert len(server.asked) == asked + 4  # only their sizes
    with pytest.raises(UserError, match="addresses have no"):
        open_data(f"{server.address}/train-*.tar")


def test_a_run_trains_and_is_evaluated_at_an_address(server, tmp_path, tiny):
    run = vitrail.train(server.address, out=tmp_path, name="run", **tiny)
    assert run.config.data == server.address
    assert vitrail.evaluate(run).to_json()["images"] == 20


# The cache


def test_the_cache_is_bounded_and_the_least_recently_used_shard_goes_first(written, server):
    limit = gib(written, split.HELD + 0.5)
    whole = batches(server.address, cache_gb=limit)
    assert sorted(chain(*whole)) == list(range(IMAGES))
    assert sum(path.stat().st_size for path in held()) <= limit * 2**30
    one = max(written.glob("train-*.tar"))
    files = [
        cache.RemoteFile(f"{server.address}/{one.name}", one.stat().st_size, str(i), limit=3.5 * one.stat().st_size)
        for i in range(4)
    ]
    shutil.rmtree(cache_folder() / "remote")
    for i, file in enumerate(files[:3]):
        file.open().close()
        os.utime(file.path, (i, i))
    files[0].open().close()
    files[3].open().close()
    assert [file.path.exists() for file in files] == [True, False, True, True]


def test_a_removed_shard_stays_open_and_is_downloaded_again(written, server):
    one = max(written.glob("train-*.tar"))
    file = cache.RemoteFile(f"{server.address}/{one.name}", one.stat().st_size, "v")
    with file.open() as stream:
        file.path.unlink()
        assert stream.read() == one.read_bytes()
    with file.open() as stream:
        assert stream.read() == one.read_bytes()
    assert server.asked.count(one.name) == 2


def test_threads_that_need_the_same_shard_download_it_once(written, server):
    one = max(written.glob("train-*.tar"))
    file = cache.RemoteFile(f"{server.address}/{one.name}", one.stat().st_size, "v")
    threads = [threading.Thread(target=file.download) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.asked == [one.name]


def test_abandoned_downloads_are_removed(written, server):
    one = max(written.glob("train-*.tar"))
    file = cache.RemoteFile(f"{server.address}/{one.name}", one.stat().st_size, "v")
    file.path.parent.mkdir(parents=True)
    left = file.path.with_name(f".{'0' * 32}-99.1.tmp")
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    file.download()
    assert held() == [file.path]


def test_a_cache_that_is_too_small_is_refused(written, server):
    with pytest.raises(UserError, match=r"--cache-gb must hold 36 shards of .* Raise it"):
        open_data(server.address, cache_gb=gib(written, 5))


# What servers do


@pytest.mark.parametrize("kind", ["failed", "cut", "stalled"])
def test_failed_cut_and_stalled_requests_are_repeated(written, server, streaming, monkeypatch, kind):
    monkeypatch.setattr(fetch, "SECONDS", 0.2)
    shares = {"failed": (1.0, 0.0), "cut": (1.0, 0.0), "stalled": (0.0, 1.0)}[kind]
    draws = iter([{"failed": 0.1, "cut": 0.9, "stalled": 0.5}[kind]] * 2)
    server.soak = streaming.Soak(fail=shares[0], stall=shares[1], patience=0.3)
    server.chance = type("Chance", (), {"random": lambda _: next(draws, 3.0)})()
    one = max(written.glob("train-*.tar"))
    file = cache.RemoteFile(f"{server.address}/{one.name}", one.stat().st_size, "v")
    with file.open() as stream:
        assert stream.read() == one.read_bytes()
    assert server.counts["requests"] == 3
    assert server.counts[kind] == 2


def test_what_stays_wrong_is_an_error_in_a_sentence(written, server, streaming, monkeypatch):
    monkeypatch.setattr(fetch, "TRIES", 3)
    one = max(written.glob("train-*.tar"))
    address, size = f"{server.address}/{one.name}", one.stat().st_size
    with pytest.raises(UserError, match=r"could not be read in 3 tries: its SHA-256 checksum is"):
        cache.RemoteFile(address, size, "v", "0" * 64).open()
    with pytest.raises(UserError, match=r"could not be read in 3 tries: it has .* bytes instead of"):
        cache.RemoteFile(address, size + 1, "v").open()
    with pytest.raises(UserError, match="it has more than 1,000 bytes"):
        cache.RemoteFile(address, 1000, "v").open()
    with pytest.raises(UserError, match=r"nowhere/shards\.json cannot be read: there is no such file"):
        open_data(f"{server.address}/nowhere")
    assert held() == []
    server.soak = streaming.Soak(fail=2.0)  # every request
    with pytest.raises(UserError, match=r"shards\.json could not be read in 4 tries: the server answered 503"):
        open_data(server.address)
    with pytest.raises(UserError, match=r"could not be read in 4 tries"):
        open_data("http://127.0.0.1:9/out")


@pytest.mark.parametrize(
    ("address", "package"), [("http://x/y", "aiohttp"), ("s3://x/y", "s3fs"), ("gs://x/y", "gcsfs")]
)
def test_a_missing_package_is_named(monkeypatch, address, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, address.partition(":")[0], raising=False)
    with pytest.raises(UserError, match=rf"needs fsspec and {package}: pip install 'vitrail\[cloud\]'"):
        open_data(address)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_buckets_are_read_by_their_own_clients(written, server, monkeypatch, scheme):
    """The real clients, which are sent to a server of the test."""
    pytest.importorskip({"s3": "s3fs", "gs": "gcsfs"}[scheme])
    real = server.do_GET

    def bucket(self) -> None:
        self.path = "/" + self.path.partition("?")[0].replace("%2F", "/").rpartition("/")[2]
        real(self)

    monkeypatch.setattr(server, "do_GET", bucket)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.address)
    assert batches(f"{scheme}://bucket/shards") == batches(written)


# Manifests are hostile too


HOSTILE = {
    "a path": (lambda m: m["splits"]["train"]["shards"][0].update(file="../../etc/passwd.tar"), "in the folder of"),
    "an address": (lambda m: m["splits"]["train"]["shards"][0].update(file="http://x/y.tar"), "in the folder of"),
    "a hidden file": (lambda m: m["splits"]["train"]["index"].update(file=".x.npy"), "in the folder of"),
    "a negative size": (lambda m: m["splits"]["train"]["shards"][0].update(bytes=-1), "'bytes' must be"),
    "a huge count": (lambda m: m["splits"]["train"]["shards"][0].update(images=10**30), "'images' must be"),
    "another count": (lambda m: m["splits"]["train"]["index"].update(images=7), "its index has 7"),
    "another size": (lambda m: m["splits"]["train"]["shards"][0].update(bytes=7), "must have 7 bytes"),
    "no checksum": (lambda m: m["splits"]["train"]["shards"][0].update(sha256="x"), "64 hexadecimal"),
    "another index": (lambda m: m["splits"]["train"]["index"].update(sha256="0" * 64), "is damaged"),
    "a split": (lambda m: m["splits"].update(other=m["splits"]["val"]), "train, val or test"),
    "a file twice": (lambda m: m["splits"].update(test=m["splits"]["val"]), "files of its own"),
    "a task": (lambda m: m.update(task="mae"), "cannot have the task"),
    "other targets": (lambda m: m.update(task="boxes"), "targets are not those"),
    "no task": (lambda m: m.update(task=["x"]), "'task' must be one of"),
    "few classes": (lambda m: m.update(classes=["a"]), "targets are not those"),
    "no classes": (lambda m: m.update(classes=[1]), "list of names"),
    "bits": (lambda m: m.update(bits=9), "8, 16 or 32"),
    "another format": (lambda m: m.update(format="x"), "its format is not"),
    "no splits": (lambda m: m.update(splits=[]), "object with fields"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(written, tmp_path, name):
    folder = Path(shutil.copytree(written, tmp_path / "copy"))
    change, message = HOSTILE[name]
    manifest = json.loads((folder / "shards.json").read_text())
    change(manifest)
    (folder / "shards.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=message):
        open_data(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("offset", -1, "outside its shard"), ("size", 2**62, "outside its shard"), ("target", 2, "targets are not those")],
)
def test_a_hostile_index_is_refused(written, tmp_path, field, value, message):
    folder = Path(shutil.copytree(written, tmp_path / "copy"))
    rows = np.load(folder / "train.index.npy")
    rows[17][field] = value
    np.save(folder / "train.index.npy", rows)
    manifest = json.loads((folder / "shards.json").read_text())
    manifest["splits"]["train"]["index"]["sha256"] = fetch.file_sha256(folder / "train.index.npy")
    (folder / "shards.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=message):
        open_data(folder)


# All together


def test_each_image_is_read_once_by_processes_that_are_killed(streaming, tmp_path):
    soak = streaming.Soak(2000, 50, 100, kills=1, fail=0.1, stall=0.03, patience=0.5, shards_held=37)
    figures = streaming.measure(soak, tmp_path)
    assert figures["cache peak MB"] <= figures["cache limit MB"] < figures["set MB"]
    assert figures["server"]["failed"] + figures["server"]["cut"] > 0
