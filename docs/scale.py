"""Writes the tables of docs/scale.md: what the paper's pre-training takes on GPUs, computed by `vitrail plan`.

python docs/scale.py        # some minutes
"""

from __future__ import annotations

from pathlib import Path

from vitrail.config import override
from vitrail.plan.describe import size
from vitrail.plan.estimate import USABLE, memory_of
from vitrail.plan.machines import UTILISATION, Machine, machine
from vitrail.plan.settings import planned
from vitrail.plan.trace import Trace, Tracer

PAGE = Path(__file__).with_name("scale.md")
BATCH = 4096  # the paper's
DATA = {"ImageNet-21k": (14_197_122, 21_841), "JFT-300M": (303_000_000, 18_291)}
MODELS = {"ViT-B/16": "vit_b16", "ViT-L/16": "vit_l16", "ViT-H/14": "vit_h14", "ViT-G/14": "vit_gigantic14"}
PUBLISHED = {("ViT-L/16", "ImageNet-21k"): 230, ("ViT-L/16", "JFT-300M"): 680, ("ViT-H/14", "JFT-300M"): 2500}
TPU_CORE = 61.5e12  # operations per second of a TPUv3 core in bf16: half of a chip's 123e12
COUNTS = (8, 64, 512, 2048)
GPUS = ("A100", "H100")
BEGIN, END = "<!-- begin: python docs/scale.py -->\n", "<!-- end -->\n"


def main() -> None:
    needs, times, tpus = [], [], []
    for name, model in MODELS.items():
        traces: list[Trace] = []
        for data, (images, classes) in DATA.items():
            config, opened = planned(
                images,
                classes,
                None,
                machine("A100"),
                {"model": model, "recipe": "paper-pretrain", "batch_size": BATCH},
            )
            if not traces:
                tracer = Tracer(opened, gpu=True)
                traces = [tracer(override(config, {"grad_checkpointing": again})) for again in (False, True)]
                needs.append(_need(name, traces))
            total = traces[0].operations * images * config.optim.epochs
            for gpu in GPUS:
                cells = []
                for count in COUNTS:
                    where = machine(devices=f"{count}x{gpu}")
                    how, factor = _fitting(traces, where)
                    seconds = factor * total / (UTILISATION * where.peak["bf16"] * count)
                    cells.append(f"{_long(seconds)}{how}")
                days = total / (UTILISATION * machine(gpu).peak["bf16"]) / 86_400
                times.append(
                    f"| {name} | {data}, {config.optim.epochs:g} epochs | {gpu} | {' | '.join(cells)} | {days:,.0f} |"
                )
            if published := PUBLISHED.get((name, data)):
                share = total / (published * 86_400 * TPU_CORE)
                ours = total / (UTILISATION * machine("A100").peak["bf16"]) / 86_400
                tpus.append(f"| {name} | {data} | {total:.2g} | {published:,} | {share:.0%} | {ours:,.0f} |")
            print(name, data, flush=True)
    counts = " | ".join(map(str, COUNTS))
    text = "\n".join(
        [
            "### Time",
            "",
            f"| model | data | GPU | {counts} | GPU-days |",
            "|---|---|---|" + "---:|" * (len(COUNTS) + 1),
            *times,
            "",
            "### Memory",
            "",
            "| model | parameters | weights | gradients | optimiser | activations of an image | with checkpointing |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *needs,
            "",
            "### Beside the paper",
            "",
            "| model | data | operations | the paper's TPUv3-core-days | implied utilisation | A100-days by `plan` |",
            "|---|---|---:|---:|---:|---:|",
            *tpus,
            "",
        ]
    )
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")


def _long(seconds: float) -> str:
    """A time: 46.6 days, 5.3 h, 31 min."""
    if seconds >= 2 * 86_400:
        return f"{seconds / 86_400:,.1f} days"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def _need(name: str, traces: list[Trace]) -> str:
    plain, again = traces
    parts = (plain.weights, plain.gradients, plain.optimizer)
    each = (plain.activations(33) - plain.activations(1)) / 32, (again.activations(33) - again.activations(1)) / 32
    return f"| {name} | {plain.parameters:,} | {' | '.join(map(size, (*parts, *each)))} |"


def _fitting(traces: list[Trace], where: Machine) -> tuple[str, float]:
    """What makes the batch fit on each device, as a mark, and the factor of its operations."""
    plain, again = traces
    room = USABLE * where.memory
    for mark, shard in (("", False), (" s", True)):
        for passes in (1, 2, 4, 8, 16, 32):
            if BATCH // passes >= where.count and memory_of(plain, BATCH / passes, where.count, shard).total <= room:
                return mark + (f" a{passes}" if passes > 1 else ""), 1.0
    if memory_of(again, BATCH, where.count, True).total <= room:
        return " s c", again.operations / plain.operations
    return " does not fit", 1.0


if __name__ == "__main__":
    main()
