"""A Hugging Face checkpoint directory, unchanged: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from tllm_wmtp.errors import CheckpointError
from tllm_wmtp.models.fields import Fields

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ELEMENT_TYPES = ("F32", "BF16", "F16")


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
        self._refuse_quantization()
        self._files: dict[Path, Any] = {}
        self._file_of = self._locate()

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(name).get_slice(name).get_shape())

    def element_type(self, name: str) -> str:
        """The file's name of the type: ``F32``, ``BF16``, ..."""
        return str(self._open(name).get_slice(name).get_dtype())

    def tensor(self, name: str) -> torch.Tensor:
        file = self._file_of[name]
        try:
            handle = self._open(name)
            kind = self.element_type(name)
            if kind not in ELEMENT_TYPES:
                raise CheckpointError(
                    f"tensor {name} of type {kind} in {file.name}",
                    f"weights must be one of {', '.join(ELEMENT_TYPES)}",
                    "use the unquantized checkpoint",
                )
            return handle.get_tensor(name)
        except SafetensorError as error:
            raise self._damaged(file, error) from error

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
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(
                f"{file}: {error}",
                "it must be a tokenizer of the 'tokenizers' library",
                "download the file again, or remove it to work with token ids",
            ) from error

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

    def _refuse_quantization(self) -> None:
        kinds = set()
        text = self.config.get("text_config")
        for config in (self.config, text if isinstance(text, dict) else {}):
            if quantization := config.get("quantization_config"):
                kinds.add(_quantization_kind(quantization))
        if (self.path / "hf_quant_config.json").exists():
            kinds.add(_quantization_kind(self._json("hf_quant_config.json").get("quantization")))
        if kinds:
            raise CheckpointError(
                f"quantization {' and '.join(sorted(kinds))} in {self.path}",
                "only unquantized weights (float32, bfloat16, float16) can be loaded",
                "use the unquantized checkpoint",
            )

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

    def _open(self, name: str) -> Any:
        return self._handle(self._file_of[name])

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


def _quantization_kind(quantization: Any) -> str:
    if not isinstance(quantization, dict):
        return str(quantization)
    return str(quantization.get("quant_algo") or quantization.get("quant_method"))
