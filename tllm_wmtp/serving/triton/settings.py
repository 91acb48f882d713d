"""What one Triton model serves: the ``parameters`` of its config.pbtxt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tllm_wmtp.config import EngineConfig, KvCacheConfig, MtpConfig
from tllm_wmtp.errors import ConfigError

ARMS = ("dense", "native", "windowed")
#: Bytes of text per token that a prompt may have: a longer one is refused before it is tokenized.
BYTES_PER_TOKEN = 64
#: That limit is never below this.
LEAST_PROMPT_BYTES = 1 << 20


@dataclass(frozen=True)
class InstanceSettings:
    """One instance, which holds one :class:`tllm_wmtp.LLM`.

    Args:
        model: checkpoint directory, as the server's machine names it.
        arm: ``dense``, ``native`` or ``windowed``.
        kv_tokens: tokens that the KV pool holds; None as in :class:`tllm_wmtp.KvCacheConfig`.
        max_queue_size: requests that may wait; further ones are refused at once.
        max_prompt_bytes: longest prompt text; None is 64 bytes per token of ``max_seq_len``, at
            least 1 MiB.
        cancellation_check_period_ms: how often the server is asked which clients have left.

    Raises:
        ConfigError: as the engine's own configuration would.
    """

    model: str
    arm: str = "windowed"
    depth: int = 7
    window: int = 4032
    n_sink: int = 64
    max_batch_size: int = 8
    max_seq_len: int | None = None
    dtype: str = "float32"
    kv_dtype: str = "auto"
    kv_tokens: int | None = None
    device: str = "cpu"
    max_queue_size: int = 1024
    max_prompt_bytes: int | None = None
    cancellation_check_period_ms: int = 100

    def __post_init__(self) -> None:
        if self.arm not in ARMS:
            raise ConfigError(
                f"arm {self.arm!r}", f"it must be one of {', '.join(ARMS)}", "use 'windowed'"
            )
        for name, least in (
            ("max_queue_size", 0),
            ("cancellation_check_period_ms", 1),
            ("max_prompt_bytes", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} {value}", f"it must be {least} or more", f"raise {name}")
        self.engine_config()

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Mapping[str, str]]) -> InstanceSettings:
        """The reverse of :meth:`to_parameters`, from the model configuration that Triton hands
        over. An empty value is the default; parameters in capitals are Triton's own.

        Raises:
            ConfigError: an unknown parameter, or a value of the wrong kind.
        """
        known = {field.name: field for field in fields(cls)}
        given: dict[str, Any] = {}
        for name, holder in parameters.items():
            text = holder.get("string_value", "")
            if name.isupper():
                continue
            if name not in known:
                raise ConfigError(
                    f"parameter {name!r} of config.pbtxt",
                    "this model does not have it",
                    f"correct it to one of {', '.join(known)}",
                )
            if text:
                given[name] = _integer(name, text) if "int" in known[name].type else text
        if "model" not in given:
            raise ConfigError(
                "config.pbtxt without the parameter 'model'",
                "it names the checkpoint directory",
                "add it, or write the repository with wmtp triton-repo",
            )
        return cls(**given)

    def to_parameters(self) -> dict[str, str]:
        """Every setting, None as an empty string."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: "" if value is None else str(value) for name, value in values}

    @property
    def speculation(self) -> MtpConfig | None:
        if self.arm == "dense":
            return None
        if self.arm == "native":
            return MtpConfig.native(self.depth)
        return MtpConfig(self.depth, self.window, self.n_sink)

    @property
    def served(self) -> dict[str, str | int | None]:
        """What the inputs ``speculation``, ``depth``, ``window`` and ``n_sink`` may say; None where
        the arm has no such thing."""
        drafts, windowed = self.arm != "dense", self.arm == "windowed"
        return {
            "speculation": self.arm,
            "depth": self.depth if drafts else None,
            "window": self.window if windowed else None,
            "n_sink": self.n_sink if windowed else None,
        }

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            speculation=self.speculation,
            kv_cache=KvCacheConfig(max_tokens=self.kv_tokens, dtype=self.kv_dtype),
            max_batch_size=self.max_batch_size,
            max_seq_len=self.max_seq_len,
            dtype=self.dtype,
            device=self.device,
        )

    def prompt_bytes(self, max_seq_len: int) -> int:
        """Longest prompt text of an engine with this ``max_seq_len``."""
        if self.max_prompt_bytes is not None:
            return self.max_prompt_bytes
        return max(LEAST_PROMPT_BYTES, BYTES_PER_TOKEN * max_seq_len)


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"parameter {name} {text!r} of config.pbtxt", "it must be an integer", "correct it"
        ) from None
