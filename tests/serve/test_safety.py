"""What must be refused is refused with a reason, and nothing leaks, is written or is fetched."""

from __future__ import annotations

import base64
import io
import json
import logging
import socket
import struct
import tempfile
import time
import zlib
from contextlib import suppress

import httpx
import numpy as np
import pytest
from PIL import Image
from served import in_thread, until

from vitrail.errors import UserError
from vitrail.serve.settings import Settings, named_sources


def picture(format="PNG", size=(20, 30), mode="RGB", **options):
    file = io.BytesIO()
    Image.new(mode, size).save(file, format, **options)
    return file.getvalue()


def png_of(width, height):
    """A PNG of a few bytes that claims to be large."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )


def npy(values):
    file = io.BytesIO()
    np.save(file, values, allow_pickle=True)
    return file.getvalue()


SVG = b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="http://127.0.0.1/x"/></svg>'
HOSTILE = {
    "nothing": (b"", 422, "no_image"),
    "text": (b"hello", 415, "not_an_image"),
    "SVG": (SVG, 415, "not_an_image"),
    "HTML": (b"\n <!DOCTYPE html><script>alert(1)</script>", 415, "not_an_image"),
    "PDF": (b"%PDF-1.7\n%%EOF", 415, "not_an_image"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage", 415, "not_an_image"),
    "ZIP": (b"PK\3\4" + b"\0" * 60, 415, "not_an_image"),
    "pickle": (npy(np.array([object()], object)), 415, "not_an_image"),
    "array": (npy(np.zeros((8, 8), np.uint8)), 415, "not_an_image"),
    "claimed array": (npy(np.zeros((8, 8), np.uint8)).replace(b"(8, 8)", b"(9, 9)"), 415, "not_an_image"),
    "cut JPEG": (picture("JPEG", (300, 300))[:-100], 422, "unreadable_image"),
    "cut PNG": (picture("PNG", (300, 300))[:200], 422, "unreadable_image"),
    "bomb": (png_of(50_000, 50_000), 413, "too_many_pixels"),
    "large": (png_of(9_000, 9_000), 413, "too_many_pixels"),
    "wide": (png_of(2**31 - 1, 1), 413, "too_many_pixels"),
    "claimed": (png_of(3_000, 3_000), 422, "unreadable_image"),
    "scans": (picture("JPEG", progressive=True) + b"\xff\xda" * 100, 422, "unreadable_image"),
    "too long": (b"\xff\xd8" + b"\0" * 2**21, 413, "body_too_large"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_images_get_a_reason(service, what):
    content, status, code = HOSTILE[what]
    answer = service.post("/predict", content, headers={"Content-Type": "image/png"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "Traceback" not in answer.text
    assert len(answer.text) < 300


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_raster_images_are_accepted(service, format):
    assert service.post("/predict", picture(format)).status_code == 200


GOOD = picture()
BODIES = {
    "a type that is none": ({"content": GOOD, "headers": {"Content-Type": "text/html"}}, 415),
    "JSON that is none": ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 400),
    "deep JSON": ({"content": b"[" * 100_000, "headers": {"Content-Type": "application/json"}}, 400),
    "other JSON": ({"json": {"image": "x"}}, 422),
    "JSON of numbers": ({"json": {"images": [1]}}, 422),
    "no base64": ({"json": {"images": ["§§"]}}, 422),
    "a URL": ({"json": {"images": ["http://127.0.0.1:1/cat.jpg"]}}, 422),
    "a local path": ({"json": {"images": ["file:///etc/passwd"]}}, 422),
    "no images": ({"json": {"images": []}}, 422),
    "too many": ({"json": {"images": [base64.b64encode(GOOD).decode()] * 9}}, 413),
    "too many files": ({"files": [("image", GOOD)] * 9}, 413),
    "a field": ({"files": {"image": (None, "text")}}, 422),
    "no boundary": ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400),
    "a broken form": (
        {"content": b"nothing of the kind", "headers": {"Content-Type": "multipart/form-data; boundary=x"}},
        400,
    ),
}


@pytest.mark.parametrize("what", BODIES)
def test_wrong_bodies_get_a_reason(service, what):
    options, status = BODIES[what]
    answer = service.client.post("/predict", **options)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_a_bad_image_among_good_ones_is_named(service):
    answer = service.post("/predict", files=[("image", GOOD), ("image", b"bad"), ("image", GOOD)])
    assert answer.status_code == 415
    assert answer.json()["error"]["image"] == 2


def test_a_body_without_a_length_is_stopped_at_the_limit(service):
    answer = service.client.post("/predict", content=(b"x" * 2**16 for _ in range(40)))
    assert answer.status_code == 413


def test_file_names_are_only_names(service):
    name = "../../../etc/pass\nwd\\..\\cat.png"
    answer = service.post("/predict", files={"image": (name, GOOD)})
    assert answer.json()["predictions"][0]["file"] == "cat.png"


@pytest.mark.parametrize("path", ["/assets/../app.py", "/assets/..%2fapp.py", "/assets/%2e%2e/%2e%2e/", "//etc/passwd"])
def test_no_other_file_can_be_had(service, path):
    with socket.create_connection(httpx.URL(service.address).netloc.decode().split(":")) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404")


def test_every_answer_has_the_security_headers_and_no_cors(service):
    for answer in (service.get("/"), service.get("/nothing"), service.post("/predict", b"x")):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "server" not in answer.headers
        assert not [name for name in answer.headers if name.startswith("access-control")]
    preflight = service.client.options(
        "/predict", headers={"Origin": "https://example.com", "Access-Control-Request-Method": "POST"}
    )
    assert preflight.status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "example.com"}, 421),  # a name that resolves to this machine
        ({"Host": "localhost"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_web_sites_cannot_use_a_local_service(service, headers, status):
    assert service.client.get("/model", headers=headers).status_code == status


def test_nothing_is_written_and_log_lines_tell_nothing_of_the_image(service, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("vitrail"), "propagate", True)
    large = picture("BMP", (500, 500))  # more than a multipart parser keeps in memory by default

    def lines() -> list[str]:
        """The lines of this test: that of an earlier request may come late."""
        return [line for record in caplog.records if "POST" in (line := record.getMessage())]

    with caplog.at_level(logging.INFO, "vitrail"):
        for _ in range(2):
            assert service.post("/predict", files={"secret": ("secret.bmp", large)}, model="digits").status_code == 200
        until(lambda: len(lines()) == 2)  # written after the answer
    assert list(tmp_path.iterdir()) == []
    assert all("POST /predict 200" in line and "secret" not in line and "digits" not in line for line in lines())


def test_the_key_is_needed_for_everything_but_the_page_and_the_probes(trained, photo):
    with in_thread(trained, api_key="correct horse", reload=0) as served:
        assert served.post("/predict", photo).status_code == 200
        with httpx.Client(base_url=served.address) as stranger:
            for path in ("/model", "/models", "/metrics"):
                assert stranger.get(path).status_code == 401
            refused = stranger.post("/predict", content=photo)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            for path in ("/", "/docs", "/assets/app.js", "/health", "/ready"):
                assert stranger.get(path).status_code == 200
            for key in ("correct hors", "correct horse!", "", "kör"):
                assert stranger.get("/model", headers={"X-API-Key": key.encode()}).status_code == 401
            assert stranger.get("/model", headers={"X-API-Key": "correct horse"}).status_code == 200


def test_headers_have_a_limit_before_the_key_is_asked_for(trained, monkeypatch):
    monkeypatch.setattr("vitrail.serve.protocol.LONGEST", 0.3)
    with in_thread(trained, api_key="correct horse", reload=0) as served:
        address = served.address.removeprefix("http://").split(":")
        for sent, expected in (
            (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 2**17, b"HTTP/1.1 400"),
            (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: ", b""),  # and nothing more
            (b"", b""),
        ):
            with socket.create_connection((address[0], int(address[1])), timeout=10) as connection:
                connection.sendall(sent)
                with suppress(ConnectionResetError):
                    assert connection.recv(12) == expected
        time.sleep(0.5)
        assert served.client.get("/model").status_code == 200  # an idle connection stays open for its next request


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 70000}, "'port' must be at most 65535"),
        ({"workers": 0}, "'workers' must be at least 1"),
        ({"timeout": 0.0}, "'timeout' must be above 0"),
        ({"queue": 4}, "'queue' must be at least 'max_images'"),
        ({"api_key": "short"}, "at least 8 characters"),
        ({"api_key": "schlüssel-1"}, "only ASCII letters"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Settings(sources=(("a", "b"),), **settings)


def test_models_are_named_by_their_path_or_as_given(tmp_path):
    (tmp_path / "a=b").mkdir()
    assert named_sources(["runs/demo", "x=model.onnx"]) == (("demo", "runs/demo"), ("x", "model.onnx"))
    assert named_sources([tmp_path / "a=b"]) == (("a-b", str(tmp_path / "a=b")),)
    with pytest.raises(UserError, match="Two models are named 'demo'"):
        named_sources(["runs/demo", "other/demo"])


def test_settings_do_not_show_the_key():
    assert "correct horse" not in repr(Settings(sources=(("a", "b"),), api_key="correct horse"))
    assert "correct horse" not in json.dumps(str(Settings(sources=(("a", "b"),), api_key="correct horse")))
