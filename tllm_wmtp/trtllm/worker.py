"""The windowed draft inside the executor's draft loop.

TensorRT-LLM's loop stays as it is: verify, accept, then one MTP layer applied ``draft_len`` times.
The layer is called with every row's position and the attention metadata of that call, and that is
all a ring needs, so a hook on the layer takes the place of a worker of our own and no release's
loop is repeated here.

Rows, per request: the first forward has the chunk's rows of a context request and ``draft_len + 1``
of a generation request, of which the accepted ones count; the others hold what the next forwards
overwrite. Every later forward has one row.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from tllm_wmtp.errors import ConfigError
from tllm_wmtp.ring import RingSpec
from tllm_wmtp.trtllm import compat, resources
from tllm_wmtp.trtllm.attention import RingAttention
from tllm_wmtp.trtllm.engine_head import EngineHead, open_engine
from tllm_wmtp.trtllm.kv import DraftRings, HeadShape, first_axis
from tllm_wmtp.trtllm.pages import PageWindow
from tllm_wmtp.trtllm.settings import ENGINE, NATIVE, PAGES, RING, Settings

log = logging.getLogger(__name__)

_OFF = "set TRTLLM_WMTP_MODE=off, or TRTLLM_WMTP_UNSUPPORTED=native to fall back by itself"


def check_layer(layer: Any) -> None:
    """
    Raises:
        ConfigError: the draft layer cannot be called with what the hooks read, by name.
    """
    missing = compat.missing_parameters(type(layer).forward, compat.LAYER_CALL)
    if missing:
        raise ConfigError(
            f"draft layer {type(layer).__name__}",
            f"its forward is called with {', '.join(compat.LAYER_CALL)}; it lacks "
            f"{', '.join(missing)}",
            _OFF,
        )


def named(call: dict[str, Any], name: str) -> Any:
    """An argument of a call of the draft layer.

    Raises:
        ConfigError: it was not given by name.
    """
    if name not in call:
        raise ConfigError(
            f"a call of the draft layer with {', '.join(call) or 'no names'}",
            f"hooks read {name} by its name",
            compat.REMEDY,
        )
    return call[name]


def context_rows(metadata: Any) -> list[int]:
    """Rows of each context request of this call; host lengths, which are those of this batch."""
    return [int(length) for length in metadata.seq_lens[: metadata.num_contexts]]


def device_lengths(metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Length of each request with the rows of this call, and how many these are, on the device.

    Multimodal models have rotary positions on three axes, for text as well; where a prompt has
    images they do not count tokens, and a ring does.

    Raises:
        ConfigError: the metadata has no lengths on the device.
    """
    requests = metadata.num_seqs
    lengths = getattr(metadata, "kv_lens_cuda", None)
    if lengths is None:
        raise ConfigError(
            f"attention metadata {type(metadata).__name__}",
            "rotary positions on several axes do not count tokens, and it has no kv_lens_cuda",
            "use the TRTLLM attention backend",
        )
    return lengths[:requests], metadata.seq_lens_cuda[:requests]


class RingDraft:
    """Mode ``ring``: rings and our kernel in the draft layer."""

    in_graphs = True

    def __init__(
        self,
        layer: nn.Module,
        attention: Any,
        settings: Settings,
        draft_len: int,
        dtype: torch.dtype | None,
    ):
        self.dtype = dtype
        self.spec = RingSpec.for_chain(settings.n_sink, settings.window, draft_len + 1)
        self.heads = head_shape(attention)
        self.attention = attention
        self.backend = RingAttention(attention.attn, attention.q_size, attention.kv_size)
        attention.attn = self.backend
        attention.support_fused_qkv = False
        layer.register_forward_pre_hook(self._before, with_kwargs=True)

    def start(self, max_requests: int) -> None:
        if self.backend.rings is not None and self.backend.rings.max_requests >= max_requests:
            return  # asked again after the memory estimate: graphs may hold these addresses
        weight = next(self.attention.parameters())
        dtype = self.dtype or _activation_dtype(self.attention)
        self.backend.rings = DraftRings(self.spec, self.heads, max_requests, dtype, weight.device)
        log.info(
            "windowed draft: %d rings of %d slots, %.1f MiB",
            self.backend.rings.ring_k.shape[0],
            self.spec.capacity,
            self.backend.rings.nbytes / 2**20,
        )

    @property
    def rings(self) -> DraftRings:
        if self.backend.rings is None:
            raise RuntimeError("the executor has not asked for a resource manager yet")
        return self.backend.rings

    def lane(self, request_id: int) -> int:
        return self.rings.table.acquire(request_id)

    def release(self, request_id: int) -> None:
        self.rings.table.release(request_id)

    def publish(self, request_ids: list[int]) -> None:
        self.rings.publish(request_ids)

    def _before(self, layer: nn.Module, args: Any, call: dict[str, Any]) -> None:
        metadata, positions = named(call, "attn_metadata"), named(call, "position_ids")
        rows = named(call, "input_ids").shape[0]
        lengths = None if positions.numel() == rows else device_lengths(metadata)
        self.rings.aim(
            first_axis(positions, rows), metadata.num_seqs, context_rows(metadata), lengths
        )


class PagesDraft:
    """Mode ``pages``: the stock attention over the first and last pages."""

    in_graphs = True

    def __init__(self, layer: nn.Module, settings: Settings):
        self.settings = settings
        self.window: PageWindow | None = None
        layer.register_forward_pre_hook(self._before, with_kwargs=True)
        layer.register_forward_hook(self._after, always_call=True)

    def start(self, max_requests: int) -> None:
        """Pages belong to the vendor's pool."""

    def lane(self, request_id: int) -> int:
        return 0

    def release(self, request_id: int) -> None:
        """Nothing is held per request."""

    def publish(self, request_ids: list[int]) -> None:
        """The block table says it all."""

    def _before(self, layer: nn.Module, args: Any, call: dict[str, Any]) -> None:
        metadata = named(call, "attn_metadata")
        manager = metadata.kv_cache_manager
        if metadata.num_contexts or manager is None:
            return
        if self.window is None:
            settings = self.settings
            self.window = PageWindow(settings.n_sink, settings.window, manager.tokens_per_block)
        self.window.apply(metadata, metadata.num_seqs)

    def _after(self, *_: Any) -> None:
        if self.window is not None:
            self.window.restore()


def head_shape(attention: Any) -> HeadShape:
    """Heads of this rank, as the layer was built: TensorRT-LLM has divided them already."""
    scale = 1 / (attention.head_dim**0.5 * getattr(attention, "q_scaling", 1.0))
    return HeadShape(attention.num_heads, attention.num_key_value_heads, attention.head_dim, scale)


def attach(model: Any, settings: Settings) -> resources.LaneOwner | None:
    """Gives a built model's draft its window; the model must not have run yet.

    Returns:
        What holds the rings; None where there is nothing to window (no speculation) or the model is
        left as it is.

    Raises:
        ConfigError: the window does not cover this model or its options, and the settings refuse.
    """
    spec_config = getattr(model.model_config, "spec_config", None)
    if spec_config is None or getattr(model, "spec_worker", None) is None:
        return None
    try:
        owner = _owner(model, spec_config, settings)
    except ConfigError as error:
        if settings.unsupported != NATIVE:
            raise
        log.warning("stock MTP, without a window: %s", error)
        return None
    resources.mark(model, owner)
    return owner


def _owner(model: Any, spec_config: Any, settings: Settings) -> resources.LaneOwner:
    check_speculation(spec_config)
    check_mapping(model)
    layer, draft_len = draft_layer(model), spec_config.max_draft_len
    check_layer(layer)
    if settings.mode == ENGINE:
        forward = open_engine(settings, draft_len)
        return EngineHead(layer, model.spec_worker, forward, model.model_config.mapping.tp_size)
    attention = find_attention(layer)
    check_attention(attention)
    if settings.mode == PAGES:
        return PagesDraft(layer, settings)
    assert settings.mode == RING, settings.mode
    text = model.model_config.pretrained_config
    dtype = getattr(text, "torch_dtype", None) or getattr(text, "dtype", None)
    known = dtype if isinstance(dtype, torch.dtype) else None
    return RingDraft(layer, attention, settings, draft_len, known)


def draft_layer(model: Any) -> Any:
    """
    Raises:
        ConfigError: the draft is not an MTP layer of the same checkpoint.
    """
    layers = getattr(model.draft_model, "mtp_layers", None)
    if not layers:
        raise ConfigError(
            f"draft model {type(model.draft_model).__name__}",
            "the window covers the checkpoint's own MTP layer",
            f"leave speculative_model out; {_OFF}",
        )
    return layers[0]


def check_speculation(spec_config: Any) -> None:
    """
    Raises:
        ConfigError: not the mode in which one MTP layer drafts a chain of a length that is known.
    """
    mode = spec_config.spec_dec_mode
    if not mode.is_mtp_eagle_one_model():
        raise ConfigError(
            f"speculative decoding mode {getattr(mode, 'name', mode)}",
            "the window covers one MTP layer applied repeatedly (MTP_EAGLE_ONE_MODEL)",
            f"use decoding_type MTP without use_mtp_vanilla; {_OFF}",
        )
    if not spec_config.max_draft_len:
        raise ConfigError(
            f"max_draft_len {spec_config.max_draft_len}",
            "rings have a spare slot for each draft",
            f"give max_draft_len in speculative_config; {_OFF}",
        )
    if getattr(spec_config, "use_dynamic_tree", False):
        raise ConfigError(
            "use_dynamic_tree",
            "rows of a tree are not consecutive positions",
            f"use a chain; {_OFF}",
        )


def check_mapping(model: Any) -> None:
    """
    Raises:
        ConfigError: the draft's rows or layers are spread over ranks in a way that rings are not.
    """
    mapping = model.model_config.mapping
    for name in ("pp_size", "cp_size"):
        size = getattr(mapping, name, 1)
        if size > 1:
            raise ConfigError(
                f"{name} {size}",
                "rings are shared out over tensor-parallel ranks only",
                f"use tensor_parallel_size; {_OFF}",
            )


def find_attention(layer: nn.Module) -> Any:
    """The draft layer's only ``Attention`` module.

    Raises:
        ConfigError: it has none (latent attention, MLA and DSA, is another class) or several.
    """
    kind = compat.resolve("Attention")
    found = [one for one in layer.modules() if isinstance(one, kind)]
    if len(found) != 1:
        names = sorted({type(one).__name__ for one in layer.modules()})
        raise ConfigError(
            f"{len(found)} Attention modules in {type(layer).__name__} ({', '.join(names)})",
            "the window covers a draft layer with one attention of separate keys and values; "
            "latent attention (MLA, DSA) is not covered",
            _OFF,
        )
    return found[0]


def check_attention(attention: Any) -> None:
    """
    Raises:
        ConfigError: keys would not arrive rotated, or the attention is not the plain one.
    """
    if getattr(attention, "rope_fusion", False) and attention.pos_embd_params is not None:
        raise ConfigError(
            f"rope_fusion in {type(attention).__name__}",
            "keys must be rotated before they are cached, and this layer leaves that to the stock "
            "attention kernel",
            _OFF,
        )
    for name in ("sparse_params", "sparse_attn_hooks", "attention_chunk_size"):
        value = getattr(attention, name, None)
        if value is not None:
            raise ConfigError(
                f"{name} of {type(attention).__name__}",
                "the draft layer's attention is not the plain causal one",
                _OFF,
            )


def _activation_dtype(attention: nn.Module) -> torch.dtype:
    """What q, k and v come in, where the configuration does not say: scales of quantized weights
    are float32, so a 16-bit parameter tells more."""
    found = {one.dtype for one in attention.parameters()}
    half = found & {torch.bfloat16, torch.float16}
    return half.pop() if half else torch.float32
