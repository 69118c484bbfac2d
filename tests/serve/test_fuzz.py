"""Whatever is sent, the answer is a reason and never a failure, a hang or a leak.

The suite runs a small part. All of it, in some minutes:

    FUZZ_IMAGES=2000 FUZZ_EXAMPLES=200 python -m pytest tests/serve/test_fuzz.py
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

IMAGES = int(os.environ.get("FUZZ_IMAGES", "150"))
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "3"))


def seeds() -> list[bytes]:
    """Small images of every format and mode."""
    rng = np.random.default_rng(0)
    colour = Image.fromarray(rng.integers(0, 256, (9, 14, 3)).astype(np.uint8)).resize((70, 45))
    found = []
    for format, modes in {
        "JPEG": ("RGB", "L", "CMYK"),
        "PNG": ("RGB", "RGBA", "L", "P", "I;16", "1"),
        "WEBP": ("RGB", "RGBA"),
        "GIF": ("P",),
        "BMP": ("RGB", "L"),
        "TIFF": ("RGB", "I;16", "F"),
        "PPM": ("RGB",),
        "JPEG2000": ("RGB",),
    }.items():
        for mode in modes:
            file = io.BytesIO()
            picture = colour.convert("I" if mode == "I;16" else mode)
            (picture.convert(mode) if mode == "I;16" else picture).save(file, format)
            found.append(file.getvalue())
    file = io.BytesIO()
    colour.save(file, "JPEG", progressive=True)
    return [*found, file.getvalue()]


def mutate(content: bytes, other: bytes, rng: np.random.Generator) -> bytes:
    """A damaged image: flipped bits, other bytes, a missing, repeated or foreign part, or another size."""
    data = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        at, length = int(rng.integers(0, len(data))), int(rng.integers(1, 40))
        match rng.integers(0, 7):
            case 0:
                data[at] ^= 1 << int(rng.integers(0, 8))
            case 1:
                data[at : at + length] = rng.bytes(length)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + length]
            case 4:
                data[at:at] = data[at : at + length] * int(rng.integers(1, 50))
            case 5:
                data[at:at] = other[: int(rng.integers(1, len(other)))]
            case 6:  # where most formats have their width and height
                at = int(rng.integers(0, min(60, len(data))))
                data[at : at + 4] = rng.choice([b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\xff\xff\0\0", b"\0\1\0\1"])
        if not data:
            break
    return bytes(data)


def resident() -> float:
    """The memory of this process, in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_mutated_images_are_answered_or_refused(service):
    rng, known = np.random.default_rng(1), seeds()
    assert all(service.post("/predict", content).status_code == 200 for content in known)
    seen: Counter[int] = Counter()
    paths = ("/predict", "/embed", "/explain")
    begun = 0.0
    for number in range(IMAGES):
        if number == IMAGES // 4:  # when every decoder has been used
            begun = resident()
        content = mutate(known[number % len(known)], known[int(rng.integers(len(known)))], rng)
        seen[service.post(paths[number % 3], content).status_code] += 1
    assert set(seen) <= {200, 413, 415, 422}
    assert min(seen[status] for status in (200, 415, 422)) > IMAGES // 50, seen  # the mutations are not all alike
    assert resident() - begun < 64
    assert "vitrail_queue_images 0" in service.get("/metrics").text


def test_the_openapi_document_holds_for_generated_requests(service):
    """schemathesis: no 5xx, and only the statuses, types and fields that the document names."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{service.address}/openapi.json"]
    # Random bytes are valid by the document, but they are no images; and 413 is not among schemathesis' refusals.
    excluded = "positive_data_acceptance,negative_data_rejection"
    options = ["--max-examples", str(EXAMPLES), "--exclude-checks", excluded, "--no-color"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "No issues found" in done.stdout
