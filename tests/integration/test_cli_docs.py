"""What the README and the pages under docs/ tell a user to type works."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tiny_model import tiny_checkpoint

import tllm_wmtp.demo
from tllm_wmtp.cli import build_parser
from tllm_wmtp.demo.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(language: str) -> list[tuple[Path, str]]:
    return [
        (page, match[2])
        for page in PAGES
        for match in FENCE.finditer(page.read_text(encoding="utf-8"))
        if match[1] == language
    ]


def command_lines() -> list[str]:
    """``wmtp ...`` in shell blocks and, with arguments, in the text."""
    lines = [line for _, block in blocks("sh") for line in block.splitlines()]
    for page in PAGES:
        lines += re.findall(r"`((?:\.venv/bin/)?wmtp [^`]+)`", page.read_text(encoding="utf-8"))
    commands = [re.split(r"\s(?:>|&&|#|\|)", line)[0].strip() for line in lines]
    found = {c.removeprefix(".venv/bin/") for c in commands}
    return sorted(c for c in found if c.startswith("wmtp ") and "..." not in c)


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_parses(line: str) -> None:
    arguments = shlex.split(line)[1:]
    if arguments == ["bench"]:
        pytest.skip("names a group of commands")
    args = build_parser().parse_args(arguments)
    assert callable(args.run)


def test_the_pages_show_every_command() -> None:
    shown = {" ".join(line.split()[1:3]) for line in command_lines()}
    for command in (
        "generate demo",
        "bench step",
        "bench depth",
        "bench prefill",
        "bench fit",
        "bench attention",
        "info demo",
    ):
        assert command in shown
    assert "wmtp demo" in command_lines()


@pytest.mark.parametrize(("page", "code"), blocks("python"), ids=lambda x: getattr(x, "name", ""))
def test_every_python_example_runs(
    page: Path,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fragments that need TensorRT are fenced as ``py``, and are not run here."""
    checkpoint = tiny_checkpoint(tmp_path, vocab_size=640)
    build_tokenizer().save(str(checkpoint / "tokenizer.json"))
    monkeypatch.setattr(tllm_wmtp.demo, "CHECKPOINT", checkpoint)
    exec(compile(code, str(page), "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_structure_names_what_is_there() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    structure = readme.split("## Structure", 1)[1]
    for name in re.findall(r"^([\w/]+(?:\.py)?)\s", FENCE.search(structure)[2], re.M):  # type: ignore[index]
        assert (ROOT / name).exists(), name


# The script that fills the tables.


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import fill_tables

    return fill_tables


DEMO = {
    "lossless": True, "context": 65536, "depth": 7, "window": 4032, "n_sink": 64,
    "dtype": "float32", "date": "2000-01-02", "processor": "a processor", "threads": 2,
    "isa": "avx2", "prompts": [{}, {}],
    "arms": {"dense": {"tokens": 256, "al": 1.0, "tpot_ms": 9.87, "step_ms": 9.87,
                       "draft_ms": 0.0, "verify_ms": 9.87, "ttft_ms": 4321.0,
                       "draft_kv_bytes": 0}},
}  # fmt: skip


def test_a_result_fills_its_block_and_no_other(tables: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "a\n<!-- demo:begin -->\nold\n<!-- demo:end -->\nb\n<!-- demo-1m:begin -->\nkeep\n"
        "<!-- demo-1m:end -->\n"
    )
    (tmp_path / "demo.json").write_text(json.dumps(DEMO))
    tables.PAGES = (page,)
    assert tables.main([str(tmp_path / "demo.json")]) == 0
    text = page.read_text()
    assert "| dense | 256 | 1.00 | 9.87 |" in text
    assert "old" not in text
    assert "keep" in text
    assert "a processor" in text
    assert tables.main([str(tmp_path / "demo.json")]) == 0
    assert page.read_text() == text


def test_every_block_of_the_pages_is_one_that_the_script_knows(tables: Any) -> None:
    known = {
        "demo", "demo-1m", "bench-step-float32", "bench-step-bfloat16", "bench-attention",
        "bench-depth", "bench-prefill", "evaluation",
    }  # fmt: skip
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert set(re.findall(r"<!-- ([\w-]+):begin -->", text)) <= known
        assert text.count(":begin -->") == text.count(":end -->")


def test_a_million_tokens_have_a_block_of_their_own(tables: Any) -> None:
    name, content = tables.render(
        DEMO
        | {
            "context": 1_040_000,
            "native_estimate": {"prefill_s": 6000.0, "draft_kv_bytes": 2**30, "step_ms": 900.0},
        }
    )
    assert name == "demo-1m"
    assert "100 minutes of prefill" in content


def test_the_figure_is_what_its_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import draw_ring

    assert (ROOT / "docs" / "ring.svg").read_text(encoding="utf-8") == draw_ring.draw()
