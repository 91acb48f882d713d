"""The report's sections as Markdown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import report_results as made

from tllm_wmtp.bench.report.markdown import escape
from tllm_wmtp.cli import main

pytest.importorskip("matplotlib")


def test_sections_become_headings_tables_and_pictures_that_are_there(tmp_path: Path) -> None:
    made.write(tmp_path / "in", {"prefill.json": made.prefill(), "plan.json": made.plan()})
    page = tmp_path / "pages" / "results.md"
    arguments = ["--out", str(tmp_path / "r.html"), "--png", str(page.parent / "figures")]
    assert main(["report", str(tmp_path / "in"), *arguments, "--markdown", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    pictures = re.findall(r"!\[.+\]\((.+)\)", text)
    assert pictures == ["figures/memory-1.png", "figures/prefill-2.png"]
    assert all((page.parent / picture).is_file() for picture in pictures)
    assert text.count("\n## ") == 2, "only what was measured"
    ttft = made.prefill()["rows"][0]["ttft_s"]
    assert f"{ttft:.3g}" in text


def test_a_table_row_has_as_many_cells_as_its_head(tmp_path: Path) -> None:
    made.write(tmp_path / "in", {"plan.json": made.plan()})
    page = tmp_path / "results.md"
    arguments = ["--out", str(tmp_path / "r.html"), "--png", str(tmp_path)]
    assert main(["report", str(tmp_path / "in"), *arguments, "--markdown", str(page)]) == 0
    tables = [b for b in page.read_text(encoding="utf-8").split("\n\n") if b.startswith("| ")]
    assert tables
    for table in tables:
        assert len({len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_a_text_means_only_itself() -> None:
    assert escape("a|b *c* <d>\n_e_") == r"a\|b \*c\* \<d\> \_e\_"


def test_pictures_need_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made.write(tmp_path / "in", {"plan.json": made.plan()})
    page = tmp_path / "results.md"
    assert main(["report", str(tmp_path / "in"), "--markdown", str(page)]) == 2
    assert "add --png DIR" in capsys.readouterr().err
    assert not page.exists()
