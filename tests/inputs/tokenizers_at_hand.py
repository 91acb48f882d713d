"""Small tokenizers of every common kind, trained on the spot on words of the lexicons."""

from __future__ import annotations

import functools
from itertools import islice

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tllm_wmtp.bench.inputs.chance import Chance
from tllm_wmtp.bench.inputs.lexicon import LEXICONS
from tllm_wmtp.demo.tokenizer import build_tokenizer

NAMES = ("demo", "bytes", "metaspace", "wordpiece", "unsplit")


def _corpus() -> list[str]:
    lines: list[str] = []
    for lexicon in LEXICONS.values():
        for kind in ("repeat", "prose", "random"):
            lines += islice(lexicon.filler(kind, Chance("corpus", kind)), 300)
    lines.append("The code of silver-kettle is 1234567890.\nQuestion: what?\nAnswer:\n")
    return ["".join(lines[start : start + 20]) for start in range(0, len(lines), 20)]


@functools.cache
def tokenizer_called(name: str) -> Tokenizer:
    """One of :data:`NAMES`; ``unsplit`` joins across words, and begins texts with a token."""
    return {
        "demo": build_tokenizer,
        "bytes": _byte_level,
        "metaspace": _metaspace,
        "wordpiece": _word_piece,
        "unsplit": _unsplit,
    }[name]()


def _byte_level() -> Tokenizer:
    """BPE on bytes with GPT-2's pattern."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def _metaspace() -> Tokenizer:
    """A unigram model on text whose spaces are marks, with one put before the text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def _word_piece() -> Tokenizer:
    """BERT's kind, which drops spaces and puts a token before and after each text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return tokenizer


def _unsplit() -> Tokenizer:
    """BPE that sees the whole text as one piece, as Llama 2's does, with a first token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>"], show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator(
        [line for text in _corpus() for line in text.split(". ")], trainer
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer
