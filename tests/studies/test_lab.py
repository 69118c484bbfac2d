"""The runs of every study: their data, length, settings and learning rates."""

from __future__ import annotations

import re

import numpy as np
import pytest
from laboratory import blank, lab_of

from vitrail.data import open_data
from vitrail.studies import NAMES, find
from vitrail.studies.cost import check_jobs
from vitrail.studies.execute import of_part
from vitrail.studies.ladders import FAMILIES
from vitrail.studies.sets import cut
from vitrail.studies.study import Result, Results, Unknown, listed


@pytest.mark.parametrize("name", NAMES)
def test_every_run_of_every_study_is_valid(name, tmp_path):
    lab = lab_of(name, tmp_path)
    jobs = listed(find(name), lab)
    check_jobs(jobs, "cpu")
    assert len({job.name for job in jobs}) == len(jobs)
    seeds = {job.labels["seed"] for job in jobs if not job.tuning}
    assert seeds == {0, 1}
    assert {job.weights for job in jobs if job.weights} <= {job.name for job in jobs}
    more = listed(find(name), lab_of(name, tmp_path, seeds=3))
    assert {job.name for job in jobs} < {job.name for job in more}  # adding seeds repeats nothing


@pytest.mark.parametrize("side", [8, 28, 64])
def test_ladders_rise_over_thirty_times_the_compute(side, tmp_path):
    lab = lab_of("scaling", tmp_path, blank(tmp_path, side))
    for ladder in FAMILIES.values():
        costs = [lab.macs(model["model"]) for model in ladder(lab).values()]
        assert len(costs) >= 5
        assert costs == sorted(costs)
        assert costs[-1] > 30 * costs[0]


@pytest.mark.parametrize(
    ("optimum", "tried"),
    [
        (1e-3, [1e-3, 3e-3, 3e-4]),
        (3e-3, [1e-3, 3e-3, 3e-4, 1e-2]),
        (1.0, [1e-3, 3e-3, 3e-4, 1e-2, 3e-2]),  # two beyond the grid at most
        (1e-4, [1e-3, 3e-3, 3e-4, 1e-4, 3e-5]),
    ],
)
def test_a_learning_rate_at_the_edge_of_the_grid_is_compared_with_the_next(optimum, tried, tmp_path):
    """Of two models, only the one whose best rate is at the edge gets more runs."""
    lab = lab_of("positions", tmp_path)
    best = {"edge": optimum, "middle": 1e-3}
    choice = lab.choose_lr({name: {"model": lab.vit()} for name in best})
    jobs, asked = next(choice), []
    while not isinstance(jobs, dict):
        asked += [(job.labels["tuning"], job.labels["lr"]) for job in jobs]
        apart = [abs(np.log(job.labels["lr"] / best[job.labels["tuning"]])) for job in jobs]
        results = Results(Result(job, {"held_out": 1 / (1 + each)}) for job, each in zip(jobs, apart, strict=True))
        try:
            jobs = choice.send(results)
        except StopIteration as end:
            jobs = end.value
    assert [rate for name, rate in asked if name == "edge"] == tried
    assert [rate for name, rate in asked if name == "middle"] == [1e-3, 3e-3, 3e-4]
    assert jobs == {"edge": min(tried, key=lambda rate: abs(np.log(rate / optimum))), "middle": 1e-3}


def test_equal_compute_gives_a_cheaper_model_more_images(tmp_path):
    jobs = [job for job in listed(find("data-size"), lab_of("data-size", tmp_path)) if not job.tuning]
    lab = lab_of("data-size", tmp_path)
    full = [job for job in jobs if job.labels["images"] == lab.cut.images and job.labels["seed"] == 0]
    spent = [job.epochs * lab.macs(job.settings["model"]) for job in full]
    assert len(full) == 3
    assert spent == pytest.approx([spent[0]] * 3, rel=0.01)


@pytest.mark.parametrize("images", [640, 200_000])
@pytest.mark.parametrize(("epoch", "length"), [(1, 230), (2000, 2070)])
def test_runs_see_the_images_that_they_should_though_incomplete_batches_are_dropped(images, epoch, length, tmp_path):
    lab = lab_of("positions", tmp_path, images=images)
    job = lab.job({}, lab.vit(), seed=0, train=230, epoch=epoch)
    assert len(open_data(job.data).splits["train"]) == pytest.approx(length, rel=0.01)  # classes are rounded
    steps = round(job.epochs * (length // lab.batch))
    assert steps * lab.batch == pytest.approx(images, rel=0.03)


def test_repeated_images_are_those_of_the_subset_and_only_training_ones(tmp_path):
    found = lab_of("positions", tmp_path).cut
    once, thrice = (open_data(str(found.file(100, 1, times))).splits for times in (1, 3))
    for split, times in (("train", 3), ("val", 1), ("test", 1)):
        numbers = np.tile(np.arange(len(once[split])), times)
        assert (thrice[split].targets == once[split].targets[numbers]).all()
        assert (thrice[split].pixels == once[split].pixels[numbers]).all()


@pytest.mark.parametrize("name", ["self-supervised", "transfer"])
def test_fine_tuning_has_the_settings_of_training_whatever_the_weights_come_from(name, tmp_path):
    jobs = [job for job in listed(find(name), lab_of(name, tmp_path)) if "start" in job.labels]
    ways = ("opt", "sched", "weight_decay", "batch_size", "mixup", "smoothing")
    assert {bool(job.weights) for job in jobs} == {True, False}
    assert len({tuple(job.settings[way] for way in ways) for job in jobs}) == 1
    assert {(job.settings["body_lr"], job.settings["layer_decay"]) for job in jobs if job.weights} == {(1.0, 1.0)}


@pytest.mark.parametrize("side", [28, 64])
def test_all_dimensions_grow_together_to_the_compute_of_one(side, tmp_path):
    lab = lab_of("shape", tmp_path, blank(tmp_path, side))
    jobs = [job for job in listed(find("shape"), lab) if job.labels["seed"] == 0]
    costs = {(job.labels["dimension"], job.labels["factor"]): lab.macs(job.settings["model"]) for job in jobs}
    for factor in (2, 4):
        assert costs["all", factor] == pytest.approx(factor * costs["base", 1], rel=0.15)


@pytest.mark.parametrize(("side", "sizes"), [(8, {4, 6, 8}), (28, {14, 20, 28}), (64, {32, 48, 64})])
def test_resolutions_end_at_that_of_the_images_and_no_run_is_made_twice(side, sizes, tmp_path):
    jobs = listed(find("resolution"), lab_of("resolution", tmp_path, blank(tmp_path, side)))
    tuned = [job for job in jobs if "positions" in job.labels and job.labels["seed"] == 0]
    assert {job.labels["size"] for job in tuned} == sizes
    assert len(tuned) == 8  # in two ways at the first size, in three at the others
    assert {job.labels["positions"] for job in tuned if job.labels["size"] == min(sizes)} == {"resampled", "new"}


def test_cheaper_attention_patterns_see_more_images(tmp_path):
    lab = lab_of("attention-pattern", tmp_path)
    jobs = [job for job in listed(find("attention-pattern"), lab) if job.labels["seed"] == 0]
    costs = [lab.macs(job.settings["model"], attention=job.settings["attention"]) for job in jobs]
    assert len({job.settings["attention"] for job in jobs}) == len(jobs) == 7
    assert max(costs) == costs[0] > min(costs)
    spent = [job.epochs * cost for job, cost in zip(jobs, costs, strict=True)]
    assert spent == pytest.approx([spent[0]] * 7, rel=0.01)


def test_few_shot_accuracy_is_drawn_over_the_images_that_runs_see(tmp_path):
    def findings(steps):
        results = None
        while True:
            results = Results(Result(job, Unknown()) for job in steps.send(results))

    with pytest.raises(StopIteration) as stop:
        findings(find("few-shot").run(lab_of("few-shot", tmp_path, images=800)))
    (chart,) = stop.value.value.charts
    assert [list(each.x) for each in chart.series] == [[100, 200, 400, 800]] * 4


def test_full_runs_of_equal_compute_see_their_own_number_of_images(tmp_path, caplog):
    caplog.set_level("INFO", "vitrail")
    lab_of("data-size", tmp_path)
    least, most = map(int, re.search(r"A full run sees (\d+) to (\d+) images", caplog.text.replace(",", "")).groups())
    assert 640 == least < most / 5  # the ViT; the cheapest of the others


def test_parts_cover_all_runs_and_keep_chains_together(tmp_path):
    jobs = listed(find("self-supervised"), lab_of("self-supervised", tmp_path))
    final = [job.name for job in jobs if not job.tuning]
    for count in (2, 5):
        parts = [set(of_part(jobs, (i, count))) for i in range(1, count + 1)]
        assert sorted(name for part in parts for name in part if name in final) == sorted(final)
        for job in jobs:
            if job.weights:
                assert all((job.name in part) == (job.weights in part) for part in parts)


def test_further_seeds_leave_runs_in_their_parts(tmp_path):
    few, more = (listed(find("shape"), lab_of("shape", tmp_path, seeds=seeds)) for seeds in (2, 3))
    before, after = (set(of_part(jobs, (1, 2))) for jobs in (few, more))
    assert before == after & {job.name for job in few}


def test_runs_of_which_some_are_finished_are_listed(tmp_path):
    lab = lab_of("attention", tmp_path)
    jobs = listed(find("attention"), lab)
    last = next(job for job in jobs if not job.tuning)
    scores = {"top1": 0.8, "map_distance": [[0.5] * 3] * 7}  # of another shape than made-up ones
    assert listed(find("attention"), lab, lambda job: scores if job == last else None) == jobs


@pytest.mark.parametrize(("images", "batch"), [(32, 32), (95_999, 32), (96_000, 64), (10**6, 128)])
def test_the_batch_is_the_largest_with_enough_steps(images, batch, tmp_path):
    assert lab_of("pooling", tmp_path, images=images).batch == batch


def test_a_folder_of_images_becomes_tables(digits, tmp_path):
    found = cut(str(digits), tmp_path / "data")
    data = open_data(found.file(50, 1))
    assert {name: len(split) for name, split in data.splits.items()}.keys() == {"train", "val", "test"}
    assert abs(len(data.splits["train"]) - 50) <= 5
    _, second = found.halves()
    assert open_data(second.file()).classes == tuple("56789")
