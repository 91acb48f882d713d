"""tokenizer.json, loaded to serve for long."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tllm_wmtp.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Five words, as any tokenizer that splits text into words would find them.
PROBE = "one two, three 4 five"


def load_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer in ``file``.

    The library caches the tokens of up to 10,000 words. Where text is not split into words first, a
    whole prompt is one, and the cache would grow with every prompt and find none of them again: it
    is switched off.

    Raises:
        CheckpointError: the library cannot read it.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{file}: {error}",
            "it must be a tokenizer of the 'tokenizers' library",
            "download the file again, or remove it to work with token ids",
        ) from error
    if not splits_words(tokenizer):
        resize = getattr(tokenizer.model, "_resize_cache", None)  # not every model has a cache
        if resize is not None:
            resize(0)
    return tokenizer


def splits_words(tokenizer: Tokenizer) -> bool:
    """Whether text is split into words, or smaller parts, before these are made tokens."""
    if tokenizer.pre_tokenizer is None:
        return False
    text = PROBE if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(PROBE)
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) >= len(PROBE.split())
