"""SETR and Segmenter in mmsegmentation's names, both directions, against modules written from the papers' layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from peers import randomise
from torch import Tensor, nn

import vitrail
from vitrail.errors import UserError
from vitrail.models import build
from vitrail.models.dense import DenseConfig
from vitrail.models.vit import ViTConfig
from vitrail.weights import load

WIDTH, DEPTH, PATCH, SIDE, CLASSES = 64, 4, 4, 16, 5
BODY = ViTConfig(WIDTH, DEPTH, 1, 4 * WIDTH, PATCH, (SIDE, SIDE), 3, 0)


class Layer(nn.Module):
    def __init__(self, heads: int, eps: float):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH, eps), nn.LayerNorm(WIDTH, eps)
        self.attn = nn.Module()
        self.attn.attn = nn.MultiheadAttention(WIDTH, heads, batch_first=True)
        self.ffn = nn.Module()
        inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
        self.ffn.layers = nn.Sequential(inner, nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        x = x + self.attn.attn(y, y, y, need_weights=False)[0]
        return x + self.ffn.layers(self.ln2(x))


class Body(nn.Module):
    def __init__(self, final: bool):
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.projection = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (SIDE // PATCH) ** 2, WIDTH))
        self.layers = nn.ModuleList(Layer(1, 1e-6) for _ in range(DEPTH))
        if final:
            self.ln1 = nn.LayerNorm(WIDTH, 1e-6)
        self.final = final

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.patch_embed.projection(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        maps = []
        for i, layer in enumerate(self.layers):
            x = layer(x)
            y = self.ln1(x) if self.final and i == DEPTH - 1 else x
            maps.append(y[:, 1:].transpose(1, 2).unflatten(2, (SIDE // PATCH, SIDE // PATCH)))
        return maps


class Conv(nn.Module):
    def __init__(self, a: int, b: int, k: int):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(a, b, k, padding=k // 2, bias=False), nn.BatchNorm2d(b)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


def up(x: Tensor, scale: int) -> Tensor:
    return F.interpolate(x, scale_factor=scale, mode="bilinear", align_corners=False)


class Up(nn.Module):
    def __init__(self, convs: int, scale: int, kernel: int):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(WIDTH, 1e-6), scale
        self.up_convs = nn.ModuleList(nn.Sequential(Conv(256 if i else WIDTH, 256, kernel)) for i in range(convs))
        self.conv_seg = nn.Conv2d(256, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])
        for conv in self.up_convs:
            x = up(conv(x), self.scale)
        return self.conv_seg(x)


class Mla(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_convs = nn.ModuleList(nn.Sequential(Conv(256, 128, 3), Conv(128, 128, 3)) for _ in range(4))
        self.conv_seg = nn.Conv2d(512, CLASSES, 1)

    def forward(self, maps: list[Tensor]) -> Tensor:
        return self.conv_seg(torch.cat([up(c(x), 4) for c, x in zip(self.up_convs, maps, strict=True)], 1))


class Neck(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.ModuleList(nn.LayerNorm(WIDTH, 1e-6) for _ in range(4))
        self.mla = nn.Module()
        self.mla.channel_proj = nn.ModuleList(Conv(WIDTH, 256, 1) for _ in range(4))
        self.mla.feat_extract = nn.ModuleList(Conv(256, 256, 3) for _ in range(4))

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        normed = [n(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for n, x in zip(self.norm, maps, strict=True)]
        p2, p3, p4, p5 = (c(x) for c, x in zip(self.mla.channel_proj, normed, strict=True))
        sums = [p5, p5 + p4, p5 + p4 + p3, p5 + p4 + p3 + p2]
        return [c(x) for c, x in zip(self.mla.feat_extract, sums, strict=True)]


class Mask(nn.Module):
    def __init__(self):
        super().__init__()
        self.dec_proj = nn.Linear(WIDTH, WIDTH)
        self.cls_emb = nn.Parameter(torch.zeros(1, CLASSES, WIDTH))
        self.layers = nn.ModuleList(Layer(1, 1e-5) for _ in range(2))
        self.patch_proj, self.classes_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.decoder_norm, self.mask_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        grid = x.shape[2:]
        x = torch.cat([self.dec_proj(x.flatten(2).transpose(1, 2)), self.cls_emb.expand(len(x), -1, -1)], 1)
        for layer in self.layers:
            x = layer(x)
        x = self.decoder_norm(x)
        patches, tokens = self.patch_proj(x[:, :-CLASSES]), self.classes_proj(x[:, -CLASSES:])
        patches, tokens = (y / y.norm(dim=-1, keepdim=True) for y in (patches, tokens))
        return self.mask_norm(patches @ tokens.transpose(1, 2)).transpose(1, 2).unflatten(2, grid)


class Segmentor(nn.Module):
    """mmsegmentation's encoder-decoder: backbone, neck, decode head and auxiliary heads."""

    def __init__(self, head: str):
        super().__init__()
        self.kind = head
        self.backbone = Body(final=not head.startswith("setr"))
        if head == "setr-mla":
            self.neck, self.decode_head = Neck(), Mla()
            self.auxiliary_head = nn.ModuleList(
                nn.ModuleDict({"conv_seg": nn.Conv2d(256, CLASSES, 1)}) for _ in range(4)
            )
        elif head.startswith("setr"):
            how = (1, 4, 1) if head == "setr-naive" else (4, 2, 3)
            self.decode_head = Up(*how)
            self.auxiliary_head = nn.ModuleList(Up(2, 4, how[2]) for _ in range(3))
        elif head == "mask":
            self.decode_head = Mask()
        else:
            self.decode_head = nn.ModuleDict({"conv_seg": nn.Conv2d(WIDTH, CLASSES, 1)})

    def forward(self, images: Tensor) -> Tensor:
        maps = self.backbone(images)
        if self.kind == "setr-mla":
            return self.decode_head(self.neck(maps))
        return self.decode_head["conv_seg"](maps[-1]) if self.kind == "linear" else self.decode_head(maps[-1])


HEADS = ("linear", "mask", "setr-naive", "setr-pup", "setr-mla")


@pytest.mark.parametrize("head", HEADS)
def test_their_weights_load_and_give_their_outputs(head):
    theirs = randomise(Segmentor(head)).eval()
    ours = load(theirs.state_dict(), DenseConfig.of(BODY, (head,), CLASSES))
    images = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, given = theirs(images), ours(images)
    assert given.shape == expected.shape
    assert (given - expected).abs().max() <= 1e-5 * max(expected.abs().max(), 1)
    assert ours.card.task.name == "masks"
    assert ours.card.preprocess.fit == "pad"


@pytest.mark.parametrize("head", HEADS)
def test_our_weights_are_written_for_them(head, tmp_path):
    from vitrail.data.preprocess import Preprocess
    from vitrail.tasks import Masks
    from vitrail.weights import Card, save

    config = DenseConfig.of(BODY, (head,), CLASSES)
    ours = randomise(build(config)).eval()
    task = Masks(tuple("abcde"))
    save(
        tmp_path / "ours.safetensors",
        ours,
        Card(model="vit", config=config, task=task, preprocess=Preprocess((SIDE, SIDE), 3, fit="pad")),
    )
    path = vitrail.convert(tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors", to="mmseg")
    from safetensors.torch import load_file

    state = load_file(path)
    theirs = Segmentor(head)
    theirs.backbone.ln1, theirs.backbone.final = nn.LayerNorm(WIDTH, 1e-6), True  # final_norm=True
    theirs.load_state_dict(state)
    images = torch.randn(1, 3, SIDE, SIDE)
    with torch.no_grad():
        expected = ours(images)
        assert (theirs.eval()(images) - expected).abs().max() <= 1e-5 * max(expected.abs().max(), 1)
        again = load(path)
        assert torch.equal(again(images), ours(images))


def test_what_they_do_not_have_is_refused():
    from vitrail.weights.formats.mmseg import unsupported

    assert unsupported(DenseConfig.of(BODY, ("mlp",), CLASSES)) == "the head mlp"
    state = randomise(Segmentor("linear")).state_dict()
    del state["decode_head.conv_seg.weight"]
    state["decode_head.cls_emb"] = torch.zeros(1, CLASSES, WIDTH)
    with pytest.raises(UserError, match=r"does not match|missing"):
        load(state, DenseConfig.of(BODY, ("mask",), CLASSES))
