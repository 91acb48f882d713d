"""Which stored tensors make up which weight.

A quantized weight is several tensors: values, scales, and the scale of the activations that it
meets. Here they are put together, by the names that each dialect uses, and checked against each
other and the metadata; only headers are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

import torch

from tllm_wmtp.checkpoint.quantization.metadata import (
    COMPRESSED_TENSORS,
    FP8,
    MODELOPT,
    Quantization,
    Scheme,
)
from tllm_wmtp.checkpoint.quantization.weights import BLOCK, Fp8Weight, NvFp4Weight
from tllm_wmtp.errors import CheckpointError

#: Type and shape of a stored tensor, from its file's header.
Header = Callable[[str], tuple[str, tuple[int, ...]]]

#: safetensors' names of types.
PACKED, E4M3 = "U8", "F8_E4M3"
FLOATS = ("F32", "BF16", "F16")
#: Scales of a quantized KV cache and of attention; the runtime has no use for them.
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")


@dataclass(frozen=True)
class Names:
    """How a dialect calls the parts of ``<module>.weight``, or of a fused parameter (``<module>.
    experts.gate_up_proj``), by what is appended to ``<module>.`` or ``<parameter>_``.

    ``values`` is empty where the values bear the weight's own name.
    """

    values: str
    scale: str
    global_scale: str
    input_scale: str

    @property
    def scales(self) -> tuple[str, str, str]:
        return self.scale, self.global_scale, self.input_scale


DIALECTS: dict[tuple[str, str], Names] = {
    (MODELOPT, "NVFP4"): Names("", "weight_scale", "weight_scale_2", "input_scale"),
    (MODELOPT, "FP8"): Names("", "weight_scale", "", "input_scale"),
    (COMPRESSED_TENSORS, "NVFP4"): Names(
        "weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"
    ),
    (COMPRESSED_TENSORS, "FP8"): Names("", "weight_scale", "", "input_scale"),
    (FP8, "FP8"): Names("", "weight_scale_inv", "", "activation_scale"),
}


@dataclass(frozen=True)
class StoredWeight:
    """A quantized weight: its scheme, its logical shape and the names of its tensors."""

    scheme: Scheme
    shape: tuple[int, ...]
    values: str
    scale: str
    global_scale: str | None
    input_scale: str | None
    #: Whether the file holds reciprocals of the global and the input scale.
    reciprocal: bool

    @property
    def parts(self) -> list[str]:
        named = (self.values, self.scale, self.global_scale, self.input_scale)
        return [name for name in named if name is not None]


def stored_weights(
    names: Iterable[str], header: Header, quantization: Quantization
) -> tuple[dict[str, StoredWeight], set[str]]:
    """Quantized weights by logical name, and all stored names that are parts of something else.

    Raises:
        CheckpointError: a part is missing or does not fit, or the metadata says otherwise.
    """
    held = set(names)
    weights: dict[str, StoredWeight] = {}
    parts = {name for name in held if name.endswith(CACHE_SCALES)}
    scale_names = _scale_suffixes(quantization)
    for name in sorted(held - parts):
        kind = header(name)[0]
        if kind not in (PACKED, E4M3) or name.endswith(scale_names):
            continue
        format = "NVFP4" if kind == PACKED else "FP8"
        logical, weight = _assemble(name, format, held, header, quantization)
        weights[logical] = weight
        parts.update(weight.parts)
    for name in sorted(held - parts):
        if name.endswith(scale_names):
            raise CheckpointError(
                f"tensor {name}",
                f"{quantization.source} describes {quantization.algorithm}, and the weight that "
                "this scale belongs to is not quantized",
                "download the complete checkpoint",
            )
    if quantization.declared and not weights:
        raise CheckpointError(
            f"quantization {quantization.algorithm} in {quantization.source}",
            "no weight of the checkpoint is quantized",
            "use the config.json that belongs to the weights",
        )
    return weights, parts


def _scale_suffixes(quantization: Quantization) -> tuple[str, ...]:
    """How names of scales end in this dialect, of modules and of fused parameters."""
    suffixes: set[str] = set()
    for (dialect, _), parts in DIALECTS.items():
        if dialect == quantization.dialect:
            for part in filter(None, parts.scales):
                suffixes.update((f".{part}", f"_proj_{part}", f"_proj_{_short(part)}"))
    return tuple(suffixes)


def _short(part: str) -> str:
    """``scale_inv`` of ``weight_scale_inv``: after a fused parameter's name, both are in use."""
    return part.removeprefix("weight_")


def _assemble(
    stored: str, format: str, held: set[str], header: Header, quantization: Quantization
) -> tuple[str, StoredWeight]:
    parts = DIALECTS.get((quantization.dialect, format))
    if parts is None or not quantization.declared:
        _contradiction(stored, header, quantization)
    logical, module, stem = _base(stored, parts.values)

    def find(part: str) -> str | None:
        for spelling in (part, _short(part)):
            if part and stem + spelling in held:
                return stem + spelling
        return None

    schemes = [s for s in quantization.schemes_for(module) if s.format == format]
    if module in quantization.excluded or not schemes:
        _contradiction(stored, header, quantization)
    for part in filter(None, (parts.scale, parts.global_scale)):
        if find(part) is None:
            raise CheckpointError(
                f"tensor {stored} without {stem}{part}",
                f"a weight in {format} comes with its scales",
                "download the complete checkpoint",
            )
    scale = find(parts.scale)
    assert scale is not None
    shape = header(stored)[1]
    if format == "NVFP4":
        shape = _unpacked_shape(stored, shape)
    weight = StoredWeight(
        _fitting(schemes, scale, shape, header),
        shape,
        stored,
        scale,
        find(parts.global_scale),
        find(parts.input_scale),
        reciprocal=quantization.dialect == COMPRESSED_TENSORS and format == "NVFP4",
    )
    _check_types(weight, header)
    return logical, weight


def _base(stored: str, values: str) -> tuple[str, str, str]:
    """Logical name, module, and what the names of the other parts begin with."""
    for ending in (f".{values}",) if values else (".weight",):
        if stored.endswith(ending):
            module = stored[: -len(ending)]
            return f"{module}.weight", module, f"{module}."
    for ending in filter(None, (values, _short(values))):
        stored = stored.removesuffix(f"_{ending}")
    return stored, stored, f"{stored}_"


def _contradiction(stored: str, header: Header, quantization: Quantization) -> NoReturn:
    raise CheckpointError(
        f"tensor {stored} of type {header(stored)[0]}",
        f"{quantization.source} says that its module is "
        f"{'excluded' if quantization.declared else 'not quantized'}, or in another format "
        f"({quantization.algorithm})",
        "use the config.json that belongs to the weights",
    )


def _unpacked_shape(stored: str, packed: tuple[int, ...]) -> tuple[int, ...]:
    if len(packed) not in (2, 3) or 2 * packed[-1] % BLOCK:
        raise CheckpointError(
            f"tensor {stored} of shape {list(packed)}",
            f"packed NVFP4 is [out, in / 2] or [experts, out, in / 2], with an input size that is "
            f"a multiple of {BLOCK}",
            "download the file again",
        )
    return (*packed[:-1], 2 * packed[-1])


def _fitting(schemes: list[Scheme], scale: str, shape: tuple[int, ...], header: Header) -> Scheme:
    """The scheme whose scales have the shape of ``scale``."""
    found = header(scale)[1]
    for scheme in schemes:
        if _without_ones(found) == _without_ones(scale_shape(scheme, shape)):
            return scheme
        experts = shape[0] if len(shape) == 3 else 1
        if scheme.scales == "tensor" and math.prod(found) in (1, experts):
            return scheme
    expected = " or ".join(str(list(scale_shape(scheme, shape))) for scheme in schemes)
    raise CheckpointError(
        f"tensor {scale} of shape {list(found)}",
        f"the scales of a weight {list(shape)} in {schemes[0]} are {expected}",
        "download the file again",
    )


def scale_shape(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight ``shape`` in ``scheme``."""
    if scheme.format == "NVFP4":
        return (*shape[:-1], shape[-1] // BLOCK)
    if scheme.block is not None:
        rows, columns = scheme.block
        return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
    if scheme.scales == "channel":
        return (*shape[:-1], 1)
    return (shape[0], 1, 1) if len(shape) == 3 else ()


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _check_types(weight: StoredWeight, header: Header) -> None:
    scale_types = (E4M3,) if weight.scheme.format == "NVFP4" else (*FLOATS, "F8_E8M0")
    wanted: dict[str, tuple[str, ...]] = {weight.scale: scale_types}
    experts = weight.shape[0] if len(weight.shape) == 3 else 1
    for name in filter(None, (weight.global_scale, weight.input_scale)):
        wanted[name] = FLOATS
        if math.prod(header(name)[1]) not in (1, experts):
            raise CheckpointError(
                f"tensor {name} of shape {list(header(name)[1])}",
                "it must hold one number"
                + (f", or one per expert ({experts})" if experts > 1 else ""),
                "download the file again",
            )
    for name, types in wanted.items():
        if header(name)[0] not in types:
            raise CheckpointError(
                f"tensor {name} of type {header(name)[0]}",
                f"this scale must be {' or '.join(types)}",
                "download the file again",
            )


def read_weight(
    weight: StoredWeight, tensor: Callable[[str], torch.Tensor]
) -> NvFp4Weight | Fp8Weight:
    """The parts of ``weight``, each read by ``tensor(stored name)``, in canonical shapes.

    Raises:
        CheckpointError: a scale that is no positive number.
    """

    def factor(name: str | None) -> torch.Tensor | None:
        if name is None:
            return None
        value = tensor(name).float()
        if not (value.isfinite() & (value > 0)).all():
            raise CheckpointError(
                f"tensor {name} holds {value.flatten()[:4].tolist()}",
                "a scale must be a positive number",
                "download the file again",
            )
        return value.reshape(()) if value.numel() == 1 else value.reshape(-1, 1, 1)

    values, scheme = tensor(weight.values), weight.scheme
    input_scale = factor(weight.input_scale)
    if scheme.format == "NVFP4":
        scale = tensor(weight.scale).reshape(scale_shape(scheme, weight.shape))
        global_scale, divisor = factor(weight.global_scale), None
        assert global_scale is not None
        if weight.reciprocal:
            global_scale, divisor = global_scale.reciprocal(), global_scale
            input_scale = None if input_scale is None else input_scale.reciprocal()
        return NvFp4Weight(values, scale, global_scale, input_scale, divisor)
    if scheme.scales == "tensor":
        factors = factor(weight.scale)
        assert factors is not None
        return Fp8Weight(values, factors, None, input_scale)
    scale = tensor(weight.scale).reshape(scale_shape(scheme, weight.shape))
    return Fp8Weight(values, scale, scheme.block, input_scale)
