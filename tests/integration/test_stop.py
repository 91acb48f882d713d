"""A stop inside an accepted run cuts the output exactly where the dense arm would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from engines import ScriptedProposer, engine, run
from tiny_model import BYTE_END_ID, add_byte_tokenizer, random_prompts, tiny_checkpoint

from tllm_wmtp.executor.request import Request
from tllm_wmtp.sampling import SamplingParams

DEPTH, LENGTH = 7, 30
PROMPT = random_prompts([25], 257, seed=4)[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_byte_tokenizer(
        tiny_checkpoint(tmp_path_factory.mktemp("bytes"), seed=41, vocab_size=257), True
    )


@pytest.fixture(scope="module")
def truth(checkpoint: Path) -> list[int]:
    return run(engine(checkpoint), [PROMPT], SamplingParams(max_tokens=LENGTH + DEPTH))[
        0
    ].output_ids


def finished(checkpoint: Path, truth: Sequence[int], params: SamplingParams) -> list[Request]:
    """The same request by the dense arm and by one whose every draft is right."""

    def script(request: Request, draft_len: int) -> list[int]:
        done = len(request.output_ids)
        return [*truth[done : done + draft_len], *[0] * draft_len][:draft_len]

    dense = run(engine(checkpoint), [PROMPT], params)[0]
    fast = run(engine(checkpoint, proposer=ScriptedProposer(DEPTH, script)), [PROMPT], params)[0]
    if len(dense.output_ids) > 1:
        assert fast.metrics.accepted_histogram[DEPTH - 1] >= 1  # accepted runs did happen
    return [dense, fast]


def ends(request: Request) -> tuple[list[int], str, str | None]:
    assert request.text is not None
    return request.output_ids, request.text.text, request.finish_reason


@pytest.mark.parametrize("max_tokens", range(1, 2 * DEPTH + 3))
def test_max_tokens(checkpoint: Path, truth: list[int], max_tokens: int) -> None:
    dense, fast = finished(checkpoint, truth, SamplingParams(max_tokens=max_tokens))
    assert ends(fast) == ends(dense)
    assert fast.output_ids == truth[:max_tokens]
    assert fast.finish_reason == "length"


@pytest.mark.parametrize("offset", range(2 * DEPTH + 2))
def test_stop_ids(checkpoint: Path, truth: list[int], offset: int) -> None:
    params = SamplingParams(max_tokens=LENGTH, stop_token_ids=(truth[offset],))
    dense, fast = finished(checkpoint, truth, params)
    assert ends(fast) == ends(dense)
    assert fast.output_ids == truth[: truth.index(truth[offset]) + 1]
    assert fast.finish_reason == "stop"


@pytest.mark.parametrize("offset", range(0, 40, 3))
@pytest.mark.parametrize("size", [1, 4])
def test_stop_strings(checkpoint: Path, truth: list[int], offset: int, size: int) -> None:
    whole = run(engine(checkpoint), [PROMPT], SamplingParams(max_tokens=LENGTH))[0]
    assert whole.text is not None
    stop = whole.text.text[offset : offset + size]
    dense, fast = finished(checkpoint, truth, SamplingParams(max_tokens=LENGTH, stop=(stop,)))
    assert ends(fast) == ends(dense)
    assert fast.finish_reason == "stop"
    assert fast.text is not None
    assert fast.text.text == whole.text.text[: whole.text.text.index(stop)]


def test_end_of_sequence_ids_and_ignoring_them(tmp_path: Path, truth: list[int]) -> None:
    end = truth[10]
    checkpoint = tiny_checkpoint(tmp_path, seed=41, vocab_size=257, eos_token_id=end)
    expected = truth[: truth.index(end) + 1]
    for machine in (engine(checkpoint), engine(checkpoint, max_batch_size=1)):
        stopped, ignored = run(
            machine,
            [PROMPT, PROMPT],
            [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, ignore_eos=True)],
        )
        assert (stopped.output_ids, stopped.finish_reason) == (expected, "stop")
        assert (ignored.output_ids, ignored.finish_reason) == (truth[:20], "length")


def test_output_ends_at_the_sequence_limit(checkpoint: Path, truth: list[int]) -> None:
    machine = engine(checkpoint, max_seq_len=len(PROMPT) + 9)
    request = run(machine, [PROMPT], SamplingParams(max_tokens=100))[0]
    assert request.output_ids == truth[:9]
    assert request.finish_reason == "length"


def test_the_special_end_token_adds_no_text(checkpoint: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert tokenizer.decode([104, 105, BYTE_END_ID]) == "hi"
