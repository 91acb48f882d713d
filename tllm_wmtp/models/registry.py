"""Which modules serve a ``model_type``, and where its weights' names begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tllm_wmtp.errors import CheckpointError
from tllm_wmtp.models.qwen3_5 import Qwen3_5Config, Qwen3_5MtpHead, Qwen3_5Target


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        config: builds the family's configuration from a parsed ``config.json``.
        target, head: module classes; ``head(config, target.rope)``.
        text_prefixes: what may stand before the text model's names, longest first.
        ignored_prefixes: weights of other modalities.
        renames: checkpoint spelling to ours, within a layer.
    """

    config: Callable[[dict[str, Any]], Qwen3_5Config]
    target: type[Qwen3_5Target]
    head: type[Qwen3_5MtpHead]
    text_prefixes: tuple[str, ...]
    ignored_prefixes: tuple[str, ...]
    renames: tuple[tuple[str, str], ...]


QWEN3_5 = Family(
    config=Qwen3_5Config.from_hf,
    target=Qwen3_5Target,
    head=Qwen3_5MtpHead,
    text_prefixes=(
        "thinker.model.language_model.",
        "thinker.model.",
        "thinker.",
        "model.language_model.",
        "model.",
        "language_model.",
    ),
    ignored_prefixes=(
        "model.visual.",
        "visual.",
        "vision_tower.",
        "thinker.visual.",
        "thinker.model.visual.",
        "thinker.audio_tower.",
        "talker.",
        "code2wav.",
    ),
    renames=(
        ("mlp.experts.gate_up_proj", "mlp.gate_up"),
        ("mlp.experts.down_proj", "mlp.down"),
    ),
)

FAMILIES: dict[str, Family] = {
    "qwen3_5": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5,
}


def family_of(config: dict[str, Any]) -> Family:
    """The family of a parsed ``config.json``."""
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise CheckpointError(
            f"model_type {model_type!r}",
            f"the supported ones are {', '.join(sorted(FAMILIES))}",
            "use a checkpoint of one of these families",
        )
    return family
