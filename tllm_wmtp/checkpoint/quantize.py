"""Writes an NVFP4 copy of a checkpoint, in the layout of NVIDIA Model Optimizer.

One shard is in memory at a time, and the run can be interrupted: finished shards are kept with
their hashes (:mod:`.partial`). The calibration, if any, holds the whole model once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tllm_wmtp import __version__
from tllm_wmtp.checkpoint.backends import Backend, Builtin, ModelOptimizer
from tllm_wmtp.checkpoint.calibration import observe
from tllm_wmtp.checkpoint.directory import INDEX, SINGLE, CheckpointDirectory
from tllm_wmtp.checkpoint.loader import load_model
from tllm_wmtp.checkpoint.partial import PartialDirectory
from tllm_wmtp.checkpoint.quantization.metadata import HF_QUANT_CONFIG
from tllm_wmtp.checkpoint.quantization.weights import BLOCK, E2M1_MAX, E4M3_MAX
from tllm_wmtp.checkpoint.recipe import Plan, Recipe, Unit, make_plan
from tllm_wmtp.errors import CheckpointError

#: Called with what is being done, and how much of it is done of how much.
Progress = Callable[[str, int, int], None]

#: Model Optimizer's own export, while the quantized copy is made.
SCRATCH = "modelopt"
#: Files beside the weights that a quantized copy needs too.
COMPANIONS = (
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*processor_config.json",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab*",
    "LICENSE*",
)


@dataclass(frozen=True)
class Calibration:
    """Text to observe activations on.

    Args:
        sequences: token ids.
        dtype: of the weights and the computation, ``float32`` or ``bfloat16``.
    """

    sequences: Sequence[Sequence[int]]
    dtype: str = "float32"


@dataclass(frozen=True)
class Summary:
    """What was done; sizes in bytes of all weights."""

    out: Path
    algorithm: str
    quantized: int
    kept: int
    source_bytes: int
    bytes: int
    taken_up: int
    excluded: tuple[str, ...] = field(repr=False)


def quantize_checkpoint(
    source: str | Path,
    out: str | Path,
    recipe: Recipe,
    calibration: Calibration | None,
    backend: str = "builtin",
    shard_bytes: int = 4 << 30,
    progress: Progress = lambda what, done, total: None,
) -> Summary:
    """Writes ``out``, a new directory; ``source`` is only read.

    Without a calibration there are no input scales, and the result says ``W4A16_NVFP4``: weights
    in NVFP4, activations as they come.

    Raises:
        CheckpointError: ``source`` is incomplete, of an unknown family or quantized already, or
            ``out`` exists.
    """
    directory = CheckpointDirectory(source)
    if directory.quantization is not None:
        raise CheckpointError(
            f"model {str(source)!r}",
            f"it is quantized already ({directory.quantization.algorithm})",
            "quantize the unquantized checkpoint",
        )
    if backend == "modelopt" and calibration is None:
        raise CheckpointError(
            "backend 'modelopt' without a calibration",
            "Model Optimizer is used for its calibration and export",
            "use --backend builtin, or calibrate on some text",
        )
    plan = make_plan(directory, recipe)
    shards = _shards(plan, shard_bytes)
    mark = _fingerprint(directory, recipe, calibration, backend, shard_bytes)
    with PartialDirectory(out, mark) as partial:
        amax = _amax(partial, directory, recipe, calibration, progress)
        quantizer = _backend(backend, directory, calibration, partial)
        taken_up = _write_shards(partial, directory, shards, quantizer, amax, progress)
        algorithm = "NVFP4" if calibration is not None else "W4A16_NVFP4"
        _write_metadata(partial, directory, shards, plan, algorithm)
        shutil.rmtree(partial.path / SCRATCH, ignore_errors=True)
        partial.publish()
    return Summary(
        Path(out),
        algorithm,
        len(plan.projections),
        sum(not unit.projections for unit in plan.units),
        sum(directory.stored_bytes(name) for name in directory.names),
        sum(unit.bytes for unit in plan.units),
        taken_up,
        plan.excluded,
    )


def _fingerprint(
    directory: CheckpointDirectory,
    recipe: Recipe,
    calibration: Calibration | None,
    backend: str,
    shard_bytes: int,
) -> str:
    """Of all that decides the result; weight files by name, size and times."""
    files = sorted(directory.path.glob("*.safetensors"))
    found = [(file.name, file.stat()) for file in files]
    # The change time too: a copy may keep the time of modification.
    stats = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found]
    facts = [
        __version__,
        str(directory.path.resolve()),
        directory.config,
        stats,
        asdict(recipe),
        None if calibration is None else asdict(calibration),
        backend,
        shard_bytes,
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _amax(
    partial: PartialDirectory,
    directory: CheckpointDirectory,
    recipe: Recipe,
    calibration: Calibration | None,
    progress: Progress,
) -> dict[str, float]:
    if calibration is None:
        return {}
    if "amax" in partial.notes:
        return dict(partial.notes["amax"])
    total, done = len(calibration.sequences), 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress("calibrating", done, total)

    progress("calibrating", 0, total)
    model = load_model(directory.path, getattr(torch, calibration.dtype), with_head=recipe.mtp)
    amax = observe(model, calibration.sequences, advance)
    partial.note("amax", amax)
    return amax


def _backend(
    name: str,
    directory: CheckpointDirectory,
    calibration: Calibration | None,
    partial: PartialDirectory,
) -> Backend:
    if name == "builtin" or calibration is None:
        return Builtin()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return ModelOptimizer(directory.path, calibration.sequences, partial.path / SCRATCH, device)


def _shards(plan: Plan, shard_bytes: int) -> list[tuple[str, list[Unit]]]:
    """File names and what goes into each, about ``shard_bytes`` of it."""
    groups: list[list[Unit]] = [[]]
    size = 0
    for unit in plan.units:
        if groups[-1] and size + unit.bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(unit)
        size += unit.bytes
    if len(groups) == 1:
        return [(SINGLE, groups[0])]
    total = len(groups)
    return [
        (f"model-{index:05d}-of-{total:05d}.safetensors", group)
        for index, group in enumerate(groups, start=1)
    ]


def _write_shards(
    partial: PartialDirectory,
    directory: CheckpointDirectory,
    shards: list[tuple[str, list[Unit]]],
    backend: Backend,
    amax: dict[str, float],
    progress: Progress,
) -> int:
    """Writes what is not there yet; how many shards an earlier run had finished."""
    total = sum(len(units) for _, units in shards)
    done = taken_up = 0
    read = _LastTensor(directory)
    for name, units in shards:
        if partial.holds(name):
            done, taken_up = done + len(units), taken_up + 1
            progress("quantizing", done, total)
            continue
        tensors: dict[str, torch.Tensor] = {}
        for unit in units:
            tensors.update(_tensors(unit, read, backend, amax))
            done += 1
            progress("quantizing", done, total)
        save = functools.partial(save_file, tensors, metadata={"format": "pt"})
        try:
            partial.write(name, save)
        except SafetensorError as error:
            raise CheckpointError(
                f"{partial.path / name} ({error})",
                "it must be possible to write it",
                "check the space on the disk; the same command goes on from here",
            ) from error
    return taken_up


class _LastTensor:
    """Reads tensors, and keeps the last one: fused experts are asked for once per expert."""

    def __init__(self, directory: CheckpointDirectory):
        self.directory = directory
        self._name, self._tensor = "", torch.empty(0)

    def __call__(self, name: str) -> torch.Tensor:
        if name != self._name:
            self._name, self._tensor = name, self.directory.tensor(name)
        return self._tensor


def _tensors(
    unit: Unit,
    read: Callable[[str], torch.Tensor],
    backend: Backend,
    amax: dict[str, float],
) -> Iterator[tuple[str, torch.Tensor]]:
    """What the unit becomes in the quantized checkpoint."""
    if not unit.projections:
        yield unit.name, read(unit.name)
        return
    weights = [projection.of(read(projection.source)) for projection in unit.projections]
    for projection, weight in zip(unit.projections, weights, strict=True):
        if not weight.isfinite().all():
            raise CheckpointError(
                f"{projection.source}: NaN or infinity",
                "every weight must be a finite number",
                "download the file again",
            )
    quantized = backend.quantize(unit, weights, _input_scale(unit, amax))
    for projection, packed in zip(unit.projections, quantized, strict=True):
        yield f"{projection.module}.weight", packed.packed.contiguous()
        yield f"{projection.module}.weight_scale", packed.block_scale.contiguous()
        yield f"{projection.module}.weight_scale_2", packed.global_scale.clone()
        if packed.input_scale is not None:
            yield f"{projection.module}.input_scale", packed.input_scale.clone()


def _input_scale(unit: Unit, amax: dict[str, float]) -> torch.Tensor | None:
    if not amax:
        return None
    largest = amax.get(unit.observed, 0.0)
    if not 0 < largest < float("inf"):
        raise CheckpointError(
            f"activations of {unit.projections[0].module}, {largest} at most",
            "the calibration must see some, and finite ones",
            "use a longer calibration text, or another dtype",
        )
    return torch.tensor(largest / (E2M1_MAX * E4M3_MAX), dtype=torch.float32)


def _write_metadata(
    partial: PartialDirectory,
    directory: CheckpointDirectory,
    shards: list[tuple[str, list[Unit]]],
    plan: Plan,
    algorithm: str,
) -> None:
    for pattern in COMPANIONS:
        for file in sorted(directory.path.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, partial.path / file.name)
    if len(shards) > 1:
        _write_index(partial, [name for name, _ in shards])
    producer = {"name": "tllm-wmtp", "version": __version__}
    elements = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    group = {"weights": elements, "targets": ["Linear"]}
    if algorithm == "NVFP4":
        group["input_activations"] = elements
    statement = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "producer": producer,
        "config_groups": {"group_0": group},
        "ignore": list(plan.excluded),
    }
    quantization = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "group_size": BLOCK,
        "exclude_modules": list(plan.excluded),
    }
    contents = {
        "config.json": directory.config | {"quantization_config": statement},
        HF_QUANT_CONFIG: {"producer": producer, "quantization": quantization},
    }
    for name, content in contents.items():
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (partial.path / name).write_text(text, encoding="utf-8")


def _write_index(partial: PartialDirectory, files: list[str]) -> None:
    from safetensors import safe_open

    weight_map: dict[str, str] = {}
    for file in files:
        with safe_open(str(partial.path / file), framework="pt") as handle:
            weight_map |= dict.fromkeys(handle.keys(), file)
    size = sum((partial.path / file).stat().st_size for file in files)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (partial.path / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
