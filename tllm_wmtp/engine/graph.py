"""One ONNX graph under construction: typed values, nodes and constants.

Large constants go to a data file beside the model while they are made, so a head of several
gigabytes is never held twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from onnx import ModelProto, TensorProto, helper

#: ONNX element types by the names that configurations use.
ELEMENT_TYPES: dict[str, int] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "bool": TensorProto.BOOL,
    "fp8": TensorProto.FLOAT8E4M3FN,
    "fp4": TensorProto.FLOAT4E2M1,
}
_OF_TORCH = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
    torch.float8_e4m3fn: "fp8",
}
#: FP4 with block scales, and the types that go with it, came with opset 23.
OPSET = 23
_EXTERNAL_BYTES = 64 * 1024
_ALIGNMENT = 4096  # so that a reader may map the file


Shape = tuple[int, ...]
#: Smallest, usual and largest shape of each input of a changing shape.
Profiles = dict[str, tuple[Shape, Shape, Shape]]


@dataclass(frozen=True)
class WrittenGraph:
    """A graph on disk, and what a builder and a session must know of it.

    ``state`` says what the engine updates in place: rings or caches; ``inputs`` and ``outputs`` the
    type and shape of each tensor, by name; ``quantized_weights`` those that stayed in NVFP4.
    """

    file: Path
    profiles: Profiles
    state: dict[str, int | str]
    inputs: dict[str, dict[str, Any]]
    outputs: dict[str, dict[str, Any]]
    quantized_weights: tuple[str, ...]


@dataclass(frozen=True)
class Value:
    """A tensor of the graph; ``dtype`` is a key of :data:`ELEMENT_TYPES`."""

    name: str
    dtype: str


class Graph:
    """Collects nodes; every method returns the value that it made.

    Args:
        name: of the graph, and of its data file: ``<name>.onnx.data``.
        folder: where the data file goes; None keeps every constant inside the model.
        dtype: type of the network, in which rows travel.
        rounding: a narrower type to which results of ``dtype`` are rounded after every operation.
            It shows on a machine that computes in float32 only what another type would do.
        opset: version of the standard operators.
    """

    def __init__(
        self,
        name: str,
        folder: Path | None = None,
        dtype: str = "float32",
        rounding: str | None = None,
        opset: int = OPSET,
    ):
        self.name, self.dtype, self.rounding, self.opset = name, dtype, rounding, opset
        #: Type and shape of each tensor that goes in or out, by name.
        self.inputs: dict[str, dict[str, Any]] = {}
        self.outputs: dict[str, dict[str, Any]] = {}
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._initializers: list[TensorProto] = []
        self._numbers: dict[tuple[Any, ...], Value] = {}
        self._count = itertools.count()
        self._data_name = f"{name}.onnx.data"
        self._data: BinaryIO | None = (
            None if folder is None else (folder / self._data_name).open("wb")
        )
        self._folder = folder
        self._has_data = False

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> Value:
        self.inputs[name] = {"dtype": dtype, "shape": list(shape)}
        self._inputs.append(helper.make_tensor_value_info(name, ELEMENT_TYPES[dtype], list(shape)))
        return Value(name, dtype)

    def output(self, value: Value, name: str, shape: Sequence[int | str]) -> None:
        self._nodes.append(helper.make_node("Identity", [value.name], [name], name=name))
        self.bind_output(Value(name, value.dtype), shape)

    def bind_output(self, value: Value, shape: Sequence[int | str]) -> None:
        """Makes ``value`` itself an output, with no node between: an aliased buffer stays one."""
        self.outputs[value.name] = {"dtype": value.dtype, "shape": list(shape)}
        self._outputs.append(
            helper.make_tensor_value_info(value.name, ELEMENT_TYPES[value.dtype], list(shape))
        )

    def op(
        self, kind: str, *inputs: Value, dtype: str | None = None, domain: str = "", **fields: Any
    ) -> Value:
        """One node with one result, of the type of its first input unless ``dtype`` says more."""
        made = dtype or inputs[0].dtype
        (result,) = self.ops(kind, inputs, [made], domain=domain, **fields)
        return self._rounded(result, kind)

    def ops(
        self,
        kind: str,
        inputs: Sequence[Value],
        dtypes: Sequence[str],
        domain: str = "",
        names: Sequence[str] | None = None,
        **fields: Any,
    ) -> tuple[Value, ...]:
        """One node with a result for each of ``dtypes``."""
        number = next(self._count)
        label = f"{kind}_{number}"
        if names is None:
            names = [label if i == 0 else f"{label}.{i}" for i in range(len(dtypes))]
        results = tuple(Value(name, dtype) for name, dtype in zip(names, dtypes, strict=True))
        self._nodes.append(
            helper.make_node(
                kind, [x.name for x in inputs], list(names), name=label, domain=domain, **fields
            )
        )
        return results

    def rounded(self, value: Value) -> Value:
        """``value`` as a network of the ``rounding`` type would hold it."""
        return self._rounded(value, "")

    def _rounded(self, value: Value, kind: str) -> Value:
        if self.rounding is None or value.dtype != self.dtype or kind in _MOVES:
            return value
        (narrow,) = self.ops("Cast", [value], [self.rounding], to=ELEMENT_TYPES[self.rounding])
        (wide,) = self.ops("Cast", [narrow], [self.dtype], to=ELEMENT_TYPES[self.dtype])
        return wide

    def cast(self, value: Value, dtype: str) -> Value:
        if value.dtype == dtype:
            return value
        return self.op("Cast", value, dtype=dtype, to=ELEMENT_TYPES[dtype])

    def ints(self, *numbers: int) -> Value:
        """A vector of int64: shapes, axes, permutations."""
        return self._number(("ints", numbers), torch.tensor(numbers, dtype=torch.int64))

    def scalar(self, number: float, dtype: str) -> Value:
        """A tensor of rank 0."""
        kind = next(kind for kind, name in _OF_TORCH.items() if name == dtype)
        return self._number((dtype, number), torch.tensor(number, dtype=kind))

    def _number(self, key: tuple[Any, ...], tensor: torch.Tensor) -> Value:
        if key not in self._numbers:
            self._numbers[key] = self.constant(tensor, "number")
        return self._numbers[key]

    def weight(self, tensor: torch.Tensor, hint: str) -> Value:
        """A floating-point weight in the network's type."""
        kind = next(kind for kind, name in _OF_TORCH.items() if name == self.dtype)
        if self.rounding is not None:
            narrow = next(kind for kind, name in _OF_TORCH.items() if name == self.rounding)
            tensor = tensor.to(narrow)
        return self.constant(tensor.to(kind), hint)

    def table(self, name: str, make: Callable[[], torch.Tensor]) -> Value:
        """A weight that many nodes read: made once."""
        key = ("table", name)
        if key not in self._numbers:
            self._numbers[key] = self.weight(make(), name)
        return self._numbers[key]

    def constant(self, tensor: torch.Tensor, hint: str) -> Value:
        tensor = tensor.detach().contiguous().cpu()
        return self._store(tensor, _OF_TORCH[tensor.dtype], list(tensor.shape), hint)

    def fp4(self, packed: torch.Tensor, hint: str) -> Value:
        """FP4 (e2m1) values ``[..., n]`` of bytes ``[..., n / 2]``, the even one in the low half,
        which is also how ONNX packs them."""
        shape = [*packed.shape[:-1], packed.shape[-1] * 2]
        return self._store(packed.detach().contiguous().cpu(), "fp4", shape, hint)

    def _store(self, tensor: torch.Tensor, dtype: str, shape: list[int], hint: str) -> Value:
        made = TensorProto(name=f"{hint}_{next(self._count)}", data_type=ELEMENT_TYPES[dtype])
        made.dims.extend(shape)
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        if self._data is None or raw.nbytes < _EXTERNAL_BYTES:
            made.raw_data = raw.tobytes()
        else:
            self._data.write(bytes(-self._data.tell() % _ALIGNMENT))
            place = {
                "location": self._data_name,
                "offset": self._data.tell(),
                "length": raw.nbytes,
            }
            self._data.write(raw.data)
            self._has_data = True
            made.data_location = TensorProto.EXTERNAL
            for key, content in place.items():
                made.external_data.add(key=key, value=str(content))
        self._initializers.append(made)
        return Value(made.name, dtype)

    def model(self) -> ModelProto:
        """The finished model; the graph takes no more nodes."""
        if self._data is not None:
            self._data.close()
            if not self._has_data and self._folder is not None:
                (self._folder / self._data_name).unlink()
        graph = helper.make_graph(
            self._nodes, self.name, self._inputs, self._outputs, self._initializers
        )
        domains = sorted({node.domain for node in self._nodes} - {""})
        opsets = [
            helper.make_opsetid("", self.opset),
            *(helper.make_opsetid(d, 1) for d in domains),
        ]
        return helper.make_model(graph, opset_imports=opsets, ir_version=11)


#: Operations that copy values, so rounding after them would change nothing.
_MOVES = {
    "Cast",
    "Concat",
    "Expand",
    "Gather",
    "Identity",
    "Reshape",
    "ScatterElements",
    "ScatterND",
    "Slice",
    "Split",
    "Squeeze",
    "Transpose",
    "Unsqueeze",
    "Where",
}
