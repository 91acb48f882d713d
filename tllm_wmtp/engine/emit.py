"""Modules of the embedded runtime as graph nodes: one function per module class.

A head's graph is written by walking the modules that the runtime runs (without storage), so sizes,
epsilons and biases are theirs, and a module's path is the name of its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatchmethod

import torch
from torch import nn

from tllm_wmtp.checkpoint.quantization import NvFp4Weight
from tllm_wmtp.engine import nvfp4, ops
from tllm_wmtp.engine.attention import PLUGIN
from tllm_wmtp.engine.graph import Graph, Value
from tllm_wmtp.engine.weights import Layer, Weights
from tllm_wmtp.models.layers.gated_sigmoid_moe import GatedSigmoidMoe
from tllm_wmtp.models.layers.moe import GatedMLP, RoutedExperts, SparseMoe
from tllm_wmtp.models.layers.norm import RMSNorm
from tllm_wmtp.models.layers.relu2_moe import Relu2MLP, Relu2Moe
from tllm_wmtp.models.layers.sigmoid_router import SigmoidRouter

#: ``[n, A]`` to ``[n, I]``: what stands between the two projections of an expert.
Activation = Callable[[Graph, Value], Value]


class Emitter:
    """Writes modules of one checkpoint into one graph.

    Args:
        quantized: keep NVFP4 weights as they are; otherwise they are dequantized.
        lowering: :data:`~tllm_wmtp.engine.attention.PLUGIN` for operators of TensorRT, or
            :data:`~tllm_wmtp.engine.attention.STANDARD` for standard ones.
    """

    def __init__(self, g: Graph, weights: Weights, lowering: str, quantized: bool):
        self.g, self.weights = g, weights
        self.lowering, self.quantized = lowering, quantized
        self.quantized_weights: list[str] = []

    def project(self, layer: Layer, x: Value, embeddings: Value | None) -> Value:
        """Logits of ``x [n, H]``; ``embeddings [vocab, H]`` are given where lm_head is tied to
        them, so that they are in the graph once."""
        if embeddings is None:
            return self.emit(layer.module, layer.path, x)
        return self.g.op("MatMul", x, self.g.op("Transpose", embeddings, perm=[1, 0]))

    @singledispatchmethod
    def emit(self, module: nn.Module, path: str, x: Value) -> Value:
        """``x`` through ``module``, whose weights' names begin with ``path``."""
        raise NotImplementedError(f"no graph for {type(module).__name__} ({path})")

    @emit.register
    def _(self, module: nn.Linear, path: str, x: Value) -> Value:
        bias = self.weights.tensor(f"{path}.bias") if module.bias is not None else None
        found = self.weights.quantized(f"{path}.weight")
        if found is None:
            return ops.linear(self.g, x, self.weights.tensor(f"{path}.weight"), bias, path)
        if not self.quantized:
            return ops.linear(self.g, x, found.dequantize(), bias, path)
        self.quantized_weights.append(path)
        linear = nvfp4.nvfp4_linear if self.lowering == PLUGIN else nvfp4.nvfp4_linear_standard
        out = linear(self.g, x, found, path)
        return out if bias is None else self.g.op("Add", out, self.g.weight(bias, f"{path}.bias"))

    @emit.register
    def _(self, module: RMSNorm, path: str, x: Value) -> Value:
        scale = 1.0 + self.weights.tensor(f"{path}.weight").float()
        return ops.rms_norm(self.g, x, scale, module.eps, path)

    @emit.register
    def _(self, module: nn.RMSNorm, path: str, x: Value) -> Value:
        scale = self.weights.tensor(f"{path}.weight")
        return ops.rms_norm(self.g, x, scale, module.eps or 0.0, path)

    @emit.register
    def _(self, module: nn.LayerNorm, path: str, x: Value) -> Value:
        scale = self.weights.tensor(f"{path}.weight")
        return ops.rms_norm(self.g, x, scale, module.eps, path, subtract_mean=True)

    @emit.register
    def _(self, module: nn.Identity, path: str, x: Value) -> Value:
        return x

    @emit.register
    def _(self, module: GatedMLP, path: str, x: Value) -> Value:
        gate = self.emit(module.gate_proj, f"{path}.gate_proj", x)
        up = self.emit(module.up_proj, f"{path}.up_proj", x)
        mixed = self.g.op("Mul", ops.silu(self.g, gate), up)
        return self.emit(module.down_proj, f"{path}.down_proj", mixed)

    @emit.register
    def _(self, module: SparseMoe, path: str, x: Value) -> Value:
        g = self.g
        scores = ops.softmax(g, self.emit(module.gate, f"{path}.gate", x))
        top, experts = ops.top_k(g, scores, module.top_k)
        (total,) = g.ops("ReduceSum", [top, g.ints(-1)], ["float32"], keepdims=1)
        (shares,) = g.ops("Div", [top, total], ["float32"])
        routed = self.routed_experts(module, path, x, g.cast(shares, g.dtype), experts, gated_silu)
        shared = self.emit(module.shared_expert, f"{path}.shared_expert", x)
        gate = self.emit(module.shared_expert_gate, f"{path}.shared_expert_gate", x)
        return g.op("Add", routed, g.op("Mul", g.op("Sigmoid", gate), shared))

    @emit.register
    def _(self, module: GatedSigmoidMoe, path: str, x: Value) -> Value:
        shares, experts = self.sigmoid_router(module.gate, f"{path}.gate", x)
        routed = self.routed_experts(module, path, x, shares, experts, gated_silu)
        shared = self.emit(module.shared_experts, f"{path}.shared_experts", x)
        return self.g.op("Add", routed, shared)

    @emit.register
    def _(self, module: Relu2MLP, path: str, x: Value) -> Value:
        up = self.emit(module.up_proj, f"{path}.up_proj", x)
        return self.emit(module.down_proj, f"{path}.down_proj", squared_relu(self.g, up))

    @emit.register
    def _(self, module: Relu2Moe, path: str, x: Value) -> Value:
        shares, experts = self.sigmoid_router(module.gate, f"{path}.gate", x)
        latent = self.emit(module.fc1_latent_proj, f"{path}.fc1_latent_proj", x)
        routed = self.routed_experts(module, path, latent, shares, experts, squared_relu)
        routed = self.emit(module.fc2_latent_proj, f"{path}.fc2_latent_proj", routed)
        shared = self.emit(module.shared_experts, f"{path}.shared_experts", x)
        return self.g.op("Add", routed, shared)

    def sigmoid_router(self, module: SigmoidRouter, path: str, x: Value) -> tuple[Value, Value]:
        """Weights and experts ``[n, k]``, scored in float32 whatever the network's type."""
        return ops.sigmoid_router(
            self.g,
            x,
            self.weights.tensor(f"{path}.weight"),
            self.weights.tensor(f"{path}.e_score_correction_bias"),
            module.config,
            path,
        )

    def routed_experts(
        self,
        module: RoutedExperts,
        path: str,
        x: Value,
        shares: Value,
        experts: Value,
        activate: Activation,
    ) -> Value:
        """Weighted sum ``[n, H]`` of the experts of each row; ``shares, experts [n, k]``.

        The weights of the chosen experts are gathered, one matrix for each row and choice: right
        for few rows, which is what a draft has.
        """
        g, k = self.g, module.top_k
        chosen = g.op("Reshape", experts, g.ints(-1))  # [n * k]
        rise, down = (
            self._gathered(module, path, leaf, parts, chosen)
            for leaf, parts in module.fused.items()
        )
        column = g.op("Unsqueeze", x, g.ints(1, 3))  # [n, 1, H, 1]
        wide = g.op("Expand", column, g.ints(1, k, 1, 1))
        features = int(module.rise.shape[2])
        column = g.op("Reshape", wide, g.ints(-1, features, 1))
        risen = g.op("Squeeze", g.op("MatMul", rise, column), g.ints(2))
        active = g.op("Unsqueeze", activate(g, risen), g.ints(2))
        out = g.op("MatMul", down, active)  # [n * k, H, 1]
        out = g.op("Reshape", out, g.ints(-1, k, int(module.down.shape[1])))
        scaled = g.op("Mul", out, g.op("Unsqueeze", shares, g.ints(2)))
        return g.op("ReduceSum", scaled, g.ints(1), keepdims=0)

    def _gathered(
        self, module: RoutedExperts, path: str, leaf: str, parts: tuple[str, ...], chosen: Value
    ) -> Value:
        """Weights ``[n * k, out, in]`` of the chosen experts, in the network's type."""
        hint = f"{path}.{leaf}"
        found = self._expert_stack(module, path, leaf, parts)
        if isinstance(found, torch.Tensor):
            return self.g.op("Gather", self.g.weight(found, hint), chosen, axis=0)
        if not self.quantized:
            return self.g.op("Gather", self.g.weight(found.dequantize(), hint), chosen, axis=0)
        self.quantized_weights.append(hint)
        return nvfp4.gathered_experts(self.g, found, chosen, hint)

    def _expert_stack(
        self, module: RoutedExperts, path: str, leaf: str, parts: tuple[str, ...]
    ) -> torch.Tensor | NvFp4Weight:
        fused = f"{path}.{leaf}"
        if fused in self.weights:
            return self.weights.quantized(fused) or self.weights.tensor(fused)
        names = self.weights.expert_names(path, module.num_experts, parts)
        if not names:
            return self.weights.tensor(fused)  # says that it is missing
        found = [[self.weights.quantized(name) for name in row] for row in names]
        packed = [[one for one in row if one is not None] for row in found]
        if all(len(some) == len(row) for some, row in zip(packed, found, strict=True)):
            return stack_experts(packed)
        # A stack has one form, so a single unquantized expert decides for all.
        return torch.stack(
            [torch.cat([self.weights.tensor(name) for name in row]) for row in names]
        )


def stack_experts(rows: list[list[NvFp4Weight]]) -> NvFp4Weight:
    """One stack of experts kept apart, each a list of parts that lie one under the other.

    The parts of one expert need one global scale: exporters give them one, and block scales are
    float32 where a part's had to change.
    """
    packed, scales, wholes = [], [], []
    for parts in rows:
        whole = torch.stack([one.global_scale.float().reshape(()) for one in parts]).amax()
        packed.append(torch.cat([one.packed for one in parts]))
        scales.append(torch.cat([_rescaled(one, whole) for one in parts]))
        wholes.append(whole)
    return NvFp4Weight(
        torch.stack(packed), torch.stack(scales), torch.stack(wholes).reshape(-1, 1, 1)
    )


def _rescaled(weight: NvFp4Weight, whole: torch.Tensor) -> torch.Tensor:
    """Block scales under another global scale: as they are where it is the weight's own."""
    own = weight.global_scale.float().reshape(())
    return weight.block_scale.float() * (own / whole)


def gated_silu(g: Graph, x: Value) -> Value:
    """``silu(gate) * up`` of ``[..., gate and up]``."""
    gate, up = g.ops("Split", [x], [x.dtype] * 2, axis=-1, num_outputs=2)
    return g.op("Mul", ops.silu(g, gate), up)


def squared_relu(g: Graph, x: Value) -> Value:
    positive = g.op("Relu", x)
    return g.op("Mul", positive, positive)
