"""A suite: a YAML file of sweeps, each the product of its axes."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tllm_wmtp.bench import inputs
from tllm_wmtp.bench.inputs.options import check_choice
from tllm_wmtp.bench.sweep.cells import ARMS, Cell, InputConfig, SamplingConfig, TargetConfig
from tllm_wmtp.bench.sweep.document import Document, read_document
from tllm_wmtp.config import DTYPES
from tllm_wmtp.errors import ConfigError, WmtpError

T = TypeVar("T")

#: More cells than anybody waits for: a slip of an axis.
MOST_CELLS = 10_000
KINDS = ("embedded", "openai", "triton")
#: The type of weights and caches at a server whose suite does not say.
UNSTATED = "unstated"
#: Axes with the field of a cell that each fills.
AXES = {
    "models": "model",
    "inputs": "input",
    "contexts": "context",
    "batches": "batch",
    "seeds": "seed",
    "kv_dtypes": "kv_dtype",
    "arms": "arm",
    "depths": "depth",
    "windows": "window",
    "sinks": "n_sink",
}
DEFAULTS: dict[str, Any] = {
    "target": "embedded",
    "device": "cpu",
    "dtype": None,
    "models": ["demo"],
    "arms": list(ARMS),
    "batches": [1],
    "seeds": [0],
    "kv_dtypes": ["auto"],
    "depths": [7],
    "windows": [4032],
    "sinks": [64],
    "repeats": 1,
    "prefill_chunk": 2048,
}
SAMPLING = tuple(field.name for field in fields(SamplingConfig))
FLOATS = {
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
}  # fmt: skip
REQUIRED = ("inputs", "contexts")
KEYS = (*REQUIRED, *DEFAULTS, *SAMPLING)


@dataclass(frozen=True)
class Names:
    """How a suite's numbers and models are spelled, as on the command line.

    Args:
        count: ``64k`` to 65,536; raises ``ValueError`` or ``argparse.ArgumentTypeError``.
        context: the same for a prompt's tokens.
        model: a name to the directory of its checkpoint.
    """

    count: Callable[[str], int]
    context: Callable[[str], int]
    model: Callable[[str], Path]


@dataclass(frozen=True)
class Suite:
    """The cells of all sweeps, each once, and the directory of each model."""

    cells: tuple[Cell, ...]
    directories: Mapping[str, Path]

    @property
    def digest(self) -> str:
        """Twelve hex digits that name all cells and their order."""
        names = " ".join(cell.digest for cell in self.cells)
        return hashlib.sha256(names.encode()).hexdigest()[:12]


def load_suite(path: Path, names: Names) -> Suite:
    """Reads and checks a suite; loads nothing.

    The file is a mapping with ``sweeps``, a list, and perhaps ``defaults`` for all of them; or one
    sweep.

    Raises:
        ConfigError: a key is unknown, or a value breaks a rule; with file and line.
    """
    document = read_document(path)
    sweeps = [document]
    shared: Document | None = None
    if "sweeps" in document.content:
        document.refuse_unknown(("defaults", "sweeps"))
        shared = document.child("defaults") if "defaults" in document.content else None
        sweeps = document.children("sweeps")
    cells: dict[str, Cell] = {}
    for sweep in sweeps:
        for cell in _Sweep(sweep, shared, names).cells():
            cells.setdefault(cell.digest, cell)
        if len(cells) > MOST_CELLS:
            raise ConfigError(
                f"{path}: {len(cells):,} cells",
                f"a suite has at most {MOST_CELLS:,}",
                "shorten an axis, or split the suite",
            )
    models = {cell.model for cell in cells.values()}
    return Suite(tuple(cells.values()), {model: names.model(model) for model in sorted(models)})


class _Sweep:
    """One product of axes; what it does not say, the shared defaults do, or :data:`DEFAULTS`."""

    def __init__(self, own: Document, shared: Document | None, names: Names):
        self._own, self._shared, self._names = own, shared, names
        own.refuse_unknown(KEYS)
        if shared is not None:
            shared.refuse_unknown(KEYS)
        for key in REQUIRED:
            if self._home(key) is None:
                raise own.error(None, f"a sweep without {key}", "it must have them", f"add {key}")

    def cells(self) -> list[Cell]:
        target = self._read("target", _target)
        embedded = target.kind == "embedded"
        dtype = self._read("dtype", lambda value: _dtype(value, embedded))
        sampling = self._sampling()
        common: dict[str, Any] = {
            "target": target,
            "device": self._read("device", _text) if embedded else "server",
            "dtype": dtype,
            "sampling": sampling,
            "repeats": self._read("repeats", self._count),
            "prefill_chunk": self._read("prefill_chunk", self._count) if embedded else 0,
        }
        axes: dict[str, list[Any]] = {
            "models": self._axis("models", self._model),
            "inputs": self._axis("inputs", _input),
            "contexts": self._axis("contexts", self._context),
            "batches": self._axis("batches", self._count),
            "seeds": self._axis("seeds", _seed),
            "kv_dtypes": self._axis("kv_dtypes", lambda value: _kv_dtype(value, dtype, embedded)),
            "arms": self._axis("arms", _arm),
            "depths": self._axis("depths", self._count),
            "windows": self._axis("windows", self._count),
            "sinks": self._axis("sinks", self._whole),
        }
        size = math.prod(len(values) for values in axes.values())
        if size > MOST_CELLS:
            raise self._own.error(
                None, f"a product of {size:,} cells", f"a suite has at most {MOST_CELLS:,}",
                "shorten an axis",
            )  # fmt: skip
        made = []
        for values in itertools.product(*axes.values()):
            chosen = {AXES[axis]: value for axis, value in zip(axes, values, strict=True)}
            if chosen["arm"] != "windowed":
                chosen |= {"window": None, "n_sink": 0}
            if chosen["arm"] == "dense":
                chosen["depth"] = 1
            made.append(self._checked(Cell(**common, **chosen)))
        return made

    def _checked(self, cell: Cell) -> Cell:
        """Holds a cell to the rules of the configurations that it becomes."""
        try:
            speculation = cell.speculation
            if cell.target.kind == "embedded":
                _ = cell.engine_config
            if speculation is not None:
                speculation.resolved(2**62, 2**62)
        except WmtpError as error:
            raise self._own.error(None, error.value, error.rule, error.remedy) from None
        return cell

    def _sampling(self) -> SamplingConfig:
        homes = {name: self._home(name) for name in SAMPLING}
        values = {name: home.content[name] for name, home in homes.items() if home is not None}
        if "max_tokens" in values:
            values["max_tokens"] = self._read("max_tokens", self._count)
        for name in FLOATS & values.keys():
            if type(values[name]) is int:
                values[name] = float(values[name])
        try:
            for name, kinds in (("ignore_eos", bool), ("temperature", float)):
                if not isinstance(values.get(name, kinds()), kinds):
                    raise ConfigError(
                        f"{name} {values[name]!r}", f"it is a {kinds.__name__}", "correct it"
                    )
            sampling = SamplingConfig(**values)
            sampling.params(0)
        except WmtpError as error:
            key = error.value.split(" ", 1)[0]
            home = homes.get(key) or self._own
            raise home.error(key, error.value, error.rule, error.remedy) from None
        return sampling

    def _home(self, key: str) -> Document | None:
        """Who has the key."""
        homes = (self._own, self._shared)
        return next((home for home in homes if home is not None and key in home.content), None)

    def _read(self, key: str, read: Callable[[Any], T]) -> T:
        home = self._home(key)
        if home is None:
            return read(DEFAULTS[key])
        try:
            return read(home.content[key])
        except WmtpError as error:
            raise home.error(key, f"{key}: {error.value}", error.rule, error.remedy) from None

    def _axis(self, key: str, read: Callable[[Any], T]) -> list[T]:
        """Values in their order, each once; one value may stand without a list."""

        def read_all(given: Any) -> list[T]:
            values = given if isinstance(given, list) else [given]
            if not values:
                raise ConfigError("an empty list", "an axis has one value or more", "add one")
            found: list[T] = []
            for value in map(read, values):
                if value not in found:
                    found.append(value)
            return found

        return self._read(key, read_all)

    def _count(self, value: Any) -> int:
        number = self._whole(value)
        if number < 1:
            raise ConfigError(f"{value!r}", "it must be 1 or more", "raise it")
        return number

    def _whole(self, value: Any) -> int:
        return _number(value, self._names.count)

    def _context(self, value: Any) -> int:
        number = _number(value, self._names.context)
        if number < 1:
            raise ConfigError(f"{value!r}", "a context has one token or more", "raise it")
        return number

    def _model(self, value: Any) -> str:
        name = _text(value)
        directory = self._names.model(name)
        if not (directory / "config.json").is_file():
            raise ConfigError(
                f"{name!r}",
                "a model is a directory with a config.json, or demo or demo-mamba2",
                "correct the path, which is relative to where the command runs",
            )
        return name


def _number(value: Any, read: Callable[[str], int]) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    try:
        if isinstance(value, str):
            return read(value)
    except (ValueError, argparse.ArgumentTypeError):
        pass
    raise ConfigError(
        f"{value!r}", "a whole number is expected", "write for example 4032, 64k or 1m"
    )


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{value!r}", "text is expected", "put it in quotes if need be")
    return value


def _input(value: Any) -> InputConfig:
    """A task's name, or a mapping with its name and what else it is told."""
    given = dict(value) if isinstance(value, dict) else {"task": value}
    known = [field.name for field in fields(InputConfig) if field.name != "options"]
    options = {key: given.pop(key) for key in sorted(given.keys() - set(known))}
    task = check_choice("task", given.get("task"), tuple(inputs.TASKS))
    for key in given:
        _text(given[key])
    check_choice("lexicon", given.get("lexicon", "english"), tuple(inputs.LEXICONS))
    check_choice("difficulty", given.get("difficulty", "medium"), inputs.DIFFICULTIES)
    for name in options:
        check_choice(f"key of task {task}", name, (*known, *inputs.TASKS[task].options))
    return InputConfig(**given, options=options)


def _seed(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ConfigError(f"{value!r}", "a seed is an integer from 0 to 2**63 - 1", "correct it")
    return value


def _arm(value: Any) -> str:
    if value not in ARMS:
        raise ConfigError(f"{value!r}", f"an arm is one of {', '.join(ARMS)}", "correct it")
    return str(value)


def _dtype(value: Any, embedded: bool) -> str:
    if value is None:
        return "float32" if embedded else UNSTATED
    name = _text(value)
    if embedded and name not in DTYPES:
        raise ConfigError(f"{name!r}", f"it must be one of {', '.join(DTYPES)}", "correct it")
    return name


def _kv_dtype(value: Any, dtype: str, embedded: bool) -> str:
    return dtype if value == "auto" else _dtype(value, embedded)


def _target(value: Any) -> TargetConfig:
    given = {"kind": value} if isinstance(value, str) else value
    known = [field.name for field in fields(TargetConfig)]
    if not isinstance(given, dict) or not given.keys() <= set(known):
        wrong = sorted(given.keys() - set(known)) if isinstance(given, dict) else [value]
        raise ConfigError(
            ", ".join(map(repr, wrong)), f"a target has {', '.join(known)}", "correct it"
        )
    target = TargetConfig(**given)
    if target.kind not in KINDS:
        raise ConfigError(f"kind {target.kind!r}", f"it is one of {', '.join(KINDS)}", "correct it")
    if target.kind == "embedded":
        if given.keys() != {"kind"}:
            raise ConfigError(
                f"{', '.join(sorted(given))}", "the embedded target has no address", "use embedded"
            )
        return target
    for name in ("url", "model"):
        if not isinstance(getattr(target, name), str):
            raise ConfigError(
                f"a target {target.kind} without {name}", "a server has an address and a model",
                f"add {name}",
            )  # fmt: skip
    _check_server(target)
    return target


def _check_server(target: TargetConfig) -> None:
    address = urlsplit(target.url or "")
    if target.kind == "openai" and (address.scheme not in ("http", "https") or not address.netloc):
        raise ConfigError(
            f"url {target.url!r}", "it begins with http:// or https://", "write http://HOST:PORT"
        )
    if target.kind == "triton" and "//" in (target.url or ""):
        raise ConfigError(
            f"url {target.url!r}", "Triton's gRPC address has no scheme", "write HOST:PORT"
        )
    if "@" in (target.url or ""):
        raise ConfigError(
            "a url with a name or a password", "results carry the url, and a secret must not be "
            "among them", "put the key into an environment variable, and its name into api_key_env",
        )  # fmt: skip
    seconds = target.timeout_s
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < 1e6:
        raise ConfigError(f"timeout_s {seconds!r}", "it is a number of seconds above 0", "use 600")
    if not isinstance(target.return_token_ids, bool):
        raise ConfigError(
            f"return_token_ids {target.return_token_ids!r}", "it is true or false", "correct it"
        )
    if target.api_key_env is not None:
        _text(target.api_key_env)
