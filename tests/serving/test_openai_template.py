"""Chat templates and token names, held to transformers and to the bytes themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import add_byte_tokenizer

from tllm_wmtp.errors import CheckpointError, RequestError
from tllm_wmtp.serving.openai.chat_template import ChatTemplate
from tllm_wmtp.serving.openai.tokens import TokenNames

MESSAGES = [
    {"role": "system", "content": "be <b>brief</b>"},
    {"role": "user", "content": "häh?\n"},
    {"role": "assistant", "content": "yes", "data": {"b": 1, "a": "é"}},
    {"role": "user", "content": "go on"},
]
TEMPLATES = {
    "a loop with a special token": (
        "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m.content | trim }}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "blocks on lines of their own": (
        "{%- for m in messages %}\n    {% if loop.first %}\n    first: \n    {% endif %}\n"
        "    {{ m.role }}={{ m.content }}\n{% endfor %}\n"
    ),
    "JSON as it is": (
        "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}"
    ),
    "a loop that is left": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% break %}{% endif %}"
        "{{ m.content }}{% endfor %}"
    ),
    "a namespace": (
        "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.content %}"
        "{% endfor %}{{ ns.last }}"
    ),
    "text of the model marked for training": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "tools, documents and an option": (
        "{{ tools is none }} {{ documents is none }} {{ deep | default('no') }} "
        "{% if pad_token is defined %}pad{% else %}none{% endif %}"
    ),
    "the date": "{{ strftime_now('%Y-%m-%d') }}",
}


def write(folder: Path, template: Any, **config: Any) -> Path:
    add_byte_tokenizer(folder)
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|end|>",
        "eos_token": {"content": "<|end|>", "__type": "AddedToken"},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content | config))
    return folder


def template_of(folder: Path) -> ChatTemplate:
    template = ChatTemplate.of(folder)
    assert template is not None
    return template


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_writes_what_transformers_writes(name: str, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = write(tmp_path, TEMPLATES[name])
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = template_of(folder)
    for options in ({}, {"deep": "yes"}):
        expected = theirs.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=True, **options
        )
        assert ours.render(MESSAGES, {"add_generation_prompt": True} | options) == expected
        assert expected.strip()


def test_the_file_comes_before_the_config_and_default_before_other_names(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "default"}]
    write(tmp_path, named)
    assert template_of(tmp_path).render(MESSAGES, {}) == "default"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert template_of(tmp_path).render(MESSAGES, {}) == "file"


def test_without_a_template_there_is_none(tmp_path: Path) -> None:
    assert ChatTemplate.of(tmp_path) is None
    assert ChatTemplate.of(write(tmp_path, None)) is None


@pytest.mark.parametrize("template", ["{% for %}", 3, "{% nonsense %}"])
def test_a_broken_template_is_a_broken_checkpoint(template: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        ChatTemplate.of(write(tmp_path, template))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 3 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_refuses_or_breaks_out_ends_the_request(
    template: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="messages"):
        template_of(write(tmp_path, template)).render(MESSAGES, {})


def test_tokens_that_are_parts_of_a_character_are_shown_as_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    names = TokenNames(Tokenizer.from_file(str(add_byte_tokenizer(tmp_path) / "tokenizer.json")))
    assert [names.raw(i) for i in range(256)] == [bytes([i]) for i in range(256)]
    assert names.raw(256) == b"<|end|>"
    assert names.name(0x41) == "A"
    assert names.name(0xC3) == "bytes:\\xc3"
    assert names.raw(257) is None
    assert names.name(257) == "token_id:257"
    assert TokenNames(None).name(5) == "token_id:5"
