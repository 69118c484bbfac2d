"""A report in a real browser: it draws, answers the mouse and the keyboard, and asks nobody for anything."""

from __future__ import annotations

import csv
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import vitrail
from vitrail import cli
from vitrail.charts import build
from vitrail.report.page import render
from vitrail.report.text import Headline
from vitrail.studies.charts import series

# Whoever gets a name of theirs to run leaves a mark.
HOSTILE = "</script><script>window.hacked=1</script>"
TAGGED = "<img src=x onerror=window.hacked=2>"
QUOTED = 'it\'s "{a|b}" & \u2028 so'
CLASSES = [HOSTILE, TAGGED, QUOTED, *"3456789"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, Any]) -> Path:
    """A run on digits whose classes and files have names that would like to be more than names."""
    folder = tmp_path_factory.mktemp("report")
    images, labels = load_digits(return_X_y=True)
    with (folder / "digits.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "label"])
        for i in range(600):
            name = f"\"><script>window.hacked=3<'{i}.png".replace("/", "")
            Image.fromarray((images[i].reshape(8, 8) * 15).astype(np.uint8)).save(folder / name)
            writer.writerow([name, CLASSES[labels[i]]])
    how = tiny | {"model": "vit_w32d2h2m64p4", "epochs": 2, "task": "multiclass"}
    run = vitrail.train(folder / "digits.csv", out=folder, name="a run", **how)
    vitrail.report(run)
    return run


class Visit:
    """A page that is looked at, and all that happened in it."""

    def __init__(self, browser: Any, file: Path, **settings: Any):
        self.context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | settings))
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.resolve().as_uri())

    def hover_cell(self, true: int, said: int) -> str:
        """Moves the mouse to a cell of the confusion matrix, and reads the tooltip."""
        matrix = self.page.locator(".matrix .plot")
        matrix.scroll_into_view_if_needed()
        box = matrix.bounding_box()
        x, y = matrix.evaluate(
            "(place, cell) => echarts.getInstanceByDom(place).convertToPixel({seriesIndex: 0}, cell)", [said, true]
        )
        self.page.mouse.move(box["x"] + x, box["y"] + y)
        tip = self.page.locator(".matrix .tip")
        tip.wait_for(state="visible")
        return tip.inner_text()

    def column(self, number: int) -> list[str]:
        return self.page.locator(f"#results .sorts tbody tr > :nth-child({number})").all_inner_texts()


@pytest.fixture
def visit(browser: Any) -> Iterator[Any]:
    visits: list[Visit] = []

    def begin(file: Path, **settings: Any) -> Visit:
        visits.append(Visit(browser, file, **settings))
        return visits[-1]

    yield begin
    for each in visits:
        assert each.complaints == []
        assert [url for url in each.requests if not url.startswith("data:")] == each.requests[:1]  # the file itself
        assert each.page.evaluate("window.hacked") is None
        each.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_is_drawn(visit, run, scheme):
    page = visit(run / "report.html", color_scheme=scheme).page
    plots = page.locator(".plot")
    assert plots.count() >= 6
    for i in range(plots.count()):
        assert plots.nth(i).locator("svg path").count() > 3
        assert plots.nth(i).get_attribute("aria-label")
    broken = "[...document.images].filter(image => !image.complete || !image.naturalWidth).length"
    assert page.evaluate(broken) == 0
    assert page.evaluate("document.images.length") > 50


def test_every_kind_of_chart_is_drawn(visit, tmp_path):
    rng = np.random.default_rng(0)
    targets = (rng.random((60, 3)) < 0.5).astype(np.float32)
    charts = [
        build.lr_range(np.geomspace(1e-6, 1, 50), rng.random(50), np.linspace(3, 1, 50), 1e-3),
        build.precision_recall(targets, rng.random((60, 3)), CLASSES[:3], [0.5] * 3),
        build.confusion(rng.integers(0, 9, (3, 3)), CLASSES[:3]),
        build.average_precision(CLASSES[:3], [0.5, 0.6, 0.7], [10, 20, 30], 60),
        build.reliability([(0.25, 0.5, 10), (0.75, 0.5, 0)]),
        *build.predicted([TAGGED], targets[:, :1], targets[:, 1:2], [0.5], [1], [1]),
        build.distance(rng.random((4, 3)) * 9, [5] * 4, 28, 10),
        build.shots([1, 5], [[0.2, 0.3], [0.5, 0.6]], [0.25, 0.55], [0.05, 0.05], 60),
        series({"a": {1: [0.1, 0.2], 2: [0.3]}}, name="s", title="t", note="n", x="compute", log=True),
        series(
            {"a": {"x": [0.1, 0.2]}, "b": {"x": [0.3]}},
            name="s",
            title="t",
            note="n",
            x="task",
            names="x",
            joined=False,
        ),
    ]
    nothing = {name: [] for name in ("names", "runs", "notes", "measured", "facts", "differing")}
    text = {"title": "charts", "subject": "charts", "headline": Headline("charts", "", "")}
    html = render("comparison.html", **nothing, **text, paired=False, labelled=True, curves=charts, scores=None)
    (tmp_path / "charts.html").write_text(html, encoding="utf-8")
    page = visit(tmp_path / "charts.html").page
    plots = page.locator(".plot")
    assert plots.count() == len(charts) == len({chart.kind for chart in charts}) + 2
    for i, chart in enumerate(charts):
        assert plots.nth(i).locator("svg path").count() > 3, chart.kind
        assert plots.nth(i).get_attribute("aria-label") == chart.label


def test_the_confusion_matrix_answers_the_mouse(visit, run):
    looked = visit(run / "report.html")
    metrics = vitrail.evaluate(run)
    names = [score.name for score in metrics.per_class]
    off = metrics.confusion - np.diag(metrics.confusion.diagonal())
    for true, said in [divmod(int(off.argmax()), len(names)), (names.index(HOSTILE), names.index(TAGGED))]:
        text = looked.hover_cell(true, said).replace("\xa0", " ")
        count, total = metrics.confusion[true, said], metrics.confusion[true].sum()
        assert f"{names[true]}, predicted as {names[said]}" in text
        assert f"{count} of {total}" in text


def test_tables_sort_by_mouse_and_keyboard(visit, run):
    looked = visit(run / "report.html")
    recall = looked.page.locator("#results .sorts thead button", has_text="recall")
    head = looked.page.locator("#results .sorts thead th", has_text="recall")

    def values() -> list[float]:
        return [float(text.split("%")[0]) for text in looked.column(3)]

    before = values()
    recall.click()
    assert values() == sorted(before, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    recall.focus()
    looked.page.keyboard.press("Enter")
    assert values() == sorted(before)
    assert head.get_attribute("aria-sort") == "ascending"
    for _ in range(2):
        looked.page.locator("#results .sorts thead button").first.click()
    assert [name for name in looked.column(1) if name.isdigit()] == list("9876543")
    assert head.get_attribute("aria-sort") == "none"


def until(looked: Visit, condition: str) -> None:
    """Waits for a condition; playwright's own way needs eval, which the page forbids."""
    for _ in range(1200):  # a minute: the machine may be busy
        if looked.page.evaluate(condition):
            return
        looked.page.wait_for_timeout(50)
    raise AssertionError(f"It never came true: {condition}")


def test_dark_is_dark_and_paper_is_light(visit, run):
    day, night = (visit(run / "report.html", color_scheme=scheme) for scheme in ("light", "dark"))
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = day.page.evaluate(ground), night.page.evaluate(ground)
    assert light != dark

    def ink(looked: Visit) -> str:
        """The colour of the first label of the matrix."""
        return looked.page.locator(".matrix .plot svg text").first.get_attribute("fill")

    assert ink(day) != ink(night)
    night.page.locator(".theme").click()
    assert night.page.evaluate(ground) == light
    assert ink(night) == ink(day)
    night.page.locator(".theme").click()
    assert night.page.evaluate(ground) == dark
    night.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert ink(night) == ink(day)
    night.page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert night.page.evaluate(ground) == dark
    day.page.emulate_media(color_scheme="dark")  # the system changes its mind
    until(day, f"{ground} === '{dark}'")


@pytest.mark.parametrize("width", [420, 768, 1280])
def test_nothing_sticks_out(visit, run, width):
    looked = visit(run / "report.html", viewport={"width": width, "height": 900})
    assert looked.page.evaluate("document.documentElement.scrollWidth") == width
    looked.page.set_viewport_size({"width": 420, "height": 900})  # charts follow the window
    until(looked, "document.querySelector('.plot svg').clientWidth < 420")
    assert looked.page.evaluate("document.documentElement.scrollWidth") == 420


def test_the_page_of_a_pretrained_model_is_drawn_and_fits_a_phone(visit, pretrained, tmp_path):
    file = vitrail.report(pretrained, out=tmp_path)
    looked = visit(file, viewport={"width": 420, "height": 900}, color_scheme="dark")
    plots = looked.page.locator(".plot")
    assert plots.count() == 6
    for i in range(plots.count()):
        assert plots.nth(i).locator("svg path").count() > 3
    assert looked.page.evaluate("document.documentElement.scrollWidth") == 420


def test_names_are_nothing_but_names(visit, run):
    page = visit(run / "report.html").page
    rows = page.locator("#results .sorts tbody th").all_inner_texts()
    assert {HOSTILE, TAGGED} <= set(rows)
    assert page.locator("main script, main img[src='x']").count() == 0
    assert any("window.hacked=3" in name for name in page.locator(".file").all_inner_texts())


def test_every_command_of_the_page_works(visit, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image = tmp_path / "one.png"
    Image.new("L", (8, 8)).save(image)
    commands = visit(run / "report.html").page.locator(".commands code").all_inner_texts()
    verbs = [command.split()[1] for command in commands]
    assert {"predict", "evaluate", "convert", "report"} <= set(verbs)
    for command in commands:
        words = [str(image) if word == "IMAGES" else word for word in shlex.split(command)[1:]]
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 0, command


def test_runs_side_by_side(visit, run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    looked = visit(vitrail.report([run, other], out=tmp_path / "both.html"), viewport={"width": 420, "height": 900})
    assert looked.page.locator(".plot svg").count() == 3
    assert looked.page.evaluate("document.documentElement.scrollWidth") == 420
    assert "0.0" in looked.page.locator(".apart").first.inner_text()
