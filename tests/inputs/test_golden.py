"""The same arguments give the same bytes: digests that were written down once.

A change of any of these changes what results were measured on: give it a reason.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
from tokenizers_at_hand import tokenizer_called

from tllm_wmtp.bench.inputs import TASKS, make_prompt
from tllm_wmtp.bench.inputs.published import PUBLISHED

#: Beginnings of the SHA-256 of the text, and of its ids written in decimal with commas.
GOLDEN = {
    ("niah_single", "english", 2048): (
        "10ef63a7e7e46c8f857319246a1a404e",
        "3d88d7fc938f99501f317671794c3742",
    ),
    ("niah_multikey", "english", 2048): (
        "fb58e604fef7c37c63c9c8703470dce3",
        "98bb35e065b53f4474f9bcb3ce376d6a",
    ),
    ("niah_multivalue", "english", 2048): (
        "068ec128cf81c4febe7a39de69140e48",
        "56805ec96aba7b7e2e705f10017ced21",
    ),
    ("niah_multiquery", "english", 2048): (
        "171226d9e278a569c4629e4d8d19d6a0",
        "a7fd2468b43305b1c8cf23d46d1af460",
    ),
    ("niah_multiquery_enum", "english", 2048): (
        "9636e3758bc790674a57d93ddd2ea778",
        "773352064bfb984ad28fedcf0ae2408e",
    ),
    ("niah_multivalue_enum", "english", 2048): (
        "eb12fc412159fb5293dc17e5547f3b58",
        "53446bd98b93e133d9ac10f5986c766e",
    ),
    ("vt", "english", 2048): (
        "1739f8bb353c051438e6efa3753a8642",
        "58adc57b625151db53f848c20ae08849",
    ),
    ("cwe", "english", 2048): (
        "aa47db7621f7ec4ffe8900cc0eaada39",
        "73919823dd4d7460600b245139893fb1",
    ),
    ("fwe", "english", 2048): (
        "a6b401755c356b94081ba79f7e716b02",
        "8e278dc86be455591d3c783176fc1803",
    ),
    ("niah_single", "demo", 1024): (
        "0e274983de9cc97d1779de1caf4ff807",
        "c311f198a06bfe8348a82f3e0d3b1300",
    ),
    ("niah_multikey", "demo", 1024): (
        "6975fff6b66e07a6feca329057517971",
        "2f2880093df17ba116892966c7d58d16",
    ),
    ("niah_multivalue", "demo", 1024): (
        "8a23d910418c7a39fb01a85921730b77",
        "cf50ee9a2346c970b041f45e6832027a",
    ),
    ("niah_multiquery", "demo", 1024): (
        "99ec22b0b83779d183af1c7ee5486a74",
        "0b1997bfb49c4460fce359c7e93178ca",
    ),
    ("niah_multiquery_enum", "demo", 1024): (
        "20ccb1b81f0298b1525b02f782978882",
        "cc2c366d93090e78dec211f9c3feb9ad",
    ),
    ("niah_multivalue_enum", "demo", 1024): (
        "b43f3cd2845c40b160562d0a491a74eb",
        "3caf8dae3b25630d4a7f6e9093ae6d67",
    ),
    ("vt", "demo", 1024): ("bbf927e3d22aadeb1f3909d69d97a8f9", "77f3238c21751de715686e2cca3b8dc8"),
    ("cwe", "demo", 1024): ("340bdb45efa9b8e73962797a887b4af4", "52f13ae4630864e3d185be7e03fed516"),
    ("fwe", "demo", 1024): ("c71f529f323a8e876e74b0595f5fa998", "3df3a7b2b3aad0344f6178505ade06ec"),
    ("logs", "demo", 1024): (
        "1f4ebe64e6895b8c7e769d8681318ebc",
        "3bcad75f3fb9d6c2e9ab5a83771de140",
    ),
    ("sentences", "demo", 1024): (
        "bf3c7ed54217574132c817f2717889f8",
        "5551cab6aec1a10cc6d4bd289ad7e70d",
    ),
    ("lists", "demo", 1024): (
        "90c8ad367d95c8a2daebf1feb64d9b60",
        "fd1cd95738d9c07f7226b43f2b484186",
    ),
    ("recall", "demo", 1024): (
        "d2867cd10e20bbd5172524a8f475011f",
        "606d86783f0b99aa0991fe791dad7273",
    ),
    ("niah_multiquery_enum", "demo", 65536): (
        "35d67dbd8de1f2eb435127274436ac18",
        "aa2f8a2dc847f0f64e00d26b72e35580",
    ),
}


@pytest.mark.parametrize(("task", "lexicon", "tokens"), GOLDEN)
def test_prompts_are_those_written_down(task: str, lexicon: str, tokens: int) -> None:
    prompt = make_prompt(task, tokenizer_called("demo"), tokens, 0, lexicon=lexicon)
    text = hashlib.sha256(prompt.text.encode()).hexdigest()
    ids = hashlib.sha256(",".join(str(token) for token in prompt.ids).encode()).hexdigest()
    assert (text[:32], ids[:32]) == GOLDEN[task, lexicon, tokens]


def test_every_generated_task_is_written_down() -> None:
    assert {task for task, _, _ in GOLDEN} == set(TASKS) - set(PUBLISHED)


def test_neither_hash_seed_nor_locale_matters() -> None:
    code = (
        "from tllm_wmtp.bench.inputs import make_prompt\n"
        "from tllm_wmtp.demo.tokenizer import build_tokenizer\n"
        "print(make_prompt('cwe', build_tokenizer(), 1024, 0, lexicon='demo').text_sha256[:32])\n"
    )
    for changes in ({"PYTHONHASHSEED": "1", "LC_ALL": "C"}, {"PYTHONHASHSEED": "2"}):
        result = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | changes, capture_output=True, text=True
        )
        assert result.stdout.strip() == GOLDEN["cwe", "demo", 1024][0], result.stderr
