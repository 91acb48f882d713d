"""A draft engine on a GPU: plugin and engine loaded, rings owned, a step as one CUDA graph.

Not run anywhere yet: no machine with a GPU was at hand. Up to the driver everything is tested, and
the plan that a captured step replays (:mod:`tllm_wmtp.engine.step_plan`) is held to the embedded
runtime in onnxruntime.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tllm_wmtp.engine.backends import gpu_target, rtx_folder
from tllm_wmtp.engine.directory import hash_file, read_config
from tllm_wmtp.engine.plugin import find_plugin, load_plugin
from tllm_wmtp.engine.proposer import Answers, Rows
from tllm_wmtp.engine.step_plan import AcceptedRows, StepPlan, plan_step
from tllm_wmtp.errors import ConfigError, RequestError
from tllm_wmtp.ring import RingSpec

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
}


def check_directory(directory: Path) -> dict[str, Any]:
    """config.json of an engine that this machine can run.

    Raises:
        ConfigError: no engine, a damaged one, another plugin, no driver, or another GPU.
    """
    config = read_config(directory)
    if config["kind"] != "draft":
        raise ConfigError(
            f"engine {directory} of kind {config['kind']!r}",
            "a session drafts",
            "pass an engine that was built with --engine draft",
        )
    engine = directory / "draft.engine"
    size = engine.stat().st_size if engine.exists() else 0
    if size != config["engine"]["bytes"]:
        raise ConfigError(
            f"{engine} of {size} bytes",
            f"config.json says {config['engine']['bytes']}",
            "build it again",
        )
    library = find_plugin()
    if hash_file(library) != config["plugin"]["sha256"]:
        raise ConfigError(
            f"plugin {library}",
            "the engine was built with another one, and its layout is the plugin's own",
            "build the engine again, or restore the library",
        )
    target, at_hand = config["options"]["target"], gpu_target()
    if at_hand is None:
        raise ConfigError(
            f"engine {directory}",
            "it runs on an NVIDIA GPU, and this machine has no driver or no GPU",
            f"run it on a machine with {target}, or use the embedded runtime",
        )
    if at_hand != target:
        raise ConfigError(
            f"engine for {target}",
            f"the GPU at hand is {at_hand}",
            f"build with --target {at_hand}",
        )
    return config


def _tensorrt(config: dict[str, Any]) -> Any:
    if config["backend"]["name"] == "tensorrt":
        return importlib.import_module("tensorrt")
    folder = str(rtx_folder())
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("tensorrt_rtx_bindings")


def _cudart() -> Any:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        raise ConfigError(
            "package cuda-python",
            "steps are captured as CUDA graphs with it, and it is not installed",
            "pip install cuda-python",
        ) from None


class EngineSession:
    """One engine, its rings and its captured steps. Not thread-safe.

    It is a :class:`~tllm_wmtp.engine.proposer.DraftForward` (:meth:`run`, any shape, for prefill
    and sampling) and has :meth:`draft`, a whole greedy step as one graph launch.

    Raises:
        ConfigError: see :func:`check_directory`.
    """

    def __init__(self, directory: Path, device: int = 0):
        self.config = check_directory(directory)
        options, ring = self.config["options"], self.config["state"]
        self.depth: int = options["depth"]
        self.ring = RingSpec.for_chain(options["n_sink"], options["window"], self.depth)
        self.lanes, self.max_rows = ring["lanes"], options["max_rows"]
        self.device = torch.device("cuda", device)
        self._cudart, trt = _cudart(), _tensorrt(self.config)
        load_plugin(trt)
        self._log = trt.Logger(trt.Logger.WARNING)
        runtime = trt.Runtime(self._log)
        self._engine = runtime.deserialize_cuda_engine((directory / "draft.engine").read_bytes())
        if self._engine is None:
            raise ConfigError(
                f"engine {directory}",
                "its library cannot read it, for a reason that its log gives",
                "build it again with the version that runs it",
            )
        shape = self.config["inputs"]["ring_k"]["shape"]
        self._rings = {
            name: torch.zeros(shape, dtype=DTYPES[ring["dtype"]], device=self.device)
            for name in ("ring_k", "ring_v")
        }
        self._context = self._engine.create_execution_context()
        self._stream = torch.cuda.Stream(self.device)
        self._steps: dict[int, _CapturedStep] = {}

    @property
    def rings(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rings["ring_k"], self._rings["ring_v"]

    def empty(self, name: str, **sizes: int) -> torch.Tensor:
        """A device buffer for a tensor of the engine; ``sizes`` give its named dimensions."""
        known = self.config["inputs"].get(name) or self.config["outputs"][name]
        shape = [size if isinstance(size, int) else sizes[size] for size in known["shape"]]
        return torch.zeros(shape, dtype=DTYPES[known["dtype"]], device=self.device)

    def enqueue(self, context: Any, tensors: dict[str, torch.Tensor]) -> None:
        """One forward on the session's stream; inputs' shapes are those of the tensors."""
        for name, tensor in tensors.items():
            if name in self.config["inputs"]:
                context.set_input_shape(name, tuple(tensor.shape))
            context.set_tensor_address(name, tensor.data_ptr())
        for name, ring in self._rings.items():
            context.set_tensor_address(name, ring.data_ptr())
            context.set_tensor_address(f"{name}_out", ring.data_ptr())
        if not context.execute_async_v3(self._stream.cuda_stream):
            raise RuntimeError("TensorRT refused to enqueue the draft engine; see its log")

    def run(self, rows: Rows) -> Answers:
        inputs = {
            name: getattr(rows, name).to(self.device).contiguous()
            for name in Rows.__dataclass_fields__
        }
        inputs["hidden"] = inputs["hidden"].to(DTYPES[self.config["inputs"]["hidden"]["dtype"]])
        batch = rows.lanes.shape[0]
        outputs = {
            name: self.empty(name, b=batch)
            for name in self.config["outputs"]
            if not name.startswith("ring_")
        }
        if "logits" not in outputs:
            raise RequestError(
                "sampling with an engine of candidates",
                "a distribution needs all logits",
                "build with --top-k 0",
            )
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self.enqueue(self._context, inputs | outputs)
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return Answers(outputs["next_hidden"], outputs["logits"])

    def clear_lane(self, lane: int) -> None:
        """Empties a ring, in stream order, before it has another owner."""
        with torch.cuda.stream(self._stream):
            for ring in self._rings.values():
                ring[lane].zero_()

    def draft(self, requests: Sequence[AcceptedRows], hidden: torch.Tensor) -> torch.Tensor:
        """Greedy drafts ``[b, depth - 1]`` after the accepted rows, whose hidden states are
        ``hidden [rows, H]``; the result is overwritten by the next call for as many requests."""
        plan = plan_step(requests, self.depth)
        step = self._steps.get(len(requests))
        if step is None:
            step = self._steps[len(requests)] = _CapturedStep(self, len(requests))
        return step.replay(plan, hidden)

    def capture(self, enqueue: Callable[[], None]) -> Any:
        """An executable CUDA graph of what ``enqueue`` puts on the session's stream."""
        runtime, stream = self._cudart, self._stream.cuda_stream
        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        _require(runtime.cudaStreamBeginCapture(stream, mode))
        enqueue()
        (graph,) = _require(runtime.cudaStreamEndCapture(stream))
        (executable,) = _require(runtime.cudaGraphInstantiate(graph, 0))
        return executable

    def launch(self, executable: Any) -> None:
        _require(self._cudart.cudaGraphLaunch(executable, self._stream.cuda_stream))

    def context(self) -> Any:
        return self._engine.create_execution_context()

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._stream


def _require(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a CUDA runtime call gave besides its status."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status}")
    return tuple(values)


class _CapturedStep:
    """A step of b requests: buffers of fixed addresses and one graph over all its forwards.

    The output buffers of each forward are the inputs of the next, so nothing is copied between.
    """

    def __init__(self, session: EngineSession, batch: int):
        self.session, self.batch = session, batch
        rows, later = batch * session.depth, session.depth - 2
        make = session.empty
        self.token_ids, self.hidden = make("token_ids", n=rows), make("hidden", n=rows)
        self.positions = make("positions", n=rows)
        self.row_offsets = make("row_offsets", b_plus_1=batch + 1)
        self.one_each = make("row_offsets", b_plus_1=batch + 1)
        self.starts, self.lanes = make("start_positions", b=batch), make("lanes", b=batch)
        self.later = torch.zeros(later, batch, dtype=torch.int64, device=session.device)
        self.drafts = torch.zeros(later + 1, batch, dtype=torch.int64, device=session.device)
        self.states = [make("next_hidden", b=batch) for _ in range(later + 1)]
        others = [
            name
            for name in session.config["outputs"]
            if not name.startswith("ring_") and name not in ("next_hidden", "draft_tokens")
        ]
        self.ignored = {name: make(name, b=batch) for name in others}
        # Shapes differ between the first forward and the others, and a context has one of each.
        self.first, self.single = session.context(), session.context()
        with torch.cuda.stream(session.stream):
            self._warm_up()
            session.stream.synchronize()
            self.graph = session.capture(self._enqueue)

    def _warm_up(self) -> None:
        """Rows of no request: contexts allocate and choose kernels before the capture."""
        self._enqueue()

    def _enqueue(self) -> None:
        common = {"query_offsets": self.one_each, "lanes": self.lanes, **self.ignored}
        self.session.enqueue(
            self.first,
            {
                "token_ids": self.token_ids,
                "hidden": self.hidden,
                "positions": self.positions,
                "row_offsets": self.row_offsets,
                "start_positions": self.starts,
                "next_hidden": self.states[0],
                "draft_tokens": self.drafts[0],
                **common,
            },
        )
        for index, positions in enumerate(self.later):
            self.session.enqueue(
                self.single,
                {
                    "token_ids": self.drafts[index],
                    "hidden": self.states[index],
                    "positions": positions,
                    "row_offsets": self.one_each,
                    "start_positions": positions,
                    "next_hidden": self.states[index + 1],
                    "draft_tokens": self.drafts[index + 1],
                    **common,
                },
            )

    def replay(self, plan: StepPlan, hidden: torch.Tensor) -> torch.Tensor:
        session = self.session
        with torch.cuda.stream(session.stream):
            session.stream.wait_stream(torch.cuda.default_stream(session.device))
            for buffer, planned in (
                (self.token_ids, plan.token_ids),
                (self.positions, plan.positions),
                (self.row_offsets, plan.row_offsets),
                (self.starts, plan.starts),
                (self.lanes, plan.lanes),
                (self.one_each, plan.one_each),
                (self.later, plan.later_positions),
            ):
                buffer.copy_(planned, non_blocking=True)
            self.hidden[: plan.count].copy_(hidden, non_blocking=True)
            session.launch(self.graph)
        torch.cuda.default_stream(session.device).wait_stream(session.stream)
        return self.drafts.t()
