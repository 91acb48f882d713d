"""What of the plug-in holds on this machine: names, signatures, kernels, and a small model end to
end, stock MTP against the windowed one."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tllm_wmtp.errors import ConfigError
from tllm_wmtp.trtllm import compat
from tllm_wmtp.trtllm.settings import ENGINE, OFF, PAGES, PREFIX, RING, Settings

HOLDS, FAILS, SKIPPED = "holds", "fails", "skipped"


@dataclass(frozen=True)
class Verdict:
    """``state`` is ``holds``, ``fails`` or ``skipped``; ``detail`` says why, or what was found."""

    feature: str
    state: str
    detail: str


@dataclass(frozen=True)
class Workload:
    """One small run, the same in every arm.

    Args:
        context: tokens of the longest prompt.
        max_tokens: to generate per prompt.
        draft_len: drafts per step.
        window, n_sink: of the draft, in the modes ``ring`` and ``pages``.
        tp: tensor-parallel GPUs.
        engine: directory of a draft engine, to run mode ``engine`` as well, at the engine's own
            window and depth.

    Raises:
        ConfigError: a size breaks a rule.
    """

    model: Path
    context: int = 512
    max_tokens: int = 64
    draft_len: int = 3
    window: int = 128
    n_sink: int = 16
    tp: int = 1
    engine: Path | None = None

    def __post_init__(self) -> None:
        for name in ("context", "max_tokens", "draft_len", "tp"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} {value}", "it must be 1 or more", f"raise {name}")
        Settings(RING, self.window, self.n_sink)
        if self.engine is not None and self.tp > 1:
            raise ConfigError(
                f"engine {self.engine} on {self.tp} GPUs",
                "a draft engine holds all heads and the whole lm_head on one GPU",
                "check it with --tp 1",
            )


def check(workload: Workload | None) -> Iterator[Verdict]:
    """Verdicts as they come. Without a workload nothing is run.

    Raises:
        ConfigError: TensorRT-LLM is not installed.
    """
    compat.require_installed()
    yield Verdict("TensorRT-LLM", HOLDS, _version())
    findings = compat.probe_all()
    for finding in findings:
        name = finding.symbol.name
        if finding.holds:
            yield Verdict(name, HOLDS, str(finding.place))
        elif finding.symbol.is_required:
            yield Verdict(name, FAILS, finding.problem)
        else:
            yield Verdict(name, SKIPPED, f"this release has it not: {finding.problem}")
    yield _kernels()
    if any(not one.holds and one.symbol.is_required for one in findings):
        yield Verdict("runs", SKIPPED, "names are missing")
        return
    yield _registration()
    if workload is None:
        yield Verdict("runs", SKIPPED, "names only were asked for")
        return
    yield from _runs(workload)


def _version() -> str:
    try:
        return importlib.metadata.version(compat.ROOT)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(importlib.import_module(compat.ROOT), "__version__", "unknown version"))


def _kernels() -> Verdict:
    import torch

    from tllm_wmtp.ops import cuda

    if not torch.cuda.is_available():
        return Verdict("CUDA kernels", SKIPPED, "no GPU here: the CPU operator stands in")
    try:
        return Verdict("CUDA kernels", HOLDS, str(cuda.find_library()))
    except cuda.LibraryMissing as error:
        return Verdict("CUDA kernels", FAILS, str(error))


def _registration() -> Verdict:
    from tllm_wmtp.trtllm import register

    try:
        return Verdict("registration", HOLDS, ", ".join(register()) or "mode is off")
    except ConfigError as error:
        return Verdict("registration", FAILS, str(error))


def _runs(workload: Workload) -> Iterator[Verdict]:
    try:
        stock = run_arm(workload, OFF)
    except ConfigError as error:
        yield Verdict("stock MTP", FAILS, str(error))
        yield Verdict("windowed runs", SKIPPED, "there is no stock MTP to compare them with")
        return
    yield Verdict("stock MTP", HOLDS, _describe(stock))
    modes = (RING, PAGES) if workload.engine is None else (RING, PAGES, ENGINE)
    for mode in modes:
        try:
            result = run_arm(workload, mode)
        except ConfigError as error:
            yield Verdict(mode, FAILS, str(error))
            continue
        yield Verdict(mode, HOLDS, _describe(result))
        yield _same_output(mode, stock["tokens"], result["tokens"])


def _describe(result: Mapping[str, Any]) -> str:
    rates = [one for one in result["tokens_per_step"] if one is not None]
    mean = f"{sum(rates) / len(rates):.2f} tokens per step" if rates else "tokens per step not told"
    count = sum(len(tokens) for tokens in result["tokens"])
    return f"{count} tokens in {result['seconds']:.1f} s, {mean}"


def _same_output(mode: str, stock: list[list[int]], windowed: list[list[int]]) -> Verdict:
    feature = f"{mode}: output of stock MTP"
    for index, (one, other) in enumerate(zip(stock, windowed, strict=True)):
        if one != other:
            pairs = enumerate(zip(one, other, strict=False))
            first = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
            return Verdict(
                feature,
                FAILS,
                f"prompt {index} differs from token {first} on; in bfloat16 a near-tie may do that",
            )
    return Verdict(feature, HOLDS, f"{sum(map(len, stock))} tokens are the same")


def run_arm(workload: Workload, mode: str) -> Mapping[str, Any]:
    """What :mod:`tllm_wmtp.trtllm.smoke` printed, in a process of its own.

    Raises:
        ConfigError: it failed; the message has the last line of its errors.
    """
    options, settings = arm_options(workload, mode)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
    environment |= {f"{PREFIX}{name.upper()}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "tllm_wmtp.trtllm.smoke", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        told = [line for line in done.stderr.splitlines() if line.strip()]
        raise ConfigError(
            f"mode {mode}, exit code {done.returncode}",
            told[-1] if told else "it said nothing",
            f"run it by hand: {PREFIX}MODE={mode} {' '.join(command)}",
        )
    result: Mapping[str, Any] = json.loads(lines[-1])
    return result


def arm_options(workload: Workload, mode: str) -> tuple[list[str], dict[str, str]]:
    """Options of :mod:`tllm_wmtp.trtllm.smoke`, and the plug-in's settings.

    Raises:
        ConfigError: the checkpoint or the engine cannot be read.
    """
    settings = {"mode": mode, "window": str(workload.window), "n_sink": str(workload.n_sink)}
    draft_len, flags = workload.draft_len, []
    if mode == ENGINE:
        from tllm_wmtp.engine.directory import read_config

        assert workload.engine is not None
        built = read_config(workload.engine)["options"]
        draft_len, flags = built["depth"] - 1, ["--no-graphs"]
        settings |= {
            "window": str(built["window"]),
            "n_sink": str(built["n_sink"]),
            "engine": str(workload.engine),
        }
    values = {
        "--model": workload.model,
        "--vocab-size": vocab_size(workload.model),
        "--context": workload.context,
        "--max-tokens": workload.max_tokens,
        "--draft-len": draft_len,
        "--tp": workload.tp,
    }
    pairs = [text for name, value in values.items() for text in (name, str(value))]
    return pairs + flags, settings


def vocab_size(model: Path) -> int:
    """Of a checkpoint, by its config.json.

    Raises:
        ConfigError: there is none, or it does not say.
    """
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"model {model}", f"its config.json cannot be used: {problem}", "name a checkpoint"
        ) from None
