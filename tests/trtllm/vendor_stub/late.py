"""Names and signatures of what followed the 1.3 line; what has not moved is that line's."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import Any

import torch

from . import common, early
from .common import AttentionForwardArgs

MODEL_CLASS_MAPPING: dict[str, type] = {}


def register_auto_model(name: str):
    def decorator(cls):
        builtin = cls.__module__.startswith("tensorrt_llm")
        kept = MODEL_CLASS_MAPPING.get(name)
        if builtin and kept is not None and not kept.__module__.startswith("tensorrt_llm"):
            return cls
        MODEL_CLASS_MAPPING[name] = cls
        return cls

    return decorator


#: The module of the zoo that registers an architecture; it is imported when that is looked up.
ZOO = {
    "Qwen3NextForCausalLM": "modeling_qwen3_next",
    "Qwen3_5MoeForCausalLM": "modeling_qwen3_5",
    "Qwen3_5MoeForConditionalGeneration": "modeling_qwen3_5",
    "NemotronHForCausalLM": "modeling_nemotron_h",
    "Glm4MoeForCausalLM": "modeling_glm",
    "DeepseekV3ForCausalLM": "modeling_deepseekv3",
}
_EXTERNAL_ARCH_TO_MODULE: dict[str, str] = {}


def export_external_model_modules() -> dict[str, str]:
    """What a driver tells its workers: modules by name, no classes."""
    classes = MODEL_CLASS_MAPPING.items()
    external = {
        arch: cls.__module__
        for arch, cls in classes
        if not cls.__module__.startswith("tensorrt_llm")
    }
    return _EXTERNAL_ARCH_TO_MODULE | external


def register_external_model_modules(arch_to_module: dict[str, str]) -> None:
    """In a worker; imports nothing."""
    _EXTERNAL_ARCH_TO_MODULE.update(arch_to_module)


def get_registered_model_class(model_arch: str):
    if model_arch not in MODEL_CLASS_MAPPING:
        ours = f"tensorrt_llm._torch.models.{ZOO.get(model_arch)}"
        importlib.import_module(_EXTERNAL_ARCH_TO_MODULE.get(model_arch, ours))
    return MODEL_CLASS_MAPPING.get(model_arch)


class Attention(common.AttentionBase):
    def __init__(
        self,
        *,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        max_position_embeddings: int,
        bias: bool,
        pos_embd_params: Any = None,
        rope_fusion: bool | None = None,
        layer_idx: int | None = None,
        dtype: Any = None,
        dense_bias: bool | None = None,
        config: Any = None,
        q_scaling: float = 1.0,
        attention_chunk_size: int | None = None,
        disable_deep_gemm: bool = False,
        attn_output_gate: bool | None = None,
        use_custom_cublas_mm: bool = False,
        reduce_output: bool = True,
        mapping_with_cp: Any = None,
        head_dim: int | None = None,
    ):
        super().__init__(
            config,
            layer_idx,
            hidden_size,
            pos_embd_params,
            rope_fusion,
            bool(attn_output_gate),
            q_scaling,
            attention_chunk_size,
        )
        self.sparse_params = self.sparse_attn_hooks = None

    def preprocess_qkv(self, qkv: torch.Tensor, position_ids: torch.Tensor | None):
        q, k, v, gate = self.gated_qkv(qkv)
        return *self.apply_rope(q, k, v, position_ids), gate

    def apply_output_gate(self, attention_output: torch.Tensor, gate: torch.Tensor):
        return attention_output * torch.sigmoid(gate)

    def forward(
        self,
        position_ids: torch.Tensor | None,
        hidden_states: torch.Tensor,
        attn_metadata: Any,
        attention_mask: Any = None,
        mrope_config: dict | None = None,
        all_reduce_params: Any = None,
        lora_params: dict | None = None,
        attention_window_size: int | None = None,
        attention_mask_data: torch.Tensor | None = None,
        attention_sinks: torch.Tensor | None = None,
        relative_attention_bias: torch.Tensor | None = None,
        relative_attention_max_distance: int = 0,
        **kwargs: Any,
    ) -> torch.Tensor:
        q, k, v, gate = self.preprocess_qkv(self.qkv_proj(hidden_states), position_ids)
        q, k, v = self.convert_qkv(q, k, v)
        out = self.attn.forward(
            q,
            k,
            v,
            attn_metadata,
            forward_args=AttentionForwardArgs(
                attention_mask=attention_mask,
                attention_window_size=attention_window_size,
                attention_mask_data=attention_mask_data,
                attention_sinks=attention_sinks,
            ),
        )
        return self.o_proj(out if gate is None else self.apply_output_gate(out, gate))


class Qwen3NextMTP(early.Qwen3NextMTP):
    attention = Attention

    def __init__(self, model_config: Any, layer_idx: int, aux_stream_dict: dict):
        super().__init__(model_config, layer_idx, aux_stream_dict)


class NemotronHMTP(early.NemotronHMTP):
    attention = Attention


class Glm4MTP(early.Glm4MTP):
    attention = Attention


class DeepseekV3MTP(early.DeepseekV3MTP):
    pass


class Eagle3OneModelSpecMetadata(common.OneModelMetadata):
    pass


class SpecWorkerBase(common.DraftLoop, ABC):
    """Subclasses must not override ``forward``."""

    looks_ahead = True

    def __init__(self, use_separate_draft_kv_cache: bool = False, **parts: Any):
        super().__init__(**parts)
        self.use_separate_draft_kv_cache = use_separate_draft_kv_cache

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "forward" in cls.__dict__:
            raise TypeError(f"{cls.__name__} must not override SpecWorkerBase.forward")

    def forward(self, *args: Any, **kwargs: Any):
        return self._forward_impl(*args, **kwargs)

    @abstractmethod
    def _forward_impl(self, *args: Any, **kwargs: Any): ...

    def set_draft_model(self, draft_model: Any) -> None:
        pass


class Eagle3OneModelWorker(SpecWorkerBase):
    def __init__(
        self,
        spec_config: Any,
        mapping: Any = None,
        model_config: Any = None,
        use_separate_draft_kv_cache: bool = False,
    ):
        super().__init__(
            use_separate_draft_kv_cache, spec_config=spec_config, model_config=model_config
        )

    def sample_and_accept_draft_tokens(
        self, input_ids: Any, logits: Any, attn_metadata: Any, spec_metadata: Any
    ):
        return self.accept(logits, attn_metadata, spec_metadata)

    def _accept(self, ids: Any, logits: Any, metadata: Any, spec: Any) -> Any:
        return self.sample_and_accept_draft_tokens(
            input_ids=ids, logits=logits, attn_metadata=metadata, spec_metadata=spec
        )

    def _forward_impl(
        self,
        input_ids,
        position_ids,
        hidden_states,
        logits,
        attn_metadata,
        spec_metadata,
        draft_model,
        resource_manager=None,
    ):
        return self.run(
            input_ids,
            position_ids,
            hidden_states,
            logits,
            attn_metadata,
            spec_metadata,
            draft_model,
            resource_manager,
        )


class MTPEagleWorker(Eagle3OneModelWorker):
    def __init__(
        self,
        spec_config: Any,
        model_config: Any = None,
        use_separate_draft_kv_cache: bool = False,
        *,
        mapping: Any = None,
    ):
        super().__init__(spec_config, mapping, model_config, use_separate_draft_kv_cache)


def get_spec_worker(
    spec_config: Any, model_config: Any, mapping: Any, use_separate_draft_kv_cache: bool = False
):
    return MTPEagleWorker(spec_config, model_config, use_separate_draft_kv_cache, mapping=mapping)


def get_spec_metadata(
    spec_config: Any,
    model_config: Any,
    max_num_requests: int,
    max_num_tokens: int,
    spec_resource_manager: Any = None,
    is_draft_model: bool = False,
    max_seq_len: int = 262144,
    num_seq_slots: int | None = None,
):
    return Eagle3OneModelSpecMetadata(
        max_num_requests, spec_config.max_draft_len, spec_resource_manager
    )


def get_spec_resource_manager(model_engine: Any, draft_model_engine: Any = None):
    return getattr(model_engine, "relaxed_acceptance_manager", None)


Qwen3NextForCausalLM = early.causal_model(Qwen3NextMTP, get_spec_worker)
Qwen3_5MoeForCausalLM = early.causal_model(Qwen3NextMTP, get_spec_worker)
NemotronHForCausalLM = early.causal_model(NemotronHMTP, get_spec_worker)
Glm4MoeForCausalLM = early.causal_model(Glm4MTP, get_spec_worker)
DeepseekV3ForCausalLM = early.causal_model(DeepseekV3MTP, get_spec_worker)
