"""Pictures with words: names of emoji found in a style that was never trained, and what composition is learnt.

    python benchmarks/words.py speed --emoji EMOJI
    python benchmarks/words.py scratch --emoji EMOJI --minutes 30
    python benchmarks/words.py lit --emoji EMOJI --minutes 30
    python benchmarks/words.py composition
    python benchmarks/words.py draw --emoji EMOJI

EMOJI is a folder with `pairs.csv` (image, style, name, group, keywords): 1,595 emoji, each drawn in three styles. Two
styles are trained, the third is searched: for an unseen drawing its name among all 1,595, and for a name its drawing.
The nine groups are classes that were never trained, and most of their words are in no name.

`speed` trains for 300 steps and measures the core seconds of an image; `--minutes` of two cores are then a number of
images, so that the result does not depend on the load of the machine, and a run may take one shared core. `lit` spends
half of the time on self-supervised pre-training of the image tower, on the images of both styles without names, and
teaches words to the frozen tower in the other half.

`composition` draws two shapes ("a red circle left of a blue square") and measures, on pairs of shapes that were never
trained together, how often the right caption beats one in which the colours, the shapes or the sides are swapped.

Results are added to `benchmarks/results/words.json`; `draw` makes the figure of docs/words.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "words.json"
FIGURE = HERE.parent / "docs" / "images" / "words.png"
RUNS = Path(tempfile.gettempdir()) / "vitrail-words"
TEST_STYLE, STYLES = "twemoji", ("fluent", "noto")
CORES = 2
GROUP_TEMPLATES = ("{}",)

# What `scratch` and `lit` train. Drawings need no strong crops; a learnt vocabulary makes texts short.
SETTINGS = {
    "model": "vit_nano16",
    "img-size": "64",
    "tokenizer": "bpe",
    "batch-size": "64",
    "crop-scale": "0.7",
    "color-jitter": "0.4",
}


def tables(emoji: Path) -> tuple[Path, Path]:
    """The tables of captions and of groups, beside each other in a temporary folder."""
    RUNS.mkdir(parents=True, exist_ok=True)
    names, groups = RUNS / "emoji.csv", RUNS / "groups.csv"
    with (emoji / "pairs.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    captions: list[list[str]] = [["image", "caption", "split"]]
    labels: list[list[str]] = [["image", "label", "split"]]
    for row in rows:
        path, split = str((emoji / row["image"]).resolve()), "val" if row["style"] == TEST_STYLE else "train"
        captions.append([path, row["name"], split])
        labels.append([path, row["group"], split])
    for place, content in ((names, captions), (groups, labels)):
        with place.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(content)
    return names, groups


def vitrail(*words: object) -> float:
    """Runs a command of vitrail; the core seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "vitrail", *map(str, words)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def flags(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def measure_speed(emoji: Path) -> None:
    """Core seconds per image of training from scratch, of pre-training and of LiT: the difference of two lengths."""
    names, _ = tables(emoji)
    tower = {name: SETTINGS[name] for name in ("model", "img-size", "batch-size")}
    kinds = {
        "scratch": ("train", names, *flags(SETTINGS)),
        "pretrain": ("pretrain", names, "--method", "lejepa", *flags(tower)),
    }
    found = {}
    for kind, command in kinds.items():
        seconds = [
            vitrail(*command, "--epochs", epochs, "--out", RUNS, "--name", f"speed-{kind}-{epochs}", "--overwrite")
            for epochs in (1, 4)
        ]
        found[kind] = (seconds[1] - seconds[0]) / (3 * _images(names))
    weights = RUNS / "speed-pretrain-4"
    command = ("train", names, "--weights", weights, "--freeze", "image", *flags(_lit()))
    seconds = [
        vitrail(*command, "--epochs", epochs, "--out", RUNS, "--name", f"speed-lit-{epochs}", "--overwrite")
        for epochs in (1, 4)
    ]
    found["lit"] = (seconds[1] - seconds[0]) / (3 * _images(names))
    record({"kind": "speed", "core_seconds_per_image": found})


def _lit() -> dict[str, str]:
    return {name: value for name, value in SETTINGS.items() if name not in ("model", "img-size")}


def _images(table: Path) -> int:
    """The training images of a table of captions."""
    with table.open(newline="", encoding="utf-8") as file:
        return len({row["image"] for row in csv.DictReader(file) if row["split"] == "train"})


def epochs_of(kind: str, minutes: float, images: int) -> float:
    """The epochs that two cores train in some minutes."""
    cost = next(r for r in reversed(results()) if r["kind"] == "speed")["core_seconds_per_image"][kind]
    return round(minutes * 60 * CORES / (cost * images), 1)


def scratch(emoji: Path, minutes: float, epochs: float | None, seed: int) -> None:
    names, groups = tables(emoji)
    budget = None if epochs else minutes
    epochs = epochs or epochs_of("scratch", minutes, _images(names))
    run = RUNS / f"scratch-{seed}"
    seconds = vitrail(
        *("train", names, "--epochs", epochs, "--seed", seed, *flags(SETTINGS)),
        *("--out", RUNS, "--name", run.name, "--overwrite"),
    )
    record(
        {"kind": "scratch", "minutes": budget, "epochs": epochs, "seed": seed, "core_minutes": seconds / 60},
        run,
        groups,
    )


def lit(emoji: Path, minutes: float, seed: int) -> None:
    names, groups = tables(emoji)
    images = _images(names)
    first, second = (epochs_of(kind, minutes / 2, images) for kind in ("pretrain", "lit"))
    tower = {name: SETTINGS[name] for name in ("model", "img-size", "batch-size")}
    before = RUNS / f"tower-{seed}"
    seconds = vitrail(
        *("pretrain", names, "--method", "lejepa", "--epochs", first, "--seed", seed, *flags(tower)),
        *("--out", RUNS, "--name", before.name, "--overwrite"),
    )
    run = RUNS / f"lit-{seed}"
    seconds += vitrail(
        *("train", names, "--weights", before, "--freeze", "image", "--epochs", second, "--seed", seed),
        *(*flags(_lit()), "--out", RUNS, "--name", run.name, "--overwrite"),
    )
    about = {"kind": "lit", "minutes": minutes, "epochs": [first, second], "seed": seed, "core_minutes": seconds / 60}
    record(about, run, groups)


def composition(epochs: float, seed: int) -> None:
    """How often the right caption beats one with a swap, for pairs of shapes that were never trained together."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    import numpy as np
    from words import SHAPES, scenes

    import vitrail as library

    folder = RUNS / "composition"
    table, kept = scenes(folder, 3000, 400, seed=seed)
    settings: dict[str, Any] = {"model": "vit_nano8", "img_size": 48, "epochs": epochs, "batch_size": 64, "seed": seed}
    settings |= {"tokenizer": "bpe", "crop_scale": 1.0}
    run = library.train(table, out=RUNS, name="composed", overwrite=True, **settings)
    model = library.load(run.path)
    predictor = library.Predictor(run.path)
    read = model.card.task.words()
    files = [folder / name for name, _ in kept]
    seen = np.stack([outputs for _, outputs, _ in predictor.run(map(str, files))])
    found = {}
    for kind in ("colours", "shapes", "sides"):
        right, wrong = zip(*((scene.caption(), scene.swapped(kind).caption()) for _, scene in kept), strict=True)
        good, bad = ((read(texts) * seen).sum(axis=1) for texts in (right, wrong))
        different = np.array([a != b for a, b in zip(right, wrong, strict=True)])
        found[kind] = float((good > bad)[different].mean())
    scores = library.evaluate(run.path).row()
    record({"kind": "composition", "shapes": len(SHAPES), "epochs": epochs, "seed": seed, "beats": found, **scores})


def record(about: dict[str, Any], run: Path | None = None, groups: Path | None = None) -> None:
    """Adds a result, with the scores of a run on the unseen style and on its groups."""
    if run is not None:
        import vitrail as library

        about |= library.evaluate(run).row()
        zero = library.evaluate(run, groups, method="zeroshot", split="val", templates=GROUP_TEMPLATES)
        about["groups_top1"] = zero.row()["top1"]
    about = {key: round(value, 5) if isinstance(value, float) else value for key, value in about.items()}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps([*results(), about], indent=1) + "\n")
    print(json.dumps(about, indent=1))


def results() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def draw(emoji: Path, seed: int) -> None:
    """The best and worst matches of the unseen style, with the names that the model finds first."""
    import numpy as np
    from PIL import Image

    import vitrail as library
    from vitrail.charts.style import ORANGE, save
    from vitrail.charts.tiles import Caption, Section, Tile, sheet
    from vitrail.data import open_data
    from vitrail.tasks.captions import unpack
    from vitrail.tasks.pair_scores import Match

    names, _ = tables(emoji)
    run = RUNS / f"scratch-{seed}"
    card = library.load(run).card
    split = open_data(names, model=card.task).splits["val"]
    predictor = library.Predictor(run)
    files = [split.name(i) for i in range(len(split))]
    seen = np.stack([outputs for _, outputs, _ in predictor.run(files)]).astype(np.float64)
    match = Match(seen, [unpack(row) for row in split.targets], card.task.words())
    order = np.argsort(match.losses)
    own = [unpack(row)[0] for row in split.targets]

    def tiles(numbers: Sequence[int]) -> list[list[Tile]]:
        made = []
        for i in numbers:
            picture = Image.open(files[i]).convert("RGBA")
            ground = Image.new("RGBA", picture.size, "white")
            ground.alpha_composite(picture)
            first = match.texts[match.first[i]]
            lines = [Caption(own[i])] if first == own[i] else [Caption(own[i]), Caption(f"found: {first}", ORANGE)]
            made.append(Tile(ground.convert("RGB"), lines))
        return [made[at : at + 8] for at in range(0, len(made), 8)]

    right = [i for i in order.tolist() if match.caption_rank[i] == 0]
    wrong = [i for i in order[::-1].tolist() if match.caption_rank[i] > 0]
    sections = [
        Section(
            "Best matches",
            f"Drawings of {TEST_STYLE}, a style never trained, with the name found first.",
            tiles(right[:8]),
        ),
        Section("Worst matches", "The true name, and the one that was found instead.", tiles(wrong[:8])),
    ]
    save(sheet(*sections), FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "scratch", "lit", "composition", "draw"))
    parser.add_argument("--emoji", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if given.what == "composition":
        composition(given.epochs or 8, given.seed)
        return
    if given.emoji is None:
        parser.error("--emoji EMOJI is needed")
    if given.what == "speed":
        measure_speed(given.emoji)
    elif given.what == "scratch":
        scratch(given.emoji, given.minutes, given.epochs, given.seed)
    elif given.what == "lit":
        lit(given.emoji, given.minutes, given.seed)
    else:
        draw(given.emoji, given.seed)


if __name__ == "__main__":
    main()
