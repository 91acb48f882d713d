"""``wmtp generate``: one prompt, answered on the terminal as it is made."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tllm_wmtp.cli import arguments
from tllm_wmtp.errors import RequestError

if TYPE_CHECKING:
    from tllm_wmtp.outputs import RequestOutput


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    parser = commands.add_parser("generate", help="answer one prompt")
    parser.add_argument("model", help="checkpoint directory, or demo")
    parser.add_argument("source", nargs="?", choices=["-"], help="- reads the prompt from stdin")
    parser.add_argument("--prompt", help="the prompt itself")
    parser.add_argument("--file", help="a file that holds the prompt (UTF-8), or -")
    parser.add_argument("--arm", choices=arguments.ARMS, default="windowed")
    arguments.add_speculation(parser)
    parser.add_argument("--max-tokens", type=arguments.count, default=128)
    parser.add_argument("--stop", action="append", default=[], help="text that ends the output")
    arguments.add_sampling(parser)
    parser.add_argument(
        "--logprobs", type=int, metavar="K", help="with --json: log-probabilities of the top K"
    )
    arguments.add_types(parser)
    arguments.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    speculation = arguments.speculation(args.arm, args)
    directory = arguments.model_directory(args.model)
    prompt = read_prompt(args)

    from tllm_wmtp import LLM, KvCacheConfig, SamplingParams
    from tllm_wmtp.checkpoint.directory import CheckpointDirectory

    params = SamplingParams(
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        logprobs=args.logprobs,
        **arguments.sampling(args),
    )
    if args.logprobs is not None and not args.json:
        raise RequestError(
            f"logprobs {args.logprobs}", "only the JSON object has room for them", "add --json"
        )
    checkpoint = CheckpointDirectory(directory)
    tokenizer = checkpoint.tokenizer()
    if tokenizer is None:
        raise RequestError(
            "a text prompt",
            f"{directory} has no tokenizer.json",
            "add the file to the directory",
        )
    prompt_tokens = len(tokenizer.encode(prompt).ids)
    with LLM(
        directory,
        speculation=speculation,
        kv_cache_config=KvCacheConfig(dtype=args.kv_dtype),
        max_batch_size=1,
        max_seq_len=_room(checkpoint, prompt_tokens + args.max_tokens),
        dtype=args.dtype,
    ) as llm:
        handle = llm.generate_async(prompt, params)
        for output in handle:
            if not args.json:
                sys.stdout.write(output.outputs[0].text_diff)
                sys.stdout.flush()
        output = handle.result()
    if output.error is not None:
        raise output.error
    if args.json:
        print(json.dumps(report(args.arm, output), ensure_ascii=False))
        return 0
    sys.stdout.write("\n")
    sys.stderr.write(summary(report(args.arm, output)) + "\n")
    return 0


def read_prompt(args: argparse.Namespace) -> str:
    """The one prompt among ``--prompt``, ``--file`` and ``-``.

    Raises:
        RequestError: none or several, an empty one, or a file that cannot be read as text.
    """
    given = [
        name
        for name, value in (("--prompt", args.prompt), ("--file", args.file), ("-", args.source))
        if value is not None
    ]
    if len(given) != 1:
        raise RequestError(
            f"prompt from {' and '.join(given) or 'nowhere'}",
            "exactly one of --prompt, --file and - is needed",
            "give one of them",
        )
    prompt = args.prompt
    if prompt is None:
        prompt = _read(args.file or args.source)
    if not prompt:
        raise RequestError("an empty prompt", "it needs at least one token", "write some text")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:  # bytes of the command line that are no UTF-8
        raise RequestError(
            f"prompt {prompt!r}", f"it must be Unicode text ({error.reason})", "correct it"
        ) from error
    return str(prompt)


def _read(source: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        return raw.decode("utf-8")
    except OSError as error:
        raise RequestError(
            f"file {source!r}", f"it cannot be read ({error.strerror})", "check path and rights"
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(
            f"file {source!r}", f"it must be UTF-8 text ({error.reason})", "convert it"
        ) from error


def _room(checkpoint: Any, tokens: int) -> int:
    """Prompt and output, but not more than the model has positions."""
    from tllm_wmtp.models.registry import family_of

    limit: int = family_of(checkpoint.config).config(checkpoint.config).max_position_embeddings
    return max(2, min(tokens, limit))


def report(arm: str, output: RequestOutput) -> dict[str, Any]:
    """The ``--json`` object; times in milliseconds, null where no step was made."""
    completion, metrics = output.outputs[0], output.metrics
    if metrics is None:
        raise RuntimeError("a finished request has no metrics")

    def median_ms(seconds: list[float]) -> float | None:
        return statistics.median(seconds) * 1e3 if seconds else None

    return {
        "arm": arm,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs
        and [
            [{"token_id": i, **asdict(logprob)} for i, logprob in report.items()]
            for report in completion.logprobs
        ],
        "finish_reason": completion.finish_reason,
        "prompt_tokens": metrics.prompt_tokens,
        "tokens": metrics.output_tokens,
        "steps": metrics.steps,
        "accepted_histogram": metrics.accepted_histogram,
        "al": metrics.acceptance_length,
        "tpot_ms": None if metrics.tpot_s is None else metrics.tpot_s * 1e3,
        "step_ms": median_ms(metrics.step_s),
        "draft_ms": median_ms(metrics.draft_s),
        "verify_ms": median_ms(metrics.verify_s),
        "ttft_ms": None if metrics.ttft_s is None else metrics.ttft_s * 1e3,
        "draft_kv_bytes": metrics.draft_kv_bytes,
    }


def summary(numbers: dict[str, Any]) -> str:
    head = f"[{numbers['arm']}] {numbers['prompt_tokens']} tokens in, {numbers['tokens']} out"
    if not numbers["steps"]:
        return f"{head}; TTFT {numbers['ttft_ms']:.0f} ms"
    return (
        f"{head}; AL {numbers['al']:.2f}, TPOT {numbers['tpot_ms']:.2f} ms, "
        f"step {numbers['step_ms']:.2f} ms = draft {numbers['draft_ms']:.2f} + verify "
        f"{numbers['verify_ms']:.2f} (medians), TTFT {numbers['ttft_ms']:.0f} ms"
    )
