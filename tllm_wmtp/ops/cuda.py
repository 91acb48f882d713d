"""CUDA bodies of the operators: the kernels of ``libwmtp_cuda`` behind ``torch.ops.wmtp.*``.

The library is loaded by ctypes on the first call, so that importing costs nothing and needs neither
a driver nor a build. This file imports nothing of the package: on a machine that has torch and nvcc
and nothing else it can be used on its own.

Only shapes are checked here and in the library. What the integers in device tensors say (offsets
ascending, lanes distinct and in range, pages in range) is assumed: looking would synchronise.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

__all__ = ["CudaOps", "LibraryMissing", "find_library", "register"]

DTYPE_CODES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
}
_TEXT_BYTES = 1024
_ON_DEVICE, _EMULATED = 1, 2

_int32, _int64, _address, _float = (
    ctypes.c_int32,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_float,
)


class AttentionShape(ctypes.Structure):
    _fields_ = [
        ("n_query_heads", _int32),
        ("n_kv_heads", _int32),
        ("head_dim", _int32),
        ("row_dtype", _int32),
        ("kv_dtype", _int32),
    ]


class WindowedShape(ctypes.Structure):
    _fields_ = [
        ("attention", AttentionShape),
        ("n_requests", _int32),
        ("n_rows", _int32),
        ("n_queries", _int32),
        ("n_lanes", _int32),
        ("capacity", _int64),
        ("n_sink", _int64),
        ("window", _int64),
        ("mask_words", _int32),
    ]


class Plan(ctypes.Structure):
    _fields_ = [("n_splits", _int32), ("workspace_bytes", _int64)]


class WindowedBuffers(ctypes.Structure):
    _fields_ = [
        ("q", _address),
        ("k", _address),
        ("v", _address),
        ("ring_k", _address),
        ("ring_v", _address),
        ("row_offsets", _address),
        ("query_offsets", _address),
        ("start_positions", _address),
        ("lanes", _address),
        ("ancestor_mask", _address),
        ("out", _address),
        ("workspace", _address),
        ("softmax_scale", _float),
        ("k_scale", _float),
        ("v_scale", _float),
    ]


class PagedShape(ctypes.Structure):
    _fields_ = [
        ("attention", AttentionShape),
        ("n_requests", _int32),
        ("n_rows", _int32),
        ("n_queries", _int32),
        ("n_pages", _int64),
        ("page_size", _int64),
        ("max_pages", _int64),
        ("mask_words", _int32),
    ]


class PagedBuffers(ctypes.Structure):
    _fields_ = [
        ("q", _address),
        ("k", _address),
        ("v", _address),
        ("k_pages", _address),
        ("v_pages", _address),
        ("block_table", _address),
        ("row_offsets", _address),
        ("start_positions", _address),
        ("query_offsets", _address),
        ("query_positions", _address),
        ("ancestor_mask", _address),
        ("tree_starts", _address),
        ("out", _address),
        ("workspace", _address),
        ("softmax_scale", _float),
        ("k_scale", _float),
        ("v_scale", _float),
    ]


class GatedDeltaShape(ctypes.Structure):
    _fields_ = [
        ("n_requests", _int32),
        ("n_rows", _int32),
        ("n_key_heads", _int32),
        ("n_value_heads", _int32),
        ("key_dim", _int32),
        ("value_dim", _int32),
        ("n_slots", _int64),
    ]


class LibraryMissing(RuntimeError):
    """The CUDA kernels have not been built."""


def find_library() -> Path:
    """``libwmtp_cuda.so`` beside the package, else in the checkout's ``build/cuda``.

    Raises:
        LibraryMissing: neither exists.
    """
    package = Path(__file__).resolve().parents[1]
    places = [package / "libwmtp_cuda.so", package.parent / "build/cuda/lib/libwmtp_cuda.so"]
    for place in places:
        if place.exists():
            return place
    raise LibraryMissing(
        f"libwmtp_cuda.so is not in {' or '.join(str(place.parent) for place in places)}: "
        "the CUDA kernels must be built to run on a GPU; run `cmake -S . -B build/cuda "
        "-DWMTP_CUDA=ON -DWMTP_PYTHON=OFF && cmake --build build/cuda`"
    )


class CudaOps:
    """The operators over one loaded library.

    Args:
        path: the shared library. One that was built for the host emulator takes CPU tensors, a
            real one takes CUDA tensors.

    Every method has the signature of the operator it implements; the scales of an 8-bit cache,
    which the operators leave at 1, are extra keywords. An argument that breaks a rule is a
    ``ValueError``, a failed launch a ``RuntimeError`` with CUDA's own text.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._library = ctypes.CDLL(str(path))
        self._library.wmtp_cuda_error_text.restype = ctypes.c_char_p
        for structure in (
            AttentionShape,
            WindowedShape,
            WindowedBuffers,
            PagedShape,
            PagedBuffers,
            GatedDeltaShape,
            Plan,
        ):
            name = structure.__name__
            size = self._library.wmtp_cuda_struct_size(name.encode())
            if size != ctypes.sizeof(structure):
                raise RuntimeError(
                    f"{path}: {name} has {size} bytes there and {ctypes.sizeof(structure)} here: "
                    "the library is of another version; build it again"
                )
        self.is_emulated = self._library.wmtp_cuda_kind() == _EMULATED
        self.device_type = "cpu" if self.is_emulated else "cuda"
        self._sms: dict[int, int] = {}

    # --- Planning, for tests and benchmarks ---

    def check_windowed(self, shape: WindowedShape, buffers: WindowedBuffers | None = None) -> str:
        """The library's objection, or an empty string."""
        return self._text(self._library.wmtp_cuda_check_windowed, shape, buffers)

    def check_paged(self, shape: PagedShape, buffers: PagedBuffers | None = None) -> str:
        return self._text(self._library.wmtp_cuda_check_paged, shape, buffers)

    def check_gated_delta(self, shape: GatedDeltaShape) -> str:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        self._library.wmtp_cuda_check_gated_delta(ctypes.byref(shape), text, _TEXT_BYTES)
        return text.value.decode()

    def plan_windowed(self, shape: WindowedShape, n_sms: int) -> Plan:
        plan = Plan()
        self._library.wmtp_cuda_plan_windowed(
            ctypes.byref(shape), _int32(n_sms), ctypes.byref(plan)
        )
        return plan

    def plan_paged(self, shape: PagedShape, n_sms: int) -> Plan:
        plan = Plan()
        self._library.wmtp_cuda_plan_paged(ctypes.byref(shape), _int32(n_sms), ctypes.byref(plan))
        return plan

    def sm_count(self, device_index: int) -> int:
        """Multiprocessors of a device; asked once."""
        if device_index not in self._sms:
            count = _int32()
            self._expect(self._library.wmtp_cuda_sm_count(ctypes.byref(count)), "device query")
            self._sms[device_index] = count.value
        return self._sms[device_index]

    # --- Operators ---

    def ring_append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        ring_k: torch.Tensor,
        ring_v: torch.Tensor,
        row_offsets: torch.Tensor,
        start_positions: torch.Tensor,
        lanes: torch.Tensor,
        n_sink: int,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        shape, buffers = self._windowed(
            k, v, ring_k, ring_v, row_offsets, start_positions, lanes, n_sink, k_scale, v_scale
        )
        self._require(self.check_windowed(shape, buffers))
        with self._device(k):
            code = self._library.wmtp_cuda_run_ring_append(
                ctypes.byref(shape), ctypes.byref(buffers), self._stream(k)
            )
        self._expect(code, "ring_append")

    def windowed_draft_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        ring_k: torch.Tensor,
        ring_v: torch.Tensor,
        row_offsets: torch.Tensor,
        query_offsets: torch.Tensor,
        start_positions: torch.Tensor,
        lanes: torch.Tensor,
        n_sink: int,
        window: int,
        scale: float,
        ancestor_mask: torch.Tensor | None = None,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shape, buffers = self._windowed(
            k, v, ring_k, ring_v, row_offsets, start_positions, lanes, n_sink, k_scale, v_scale
        )
        self._like("q", q, k.dtype, (q.shape[0], q.shape[1] if q.dim() == 3 else 0, k.shape[2]))
        self._like("query_offsets", query_offsets, torch.int32, row_offsets.shape)
        shape.attention.n_query_heads = q.shape[1]
        shape.n_queries, shape.window = q.shape[0], window
        if ancestor_mask is not None:
            shape.mask_words, buffers.ancestor_mask = self._mask(ancestor_mask, q.shape[0])
        result = torch.empty_like(q) if out is None else out
        self._like("out", result, q.dtype, q.shape)
        buffers.q, buffers.out = q.data_ptr(), result.data_ptr()
        buffers.query_offsets = query_offsets.data_ptr()
        buffers.softmax_scale = scale
        self._require(self.check_windowed(shape, buffers))
        with self._device(q):
            plan = self.plan_windowed(shape, self.sm_count(q.get_device()))
            workspace = self._workspace(plan, q)
            buffers.workspace = workspace.data_ptr()
            code = self._library.wmtp_cuda_run_windowed(
                ctypes.byref(shape), ctypes.byref(plan), ctypes.byref(buffers), self._stream(q)
            )
        self._expect(code, "windowed_draft_attention")
        return result

    def paged_append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        block_table: torch.Tensor,
        row_offsets: torch.Tensor,
        start_positions: torch.Tensor,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None:
        self._rows(k, v, k_pages, v_pages, row_offsets, start_positions)
        shape, buffers = self._paged(k_pages, v_pages, block_table, k_scale, v_scale)
        shape.attention.row_dtype = DTYPE_CODES[k.dtype]
        shape.n_requests, shape.n_rows = start_positions.shape[0], k.shape[0]
        self._like("block_table", block_table, torch.int32, (shape.n_requests, shape.max_pages))
        buffers.k, buffers.v = k.data_ptr(), v.data_ptr()
        buffers.row_offsets = row_offsets.data_ptr()
        buffers.start_positions = start_positions.data_ptr()
        self._require(self.check_paged(shape, buffers))
        with self._device(k):
            code = self._library.wmtp_cuda_run_paged_append(
                ctypes.byref(shape), ctypes.byref(buffers), self._stream(k)
            )
        self._expect(code, "paged_append")

    def full_attention(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        block_table: torch.Tensor,
        query_offsets: torch.Tensor,
        query_positions: torch.Tensor,
        scale: float,
        ancestor_mask: torch.Tensor | None = None,
        tree_starts: torch.Tensor | None = None,
        *,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        shape, buffers = self._paged(k_pages, v_pages, block_table, k_scale, v_scale)
        n_queries, n_heads = (q.shape[0], q.shape[1]) if q.dim() == 3 else (0, 0)
        if q.dtype not in DTYPE_CODES:
            self._refuse("q", q, "float32, bfloat16 or float16")
        self._like("q", q, q.dtype, (n_queries, n_heads, k_pages.shape[3]))
        shape.n_requests = block_table.shape[0]
        self._like("query_offsets", query_offsets, torch.int32, (shape.n_requests + 1,))
        self._like("query_positions", query_positions, torch.int64, (n_queries,))
        shape.attention.n_query_heads = n_heads
        shape.attention.row_dtype = DTYPE_CODES[q.dtype]
        shape.n_queries = n_queries
        if (ancestor_mask is None) != (tree_starts is None):
            given = "tree_starts" if ancestor_mask is None else "ancestor_mask"
            raise ValueError(
                f"only {given}: a mask's bits count from each request's tree start; "
                "pass both for trees, neither for chains"
            )
        if ancestor_mask is not None and tree_starts is not None:
            self._like("tree_starts", tree_starts, torch.int64, (shape.n_requests,))
            shape.mask_words, buffers.ancestor_mask = self._mask(ancestor_mask, n_queries)
            buffers.tree_starts = tree_starts.data_ptr()
        result = torch.empty_like(q) if out is None else out
        self._like("out", result, q.dtype, q.shape)
        buffers.q, buffers.out = q.data_ptr(), result.data_ptr()
        buffers.query_offsets = query_offsets.data_ptr()
        buffers.query_positions = query_positions.data_ptr()
        buffers.softmax_scale = scale
        self._require(self.check_paged(shape, buffers))
        with self._device(q):
            plan = self.plan_paged(shape, self.sm_count(q.get_device()))
            workspace = self._workspace(plan, q)
            buffers.workspace = workspace.data_ptr()
            code = self._library.wmtp_cuda_run_full_attention(
                ctypes.byref(shape), ctypes.byref(plan), ctypes.byref(buffers), self._stream(q)
            )
        self._expect(code, "full_attention")
        return result

    def gated_delta_rows(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self._gated_delta(k, g, v, state, slots)
        self._like("q", q, torch.float32, k.shape)
        self._like("beta", beta, torch.float32, g.shape)
        out, delta = torch.empty_like(v), torch.empty_like(v)
        with self._device(q):
            code = self._library.wmtp_cuda_run_gated_delta_rows(
                *self._addresses(q, k, v, g, beta, state, slots),
                ctypes.byref(shape),
                *self._addresses(out, delta),
                self._stream(q),
            )
        self._expect(code, "gated_delta_rows")
        return out, delta

    def gated_delta_commit(
        self,
        k: torch.Tensor,
        g: torch.Tensor,
        delta: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        shape = self._gated_delta(k, g, delta, state, slots)
        self._like("counts", counts, torch.int32, slots.shape)
        with self._device(k):
            code = self._library.wmtp_cuda_run_gated_delta_commit(
                *self._addresses(k, g, delta, state, slots, counts),
                ctypes.byref(shape),
                self._stream(k),
            )
        self._expect(code, "gated_delta_commit")

    # --- Checks and small parts ---

    def _refuse(self, name: str, tensor: torch.Tensor, rule: str) -> None:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}: must be {rule}; "
            "convert it with .to(device, dtype).contiguous()"
        )

    def _like(
        self, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        if (
            tensor.dtype != dtype
            or tensor.shape != torch.Size(shape)
            or tensor.device.type != self.device_type
            or not tensor.is_contiguous()
        ):
            self._refuse(
                name, tensor, f"a contiguous {dtype} tensor {tuple(shape)} on {self.device_type}"
            )

    def _mask(self, ancestor_mask: torch.Tensor, n_queries: int) -> tuple[int, int]:
        """Words per row and address of an ancestor mask."""
        words = ancestor_mask.shape[-1] if ancestor_mask.dim() == 2 else 0
        if words == 0:
            self._refuse("ancestor_mask", ancestor_mask, "[queries, ceil(rows / 32)] int32")
        self._like("ancestor_mask", ancestor_mask, torch.int32, (n_queries, words))
        return words, ancestor_mask.data_ptr()

    def _rows(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        row_offsets: torch.Tensor,
        start_positions: torch.Tensor,
    ) -> None:
        self._cache(cache_k, cache_v)
        if k.dim() != 3 or k.dtype not in DTYPE_CODES:
            self._refuse("k", k, "a 3-d float32, bfloat16 or float16 tensor")
        self._like("k", k, k.dtype, (k.shape[0], cache_k.shape[2], cache_k.shape[3]))
        self._like("v", v, k.dtype, k.shape)
        n_requests = start_positions.shape[0] if start_positions.dim() == 1 else 0
        self._like("start_positions", start_positions, torch.int64, (n_requests,))
        self._like("row_offsets", row_offsets, torch.int32, (n_requests + 1,))

    def _cache(self, cache_k: torch.Tensor, cache_v: torch.Tensor) -> None:
        if cache_k.dim() != 4 or cache_k.dtype not in DTYPE_CODES:
            self._refuse("K cache", cache_k, "a 4-d tensor of float32, 16-bit or e4m3 numbers")
        self._like("K cache", cache_k, cache_k.dtype, cache_k.shape)
        self._like("V cache", cache_v, cache_k.dtype, cache_k.shape)

    def _windowed(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        ring_k: torch.Tensor,
        ring_v: torch.Tensor,
        row_offsets: torch.Tensor,
        start_positions: torch.Tensor,
        lanes: torch.Tensor,
        n_sink: int,
        k_scale: float,
        v_scale: float,
    ) -> tuple[WindowedShape, WindowedBuffers]:
        self._rows(k, v, ring_k, ring_v, row_offsets, start_positions)
        n_lanes, capacity, n_kv_heads, head_dim = ring_k.shape
        n_requests = start_positions.shape[0]
        self._like("lanes", lanes, torch.int32, (n_requests,))
        attention = AttentionShape(
            0, n_kv_heads, head_dim, DTYPE_CODES[k.dtype], DTYPE_CODES[ring_k.dtype]
        )
        shape = WindowedShape(attention, n_requests, k.shape[0], 0, n_lanes, capacity, n_sink, 0, 0)
        buffers = WindowedBuffers(
            k=k.data_ptr(),
            v=v.data_ptr(),
            ring_k=ring_k.data_ptr(),
            ring_v=ring_v.data_ptr(),
            row_offsets=row_offsets.data_ptr(),
            start_positions=start_positions.data_ptr(),
            lanes=lanes.data_ptr(),
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return shape, buffers

    def _paged(
        self,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        block_table: torch.Tensor,
        k_scale: float,
        v_scale: float,
    ) -> tuple[PagedShape, PagedBuffers]:
        self._cache(k_pages, v_pages)
        if block_table.dim() != 2:
            self._refuse("block_table", block_table, "[requests, max_pages] int32")
        self._like("block_table", block_table, torch.int32, block_table.shape)
        n_pages, page_size, n_kv_heads, head_dim = k_pages.shape
        attention = AttentionShape(0, n_kv_heads, head_dim, 0, DTYPE_CODES[k_pages.dtype])
        shape = PagedShape(attention, 0, 0, 0, n_pages, page_size, block_table.shape[1], 0)
        buffers = PagedBuffers(
            k_pages=k_pages.data_ptr(),
            v_pages=v_pages.data_ptr(),
            block_table=block_table.data_ptr(),
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return shape, buffers

    def _gated_delta(
        self,
        k: torch.Tensor,
        g: torch.Tensor,
        values: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
    ) -> GatedDeltaShape:
        for name, tensor in (("k", k), ("v or delta", values), ("state", state)):
            if tensor.dim() != 4:
                self._refuse(name, tensor, "a 4-d float32 tensor")
        n_requests, n_rows, n_key_heads, key_dim = k.shape
        n_slots, n_value_heads, _, value_dim = state.shape
        self._like("k", k, torch.float32, k.shape)
        self._like("state", state, torch.float32, (n_slots, n_value_heads, key_dim, value_dim))
        self._like("g", g, torch.float32, (n_requests, n_rows, n_value_heads))
        value_shape = (n_requests, n_rows, n_value_heads, value_dim)
        self._like("v or delta", values, torch.float32, value_shape)
        self._like("slots", slots, torch.int32, (n_requests,))
        shape = GatedDeltaShape(
            n_requests, n_rows, n_key_heads, n_value_heads, key_dim, value_dim, n_slots
        )
        self._require(self.check_gated_delta(shape))
        return shape

    def _text(
        self,
        function: ctypes._NamedFuncPointer,
        shape: ctypes.Structure,
        buffers: ctypes.Structure | None,
    ) -> str:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        pointer = None if buffers is None else ctypes.byref(buffers)
        if function(ctypes.byref(shape), pointer, text, _TEXT_BYTES) == 0:
            return ""
        return text.value.decode()

    def _require(self, objection: str) -> None:
        if objection:
            raise ValueError(objection)

    def _expect(self, code: int, what: str) -> None:
        if code != 0:
            text = self._library.wmtp_cuda_error_text(code).decode()
            raise RuntimeError(f"{what}: CUDA error {code}: {text}")

    def _device(self, tensor: torch.Tensor) -> torch.cuda.device:
        return torch.cuda.device(-1 if self.is_emulated else tensor.device)

    def _stream(self, tensor: torch.Tensor) -> ctypes.c_void_p:
        if self.is_emulated:
            return ctypes.c_void_p(None)
        return ctypes.c_void_p(torch.cuda.current_stream(tensor.device).cuda_stream)

    def _workspace(self, plan: Plan, like: torch.Tensor) -> torch.Tensor:
        # From torch's caching allocator: inside a graph capture it belongs to the graph.
        return torch.empty(max(plan.workspace_bytes, 16), dtype=torch.uint8, device=like.device)

    def _addresses(self, *tensors: torch.Tensor) -> list[ctypes.c_void_p]:
        return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


@functools.cache
def loaded() -> CudaOps:
    """The operators over the built library; loaded once.

    Raises:
        LibraryMissing: it has not been built.
    """
    return CudaOps(find_library())


_REGISTERED: list[torch.library.Library] = []


def register() -> None:
    """Makes ``torch.ops.wmtp.*`` run on CUDA tensors. The operators must have been defined."""
    if _REGISTERED:
        return
    library = torch.library.Library("wmtp", "IMPL", "CUDA")
    for name in (
        "ring_append",
        "windowed_draft_attention",
        "paged_append",
        "full_attention",
        "gated_delta_rows",
        "gated_delta_commit",
    ):
        library.impl(name, functools.partial(_call, name))
    _REGISTERED.append(library)  # it unregisters when it goes


def _call(name: str, *args: object) -> object:
    return getattr(loaded(), name)(*args)
