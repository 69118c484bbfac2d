"""Photographs of phones and cameras: HEIC, AVIF and JPEG XL, very large ones, from the web and from standard input."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image, features

import vitrail
from vitrail.data import images
from vitrail.data.images import UnreadableImage, allow_pixels, inspect_image, read_image
from vitrail.errors import UserError

HERE = np.indices((48, 64)).sum(axis=0)[:, :, None] * [2, 1, 0] + [0, 60, 90]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes of gradients in every format, as a folder of class folders."""
    folder = tmp_path_factory.mktemp("photographs")
    for kind in ("a", "b"):
        (folder / kind).mkdir()
        picture = Image.fromarray(HERE.astype(np.uint8))
        picture = picture if kind == "a" else picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        for i in range(6):
            picture.save(folder / kind / f"{i}.HEIC", quality=90)
            picture.save(folder / kind / f"{i}.jpg", quality=95)
    return folder


@pytest.fixture(autouse=True)
def _usual_limit():
    before = Image.MAX_IMAGE_PIXELS
    yield
    Image.MAX_IMAGE_PIXELS = before


@pytest.mark.parametrize("suffix", [".heic", ".jxl", *([".avif"] if features.check("avif") else [])])
def test_a_format_with_a_plugin_reads_like_any_other(suffix, tmp_path):
    Image.fromarray(HERE.astype(np.uint8)).save(tmp_path / f"photo{suffix}", quality=95)
    pixels = read_image(tmp_path / f"photo{suffix}")
    assert pixels.shape == (48, 64, 3)
    assert np.abs(pixels.astype(float) - HERE).mean() < 5
    assert inspect_image(tmp_path / f"photo{suffix}").h == 48


def test_heic_is_audited_like_any_other(folder, tmp_path):
    audit = vitrail.check(folder, out=tmp_path)
    assert sum(sum(counts.values()) for counts in audit.counts.values()) == 24
    assert not audit.errors


# Plugins stay registered, so the commands run in another process, one after the other.
WITHOUT = """
import json, sys
sys.modules["pillow_heif"] = None
from vitrail.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as ended:
        print("ended with", ended.code, flush=True)
"""


def test_without_the_plugin_every_heic_is_counted_and_named_with_the_remedy(trained, folder, tmp_path):
    commands = [
        ["check", str(folder), "--out", str(tmp_path / "check")],
        ["train", str(folder), "--out", str(tmp_path / "train")],
        ["predict", str(trained), str(folder / "a")],
    ]
    words = [sys.executable, "-c", WITHOUT, json.dumps(commands)]
    said = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout
    checked, check, trained, train, predicted, predict, _ = re.split(r"^ended with (\d)\n", said, flags=re.M)
    assert (check, train, predict) == ("1", "2", "1")
    remedy = "pip install 'vitrail[heic]'"
    assert remedy in checked
    assert "12" in checked
    assert checked.count(".HEIC") >= 5  # it lists five of each kind
    assert remedy in trained
    assert "12 of 24 images (50.0%)" in trained
    assert trained.count(".HEIC") >= 10
    # Prediction goes on.
    assert predicted.count(f"0.HEIC  — unreadable: HEIC, which needs pillow-heif: {remedy}") == 1
    assert len([line for line in predicted.splitlines() if str(folder) in line]) == 12


def test_a_very_large_image_is_read_if_allowed(tmp_path):
    Image.new("L", (300, 200)).save(tmp_path / "large.png")
    allow_pixels(50_000)
    with pytest.raises(UnreadableImage, match="60,000 pixels, above the limit: allow them by --max-pixels 60000"):
        read_image(tmp_path / "large.png")
    allow_pixels(60_000)
    assert read_image(tmp_path / "large.png").shape == (200, 300, 1)
    with pytest.raises(UserError, match="'max_pixels' must be at least 1"):
        allow_pixels(0)


def test_the_limit_is_an_option_of_predict_and_of_runs(trained, tiny, tmp_path):
    for number in range(20):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (30, 20), number * 10).save(path)
    (prediction,) = vitrail.predict(trained, [path], max_pixels=100)
    assert "--max-pixels 600" in prediction.error
    with pytest.raises(UserError, match="--max-pixels 600"):
        vitrail.train(tmp_path / "data", max_pixels=100, out=tmp_path, **tiny)
    (prediction,) = vitrail.predict(trained, [path], max_pixels=1000)
    assert prediction.error is None


def test_images_from_the_web_and_from_standard_input(trained, folder, monkeypatch):
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        site = f"http://127.0.0.1:{server.server_address[1]}"
        names = [f"{site}/a/0.jpg", f"{site}/nowhere.jpg", folder / "a" / "0.jpg"]
        web, missing, file = vitrail.predict(trained, names)
        server.shutdown()
    assert web.labels == file.labels
    assert web.probabilities == pytest.approx(file.probabilities, abs=1e-5)
    assert web.file == names[0]
    assert missing.error == "the server answered 404 File not found"
    (gone,) = vitrail.predict(trained, [names[0]])
    assert gone.error.startswith("cannot be downloaded: ")
    piped = io.TextIOWrapper(io.BytesIO((folder / "a" / "0.jpg").read_bytes()))
    monkeypatch.setattr("sys.stdin", piped)
    (piped_in,) = vitrail.predict(trained, ["-"])
    assert piped_in.probabilities == pytest.approx(file.probabilities, abs=1e-5)
    assert images.fetched(folder) is folder
