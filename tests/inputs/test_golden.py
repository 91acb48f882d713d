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
        "9e4ad1236a2a331ddf8ba73af6393813",
        "ef52376a6fb016a024d47a78ad243f6f",
    ),
    ("niah_multikey", "english", 2048): (
        "27980d2af6dd6842d3d4766558abf041",
        "619233838e21f1dce4b907378b454995",
    ),
    ("niah_multivalue", "english", 2048): (
        "c8a26b6e190b969ce01aa33336d51f5c",
        "bce9067c2c0ff9b64923ad15c73b40dd",
    ),
    ("niah_multiquery", "english", 2048): (
        "4818843415e83b8cc0d15b78ea1d2404",
        "b64837137318e97dd0183ca352d1a181",
    ),
    ("niah_multiquery_enum", "english", 2048): (
        "691b56921412ea0c24b77069bb59cf95",
        "9c2993801569f56dd3f1c3c627cbc0e3",
    ),
    ("niah_multivalue_enum", "english", 2048): (
        "42de86706033ae7a7be245c04beede6c",
        "aa460b9306f067e0620edce783dfc566",
    ),
    ("vt", "english", 2048): (
        "a019a7e157e329c187c076e35834f9a7",
        "044c36bf8cb77ef2864af154c6d99830",
    ),
    ("cwe", "english", 2048): (
        "901d6b4315954a9fdcf5f287f8989f95",
        "45a3c29a9ff43e652a0fc1deb80df8fa",
    ),
    ("fwe", "english", 2048): (
        "f5aca490852297be404930458d6e8f86",
        "b12d8aee1304d438e7112a4fe6ca5ee6",
    ),
    ("niah_single", "demo", 1024): (
        "4317147133771d92349f2a13a3dc7a39",
        "c8a246bb7ec9e0af5dbf5651c8e0af03",
    ),
    ("niah_multikey", "demo", 1024): (
        "95cbea0cdfca21028c110c091fc049ff",
        "06ada7f8aded5249a85d1c601c9205b3",
    ),
    ("niah_multivalue", "demo", 1024): (
        "a52ae6da23fddbffaf2b53cb4ab22372",
        "0b6716779a29b7ea0c6e05fc4279c867",
    ),
    ("niah_multiquery", "demo", 1024): (
        "6f1e0b27ed6d75acb9d46c0ca02ba513",
        "1ffda84da934c4b71ffaa7b694dfb0c1",
    ),
    ("niah_multiquery_enum", "demo", 1024): (
        "9e38eb3c3537c9a0755f726617431542",
        "972842a877bf835eac72bf794a462b54",
    ),
    ("niah_multivalue_enum", "demo", 1024): (
        "a9f8ba9d4acac44e78880a8699f96e35",
        "296bc69b7c16236dad0504a817a57d91",
    ),
    ("vt", "demo", 1024): ("9b15b9352ab914c42ce6e5a3f3122436", "2af66e2e67b0ce95a83213085fb2fa03"),
    ("cwe", "demo", 1024): ("5a4ff7d4976707abef257bb217853280", "9c91ba0573928147cd0ea423e63d1c34"),
    ("fwe", "demo", 1024): ("8f0d136011f121bbca4cb38952ffc8ab", "cbf33ad576cd325f56a6f6c43360ca24"),
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
        "f5d48fabd276b985d1c840c77d29e4bf",
        "a1b4ec96c66a61b1966b6f27eccce28f",
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
