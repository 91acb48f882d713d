"""Decoders that stack one kind of attention block, and the MTP head that DeepSeek-V3 introduced.

MiMo, GLM-4.5 and DeepSeek-V3 differ in their blocks; what surrounds the blocks is here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from tllm_wmtp.errors import CheckpointError
from tllm_wmtp.models.fields import Fields
from tllm_wmtp.models.layers.attention import Attend
from tllm_wmtp.models.layers.decoder_block import DecoderBlock
from tllm_wmtp.models.layers.rope import Rope
from tllm_wmtp.models.spec import DraftHead, Target, TargetStates


@dataclass(frozen=True)
class DecoderConfig:
    """The fields of a ``config.json`` that every such decoder has."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    rms_norm_eps: float
    attention_bias: bool
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    num_nextn_predict_layers: int

    @staticmethod
    def common(text: Fields, attention_bias: bool) -> dict[str, Any]:
        """These fields by name; ``attention_bias`` is the family's default.

        Raises:
            CheckpointError: a field is missing or of the wrong kind.
        """
        if text.get("hidden_act", "silu") != "silu":
            text.refuse("hidden_act", "the feed-forward's activation must be 'silu'")
        return {
            "vocab_size": text.whole("vocab_size"),
            "hidden_size": text.whole("hidden_size"),
            "num_hidden_layers": text.whole("num_hidden_layers"),
            "num_attention_heads": text.whole("num_attention_heads"),
            "intermediate_size": text.whole("intermediate_size"),
            "rms_norm_eps": text.number("rms_norm_eps", 1e-6),
            "attention_bias": bool(text.get("attention_bias", attention_bias)),
            "max_position_embeddings": text.whole("max_position_embeddings", least=2),
            "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
            "eos_token_ids": text.token_ids("eos_token_id"),
            "num_nextn_predict_layers": text.whole("num_nextn_predict_layers", 1, least=0),
        }


def check_heads(text: Fields, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """What the attention kernels take for granted."""
    if num_heads % num_kv_heads:
        text.refuse("num_key_value_heads", f"it must divide num_attention_heads {num_heads}")
    if head_dim % 8:
        text.refuse("head_dim", f"heads of {head_dim}: it must be a multiple of 8")


def check_one_head(config: DecoderConfig, content: dict[str, Any]) -> None:
    """Refuses a checkpoint whose MTP heads are none or several."""
    if config.num_nextn_predict_layers != 1:
        raise CheckpointError(
            f"num_nextn_predict_layers {config.num_nextn_predict_layers}",
            "the checkpoint must have one MTP head of one layer",
            "use speculation=None",
        )


class DecoderTarget(Target):
    """Embedding, blocks and a final norm."""

    def __init__(self, config: DecoderConfig, rope: Rope, block: Callable[[int], DecoderBlock]):
        super().__init__()
        self.rope = rope
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(block(index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def prunable(self) -> bool:
        return True

    def run_blocks(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        states: TargetStates,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Output of the last block, before the final norm."""
        x = self.embed_tokens(ids)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, states.attention(index), rows if index == last else None)
        return x

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        states: TargetStates,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.norm(self.run_blocks(ids, positions, states, rows))


class SharedHead(nn.Module):
    """The final norm of a draft head and its projection to the vocabulary."""

    def __init__(self, hidden_size: int, vocab_size: int, eps: float):
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)


class NextNHead(DraftHead):
    """``block(eh_proj([enorm(embedding of token p+1), hnorm(hidden state of row p)]))``, normed.

    The target's hidden state is the one after its final norm, and the head feeds back its own
    normed output (arXiv 2412.19437, section 2.2; TensorRT-LLM and SGLang feed back the same, vLLM
    the output before the norm). Embedding and projection are the head's own where the checkpoint
    has them, else the target's.
    """

    shared: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "embed_tokens.weight": "embed_tokens.weight",
            "shared_head.head.weight": "lm_head.weight",
        }
    )

    #: How the checkpoint calls them, for the error that misses them.
    tensors = (
        "model.layers.{config.num_hidden_layers}.* tensors (.eh_proj.weight, .enorm.weight, ...)"
    )

    def __init__(self, config: DecoderConfig, block: DecoderBlock):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.enorm = nn.RMSNorm(hidden, eps)
        self.hnorm = nn.RMSNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = block
        self.shared_head = SharedHead(hidden, config.vocab_size, eps)

    @staticmethod
    def name_of(config: DecoderConfig, name: str) -> str | None:
        """Our name of ``model.layers.<L>.*``, L the number of the target's layers."""
        match = re.match(r"^model\.layers\.(\d+)\.(.+)$", name)
        if match is None or int(match[1]) < config.num_hidden_layers:
            return None
        if int(match[1]) > config.num_hidden_layers:
            return f"{match[1]}.{match[2]}"  # another head, which check_one_head refuses
        own = ("embed_tokens.", "enorm.", "hnorm.", "eh_proj.", "shared_head.")
        return match[2] if match[2].startswith(own) else f"block.{match[2]}"

    def fuse(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Block input ``[..., H]``."""
        return self.eh_proj(torch.cat((self.enorm(embedding), self.hnorm(hidden)), -1))

    def forward(
        self,
        embedding: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self.block(self.fuse(embedding, hidden), positions, attend, rows)
        return self.shared_head.norm(x)

    def store(
        self, embedding: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.block.store(self.fuse(embedding, hidden), positions)

    def embed(self, target: Target, ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(ids)

    def logits(self, target: Target, output: torch.Tensor) -> torch.Tensor:
        return self.shared_head.head(output)
