"""Names and signatures of the 1.3 line."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import common

MODEL_CLASS_MAPPING: dict[str, type] = {}


def register_auto_model(name: str):
    def decorator(cls):
        MODEL_CLASS_MAPPING[name] = cls
        return cls

    return decorator


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
        q, k, v, gate = self.gated_qkv(self.qkv_proj(hidden_states))
        q, k, v = self.convert_qkv(*self.apply_rope(q, k, v, position_ids))
        out = self.attn.forward(
            q,
            k,
            v,
            attn_metadata,
            out_scale=None,
            attention_mask=attention_mask,
            attention_window_size=attention_window_size,
            attention_mask_data=attention_mask_data,
            attention_sinks=attention_sinks,
            output=None,
            output_sf=None,
        )
        return self.o_proj(out if gate is None else out * torch.sigmoid(gate))


class Qwen3NextMTP(nn.Module):
    attention: type = Attention

    def __init__(
        self,
        model_config: Any,
        layer_idx: int,
        aux_stream_dict: dict,
        is_separate_draft_engine: bool = False,
    ):
        super().__init__()
        loaded = model_config.extra_attrs["loaded"]
        self.head = loaded.head
        self.block = self.head.layers[0]
        self.self_attn = self.attention(
            hidden_size=loaded.config.hidden_size,
            num_attention_heads=self.block.self_attn.num_heads,
            num_key_value_heads=self.block.self_attn.num_kv_heads,
            max_position_embeddings=4096,
            bias=False,
            pos_embd_params=common.PositionalEmbeddingParams(),
            rope_fusion=False,
            layer_idx=layer_idx,
            config=self.block.self_attn,
            attn_output_gate=True,
        )
        self.shared_head = common.SharedHead(loaded)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        embed_tokens: nn.Module,
        attn_metadata: Any,
        all_rank_num_tokens: list[int] | None = None,
        spec_metadata: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        x = self.head.fuse(embed_tokens(input_ids), hidden_states)
        x = x + self.self_attn(
            position_ids=position_ids,
            hidden_states=self.block.input_layernorm(x),
            attn_metadata=attn_metadata,
        )
        return self.head.norm(x + self.block.mlp(self.block.post_attention_layernorm(x)))


class NemotronHMTP(nn.Module):
    """Its attention is told no positions: there is nothing to rotate."""

    attention: type = Attention

    def __init__(
        self,
        model_config: Any,
        layer_idx: int,
        aux_stream_dict: dict,
        is_separate_draft_engine: bool = False,
        prefix: str = "",
    ):
        super().__init__()
        loaded = model_config.extra_attrs["loaded"]
        self.head = loaded.head
        core = self.head.layers[0].mixer
        self.mixer = self.attention(
            hidden_size=loaded.config.hidden_size,
            num_attention_heads=core.num_heads,
            num_key_value_heads=core.num_kv_heads,
            max_position_embeddings=4096,
            bias=False,
            layer_idx=layer_idx,
            config=core,
        )
        self.shared_head = common.SharedHead(loaded)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        embed_tokens: nn.Module,
        attn_metadata: Any,
        all_rank_num_tokens: list[int] | None = None,
        spec_metadata: Any = None,
        lora_params: dict | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        x = self.head.fuse(embed_tokens(input_ids), hidden_states)
        first, *others = self.head.layers
        x = x + self.mixer(
            position_ids=None, hidden_states=first.norm(x), attn_metadata=attn_metadata
        )
        for layer in others:
            x = layer(x)
        return self.head.layers[-1].final_layernorm(x)


class Glm4MTP(Qwen3NextMTP):
    """Leaves the rotation to the attention kernel."""

    def __init__(
        self,
        model_config: Any,
        layer_idx: int,
        aux_stream_dict: dict,
        is_separate_draft_engine: bool = False,
    ):
        super().__init__(model_config, layer_idx, aux_stream_dict, is_separate_draft_engine)
        self.self_attn.rope_fusion = True


class DeepseekV3MTP(nn.Module):
    def __init__(self, model_config: Any, layer_idx: int, aux_stream_dict: dict):
        super().__init__()
        self.self_attn = common.MLA()
        self.shared_head = common.SharedHead(model_config.extra_attrs["loaded"])

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        embed_tokens: nn.Module,
        attn_metadata: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        raise NotImplementedError("no test runs latent attention")


class Eagle3OneModelSpecMetadata(common.OneModelMetadata):
    pass


class Eagle3OneModelWorker(common.DraftLoop):
    def __init__(
        self,
        spec_config: Any,
        mapping: Any = None,
        model_config: Any = None,
        use_separate_draft_kv_cache: bool = False,
    ):
        super().__init__(spec_config, model_config)

    def sample_and_accept_draft_tokens(
        self, input_ids: Any, logits: Any, attn_metadata: Any, spec_metadata: Any
    ):
        return self.accept(logits, attn_metadata, spec_metadata)

    def _accept(self, ids: Any, logits: Any, metadata: Any, spec: Any) -> Any:
        return self.sample_and_accept_draft_tokens(ids, logits, metadata, spec)

    def forward(
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
        self, spec_config: Any, model_config: Any = None, use_separate_draft_kv_cache: bool = False
    ):
        super().__init__(spec_config, model_config=model_config)


def get_spec_worker(
    spec_config: Any, model_config: Any, mapping: Any, use_separate_draft_kv_cache: bool = False
):
    return MTPEagleWorker(spec_config, model_config, use_separate_draft_kv_cache)


def get_spec_metadata(
    spec_config: Any,
    model_config: Any,
    max_num_requests: int,
    max_num_tokens: int,
    spec_resource_manager: Any = None,
    is_draft_model: bool = False,
):
    return Eagle3OneModelSpecMetadata(
        max_num_requests, spec_config.max_draft_len, spec_resource_manager
    )


def get_spec_resource_manager(model_engine: Any, draft_model_engine: Any = None):
    return getattr(model_engine, "relaxed_acceptance_manager", None)


def causal_model(layer: type, worker: Any) -> type:
    return type(
        "ForCausalLM",
        (common.SpecDecOneEngineForCausalLM,),
        {
            "layer_class": classmethod(lambda cls: layer),
            "get_spec_worker": staticmethod(worker),
            "__module__": "tensorrt_llm._torch.models",
        },
    )


Qwen3NextForCausalLM = causal_model(Qwen3NextMTP, get_spec_worker)
Qwen3_5MoeForCausalLM = causal_model(Qwen3NextMTP, get_spec_worker)
NemotronHForCausalLM = causal_model(NemotronHMTP, get_spec_worker)
Glm4MoeForCausalLM = causal_model(Glm4MTP, get_spec_worker)
DeepseekV3ForCausalLM = causal_model(DeepseekV3MTP, get_spec_worker)
