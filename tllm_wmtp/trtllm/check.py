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
from tllm_wmtp.trtllm.settings import OFF, PAGES, PREFIX, RING

HOLDS, FAILS, SKIPPED = "holds", "fails", "skipped"


@dataclass(frozen=True)
class Verdict:
    """``state`` is ``holds``, ``fails`` or ``skipped``; ``detail`` says why, or what was found."""

    feature: str
    state: str
    detail: str


@dataclass(frozen=True)
class Workload:
    """One small run, the same in every arm."""

    model: Path
    context: int = 512
    max_tokens: int = 64
    draft_len: int = 3
    window: int = 128
    n_sink: int = 16
    tp: int = 1


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
        yield Verdict("runs", SKIPPED, "no model was given")
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
    results: dict[str, Mapping[str, Any]] = {}
    for mode, feature in ((OFF, "stock MTP"), (RING, "ring"), (PAGES, "pages")):
        try:
            results[mode] = run_arm(workload, mode)
        except ConfigError as error:
            yield Verdict(feature, FAILS, str(error))
            continue
        yield Verdict(feature, HOLDS, _describe(results[mode]))
    for mode in (RING, PAGES):
        if OFF in results and mode in results:
            yield _same_output(mode, results[OFF]["tokens"], results[mode]["tokens"])


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
    environment = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
    environment |= {
        f"{PREFIX}MODE": mode,
        f"{PREFIX}WINDOW": str(workload.window),
        f"{PREFIX}N_SINK": str(workload.n_sink),
    }
    options = {
        "--model": workload.model,
        "--vocab-size": _vocab_size(workload.model),
        "--context": workload.context,
        "--max-tokens": workload.max_tokens,
        "--draft-len": workload.draft_len,
        "--tp": workload.tp,
    }
    command = [sys.executable, "-m", "tllm_wmtp.trtllm.smoke"]
    for name, value in options.items():
        command += [name, str(value)]
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


def _vocab_size(model: Path) -> int:
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model {model}", f"its config.json cannot be read: {error}", "name a checkpoint"
        ) from None
    text = config.get("text_config", config)
    return int(text["vocab_size"])
