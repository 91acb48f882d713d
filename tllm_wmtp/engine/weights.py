"""The weights of a model, by the names of its modules, as the checkpoint holds them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tllm_wmtp.checkpoint.directory import CheckpointDirectory
from tllm_wmtp.checkpoint.loader import sort_names
from tllm_wmtp.checkpoint.quantization import Fp8Weight, NvFp4Weight
from tllm_wmtp.errors import CheckpointError
from tllm_wmtp.models.registry import family_of
from tllm_wmtp.models.spec import DraftHead, Target


class Weights:
    """Tensors by our names: one tensor at a time, and nothing of the rest is read."""

    def __init__(self, directory: CheckpointDirectory, names: dict[str, str]):
        self.directory, self.names = directory, names

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def tensor(self, name: str) -> torch.Tensor:
        """The unquantized values, in the checkpoint's type."""
        if name not in self.names:
            raise CheckpointError(
                f"{self.directory.path} lacks {name}",
                "every weight of an engine must be there",
                "download the complete checkpoint",
            )
        return self.directory.tensor(self.names[name])

    def quantized(self, name: str) -> NvFp4Weight | None:
        """The weight in NVFP4, None where it is stored in another way."""
        if name not in self.names:
            return None
        found = self.directory.quantized(self.names[name])
        return found if isinstance(found, NvFp4Weight) else None

    def expert_names(self, path: str, experts: int, parts: Sequence[str]) -> list[list[str]]:
        """Names of each expert's projections ``parts``, where the checkpoint keeps them apart."""
        names = [
            [f"{path}.experts.{expert}.{part}_proj.weight" for part in parts]
            for expert in range(experts)
        ]
        return names if all(name in self for row in names for name in row) else []


@dataclass(frozen=True)
class Layer:
    """One module with its weights: the embedding, or the projection to logits."""

    module: nn.Module
    weights: Weights
    path: str

    @property
    def stored_name(self) -> str:
        """The checkpoint's name of its weight."""
        return self.weights.names.get(f"{self.path}.weight", "")

    def tensor(self) -> torch.Tensor:
        return self.weights.tensor(f"{self.path}.weight")


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint: module skeletons without storage, and where their weights are.

    ``head`` is None where only the target was opened.
    """

    config: Any
    model_type: str
    target: Target
    head: DraftHead | None
    target_weights: Weights
    head_weights: Weights

    @property
    def path(self) -> Path:
        return self.head_weights.directory.path

    def ends(self, embedding: str | None, projection: str | None) -> tuple[Layer, Layer]:
        """The head's first and last layer: modules of its own by these names, else the target's."""
        names = ((embedding, "embed_tokens"), (projection, "lm_head"))
        first, last = (
            Layer(self.target.get_submodule(theirs), self.target_weights, theirs)
            if own is None or self.head is None
            else Layer(self.head.get_submodule(own), self.head_weights, own)
            for own, theirs in names
        )
        return first, last

    def stored_names(self, kind: str) -> set[str]:
        """The checkpoint's names of the tensors that an engine of this kind may read."""
        if kind == "target":
            return set(self.target_weights.names.values())
        shared = (f"{name}.weight" for name in ("embed_tokens", "lm_head"))
        ends = {self.target_weights.names[name] for name in shared if name in self.target_weights}
        return ends | set(self.head_weights.names.values())

    def is_quantized(self, kind: str) -> bool:
        """Whether the part that an engine of this kind is made of has NVFP4 weights."""
        part = self.target_weights if kind == "target" else self.head_weights
        return any(part.directory.element_type(name) == "NVFP4" for name in part.names.values())


def open_model(path: str | Path, with_head: bool = True) -> ModelSource:
    """Reads names and configuration; weights are read when they are used.

    Raises:
        CheckpointError: no such directory, an unknown family, or, ``with_head``, no draft head.
    """
    directory = CheckpointDirectory(path)
    family = family_of(directory.config)
    config = family.config(directory.config)
    target_names, head_names = sort_names(directory, family, config)
    if config.tie_word_embeddings:
        target_names["lm_head.weight"] = target_names["embed_tokens.weight"]
    if with_head:
        family.check_head(config, directory.config)
        if not head_names:
            raise CheckpointError(
                f"{directory.path} has no {family.head_tensors.format(config=config)}",
                "a draft engine is made of the checkpoint's own MTP head",
                "use the checkpoint that ships them",
            )
    with torch.device("meta"):
        target = family.target(config)
        head = family.head(target) if with_head else None
    if head is not None:
        head.eval()
        for ours, theirs in head.shared.items():
            head_names.setdefault(ours, target_names[theirs])
    return ModelSource(
        config,
        str(directory.config["model_type"]),
        target.eval(),
        head,
        Weights(directory, target_names),
        Weights(directory, head_names),
    )


def tensors_hash(source: ModelSource, kind: str) -> str:
    """SHA-256 of every tensor that an engine's graph may read: names, shapes, types and bytes."""
    digest = hashlib.sha256()
    directory = source.head_weights.directory
    for name in sorted(source.stored_names(kind)):
        found = directory.quantized(name)
        parts = [directory.tensor(name)] if found is None else _parts(found)
        digest.update(f"{name}: {directory.element_type(name)}".encode())
        for part in parts:
            digest.update(f" {tuple(part.shape)} {part.dtype}".encode())
            digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _parts(weight: NvFp4Weight | Fp8Weight) -> list[torch.Tensor]:
    values = (getattr(weight, field.name) for field in fields(weight))
    return [value for value in values if isinstance(value, torch.Tensor)]
