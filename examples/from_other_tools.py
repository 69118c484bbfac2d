"""For people who come from timm, ultralytics, Hugging Face, fastai or torchvision: their habits, and vitrail's names.

Trains on handwritten digits, in seconds. docs/coming-from.md has the whole table.

    python examples/from_other_tools.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import vitrail


def ask(what: str, call) -> None:  # type: ignore[no-untyped-def]  # any function
    """Shows what vitrail says to a habit of another tool."""
    try:
        call()
    except (vitrail.UserError, AttributeError) as error:
        print(f"{what}\n    {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--out", type=Path, default=Path("from-other-tools"))
    args = parser.parse_args()

    # Habits are answered before anything starts.
    ask("timm.create_model(…)", lambda: vitrail.create_model("vit_tiny_patch16_224"))  # type: ignore[attr-defined]  # a habit
    ask("num_classes=10", lambda: vitrail.create("vit_tiny_patch16_224", num_classes=10))
    ask("TrainingArguments(learning_rate=…)", lambda: vitrail.train("digits", learning_rate=1e-3))
    ask("fp16=True", lambda: vitrail.train("digits", fp16=True))
    ask("learn.fit(bs=64)", lambda: vitrail.train("digits", bs=64))
    ask('model="resnet50"', lambda: vitrail.train("digits", model="resnet50"))

    # timm: model names work as they are. The size in the name is used, unless --img-size is given.
    model = vitrail.create("deit_tiny_patch16_224", classes=10)
    print(type(model).__name__, model.config.img_size)

    # Hugging Face: early stopping by macro F1, and a log for every tracker that is installed (log="wandb,mlflow").
    run = vitrail.train(
        "digits",
        model="vit_nano4",
        img_size=8,
        stem="patch",
        epochs=args.epochs,
        batch_size=64,
        best="f1",
        patience=5,
        out=args.out,
        name="digits",
        overwrite=True,
    )

    # ultralytics: model.val() and model.predict().
    scores = vitrail.evaluate(run)
    print(f"top-1 {scores.top1:.1%}, macro F1 {scores.macro_f1:.1%}, balanced accuracy {scores.balanced_accuracy:.1%}")

    # fastai: learn.fit(…) again trains on, with a decay of its own.
    vitrail.train(resume=run, epochs=args.epochs + 1)
    print(f"after one more epoch: top-1 {vitrail.evaluate(run).top1:.1%}")

    # timm and torchvision: weights in their format.
    print(vitrail.convert(run, args.out / "timm.safetensors", to="timm", overwrite=True))


if __name__ == "__main__":
    main()
