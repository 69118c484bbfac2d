"""Files that are broken, hostile or something else: one clear error, and nothing of them is ever run."""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import struct
import warnings
import zipfile
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from peers import randomise, shown
from privileges import unprivileged
from safetensors.torch import save_file

from vitrail.errors import UserError
from vitrail.models import build
from vitrail.models.vit import ViTConfig
from vitrail.tasks import Multiclass
from vitrail.weights import load, open_card, start_from
from vitrail.weights.formats.vit import FORMATS

CONFIG = ViTConfig(width=16, depth=1, heads=2, mlp=32, patch=4, img_size=(8, 8), classes=3)


@pytest.fixture(scope="module")
def state():
    return randomise(build(CONFIG)).state_dict()


def write(path, state):
    """A good file of the kind that the suffix says."""
    if path.suffix == ".npz":
        np.savez(path, **{name: value.numpy() for name, value in FORMATS["npz"].write(state, CONFIG).items()})
    elif path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=path.suffix != ".bin")  # .bin: the old format
    return path


KINDS = pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".bin", ".npz"])


@KINDS
def test_the_whole_file_is_read(tmp_path, state, suffix):
    assert shown(load(write(tmp_path / f"m{suffix}", state), CONFIG).config) == CONFIG


@KINDS
def test_truncated_files(tmp_path, state, suffix):
    path = write(tmp_path / f"m{suffix}", state)
    content = path.read_bytes()
    for keep in (0, 1, 9, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:keep])
        with pytest.raises(UserError, match=r"m\.\w+ (is|contains|has)"):
            load(path, CONFIG)


@KINDS
def test_changed_bytes(tmp_path, state, suffix):
    """A model or a UserError, whatever the bytes are."""
    path = write(tmp_path / f"m{suffix}", state)
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(60):
        changed = bytearray(content)
        for place in generator.integers(0, min(len(content), 4000), 3):
            changed[place] = generator.integers(256)
        path.write_bytes(changed)
        try:
            load(path, CONFIG)
        except UserError:
            refused += 1
    assert refused > 10


@pytest.mark.parametrize("content", [b"", b"text", b"\x00" * 64, b"PK\x03\x04" + b"\xff" * 60, b"\x80\x02}q\x00."])
@KINDS
def test_other_content(tmp_path, suffix, content):
    path = tmp_path / f"m{suffix}"
    path.write_bytes(content)
    with pytest.raises(UserError):
        load(path, CONFIG)


@pytest.mark.parametrize("shape", [[0, 2**62, 4], [0, 2**64 - 1]])
def test_shapes_that_no_tensor_can_have(tmp_path, shape):
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UserError, match=r"m\.safetensors is corrupt or truncated"):
        load(tmp_path / "m.safetensors", CONFIG)


def test_two_tensors_of_the_same_name(tmp_path):
    entry = '"a": {"dtype": "%s", "shape": [1], "data_offsets": [0, 4]}'
    header = f"{{{entry % 'F32'}, {entry % 'I32'}}}".encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(UserError, match="it has two entries named 'a'"):
        load(tmp_path / "m.safetensors", CONFIG)


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("new", [True, False])
def test_code_in_a_pickle_is_not_run(tmp_path, state, new):
    torch.save({"model": state, "x": Code(tmp_path / "run")}, tmp_path / "m.pth", _use_new_zipfile_serialization=new)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Code(tmp_path / "run")))
    for name in ("m.pth", "plain.pt"):
        with pytest.raises(UserError, match="never loaded because they could run code"):
            load(tmp_path / name, CONFIG)
    assert not (tmp_path / "run").exists()


def test_a_whole_pickled_model_is_refused(tmp_path):
    torch.save(build(CONFIG), tmp_path / "m.pth")
    with pytest.raises(UserError, match="Save only the state dict"):
        load(tmp_path / "m.pth", CONFIG)


def test_code_in_an_npz_is_not_run(tmp_path):
    np.savez(tmp_path / "m.npz", **{"embedding/kernel": np.array([Code(tmp_path / "run")], dtype=object)})
    with pytest.raises(UserError, match=r"m\.npz: embedding/kernel is object, but weights must be floating-point"):
        load(tmp_path / "m.npz")
    assert not (tmp_path / "run").exists()


def test_the_flags_of_a_training_program_do_no_harm(tmp_path, state):
    torch.save({"model": state, "args": argparse.Namespace(lr=0.1), "epoch": 3}, tmp_path / "m.pth")
    assert shown(load(tmp_path / "m.pth", CONFIG).config) == CONFIG


@KINDS
def test_values_that_are_no_numbers(tmp_path, state, suffix):
    broken = {name: value.clone() for name, value in state.items()}
    broken["blocks.0.mlp.fc1.weight"][3, 3] = float("nan")
    with pytest.raises(UserError, match=r"blocks\.0\.mlp\.fc1\.weight has NaN or infinite values"):
        load(write(tmp_path / f"m{suffix}", broken), CONFIG)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16]
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_other_types_of_values(tmp_path, state, dtype, suffix, partial):
    broken = state | {"head.weight": torch.zeros(3, 16).to(dtype)}
    with pytest.raises(UserError, match="but weights must be floating-point"):
        load(write(tmp_path / f"m{suffix}", broken), CONFIG, partial=partial)


def test_tensors_that_are_not_plain(state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch means to drop these
        quantised = torch.quantize_per_tensor(torch.zeros(3, 16), 0.1, 0, torch.qint8)
    for value, word in {
        quantised: "is a quantised tensor",
        torch.zeros(3, 16).to_sparse(): "is a sparse_coo tensor",
        torch.zeros(3, 16, device="meta"): "is on the meta device",
    }.items():
        with pytest.raises(UserError, match=f"head.weight {word}"):
            load(state | {"head.weight": value}, CONFIG)


@pytest.mark.parametrize("name", [3, None, b"x", ("a", "b"), 1.5, ""])
def test_names_that_are_no_words(tmp_path, state, name):
    torch.save(state | {name: torch.zeros(2)}, tmp_path / "m.pth")
    with pytest.raises(UserError, match="unexpected  "):
        load(tmp_path / "m.pth", CONFIG)
    assert load(tmp_path / "m.pth", CONFIG, partial=True).config == CONFIG


def test_wrappings_in_wrappings(state):
    assert shown(load({"model": {"state_dict": {"model": state}}}, CONFIG).config) == CONFIG
    endless = {}
    endless["model"] = endless
    for content in (endless, {"model": [state]}, {"model": {}}, {"model": None}, {}):
        with pytest.raises(UserError, match="contains no named tensors"):
            load(content, CONFIG)


def test_what_is_no_file(tmp_path, state):
    (tmp_path / "folder.pth").mkdir()
    os.mkfifo(tmp_path / "pipe.pth")  # would wait for ever
    (tmp_path / "loop.npz").symlink_to(tmp_path / "loop.npz")
    (tmp_path / "dangling.bin").symlink_to(tmp_path / "nowhere")
    (tmp_path / "endless.safetensors").symlink_to("/dev/zero")
    for name in ("folder.pth", "pipe.pth", "loop.npz", "dangling.bin", "endless.safetensors", "n" * 5000, "nul\0.pth"):
        with pytest.raises(UserError, match=r"is neither a run folder nor|is not a file|cannot be opened"):
            load(tmp_path / name)
    (tmp_path / "link.pth").symlink_to(write(tmp_path / "good.pth", state))
    assert load(tmp_path / "link.pth", CONFIG).config == CONFIG


@KINDS
def test_what_may_not_be_read(tmp_path, state, suffix):
    write(tmp_path / f"m{suffix}", state).chmod(0)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        unprivileged(load, tmp_path / f"m{suffix}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_become_float32(state, dtype):
    model = load({name: value.to(dtype) for name, value in state.items()}, CONFIG)
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())
    assert torch.equal(model.norm.bias, state["norm.bias"].to(dtype).float())


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (16, 8), (2, 2, 2), (1, 1, 16), (1, 1, 1, 1)])
def test_wrong_shapes(state, shape):
    for name in state:
        if state[name].shape != shape and (name, shape) != ("pos_embed", (1, 1, 16)):  # which is a smaller picture's
            with pytest.raises(UserError):
                load(state | {name: torch.zeros(shape)}, CONFIG)
        with suppress(UserError):  # a part of it may do
            load(state | {name: torch.zeros(shape)}, CONFIG, partial=True)
        with suppress(UserError):
            other = build(replace(CONFIG, img_size=(16, 16), channels=1))
            start_from(state | {name: torch.zeros(shape)}, other, Multiclass(("a", "b", "c")), partial=True)
    arrays = FORMATS["npz"].write(state, CONFIG)
    for name in ("embedding/kernel", "Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"):
        with pytest.raises(UserError):
            load(arrays | {name: torch.zeros(shape)}, CONFIG)


def test_missing_tensors(state):
    for name in state:
        with pytest.raises(UserError):
            load({other: value for other, value in state.items() if other != name}, CONFIG)
        with suppress(UserError):
            load({other: value for other, value in state.items() if other != name}, CONFIG, partial=True)


def test_sizes_far_beyond_the_file(tmp_path, state):
    header = b'{"patch_embed.proj.weight":{"dtype":"F32","shape":[1000000,1000000],"data_offsets":[0,4000000000000]}}'
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "long.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + header)
    with zipfile.ZipFile(tmp_path / "packed.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("embedding/kernel.npy", bytes(1 << 27))
    with zipfile.ZipFile(tmp_path / "claims.npz", "w") as file, file.open("embedding/kernel.npy", "w") as stream:
        about = {"descr": "<f4", "fortran_order": False, "shape": (1 << 20, 1 << 20)}
        np.lib.format.write_array_header_1_0(stream, about)
    with zipfile.ZipFile(tmp_path / "packed.pth", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(1 << 27))
    spread = torch.zeros(1).expand(1 << 20, 1 << 20)
    torch.save(state | {"head.weight": spread}, tmp_path / "spread.pth")
    for name in ("m.safetensors", "long.safetensors", "packed.npz", "packed.pth", "claims.npz", "spread.pth"):
        for reading in (load, open_card):
            with pytest.raises(UserError, match=r"corrupt or truncated|would expand to|more than it stores"):
                reading(tmp_path / name)


def test_what_holds_no_model(tmp_path, state):
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"epoch": 3}, tmp_path / "numbers.pth")
    for source, message in {
        tmp_path / "list.pth": "contains a list",
        tmp_path / "numbers.pth": "contains no named tensors",
    }.items():
        with pytest.raises(UserError, match=message):
            load(source)
    with pytest.raises(UserError, match=r"is not a model known from .* or vitrail: it contains conv1"):
        load({"conv1.weight": torch.zeros(3)})
    both = {f"{side}.{name}": value for side in ("student", "teacher") for name, value in state.items()}
    with pytest.raises(UserError, match=r"contains several models: student\., teacher\.\. Give the state dict of one"):
        load(both, CONFIG)


def test_a_config_beside_it_that_says_nonsense(tmp_path, state):
    write(tmp_path / "model.safetensors", state)
    nonsense = (
        {"mean": [math.nan] * 3, "std": [1, 1, 1]},
        {"mean": "x"},
        {"std": [0] * 3, "mean": [0] * 3},
        {"crop_pct": 7},
    )
    wrong = [json.dumps({"pretrained_cfg": {"input_size": [3, 8, 8]} | about}) for about in nonsense]
    for text in wrong:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"mean|std|crop"):
            load(tmp_path, CONFIG)
    for text in ("[]", "{", "[" * 100_000, '{"pretrained_cfg": 3}', '{"pretrained_cfg": {"input_size": "x"}}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json"):
            load(tmp_path, replace(CONFIG))
