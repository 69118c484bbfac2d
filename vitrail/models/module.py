"""Any `nn.Module` from images to logits as a `Model`: it trains, evaluates, predicts and exports.

What else the contract offers needs to look inside: a module has no feature vectors, feature maps, attention or stages,
so it cannot be embedded, probed, frozen in part or fine-tuned with layer-wise learning rates. A class derived from
`Model` can. Code is not stored with weights: `vitrail.models.register_module` makes a module known again.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.models.model import Model, ModelConfig
from vitrail.models.position import Grid

FAMILY = "module"
MODULES: dict[str, nn.Module] = {}  # registered, by name


@dataclass(frozen=True)
class ModuleConfig(ModelConfig):
    """A registered module by its name, with the sizes of its input and output. Dropout is its own matter."""

    name: str
    img_size: Grid = (224, 224)
    channels: int = 3
    classes: int = 0
    drop: float = 0.0
    drop_path: float = 0.0

    @property
    def width(self) -> int:
        return 0

    @property
    def grid(self) -> Grid:
        return 1, 1

    @property
    def stride(self) -> int:
        return max(self.img_size)


class ModuleModel(Model):
    """A copy of a registered module, with its weights; `module` is the copy."""

    config: ModuleConfig

    def __init__(self, config: ModuleConfig):
        super().__init__()
        if config.name not in MODULES:
            raise UserError(
                f"The model is a Python module, '{config.name}', which is not stored with its weights. Make it known "
                f"first: vitrail.models.register_module({config.name}(…))."
            )
        self.config = config
        self.module = copy.deepcopy(MODULES[config.name])

    def forward(self, images: Tensor) -> Tensor:
        outputs = self.module(images)
        logits: Tensor = getattr(outputs, "logits", outputs)  # as in transformers
        return logits

    def embed(self, images: Tensor) -> Tensor:  # noqa: ARG002
        raise UserError(f"{self._title} has no feature vectors.{_REMEDY}")

    def features(self, images: Tensor, levels: bool = False) -> Tensor:  # type: ignore[override]  # noqa: ARG002
        raise UserError(f"{self._title} has no feature maps.{_REMEDY}")

    def stages(self) -> list[nn.Module]:
        return [self.module]

    def classifiers(self) -> list[nn.Linear | nn.Conv2d]:
        return []

    @property
    def _title(self) -> str:
        return f"The module '{self.config.name}'"

    def check(self) -> None:
        """Raises UserError unless the module computes logits, (B, K), for images of its size."""
        c = self.config
        shape = 2, c.channels, *c.img_size
        training = self.training
        try:
            with torch.no_grad():
                outputs = self.eval()(torch.zeros(shape, device=next(self.parameters()).device))
        except Exception as error:  # the module's own
            line = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            raise UserError(
                f"{self._title} cannot compute images of shape {shape}: {line}. Set 'img_size' and 'channels' to what "
                "it expects."
            ) from error
        finally:
            self.train(training)
        if not isinstance(outputs, Tensor) or outputs.shape != (2, c.classes):
            got = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise UserError(
                f"{self._title} must return outputs of shape (2, {c.classes}) for this data, but got {got}."
            )


_REMEDY = " Derive it from vitrail.models.Model to add them."


def start_from_module(model: Model, module: nn.Module | None) -> list[str]:
    """Gives a fresh model the weights of the module that it was built for; returns a note on what a module lacks."""
    if isinstance(model, ModuleModel):
        model.check()
        return [
            f"'{model.config.name}' is a plain module, so embed, probes, attention maps, --freeze, --lora-rank, "
            "--layer-decay, --drop and --drop-path do not apply to it."
        ]
    if isinstance(module, Model):
        names = [field.name for field in fields(module.config)]
        ours, theirs = ({name: getattr(m.config, name) for name in names} for m in (model, module))
        if wrong := [f"{name} {theirs[name]} instead of {ours[name]}" for name in names if ours[name] != theirs[name]]:
            raise UserError(f"The model does not fit the data and the settings: it has {', '.join(wrong)}.")
        model.load_state_dict(module.state_dict())
    return []
