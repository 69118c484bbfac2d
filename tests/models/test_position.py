"""Positions: the relative index, and resampling to another grid."""

from __future__ import annotations

import pytest
import torch
from scipy import ndimage
from torch import Tensor

from vitrail.errors import UserError
from vitrail.models.position import RelativeBias, resample, resample_state
from vitrail.models.vit import ViT, ViTConfig

METHODS = pytest.mark.parametrize("method", ["bicubic", "bilinear", "linear"])


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def ramp(h: int, w: int) -> Tensor:
    """The row, the column and a constant at every patch, measured in shares of the image: (h·w, 3)."""
    y, x = (torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w
    return torch.stack([y.repeat_interleave(w), x.repeat(h), torch.ones(h * w)], dim=1)


# Resampling ------------------------------------------------------------------------------------------------


def test_the_same_grid_is_left_alone():
    rows = random(12, 8)
    assert torch.equal(resample(rows, (3, 4), (3, 4)), rows)


@pytest.mark.parametrize("method", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("old", "new"), [((6, 6), (12, 12)), ((6, 8), (9, 20)), ((12, 12), (6, 6))], ids=str)
def test_what_grows_linearly_still_does(old, new, method):
    """Within the image; at its edge the picture ends, and the ramp flattens."""
    grown = resample(ramp(*old), old, new, method).reshape(*new, 3)
    expected = ramp(*new).reshape(*new, 3)
    edge = [2 * max(-(-n // o), 1) for o, n in zip(old, new, strict=True)]
    inner = (slice(edge[0], -edge[0]), slice(edge[1], -edge[1]))
    assert expected[inner].numel()
    assert torch.allclose(grown[inner], expected[inner], atol=1e-5)
    assert torch.allclose(grown[..., 2], torch.ones(new), atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new"), [((6, 6), (12, 12)), ((14, 14), (24, 24)), ((7, 5), (4, 9)), ((3, 4), (1, 5)), ((5, 2), (3, 1))]
)
def test_linear_is_the_zoom_of_the_papers_authors(old, new):
    rows = random(old[0] * old[1], 8)
    zoom = (new[0] / old[0], new[1] / old[1], 1)  # as their checkpoint.py has it
    theirs = ndimage.zoom(rows.reshape(*old, 8).numpy(), zoom, order=1)
    ours = resample(rows, old, new, "linear").reshape(*new, 8)
    assert torch.allclose(ours, torch.from_numpy(theirs), atol=5e-6)


def test_a_method_that_is_not_there_is_named():
    with pytest.raises(UserError, match=r"one of bicubic, .*linear, but it is 'bicubc'"):
        resample_state({}, (2, 2), (2, 2), "bicubc")


@METHODS
def test_rows_and_columns_are_not_confused(method):
    old, new = (2, 5), (4, 5)
    grown = resample(ramp(*old), old, new, method).reshape(*new, 3)
    assert torch.allclose(grown[..., 1], ramp(*old)[:5, 1].expand(4, 5), atol=1e-6)  # columns stay as they were
    assert (grown[..., 0].diff(dim=0) > 0).all()
    assert (grown[..., 0].diff(dim=1).abs() < 1e-6).all()


@METHODS
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((4, 1), (6, 1)),
        ((6, 1), (3, 1)),
        ((4, 3), (6, 1)),
        ((4, 3), (1, 1)),
        ((2, 1), (4, 5)),
        ((3, 4), (6, 5)),
    ],
    ids=str,
)
def test_lying_on_its_side_a_grid_is_resampled_alike(old, new, method):
    """One column too, over all of which torch's antialiased kernel repeats the first value if left alone."""
    rows = random(*old, 8)
    upright = resample(rows.flatten(0, 1), old, new, method).reshape(*new, 8)
    lying = resample(rows.transpose(0, 1).flatten(0, 1), old[::-1], new[::-1], method).reshape(*new[::-1], 8)
    assert torch.allclose(upright, lying.transpose(0, 1), atol=1e-5)
    assert upright.diff(dim=0).any(dim=-1).all()


def test_the_type_is_kept():
    assert resample(random(4, 8).bfloat16(), (2, 2), (3, 3)).dtype == torch.bfloat16


def resized(config: ViTConfig, new: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The state of a model with random positions before and after."""
    state = {name: random(*value.shape) for name, value in ViT(config).state_dict().items()}
    return state, resample_state(state, config.grid, new)


def small(**changes: object) -> ViTConfig:
    return ViTConfig(**{"width": 8, "depth": 2, "heads": 2, "mlp": 16, "patch": 4, "img_size": (12, 16), **changes})


def test_the_class_tokens_row_is_kept():
    before, after = resized(small(pos="learned"), (6, 5))
    assert after["pos_embed"].shape == (1, 1 + 30, 8)
    assert torch.equal(after["pos_embed"][:, :1], before["pos_embed"][:, :1])
    assert torch.equal(after["pos_embed"][0, 1:], resample(before["pos_embed"][0, 1:], (3, 4), (6, 5)))


@pytest.mark.parametrize("changes", [{"pool": "gap"}, {"pool": "gap", "registers": 2}], ids=str)
def test_without_a_class_token_every_row_is_a_patch(changes):
    before, after = resized(small(**changes), (6, 5))
    assert torch.equal(after["pos_embed"][0], resample(before["pos_embed"][0], (3, 4), (6, 5)))


def test_rows_and_columns_are_resampled_apart():
    before, after = resized(small(pos="learned2d"), (6, 4))
    assert torch.equal(after["pos_col"], before["pos_col"])
    assert after["pos_row"].shape == (1, 6, 4)
    # Each row of patches shares its half of the vector, so the grid would have been resampled alike.
    grid = before["pos_row"][0].repeat_interleave(4, dim=0)
    expected = resample(grid, (3, 4), (6, 4)).reshape(6, 4, 4)
    assert torch.allclose(expected, after["pos_row"][0].unsqueeze(1).expand(6, 4, 4), atol=1e-6)


def test_only_positions_are_touched():
    for pos in ("learned", "learned2d", "relative", "sincos2d", "none"):
        before, after = resized(small(pos=pos), (6, 5))
        assert list(after) == list(before)
        for name, value in before.items():
            if not name.startswith("pos_") and not name.endswith("relative.table"):
                assert after[name] is value


@pytest.mark.parametrize("pool", ["cls", "gap"])
@pytest.mark.parametrize("new", [(6, 8), (2, 3), (5, 4)], ids=str)
def test_a_resized_relative_table_keeps_offset_zero_in_its_centre(new, pool):
    """A bias that is odd in the offset stays odd, so nothing is shifted: looking left stays looking left."""
    config = small(pos="relative", pool=pool)
    (h, w), (new_h, new_w) = config.grid, new
    y, x = torch.arange(1 - h, h), torch.arange(1 - w, w)
    offsets = torch.stack([y.repeat_interleave(len(x)), x.repeat(len(y))], dim=1).float()
    prefix_rows = random(3 if pool == "cls" else 0, 2)
    state = {"blocks.0.attn.relative.table": torch.cat([offsets, prefix_rows])}
    after = resample_state(state, config.grid, new)["blocks.0.attn.relative.table"]

    count = (2 * new_h - 1) * (2 * new_w - 1)
    table = after[:count].reshape(2 * new_h - 1, 2 * new_w - 1, 2)
    assert torch.allclose(table, -table.flip(0, 1), atol=1e-5)
    assert torch.allclose(table[new_h - 1, new_w - 1], torch.zeros(2), atol=1e-5)
    assert (table[..., 0].diff(dim=0) > 0).all()
    assert (table[..., 1].diff(dim=1) > 0).all()
    assert torch.equal(after[count:], prefix_rows)


# Relative positions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("grid", [(1, 1), (3, 3), (2, 4)], ids=str)
def test_every_pair_of_tokens_finds_its_row(grid, prefix):
    h, w = grid
    offsets = (2 * h - 1) * (2 * w - 1)
    bias = RelativeBias(grid, heads=2, prefix=prefix)
    index = bias.index()
    length = prefix + h * w
    assert index.shape == (length, length)
    for i in range(length):
        for j in range(length):
            if i < prefix and j < prefix:
                row = offsets + 2
            elif i < prefix:
                row = offsets
            elif j < prefix:
                row = offsets + 1
            else:
                (y, x), (v, u) = divmod(i - prefix, w), divmod(j - prefix, w)
                row = (y - v + h - 1) * (2 * w - 1) + (x - u + w - 1)
            assert index[i, j] == row
    # Every row of the table serves some pair: none is dead.
    assert len(index.unique()) == len(bias.table) == offsets + (3 if prefix else 0)


@torch.no_grad()
def test_the_bias_is_looked_up_per_head():
    bias = RelativeBias((2, 3), heads=2, prefix=1)
    bias.table.copy_(random(*bias.table.shape))
    out, index = bias(), bias.index()
    assert out.shape == (1, 2, 7, 7)
    for head in range(2):
        assert torch.equal(out[0, head], bias.table[:, head][index])


# Absolute positions in the model ---------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("pool", ["cls", "gap"])
@pytest.mark.parametrize("pos", ["learned", "learned2d", "sincos2d", "relative", "none"])
def test_tokens_are_patches_plus_positions(pos, pool):
    config = small(pos=pos, pool=pool, registers=2)
    model = ViT(config).eval()
    for parameter in model.parameters():
        parameter.copy_(random(*parameter.shape))
    x = random(2, 3, *config.img_size)
    tokens, positions = model.tokens(x), model.positions()
    patches = model.patch_embed(x)
    if positions is not None:
        patches = patches + positions[:, -12:]
    assert torch.allclose(tokens[:, config.prefix :], patches)
    if pool == "cls":
        cls = model.cls_token + (model.pos_embed[:, :1] if pos == "learned" else 0.0)
        assert torch.allclose(tokens[:, :1], cls.expand(2, -1, -1))
    assert torch.equal(tokens[:, config.prefix - 2 : config.prefix], model.reg_token.expand(2, -1, -1))


@torch.no_grad()
def test_learned2d_concatenates_the_row_and_the_column():
    model = ViT(small(pos="learned2d"))
    positions = model.positions().reshape(3, 4, 8)
    for y in range(3):
        for x in range(4):
            assert torch.equal(positions[y, x], torch.cat([model.pos_row[0, y], model.pos_col[0, x]]))
