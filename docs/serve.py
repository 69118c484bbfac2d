"""Draws the README's picture of the page: `python docs/serve.py runs/PHOTOS-vit_nano8`.

It opens the page of `vitrail serve` in Chromium, with one of scikit-learn's two freely licensed sample photographs.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

from PIL import Image
from playwright.sync_api import sync_playwright
from sklearn.datasets import load_sample_image

PORT = 8765
FILE = Path(__file__).parent / "images" / "serve.jpg"


def photograph() -> bytes:
    """A temple in China, by a visitor."""
    file = io.BytesIO()
    Image.fromarray(load_sample_image("china.jpg")).save(file, "PNG")
    return file.getvalue()


def draw(address: str) -> bytes:
    """The page with the photograph, and the mouse over a patch."""
    with sync_playwright() as starter:
        chromium = starter.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1180, "height": 850}, device_scale_factor=1.5)
        page.goto(address)
        page.locator("#compare:not([hidden])").wait_for()
        page.set_input_files("#file", {"name": "china.png", "mimeType": "image/png", "buffer": photograph()})
        page.locator(".caption:not(:empty)").first.wait_for()
        page.locator("#layer").fill("3")
        page.locator("#layer").blur()
        page.mouse.wheel(0, -2000)  # the slider was scrolled into view
        page.wait_for_timeout(500)
        box = page.locator("canvas").first.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 0.42 * box["width"], box["y"] + 0.55 * box["height"])
        page.wait_for_timeout(1000)
        return page.screenshot()


def main(run: str) -> None:
    command = [sys.executable, "-m", "vitrail", "serve", run, "--port", str(PORT)]
    server = subprocess.Popen(command)
    try:
        for _ in range(120):
            try:
                urlopen(f"http://127.0.0.1:{PORT}/ready")
                break
            except OSError:
                time.sleep(1)
        picture = Image.open(io.BytesIO(draw(f"http://127.0.0.1:{PORT}"))).convert("RGB")
        picture.save(FILE, quality=88, optimize=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(sys.argv[1])
