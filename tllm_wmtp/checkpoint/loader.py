"""From a checkpoint directory to modules that hold its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from tllm_wmtp.checkpoint.directory import CheckpointDirectory
from tllm_wmtp.errors import CheckpointError
from tllm_wmtp.models.layers.moe import RoutedExperts
from tllm_wmtp.models.layers.rope import Rope
from tllm_wmtp.models.registry import Family, family_of
from tllm_wmtp.models.spec import DraftHead, ModelConfig, Target

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A target, its draft head (None when not asked for) and what a request needs of the text."""

    config: ModelConfig
    target: Target
    head: DraftHead | None
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]


def read_config(path: str | Path) -> ModelConfig:
    """The model's configuration; touches no weight.

    Raises:
        CheckpointError: naming the file or the field.
    """
    directory = CheckpointDirectory(path)
    return family_of(directory.config).config(directory.config)


@torch.inference_mode(False)  # the modules must outlive a caller's inference mode
def load_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    with_head: bool = False,
) -> LoadedModel:
    """Loads the target, and the MTP head when ``with_head``.

    Every weight that the modules need must be there with the right shape, and every weight of the
    text model must be known; only other modalities' weights are left out, by prefix.

    Raises:
        CheckpointError: naming the file or the tensors.
    """
    directory = CheckpointDirectory(path)
    family = family_of(directory.config)
    config = family.config(directory.config)
    if with_head:
        family.check_head(config, directory.config)
    target_names, head_names = sort_names(directory, family, config)
    if with_head and not head_names:
        raise CheckpointError(
            f"{directory.path} has no {family.head_tensors.format(config=config)}",
            "speculation uses the checkpoint's own MTP head",
            "use the checkpoint that ships them, or speculation=None",
        )
    if config.tie_word_embeddings:
        target_names.pop("lm_head.weight", None)
    with torch.device("meta"):
        target = family.target(config)
        head = family.head(target) if with_head else None
    for module in target.modules():
        if isinstance(module, Rope):  # computed, so no checkpoint holds it
            module.inv_freq = module.config.inverse_frequencies().to(device)
    _fill(target, target_names, directory, dtype, device)
    if config.tie_word_embeddings:
        target.lm_head.weight = target.embed_tokens.weight
    if head is not None:
        _lend(head, target, head_names)
        _fill(head, head_names, directory, dtype, device)
        _merge_copies(head, target)
    eos = tuple(dict.fromkeys((*config.eos_token_ids, *directory.eos_token_ids())))
    modules = (target.eval(), head and head.eval())
    return LoadedModel(config, *modules, directory.tokenizer(), eos)


def sort_names(
    directory: CheckpointDirectory, family: Family, config: ModelConfig
) -> tuple[dict[str, str], dict[str, str]]:
    """Our name to the checkpoint's, for the target and for the head."""
    target: dict[str, str] = {}
    head: dict[str, str] = {}
    for name in directory.names:
        if name.startswith(family.ignored_prefixes):
            continue
        ours = family.head_name(config, name)
        sink = target if ours is None else head
        if ours is None:
            prefix = next((p for p in family.text_prefixes if name.startswith(p)), "")
            ours = name[len(prefix) :]
        for theirs, renamed in family.renames:
            if ours.endswith(theirs):
                ours = ours[: -len(theirs)] + renamed
        if ours in sink:
            raise CheckpointError(
                f"tensors {sink[ours]} and {name}",
                "both are the same weight of the text model",
                "use a checkpoint that holds it once",
            )
        sink[ours] = name
    return target, head


def _lend(head: DraftHead, target: Target, names: dict[str, str]) -> None:
    """Gives the head the target's weights where the checkpoint has none of its own."""
    for ours, theirs in head.shared.items():
        if ours not in names:
            _set_parameter(head, ours, target.get_parameter(theirs))


def _merge_copies(head: DraftHead, target: Target) -> None:
    """Keeps once what the checkpoint holds twice: an embedding and a projection are large."""
    for ours, theirs in head.shared.items():
        if torch.equal(head.get_parameter(ours), target.get_parameter(theirs)):
            _set_parameter(head, ours, target.get_parameter(theirs))


def _set_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, parameter)


def _fill(
    module: nn.Module,
    names: dict[str, str],
    directory: CheckpointDirectory,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Gives every parameter of ``module`` its weight; ``names`` is used up."""
    names = dict(names)
    plan: list[tuple[nn.Module, str, str | list[list[str]]]] = []
    missing = []
    for path, owner in module.named_modules():
        for leaf, parameter in owner.named_parameters(recurse=False):
            ours = f"{path}.{leaf}" if path else leaf
            source: str | list[list[str]] | None = names.pop(ours, None)
            if source is None and isinstance(owner, RoutedExperts):
                source = _split_experts(names, path, leaf, owner)
            if source is not None:
                _check_shapes(directory, source, ours, parameter)
                plan.append((owner, leaf, source))
            elif parameter.is_meta and not _is_tied(module, ours):
                missing.append(ours)
    if missing:
        raise CheckpointError(
            f"{directory.path} lacks {_some(missing)}",
            "every weight of the model must be there",
            "download the complete checkpoint",
        )
    if names:
        raise CheckpointError(
            f"unknown tensors {_some(sorted(names.values()))} in {directory.path}",
            "every weight of the text model must be known, or the output would be wrong",
            "use a checkpoint of a supported family",
        )
    for owner, leaf, source in plan:
        shape = getattr(owner, leaf).shape
        kept = getattr(owner, "weights_dtype", dtype)
        if isinstance(source, str):
            # A copy, not the mapping: aligned, and safe if the file is rewritten later.
            weight = torch.empty(shape, dtype=kept, device=device)
            weight.copy_(directory.tensor(source))
        else:
            weight = _fuse(directory, source, shape, kept, device)
        _check_finite(directory, source, weight)
        setattr(owner, leaf, nn.Parameter(weight, requires_grad=False))


def _check_finite(
    directory: CheckpointDirectory, source: str | list[list[str]], weight: torch.Tensor
) -> None:
    """NaN or infinity in a weight makes every output a guess that looks like an answer."""
    if weight.numel() == 0 or torch.stack(weight.aminmax()).isfinite().all():
        return
    names = [source] if isinstance(source, str) else [name for row in source for name in row]
    raise CheckpointError(
        f"{_some(names)} in {directory.path}: NaN or infinity as {weight.dtype}",
        "every weight must be a finite number",
        "download the file again, or use dtype='float32'",
    )


def _is_tied(module: nn.Module, ours: str) -> bool:
    config = getattr(module, "config", None)
    return ours == "lm_head.weight" and config is not None and config.tie_word_embeddings


def _split_experts(
    names: dict[str, str], path: str, leaf: str, owner: RoutedExperts
) -> list[list[str]] | None:
    """Checkpoint names per expert, in fused order, of a fused parameter, if all are there."""
    parts = owner.fused.get(leaf)
    if parts is None:
        return None
    ours = [
        [f"{path}.experts.{expert}.{part}_proj.weight" for part in parts]
        for expert in range(owner.num_experts)
    ]
    if any(name not in names for row in ours for name in row):
        return None
    return [[names.pop(name) for name in row] for row in ours]


def _check_shapes(
    directory: CheckpointDirectory,
    source: str | list[list[str]],
    ours: str,
    parameter: torch.Tensor,
) -> None:
    expected = tuple(parameter.shape)
    if isinstance(source, str):
        pairs = [(source, expected)]
    else:
        part = (expected[1] // len(source[0]), expected[2])
        pairs = [(name, part) for row in source for name in row]
    for name, shape in pairs:
        if directory.shape(name) != shape:
            raise CheckpointError(
                f"tensor {name} of shape {list(directory.shape(name))}",
                f"config.json makes {ours} {list(shape)}",
                "use the config.json that belongs to these weights",
            )


def _fuse(
    directory: CheckpointDirectory,
    source: list[list[str]],
    shape: torch.Size,
    dtype: torch.dtype,
    device: str,
) -> torch.Tensor:
    """``[experts, parts * rows, columns]`` from one tensor per expert and part."""
    fused = torch.empty(shape, dtype=dtype, device=device)
    for expert, row in zip(fused, source, strict=True):
        for target, name in zip(expert.chunk(len(row)), row, strict=True):
            target.copy_(directory.tensor(name))
    return fused


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
