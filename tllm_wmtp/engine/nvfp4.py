"""NVFP4 in a graph: FP4 (e2m1) values, one fp8 scale for 16 of them, one float32 scale for all.

``value = fp4 * block_scale * global_scale``. A linear layer quantizes its activations on the way in
where the checkpoint has an ``input_scale``, and takes them as they are where it has none. Two
lowerings again: TensorRT's own operators, or standard ops that compute the same numbers in float32.
"""

from __future__ import annotations

from typing import Any

import torch

from tllm_wmtp.checkpoint.quantization.weights import BLOCK, E2M1_MAX, E4M3_MAX, NvFp4Weight
from tllm_wmtp.engine.graph import ELEMENT_TYPES, Graph, Value


def word_table() -> torch.Tensor:
    """The four values of every 16-bit half of a word, float32 ``[65536, 4]``, lowest bits first."""
    every = torch.arange(256, dtype=torch.uint8).view(-1, BLOCK // 2)
    ones = torch.ones(every.shape[0], 1, dtype=torch.float8_e4m3fn)
    pairs = NvFp4Weight(every, ones, torch.tensor(1.0)).dequantize().view(256, 2)
    return torch.cat((pairs.repeat(256, 1), pairs.repeat_interleave(256, 0)), dim=1)


def nvfp4_linear(g: Graph, x: Value, weight: NvFp4Weight, hint: str) -> Value:
    """``x [n, in]`` times the weight ``[out, in]`` transposed, in TensorRT's operators."""
    if weight.input_scale is not None:
        x = _quantized_rows(g, x, float(weight.input_scale), hint)
    scale = _number(g, float(weight.global_scale))
    blocks = g.constant(weight.block_scale, f"{hint}.block_scale")
    kind = ELEMENT_TYPES[g.dtype]
    scales = g.op("DequantizeLinear", blocks, scale, dtype=g.dtype, output_dtype=kind)
    packed = g.fp4(weight.packed, hint)
    wide = g.op("DequantizeLinear", packed, scales, dtype=g.dtype, axis=-1, block_size=BLOCK)
    return g.op("MatMul", x, g.op("Transpose", wide, perm=[1, 0]))


def _quantized_rows(g: Graph, x: Value, input_scale: float, hint: str) -> Value:
    scale = _number(g, input_scale)
    values, scales = g.ops(
        "TRT_FP4DynamicQuantize",
        [x, scale],
        ["fp4", "fp8"],
        domain="trt",
        axis=-1,
        block_size=BLOCK,
        scale_type=ELEMENT_TYPES["fp8"],
    )
    kind = ELEMENT_TYPES[g.dtype]
    wide = g.op("DequantizeLinear", scales, scale, dtype=g.dtype, output_dtype=kind)
    return g.op("DequantizeLinear", values, wide, dtype=g.dtype, axis=-1, block_size=BLOCK)


def nvfp4_linear_standard(g: Graph, x: Value, weight: NvFp4Weight, hint: str) -> Value:
    """The same numbers with weights dequantized ahead and activations rounded in the graph."""
    if weight.input_scale is not None:
        x = rounded_rows(g, x, float(weight.input_scale))
    return g.op("MatMul", x, g.weight(weight.dequantize().t(), hint))


def rounded_rows(g: Graph, x: Value, input_scale: float) -> Value:
    """``x [n, in]`` after quantization and dequantization: each block of 16 gets the fp8 scale
    ``amax / 6 / input_scale``, and each value the nearest FP4 number, ties to even codes."""

    def wide(kind: str, *inputs: Value, **fields: Any) -> Value:
        return g.ops(kind, inputs, ["float32"], **fields)[0]

    number = g.scalar
    shape = g.op("Shape", x, dtype="int64")
    blocks = g.op("Reshape", g.cast(x, "float32"), g.ints(0, -1, BLOCK))
    largest = wide("ReduceMax", wide("Abs", blocks), g.ints(-1), keepdims=1)
    scale = wide("Div", largest, number(E2M1_MAX * input_scale, "float32"))
    scale = wide("Min", scale, number(E4M3_MAX, "float32"))
    (small,) = g.ops("Cast", [scale], ["fp8"], to=ELEMENT_TYPES["fp8"])
    (scale,) = g.ops("Cast", [small], ["float32"], to=ELEMENT_TYPES["float32"])
    scale = wide("Mul", scale, number(input_scale, "float32"))
    (empty,) = g.ops("Equal", [scale, number(0.0, "float32")], ["bool"])
    (divisor,) = g.ops("Where", [empty, number(1.0, "float32"), scale], ["float32"])
    ratio = wide("Div", blocks, divisor)
    size = wide("Min", wide("Abs", ratio), number(E2M1_MAX, "float32"))
    (below_two,) = g.ops("Less", [size, number(2.0, "float32")], ["bool"])
    (below_four,) = g.ops("Less", [size, number(4.0, "float32")], ["bool"])
    inner = [below_four, number(1.0, "float32"), number(2.0, "float32")]
    (step,) = g.ops("Where", inner, ["float32"])
    (step,) = g.ops("Where", [below_two, number(0.5, "float32"), step], ["float32"])
    size = wide("Mul", wide("Round", wide("Div", size, step)), step)
    back = wide("Mul", wide("Mul", size, wide("Sign", ratio)), scale)
    return g.cast(g.op("Reshape", back, shape), x.dtype)


def gathered_experts(g: Graph, weight: NvFp4Weight, experts: Value, hint: str) -> Value:
    """Dequantized weights ``[k, out, in]`` of ``experts [k]`` (int64) of a stack ``[E, out, in]``.

    TensorRT gathers neither FP4 nor fp8 tensors, so eight FP4 values travel as one int32 and block
    scales in the network's type (fp8 fits in it exactly); only the chosen experts are unpacked.
    """
    packed = weight.packed.contiguous()
    words = packed.view(torch.int32)  # [E, out, in / 8], the first byte lowest
    count, out, size = packed.shape[0], packed.shape[1], packed.shape[2] * 2
    chosen = g.op("Gather", g.constant(words, hint), experts, axis=0)
    table = g.table("fp4_values_of_halves", word_table)
    values = g.op("Gather", table, _halves(g, chosen), axis=0)  # [k, out, in / 8, 2, 4]
    blocks = g.op("Reshape", values, g.ints(0, out, size // BLOCK, BLOCK))
    scales = g.weight(weight.block_scale.float().unsqueeze(-1), f"{hint}.block_scale")
    scaled = g.op("Mul", blocks, g.op("Gather", scales, experts, axis=0))
    whole = g.weight(weight.global_scale.float().expand(count, 1, 1), f"{hint}.global_scale")
    rows = g.op("Reshape", scaled, g.ints(0, out, size))
    return g.op("Mul", rows, g.op("Gather", whole, experts, axis=0))


def _halves(g: Graph, words: Value) -> Value:
    """The two halves of int32 ``words [k, out, m]``, the lower first: ``[k, out, m, 2]``, each
    0 .. 65535.

    Words are signed; adding the divisor makes the remainder the same whichever sign Mod gives it,
    and the upper half is an exact quotient.
    """
    unit = g.scalar(65536, "int32")

    def remainder(x: Value) -> Value:
        return g.op("Mod", g.op("Add", x, unit), unit)

    lower = remainder(g.op("Mod", words, unit))
    upper = remainder(g.op("Div", g.op("Sub", words, lower), unit))
    return g.op("Concat", *(g.op("Unsqueeze", half, g.ints(3)) for half in (lower, upper)), axis=3)


def _number(g: Graph, number: float) -> Value:
    return g.scalar(number, "float32")
