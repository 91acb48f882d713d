"""Registers subclasses of TensorRT-LLM's models whose drafts have a window."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tllm_wmtp.errors import ConfigError
from tllm_wmtp.trtllm import compat, resources, settings

log = logging.getLogger(__name__)

#: Where the registered classes can be found by name: importing it registers them.
PLUGIN_MODULE = "tllm_wmtp.trtllm.plugin"
_BASE = "_wmtp_base"


@dataclass(frozen=True)
class Family:
    """``architectures`` of text models, the vendor's modules that define their classes, and
    ``wrappers``: multimodal architectures that look one of these up for their text."""

    name: str
    architectures: tuple[str, ...]
    modules: tuple[str, ...]
    wrappers: tuple[str, ...] = ()


FAMILIES = (
    Family(
        "Qwen3-Next and Qwen3.5",
        ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
        ("modeling_qwen3_next", "modeling_qwen3_5"),
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    ),
    Family(
        "Nemotron-H",
        ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"),
        ("modeling_nemotron_h",),
    ),
    Family("GLM-4.5", ("Glm4MoeForCausalLM",), ("modeling_glm",)),
    # Its draft layer has latent attention, which the window refuses: registered to say so.
    Family(
        "DeepSeek-V3",
        ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"),
        ("modeling_deepseekv3",),
    ),
)


def vendor_models() -> dict[str, Any]:
    """Architectures of :data:`FAMILIES` that the installed version has, with its classes."""
    for family in FAMILIES:
        for module in family.modules:
            try:
                importlib.import_module(f"{compat.ROOT}._torch.models.{module}")
            except ImportError as error:
                log.info("%s: %s", family.name, error)
    classes = compat.resolve("MODEL_CLASS_MAPPING")
    names = [name for family in FAMILIES for name in family.architectures]
    found = {name: classes.get(name) for name in names}
    return {name: getattr(cls, _BASE, cls) for name, cls in found.items() if cls is not None}


def windowed_class(base: Any, chosen: settings.Settings) -> type:
    """A subclass that gives its draft a window when it has been built."""
    from tllm_wmtp.trtllm import worker

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        base.__init__(self, *args, **options)
        worker.attach(self, chosen)

    name = f"Windowed{base.__name__}"
    body = {
        "__module__": PLUGIN_MODULE,
        "__qualname__": name,
        "__doc__": f"{base.__name__} whose draft attends to sinks and a window.",
        "__init__": __init__,
        _BASE: base,
    }
    return type(base)(name, (base,), body)


def register_models() -> list[str]:
    """See :func:`tllm_wmtp.trtllm.register`."""
    chosen = settings.current()
    if chosen.mode == settings.OFF:
        return []
    compat.require_installed()
    register_auto_model = compat.resolve("register_auto_model")
    models = vendor_models()
    if not models:
        names = ", ".join(name for family in FAMILIES for name in family.architectures)
        raise ConfigError("TensorRT-LLM's models", f"none of {names} is among them", compat.REMEDY)
    registered = compat.resolve("MODEL_CLASS_MAPPING")
    for architecture, base in models.items():
        if not hasattr(registered[architecture], _BASE):
            cls = _published.get(f"Windowed{base.__name__}") or windowed_class(base, chosen)
            _published[cls.__name__] = cls
            register_auto_model(architecture)(cls)
    name_for_wrappers(registered)
    resources.install()
    return list(models)


def name_for_wrappers(registered: Mapping[str, Any]) -> None:
    """Has workers import the plug-in for the wrappers of its models too.

    Late releases tell a worker the module of each external architecture, which it imports when that
    architecture is looked up. A wrapper is the vendor's own, so looking it up would bring in
    nothing of ours, and the text model inside it would be the stock one.
    """
    external, _ = compat.probe(compat.BY_NAME["EXTERNAL_MODULES"])
    if external is None:
        return
    for family in FAMILIES:
        for wrapper in family.wrappers:
            if wrapper in registered:
                external.setdefault(wrapper, PLUGIN_MODULE)


_published: dict[str, type] = {}


def published(name: str) -> type:
    """A registered class by its name.

    Raises:
        AttributeError: there is none of that name.
    """
    if name not in _published:
        raise AttributeError(f"module {PLUGIN_MODULE!r} has no attribute {name!r}")
    return _published[name]
