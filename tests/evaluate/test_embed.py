"""Feature vectors of files: those of the model, in the order of the files, in both kinds of file."""

from __future__ import annotations

import os
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch

import vitrail
from vitrail.data.images import read_image
from vitrail.errors import UserError
from vitrail.evaluate import embed as module
from vitrail.evaluate.embed import Embedding, write
from vitrail.verbs.embed import embed
from vitrail.weights import open_run


@pytest.fixture(scope="module")
def files(digits: Path) -> list[Path]:
    return sorted((digits / "5").iterdir())[:7]


def vectors(count: int, width: int = 3) -> Iterator[Embedding]:
    for i in range(count):
        yield Embedding(f"{i}.png", np.full(width, i, np.float32))


def read(path: Path) -> tuple[list[str], np.ndarray]:
    """Names and vectors, as others would read them."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            assert sorted(arrays) == ["features", "files"]
            return arrays["files"].tolist(), arrays["features"]
    table = pyarrow.parquet.read_table(path)
    return table["file"].to_pylist(), np.stack(table["features"].to_numpy())


def test_vectors_are_what_the_head_of_the_model_reads(trained: Path, files: list[Path]):
    model, card = open_run(trained)
    found = list(vitrail.embed(trained, files, batch_size=3))
    assert [Path(e.file) for e in found] == files
    with torch.no_grad():
        expected = model.embed(torch.stack([card.preprocess(read_image(file, 1)) for file in files])).numpy()
    assert np.stack([e.features for e in found]) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert found[0].features.dtype == np.float32
    assert all(e.error is None for e in found)


@pytest.mark.parametrize("name", ["f.npz", "f.parquet"])
def test_files_hold_names_and_vectors_of_what_could_be_read(
    trained: Path, files: list[Path], tmp_path: Path, name: str
):
    (tmp_path / "bad.png").write_bytes(b"")
    given = [*files[:2], tmp_path / "bad.png", *files[2:]]
    written = write(embed(trained, given, batch_size=2), tmp_path / name)
    names, features = read(tmp_path / name)
    assert names == [str(file) for file in files]
    # Not bit for bit: the bad file changes which images share a batch.
    expected = np.stack([e.features for e in embed(trained, files, batch_size=2)])
    np.testing.assert_allclose(features, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    assert (written.images, written.width) == features.shape
    assert written.unreadable == ((str(tmp_path / "bad.png"), "empty file"),)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.png", name]  # nothing is left over


@pytest.mark.parametrize("name", ["f.npz", "f.parquet"])
def test_many_vectors_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(module, "_ROWS", 4)
    write(vectors(11), tmp_path / name)
    names, features = read(tmp_path / name)
    assert names == [f"{i}.png" for i in range(11)]
    assert features.tolist() == [[i, i, i] for i in range(11)]
    if name == "f.parquet":
        facts = pyarrow.parquet.ParquetFile(tmp_path / name).metadata
        assert [facts.row_group(i).num_rows for i in range(facts.num_row_groups)] == [4, 4, 3]


def test_arrays_larger_than_the_memory_they_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_ROWS", 16)
    tracemalloc.start()
    write(vectors(512, width=8192), tmp_path / "f.npz")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "f.npz").stat().st_size > 2**24 > 4 * peak


@pytest.mark.skipif(sys.platform != "linux", reason="file names are any bytes on Linux only")
@pytest.mark.parametrize("name", ["f.npz", "f.parquet"])
def test_a_file_name_that_is_no_text(tmp_path: Path, name: str):
    odd = os.fsdecode(b"caf\xe9.png")
    write([Embedding(odd, np.zeros(2, np.float32))], tmp_path / name)
    assert read(tmp_path / name)[0] == [odd if name == "f.npz" else "caf\\udce9.png"]


def test_an_older_file_stays_if_the_new_one_does_not_come_about(trained: Path, tmp_path: Path):
    path = tmp_path / "f.npz"
    write(vectors(2), path)

    def broken() -> Iterator[Embedding]:
        yield from vectors(3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(broken(), path)
    (tmp_path / "bad.png").write_bytes(b"")
    with pytest.raises(UserError, match=r"No image could be read, so .* was not written: .*bad.png \(empty file\)"):
        write(embed(trained, [tmp_path / "bad.png"]), path)
    assert read(path)[0] == ["0.png", "1.png"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.png", "f.npz"]


def test_wrong_inputs_are_one_sentence(trained: Path, files: list[Path], tmp_path: Path):
    with pytest.raises(UserError, match="Give image files, folders or globs"):
        embed(trained, [])
    with pytest.raises(UserError, match="does not exist"):
        embed(trained, [tmp_path / "nowhere.png"])
    with pytest.raises(UserError, match="must be at least 1"):
        embed(trained, files, batch_size=0)
    with pytest.raises(UserError, match=r"must be a \.npz or \.parquet file"):
        write(vectors(1), tmp_path / "f.csv")
