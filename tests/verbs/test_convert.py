"""`vitrail convert --to hf`: the model card, and its upload to a hub."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

import vitrail
from vitrail.data.preprocess import Preprocess
from vitrail.errors import UserError
from vitrail.tasks import Multiclass
from vitrail.weights import Card, save


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model that Hugging Face's format can express, with scores."""
    folder = tmp_path_factory.mktemp("flowers")
    model = vitrail.create("vit_nano4", img_size=8, channels=3, classes=2, depth=1, stem="patch", pool="cls")
    metrics = {"images": 40, "top1": 0.925, "macro_f1": 0.9}
    task = Multiclass(("poppy", "sunflower"))
    card = Card(model="vit_nano4", config=model.config, task=task, preprocess=Preprocess((8, 8), 3), metrics=metrics)
    save(folder / "model.safetensors", model, card)
    return folder


def test_the_model_card_is_filled(run, tmp_path):
    vitrail.convert(run, tmp_path / "hub", to="hf")
    _, about, text = (tmp_path / "hub/README.md").read_text().split("---\n", 2)
    front = yaml.safe_load(about)
    assert front["pipeline_tag"] == "image-classification"
    assert (front["license"], front["license_name"]) == ("other", "to-be-chosen")
    for line in ("| top-1 | 92.50% |", "| macro F1 | 90.00% |", "on 40 validation images", "poppy, sunflower", "8x8"):
        assert line in text


class Hub(BaseHTTPRequestHandler):
    """The parts of the hub's HTTP interface that an upload of small files uses."""

    files: dict[str, bytes] = {}  # noqa: RUF012  # of the only repository
    asked: list[str] = []  # noqa: RUF012

    def do_GET(self):
        self.do_POST()

    def do_HEAD(self):
        self.do_POST()

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.asked.append(self.path)
        answer: dict = {}
        if self.path.endswith("/repos/create"):
            answer = {"url": f"http://{self.headers['Host']}/me/flowers", "name": "me/flowers"}
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            answer = {"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]}
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"commitUrl": f"http://{self.headers['Host']}/me/flowers/commit/1", "commitOid": "1" * 40}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def test_a_push_uploads_the_folder(run, tmp_path, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        site = f"http://127.0.0.1:{server.server_address[1]}"
        client = huggingface_hub.HfApi(endpoint=site, token="hf_x")
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: client)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        vitrail.convert(run, tmp_path / "hub", to="hf", push="me/flowers")
        server.shutdown()
    written = {path.name: path.read_bytes() for path in (tmp_path / "hub").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "preprocessor_config.json"} <= written.keys()
    assert Hub.files == written
    assert "hf:me/flowers" in written["README.md"].decode()


def test_what_cannot_be_pushed(run, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="uploads a folder written with --to hf"):
        vitrail.convert(run, tmp_path / "a.safetensors", push="me/flowers")
    with pytest.raises(UserError, match="--push OWNER/NAME"):
        vitrail.convert(run, tmp_path / "hub", to="hf", push="flowers")
    assert list(tmp_path.iterdir()) == []
    pytest.importorskip("huggingface_hub")

    class Offline:
        def create_repo(self, *_args, **_settings):
            raise OSError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.HfApi", Offline)
    with pytest.raises(UserError, match="is written, but could not be pushed to me/flowers: no route to the hub"):
        vitrail.convert(run, tmp_path / "hub", to="hf", push="me/flowers")
    assert (tmp_path / "hub/README.md").exists()
