"""The built-in sets are found in the files of their authors, and what is missing or broken is named."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from vitrail.data import builtin, open_data
from vitrail.errors import UserError


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch, tmp_path):
    """Neither the machine's own data sets nor its settings are seen, and nothing is fetched from afar."""
    monkeypatch.delenv("VITRAIL_DATA", raising=False)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    for name, release in builtin._RELEASES.items():
        monkeypatch.setitem(builtin._RELEASES, name, release._replace(address="http://127.0.0.1:9/"))
    monkeypatch.setattr(builtin, "_DEBIAN_FASHION", tmp_path / "debian")


def pixels(n: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, (n, *shape), dtype=np.uint8)


def test_digits_fill_the_range_of_bytes():
    data = open_data("digits", val_fraction=0.1, seed=5)
    assert (data.name, data.size, data.channels) == ("digits", (8, 8), 1)
    assert data.classes == tuple("0123456789")
    assert {split: len(found) for split, found in data.splits.items()} == {"train": 1618, "val": 179}
    assert data.splits["train"].image(0).shape == (8, 8, 1)
    assert (data.splits["train"].pixels.min(), data.splits["train"].pixels.max()) == (0, 255)
    assert data.splits["val"].name(17) == "digits/val/17"


# MNIST and Fashion-MNIST


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


def put_idx(folder: Path, zipped: bool = False, dots: bool = False, train: int = 20) -> dict[str, np.ndarray]:
    arrays = {
        "train-images-idx3-ubyte": pixels(train, 28, 28),
        "train-labels-idx1-ubyte": (np.arange(train) % 10).astype(np.uint8),
        "t10k-images-idx3-ubyte": pixels(10, 28, 28),
        "t10k-labels-idx1-ubyte": np.arange(10, dtype=np.uint8),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        path = folder / (name.replace("-idx", ".idx") if dots else name)
        if zipped:
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            path.write_bytes(idx(array))
    return arrays


@pytest.mark.parametrize("dots", [False, True])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_sets_are_read_from_the_files_of_their_release(tmp_path, monkeypatch, name, named, zipped, dots):
    arrays = put_idx(tmp_path / name if named else tmp_path, zipped, dots)
    data = open_data(name, data_dir=str(tmp_path))
    first, last = ("0", "9") if name == "mnist" else ("T-shirt/top", "Ankle boot")
    assert (data.classes[0], data.classes[9], len(data.classes)) == (first, last, 10)
    assert (data.name, data.size, data.channels) == (name, (28, 28), 1)
    assert np.array_equal(data.splits["train"].pixels[..., 0], arrays["train-images-idx3-ubyte"])
    assert data.splits["train"].targets.tolist() == arrays["train-labels-idx1-ubyte"].tolist()
    assert np.array_equal(data.splits["test"].pixels[..., 0], arrays["t10k-images-idx3-ubyte"])
    assert data.splits["val"] is data.splits["test"]
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path))
    assert len(open_data(name).splits["train"]) == 20


def test_of_two_sets_with_the_same_file_names_the_folder_of_the_name_is_taken(tmp_path):
    put_idx(tmp_path, train=30)
    put_idx(tmp_path / "mnist", train=20)
    assert len(open_data("mnist", data_dir=str(tmp_path)).splits["train"]) == 20


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0",
        b"\0\0\x08\x03\0\0",
        idx(pixels(20, 28, 28))[:-1],
        idx(pixels(19, 28, 28)),
        b"\0\0\x0d\x01" + bytes(9),
    ],
)
def test_a_corrupt_idx_file_is_a_user_error(tmp_path, content):
    put_idx(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(UserError):
        open_data("fashion-mnist", data_dir=str(tmp_path))


def test_a_cut_idx_archive_is_a_user_error_that_names_it(tmp_path):
    put_idx(tmp_path, zipped=True)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz is not a complete idx file"):
        open_data("mnist", data_dir=str(tmp_path))


# CIFAR

KINDS = {
    "cifar10": (
        "cifar-10-binary.tar.gz",
        "cifar-10-batches-bin",
        "batches.meta.txt",
        [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"],
    ),
    "cifar100": ("cifar-100-binary.tar.gz", "cifar-100-binary", "fine_label_names.txt", ["train.bin", "test.bin"]),
}
NAMES = ["airplane", "aquarium_fish", "bird"]


def cifar(name: str) -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    """The files of a small release with three classes, all its images, six to a file, and their classes."""
    _, _, names, batches = KINDS[name]
    images = pixels(6 * len(batches), 32, 32, 3)
    fine = (np.arange(len(images)) % 3).astype(np.uint8)
    labels = fine[:, None] if name == "cifar10" else np.stack([np.full_like(fine, 77), fine], axis=1)
    records = np.concatenate([labels, images.transpose(0, 3, 1, 2).reshape(len(images), -1)], axis=1)
    files = {batch: records[6 * i : 6 * (i + 1)].tobytes() for i, batch in enumerate(batches)}
    return {names: ("\n".join(NAMES) + "\n\n").encode(), "readme.html": b"<html>", **files}, images, fine


def put_cifar(place: Path, name: str, files: dict[str, bytes], packed: bool) -> Path:
    archive, folder, _, _ = KINDS[name]
    place.mkdir(parents=True, exist_ok=True)
    if not packed:
        (place / folder).mkdir()
        for file, content in files.items():
            (place / folder / file).write_bytes(content)
        return place / folder
    with tarfile.open(place / archive, "w:gz") as tar:
        inside = tarfile.TarInfo(folder)
        inside.type = tarfile.DIRTYPE
        tar.addfile(inside)
        for file, content in reversed(files.items()):
            member = tarfile.TarInfo(f"{folder}/{file}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return place / archive


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_cifar_is_read_from_the_archive_or_the_folder_in_it(tmp_path, monkeypatch, name, named, packed):
    files, images, labels = cifar(name)
    put_cifar(tmp_path / name if named else tmp_path, name, files, packed)
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path))
    data = open_data(name)
    assert (data.name, data.classes, data.size, data.channels) == (name, tuple(NAMES), (32, 32), 3)
    train, test = data.splits["train"], data.splits["test"]
    assert np.array_equal(np.concatenate([train.pixels, test.pixels]), images)
    assert [*train.targets, *test.targets] == labels.tolist()
    assert len(test) == 6


@pytest.mark.parametrize("name", KINDS)
def test_the_pickled_version_of_cifar_is_refused(tmp_path, name):
    archive = KINDS[name][0]
    pickled = tmp_path / archive.replace("binary", "python")
    pickled.write_bytes(b"anything")
    with pytest.raises(UserError, match=f"could run code. Download the binary version, {archive}") as error:
        open_data(name, data_dir=str(tmp_path))
    assert str(pickled) in str(error.value)
    put_cifar(tmp_path, name, cifar(name)[0], packed=True)
    assert open_data(name, data_dir=str(tmp_path)).classes == tuple(NAMES)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_a_cifar_without_one_of_its_files_names_it(tmp_path, name, packed):
    files = cifar(name)[0]
    gone = KINDS[name][3][-1]
    del files[gone]
    put_cifar(tmp_path, name, files, packed)
    with pytest.raises(UserError, match=gone):
        open_data(name, data_dir=str(tmp_path))


def test_a_broken_cifar_is_a_user_error(tmp_path):
    files = cifar("cifar10")[0]
    path = put_cifar(tmp_path, "cifar10", files, packed=True)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"words"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"cifar-10-binary\.tar\.gz (is not complete cifar10|cannot be read)"):
            open_data("cifar10", data_dir=str(tmp_path))
    path.unlink()
    put_cifar(tmp_path, "cifar10", files | {"test_batch.bin": files["test_batch.bin"][:-1]}, packed=False)
    with pytest.raises(UserError, match=r"cifar-10-batches-bin (is not complete cifar10|cannot be read)"):
        open_data("cifar10", data_dir=str(tmp_path))


# What is not there


@pytest.mark.parametrize(
    ("name", "file", "source"),
    [
        ("mnist", "t10k-labels-idx1-ubyte", ""),
        ("fashion-mnist", "t10k-labels-idx1-ubyte", "apt install dataset-fashion-mnist"),
        ("cifar10", "cifar-10-binary.tar.gz or the folder cifar-10-batches-bin", "www.cs.toronto.edu"),
        ("cifar100", "cifar-100-binary.tar.gz or the folder cifar-100-binary", "www.cs.toronto.edu"),
    ],
)
def test_a_missing_set_says_what_it_needs_and_where_it_was_looked_for(tmp_path, monkeypatch, name, file, source):
    with pytest.raises(UserError, match="--data-dir or \\$VITRAIL_DATA") as error:
        open_data(name)
    assert f"{tmp_path / 'env'}" not in str(error.value)
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "env"))
    with pytest.raises(UserError) as error:
        open_data(name, data_dir=str(tmp_path / "given"))
    places = [str(tmp_path / given / below) for given in ("given", "env") for below in (".", name)]
    for needed in (file, source, *places):
        assert needed in str(error.value)


def test_fashion_mnist_is_found_where_debian_puts_it(tmp_path):
    put_idx(tmp_path / "debian")
    assert len(open_data("fashion-mnist").splits["train"]) == 20
    with pytest.raises(UserError, match="mnist needs the four files"):
        open_data("mnist")


# What is downloaded


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A folder that is served over HTTP in the authors' place; its files' checksums are made known as published."""
    root = tmp_path / "server"
    root.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args, **settings):
            super().__init__(*args, directory=str(root), **settings)

        def do_GET(self):
            path = root / self.path[1:]
            if not path.name.startswith("broken-"):
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"ten bytes.")
            return None

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{httpd.server_port}/"

        def publish(name: str, files: dict[str, str] | None = None) -> Path:
            sums = files or {file.name: hashlib.md5(file.read_bytes()).hexdigest() for file in sorted(root.iterdir())}
            if name != "cifar10":
                sums = {f"{file}.gz": sums[f"{file}.gz"] for file in builtin._IDX_FILES}
            monkeypatch.setitem(builtin._RELEASES, name, builtin._Release(address, sums))
            return root

        yield root, publish
        httpd.shutdown()


def test_a_set_is_downloaded_once_to_the_cache(tmp_path, server, caplog):
    root, publish = server
    arrays = put_idx(root, zipped=True)
    publish("mnist")
    with caplog.at_level("INFO", "vitrail"):
        data = open_data("mnist")
    assert np.array_equal(data.splits["train"].pixels[..., 0], arrays["train-images-idx3-ubyte"])
    assert data.splits["test"].targets.tolist() == arrays["t10k-labels-idx1-ubyte"].tolist()
    folder = tmp_path / "cache" / "datasets" / "mnist"
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.gz" for name in builtin._IDX_FILES)
    assert caplog.text.count("Downloading") == 4
    for path in root.iterdir():
        path.unlink()
    assert len(open_data("mnist").splits["train"]) == 20  # it lies in the cache now


def test_a_set_is_downloaded_to_the_folder_that_is_given(tmp_path, monkeypatch, server):
    root, publish = server
    put_cifar(root, "cifar10", cifar("cifar10")[0], packed=True)
    publish("cifar10")
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path / "env"))
    assert open_data("cifar10").classes == tuple(NAMES)
    assert (tmp_path / "env" / "cifar10" / "cifar-10-binary.tar.gz").exists()
    (tmp_path / "env" / "cifar10" / "cifar-10-binary.tar.gz").unlink()
    open_data("cifar10", data_dir=str(tmp_path / "given"))
    assert (tmp_path / "given" / "cifar10" / "cifar-10-binary.tar.gz").exists()
    assert not (tmp_path / "env" / "cifar10" / "cifar-10-binary.tar.gz").exists()


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("cifar-10-binary.tar.gz", f"its MD5 sum must be {'0' * 32}, but it is "),
        ("broken-cifar.tar.gz", "was cut off after 10 of 1,000 bytes"),
        ("absent.tar.gz", "the server returned 404"),
    ],
)
def test_what_is_not_whole_or_not_as_published_never_gets_its_name(tmp_path, server, file, reason):
    root, publish = server
    put_cifar(root, "cifar10", cifar("cifar10")[0], packed=True)
    publish("cifar10", {file: "0" * 32})
    with pytest.raises(UserError, match=reason) as error:
        open_data("cifar10", data_dir=str(tmp_path / "given"))
    assert "Set --data-dir" in str(error.value)
    assert list((tmp_path / "given").rglob("*.gz*")) == []


def test_a_folder_that_cannot_be_written_to_is_a_user_error(tmp_path, server):
    root, publish = server
    put_cifar(root, "cifar10", cifar("cifar10")[0], packed=True)
    publish("cifar10")
    (tmp_path / "given").write_text("a file")
    with pytest.raises(UserError, match=r"could not be downloaded to .*given.*: not a directory"):
        open_data("cifar10", data_dir=str(tmp_path / "given"))


def test_every_downloaded_set_publishes_the_files_that_are_read():
    for name in ("mnist", "fashion-mnist"):
        assert list(builtin._RELEASES[name].files) == [f"{file}.gz" for file in builtin._IDX_FILES]
    for kind in (builtin._CIFAR10, builtin._CIFAR100):
        assert list(builtin._RELEASES[kind.name].files) == [kind.binary[0]]
