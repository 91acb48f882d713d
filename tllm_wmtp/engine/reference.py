"""A draft graph in onnxruntime on the CPU: what the standard ops make of it is the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tllm_wmtp.engine.draft import DraftSpec
from tllm_wmtp.engine.proposer import Answers, Rows
from tllm_wmtp.errors import ConfigError


class OnnxDraft:
    """Runs ``draft.onnx`` in its standard lowering; the rings start empty.

    Args:
        file: written by :func:`~tllm_wmtp.engine.draft.write_draft_graph` with this ``spec``.
        threads: that onnxruntime may use.

    Raises:
        ConfigError: the graph has plugin nodes, or onnxruntime is not installed.
    """

    def __init__(self, file: Path, spec: DraftSpec, threads: int = 1):
        try:
            import onnxruntime
        except ImportError:
            raise ConfigError(
                "onnxruntime",
                "it runs the reference of a draft graph, and is not installed",
                "install onnxruntime",
            ) from None
        if spec.lowering != "standard" or spec.dtype != "float32":
            raise ConfigError(
                f"a graph in {spec.lowering} lowering and {spec.dtype}",
                "onnxruntime has no plugin and computes in float32 on a CPU",
                "write the graph with lowering='standard' and dtype='float32'",
            )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self._session: Any = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )
        self.ring, self.lanes, self.max_rows = spec.ring, spec.lanes, spec.max_rows
        shapes = {one.name: one.shape for one in self._session.get_inputs()}
        self._rings = [np.zeros(shapes[name], np.float32) for name in ("ring_k", "ring_v")]

    @property
    def rings(self) -> tuple[torch.Tensor, torch.Tensor]:
        ring_k, ring_v = (torch.from_numpy(ring) for ring in self._rings)
        return ring_k, ring_v

    def run(self, rows: Rows) -> Answers:
        feed = {
            "token_ids": rows.token_ids,
            "hidden": rows.hidden.float(),
            "positions": rows.positions,
            "row_offsets": rows.row_offsets,
            "query_offsets": rows.query_offsets,
            "start_positions": rows.start_positions,
            "lanes": rows.lanes,
        }
        names = ["next_hidden", "logits", "ring_k_out", "ring_v_out"]
        given = {name: tensor.contiguous().numpy() for name, tensor in feed.items()}
        given |= {"ring_k": self._rings[0], "ring_v": self._rings[1]}
        hidden, logits, *self._rings = self._session.run(names, given)
        return Answers(torch.from_numpy(hidden), torch.from_numpy(logits))
