"""Other spellings of model names: those of papers, timm, Hugging Face and the original checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_OWNER = r"(?:[\w.-]+/)?"  # owner of a Hugging Face repository
_TAG = r"(?:[-_.](?:in1k|in21k|in22k|in22k_to_1k|in22ft1k|ms_|fb|goog|augreg|orig|sw_|untrained|npz).*)?"
_SIDE = r"(?:[-_](?P<side>\d{3}))?"


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(_OWNER + text + _SIDE + _TAG, re.IGNORECASE)


_WORDS = {"tiny": "ti", "small": "s", "base": "b", "medium": "m", "large": "l", "huge": "h"}


def _deit3(match: re.Match[str]) -> str:
    return f"deit3_{_WORDS[match['size'].lower()]}{match['patch']}"


def _mixer(match: re.Match[str]) -> str:
    return f"mixer_{match['size']}{match['patch']}"


def _bit(match: re.Match[str]) -> str:
    return f"bit_r{match['depth']}x{match['factor'] or 1}"


def _hybrid(match: re.Match[str]) -> str:
    size = match["size"].lower()
    return f"r{match['depth'] or ''}_vit_{_WORDS.get(size, size)}{match['patch']}"


def _swin(match: re.Match[str]) -> str:
    wide = match.groupdict().get("window") == "12"
    return f"swin_{match['size'][0]}" + ("_w12" if wide else "")


def _swin_v2(match: re.Match[str]) -> str:
    size, window = match["size"][0].lower(), match.groupdict().get("window", "")
    usual = ("", "12") if size == "l" else ("", "8")
    return f"swin_v2_{size}" + ("" if window in usual else f"_w{window}")


def _pvt(match: re.Match[str]) -> str:
    return f"pvt_{_WORDS[match['size'].lower()]}"


def _pvt_v2(match: re.Match[str]) -> str:
    return f"pvt_v2_b{match['size']}" + ("_li" if match["linear"] else "")


def _coatnet(match: re.Match[str]) -> str:
    return f"coatnet_{match['size']}"


_PATTERNS: list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = [
    # deit3_small_patch16_224.fb_in22k_ft_in1k
    (_pattern(r"deit3[-_](?P<size>small|medium|base|large|huge)[-_]patch(?P<patch>14|16)"), _deit3),
    # vit_base_r50_s16_384.orig_in21k, vit_tiny_r_s16_p8_224
    (_pattern(r"vit_(?P<size>tiny|small|base|large)_r(?P<depth>\d*)_s(?P<patch>\d\d)(?:_p8)?"), _hybrid),
    # R50+ViT-B/16, R50+ViT-B_16.npz, R+ViT-Ti/16
    (_pattern(r"r(?P<depth>\d*)\+vit-(?P<size>ti|s|b|l)[/_](?P<patch>\d\d)"), _hybrid),
    # AugReg's R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384.npz
    (
        re.compile(
            r"r(?P<depth>\d*)_(?P<size>ti|s|b|l)_(?P<patch>\d\d)-.*?(?:-res_(?P<side>\d{3}))?(?:\.npz)?", re.IGNORECASE
        ),
        _hybrid,
    ),
    # google/vit-hybrid-base-bit-384
    (_pattern(r"vit-hybrid-(?P<size>base)-bit(?P<depth>)(?P<patch>)"), lambda _: "r50_vit_b16"),
    # resnetv2_50x1_bit.goog_in21k, resnetv2_50x1_bitm, resnetv2_50x1_bit_distilled
    (_pattern(r"resnetv2_(?P<depth>\d+)x(?P<factor>\d)_bitm?(?:_distilled|_teacher)?"), _bit),
    # BiT-M-R50x1, BiT-M R50x1, BiT-L (R152x4), R50x1, google/bit-50
    (_pattern(r"(?:bit[-_](?:[sml][-_ ])?\(?)?r(?P<depth>\d+)x(?P<factor>\d)\)?"), _bit),
    (_pattern(r"bit[-_](?P<depth>50|101)(?P<factor>)"), _bit),
    # Mixer-B/16, mixer_b16_224.goog_in21k, imagenet1k_Mixer-B_16.npz
    (_pattern(r"(?:imagenet\d+k_)?mixer[-_](?P<size>[sblh])[-_/]?(?P<patch>\d\d)"), _mixer),
    # swin_tiny_patch4_window7_224.ms_in1k, microsoft/swin-base-patch4-window12-384-in22k
    (_pattern(r"swin[-_](?P<size>tiny|small|base|large)[-_]patch4[-_]window(?P<window>7|12)"), _swin),
    # Swin-T, swin_t
    (_pattern(r"swin[-_](?P<size>[tsbl])"), _swin),
    # swinv2_tiny_window8_256.ms_in1k, microsoft/swinv2-base-patch4-window12to24-192to384-22kto1k-ft
    (
        re.compile(
            _OWNER
            + r"swinv2[-_](?P<size>tiny|small|base|large)(?:[-_]patch4)?[-_]window(?P<window>\d+(?:to\d+)?)"
            + r"[-_](?:192to)?(?P<side>\d{3})(?:-22k|-22kto1k-ft)?"
            + _TAG,
            re.IGNORECASE,
        ),
        _swin_v2,
    ),
    # SwinV2-T, swin_v2_t
    (_pattern(r"swin[-_]?v2[-_](?P<size>[tsbl])"), _swin_v2),
    # PVT-Tiny, pvt_tiny, Zetatech/pvt-tiny-224
    (_pattern(r"pvt[-_](?P<size>tiny|small|medium|large)"), _pvt),
    # PVTv2-B2-Li, PVT-v2-B0, pvt_v2_b2_li, OpenGVLab/pvt_v2_b0
    (_pattern(r"pvt[-_]?v2[-_]b(?P<size>[0-5])(?P<linear>[-_]li(?:near)?)?"), _pvt_v2),
    # CoAtNet-0, coatnet_0_224; timm's coatnet_0_rw_224 is another network
    (_pattern(r"coatnet[-_](?P<size>[0-5])"), _coatnet),
]


_TRAINED_ON = r"(?:[-_](?:in1k|in21k|in22k|imagenet\d*k?|i1k|i21k|pre|3rdparty))*"
_VIT = re.compile(
    _OWNER
    + r"(?:(?:vit|deit)[-_]?)?(?P<size>nano|tiny|ti|small|s|base|b|large|l|huge|h|gigantic|giant|g)"
    + r"(?P<distilled>[-_]distilled)?[-_/]?(?:patch|p)?(?P<patch>\d{1,2})"
    + _TRAINED_ON
    + r"(?:[-_](?P<img>\d{2,3})(?:px)?)?"
    + _TRAINED_ON
    + r"(?:\..*|-\d+ep.*?(?:-res_(?P<res>\d{2,3}))?(?:\.npz)?)?",  # timm's tag, or the recipe in AugReg's file names
    re.IGNORECASE,
)
_DEIT = re.compile(r"deit_(?:nano|ti|[sblh]|giant|gigantic)\d{1,2}(?:_\d{2,3})?")
_DINOV2 = re.compile(
    _OWNER + r"(?:"
    r"dinov2_(?:vit)?(?P<authors>[sblg])14(?:_reg4?)?"
    r"|dinov2-(?:with-registers-)?(?P<hf>small|base|large|giant)(?:-imagenet1k-1-layer)?"
    r"|vit_(?P<timm>small|base|large|giant)_patch14(?:_reg4)?_dinov2(?:\..*)?)"
)


# vit_base_patch16_clip_224.openai, vit_base_patch16_clip_quickgelu_224.openai, openai/clip-vit-base-patch16
_CLIP = re.compile(
    _OWNER + r"(?:"
    r"vit_(?P<timm>base|large)_patch(?P<timm_patch>32|16|14)_clip(?P<quick>_quickgelu)?_(?P<side>\d{3})(?P<tag>\..*)?"
    r"|clip-vit-(?P<hf>base|large)-patch(?P<hf_patch>32|16|14)(?:-(?P<hf_side>\d{3}))?)"
)


def _clip(match: re.Match[str]) -> tuple[str, dict[str, Any]]:
    """CLIP's image tower. OpenAI's has QuickGELU; timm's have GELU, unless "quickgelu" or their tag says otherwise."""
    size, patch = match["timm"] or match["hf"], match["timm_patch"] or match["hf_patch"]
    quick = match["hf"] or match["quick"] or match["tag"] == ".openai"
    return f"clip_{_WORDS[size]}{patch}", _sized(match["side"] or match["hf_side"]) | ({} if quick else {"act": "gelu"})


def find(name: str) -> tuple[str, dict[str, Any]] | None:
    """The short name that a spelling stands for, with other options it implies; None if it is unknown.

    >>> find("swin_tiny_patch4_window7_224")
    ('swin_t', {'img_size': (224, 224)})
    """
    for pattern, short in _PATTERNS:
        if match := pattern.fullmatch(name):
            return short(match).lower(), _sized(match.groupdict().get("side"))
    if match := _DINOV2.fullmatch(name):
        size = (match["authors"] or match["hf"] or match["timm"])[0]
        registers = 4 if "reg" in name.rpartition("/")[2] else 0
        return f"dinov2_{size}14", {"registers": registers, "pool": "cls_gap" if name.endswith("-1-layer") else "cls"}
    if match := _CLIP.fullmatch(name):
        return _clip(match)
    match = _VIT.fullmatch(name)
    if match and (re.search("vit|deit", name, re.IGNORECASE) or re.match(r"[A-Za-z]+[_/]\d", name)):
        size = "gigantic" if match["size"] == "G" else match["size"].lower()
        size = {"g": "giant"}.get(size) or _WORDS.get(size, size)
        # Elsewhere "distilled" marks a DeiT with a distillation token; our short name implies it.
        family = "deit" if match["distilled"] or _DEIT.fullmatch(name) else "vit"
        return f"{family}_{size}{int(match['patch'])}", _sized(match["img"] or match["res"])
    return None


def _sized(side: str | None) -> dict[str, Any]:
    return {"img_size": (int(side), int(side))} if side else {}
