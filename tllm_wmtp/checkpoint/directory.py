"""A Hugging Face checkpoint directory, unchanged: config.json, safetensors, tokenizer.json.

Names, shapes and tensors are those of the model's weights, however they are stored: of a quantized
weight, packed values and scales appear as one tensor.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from tllm_wmtp.checkpoint.quantization.layout import StoredWeight, read_weight, stored_weights
from tllm_wmtp.checkpoint.quantization.metadata import HF_QUANT_CONFIG, QUANT_CFG, read_quantization
from tllm_wmtp.checkpoint.quantization.weights import Fp8Weight, NvFp4Weight
from tllm_wmtp.checkpoint.tokenizer import load_tokenizer
from tllm_wmtp.errors import CheckpointError
from tllm_wmtp.models.fields import Fields

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ELEMENT_TYPES = ("F32", "BF16", "F16")
STORED_BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16, "I16": 16}


class CheckpointDirectory:
    """Names and shapes at once, weights on demand (memory-mapped, one tensor at a time)."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(
                f"model {str(path)!r}",
                "it must be a checkpoint directory",
                "pass the directory that holds config.json",
            )
        self.config = self._json("config.json")
        beside = [
            self._json(name) if (self.path / name).exists() else None
            for name in (HF_QUANT_CONFIG, QUANT_CFG)
        ]
        #: What the JSON files say of quantization; None where they say nothing.
        self.quantization = read_quantization(self.config, *beside)
        self._files: dict[Path, Any] = {}
        self._file_of = self._locate()
        self._quantized: dict[str, StoredWeight] = {}
        self._names = list(self._file_of)
        if self.quantization is not None:
            self._quantized, parts = stored_weights(self._names, self._header, self.quantization)
            self._names = [name for name in self._names if name not in parts]
            self._names += self._quantized

    @property
    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._quantized:
            return self._quantized[name].shape
        return self._header(name)[1]

    def element_type(self, name: str) -> str:
        """The file's name of the type (``F32``, ``BF16``, ...), or ``NVFP4`` or ``FP8``."""
        if name in self._quantized:
            return self._quantized[name].scheme.format
        return self._header(name)[0]

    def stored_bytes(self, name: str) -> int:
        """Bytes of the weight in the files, its scales included."""
        parts = self._quantized[name].parts if name in self._quantized else [name]
        headers = (self._header(part) for part in parts)
        return sum(STORED_BITS.get(kind, 8) // 8 * math.prod(shape) for kind, shape in headers)

    def tensor(self, name: str) -> torch.Tensor:
        """The weight; float32 where it is stored quantized."""
        quantized = self.quantized(name)
        if quantized is not None:
            return quantized.dequantize()
        kind = self.element_type(name)
        if kind not in ELEMENT_TYPES:
            says = "no quantization_config says how it is quantized"
            raise CheckpointError(
                f"tensor {name} of type {kind} in {self._file_of[name].name}",
                f"weights must be one of {', '.join(ELEMENT_TYPES)}"
                + (f", and {says}" if self.quantization is None else ""),
                "download the complete checkpoint, or use the unquantized one",
            )
        return self._stored(name)

    def quantized(self, name: str) -> NvFp4Weight | Fp8Weight | None:
        """The weight as it is stored, or None where it is not quantized."""
        stored = self._quantized.get(name)
        return None if stored is None else read_weight(stored, self._stored)

    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids that generation_config.json adds to those of config.json."""
        if not (self.path / "generation_config.json").exists():
            return ()
        name = "generation_config.json"
        return Fields(self._json(name), name).token_ids("eos_token_id")

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None where the directory has none: then token ids only."""
        file = self.path / "tokenizer.json"
        if not file.exists():
            return None
        return load_tokenizer(file)

    def _json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(
                f"{file} is missing",
                f"a checkpoint directory holds {name}",
                "download the complete checkpoint",
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{file} cannot be read ({error.strerror})",
                f"a checkpoint directory holds {name}",
                "check path and rights",
            ) from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{file}: {error}", "it must be JSON", "download the file again"
            ) from error
        if not isinstance(content, dict):
            raise CheckpointError(
                f"{file} holds a {type(content).__name__}",
                "it must hold a JSON object",
                "download the file again",
            )
        return content

    def _locate(self) -> dict[str, Path]:
        if (self.path / INDEX).exists():
            weight_map = self._json(INDEX).get("weight_map")
            if (
                not isinstance(weight_map, dict)
                or not weight_map
                or not all(isinstance(file, str) for file in weight_map.values())
            ):
                raise CheckpointError(
                    f"{self.path / INDEX} has no weight_map",
                    "the index names the file of every tensor",
                    "download the file again",
                )
            located = {name: self.path / file for name, file in weight_map.items()}
        elif (self.path / SINGLE).exists():
            located = dict.fromkeys(self._handle(self.path / SINGLE).keys(), self.path / SINGLE)
        else:
            raise CheckpointError(
                f"no weights in {self.path}",
                f"a checkpoint directory holds {SINGLE} or {INDEX}",
                "download the complete checkpoint",
            )
        held = {file: set(self._handle(file).keys()) for file in sorted(set(located.values()))}
        for name, file in located.items():
            if name not in held[file]:
                raise CheckpointError(
                    f"tensor {name} is not in {file}",
                    f"{INDEX} says it is",
                    "download both files again",
                )
        return located

    def _header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type and shape of a stored tensor."""
        header = self._handle(self._file_of[name]).get_slice(name)
        return str(header.get_dtype()), tuple(header.get_shape())

    def _stored(self, name: str) -> torch.Tensor:
        file = self._file_of[name]
        try:
            tensor: torch.Tensor = self._handle(file).get_tensor(name)
        except SafetensorError as error:
            raise self._damaged(file, error) from error
        return tensor

    def _handle(self, file: Path) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(str(file), framework="pt")
            except FileNotFoundError:
                raise CheckpointError(
                    f"{file} is missing",
                    f"{INDEX} names it",
                    "download the complete checkpoint",
                ) from None
            except (SafetensorError, OSError) as error:
                raise self._damaged(file, error) from error
        return self._files[file]

    @staticmethod
    def _damaged(file: Path, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{file} is truncated or damaged ({error})",
            "it must be a complete safetensors file",
            "download the file again",
        )
