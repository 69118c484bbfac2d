"""Dense heads: exact counts, every offered pair of backbone and head, parity with transformers, and loading."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import TINY
from peers import transformers

from vitrail.errors import UserError
from vitrail.models import build
from vitrail.models.dense import Dense, DenseConfig, with_head
from vitrail.models.heads import HEADS
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Masks

BODIES = TINY | {"vit": ViTConfig(16, 2, 2, 32, 4, (16, 8), 1, 3)}
WIDTHS = (192, 384, 768, 1024)
COUNTS = {  # with 150 classes
    "linear": (28_950, 57_750, 115_350, 153_750),
    "setr-naive": (88_598, 138_134, 237_206, 303_254),
    "setr-pup": (2_252_822, 2_695_574, 3_581_078, 4_171_414),
    "setr-mla": (4_410_006, 4_608_150, 5_004_438, 5_268_630),
    "mask": (1_029_996, 4_050_348, 16_063_020, 28_495_148),
}
AUXILIARY = {"setr-naive": 3 * 369_302, "setr-pup": 3 * 2_990_742, "setr-mla": 154_200}  # at width 1024


@pytest.mark.parametrize("name", COUNTS)
def test_heads_have_the_published_number_of_parameters(name):
    for width, expected in zip(WIDTHS, COUNTS[name], strict=True):
        with torch.device("meta"):
            head = HEADS[name](ViTConfig(width, 12, width // 64, 4 * width, 16, classes=0), 150)
        counts = {part: p.numel() for part, p in head.named_parameters()}
        extra = sum(count for part, count in counts.items() if part.startswith("auxiliary"))
        assert sum(counts.values()) - extra == expected
    assert extra == AUXILIARY.get(name, 0)


@pytest.mark.parametrize(
    ("head", "depth", "blocks"),
    [
        ("setr-naive", 24, [9, 14, 19, 23]),
        ("setr-pup", 24, [9, 14, 19, 23]),
        ("setr-mla", 24, [5, 11, 17, 23]),
        ("setr-naive", 12, [4, 6, 9, 11]),
        ("setr-naive", 2, [0, 1]),
    ],
)
def test_the_heads_of_setr_read_the_blocks_of_mmsegmentation(head, depth, blocks):
    """Counted from 0, as in its configurations of ViT-L; the last is read after the final norm."""
    model = build(DenseConfig.of(ViTConfig(16, depth, 2, 32, 4, (16, 8), 3, 0), Masks.heads, 3, head=head)).eval()
    seen: list[torch.Tensor] = []
    for block in model.backbone.blocks:
        block.register_forward_hook(lambda _, __, output: seen.append(output[:, 1:].transpose(1, 2).flatten(2)))
    with torch.no_grad():
        *early, _ = model.head.read(model.backbone, torch.randn(1, 3, 16, 8))
    found = [next(i for i, tokens in enumerate(seen) if torch.equal(tokens, level.flatten(2))) for level in early]
    assert [*found, depth - 1] == blocks


@pytest.mark.parametrize("head", Masks.heads)
@pytest.mark.parametrize("family", BODIES)
def test_every_pair_of_backbone_and_head_learns_or_says_why_not(family, head):
    body = replace(BODIES[family], channels=3)
    if HEADS[head].misfit(replace(body, classes=0)):
        with pytest.raises(UserError, match=f"The head {head} needs .* Use --head mlp"):
            DenseConfig.of(body, Masks.heads, 3, head=head)
        return
    torch.manual_seed(0)
    config = DenseConfig.of(body, Masks.heads, 3, head=head)
    model = build(config)
    images = torch.randn(2, 3, *config.img_size)
    outputs = model.heads(images)
    assert all(each.shape[:2] == (2, 3) and each.ndim == 4 for each in outputs)
    assert model.eval()(images).shape == outputs[0].shape
    sum(each.square().mean() for each in outputs).backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert all("pool" in name or "head.norm" in name or "cls" in name for name in unused), unused
    owned = [p for stage in model.stages() for p in stage.parameters()]
    assert len(owned) == len({id(p) for p in owned}) == len(list(model.parameters()))
    assert DenseConfig.from_plain(config.to_plain()) == config


def test_the_mask_transformer_cannot_learn_two_classes():
    """A LayerNorm over two logits is a step function: away from zero it has no gradient."""
    with pytest.raises(UserError, match=r"The head mask needs at least three classes, not 2: .* Use --head linear"):
        with_head(BODIES["vit"], Masks.heads, 2, {"head": "mask"})
    for classes, slope in ((2, 0.01), (3, 1.0)):
        norm = HEADS["mask"](BODIES["vit"], classes).mask_norm
        logits = torch.tensor([0.3, -0.1, 0.2])[:classes].requires_grad_()
        norm(logits)[0].backward()
        assert (logits.grad.abs().max() < slope) == (classes == 2)


def test_a_pyramid_gets_the_mlp_head_and_a_vit_the_linear_one():
    assert {f: DenseConfig.of(BODIES[f], Masks.heads, 2).head for f in ("vit", "swin")} == {
        "vit": "linear",
        "swin": "mlp",
    }


def test_the_mlp_head_is_segformers():
    library = transformers()
    widths = (8, 16, 24, 32)
    config = library.SegformerConfig(hidden_sizes=widths, decoder_hidden_size=256, num_labels=5)
    torch.manual_seed(0)
    theirs = library.models.segformer.modeling_segformer.SegformerDecodeHead(config).eval()
    ours = HEADS["mlp"](BODIES["swin"], 5)
    ours.linear_c = torch.nn.ModuleList(type(ours.linear_c[0])(width, 256) for width in widths)
    ours.linear_fuse = torch.nn.Conv2d(4 * 256, 256, 1, bias=False)
    state = {name.replace("linear_projections", "linear_c"): value for name, value in theirs.state_dict().items()}
    ours.load_state_dict(state)
    maps = [torch.randn(2, width, 16 >> i, 16 >> i) for i, width in enumerate(widths)]
    with torch.no_grad():
        expected = theirs(maps)
        assert torch.allclose(ours.eval()(maps), expected, atol=1e-5)


def test_a_model_with_a_head_has_one_name_and_one_size():
    model = build(DenseConfig.of(BODIES["vit"], Masks.heads, 2))
    assert isinstance(model, Dense)
    bigger = replace(model.config, img_size=tuple(2 * side for side in model.config.img_size))
    assert bigger.body.img_size == bigger.img_size
    with pytest.raises(UserError, match="There is no dense head 'unet'"):
        DenseConfig.of(BODIES["vit"], Masks.heads, 2, head="unet")
