"""Tokenizers: exact ids, learning, and what does not fit."""

from __future__ import annotations

import hashlib
import itertools
from importlib.resources import files

import numpy as np
import peers
import pytest

from vitrail.errors import UserError
from vitrail.tokenizers import Tokenizer, bpe

CLIP = Tokenizer("clip")
TEXTS = (
    "a photo of a cat",
    "Don't  panic: it's 42°, naïve – “quoted”",
    "&lt;b&gt; über straße 日本語 🙂!!",
    "½ cup, x² & 7 more_things",
)


def test_clips_vocabulary_is_the_published_one():
    content = (files("vitrail.tokenizers") / "bpe_simple_vocab_16e6.txt.gz").read_bytes()
    assert hashlib.sha256(content).hexdigest() == "924691ac288e54409236115652ad4aa250f48203de50a9e4722a6ecd48d6804a"
    assert (CLIP.vocab, CLIP.start, CLIP.end) == (49_408, 49_406, 49_407)


def test_clips_ids():
    assert CLIP.encode(["a photo of a cat"], 9).tolist() == [[49406, 320, 1125, 539, 320, 2368, 49407, 0, 0]]


def test_ids_are_those_of_another_implementation(tmp_path):
    """transformers', with the merges in the form of its files."""
    import json

    names = [*bpe.byte_order(), *(n + bpe.END for n in bpe.byte_order())]
    names += [m.replace(" ", "") for m in bpe.clip_merges()] + ["<|startoftext|>", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(bpe.clip_merges()) + "\n")
    theirs = peers.transformers().CLIPTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS[:1], "it's 42 degrees, x2 & more", "über straße 日本語 🙂!!", "don't stop"):
        assert theirs(text)["input_ids"][1:-1] == CLIP.ids(text), text


def test_ids_are_those_of_open_clip():
    """Its ftfy would also straighten quotation marks."""
    texts = [text for text in TEXTS if "“" not in text] + ["it's 42 degrees", "  a\tb\nc ", "word " * 99]
    assert np.array_equal(CLIP.encode(texts, 77), peers.open_clip().tokenize(texts, 77))


@pytest.mark.parametrize("kind", ["bytes", "bpe", "clip"])
def test_rows_start_end_and_are_cut(kind):
    tokenizer = Tokenizer.learnt(kind, TEXTS * 2)
    rows = tokenizer.encode([TEXTS[0], "", TEXTS[1] * 9], 12)
    assert rows.shape == (3, 12)
    assert (rows[:, 0] == tokenizer.start).all()
    assert (rows.max(axis=1) == tokenizer.end).all()  # the end has the largest id, also of a text that was cut
    assert rows[2, -1] == tokenizer.end
    assert rows[1].tolist() == [tokenizer.start, tokenizer.end] + [0] * 10
    assert rows.max() < tokenizer.vocab
    assert Tokenizer.from_json(tokenizer.to_json()) == tokenizer
    assert np.array_equal(tokenizer.with_data().encode(TEXTS, 40), tokenizer.encode(TEXTS, 40))


def test_bytes_are_the_text():
    assert Tokenizer().ids("Ab  é") == [1 + byte for byte in "ab é".encode()]
    assert Tokenizer().vocab == 259


def test_learnt_merges_are_the_most_frequent_pairs():
    merges = bpe.learn(["low low low lower lowest"], 4)
    # "lo" occurs 5 times; then "low" with and without the end of a word: "lo w</w>" 3 times, "lo w" twice.
    assert merges[:2] == ("l o", "lo w</w>")
    assert bpe.learn(["abc"], 9) == ()  # no pair occurs twice


def test_learnt_merges_match_a_slow_count():
    texts = ["a red bird on a red bird house", "two birds", "reddish birds in red houses"]
    words = [bpe.pieces(word) for text in texts for word in bpe.words(bpe.clean(text))]
    expected = []
    for _ in range(12):
        counts: dict[tuple[str, str], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        if counts[best] < 2:
            break
        expected.append(" ".join(best))
        words = [bpe.merge(word, *best) for word in words]
    assert list(bpe.learn(texts, 12)) == expected


@pytest.mark.parametrize("document", [None, {"kind": "words"}, {"kind": "bpe", "merges": ["ab"]}])
def test_damaged_files_are_refused(document):
    with pytest.raises(UserError, match="tokenizer"):
        Tokenizer.from_json(document)
