"""A directory that appears under its name only when it is complete."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tllm_wmtp.errors import CheckpointError


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


class PartialDirectory:
    """Work on ``<parent>/.<name>.partial``, which :meth:`publish` renames to ``final``.

    A run that fails leaves nothing at ``final``. What it had finished stays in the partial
    directory, with hashes; a later run with the same ``fingerprint`` takes it up, and one with
    another fingerprint starts over. A run that fails before it has finished a file leaves nothing
    at all.

    Raises:
        CheckpointError: ``final`` exists, another run is writing it, or something foreign is in the
            partial directory's place.
    """

    STATE = "progress.json"

    def __init__(self, final: str | Path, fingerprint: str):
        self.final = Path(os.path.abspath(final))
        self.path = self.final.with_name(f".{self.final.name}.partial")
        if os.path.lexists(self.final):
            raise CheckpointError(
                f"output {str(final)!r}",
                "it exists already, and nothing is overwritten",
                "remove it or choose another directory",
            )
        if not self.final.parent.is_dir():
            raise CheckpointError(
                f"output {str(final)!r}", "its parent directory must exist", "create it first"
            )
        self._state: dict[str, Any] = {"fingerprint": fingerprint, "files": {}, "notes": {}}
        fresh = self._make_or_find()
        self._lock = self._locked()
        try:
            if not fresh and any(self.path.iterdir()):
                self._take_up(fingerprint)
            self._save()
        except BaseException:
            os.close(self._lock)
            raise

    def _make_or_find(self) -> bool:
        try:
            self.path.mkdir()
        except FileExistsError:
            return False
        return True

    def _locked(self) -> int:
        """A lock on the directory, which the system releases when this process ends, however."""
        taken = CheckpointError(
            f"output {str(self.final)!r}",
            "another run is writing it at this moment",
            "wait for it, or choose another directory",
        )
        try:
            lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except NotADirectoryError:
            raise self._in_the_way("it is a file") from None
        except FileNotFoundError:
            raise taken from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The other run may have published or removed it just before.
            if not os.path.samestat(os.fstat(lock), self.path.stat()):
                raise taken
        except (BlockingIOError, FileNotFoundError):
            os.close(lock)
            raise taken from None
        except CheckpointError:
            os.close(lock)
            raise
        return lock

    def __enter__(self) -> PartialDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is not None and not self._state["files"] and self.path.exists():
                shutil.rmtree(self.path)
        finally:
            os.close(self._lock)

    @property
    def notes(self) -> dict[str, Any]:
        """What an earlier run with the same fingerprint noted; JSON values."""
        return dict(self._state["notes"])

    def note(self, key: str, value: Any) -> None:
        self._state["notes"][key] = value
        self._save()

    def holds(self, name: str) -> bool:
        """Whether ``name`` was finished, by this run or an earlier one, and is intact."""
        found = self._state["files"].get(name)
        path = self.path / name
        return found is not None and path.is_file() and file_hash(path) == found

    def write(self, name: str, save: Callable[[Path], Any]) -> None:
        """``save(path)`` makes the file; it takes its name once it is whole."""
        temporary = self.path / f"{name}.unfinished"
        save(temporary)
        shutil.copymode(self.path / self.STATE, temporary)  # as the user's umask has it
        self._state["files"][name] = file_hash(temporary)
        os.replace(temporary, self.path / name)
        self._save()

    def publish(self) -> None:
        for leftover in self.path.glob("*.unfinished"):
            leftover.unlink()
        # The state goes last: a run that ends between these two lines has lost nothing.
        os.rename(self.path, self.final)
        (self.final / self.STATE).unlink()

    def _take_up(self, fingerprint: str) -> None:
        try:
            state = json.loads((self.path / self.STATE).read_text(encoding="utf-8"))
            same = state["fingerprint"] == fingerprint
            state = {key: dict(state[key]) for key in ("files", "notes")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            if {file.name for file in self.path.iterdir()} == {f"{self.STATE}.unfinished"}:
                return  # a run that ended while it began
            raise self._in_the_way(str(error)) from error
        if same:
            self._state.update(state)
            return
        for file in self.path.iterdir():  # the directory itself stays: it is locked
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file)
            else:
                file.unlink()

    def _in_the_way(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"directory {self.path}",
            f"it is in the way and was not left by an earlier run ({why})",
            "remove it",
        )

    def _save(self) -> None:
        temporary = self.path / f"{self.STATE}.unfinished"
        temporary.write_text(json.dumps(self._state), encoding="utf-8")
        os.replace(temporary, self.path / self.STATE)
