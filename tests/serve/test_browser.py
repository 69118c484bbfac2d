"""The page in a real browser: drop a picture, read the answer, move over a patch, and see the light change."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from served import Served, in_thread

from vitrail.data.preprocess import Preprocess
from vitrail.models import build
from vitrail.models.dense import DenseConfig
from vitrail.models.mixer import MixerConfig
from vitrail.models.vit import ViTConfig
from vitrail.serve.page import assets
from vitrail.tasks import Boxes, Masks, Multiclass, Multilabel, Regression
from vitrail.weights import Card, save

HOSTILE = "<img src=x onerror=window.hacked=1>"
SIZE = {"img_size": (32, 24), "channels": 3}
READY = "!document.getElementById('compare').hidden"  # when the model's facts are there
VIT = {"width": 16, "depth": 3, "heads": 2, "mlp": 32, "patch": 4, "pool": "cls", **SIZE}
MODELS = {
    "classes": (ViTConfig(classes=12, **VIT), Multiclass((HOSTILE, *(f"class_{i}" for i in range(11))))),
    "labels": (ViTConfig(classes=3, **VIT), Multilabel(("red", "green", "blue"), (0.3, 0.5, 0.99))),
    "numbers": (ViTConfig(classes=2, **VIT), Regression(("age", "height"), (40.0, 170.0), (10.0, 9.0))),
    "masks": (DenseConfig.of(ViTConfig(classes=0, **VIT), ("linear",), 2), Masks(("sky", "road"))),
    "boxes": (DenseConfig.of(ViTConfig(classes=0, **VIT), ("fcos",), 2), Boxes(("cat", "dog"), (0.2, 0.2))),
    "mixer": (MixerConfig(16, 3, 12, 16, 4, classes=3, **SIZE), Multiclass(("a", "b", "c"))),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Models of every form; untrained ones will do."""
    folder = tmp_path_factory.mktemp("models")
    for name, (config, task) in MODELS.items():
        seen = Preprocess((32, 24), 3, fit="pad") if task.annotated else Preprocess((32, 24), 3, crop=0.9)
        card = Card(model=name, config=config, task=task, preprocess=seen)
        model = build(config)
        if name == "boxes":  # an untrained model finds nothing
            torch.nn.init.zeros_(model.get_parameter("head.towers.cls.bias"))
        save(folder / f"{name}.safetensors", model, card)
    return folder


@pytest.fixture(scope="module")
def served(folder, exported) -> Iterator[Served]:
    with in_thread(*(folder / f"{name}.safetensors" for name in MODELS), f"file={exported}", reload=0) as found:
        yield found


class Visit:
    """A page that is looked at, and all that happened in it."""

    def __init__(self, browser: Any, address: str, ready: str = READY, **settings: Any):
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | settings))
        self.page = self.context.new_page()
        self.address = address
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)
        self.until(ready)

    def until(self, condition: str) -> None:
        """Waits for a condition; playwright's own way needs eval, which the page forbids."""
        for _ in range(1200):  # a minute: the machine may be busy
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"It never came true: {condition}")

    def choose(self, model: str) -> None:
        self.page.locator("#model").select_option(model)
        self.until(f"document.title.startsWith('{model}')")

    def drop(self, content: bytes, place: str = ".stage", kind: str = "image/jpeg") -> None:
        """Drops a picture, as from a file manager."""
        self.page.evaluate(
            """([text, place, type]) => {
              const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
              const carried = new DataTransfer();
              carried.items.add(new File([bytes], "picture", { type }));
              const target = document.querySelector(place);
              for (const kind of ["dragover", "drop"]) {
                target.dispatchEvent(new DragEvent(kind, { dataTransfer: carried, bubbles: true, cancelable: true }));
              }
            }""",
            [base64.b64encode(content).decode(), place, kind],
        )

    def rows(self) -> list[list[str]]:
        """The names and numbers of the answer."""
        return [row.inner_text().split("\n") for row in self.page.locator(".row").all()]

    def answered(self) -> None:
        self.until("!document.querySelector('.bars').classList.contains('waiting')")

    def drawn(self, number: int = 0) -> str:
        """What the canvas shows, once nothing moves: four times the same."""
        seen: list[str] = []
        while len(seen) < 4 or len({*seen[-4:]}) > 1:
            self.page.wait_for_timeout(70)
            after_a_frame = "new Promise((done) => requestAnimationFrame(() => done(canvas.toDataURL())))"
            canvas = f"document.querySelectorAll('canvas')[{number}]"
            seen.append(self.page.evaluate(f"() => {{ const canvas = {canvas}; return {after_a_frame}; }}"))
        return seen[-1]

    def over(self, x: float, y: float) -> None:
        """Moves the mouse over a place of the picture, as fractions of its size."""
        box = self.page.locator("canvas").first.bounding_box()
        self.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])


@pytest.fixture
def visit(browser, served) -> Iterator[Any]:
    visits: list[Visit] = []

    def begin(**settings: Any) -> Visit:
        visits.append(Visit(browser, served.address, **settings))
        return visits[-1]

    yield begin
    for each in visits:
        assert each.complaints == []
        assert [url for url in each.requests if not url.startswith((served.address, "blob:"))] == []
        assert each.page.evaluate("window.hacked") is None
        each.context.close()


def test_a_dropped_picture_is_answered_and_each_patch_shows_where_it_looks(visit, served, photo):
    looked = visit()
    looked.drop(photo)
    looked.answered()
    expected = served.predict(photo, scores=True, top=8)
    shown = [name for name, _ in looked.rows()]
    assert shown == [label.replace("_", " ") for label in expected["labels"]]
    assert looked.page.locator("h1").inner_text().startswith(shown[0])
    looked.until("document.querySelector('.caption').textContent.includes('rollout')")
    whole = looked.drawn()
    looked.over(0.1, 0.1)
    corner = looked.drawn()
    caption = looked.page.locator(".caption").first.inner_text()
    assert caption.startswith("The patch in row 1, column 1 looks mostly at")
    looked.over(0.6, 0.7)
    elsewhere = looked.drawn()
    assert len({whole, corner, elsewhere}) == 3
    looked.page.mouse.move(5, 5)
    assert looked.drawn() == whole


def test_layers_and_heads_change_the_light(visit, photo):
    looked = visit()
    looked.drop(photo)
    looked.until("document.querySelector('.caption').textContent !== ''")
    seen = {looked.drawn()}
    for slider, value, said in (("#layer", "2", "2 of 3"), ("#head", "2", "2 of 2"), ("#layer", "3", "3 of 3")):
        looked.page.locator(slider).fill(value)
        assert looked.page.locator(f"{slider}-value").inner_text() == said
        seen.add(looked.drawn())
    assert looked.page.locator(".caption").first.inner_text() == "Where head 2 of layer 3 looks"
    looked.page.locator("input[value=picture]").check(force=True)
    seen.add(looked.drawn())
    assert len(seen) == 5


def test_a_class_shows_what_speaks_for_it(visit, photo):
    looked = visit()
    looked.drop(photo)
    looked.until("document.querySelector('.caption').textContent !== ''")
    before = looked.drawn()
    row = looked.page.locator(".row").nth(1)
    row.click()
    looked.until("document.querySelector('.caption').textContent.startsWith('Evidence for')")
    assert row.get_attribute("aria-pressed") == "true"
    assert looked.drawn() != before
    row.click()  # back to attention
    assert row.get_attribute("aria-pressed") == "false"
    looked.page.mouse.move(5, 5)
    assert looked.drawn() == before


def test_the_keyboard_does_all_of_it(visit, photo):
    looked = visit()
    looked.drop(photo)
    looked.until("document.querySelector('.caption').textContent !== ''")
    page = looked.page
    page.locator(".stage").first.focus()
    page.keyboard.press("ArrowRight")
    assert "row 5, column 5 looks mostly at" in page.locator(".caption").first.inner_text()
    page.keyboard.press("ArrowDown")
    assert "row 6, column 5" in page.locator(".caption").first.inner_text()
    page.keyboard.press("Escape")
    assert "rollout" in page.locator(".caption").first.inner_text()
    page.locator(".row").first.focus()
    page.keyboard.press("Enter")
    looked.until("document.querySelector('.caption').textContent.startsWith('Evidence for')")
    unnamed = """[...document.querySelectorAll("button, input, select, [tabindex='0']")].filter(
      (each) => each.offsetParent && !each.ariaHidden
        && !each.textContent.trim() && !each.ariaLabel && !each.labels?.length
    ).length"""
    assert page.evaluate(unnamed) == 0


def test_two_pictures_are_compared(visit, photo, files):
    looked = visit()
    looked.drop(photo)
    looked.answered()
    looked.page.locator("#compare").click()
    looked.drop(files[0].read_bytes(), ".slot:last-child .stage", "image/png")
    looked.until("document.querySelectorAll('.first .track').length === 2")
    assert all("·" in text for _, text in looked.rows())
    looked.until("document.getElementById('alike').textContent.includes('similarity')")
    assert looked.drawn(0) != looked.drawn(1)


def test_other_tasks_have_their_own_form(visit, photo):
    looked = visit()
    looked.choose("labels")
    looked.drop(photo)
    looked.answered()
    looked.until("document.querySelectorAll('.track b').length === 3")  # thresholds
    assert {name for name, *_ in looked.rows()} == {"red", "green", "blue"}
    looked.choose("numbers")
    looked.until("document.querySelectorAll('.scale').length === 2")
    assert [name for name, *_ in looked.rows()] == ["age", "height"]
    assert looked.page.locator(".scale").first.get_attribute("data-low") == "15"


def test_models_without_attention_have_no_overlay_of_it(visit, photo):
    looked = visit()
    looked.choose("mixer")
    looked.drop(photo)
    looked.answered()
    assert not looked.page.locator("#sliders").is_visible()
    looked.page.locator(".row").first.click()
    looked.until("document.querySelector('.caption').textContent.startsWith('Evidence for')")
    looked.choose("file")  # ONNX
    looked.answered()
    assert not looked.page.locator("#controls").is_visible()
    assert looked.page.locator(".row").first.is_disabled()


def test_what_cannot_be_read_is_explained_and_the_picture_before_it_still_works(visit, photo):
    looked = visit()
    looked.drop(photo)
    looked.until("document.querySelector('.caption').textContent.includes('rollout')")
    before = looked.rows(), looked.page.locator("h1").inner_text(), looked.drawn()
    refused = {
        b"": "This file is empty",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>": "This is an SVG drawing. Send a raster image",
        photo[: len(photo) // 2]: "truncated",
    }
    for content, reason in refused.items():
        looked.drop(content)
        looked.until(f"document.getElementById('message').textContent.includes('{reason}')")
    assert (looked.rows(), looked.page.locator("h1").inner_text(), looked.drawn()) == before
    looked.page.locator(".row").first.click()
    looked.until("document.querySelector('.caption').textContent.startsWith('Evidence for')")
    looked.page.route("**/explain?*", lambda route: route.fulfill(status=503, json={"error": {"message": "Busy."}}))
    looked.page.locator(".row").nth(1).click()
    looked.until("document.getElementById('message').textContent === 'Busy.'")
    assert "rollout" in looked.page.locator(".caption").first.inner_text()
    assert looked.page.locator(".row[aria-pressed=true]").count() == 0
    looked.complaints.clear()  # the browser reports the refused requests


def test_a_format_that_the_browser_cannot_draw_is_answered_without_a_picture(visit, served, photo):
    looked = visit()
    looked.drop(photo)
    looked.until("document.querySelector('.caption').textContent.includes('rollout')")
    file = io.BytesIO()
    Image.new("RGB", (60, 40), "red").save(file, "TIFF")
    looked.drop(file.getvalue(), kind="image/tiff")
    looked.until("document.querySelector('.reason').textContent.includes('cannot show this format')")
    assert looked.page.locator("canvas").first.is_hidden()
    assert looked.page.locator(".caption").first.inner_text() == ""
    assert (
        looked.page.locator("h1")
        .inner_text()
        .startswith(served.predict(file.getvalue())["labels"][0].replace("_", " "))
    )
    looked.page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as over plain HTTP
    looked.page.locator("#copy").click()
    looked.until("document.getElementById('copy').textContent === 'Copied'")
    looked.page.evaluate("document.execCommand = () => false")
    looked.page.locator("#copy").click()
    looked.until("document.getElementById('copy').textContent.startsWith('Not copied')")
    assert looked.page.evaluate("getSelection().toString()") == looked.page.locator("#curl").inner_text()


def test_the_camera_is_answered_frame_by_frame(visit):
    looked = visit(permissions=["camera"])
    looked.page.locator("#camera").click()
    looked.answered()
    looked.until("document.querySelector('.caption').textContent !== ''")
    looked.page.locator("#camera").click()
    assert looked.page.locator("#camera").inner_text() == "Camera"


def test_a_wrong_key_is_said_and_only_the_right_one_kept(browser, folder, photo):
    with in_thread(folder / "classes.safetensors", reload=0, api_key="the right key") as served:
        looked = Visit(browser, served.address, ready="document.getElementById('key-dialog').open")
        page, kept = looked.page, "sessionStorage.getItem('vitrail-key')"
        looked.drop(photo)  # waits for the model
        page.keyboard.press("Escape")
        page.locator("#again").click()
        assert page.locator("#key-wrong").is_hidden()
        for key, said in (("ключ от сервиса", "Latin letters"), ("a wrong key", "That key is wrong")):
            page.locator("#key").fill(key)
            page.locator("#key-dialog .main").click()
            page.locator("#key-wrong", has_text=said).wait_for(state="visible")
            assert page.evaluate(kept) is None
        looked.drop(photo)
        page.locator("#key").fill("the right key")
        page.locator("#key-dialog .main").click()
        looked.until("document.querySelector('.caption').textContent.includes('rollout')")
        assert page.evaluate(kept) == "the right key"
        assert '-H "Authorization: Bearer $VITRAIL_API_KEY"' in page.locator("#curl").inner_text()
        assert [each for each in looked.complaints if "401" not in each] == []
        looked.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(visit, photo, scheme):
    looked = visit(viewport={"width": 390, "height": 844}, color_scheme=scheme, has_touch=True, is_mobile=True)
    looked.drop(photo)
    looked.answered()
    for path in ("", "/docs"):
        looked.page.goto(looked.address + path)
        looked.until("document.readyState === 'complete' && document.documentElement.scrollWidth === 390")
    ground = looked.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(20, 21, 25)") == (scheme == "dark")


def test_the_page_is_small():
    assert sum(len(asset.content) for asset in assets().values()) < 64 * 1024


def test_a_threshold_of_masks_is_refused(served, photo):
    answer = served.post("/predict", photo, model="masks", threshold=0.4)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "not_supported")
    assert answer.json()["error"]["message"].startswith("A threshold does not apply to masks")


def test_a_mask_lies_over_the_picture_as_strongly_as_the_slider_says(visit, photo):
    looked = visit()
    assert looked.page.locator("#fading").is_hidden()
    looked.choose("masks")
    looked.drop(photo)
    looked.answered()
    looked.until("!document.getElementById('fading').hidden")

    def fade(share: int) -> str:
        looked.page.evaluate(
            "(share) => { const slider = document.getElementById('opacity'); slider.value = share;"
            " slider.dispatchEvent(new Event('input')); }",
            share,
        )
        return looked.drawn()

    assert len({fade(share) for share in (0, 50, 100)}) == 3
    assert looked.page.locator("#opacity-value").inner_text() == "100%"
    assert {name for name, _ in looked.rows()} == {"sky", "road"}


def test_boxes_are_those_above_the_threshold_of_the_slider(visit, photo):
    looked = visit()
    assert looked.page.locator("#boxes").is_hidden()
    looked.choose("boxes")
    looked.drop(photo)
    looked.answered()
    looked.until("!document.getElementById('boxes').hidden")

    def least(share: float) -> str:
        looked.page.evaluate(
            "(share) => { const slider = document.getElementById('threshold'); slider.value = share;"
            " slider.dispatchEvent(new Event('input')); }",
            share,
        )
        return looked.drawn()

    assert re.search(r"\d+ (cat|dog)", looked.page.locator("#headline").inner_text())
    some, none = least(0.1), least(0.95)
    assert some != none
    assert looked.page.locator("#headline").inner_text() == "No object"
    assert looked.page.locator("#threshold-value").inner_text() == "95%"
