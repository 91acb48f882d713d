"""NVFP4 in a graph: FP4 (e2m1) values, one fp8 scale for 16 of them, one float32 scale for all.

``value = fp4 * block_scale * global_scale``. A linear layer quantizes its activations on the way in
where the checkpoint has an ``input_scale``, and takes them as they are where it has none. Two
lowerings again: TensorRT's own operators, or standard ops that compute the same numbers in float32.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tllm_wmtp.engine.graph import ELEMENT_TYPES, Graph, Value

BLOCK = 16
#: Magnitudes of the eight codes; the ninth bit pattern upward is the same, negative.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST, LARGEST_SCALE = 6.0, 448.0


class Quantized(Protocol):
    """An NVFP4 weight: ``packed`` uint8 ``[..., out, in / 2]`` (even value in the low half),
    ``block_scale`` fp8 ``[..., out, in / 16]``, float32 ``global_scale`` and ``input_scale``."""

    @property
    def packed(self) -> torch.Tensor: ...

    @property
    def block_scale(self) -> torch.Tensor: ...

    @property
    def global_scale(self) -> torch.Tensor: ...

    @property
    def input_scale(self) -> torch.Tensor | None: ...


def byte_table() -> torch.Tensor:
    """The two values of every byte, float32 ``[256, 2]``, the low half's first."""
    codes = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    byte = torch.arange(256)
    return torch.stack((codes[byte % 16], codes[byte // 16]), dim=1)


def dequantize(weight: Quantized) -> torch.Tensor:
    """The float32 values ``[..., out, in]``."""
    values = byte_table()[weight.packed.long()].flatten(-2)
    blocks = values.unflatten(-1, (-1, BLOCK)) * weight.block_scale.float().unsqueeze(-1)
    global_scale = weight.global_scale.float()
    # One number, or one for each expert of a stack.
    return blocks.flatten(-2) * global_scale.reshape(global_scale.shape + (1,) * 2)


def nvfp4_linear(g: Graph, x: Value, weight: Quantized, hint: str) -> Value:
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


def nvfp4_linear_standard(g: Graph, x: Value, weight: Quantized, hint: str) -> Value:
    """The same numbers with weights dequantized ahead and activations rounded in the graph."""
    if weight.input_scale is not None:
        x = rounded_rows(g, x, float(weight.input_scale))
    return g.op("MatMul", x, g.weight(dequantize(weight).t(), hint))


def rounded_rows(g: Graph, x: Value, input_scale: float) -> Value:
    """``x [n, in]`` after quantization and dequantization: each block of 16 gets the fp8 scale
    ``amax / 6 / input_scale``, and each value the nearest FP4 number, ties to even codes."""

    def wide(kind: str, *inputs: Value, **fields: object) -> Value:
        return g.ops(kind, inputs, ["float32"], **fields)[0]

    number = g.scalar
    shape = g.op("Shape", x, dtype="int64")
    blocks = g.op("Reshape", g.cast(x, "float32"), g.ints(0, -1, BLOCK))
    largest = wide("ReduceMax", wide("Abs", blocks), g.ints(-1), keepdims=1)
    scale = wide("Div", largest, number(LARGEST * input_scale, "float32"))
    scale = wide("Min", scale, number(LARGEST_SCALE, "float32"))
    (small,) = g.ops("Cast", [scale], ["fp8"], to=ELEMENT_TYPES["fp8"])
    (scale,) = g.ops("Cast", [small], ["float32"], to=ELEMENT_TYPES["float32"])
    scale = wide("Mul", scale, number(input_scale, "float32"))
    (empty,) = g.ops("Equal", [scale, number(0.0, "float32")], ["bool"])
    (divisor,) = g.ops("Where", [empty, number(1.0, "float32"), scale], ["float32"])
    ratio = wide("Div", blocks, divisor)
    size = wide("Min", wide("Abs", ratio), number(LARGEST, "float32"))
    (below_two,) = g.ops("Less", [size, number(2.0, "float32")], ["bool"])
    (below_four,) = g.ops("Less", [size, number(4.0, "float32")], ["bool"])
    inner = [below_four, number(1.0, "float32"), number(2.0, "float32")]
    (step,) = g.ops("Where", inner, ["float32"])
    (step,) = g.ops("Where", [below_two, number(0.5, "float32"), step], ["float32"])
    size = wide("Mul", wide("Round", wide("Div", size, step)), step)
    back = wide("Mul", wide("Mul", size, wide("Sign", ratio)), scale)
    return g.cast(g.op("Reshape", back, shape), x.dtype)


def gathered_experts(g: Graph, weight: Quantized, experts: Value, hint: str) -> Value:
    """Dequantized weights ``[k, out, in]`` of ``experts [k]`` (int64) of a stack ``[E, out, in]``.

    TensorRT gathers neither FP4 nor fp8 tensors, so eight FP4 values travel as one int32 and block
    scales in the network's type (fp8 fits in it exactly); only the chosen experts are unpacked.
    """
    packed = weight.packed.contiguous()
    words = packed.view(torch.int32)  # [E, out, in / 8], the first byte lowest
    count, out, size = packed.shape[0], packed.shape[1], packed.shape[2] * 2
    chosen = g.op("Gather", g.constant(words, hint), experts, axis=0)
    pairs = [
        g.op("Gather", g.weight(byte_table(), "fp4_pairs"), byte, axis=0)
        for byte in _bytes(g, chosen)
    ]
    last = [g.op("Unsqueeze", pair, g.ints(3)) for pair in pairs]  # [k, out, in / 8, 1, 2]
    values = g.op("Concat", *last, axis=3)
    blocks = g.op("Reshape", values, g.ints(0, out, size // BLOCK, BLOCK))
    scales = g.weight(weight.block_scale.float().unsqueeze(-1), f"{hint}.block_scale")
    scaled = g.op("Mul", blocks, g.op("Gather", scales, experts, axis=0))
    whole = g.weight(
        weight.global_scale.float().expand(count).reshape(count, 1, 1), f"{hint}.global_scale"
    )
    rows = g.op("Reshape", scaled, g.ints(0, out, size))
    return g.op("Mul", rows, g.op("Gather", whole, experts, axis=0))


def _bytes(g: Graph, words: Value) -> list[Value]:
    """The four bytes of int32 ``words``, lowest first, each 0 .. 255.

    Mod takes the sign of its divisor, so lower bytes come out non-negative; the top one is what is
    left over, an exact quotient between -128 and 127.
    """
    found, below = [], g.scalar(0, "int32")
    for index in range(4):
        unit = g.scalar(256**index, "int32")
        if index == 3:
            top = g.op("Div", g.op("Sub", words, below), unit)
            return [*found, g.op("Mod", top, g.scalar(256, "int32"))]
        upto = g.op("Mod", words, g.scalar(256 ** (index + 1), "int32"))
        found.append(g.op("Div", upto, unit))
        below = upto
    raise AssertionError("a word has four bytes")


def _number(g: Graph, number: float) -> Value:
    return g.scalar(number, "float32")
