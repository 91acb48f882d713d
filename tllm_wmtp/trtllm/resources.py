"""Rings follow requests: the executor's resource manager and its per-step metadata, extended.

The executor asks ``get_spec_resource_manager`` for a manager when weights are loaded and the batch
size is known, and from then on tells it which requests come and go. Its per-step metadata calls
``prepare()`` on the host before every forward or graph replay. Both are extended here, once per
process.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

from tllm_wmtp.errors import ConfigError
from tllm_wmtp.trtllm import compat

log = logging.getLogger(__name__)

_OWNER = "_wmtp_draft"
_ADDED = "_wmtp_extended"


class LaneOwner(Protocol):
    """A windowed draft, as far as the executor's bookkeeping goes.

    ``in_graphs``: whether its forwards may be captured inside the executor's CUDA graphs.
    """

    in_graphs: bool

    def start(self, max_requests: int) -> None:
        """Makes rings and buffers; called when weights are on their device."""
        ...

    def lane(self, request_id: int) -> int: ...

    def release(self, request_id: int) -> None: ...

    def publish(self, request_ids: list[int]) -> None:
        """The requests of the coming forward, row by row."""
        ...


class SlotView:
    """The part of the vendor's slot manager that per-step metadata reads."""

    def __init__(self, owner: LaneOwner):
        self._owner = owner

    def get_slot(self, request_id: int) -> int:
        return self._owner.lane(request_id)

    add_slot = get_slot

    def remove_slot(self, request_id: int) -> None:
        self._owner.release(request_id)


def manager_class() -> type:
    """``LaneManager``, over the installed base class."""
    base: Any = compat.resolve("BaseResourceManager")

    class LaneManager(base):
        """Gives requests their rings. It never limits scheduling: there are rings enough."""

        #: Per-step metadata of some releases asks whether hidden states are kept here.
        hidden_states = None

        def __init__(self, owner: LaneOwner, max_requests: int):
            self.slot_manager = SlotView(owner)
            self.max_requests = max_requests
            setattr(self, _OWNER, owner)

        def get_max_resource_count(self) -> int:
            return self.max_requests

        def get_needed_resource_to_completion(self, request: Any) -> int:
            return 0

        def add_dummy_requests(self, request_ids: Iterable[int]) -> None:
            for request_id in request_ids:
                self.slot_manager.get_slot(request_id)

        def prepare_resources(self, scheduled_batch: Any) -> None:
            """Rings are given when per-step metadata first names a request."""

        def update_resources(self, scheduled_batch: Any) -> None:
            """Lengths live on the device; there is nothing to count."""

        def free_resources(self, request: Any) -> None:
            self.slot_manager.remove_slot(request.request_id)

        def shutdown(self) -> None:
            """Rings go with their model."""

    return LaneManager


def find_owner(model: Any) -> LaneOwner | None:
    """The windowed draft of a model or of a part of it (a multimodal model wraps a text model)."""
    modules = model.modules() if hasattr(model, "modules") else [model]
    return next((getattr(one, _OWNER) for one in modules if hasattr(one, _OWNER)), None)


def mark(module: Any, owner: LaneOwner) -> None:
    """Makes :func:`find_owner` find it."""
    object.__setattr__(module, _OWNER, owner)


def extend_manager(inner: Any, owner: LaneOwner, max_requests: int) -> Any:
    """``inner`` told of the rings, or a manager of our own where the vendor has none."""
    if inner is None:
        return manager_class()(owner, max_requests)
    free = inner.free_resources

    @functools.wraps(free)
    def free_resources(request: Any, *args: Any, **options: Any) -> Any:
        owner.release(request.request_id)
        return free(request, *args, **options)

    inner.free_resources = free_resources
    setattr(inner, _OWNER, owner)
    return inner


def check_serving(model_engine: Any, owner: LaneOwner) -> None:
    """
    Raises:
        ConfigError: beams; prefill and decode in different places: the rings would be elsewhere;
            prefills as graphs: what tells a ring its rows would not run at a replay; graphs at all
            where the draft cannot be part of one.
    """
    options = getattr(model_engine, "llm_args", None)
    beams = getattr(options, "max_beam_width", None) or 1
    if beams > 1:
        raise ConfigError(
            f"max_beam_width {beams}",
            "a ring belongs to one sequence",
            "set max_beam_width to 1, or TRTLLM_WMTP_MODE=off",
        )
    graphs = getattr(options, "cuda_graph_config", None)
    if graphs is not None and not owner.in_graphs:
        raise ConfigError(
            "cuda_graph_config of an engine draft",
            "whether an engine's forward can be captured inside the executor's graph has not been "
            "tried",
            "set cuda_graph_config to null",
        )
    prefill = getattr(options, "prefill_cuda_graph_backend", None)
    named = str(getattr(prefill, "value", prefill)).lower()
    if prefill is not None and named != "disabled":
        raise ConfigError(
            f"prefill_cuda_graph_backend {named}",
            "a draft's rows are told to its ring before each forward, which a replayed prefill "
            "would leave out",
            "set it to disabled, or set TRTLLM_WMTP_MODE=off",
        )
    transfer = getattr(options, "cache_transceiver_config", None)
    if transfer is not None and getattr(transfer, "backend", None) is not None:
        raise ConfigError(
            f"cache_transceiver_config with backend {transfer.backend!r}",
            "a request that moves between servers leaves its draft ring behind",
            "serve prefill and decode in one place, or set TRTLLM_WMTP_MODE=off",
        )


def install() -> None:
    """Extends the executor; once per process."""
    original = compat.resolve("get_spec_resource_manager")
    if hasattr(original, _ADDED):
        return

    @functools.wraps(original)
    def get_spec_resource_manager(model_engine: Any, *args: Any, **options: Any) -> Any:
        manager = original(model_engine, *args, **options)
        owner = find_owner(model_engine.model)
        if owner is None:
            return manager
        check_serving(model_engine, owner)
        owner.start(model_engine.batch_size)
        return extend_manager(manager, owner, model_engine.batch_size)

    setattr(get_spec_resource_manager, _ADDED, True)
    places = compat.rebind(original, get_spec_resource_manager)
    log.info("rings follow requests through %s", ", ".join(places))
    for metadata in _metadata_classes():
        metadata.prepare = _with_publish(metadata.prepare)


def _metadata_classes() -> list[Any]:
    """All places' classes: which one a mode uses differs between releases."""
    symbol = compat.BY_NAME["OneModelSpecMetadata"]
    compat.resolve(symbol.name)
    each = [compat.probe(replace(symbol, places=(place,))) for place in symbol.places]
    return [found for found, finding in each if finding.holds]


def _with_publish(prepare: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def prepared(self: Any, *args: Any, **options: Any) -> Any:
        result = prepare(self, *args, **options)
        owner = _owner_of(self)
        if owner is not None and self.request_ids is not None:
            owner.publish(list(self.request_ids))
        return result

    return prepared


def _owner_of(metadata: Any) -> LaneOwner | None:
    for name in ("spec_resource_manager", "mtp_hidden_states_manager", "eagle3_resource_manager"):
        owner = getattr(getattr(metadata, name, None), _OWNER, None)
        if owner is not None:
            return owner
    return None
