"""Errors that a user can act on: each message holds the value, the rule and the remedy."""

from __future__ import annotations

#: Most characters that a message shows of a value, which may be whatever a client has sent.
MOST_SHOWN = 500


class WmtpError(ValueError):
    """Base of every error that this package raises on bad input."""

    def __init__(self, value: str, rule: str, remedy: str):
        if len(value) > MOST_SHOWN:
            value = f"{value[:MOST_SHOWN]}..."
        super().__init__(f"{value}: {rule}; {remedy}")
        self.value, self.rule, self.remedy = value, rule, remedy


class ConfigError(WmtpError):
    """A configuration value breaks a rule; raised before anything is allocated."""


class CheckpointError(WmtpError):
    """A checkpoint directory is incomplete, damaged or of a kind that is not supported."""


class RequestError(WmtpError):
    """One request cannot be served; its neighbours in the batch go on."""
