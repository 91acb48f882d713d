"""Which modules serve a ``model_type``, and where its weights' names begin."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tllm_wmtp.errors import CheckpointError
from tllm_wmtp.models.decoder import NextNHead, check_one_head
from tllm_wmtp.models.deepseek_v3 import DeepseekV3Config, DeepseekV3MtpHead, DeepseekV3Target
from tllm_wmtp.models.glm4_moe import Glm4MoeConfig, Glm4MoeMtpHead, Glm4MoeTarget
from tllm_wmtp.models.mimo import MimoConfig, MimoMtpHead, MimoTarget
from tllm_wmtp.models.nemotron_h import NemotronHConfig, NemotronHMtpHead, NemotronHTarget
from tllm_wmtp.models.qwen3_5 import Qwen3_5Config, Qwen3_5MtpHead, Qwen3_5Target
from tllm_wmtp.models.spec import DraftHead, ModelConfig, Target

_MTP = re.compile(r"^(?:.+\.)?mtp\.(?P<rest>.+)$")


def _after_mtp(config: ModelConfig, name: str) -> str | None:
    match = _MTP.match(name)
    return match["rest"] if match else None


def _one_layer_on_shared_embedding(config: Qwen3_5Config, content: dict[str, Any]) -> None:
    text = content.get("text_config") or content
    layers, dedicated = config.mtp_num_hidden_layers, text.get("mtp_use_dedicated_embeddings")
    if layers != 1 or dedicated:
        raise CheckpointError(
            f"an MTP head of {layers} layers with dedicated embeddings {bool(dedicated)}",
            "the head must have one layer and share the target's embedding",
            "use speculation=None",
        )


def _one_shared_head(config: NemotronHConfig, content: dict[str, Any]) -> None:
    if config.mtp_num_hidden_layers != 1:
        raise CheckpointError(
            f"num_nextn_predict_layers {config.mtp_num_hidden_layers}",
            "speculation uses one MTP head, again and again",
            "use a checkpoint with one, or speculation=None",
        )


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        config: builds the family's configuration from a parsed ``config.json``.
        target: makes the target of a configuration.
        head: makes the draft head for a target.
        text_prefixes: what may stand before the text model's names, longest first.
        ignored_prefixes: weights of other modalities.
        renames: checkpoint spelling to ours, at the end of a name.
        head_name: our name of a weight of the head, None for any other weight.
        head_tensors: how the head's weights are called, for the error that misses them; a format
            of ``config``.
        check_head: refuses a configuration (and its ``config.json``) whose head is of another make.
    """

    config: Callable[[dict[str, Any]], ModelConfig]
    target: Callable[[Any], Target]
    head: Callable[[Any], DraftHead]
    text_prefixes: tuple[str, ...]
    ignored_prefixes: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    head_name: Callable[[Any, str], str | None] = _after_mtp
    head_tensors: str = "mtp.* tensors"
    check_head: Callable[[Any, dict[str, Any]], None] = lambda config, content: None


_EXPERTS = (("mlp.experts.gate_up_proj", "mlp.gate_up"), ("mlp.experts.down_proj", "mlp.down"))

QWEN3_5 = Family(
    config=Qwen3_5Config.from_hf,
    target=Qwen3_5Target,
    head=lambda target: Qwen3_5MtpHead(target.config, target.rope),
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
    renames=_EXPERTS,
    head_tensors="mtp.* tensors (mtp.fc.weight, mtp.layers.0.*, ...)",
    check_head=_one_layer_on_shared_embedding,
)

NEMOTRON_H = Family(
    config=NemotronHConfig.from_hf,
    target=NemotronHTarget,
    head=lambda target: NemotronHMtpHead(target.config),
    text_prefixes=("backbone.", "model."),
    renames=(
        ("embeddings.weight", "embed_tokens.weight"),
        ("norm_f.weight", "norm.weight"),
        ("mixer.experts.up_proj", "mixer.up"),
        ("mixer.experts.down_proj", "mixer.down"),
    ),
    head_tensors="mtp.* tensors (mtp.layers.0.eh_proj.weight, ...)",
    check_head=_one_shared_head,
)

MIMO = Family(
    config=MimoConfig.from_hf,
    target=MimoTarget,
    head=lambda target: MimoMtpHead(target.config, target.rope),
    text_prefixes=("model.",),
    head_name=MimoMtpHead.name_of,
    head_tensors="model.mtp_layers.0.* tensors (model.mtp_layers.0.input_proj.weight, ...)",
    check_head=check_one_head,
)

GLM4_MOE = Family(
    config=Glm4MoeConfig.from_hf,
    target=Glm4MoeTarget,
    head=lambda target: Glm4MoeMtpHead(target.config, target.rope),
    text_prefixes=("model.",),
    renames=_EXPERTS,
    head_name=NextNHead.name_of,
    head_tensors=NextNHead.tensors,
    check_head=check_one_head,
)

DEEPSEEK_V3 = Family(
    config=DeepseekV3Config.from_hf,
    target=DeepseekV3Target,
    head=lambda target: DeepseekV3MtpHead(target.config, target.rope),
    text_prefixes=("model.",),
    renames=_EXPERTS,
    head_name=NextNHead.name_of,
    head_tensors=NextNHead.tensors,
    check_head=check_one_head,
)

FAMILIES: dict[str, Family] = {
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe": GLM4_MOE,
    "mimo": MIMO,
    "nemotron_h": NEMOTRON_H,
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
