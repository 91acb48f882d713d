"""What the layouts share: metadata, a paged pool and its attention, a toy target, the executor.

The target is a causal model without attention: a row's hidden state is a mix of the embeddings of
its token and the two before it. The draft layer is a real MTP head of a tiny checkpoint.
"""

from __future__ import annotations

import enum
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tllm_wmtp.checkpoint.loader import LoadedModel, load_model
from tllm_wmtp.models.layers.rope import Rope

PAGE = 8
CUDA_GRAPH_DUMMY_REQUEST_ID = (1 << 64) - 1
GRAPH_BATCH_SIZES = (1, 2, 4, 8)


class SpeculativeDecodingMode(enum.IntEnum):
    MTP = 1
    MTP_EAGLE_ONE_MODEL = 2
    EAGLE3_ONE_MODEL = 3

    def is_mtp_eagle_one_model(self) -> bool:
        return self is SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL

    def use_one_engine(self) -> bool:
        return True


@dataclass
class MTPDecodingConfig:
    max_draft_len: int = 3
    num_nextn_predict_layers: int = 1
    use_mtp_vanilla: bool = False
    use_dynamic_tree: bool = False
    decoding_type: str = "MTP"

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        mode = SpeculativeDecodingMode
        return mode.MTP if self.use_mtp_vanilla else mode.MTP_EAGLE_ONE_MODEL


@dataclass
class KvCacheConfig:
    enable_block_reuse: bool = True
    free_gpu_memory_fraction: float | None = None
    max_tokens: int | None = None


@dataclass
class CudaGraphConfig:
    enable_padding: bool = False
    max_batch_size: int = 8


@dataclass
class SamplingParams:
    max_tokens: int = 16
    temperature: float | None = None
    top_k: int | None = None
    ignore_eos: bool = True


class PositionalEmbeddingParams:
    """Which rotation; the toy takes it from the checkpoint's own."""


class KVCacheManager:
    """Blocks of ``PAGE`` tokens: keys and values per layer, and which blocks a request has."""

    tokens_per_block = PAGE

    def __init__(self, n_layers: int, n_blocks: int, heads: int, head_dim: int):
        shape = (n_layers, n_blocks, 2, PAGE, heads, head_dim)
        self.pool = torch.full(shape, float("nan"))
        self.free = list(range(n_blocks))[::-1]
        self.blocks: dict[int, list[int]] = {}

    def grow(self, request_id: int, tokens: int) -> list[int]:
        blocks = self.blocks.setdefault(request_id, [])
        while len(blocks) * PAGE < tokens:
            blocks.append(self.free.pop())
        return blocks

    def release(self, request_id: int) -> None:
        for block in self.blocks.pop(request_id, []):
            self.pool[:, block] = float("nan")
            self.free.append(block)


class AttentionMetadata:
    """Lengths on the host and on the device, and the block table."""

    def __init__(self, max_requests: int, max_blocks: int, kv_cache_manager: KVCacheManager | None):
        self.kv_cache_manager = kv_cache_manager
        self._seq_lens = torch.zeros(0, dtype=torch.int32)
        self._seq_lens_cuda = torch.zeros(0, dtype=torch.int32)
        self.kv_lens_cuda = torch.zeros(max_requests, dtype=torch.int32)
        self.kv_cache_block_offsets = torch.zeros(1, max_requests, 2, max_blocks, dtype=torch.int32)
        self.num_contexts = 0
        self.padded_num_tokens = None
        self.use_spec_decoding = True
        self._saved: dict[str, Any] = {}

    @property
    def seq_lens(self) -> torch.Tensor:
        return self._seq_lens

    @property
    def seq_lens_cuda(self) -> torch.Tensor:
        return self._seq_lens_cuda

    @property
    def num_seqs(self) -> int:
        return len(self._seq_lens)

    @property
    def num_tokens(self) -> int:
        return int(self._seq_lens.sum())

    @property
    def num_ctx_tokens(self) -> int:
        return int(self._seq_lens[: self.num_contexts].sum())

    @property
    def has_spec_dec_saved_state(self) -> bool:
        return bool(self._saved)

    def begin(self, lengths: Sequence[int], contexts: int, starts: Sequence[int]) -> None:
        self._seq_lens = torch.tensor(lengths, dtype=torch.int32)
        self._seq_lens_cuda = self._seq_lens.clone()
        self.num_contexts = contexts
        ends = torch.tensor(starts, dtype=torch.int32) + self._seq_lens
        self.kv_lens_cuda[: len(lengths)] = ends

    def prepare_for_spec_dec(self, *names: str) -> None:
        assert not self._saved
        self._saved = {name: getattr(self, name).clone() for name in names}
        self._saved["num_contexts"] = self.num_contexts

    def restore_from_spec_dec(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, value)
        self._saved = {}

    def on_update(self) -> None:
        pass

    def update_for_spec_dec(self) -> None:
        pass


@dataclass(kw_only=True)
class AttentionForwardArgs:
    output: torch.Tensor | None = None
    output_sf: torch.Tensor | None = None
    attention_mask: Any = None
    attention_window_size: int | None = None
    attention_mask_data: torch.Tensor | None = None
    attention_sinks: torch.Tensor | None = None


class StockBackend:
    """Full attention over the paged pool, one request at a time."""

    def __init__(
        self, layer_idx: int, num_heads: int, head_dim: int, num_kv_heads: int, scale: float
    ):
        self.layer_idx, self.scale = layer_idx, scale
        self.sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        self.head_dim = head_dim

    @staticmethod
    def support_fused_qkv() -> bool:
        return True

    @staticmethod
    def support_fused_rope() -> bool:
        return True

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        metadata: AttentionMetadata,
        forward_args: AttentionForwardArgs | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        assert k is None
        assert v is None
        queries, keys, values = (
            part.unflatten(-1, (-1, self.head_dim)) for part in q.split(self.sizes, dim=-1)
        )
        manager = metadata.kv_cache_manager
        assert manager is not None
        outs, row = [], 0
        for request, count in enumerate(metadata.seq_lens.tolist()):
            some = slice(row, row + count)
            row += count
            end = int(metadata.kv_lens_cuda[request])
            blocks = metadata.kv_cache_block_offsets[0, request, 0].long()
            at = torch.arange(end)
            places = blocks[at // PAGE], at % PAGE
            pool = manager.pool[self.layer_idx]
            new = places[0][end - count :], places[1][end - count :]
            pool[new[0], 0, new[1]] = keys[some]
            pool[new[0], 1, new[1]] = values[some]
            seen_k, seen_v = pool[places[0], 0, places[1]], pool[places[0], 1, places[1]]
            group = queries.shape[1] // keys.shape[1]
            scores = torch.einsum("nhd,shd->hns", queries[some], seen_k.repeat_interleave(group, 1))
            mask = at[None, :] > torch.arange(end - count, end)[:, None]
            weights = (scores * self.scale).masked_fill(mask, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hns,shd->nhd", weights, seen_v.repeat_interleave(group, 1)))
        return torch.cat(outs).flatten(1)


class AttentionBase(nn.Module):
    """Projection, norms, rotation, backend, gate; the layouts add the call of the backend."""

    def __init__(
        self,
        core: nn.Module,
        layer_idx: int,
        hidden_size: int,
        pos_embd_params: PositionalEmbeddingParams | None,
        rope_fusion: bool | None,
        attn_output_gate: bool,
        q_scaling: float,
        attention_chunk_size: int | None,
    ):
        super().__init__()
        self.layer_idx, self.hidden_size = layer_idx, hidden_size
        self.num_heads, self.num_key_value_heads = core.num_heads, core.num_kv_heads
        self.head_dim, self.q_scaling = core.head_dim, q_scaling
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_key_value_heads * self.head_dim
        self.pos_embd_params, self.attn_output_gate = pos_embd_params, attn_output_gate
        self.attention_chunk_size = attention_chunk_size
        self.rope_fusion = StockBackend.support_fused_rope() if rope_fusion is None else rope_fusion
        weights = [core.q_proj.weight, core.k_proj.weight, core.v_proj.weight]
        self.qkv_proj = nn.Linear(hidden_size, sum(len(one) for one in weights), bias=False)
        self.qkv_proj.weight = nn.Parameter(torch.cat([one.detach() for one in weights]))
        self.o_proj = core.o_proj
        self._core = (core,)
        scale = 1 / (self.head_dim**0.5 * q_scaling)
        self.attn: Any = StockBackend(
            layer_idx, self.num_heads, self.head_dim, self.num_key_value_heads, scale
        )
        self.support_fused_qkv = self.attn.support_fused_qkv()

    def split_qkv(self, q: Any, k: Any = None, v: Any = None) -> tuple[Any, Any, Any]:
        if k is None and v is None:
            q, k, v = q.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        return q, k, v

    def convert_qkv(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        if k is None and not self.support_fused_qkv:
            return self.split_qkv(q)
        if k is not None and self.support_fused_qkv:
            return torch.cat([q, k, v], dim=-1), None, None
        return q, k, v

    def gated_qkv(self, qkv: torch.Tensor) -> tuple[Any, Any, Any, Any]:
        if not self.attn_output_gate:
            return qkv, None, None, None
        both, k, v = qkv.split([2 * self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, gate = both.unflatten(-1, (self.num_heads, -1)).chunk(2, dim=-1)
        return q.flatten(-2), k, v, gate.flatten(-2)

    def apply_rope(self, q: Any, k: Any, v: Any, position_ids: Any) -> tuple[Any, Any, Any]:
        if self.pos_embd_params is None:
            return q, k, v
        core = self._core[0]
        while position_ids.dim() > 1:
            position_ids = position_ids[0]
        table = core._rope[0].table(position_ids, q.dtype)
        heads = (-1, self.head_dim)
        q = Rope.rotate(core.q_norm(q.unflatten(-1, heads)), table).flatten(-2)
        k = Rope.rotate(core.k_norm(k.unflatten(-1, heads)), table).flatten(-2)
        return q, k, v


class SharedHead(nn.Module):
    def __init__(self, loaded: LoadedModel):
        super().__init__()
        self._loaded = loaded

    def forward(
        self,
        hidden_states: torch.Tensor,
        lm_head: nn.Module,
        attn_metadata: AttentionMetadata,
        return_context_logits: bool = False,
    ) -> torch.Tensor:
        return self._loaded.head.logits(self._loaded.target, hidden_states)


class MLA(nn.Module):
    """Latent attention: another class than ``Attention``."""


class PretrainedModel(nn.Module):
    """The toy target."""

    def __init__(self, loaded: LoadedModel):
        super().__init__()
        self.embed_tokens = loaded.target.embed_tokens
        self._tokens: dict[int, dict[int, int]] = {}
        self.aux_stream_dict: dict[Any, Any] = {}

    def forward(self, request_ids: list[int], ids: Any, positions: Any, counts: Any) -> Any:
        rows, row = [], 0
        for request, count in zip(request_ids, counts, strict=True):
            known = self._tokens.setdefault(request, {})
            for at in range(row, row + count):
                position = int(positions[at])
                known[position] = int(ids[at])
                rows.append([known.get(position - back, 0) for back in range(3)])
            row += count
        mix = self.embed_tokens(torch.tensor(rows))
        mixed = mix[:, 0] + 0.7 * mix[:, 1] - 0.4 * mix[:, 2]
        return mixed / mixed.pow(2).mean(-1, keepdim=True).sqrt()


class MTPForCausalLM(nn.Module):
    def __init__(
        self, model_config: Any, start_layer_idx: int = 0, lm_head: Any = None, model: Any = None
    ):
        super().__init__()
        layer = model_config.extra_attrs["mtp_layer"]
        self.mtp_layers = nn.ModuleList([layer(model_config, start_layer_idx, {})])
        self.lm_head, self.embed_tokens = lm_head, model.embed_tokens


class SpecDecOneEngineForCausalLM(nn.Module):
    """Verify, then the worker."""

    layer_name = ""
    get_spec_worker: Any = None

    def __init__(self, model_config: Any):
        super().__init__()
        loaded = model_config.extra_attrs["loaded"]
        self.model_config, self.config = model_config, model_config.pretrained_config
        self.model, self.lm_head = PretrainedModel(loaded), loaded.target.lm_head
        self.spec_config = model_config.spec_config
        self.draft_model = self.spec_worker = None
        if self.spec_config is not None:
            model_config.extra_attrs["mtp_layer"] = type(self).layer_class()
            self.draft_model = MTPForCausalLM(model_config, 1, self.lm_head, self.model)
            self.spec_worker = type(self).get_spec_worker(
                self.spec_config, model_config, model_config.mapping
            )

    @classmethod
    def layer_class(cls) -> Any:
        raise NotImplementedError

    def forward(
        self,
        attn_metadata: AttentionMetadata,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        spec_metadata: Any = None,
        resource_manager: Any = None,
    ) -> dict[str, torch.Tensor]:
        positions = position_ids.reshape(-1)[: input_ids.shape[0]]
        hidden = self.model(
            spec_metadata.request_ids, input_ids, positions, attn_metadata.seq_lens.tolist()
        )
        logits = self.lm_head(hidden[spec_metadata.gather_ids])
        return self.spec_worker(
            input_ids=input_ids,
            position_ids=position_ids,
            hidden_states=hidden,
            logits=logits,
            attn_metadata=attn_metadata,
            spec_metadata=spec_metadata,
            draft_model=self.draft_model,
            resource_manager=resource_manager,
        )


def model_class(architecture: str) -> Any:
    """The registered class: late releases import their zoo when a model is looked up."""
    importlib.import_module("tensorrt_llm._torch.models")
    registry = importlib.import_module("tensorrt_llm._torch.models.modeling_utils")
    look_up = getattr(registry, "get_registered_model_class", registry.MODEL_CLASS_MAPPING.get)
    return look_up(architecture)


class MultimodalWrapper(nn.Module):
    """A model of images and text: the text model is looked up by its own architecture."""

    inner = ""

    def __init__(self, model_config: Any):
        super().__init__()
        self.llm = model_class(self.inner)(model_config)
        self.model_config, self.config = self.llm.model_config, self.llm.config

    @property
    def model(self) -> nn.Module:
        return self.llm.model

    @property
    def spec_config(self) -> Any:
        return self.llm.spec_config

    @property
    def draft_model(self) -> Any:
        return self.llm.draft_model

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        return self.llm.forward(*args, **kwargs)


class BaseResourceManager(ABC):
    @abstractmethod
    def get_max_resource_count(self) -> int: ...

    @abstractmethod
    def get_needed_resource_to_completion(self, request: Any) -> int: ...

    def add_dummy_requests(self, request_ids: list[int]) -> None:
        return None

    def prepare_resources(self, scheduled_batch: Any) -> None:
        return None

    def update_resources(self, scheduled_batch: Any) -> None:
        return None

    def free_resources(self, request: Any) -> None:
        return None

    def shutdown(self) -> None:
        return None


@dataclass
class SpecMetadata:
    max_num_requests: int
    max_draft_len: int
    spec_resource_manager: Any = None
    request_ids: list[int] | None = None
    gather_ids: torch.Tensor | None = None
    draft_tokens: torch.Tensor | None = None
    num_generations: int = 0
    runtime_draft_len: int = 0
    all_rank_num_tokens: Any = None
    subseq_all_rank_num_tokens: Any = None
    #: Only here: drafts that the target is made to agree with, per generation request.
    forced_hits: list[int] | None = None
    #: Only in later releases: what follows a chunk that does not end its prompt.
    lookahead: list[int | None] | None = None

    def prepare(self) -> None: ...


@dataclass
class OneModelMetadata(SpecMetadata):
    slot_ids: torch.Tensor = field(default_factory=lambda: torch.zeros(8, dtype=torch.long))

    def prepare(self) -> None:
        if self.spec_resource_manager is None:
            return
        get = self.spec_resource_manager.slot_manager.get_slot
        slots = [get(request) for request in self.request_ids]
        self.slot_ids[: len(slots)] = torch.tensor(slots)


class DraftLoop(nn.Module):
    """Verify and draft, as the plug-in's documentation describes the loop."""

    #: Whether a chunk's last row knows the prompt's next token, or takes what was sampled there.
    looks_ahead = False

    def __init__(self, spec_config: Any, model_config: Any):
        super().__init__()
        self.spec_config, self.model_config = spec_config, model_config

    @property
    def max_draft_len(self) -> int:
        return self.spec_config.max_draft_len

    def accept(self, logits: Any, metadata: Any, spec: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy: how many of the drafts the target would have chosen, and its own next token."""
        contexts, drafts = metadata.num_contexts, spec.runtime_draft_len
        batch = metadata.num_seqs
        choice = logits.argmax(-1).int()
        tokens = torch.zeros(batch, drafts + 1, dtype=torch.int32)
        counts = torch.ones(batch, dtype=torch.int32)
        tokens[:contexts, 0] = choice[:contexts]
        if batch > contexts:
            mine = choice[contexts:].view(-1, drafts + 1)
            proposed = spec.draft_tokens.view(-1, drafts)
            for row, kept in enumerate(spec.forced_hits or ()):
                mine[row, :kept] = proposed[row, :kept]
                if kept < drafts and mine[row, kept] == proposed[row, kept]:
                    mine[row, kept] = (mine[row, kept] + 1) % 97
            hits = (mine[:, :drafts] == proposed).int().cumprod(-1).sum(-1)
            tokens[contexts:], counts[contexts:] = mine, hits.int() + 1
        return tokens, counts

    def first_inputs(
        self, ids: Any, accepted: Any, metadata: Any, lookahead: Any = None
    ) -> torch.Tensor:
        """Every row's following token: the prompt's next, or what was chosen there."""
        contexts = metadata.num_ctx_tokens
        shifted = torch.cat((ids[1:contexts], ids[:1])).int() if contexts else ids[:0].int()
        last = metadata.seq_lens_cuda[: metadata.num_contexts].cumsum(0) - 1
        shifted[last] = accepted[: metadata.num_contexts, 0]
        for row, token in zip(last.tolist(), lookahead or [], strict=False):
            if token is not None:
                shifted[row] = token
        return torch.cat((shifted, accepted[metadata.num_contexts :].flatten()))

    def run(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        logits: torch.Tensor,
        attn_metadata: AttentionMetadata,
        spec_metadata: SpecMetadata,
        draft_model: Any,
        resource_manager: Any = None,
    ) -> dict[str, torch.Tensor]:
        metadata, drafts = attn_metadata, spec_metadata.runtime_draft_len
        batch, contexts = metadata.num_seqs, metadata.num_contexts
        accepted, counts = self._accept(input_ids, logits, metadata, spec_metadata)
        metadata.prepare_for_spec_dec("_seq_lens", "_seq_lens_cuda")
        ends = metadata.seq_lens_cuda.cumsum(0)
        gather = torch.cat(
            (ends[:contexts] - 1, (ends - drafts - 2)[contexts:] + counts[contexts:])
        )
        ahead = spec_metadata.lookahead if self.looks_ahead else None
        ids = self.first_inputs(input_ids, accepted, metadata, ahead)
        positions = position_ids.squeeze(0)
        layer, proposed = draft_model.mtp_layers[0], []
        for step in range(drafts):
            out = layer(
                embed_tokens=draft_model.embed_tokens,
                all_rank_num_tokens=None,
                input_ids=ids,
                position_ids=positions,
                hidden_states=hidden_states,
                attn_metadata=metadata,
                spec_metadata=spec_metadata,
            )
            rows = gather.long() if step == 0 else torch.arange(batch)
            hidden_states, positions = out[rows], positions[..., rows] + 1
            ids = layer.shared_head(hidden_states, draft_model.lm_head, metadata, True).argmax(-1)
            ids = ids.int()
            proposed.append(ids)
            if step == 0:
                metadata._seq_lens = torch.ones(batch, dtype=torch.int32)
                metadata._seq_lens_cuda = metadata._seq_lens.clone()
                metadata.num_contexts = 0
                metadata.kv_lens_cuda[contexts:batch] -= drafts - counts[contexts:]
                metadata.kv_lens_cuda[:contexts] += 1
            else:
                metadata.kv_lens_cuda[:batch] += 1
            metadata.on_update()
        metadata.restore_from_spec_dec()
        return {
            "new_tokens": accepted,
            "new_tokens_lens": counts,
            "next_draft_tokens": torch.stack(proposed, 1),
        }

    def _accept(self, ids: Any, logits: Any, metadata: Any, spec: Any) -> Any:
        raise NotImplementedError


@dataclass
class Request:
    request_id: int
    prompt: list[int]
    max_tokens: int
    fed: int = 0
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    steps: int = 0

    @property
    def cached(self) -> int:
        return self.fed if self.fed < len(self.prompt) else len(self.prompt) + len(self.output) - 1


class Executor:
    """Continuous batching: contexts in chunks first, then generations, padded for graphs."""

    def __init__(self, engine: Any, spec_resource_manager: Any, get_spec_metadata: Any):
        self.engine, self.model = engine, engine.model
        self.manager = spec_resource_manager
        self.drafts = engine.spec_config.max_draft_len
        self.hits: Any = None
        self.metadata = get_spec_metadata(
            engine.spec_config, engine.model.config, engine.batch_size, 4096, spec_resource_manager
        )
        shape = engine.model.model_config.extra_attrs["loaded"].config.caches.draft
        self.kv = KVCacheManager(2, 4096, shape.num_kv_heads, shape.head_dim)
        self.attention = AttentionMetadata(engine.batch_size, 256, self.kv)

    @torch.inference_mode()
    def run(self, requests: list[Request]) -> Iterator[tuple[list[Request], dict[str, Any]]]:
        waiting, running = list(requests), []
        while waiting or running:
            while waiting and len(running) < self.engine.batch_size:
                running.append(waiting.pop(0))
            contexts = [one for one in running if one.fed < len(one.prompt)]
            batch = contexts + [one for one in running if one not in contexts]
            yield batch, self.step(batch, len(contexts))
            for one in [one for one in running if len(one.output) >= one.max_tokens]:
                del one.output[one.max_tokens :]
                running.remove(one)
                self.kv.release(one.request_id)
                self.model.model._tokens.pop(one.request_id, None)
                if self.manager is not None:
                    self.manager.free_resources(one)

    def step(self, batch: list[Request], contexts: int) -> dict[str, Any]:
        drafts, chunk = self.drafts, self.engine.chunk
        rows, lengths, starts = [], [], []
        for one in batch[:contexts]:
            rows += one.prompt[one.fed : one.fed + chunk]
            lengths.append(min(chunk, len(one.prompt) - one.fed))
            starts.append(one.fed)
        for one in batch[contexts:]:
            rows += [one.output[-1], *one.drafts]
            lengths.append(drafts + 1)
            starts.append(one.cached)
        ids = [one.request_id for one in batch]
        if not contexts and self.engine.padding:
            size = next(size for size in GRAPH_BATCH_SIZES if size >= len(batch))
            for _ in range(size - len(batch)):
                rows += [0] * (drafts + 1)
                lengths.append(drafts + 1)
                starts.append(1)
                ids.append(CUDA_GRAPH_DUMMY_REQUEST_ID)
        if self.manager is not None:
            self.manager.prepare_resources(
                SimpleNamespace(
                    context_requests=batch[:contexts], generation_requests=batch[contexts:]
                )
            )
        self.attention.begin(lengths, contexts, starts)
        for row, (request, length, start) in enumerate(zip(ids, lengths, starts, strict=True)):
            blocks = self.kv.grow(request, start + length + 2 * drafts)
            self.attention.kv_cache_block_offsets[0, row, :, : len(blocks)] = torch.tensor(blocks)
        positions = torch.cat(
            [
                torch.arange(s, s + n, dtype=torch.int32)
                for s, n in zip(starts, lengths, strict=True)
            ]
        )
        ends = torch.tensor(lengths).cumsum(0)
        first = [
            ends[:contexts] - 1,
            torch.arange(int(ends[contexts - 1]) if contexts else 0, len(rows)),
        ]
        spec = self.metadata
        spec.request_ids, spec.num_generations = ids, len(ids) - contexts
        spec.gather_ids, spec.runtime_draft_len = torch.cat(first), drafts
        padding = [[0] * drafts] * (len(ids) - len(batch))
        proposed = [one.drafts for one in batch[contexts:]] + padding
        spec.draft_tokens = torch.tensor(proposed, dtype=torch.int32).flatten()
        following = [one.fed + n for one, n in zip(batch[:contexts], lengths, strict=False)]
        spec.lookahead = [
            one.prompt[at] if at < len(one.prompt) else None
            for one, at in zip(batch[:contexts], following, strict=True)
        ]
        spec.forced_hits = None
        if self.hits is not None:
            mine = [self.hits(one) for one in batch[contexts:]]
            spec.forced_hits = mine + [0] * len(padding)
        spec.prepare()
        axes = positions.expand(3, 1, -1) if self.engine.mrope else positions[None]
        result = self.model(self.attention, torch.tensor(rows), axes, spec_metadata=spec)
        for row, one in enumerate(batch):
            count = int(result["new_tokens_lens"][row])
            if row < contexts:
                one.fed += lengths[row]
                if one.fed < len(one.prompt):
                    continue
            else:
                one.steps += 1
            one.output += result["new_tokens"][row, :count].tolist()
            one.drafts = result["next_draft_tokens"][row].tolist()
        return result | {"lengths": lengths, "contexts": contexts}


def model_config(path: str | Path, spec_config: Any, layer: str = "") -> Any:
    loaded = load_model(path, with_head=True)
    text = json.loads((Path(path) / "config.json").read_text())
    return SimpleNamespace(
        pretrained_config=SimpleNamespace(**text),
        spec_config=spec_config,
        mapping=SimpleNamespace(tp_size=1, pp_size=1, cp_size=1, enable_attention_dp=False),
        extra_attrs={"loaded": loaded},
    )


def engine_of(
    model: Any,
    batch_size: int,
    chunk: int = 16,
    padding: bool = True,
    mrope: bool = False,
    **args: Any,
) -> Any:
    defaults = {"max_beam_width": 1, "cache_transceiver_config": None}
    return SimpleNamespace(
        model=model,
        spec_config=model.spec_config,
        batch_size=batch_size,
        max_seq_len=1024,
        max_num_tokens=4096,
        chunk=chunk,
        padding=padding,
        mrope=mrope,
        llm_args=SimpleNamespace(**(defaults | args)),
    )
