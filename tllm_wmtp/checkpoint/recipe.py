"""Which weights of a checkpoint become NVFP4, and which of them share their scales.

The linear layers of attention, recurrence and feed-forward, the experts' included. What is left
alone is small, or decides more than it computes: embeddings and lm_head, norms, convolutions,
routers and gates, the projections of a recurrence's decay and rate, those around the latents of
multi-head latent attention, and the projection that fuses a head's two inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from tllm_wmtp.checkpoint.directory import CheckpointDirectory
from tllm_wmtp.checkpoint.loader import sort_names
from tllm_wmtp.checkpoint.quantization.metadata import Modules
from tllm_wmtp.checkpoint.quantization.weights import BLOCK
from tllm_wmtp.errors import CheckpointError
from tllm_wmtp.models.layers.moe import RoutedExperts
from tllm_wmtp.models.registry import family_of

#: What the keys of observed inputs begin with.
TARGET, HEAD = "target", "head"
#: Last names of linear layers that stay as they are.
KEPT = frozenset(
    {
        "lm_head",
        "gate",
        "shared_expert_gate",
        "in_proj_a",
        "in_proj_b",
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "fc",
        "eh_proj",
        "input_proj",
        "head",
    }
)
#: Last names of layers that read the same input and are computed as one matrix product.
TOGETHER = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "in_proj_qkv": "in_proj",
    "in_proj_z": "in_proj",
}


@dataclass(frozen=True)
class Recipe:
    """What the user chooses.

    Args:
        mtp: whether the head's layers are quantized too.
        exclude: modules of the checkpoint to leave alone, by name, wildcard or ``re:``.
    """

    mtp: bool = True
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Projection:
    """One matrix to quantize.

    Args:
        module: its name in the quantized checkpoint, without ``.weight``.
        source: the tensor that holds it.
        shape: ``(out, in)``.
        expert: which expert of a fused ``source [E, A, in]``, None for an ordinary one.
        first_row: where it begins in that expert.
    """

    module: str
    source: str
    shape: tuple[int, int]
    expert: int | None = None
    first_row: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The matrix in ``source``'s tensor."""
        if self.expert is None:
            return tensor
        return tensor[self.expert, self.first_row : self.first_row + self.shape[0]]

    @property
    def bytes(self) -> int:
        """Once quantized: elements, block scales, two numbers."""
        rows, columns = self.shape
        return rows * columns // 2 + rows * columns // BLOCK + 8


@dataclass(frozen=True)
class Unit:
    """What is written together: one tensor as it is, or projections that share a global scale.

    Args:
        name: of the tensor that is copied; empty where ``projections`` are quantized.
        projections: they read the same input.
        observed: the key of that input among a calibration's results.
        bytes: in the quantized checkpoint.
    """

    bytes: int
    name: str = ""
    projections: tuple[Projection, ...] = ()
    observed: str = ""


@dataclass(frozen=True)
class Plan:
    """Every tensor of the quantized checkpoint, in the order of the source.

    ``excluded`` names the modules with a matrix that stays as it is.
    """

    units: tuple[Unit, ...]
    excluded: tuple[str, ...]

    @property
    def projections(self) -> list[Projection]:
        return [projection for unit in self.units for projection in unit.projections]


def make_plan(directory: CheckpointDirectory, recipe: Recipe) -> Plan:
    """Reads configuration and headers only.

    Raises:
        CheckpointError: an unknown family, or nothing is left to quantize.
    """
    units = list(_quantized_units(directory, recipe))
    modules = [_module(name) for name in directory.names]
    for pattern in recipe.exclude:
        left_alone = Modules([pattern])
        if not any(module in left_alone for module in modules):
            raise CheckpointError(
                f"--exclude {pattern}",
                f"no module of {directory.path} is called so",
                "correct it; modules are called as their weights, without .weight",
            )
    if not units:
        raise CheckpointError(
            f"nothing to quantize in {directory.path}",
            f"linear layers with an input size that is a multiple of {BLOCK} are quantized",
            "exclude less, or use another checkpoint",
        )
    taken = {projection.source for unit in units for projection in unit.projections}
    copied = [name for name in directory.names if name not in taken]
    units += [Unit(directory.stored_bytes(name), name) for name in copied]
    position = {name: index for index, name in enumerate(directory.names)}
    units.sort(key=lambda unit: position[unit.name or unit.projections[0].source])
    excluded = {_module(name) for name in copied if len(directory.shape(name)) > 1}
    return Plan(tuple(units), tuple(sorted(excluded | {"lm_head"})))  # tied, it has no tensor


def _quantized_units(directory: CheckpointDirectory, recipe: Recipe) -> Iterator[Unit]:
    """The model's own modules say what is a linear layer; no weight is read."""
    family = family_of(directory.config)
    config = family.config(directory.config)
    target_names, head_names = sort_names(directory, family, config)
    with torch.device("meta"):
        target = family.target(config)
        head = family.head(target) if recipe.mtp and head_names else None
    left_alone = Modules(recipe.exclude)
    roots = [(TARGET, target, target_names), (HEAD, head, head_names)]
    for root, model, names in roots:
        for path, module in () if model is None else model.named_modules():
            if isinstance(module, RoutedExperts):
                yield from _expert_units(
                    f"{root}:{path}", path, module, names, directory, left_alone
                )
        if model is not None:
            yield from _linear_units(root, model, names, directory, left_alone)


def _linear_units(
    root: str,
    model: nn.Module,
    names: dict[str, str],
    directory: CheckpointDirectory,
    left_alone: Modules,
) -> Iterator[Unit]:
    groups: dict[tuple[str, str], list[tuple[str, Projection]]] = {}
    for path, module in model.named_modules():
        parent, _, last = path.rpartition(".")
        source = names.get(f"{path}.weight")
        if not isinstance(module, nn.Linear) or source is None or last in KEPT:
            continue
        projection = _projection(source, directory)
        if projection is not None and projection.module not in left_alone:
            groups.setdefault((parent, TOGETHER.get(last, last)), []).append((path, projection))
    for group in groups.values():
        yield _unit([projection for _, projection in group], f"{root}:{group[0][0]}")


def _projection(source: str, directory: CheckpointDirectory) -> Projection | None:
    """The whole tensor, where its rows are made of whole blocks."""
    rows, columns = directory.shape(source)
    return None if columns % BLOCK else Projection(_module(source), source, (rows, columns))


def _expert_units(
    key: str,
    path: str,
    module: RoutedExperts,
    names: dict[str, str],
    directory: CheckpointDirectory,
    left_alone: Modules,
) -> Iterator[Unit]:
    """One unit per expert and fused parameter, whether the checkpoint has it fused or split."""
    for leaf, parts in module.fused.items():
        observed = f"{key}:{'down' if leaf == 'down' else 'rise'}"
        fused = names.get(f"{path}.{leaf}")
        for expert in range(module.num_experts):
            if fused is not None:
                group = _parts_of_fused(fused, expert, parts, directory, left_alone)
            else:
                sources = [names.get(f"{path}.experts.{expert}.{p}_proj.weight") for p in parts]
                found = [_projection(source, directory) for source in sources if source]
                group = [p for p in found if p is not None and p.module not in left_alone]
            if group:
                yield _unit(group, observed)


def _parts_of_fused(
    fused: str,
    expert: int,
    parts: tuple[str, ...],
    directory: CheckpointDirectory,
    left_alone: Modules,
) -> list[Projection]:
    """One expert's projections in a fused tensor, under the names that they get outside of it."""
    _, rows, columns = directory.shape(fused)
    rows //= len(parts)
    experts = fused.rpartition(".")[0]
    if columns % BLOCK or experts in left_alone:
        return []
    group = [
        Projection(f"{experts}.{expert}.{part}_proj", fused, (rows, columns), expert, index * rows)
        for index, part in enumerate(parts)
    ]
    for projection in group:
        if projection.module in left_alone:
            raise CheckpointError(
                f"--exclude takes in {projection.module}",
                f"{fused} holds all experts, which are quantized or left alone together",
                f"exclude {experts}",
            )
    return group


def _unit(projections: list[Projection], observed: str) -> Unit:
    total = sum(projection.bytes for projection in projections)
    return Unit(total, projections=tuple(projections), observed=observed)


def _module(name: str) -> str:
    return name.removesuffix(".weight")
