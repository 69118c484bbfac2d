"""Writes docs/coming-from.md from the table of synonyms:

python docs/coming_from.py
"""

from __future__ import annotations

from pathlib import Path

from vitrail.config.synonyms import FLAGS, NAMES, PRETRAINED, TOOLS, VERBS, Rows

PAGE = Path(__file__).parent / "coming-from.md"
INTRO = f"""# Coming from timm, ultralytics, Hugging Face, fastai or torchvision

Type what you are used to: if you use a flag, keyword or command of these tools, vitrail names its own before anything
starts.

```
$ vitrail train photos/ --learning-rate 3e-4 --fp16
vitrail: --learning-rate is called --lr here; --fp16 is called --amp fp16 here. Use `vitrail train photos/ --lr 3e-4
--amp fp16`.
$ vitrail train photos/ --num-classes 12
vitrail: `vitrail train` has no option '--num-classes'. The classes are counted in the data.
```

Model names work as they are: `vit_tiny_patch16_224`, `google/vit-base-patch16-224`, `vit_b_16`. So do timm's names of
weights: `--weights vit_tiny_patch16_224` is `--weights {PRETRAINED}`.

The tables list what has another name here. Flags with the same name, such as `--epochs`, are left out, and so are those
that vitrail answers with a sentence, such as `--num-classes`. The page is written by `python docs/coming_from.py` from
`vitrail/config/synonyms.py`."""


def table(rows: Rows, heads: tuple[str, str], theirs: str = "{}", here: str = "{}") -> list[str]:
    """A table of two columns: names in code, sentences as they are."""
    lines = ["", f"| {heads[0]} | {heads[1]} |", "|---|---|"]
    for _, name, answer in rows:
        code = f"`{here.format(answer)}`".replace(" or vitrail ", "` or `vitrail ")
        lines.append(f"| `{theirs.format(name)}` | {answer if answer.endswith('.') else code} |")
    return lines


def page() -> str:
    """The text of the page."""
    lines = [INTRO]
    for tool, title in TOOLS.items():
        lines += ["", f"## {title}"]
        for verb, rows in FLAGS.items():
            if own := tuple(row for row in rows if tool in row[0].split() and not row[2].endswith(".")):
                lines += table(own, (f"`vitrail {verb}`", "here"), "--{}")
        if own := tuple(row for row in VERBS if tool in row[0].split()):
            lines += table(own, ("command", "here"), here="vitrail {}")
        if own := tuple(row for row in NAMES if tool in row[0].split()):
            lines += table(own, ("Python", "here"))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
