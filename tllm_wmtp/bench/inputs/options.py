"""What each task can be told, its three difficulties, and the check of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tllm_wmtp.bench.inputs.lexicon import FILLERS, Lexicon
from tllm_wmtp.errors import ConfigError

DIFFICULTIES = ("easy", "medium", "hard")
UNIFORM = "uniform"
FREQUENT_ANSWERS = 3


@dataclass(frozen=True)
class Task:
    """A kind of input.

    Attributes:
        about: one line for a list.
        presets: for each difficulty, the value of every option.
        fixed: settings that this task does not leave open.
    """

    about: str
    presets: Mapping[str, Mapping[str, Any]]
    fixed: Mapping[str, Any]

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(self.presets["medium"])


def _task(about: str, fixed: Mapping[str, Any], **options: Any) -> Task:
    """``options`` are one value for all difficulties or a tuple of three."""
    presets = {
        difficulty: {
            name: value[rank] if isinstance(value, tuple) else value
            for name, value in options.items()
        }
        for rank, difficulty in enumerate(DIFFICULTIES)
    }
    return Task(about, presets, fixed)


_HAY: dict[str, Any] = {
    "filler": ("repeat", "prose", "needles"),
    "value_type": ("numbers", "numbers", "uuid"),
    "depth": UNIFORM,
}
_ONE = {"keys": 1, "values": 1, "queries": 1, "enumerate": False}
GENERATED: dict[str, Task] = {
    "niah_single": _task("one record, asked for", _ONE, **_HAY),
    "niah_multikey": _task(
        "many records, one asked for",
        {"values": 1, "queries": 1, "enumerate": False},
        keys=(4, 16, 64),
        **_HAY,
    ),
    "niah_multivalue": _task(
        "one key with several values, all asked for",
        {"keys": 1, "queries": 1, "enumerate": False},
        values=(2, 4, 8),
        **_HAY,
    ),
    "niah_multiquery": _task(
        "many records, several asked for",
        {"values": 1, "enumerate": False},
        keys=(4, 8, 32),
        queries=(2, 4, 8),
        **_HAY,
    ),
    "niah_multiquery_enum": _task(
        "many records, many asked for as a list of key and value: long outputs",
        {"values": 1, "enumerate": True},
        keys=(16, 24, 64),
        queries=(8, 24, 48),
        **_HAY,
    ),
    "niah_multivalue_enum": _task(
        "one key with many values, asked for as a list: long outputs",
        {"keys": 1, "queries": 1, "enumerate": True},
        values=(8, 24, 48),
        **_HAY,
    ),
    "vt": _task(
        "chains of assignments; which variables have a value",
        {},
        filler=_HAY["filler"],
        chains=(1, 2, 4),
        hops=(2, 4, 6),
    ),
    "cwe": _task(
        "a list of words; which are the most common",
        {},
        common=(5, 10, 10),
        common_frequency=(30, 30, 20),
        rare_frequency=(1, 3, 8),
    ),
    "fwe": _task(
        f"coded words by a Zipf law; which {FREQUENT_ANSWERS} are the most frequent",
        {},
        alpha=(3.5, 2.0, 1.5),
        coded_words=(100, 400, 1000),
    ),
}
#: The least and the most of each option that is a whole number.
RANGES = {
    "keys": (1, 4096),
    "values": (1, 4096),
    "queries": (1, 4096),
    "chains": (1, 256),
    "hops": (1, 64),
    "common": (1, 64),
    "common_frequency": (2, 100_000),
    "rare_frequency": (1, 100_000),
    "coded_words": (FREQUENT_ANSWERS + 1, 100_000),
}
#: Tokens of a word on a list: about, and at least.
ENTRY_TOKENS, LEAST_ENTRY_TOKENS = 7, 2
COMMON_OVER_RARE = 4
ALPHA_STEP = 0.5
ALPHA_RANGE = (1.0, 6.0)


def resolve(
    name: str, difficulty: str, lexicon: Lexicon, tokens: int, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Every option of the task: those given, and the difficulty's for the rest.

    Raises:
        ConfigError: an unknown difficulty or option, or a value outside its range.
    """
    task = GENERATED[name]
    refuse_unknown(f"task {name}", given, task.options)
    preset = task.presets[check_choice("difficulty", difficulty, DIFFICULTIES)]
    options = {**_suited(preset, lexicon, tokens), **given}
    for option, value in options.items():
        _check(option, value, lexicon)
        if option in ("alpha", "depth") and value != UNIFORM:
            options[option] = float(value) + 0.0  # of the two zeros, the same
    if "queries" in options and options["queries"] > options["keys"]:
        if "queries" in given and "keys" not in given:
            options["keys"] = options["queries"]
        elif "keys" in given and "queries" not in given:
            options["queries"] = options["keys"]
        else:
            raise ConfigError(
                f"queries {options['queries']}",
                f"no more can be asked than there are keys ({options['keys']})",
                "raise keys or lower queries",
            )
    return options


def _suited(preset: Mapping[str, Any], lexicon: Lexicon, tokens: int) -> dict[str, Any]:
    """The preset as far as the lexicon has the words and the tokens have the room.

    Common words take about half of a short list; where the lexicon's rare words must come again
    and again, the common ones come more often than they do.
    """
    suited = dict(preset)
    if suited.get("value_type") not in (None, *lexicon.value_types):
        suited["value_type"] = lexicon.value_types[0]
    if "coded_words" in suited:
        suited["coded_words"] = min(suited["coded_words"], lexicon.n_list_words)
    if "common_frequency" in suited:
        fits = tokens // (2 * ENTRY_TOKENS * suited["common"])
        repeats = tokens // (LEAST_ENTRY_TOKENS * (lexicon.n_list_words - suited["common"]))
        suited["common_frequency"] = max(
            2 * suited["rare_frequency"],
            min(fits, suited["common_frequency"]),
            COMMON_OVER_RARE * repeats,
        )
    return suited


def refuse_unknown(owner: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raises a ConfigError that names the known options where another one is given."""
    for option in given:
        if option not in known:
            raise ConfigError(
                f"option {option} of {owner}",
                f"it must be one of {', '.join(known) or 'none: it has no options'}",
                "correct or remove it",
            )


def check_choice(name: str, value: Any, known: tuple[str, ...]) -> str:
    """``value``, which must be one of ``known``."""
    if value not in known:
        raise ConfigError(
            f"{name} {value!r}", f"it must be one of {', '.join(known)}", "choose one"
        )
    return str(value)


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """``value``, which must be an int of ``least`` or more, and of ``most`` or less."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} {value!r}", "it must be an integer", f"pass {name} as an int")
    if value < least or (most is not None and value > most):
        rule = f"it must be {least} or more" + ("" if most is None else f" and at most {most}")
        raise ConfigError(f"{name} {value}", rule, "lower it" if value > least else "raise it")
    return value


def _check(option: str, value: Any, lexicon: Lexicon) -> None:
    if option in RANGES:
        check_whole(option, value, *RANGES[option])
    elif option == "filler":
        check_choice(option, value, FILLERS)
    elif option == "value_type":
        check_choice(f"in the {lexicon.name} lexicon, value_type", value, lexicon.value_types)
    elif option == "depth":
        _check_share(value)
    elif option == "alpha":
        _check_alpha(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_share(value: Any) -> None:
    if value != UNIFORM and not (_is_number(value) and 0 <= value <= 1):
        raise ConfigError(
            f"depth {value!r}",
            f"it must be {UNIFORM}, or a share of the filler from 0 to 1",
            "correct it",
        )


def _check_alpha(value: Any) -> None:
    low, high = ALPHA_RANGE
    if not _is_number(value) or not low <= value <= high or value % ALPHA_STEP:
        raise ConfigError(
            f"alpha {value!r}",
            f"it must be a multiple of {ALPHA_STEP} from {low} to {high}",
            "choose one, for example 2.0",
        )
