"""What a server allows its clients, validated once."""

from __future__ import annotations

from dataclasses import dataclass

from tllm_wmtp.errors import ConfigError

#: Bytes of a request per token that the engine takes: a longer one is refused while it is read.
BYTES_PER_TOKEN = 64
#: That limit is never below this.
LEAST_REQUEST_BYTES = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """Args:
    served_name: what clients call the model.
    api_key: what they must send as a bearer token; None asks for none.
    max_request_bytes: longest body; None is 64 bytes per token of the engine's ``max_seq_len``,
        at least 1 MiB.
    max_concurrent: completions that may run and wait; further requests are refused.
    shutdown_timeout_s: how long requests under way may go on after a signal to stop.

    Raises:
        ConfigError: a value that no server can have.
    """

    served_name: str
    api_key: str | None = None
    max_request_bytes: int | None = None
    max_concurrent: int = 256
    shutdown_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.served_name:
            raise ConfigError(
                "an empty served model name", "clients call the model by it", "give it a name"
            )
        try:
            self.served_name.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"served model name {self.served_name!r}",
                "every answer holds it, so it must be valid Unicode",
                "give it another name",
            ) from None
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise ConfigError(
                "an API key that is empty or not ASCII",
                "clients send it in an HTTP header",
                "use letters and digits, or leave it out to ask for none",
            )
        if self.max_request_bytes is not None and self.max_request_bytes < 1:
            raise ConfigError(
                f"max_request_bytes {self.max_request_bytes}", "it must be 1 or more", "raise it"
            )
        if self.max_concurrent < 1:
            raise ConfigError(
                f"max_concurrent {self.max_concurrent}", "it must be 1 or more", "raise it"
            )
        if not 0 <= self.shutdown_timeout_s < float("inf"):
            raise ConfigError(
                f"shutdown_timeout {self.shutdown_timeout_s}",
                "it is a number of seconds, 0 or more",
                "use 0 to end requests at once",
            )

    def request_bytes(self, max_seq_len: int) -> int:
        """Longest body in front of an engine with this ``max_seq_len``."""
        if self.max_request_bytes is not None:
            return self.max_request_bytes
        return max(LEAST_REQUEST_BYTES, BYTES_PER_TOKEN * max_seq_len)
