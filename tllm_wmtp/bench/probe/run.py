"""The probe: every read of every draft of every prompt, and the JSON object that sums them up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tllm_wmtp import machine
from tllm_wmtp.bench.common import config_hash
from tllm_wmtp.bench.probe.measures import AttentionRecord
from tllm_wmtp.bench.probe.prompts import ProbeInputs, ProbePrompt, make_prompts
from tllm_wmtp.bench.probe.reader import compare
from tllm_wmtp.bench.probe.reads import TAIL, WINDOW, MeanRead, Read, ShuffledRead, WindowedRead
from tllm_wmtp.bench.probe.samples import Samples
from tllm_wmtp.bench.probe.summary import summarise
from tllm_wmtp.bench.probe.trajectory import engine_config, record
from tllm_wmtp.checkpoint.directory import CheckpointDirectory
from tllm_wmtp.checkpoint.loader import LoadedModel, load_model, read_config
from tllm_wmtp.config import MtpConfig
from tllm_wmtp.demo import model_name
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.models.spec import ModelConfig

Progress = Callable[[str, int, int], None]

#: Bands whose values are changed, at the operating window.
CHANGED = {"tail": TAIL, "window": WINDOW}
CHANGES = tuple(f"{band}_values_{how}" for band in CHANGED for how in ("shuffled", "mean"))


@dataclass(frozen=True)
class ProbeBench:
    """What to probe: ``positions`` output tokens of every prompt, in steps of ``depth - 1`` drafts.

    ``windows`` are those of the curve; the operating ``window`` is always one of them.
    """

    model: Path
    inputs: ProbeInputs
    windows: tuple[int, ...] = (256, 512, 1024, 2048, 4032)
    window: int = 4032
    n_sink: int = 64
    depth: int = 7
    positions: int = 64

    def __post_init__(self) -> None:
        for window in self.every_window:
            MtpConfig(self.depth, window, self.n_sink)
        if self.positions < 2:
            raise ConfigError(
                f"positions {self.positions}",
                "an interval needs two positions or more",
                "raise --positions",
            )

    @property
    def every_window(self) -> tuple[int, ...]:
        return tuple(sorted({*self.windows, self.window}))

    def check(self, config: ModelConfig) -> None:
        """Refuses what the model cannot hold.

        Raises:
            ConfigError: naming the value.
        """
        positions = config.max_position_embeddings
        context = self.inputs.tokens
        limits = engine_config(context, self.positions + self.depth).resolved(positions)
        for window in self.every_window:
            MtpConfig(self.depth, window, self.n_sink).resolved(
                limits.max_seq_len or positions, positions
            )


def run_probe(bench: ProbeBench, on_progress: Progress | None = None) -> dict[str, Any]:
    """``{"rows": one per prompt, "summary": all of them pooled, "curve": one per window, ...}``.

    Args:
        on_progress: called with a label, the units done and all of them.

    Raises:
        WmtpError: the model has no head, or a prompt cannot be made or does not fit.
    """
    bench.check(read_config(bench.model))
    prompts = make_prompts(CheckpointDirectory(bench.model).tokenizer(), bench.inputs)
    loaded = load_model(bench.model, torch.float32, "cpu", with_head=True)
    windows = {window: f"window {window}" for window in bench.every_window}
    sum_up = partial(summarise, windows=windows, window=bench.window, changes=CHANGES)
    rows, every = [], []
    for prompt in prompts:
        samples = probe_prompt(bench, loaded, prompt, on_progress)
        every.append(samples)
        rows.append({**prompt.about, "positions": bench.positions, **sum_up(samples)})
    summary = sum_up(Samples.pool(every))
    curve = summary.pop("curve")
    return {
        "benchmark": "probe",
        "config_hash": config_hash(bench),
        **machine.describe(),
        "model": model_name(bench.model),
        "context": bench.inputs.tokens,
        "window": bench.window,
        "n_sink": bench.n_sink,
        "depth": bench.depth,
        "positions": bench.positions,
        "dtype": "float32",
        "seed": bench.inputs.seed,
        "rows": rows,
        "summary": summary,
        "curve": curve,
    }


def probe_prompt(
    bench: ProbeBench,
    loaded: LoadedModel,
    prompt: ProbePrompt,
    on_progress: Progress | None = None,
) -> Samples:
    """Every draft of one prompt, under every read."""
    label = f"{prompt.input} {prompt.index}"
    tell = on_progress or (lambda label, done, total: None)
    trajectory = record(
        loaded,
        prompt.ids,
        bench.positions,
        lambda done: tell(f"{label} prefill", done, len(prompt.ids)),
    )
    reads = reads_of(bench, bench.inputs.seed + prompt.index)
    return compare(
        loaded,
        trajectory,
        reads,
        AttentionRecord(bench.window, bench.n_sink),
        bench.depth - 1,
        lambda done, of: tell(f"{label} reads", done, of),
    )


def reads_of(bench: ProbeBench, seed: int) -> dict[str, Read]:
    """Everything that is compared with the native read, by name."""
    generator = torch.Generator().manual_seed(seed)
    reads: dict[str, Read] = {
        f"window {window}": WindowedRead(window, bench.n_sink) for window in bench.every_window
    }
    for name, band in CHANGED.items():
        where = (band, bench.window, bench.n_sink)
        reads[f"{name}_values_shuffled"] = ShuffledRead(*where, generator)
        reads[f"{name}_values_mean"] = MeanRead(*where)
    return reads
