"""Writes the sections of finished studies to docs/studies.md, and copies their figures. Other sections stay.

python docs/studies.py studies/*
"""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from vitrail.studies import NAMES, find
from vitrail.studies.page import command

PAGE = Path(__file__).with_name("studies.md")
IMAGES = PAGE.parent / "images"
# What to keep in mind when reading a result, by study.
REMARKS = {
    "data-size": (
        "The ResNet is ahead of the ViT at every size, by six to ten points, with early stopping, without, and with "
        "frozen features. The paper's ViT-B/32 is behind ResNet-50 with 9 million images and ahead from 90 million on; "
        "ours have 59,000 at most, so this continues the paper's figure to the left. From 14,750 images on, the length "
        "of training limits the ViT as well: it sees 48,000 images in 1,500 steps, the BiT twice as many at the same "
        "compute."
    ),
    "resolution": (
        "At 28 pixels a garment covers twice as many patches a side as in pre-training at 14. Probably the difference "
        "to the paper is one of scale: it pre-trains on crops of 5 to 100 % of the area, so that its models have seen "
        "objects of all sizes, while ours have seen garments of one size and are fine-tuned for a few hundred steps. "
        "That resampled positions are worth more than new ones holds at every size."
    ),
    "positions": (
        "As in the paper, it hardly matters which absolute embeddings there are and where they are added, if there are "
        "any. Relative embeddings are behind here, perhaps because they start at zero and learn slowly: a run has "
        "1,500 steps. The learning rate was chosen for 1-D embeddings and is that of all."
    ),
    "shape": (
        "At this length larger models gain nothing, and smaller patches lose two points: 1,500 steps are too few for "
        "what is added, and longer sequences need the most training. The paper compares models that train for 14 "
        "epochs on JFT."
    ),
    "scaling": (
        "In 1,500 steps the ResNet is ahead of the ViT at all but the least compute; it learns in fewer steps. The "
        "paper's models train for 7 to 14 epochs on 300 million images. The verdict on saturation rests on the ViT of "
        "size L, which is trained at the rate chosen for M and stays below S: from S to XL, over 25 times the compute, "
        "the ViT gains 0.8 points. Rates are chosen by runs of a quarter of the length, for which others may be best."
    ),
    "pooling": (
        "At their best rates the two are equal to a tenth of a point; with three seeds, the interval is wider than the "
        "margin of one point. Elsewhere they differ: at 0.0003 average pooling is 1.6 points behind, at 0.01 it is 5 "
        "points ahead. So the paper's lesson holds, that a comparison at one learning rate misleads, but here both "
        "have the same best rates."
    ),
    "optimiser": (
        "The disagreement is that of one combination: a BiT that is pre-trained with Adam and fine-tuned with SGD, as "
        "in the paper, is two points behind the others; fine-tuned with Adam, both starts are equal. The paper "
        "pre-trains on 300 million images, ours on 30,000. Muon is compared for the ViT only: it trains matrices, and "
        "leaves the filters of a BiT to Adam."
    ),
    "transfer": (
        "Pre-training helps the ViT on every task but orientation, where it is nearly perfect from scratch; a run "
        "from scratch that learns little of one task (location, seed 1: 47 %) makes the interval wide. The ResNet is "
        "ahead on every task, and nearly perfect on counting and orientation from scratch or not: with five kinds of "
        "clothing to pre-train on, the architecture matters more than the pre-training. The paper's models read 14 to "
        "300 million images before they transfer. A full run is half as long here as in the other studies: 750 steps "
        "for the ViT."
    ),
    "self-supervised": (
        "All methods read the same images of five kinds of clothing; the task is to recognise shoes, bags and shirts. "
        "Predicting masked pixels teaches more for it than the labels of five classes do. The paper's supervised "
        "pre-training reads hundreds to thousands of classes, so its result need not hold here. DINO's teacher "
        "collapsed to the uniform distribution with every seed: 1,500 steps at the settings of its recipe are probably "
        "too few."
    ),
    "few-shot": (
        "More pre-training does not help here: five kinds of clothing teach features that hardly separate shoes and "
        "bags, whatever their length of training. Fine-tuning reaches 87 % from every checkpoint, so there is little "
        "to rank. The paper pre-trains on hundreds of times as many classes."
    ),
    "attention": (
        "After 1,500 steps, at 80 to 82 % accuracy, the attention of every layer is still almost uniform, so the local "
        "heads that the paper sees in its lowest layers have not formed; its models train for hundreds of thousands of "
        "steps. The structure of the position embeddings is there already."
    ),
    "attention-pattern": (
        "The runs are short: their accuracies of 60 to 74 % are far from the 90 % of longer training. At this length "
        "every local or sparse pattern is ahead of global attention. Strided attention is ahead at the same number of "
        "images, so cheaper images are not the only reason: probably global attention must learn first that near "
        "patches matter. ViTDet's claim is about models that were pre-trained with global attention; ours start from "
        "scratch, so the verdict does not contradict it. The learning rate, 0.003, was chosen for global attention "
        "alone, among 0.0003 to 0.01. The runs had one thread each."
    ),
}
VERDICTS = ("agrees", "disagrees", "cannot tell")
BEGIN = "<!-- begin: python docs/studies.py studies/* -->\n"


def main(folders: list[str]) -> None:
    head, _, body = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    sections = {part.partition("\n")[0]: f"\n## {part.rstrip()}\n" for part in body.split("\n## ")[1:]}
    for folder in map(Path, folders):
        result = json.loads((folder / "study.json").read_text(encoding="utf-8"))
        if result["claims"]:
            sections[result["study"]] = section(result, folder)
    ordered = {name: sections[name] for name in NAMES if name in sections}
    PAGE.write_text(head + BEGIN + summary(ordered) + "".join(ordered.values()), encoding="utf-8")


def summary(sections: dict[str, str]) -> str:
    """A table of the studies with their question and the number of claims of each verdict."""
    lines = ["", f"| study | question | {' | '.join(VERDICTS)} |", "|---|---|---|---|---|"]
    for name, text in sections.items():
        counts = [str(text.count(f"**{verdict}**") or "") for verdict in VERDICTS]
        lines.append(f"| [{name}](#{name}) | {find(name).question} | {' | '.join(counts)} |")
    return "\n".join(lines) + "\n"


def section(result: dict[str, Any], folder: Path) -> str:
    """The section of a study: question, command, figure, claims and notes."""
    name, data = result["study"], result["data"]
    lines = [f"\n## {name}", f"*{result['question']}* ({result['paper']} of the paper)", ""]
    lines += ["```", command(result), "```", ""]
    for figure in sorted(folder.glob("*.png")):
        shutil.copy(figure, IMAGES / f"study-{figure.name}")
        lines += [f"![{name} on {data}](images/study-{figure.name})", ""]
    lines += ["| claim | measured | verdict |", "|---|---|---|"]
    lines += [f"| {claim['paper']} | {claim['ours']} | **{claim['verdict']}** |" for claim in result["claims"]]
    lines += ["", *result["notes"], ""] if result["notes"] else [""]
    lines += [REMARKS[name], ""] if name in REMARKS else []
    lines += [f"{result['runs']} runs with {minutes(result, folder):.0f} minutes of training."]
    return "\n".join(lines) + "\n"


def minutes(result: dict[str, Any], folder: Path) -> float:
    """The time that the runs of a study trained, without their start and evaluation."""
    files = (folder / "runs" / each["run"] / "metrics.csv" for each in result["results"])
    tables = (file.read_text(encoding="utf-8").splitlines() for file in files if file.exists())
    return sum(float([*csv.DictReader(table)][-1]["seconds"]) for table in tables) / 60


if __name__ == "__main__":
    main(sys.argv[1:])
