"""Who quantizes: this package, or NVIDIA Model Optimizer."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from tllm_wmtp.checkpoint.directory import CheckpointDirectory
from tllm_wmtp.checkpoint.quantization.packing import global_scale_of, pack
from tllm_wmtp.checkpoint.quantization.weights import NvFp4Weight
from tllm_wmtp.checkpoint.recipe import HEAD, Unit
from tllm_wmtp.errors import CheckpointError

BACKENDS = ("builtin", "modelopt")


class Backend(Protocol):
    """Quantizes the projections of one unit."""

    def quantize(
        self, unit: Unit, weights: Sequence[torch.Tensor], input_scale: torch.Tensor | None
    ) -> list[NvFp4Weight]: ...


class Builtin:
    """By :func:`.quantization.packing.pack`."""

    def quantize(
        self, unit: Unit, weights: Sequence[torch.Tensor], input_scale: torch.Tensor | None
    ) -> list[NvFp4Weight]:
        global_scale = global_scale_of(weights)
        return [pack(weight, global_scale, input_scale) for weight in weights]


class ModelOptimizer(Builtin):
    """The target by ``nvidia-modelopt``: its calibration of the ``transformers`` model and its
    export, from which the plan's matrices are taken.

    ``transformers`` leaves the MTP head out of the model, so the head is quantized by
    :class:`Builtin`, whose bits are the same.

    Args:
        source: the checkpoint.
        sequences: token ids to calibrate on.
        scratch: where the export goes; replaced if it is there.
        device: of the calibration.

    Raises:
        CheckpointError: a package is missing, or the library cannot do it.
    """

    def __init__(
        self, source: Path, sequences: Sequence[Sequence[int]], scratch: Path, device: str
    ):
        mtq, export, transformers = _libraries()
        shutil.rmtree(scratch, ignore_errors=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto").to(device)

        def calibrate(model: Any) -> None:
            with torch.inference_mode():
                for sequence in sequences:
                    model(torch.tensor([list(sequence)], device=device))

        mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, forward_loop=calibrate)
        export.export_hf_checkpoint(model, export_dir=scratch)
        self._exported = CheckpointDirectory(scratch)

    def quantize(
        self, unit: Unit, weights: Sequence[torch.Tensor], input_scale: torch.Tensor | None
    ) -> list[NvFp4Weight]:
        if unit.observed.startswith(f"{HEAD}:"):
            return super().quantize(unit, weights, input_scale)
        return [self._from_export(projection.module) for projection in unit.projections]

    def _from_export(self, module: str) -> NvFp4Weight:
        name = f"{module}.weight"
        found = self._exported.quantized(name) if name in self._exported.names else None
        if not isinstance(found, NvFp4Weight):
            raise CheckpointError(
                f"module {module}",
                "Model Optimizer has not quantized it, or calls it otherwise",
                f"use --backend builtin, or --exclude {module}",
            )
        return found


def _libraries() -> tuple[Any, Any, Any]:
    try:
        import modelopt.torch.export as export
        import modelopt.torch.quantization as mtq
        import transformers
    except ImportError as error:
        raise CheckpointError(
            f"backend 'modelopt' ({error})",
            "it needs the packages nvidia-modelopt and transformers",
            "pip install 'tllm-wmtp[quantize]', or use --backend builtin",
        ) from error
    return mtq, export, transformers
