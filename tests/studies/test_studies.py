"""One study from the plan to the page, and what it refuses."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from laboratory import lab_of
from stopping import killed

import vitrail
from vitrail import UserError
from vitrail.runs.run import Run
from vitrail.studies import find
from vitrail.studies.charts import series
from vitrail.studies.cost import check_jobs
from vitrail.studies.execute import Folder, perform, prepare
from vitrail.studies.page import command
from vitrail.studies.study import STUDIES, Claim, Findings, Job, Result, Results, listed, register
from vitrail.verbs.study import _removed_if_refused

pytestmark = pytest.mark.usefixtures("plain_runs")

SHORT = {"images": 64, "seeds": 2, "device": "cpu"}
HOLD = """
import sys
from pathlib import Path
from vitrail.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def tiny(lab):
    """A run of each seed, and its fine-tuning."""
    model = "vit_w16d1h1m16p4"
    jobs = [lab.job({"lr": 1e-2}, model, seed=seed, lr=1e-2) for seed in range(lab.seeds)]
    results = yield jobs
    tuned = yield [lab.job({"tuned": 1}, model, seed=int(job.labels["seed"]), weights=job) for job in jobs]
    table = {"accuracy": {1e-2: results(lr=1e-2)}, "tuned": {1e-2: tuned(tuned=1)}}
    chart = series(table, name="tiny", title="Tiny", note="a note", x="learning rate", log=True)
    return Findings([Claim("it runs", f"{sum(tuned(tuned=1)):.3f}", "agrees")], [chart], ["Small."])


@pytest.fixture(scope="module", autouse=True)
def _tiny_study():
    register("tiny", question="Does it run?", paper="no figure", fair="images")(tiny)
    yield
    del STUDIES["tiny"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The tiny study, undisturbed. Read-only."""
    folder = tmp_path_factory.mktemp("studies") / "whole"
    return vitrail.study("tiny", "digits", out=folder, **SHORT)


def test_a_learning_rate_that_diverges_is_not_chosen(tmp_path, monkeypatch):
    """The study goes on with the best of the others."""

    def high(lab):
        """One rate that diverges, among others."""
        rates = yield from lab.choose_lr({"ViT": {"model": "vit_w16d1h1m16p4"}}, (1e-3, 1e-2, 1e38))
        results = yield [lab.job({"lr": rates["ViT"]}, "vit_w16d1h1m16p4", seed=s, lr=rates["ViT"]) for s in (0, 1)]
        return Findings([Claim("it runs", f"{sum(results()):.3f}", "agrees")], [])

    monkeypatch.setattr("vitrail.studies.lab._BEYOND", 0)
    monkeypatch.setitem(STUDIES, "high", replace(find("tiny"), name="high", run=high))
    found = vitrail.study("high", "digits", out=tmp_path / "high", **SHORT)
    scores = {r.job.labels["lr"]: r.scores["held_out"] for r in found.results if r.job.tuning}
    assert scores[1e38] == 0 < max(scores.values())
    assert {r.job.labels["lr"] for r in found.results if not r.job.tuning} <= {1e-3, 1e-2}


def test_a_look_at_attention_leaves_the_other_scores(tmp_path):
    job = lab_of("attention", tmp_path, images=64).job({}, "vit_w16d1h1m16p2", seed=0, look="attention")
    scores = perform(job, Folder(tmp_path), "cpu")
    assert scores["last"] == pytest.approx(Run(tmp_path / "runs" / job.name).history[-1]["val_top1"], abs=1e-6)
    assert scores["first_layer"] == scores["last_layer"] > 0


def test_the_result_is_json_figures_and_a_page(whole):
    result = json.loads((whole.folder / "study.json").read_text())
    assert (result["runs"], result["finished"], result["seeds"]) == (4, 4, 2)
    assert result["claims"][0]["verdict"] == "agrees"
    assert [row.get("lr") for row in result["results"]] == [1e-2, 1e-2, None, None]
    assert all(0 <= row["scores"]["top1"] <= 1 for row in result["results"])
    assert (whole.folder / "tiny.png").stat().st_size > 1000
    page = (whole.folder / "study.html").read_text()
    assert "it runs" in page
    assert "<b>agrees</b>" in page
    assert "<em>Claims: agrees 1.</em>" in page


def test_the_command_of_a_result_names_all_data_and_the_seeds(whole):
    assert "vitrail study tiny digits --images 64 --seeds 2<" in (whole.folder / "study.html").read_text()
    result = json.loads((whole.folder / "study.json").read_text()) | {"targets": ["cifar10", "my pets"]}
    assert command(result) == "vitrail study tiny digits cifar10 'my pets' --images 64 --seeds 2"


def test_a_kill_in_the_middle_changes_nothing(whole, tmp_path):
    folder = tmp_path / "left"
    with killed(tmp_path / "killed", folder, "model.safetensors", 2):
        vitrail.study("tiny", "digits", out=tmp_path / "killed", **SHORT)
    assert len(list(folder.glob("records/*.json"))) == 1
    vitrail.study("tiny", "digits", out=folder, **SHORT)
    assert (folder / "study.json").read_bytes() == (whole.folder / "study.json").read_bytes()


def test_seeds_are_added_and_parts_are_merged(whole, tmp_path):
    parts = [tmp_path / f"part{i}" for i in (1, 2)]
    for i, folder in enumerate(parts, 1):
        outcome = vitrail.study("tiny", "digits", out=folder, part=f"{i}/2", **SHORT)
        assert outcome.findings is None
        assert len(outcome.results) == 2
    merged = vitrail.study("tiny", "digits", out=parts[0], merge=[parts[1]], **SHORT)
    assert merged.findings is not None
    assert (parts[0] / "study.json").read_bytes() == (whole.folder / "study.json").read_bytes()
    other = tmp_path / "other"
    Folder(other).save_plan(merged.plan | {"images": 128})
    with pytest.raises(UserError, match=r"has the images 128, not 64\. Merge parts"):
        vitrail.study("tiny", "digits", out=parts[0], merge=[other], **SHORT)
    before = {path.name for path in (parts[0] / "records").iterdir()}
    more = vitrail.study("tiny", "digits", out=parts[0], **SHORT | {"seeds": 3})
    assert len(more.results) == 6
    assert before < {path.name for path in (parts[0] / "records").iterdir()}


def test_fewer_seeds_than_have_run_are_named(whole, caplog):
    vitrail.study("tiny", "digits", out=whole.folder, dry=True, **SHORT | {"seeds": 1})
    assert f"{whole.folder} has runs of 2 seeds, but the result has 1" in caplog.text


def test_a_dry_run_counts_what_is_left(whole):
    plan = vitrail.study("tiny", "digits", out=whole.folder, dry=True, **SHORT | {"seeds": 3})
    assert len(plan.results) == len(whole.results)
    assert len(plan.jobs) == len(plan.seconds) == 2
    assert {job.labels["seed"] for job in plan.jobs} == {2}


def test_the_plan_and_its_time(vitrail_says, caplog):
    given = ("study", "pooling", "digits", "--seeds", 1, "--dry", "--device", "cpu", "--images")
    code, out, _ = vitrail_says(*given, 640)
    assert code == 0
    assert "Runs of fewer than 500 steps are short" in caplog.text
    assert "pool cls, lr 0.001" in out
    assert "8 runs, about" in out
    assert "every run sees the same number of images; a full run sees 640 images" in out
    assert not Path("studies").exists()
    caplog.clear()
    vitrail_says(*given, 16000)
    assert "Runs of fewer" not in caplog.text


def test_the_example_is_a_study_in_thirty_lines(tmp_path):
    source = Path(__file__).parents[2] / "examples" / "own_study.py"
    text = source.read_text().split("@register")[1].split("if __name__")[0]
    assert len(text.strip().splitlines()) <= 30
    runpy.run_path(str(source))
    check_jobs(listed(find("dropout"), lab_of("dropout", tmp_path)), "cpu")
    del STUDIES["dropout"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "poling"}, "Did you mean 'pooling'"),
        ({"budget": "1s"}, "too small: the 16 runs of 'pooling' take at least"),
        ({"budget": "5m", "images": 640}, "Remove one of them"),
        ({"images": 3}, "at least a batch of 32"),
        ({"images": 10**41}, "at most 1,099,511,627,776"),
        ({"seeds": 0}, "from 1 to 100, but it is 0"),
        ({"part": "half"}, "as in 2/4"),
        ({"part": "3/2"}, "There is no part 3 of 2"),
        ({"part": "100/100", "images": 640}, "is empty: the study 'pooling' has 16 runs"),
        ({"merge": ["nowhere"]}, "no plan.json"),
        ({"data": ["digits", "digits"]}, "takes one data set"),
        ({"name": "few-shot", "data": ["digits"] * 3}, "takes at most 2 data sets"),
        ({"name": "few-shot", "data": ["digits"] * 2}, "digits was given more than once"),
    ],
)
def test_bad_input(settings, message, tmp_path):
    given = {"name": "pooling", "data": "digits", "seeds": 2, "device": "cpu", "out": tmp_path / "study"} | settings
    with pytest.raises(UserError, match=message):
        vitrail.study(**given)
    assert not (tmp_path / "study" / "runs").exists()


def test_data_that_is_too_small(tmp_path):
    rng = np.random.default_rng(0)
    few = {"images": rng.integers(0, 255, (60, 8, 8), np.uint8), "labels": np.arange(60) % 3}
    np.savez(tmp_path / "few.npz", **few)
    with pytest.raises(UserError, match="needs 200 training images, but few has"):
        vitrail.study("pooling", str(tmp_path / "few.npz"), out=tmp_path / "study", **SHORT)
    with pytest.raises(UserError, match="needs 4 classes, but few has 3"):
        vitrail.study("transfer", str(tmp_path / "few.npz"), out=tmp_path / "study", **SHORT)
    few["labels"] = np.repeat([0, 1], [50, 10])
    np.savez(tmp_path / "rare.npz", **few)
    for name in ("transfer", "few-shot"):
        with pytest.raises(UserError, match="needs 10 training images of each class, but '1' of rare has 6"):
            vitrail.study(name, ["digits", str(tmp_path / "rare.npz")], out=tmp_path / "study", dry=True, **SHORT)


def planned(folder, images):
    """The plan of the tiny study on a data set named `some`, with 400 such images, saved in a folder."""
    source = folder / "some.npz"
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(source, images=images, labels=np.arange(400) % 2)
    place = Folder(folder / "study")
    how = {"budget": 60, "images": 640, "seeds": 2, "device": "cpu"}
    _, plan, _ = prepare(find("tiny"), [str(source)], place, folder, **how)
    place.save_plan(plan)
    return place, lambda merge=(): prepare(find("tiny"), [str(source)], place, folder, **how, merge=merge)[1]


def test_a_study_goes_on_with_the_data_it_began_with(tmp_path):
    first, second = np.random.default_rng(0).integers(0, 255, (2, 400, 8, 8), np.uint8)
    place, again = planned(tmp_path / "a", first)
    other, _ = planned(tmp_path / "b", second)
    assert again() == again([place.path]) == place.plan
    with pytest.raises(UserError, match="has data that differs in the content of the images"):
        again([other.path])
    np.savez(tmp_path / "a" / "some.npz", images=second, labels=np.arange(400) % 2)
    with pytest.raises(UserError, match=r"data has changed since .*: the content of the images\. Restore it"):
        again()
    place.save_plan(place.plan | {"identity": [{}]})
    with pytest.raises(UserError, match="is not the plan of a study"):
        again()
    place.save_plan({name: value for name, value in place.plan.items() if name != "identity"})  # of earlier versions
    assert again([other.path])["data"] == "some"


@pytest.mark.parametrize(
    "change", [*({"images": images} for images in (-5, 0, 10**41, True, "640")), {"unit": float("nan")}], ids=str
)
def test_plans_of_numbers_that_cannot_be(tmp_path, change):
    plan = {"study": "tiny", "data": "digits", "targets": [], "images": 64, "batch": 32, "unit": 1.0, "fair": "images"}
    Folder(tmp_path).save_plan(plan | change)
    with pytest.raises(UserError, match="is not the plan of a study"):
        vitrail.study("tiny", "digits", out=tmp_path, dry=True)


@pytest.mark.parametrize(
    "scores", [{}, {"held_out": [1.0]}, {"held_out": "1"}, {"held_out": True}, {"held_out": None}, {"map_x": 1.0}, [1]]
)
def test_records_without_their_scores(tmp_path, scores):
    job = Job(name="a", labels={"seed": 0}, data="digits", settings={}, epochs=1)
    Folder(tmp_path).record(job, scores)
    with pytest.raises(UserError, match=r"a\.json .*Delete it: the run is measured again"):
        Results([Result(job, Folder(tmp_path).scores(job))])("held_out", seed=0)


def test_a_dry_study_merges_nothing(tmp_path):
    for name in ("old", "part"):
        Folder(tmp_path / name).save_plan(
            {"study": "tiny", "data": "digits", "targets": [], "images": 64, "batch": 32, "unit": 1.0, "fair": "images"}
        )
    (tmp_path / "part" / "records").mkdir()
    (tmp_path / "part" / "records" / "a.json").write_text("{}")
    for name in ("old", "new"):
        vitrail.study("tiny", "digits", out=tmp_path / name, merge=[tmp_path / "part"], dry=True, seeds=1, device="cpu")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.json", "old", "part", *["plan.json"] * 2, "records"]


@pytest.mark.parametrize("others", [(), ("other",)])
def test_a_refused_study_removes_only_what_is_its_own(tmp_path, others):
    studies = tmp_path / "studies"

    def refused() -> None:
        with _removed_if_refused([studies / "own", studies]):
            for name in ("own", *others):  # another process has begun a study there, too
                (studies / name / "data").mkdir(parents=True)
            raise UserError("refused")

    with pytest.raises(UserError, match="refused"):
        refused()
    assert [path.name for path in tmp_path.rglob("*/data")] == ["data"] * len(others)
    assert studies.exists() == bool(others)


def test_one_process_at_a_time_runs_a_study(tmp_path):
    """A second one, which would be refused for its data, must not remove what the first has just begun."""
    begun = tmp_path / "begun"
    begun.mkdir()
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(begun)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    try:
        with pytest.raises(UserError, match=rf"pid {other.pid}, is running the study in .*begun.*another --out"):
            vitrail.study("tiny", "digits", out=begun, **SHORT)
    finally:
        other.communicate()
    assert [file.name for file in begun.iterdir()] == [".lock"]
