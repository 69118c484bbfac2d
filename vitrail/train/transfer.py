"""Fine-tuning: the trainable part of trained weights, and LoRA adapters."""

from __future__ import annotations

from vitrail.config import Freeze, TrainConfig, TransferConfig
from vitrail.errors import UserError
from vitrail.models import Model, name_of
from vitrail.models.layers import Attention
from vitrail.models.lora import adapters, add_adapters


def set_learning(model: Model, transfer: TransferConfig) -> None:
    """Freezes stages and adds LoRA adapters."""
    stages, width = model.stages(), model.config.width
    frozen = _frozen(model, transfer.freeze)
    if transfer.lora_rank > width:
        raise UserError(f"'lora_rank' must be at most the model's width, {width}, but it is {transfer.lora_rank}.")
    for stage in stages[: -1 if transfer.lora_rank else frozen]:
        stage.requires_grad_(False)
    if transfer.lora_rank:
        add_adapters(stages[frozen:], transfer.lora_rank, transfer.lora_alpha)
        if not any(isinstance(module, Attention) for module in model.modules()):
            raise UserError(f"--lora-rank needs the attention of a ViT, but the model is a {name_of(model.config)}.")
        if not adapters(model):
            raise UserError(f"--freeze {transfer.freeze} leaves no block for --lora-rank to adapt. Remove one of them.")


def set_mode(model: Model) -> None:
    """Sets trainable stages to training mode and frozen ones to evaluation mode."""
    stages = model.stages()
    learn = [any(p.requires_grad for p in stage.parameters()) for stage in stages]
    model.train(learn[0])  # includes modules in no stage: the dropout before the encoder
    for stage, training in zip(stages, learn, strict=True):
        stage.train(training)


def describe_learning(model: Model, config: TrainConfig, headed: bool = True) -> str:
    """The learning rates of head, if there is one, backbone and adapters, and the number of trainable parameters."""
    optim, transfer = config.optim, config.transfer
    slower = f" times {optim.layer_decay:g} per stage below the head" if optim.layer_decay != 1 else ""
    body = f"body at {optim.lr * optim.body_lr:g}{slower}"
    if transfer.lora_rank:
        rank = f"rank {transfer.lora_rank}, alpha {transfer.lora_alpha:g}"
        where = "" if transfer.freeze is None else f" after block {transfer.freeze}"
        text = f"head and adapters{where} ({rank}) at {optim.lr:g}, all else frozen"
    elif transfer.freeze == "all":
        text = f"head at {optim.lr:g}, all else frozen"
    elif transfer.freeze == "image":
        text = f"text tower and projections at {optim.lr:g}, image tower frozen"
    elif transfer.freeze is None:
        text = f"head at {optim.lr:g}, {body}" if headed else body
    else:
        text = f"head at {optim.lr:g}, {body}, frozen up to block {transfer.freeze}"
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    learning, total = sum(count for count, learns in counts if learns), sum(count for count, _ in counts)
    return f"{text}; {learning:,} of {total:,} parameters are trainable"


def _frozen(model: Model, freeze: Freeze | None) -> int:
    """The number of frozen stages; the first stage is the patch embedding, the last the head."""
    if freeze is None:
        return 0
    if freeze == "all":
        return len(model.stages()) - 1
    if freeze == "image":
        return model.image_stages()
    blocks = len(model.stages()) - 3  # without the patch embedding, the final norm and the head
    if freeze > blocks:
        raise UserError(
            f"'freeze' must be at most the model's {blocks} blocks, but it is {freeze}. To train only the head, use "
            "--freeze all."
        )
    return freeze + 1
