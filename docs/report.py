"""Takes the screenshots of docs/report.md, light and dark, in Chromium: `python docs/report.py runs/demo`."""

from __future__ import annotations

import io
import os
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

WIDTH, HEIGHT, SCALE = 1180, 1500, 0.62


def screenshots(page: Path) -> list[Image.Image]:
    """The top of a page in light and dark mode."""
    images = []
    with sync_playwright() as starter:
        flags = ["--disable-gpu"] + ["--no-sandbox"] * (os.geteuid() == 0)
        browser = starter.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        for scheme in ("light", "dark"):
            view = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme)
            view.goto(page.resolve().as_uri())
            images.append(Image.open(io.BytesIO(view.screenshot())).convert("RGB"))
        browser.close()
    return images


def main(run: Path) -> None:
    size = round(WIDTH * SCALE), round(HEIGHT * SCALE)
    picture = Image.new("RGB", (2 * size[0], size[1]))
    for number, image in enumerate(screenshots(run / "report.html")):
        picture.paste(image.resize(size, Image.Resampling.LANCZOS), (number * size[0], 0))
    target = Path(__file__).parent / "images" / "report.png"
    picture.quantize(256, dither=Image.Dither.NONE).save(target, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
