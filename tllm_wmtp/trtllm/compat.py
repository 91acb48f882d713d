"""Every name of TensorRT-LLM that the plug-in uses: where it may live and what it must accept.

Names move between releases, so nothing here compares versions: each symbol is looked for in the
places where releases have had it, and its parameters are read with ``inspect``. What is listed in
:data:`SYMBOLS` is all there is.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tllm_wmtp.errors import ConfigError

ROOT = "tensorrt_llm"
_TORCH = f"{ROOT}._torch"
REMEDY = "use a release of the 1.3 line or later, or set TRTLLM_WMTP_MODE=off"


@dataclass(frozen=True)
class Symbol:
    """One name.

    Args:
        places: ``module:attribute``, tried in turn.
        methods: method name to the parameters it must have; ``""`` is the symbol itself.
        is_required: whether the ring cannot work without it.
        purpose: what it is needed for.
    """

    name: str
    places: tuple[str, ...]
    purpose: str
    methods: tuple[tuple[str, tuple[str, ...]], ...] = ()
    is_required: bool = True


LAYER_CALL = ("input_ids", "position_ids", "hidden_states", "embed_tokens", "attn_metadata")


def _mtp_layer(name: str, module: str) -> Symbol:
    return Symbol(
        name,
        (f"{_TORCH}.models.{module}:{name}",),
        "is the draft layer, whose calls tell rows and positions",
        (("forward", LAYER_CALL),),
        is_required=False,
    )


SYMBOLS = (
    Symbol(
        "register_auto_model",
        (f"{_TORCH}.models.modeling_utils:register_auto_model",),
        "registers the windowed models",
        (("", ("name",)),),
    ),
    Symbol(
        "MODEL_CLASS_MAPPING",
        (f"{_TORCH}.models.modeling_utils:MODEL_CLASS_MAPPING",),
        "finds the models to subclass",
    ),
    Symbol(
        "EXTERNAL_MODULES",
        (f"{_TORCH}.models.modeling_utils:_EXTERNAL_ARCH_TO_MODULE",),
        "has workers import the plug-in for multimodal models whose text model is ours",
        is_required=False,
    ),
    Symbol(
        "Attention",
        (
            f"{_TORCH}.attention.attention:Attention",
            f"{_TORCH}.attention:Attention",
            f"{_TORCH}.modules.attention:Attention",
        ),
        "owns the draft layer's attention backend, which the ring replaces",
        (
            ("forward", ("position_ids", "hidden_states", "attn_metadata")),
            ("convert_qkv", ("q", "k", "v")),
        ),
    ),
    Symbol(
        "get_spec_resource_manager",
        (f"{_TORCH}.speculative.utils:get_spec_resource_manager",),
        "ties rings to the life of requests",
        (("", ("model_engine",)),),
    ),
    Symbol(
        "BaseResourceManager",
        (
            f"{_TORCH}.pyexecutor.resource_manager:BaseResourceManager",
            f"{_TORCH}.pyexecutor.kv_cache.resource_manager:BaseResourceManager",
        ),
        "is the base of the manager of rings",
        (
            ("prepare_resources", ("scheduled_batch",)),
            ("free_resources", ("request",)),
            ("add_dummy_requests", ("request_ids",)),
        ),
    ),
    Symbol(
        "OneModelSpecMetadata",
        (
            f"{_TORCH}.speculative.eagle3:Eagle3OneModelSpecMetadata",
            f"{_TORCH}.speculative.mtp:MTPSpecMetadata",
        ),
        "has a prepare() that runs on the host before every forward or graph replay",
        (("prepare", ()),),
    ),
    Symbol(
        "MTPEagleWorker",
        (
            f"{_TORCH}.speculative.eagle3:MTPEagleWorker",
            f"{_TORCH}.speculative.mtp:MTPEagleWorker",
        ),
        "runs the draft loop and tells an engine draft what was accepted",
        (("sample_and_accept_draft_tokens", ("logits", "attn_metadata", "spec_metadata")),),
    ),
    _mtp_layer("Qwen3NextMTP", "modeling_qwen3_next"),
    _mtp_layer("NemotronHMTP", "modeling_nemotron_h"),
    _mtp_layer("Glm4MTP", "modeling_glm"),
)
BY_NAME = {symbol.name: symbol for symbol in SYMBOLS}


@dataclass(frozen=True)
class Finding:
    """What a probe found: ``place`` is None where there is nothing, ``problem`` is empty where all
    is as needed."""

    symbol: Symbol
    place: str | None
    problem: str

    @property
    def holds(self) -> bool:
        return not self.problem


def is_installed() -> bool:
    """Whether TensorRT-LLM is there, without importing it."""
    return importlib.util.find_spec(ROOT) is not None


def require_installed() -> None:
    """
    Raises:
        ConfigError: there is no TensorRT-LLM in this interpreter.
    """
    if not is_installed():
        raise ConfigError(
            f"package {ROOT}",
            "this part runs inside TensorRT-LLM, which is not installed here",
            "run it in the vendor's container, or use the embedded runtime",
        )


def missing_parameters(function: Callable[..., Any], needed: tuple[str, ...]) -> list[str]:
    """Of ``needed``, the parameters that ``function`` cannot be given by name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []  # written in C: nothing to read
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return []
    return [name for name in needed if name not in parameters]


def probe(symbol: Symbol) -> tuple[Any, Finding]:
    """The object, or None, and what was found."""
    tried = []
    for place in symbol.places:
        found, trouble = _look(place)
        if trouble:
            tried.append(trouble)
            continue
        return found, Finding(symbol, place, _signature_problem(symbol, found))
    return None, Finding(symbol, None, "not found: " + "; ".join(tried))


def probe_all() -> list[Finding]:
    """Every symbol, in order."""
    return [probe(symbol)[1] for symbol in SYMBOLS]


def resolve(name: str) -> Any:
    """The object behind one of :data:`SYMBOLS`.

    Raises:
        ConfigError: it is nowhere, or lacks parameters; says what was found and what is needed.
    """
    found, finding = probe(BY_NAME[name])
    if finding.problem:
        raise ConfigError(
            f"TensorRT-LLM's {name} ({finding.place or 'absent'})",
            f"it {finding.symbol.purpose}, and {finding.problem}",
            REMEDY,
        )
    return found


def rebind(original: Any, replacement: Any) -> list[str]:
    """Puts ``replacement`` where loaded modules of TensorRT-LLM hold ``original``.

    A function that is imported by name lives on in every importing module, so changing the module
    that defines it is not enough.

    Returns:
        The places, as ``module:attribute``.
    """
    places = []
    for module_name, module in list(sys.modules.items()):
        if module is None or not (module_name == ROOT or module_name.startswith(f"{ROOT}.")):
            continue
        for attribute, value in list(vars(module).items()):
            if value is original:
                setattr(module, attribute, replacement)
                places.append(f"{module_name}:{attribute}")
    return places


def _look(place: str) -> tuple[Any, str]:
    module_name, attribute = place.split(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        return None, f"{module_name} ({error})"
    if not hasattr(module, attribute):
        return None, f"{place} (no such name)"
    return getattr(module, attribute), ""


def _signature_problem(symbol: Symbol, found: Any) -> str:
    problems = []
    for owner, function, needed in _functions(symbol, found):
        if function is None:
            problems.append(f"it has no {owner}")
            continue
        missing = missing_parameters(function, needed)
        if missing:
            has = ", ".join(inspect.signature(function).parameters)
            problems.append(f"{owner}({has}) lacks {', '.join(missing)}")
    return "; ".join(problems)


def _functions(
    symbol: Symbol, found: Any
) -> Iterator[tuple[str, Callable[..., Any] | None, tuple[str, ...]]]:
    for method, needed in symbol.methods:
        name = f"{symbol.name}.{method}" if method else symbol.name
        yield name, getattr(found, method, None) if method else found, needed
