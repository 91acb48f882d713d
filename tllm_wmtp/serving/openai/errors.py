"""What a client is told when its request cannot be served, in OpenAI's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tllm_wmtp.errors import WmtpError


class HttpError(Exception):
    """Ends one request with ``status``; its neighbours go on.

    Args:
        error: value, rule and remedy.
        code: what a program can tell errors of one status apart by.
        param: the field of the request that is wrong.
    """

    def __init__(
        self,
        status: int,
        error: WmtpError | str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(str(error))
        self.status, self.code, self.param = status, code, param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error"
        if self.status == 429:
            kind = "requests"
        elif self.status >= 500:
            kind = "server_error"
        shown = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": shown}


def refusal(
    value: str, rule: str, remedy: str, param: str | None = None, status: int = 400
) -> HttpError:
    """Something is wrong with the request itself."""
    return HttpError(status, WmtpError(value, rule, remedy), param=param)
