"""Tokenizers that serve for long."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from tiny_model import add_byte_tokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tllm_wmtp.checkpoint.tokenizer import load_tokenizer, splits_words
from tllm_wmtp.demo import CHECKPOINT

PROMPTS = 2000


class Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def bytes_in_use() -> int:
    """What malloc has given out, in all threads."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("this C library has no mallinfo2 (glibc 2.33 has)")
    mallinfo.restype = Mallinfo
    return int(mallinfo().uordblks)


def test_prompts_leave_nothing_where_text_is_not_split(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(add_byte_tokenizer(tmp_path) / "tokenizer.json")
    tokenizer.encode("warm up " * 20)
    before = bytes_in_use()
    for number in range(PROMPTS):
        tokenizer.encode(f"prompt {number} " * 10)
    assert (bytes_in_use() - before) / PROMPTS < 100


def test_words_of_a_tokenizer_that_splits_are_cached_as_the_library_does() -> None:
    assert splits_words(load_tokenizer(CHECKPOINT / "tokenizer.json"))


@pytest.mark.parametrize(
    ("pre_tokenizer", "splits"),
    [
        (None, False),
        (pre_tokenizers.ByteLevel(use_regex=False), False),
        (pre_tokenizers.Digits(), False),
        (pre_tokenizers.Metaspace(split=False), False),
        (pre_tokenizers.Metaspace(split=True), True),
        (pre_tokenizers.ByteLevel(), True),
        (pre_tokenizers.Whitespace(), True),
    ],
)
def test_what_splits_words_is_told_apart(
    pre_tokenizer: pre_tokenizers.PreTokenizer | None, splits: bool
) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    assert splits_words(tokenizer) == splits
