"""``wmtp demo``: long prompts, three arms, one table."""

from __future__ import annotations

import argparse
import json
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tllm_wmtp.cli import arguments

if TYPE_CHECKING:
    from collections.abc import Mapping

EXPLANATION = "native, the whole context; windowed, sinks and a window; dense has no draft."


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("demo", help="answer long prompts in all three arms")
    parser.add_argument("--model", default="demo", help="checkpoint directory (default demo)")
    parser.add_argument(
        "--context",
        type=arguments.context,
        default=65536,
        help="tokens of each prompt (default 64k; 1m is 1,040,000)",
    )
    parser.add_argument("--max-tokens", type=arguments.count, default=256)
    arguments.add_speculation(parser)
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tllm_wmtp.demo.run import NATIVE_LIMIT, PROMPTS, Plan
    from tllm_wmtp.demo.run import run as run_plan

    plan = Plan(
        model=arguments.model_directory(args.model),
        context=args.context,
        max_tokens=args.max_tokens,
        depth=args.depth,
        window=args.window,
        n_sink=args.sink,
        # One prompt is enough to wait for where each takes minutes.
        prompts=PROMPTS if args.context <= NATIVE_LIMIT else PROMPTS[:1],
    )
    errors = Console(stderr=True)
    with Bars(errors) as bars:
        report = run_plan(plan, bars)
    if args.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        show(report, Console())
    return 0 if report["lossless"] else 1


class Bars:
    """A bar per prompt and arm on a terminal; a line per finished one elsewhere."""

    def __init__(self, console: Console):
        self._console = console
        self._tasks: dict[tuple[str, str, str], TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:>9,.0f} / {task.total:,.0f} tokens"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def prefill(self, kind: str, arm: str, done: int, total: int) -> None:
        self._advance("read", kind, arm, done, total)

    def decode(self, kind: str, arm: str, done: int, total: int) -> None:
        self._advance("write", kind, arm, done, total)

    def note(self, text: str) -> None:
        self._console.print(text, style="dim")

    def _advance(self, verb: str, kind: str, arm: str, done: int, total: int) -> None:
        key = (verb, kind, arm)
        label = f"{kind:<10} {arm:<9} {verb:<5}"
        if key not in self._tasks:
            self._tasks[key] = self._progress.add_task(label, total=total)
        self._progress.update(self._tasks[key], completed=done)
        if done == total and not self._console.is_terminal:
            self._console.print(f"{label} {total:,} tokens", highlight=False)


def show(report: Mapping[str, Any], console: Console) -> None:
    """The table, the first lines of each answer, and the verdict."""
    table = Table(  # fits 80 columns
        title=f"{report['context']:,} tokens of context, depth {report['depth']}, window "
        f"{report['window']}, sink {report['n_sink']}, {report['dtype']}",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    table.add_column("arm", no_wrap=True)
    for name in ("tokens", "AL", "TPOT", "step", "draft", "verify", "TTFT", "draft KV"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm, numbers in report["arms"].items():
        table.add_row(
            arm,
            str(numbers["tokens"]),
            f"{numbers['al']:.2f}",
            milliseconds(numbers["tpot_ms"]),
            milliseconds(numbers["step_ms"]),
            milliseconds(numbers["draft_ms"]),
            milliseconds(numbers["verify_ms"]),
            f"{numbers['ttft_ms'] / 1e3:.1f} s",
            f"{numbers['draft_kv_bytes'] / 2**20:.0f} MiB",
        )
    console.print(table)
    console.print("Times per token and per step in ms, medians. The draft sees: " + EXPLANATION)
    for prompt in report["prompts"]:
        lines = [line for line in prompt["text"].split("\n") if line.strip()][:3]
        console.print(f"[bold]{prompt['kind']}[/], {prompt['prompt_tokens']:,} tokens, then:")
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False, overflow="ellipsis")
    for sentence in verdict(report):
        console.print(sentence, highlight=False)


def milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1f}"


def verdict(report: Mapping[str, Any]) -> list[str]:
    """What the numbers say, good or bad."""
    names = list(report["arms"])
    arms = ", ".join(names[:-1]) + " and " + names[-1]
    sentences = []
    if estimate := report.get("native_estimate"):
        sentences.append(
            "Estimate for the native arm (not run): "
            f"about {estimate['prefill_s'] / 60:.0f} minutes of prefill, "
            f"{estimate['draft_kv_bytes'] / 2**20:,.0f} MiB of draft KV, "
            f"{estimate['step_ms']:.0f} ms per step "
            f"(draft {estimate['draft_ms']:.0f} + verify {estimate['verify_ms']:.0f})."
        )
    if not report["windowed_is_fastest"]:
        fastest = min(names, key=lambda arm: report["arms"][arm]["tpot_ms"])
        sentences.append(f"In this run the windowed arm was not the fastest; {fastest} was.")
    sentences.append(
        f"The outputs of {arms} are identical, token for token."
        if report["lossless"]
        else f"The outputs of {arms} DIFFER."
    )
    return sentences
