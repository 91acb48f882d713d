"""The file of a suite's rows: appended one by one, taken up again, never overwritten."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from tllm_wmtp.bench.sweep.rows import Row, parse_rows
from tllm_wmtp.errors import ConfigError


class RowFile:
    """Open for one process at a time. A last line that a killed run cut off is dropped.

    Args:
        path: made, with its folder, if it is not there.

    Raises:
        ConfigError: it cannot be written, another process has it open, or a line is no row.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(
                f"--out {str(path.parent)!r}",
                f"{path.name} cannot be written there ({error.strerror})",
                "choose another folder",
            ) from error
        try:
            self._lock()
            content = path.read_bytes()
            self.rows = parse_rows(content, path)
            os.ftruncate(self._descriptor, content.rfind(b"\n") + 1)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> RowFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)

    def append(self, row: Row) -> None:
        """Adds a row; it is on the disk when this returns."""
        content = row.line().encode()
        while content:
            content = content[os.write(self._descriptor, content) :]
        os.fsync(self._descriptor)
        self.rows.append(row)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"file {self.path}",
                "another run writes it now",
                "wait for its end, or choose another --out",
            ) from error
