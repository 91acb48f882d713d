"""The draft layer's attention backend: the place where TensorRT-LLM hands over q, k and v.

TensorRT-LLM's ``Attention`` module computes projections, norms and RoPE and then calls
``self.attn.forward``; in every layout that call ends in a backend object. This one keeps keys and
values in :class:`~tllm_wmtp.trtllm.kv.DraftRings`, so the draft layer never touches the paged pool.
"""

from __future__ import annotations

from typing import Any

import torch

from tllm_wmtp.errors import ConfigError
from tllm_wmtp.trtllm.kv import DraftRings

#: Arguments of the call that would change what the attention computes.
_UNSUPPORTED = (
    "attention_sinks",
    "relative_attention_bias",
    "attention_mask_data",
    "attention_window_size",
    "softmax_stats_tensor",
    "mrope_rotary_cos_sin",
    "output_sf",
)


class RingAttention:
    """Implements what ``Attention`` calls of a backend; what else is asked of it, the backend in
    whose place it stands answers.

    ``rings`` is None until the executor has said how many requests it runs; by then weights are
    loaded, and no forward comes before.
    """

    has_nvfp4 = False

    def __init__(self, stock: Any, q_size: int, kv_size: int):
        self._stock, self.q_size, self.kv_size = stock, q_size, kv_size
        self.rings: DraftRings | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_stock":  # while it is being copied or unpickled
            raise AttributeError(name)
        return getattr(self._stock, name)

    @staticmethod
    def support_fused_qkv() -> bool:
        return False

    @staticmethod
    def support_fused_rope() -> bool:
        return False

    def update_quant_config(self, *_: Any, **__: Any) -> None:
        """The rings hold what the layer computes; nothing is quantized here."""

    def create_output(self, q: torch.Tensor, **_: Any) -> list[torch.Tensor]:
        return [q.new_empty(q.shape[0], self.q_size)]

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: Any,
        *_: Any,
        forward_args: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        """Attention output ``[rows, q_size]``, in the dtype of q.

        Options come one by one or, in later layouts, as fields of ``forward_args``.
        """
        for name in _UNSUPPORTED:
            value = options.get(name, getattr(forward_args, name, None))
            if value is not None:
                raise ConfigError(
                    f"{name} in the draft layer's attention",
                    "the windowed draft does not have it",
                    "set TRTLLM_WMTP_MODE=off for this model",
                )
        if self.rings is None:
            raise RuntimeError("the draft layer runs before the rings were made")
        if k is None or v is None:
            q, k, v = q.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        out = self.rings.attend(q, k, v)
        given = options.get("output", getattr(forward_args, "output", None))
        if given is None:
            return out
        given[: out.shape[0]].copy_(out)
        return given
