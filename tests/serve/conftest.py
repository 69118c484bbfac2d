"""One service for most tests: a run, its ONNX file, and a run of another task."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from served import Served, in_thread


@pytest.fixture(scope="session")
def exported(exported: Any) -> Path:
    """The run as an ONNX file."""
    path: Path = exported.file
    return path


@pytest.fixture(scope="session")
def service(trained: Path, exported: Path) -> Iterator[Served]:
    with in_thread(f"digits={trained}", f"file={exported}", timeout=20, max_images=8, max_mb=1) as served:
        yield served


@pytest.fixture(scope="session")
def files(digits: Path) -> list[Path]:
    return sorted(digits.rglob("*.png"))


@pytest.fixture(scope="session")
def photo() -> bytes:
    """A colour JPEG that is neither square nor small."""
    import io

    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((150, 100)).save(file, "JPEG")
    return file.getvalue()
