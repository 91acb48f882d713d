"""Published inputs, read from a local copy: LongBench-v2 and BABILong.

Both are JSON arrays of objects or one object per line. LongBench-v2 (Bai et al. 2024): ``_id``,
``domain``, ``sub_domain``, ``difficulty`` (easy, hard), ``length`` (short, medium, long),
``question``, ``choice_A`` to ``choice_D``, ``answer`` (a letter), ``context``. BABILong
(Kuratov et al. 2024): ``input``, ``question``, ``target``; one file per task and length, such as
``qa2/128k.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tllm_wmtp.bench.inputs.chance import Chance
from tllm_wmtp.bench.inputs.fit import encode
from tllm_wmtp.bench.inputs.options import Task, refuse_unknown
from tllm_wmtp.bench.inputs.prompt import Prompt
from tllm_wmtp.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LETTERS = "ABCD"
#: Options of LongBench-v2 and the fields that they select by.
LONGBENCH_FILTERS = {
    "domain": "domain",
    "sub_domain": "sub_domain",
    "length": "length",
    "question_difficulty": "difficulty",
}
LONGBENCH_FIELDS = (
    "_id", "domain", "sub_domain", "difficulty", "length", "question", "answer", "context",
    *(f"choice_{letter}" for letter in LETTERS),
)  # fmt: skip
BABILONG_FIELDS = ("input", "question", "target")
SUFFIXES = (".json", ".jsonl")

PUBLISHED: dict[str, Task] = {
    "longbench_v2": Task(
        "LongBench-v2 from a local file: multiple choice about long texts",
        {"medium": dict.fromkeys(LONGBENCH_FILTERS)},
        {},
    ),
    "babilong": Task(
        "BABILong from a local file or folder: facts hidden in books",
        {"medium": {"subset": None}},
        {},
    ),
}


@dataclass(frozen=True)
class Item:
    """One published question: the text to cut, and what stands around it."""

    name: str
    before: str
    context: str
    after: str
    answer: str


def published_source(
    task: str, path: str | Path | None, given: Mapping[str, Any]
) -> tuple[Path, dict[str, str]]:
    """Where the task's items are, and the filters that were given.

    Raises:
        ConfigError: an unknown filter, no path, or nothing there.
    """
    options = PUBLISHED[task].options
    refuse_unknown(f"task {task}", given, options)
    if path is None:
        raise ConfigError(
            f"task {task} without a path",
            "its items are read from a local file or folder",
            "download it and pass path (--path)",
        )
    if not Path(path).exists():
        raise ConfigError(
            f"path {str(path)!r}", "it must be a file or a folder that is there", "check the path"
        )
    return Path(path), {name: given[name] for name in options if given.get(name) is not None}


def published_prompts(
    task: str,
    tokenizer: Tokenizer,
    tokens: int,
    count: int,
    seed: int,
    path: str | Path | None,
    given: Mapping[str, Any],
) -> list[Prompt]:
    """``count`` items chosen by the seed, each of at most ``tokens`` ids.

    A longer context loses its middle, as in the published evaluations; ``Prompt.cut_tokens`` says
    how much.

    Raises:
        ConfigError: no path, a broken file, or fewer items than asked for.
    """
    source, wanted = published_source(task, path, given)
    read = _longbench if task == "longbench_v2" else _babilong
    items = list(read(source, wanted))
    if len(items) < count:
        filters = ", ".join(f"{name} {value!r}" for name, value in wanted.items())
        raise ConfigError(
            f"{count} items of {path}",
            f"{len(items)} match {filters}" if filters else f"{len(items)} are there",
            "lower the count or change the filters",
        )
    scoring = "letter" if task == "longbench_v2" else "target"
    prompts = []
    for index, item in enumerate(Chance(task, seed).sample(items, count)):
        text, ids, cut = _cut(item, tokenizer, tokens, task)
        prompts.append(
            Prompt(
                task, ids, text, (item.answer,), dict(wanted), scoring, seed, index,
                cut_tokens=cut, source=item.name,
            )
        )  # fmt: skip
    return prompts


def _longbench(path: Path, wanted: Mapping[str, str]) -> Iterator[Item]:
    for file in _files(path):
        for where, content in read_objects(file):
            _need_text(where, content, LONGBENCH_FIELDS)
            if content["answer"] not in tuple(LETTERS):
                raise ConfigError(
                    f"{where}: answer {content['answer']!r}",
                    f"it must be one letter of {LETTERS}",
                    "correct the line",
                )
            if any(
                content[LONGBENCH_FILTERS[name]].casefold() != str(value).casefold()
                for name, value in wanted.items()
            ):
                continue
            choices = "".join(f"({c}) {content[f'choice_{c}'].strip()}\n" for c in LETTERS)
            yield Item(
                content["_id"],
                "Read the text and answer the question after it.\n\n<text>\n",
                content["context"].strip(),
                f"\n</text>\n\nQuestion: {content['question'].strip()}\n{choices}"
                'Reply with "The correct answer is (X)", where X is one of the four letters.\n'
                "Answer:",
                content["answer"],
            )


def _babilong(path: Path, wanted: Mapping[str, str]) -> Iterator[Item]:
    names = str(wanted["subset"]).split("/") if "subset" in wanted else []
    for file in _files(path):
        if not all(name in (*file.parts[:-1], file.stem) for name in names):
            continue
        for number, (where, content) in enumerate(read_objects(file)):
            _need_text(where, content, BABILONG_FIELDS)
            if not content["target"].strip(" \t\n,"):
                raise ConfigError(
                    f"{where}: target {content['target']!r}",
                    "it must have a word, or every output would be right",
                    "correct or remove the item",
                )
            name = f"{file.parent.name}/{file.stem}/{number}"
            yield Item(
                name.encode(errors="replace").decode(),  # a file's name may be no UTF-8
                "Facts about some people are hidden in the text below. Use only these facts to"
                " answer the question after it, in as few words as possible.\n\n<text>\n",
                content["input"].strip(),
                f"\n</text>\n\nQuestion: {content['question'].strip()}\nAnswer:",
                content["target"].strip(),
            )


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not found:
        raise ConfigError(
            f"path {str(path)!r}",
            f"it must be a file, or a folder with {' or '.join(SUFFIXES)} files",
            "check the path",
        )
    return found


def read_objects(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSON array or of one object per line, each with its file and line.

    Raises:
        ConfigError: the file cannot be read, or a line is no JSON object.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: {error}", "it must be a readable UTF-8 file", "check path and content"
        ) from error
    parse = _array if text.lstrip()[:1] == "[" else _lines
    for line, content in parse(file, text):
        if not isinstance(content, dict):
            raise _broken(file, line, f"a {type(content).__name__}")
        yield f"{file} line {line}", content


def _lines(file: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _broken(file, number, str(error)) from error


def _array(file: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Item by item, so that no more than one is held besides the text."""
    decoder = json.JSONDecoder()
    position, line, counted = text.index("[") + 1, 1, 0

    def skip_space(start: int) -> int:
        while start < len(text) and text[start].isspace():
            start += 1
        return start

    first = True
    while True:
        position = skip_space(position)
        if not first and text[position : position + 1] == ",":
            position = skip_space(position + 1)
        elif text[position : position + 1] == "]":
            return
        elif not first:
            break
        line += text.count("\n", counted, position)
        counted = position
        try:
            content, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise _broken(file, getattr(error, "lineno", line), str(error)) from error
        yield line, content
        first = False
    line += text.count("\n", counted, position)
    raise _broken(file, line, "no comma and no end of the array")


def _broken(file: Path, line: int, what: str) -> ConfigError:
    return ConfigError(
        f"{file} line {line}: {what}",
        "the file must be a JSON array of objects, or one JSON object per line",
        "download it again or remove the line",
    )


def _need_text(where: str, content: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    for field in fields:
        if not isinstance(content.get(field), str):
            state = "is missing" if field not in content else "is not a string"
            raise ConfigError(
                f"{where}: {field} {state}",
                f"an item has the strings {', '.join(fields)}",
                "correct or remove the item",
            )
        try:
            content[field].encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{where}: {field} has half of a character, at {error.start}",
                "a text must be UTF-8, without lone surrogates",
                "correct or remove the item",
            ) from error


def _cut(item: Item, tokenizer: Tokenizer, tokens: int, task: str) -> tuple[str, list[int], int]:
    """The item's prompt within ``tokens`` ids: text, ids, and the tokens cut from its middle."""
    text = item.before + item.context + item.after
    ids = encode(tokenizer, text)
    if len(ids) <= tokens:
        return text, ids, 0
    around = len(encode(tokenizer, item.before + item.after))
    encoding = tokenizer.encode(item.context, add_special_tokens=False)
    offsets, n_context = encoding.offsets, len(encoding.ids)
    kept = min(n_context - 1, tokens - around)
    while kept >= 2:
        head, tail = kept - kept // 2, kept // 2
        context = item.context[: offsets[head - 1][1]] + item.context[offsets[-tail][0] :]
        text = item.before + context + item.after
        ids = encode(tokenizer, text)
        if len(ids) <= tokens:
            return text, ids, n_context - kept
        kept -= len(ids) - tokens
    raise ConfigError(
        f"{tokens} tokens",
        f"item {item.name} of {task} needs {around} for its question and more for its text",
        "raise the tokens",
    )
