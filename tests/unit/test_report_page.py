"""The report's page: its numbers are the rows', its HTML is sound, its figures are drawn."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import report_results as made
from matplotlib.image import imread

from tllm_wmtp.bench import report
from tllm_wmtp.bench.report.html import escape
from tllm_wmtp.bench.report.page import SECTIONS, section
from tllm_wmtp.cli import build_parser, main

VOID = {"meta", "link", "br", "img", "input", "hr"}
DASH = "\u2013"


class Page(HTMLParser):
    """Tables, texts, ids and links of a page; refuses tags that do not close in order."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[dict[str, Any]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append({"caption": "", "head": [], "rows": []})
        elif tag == "tr":
            self.row: list[str] = []
        elif tag in ("td", "th"):
            self.row.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "tr":
            part = "head" if "thead" in self.open else "rows"
            self.tables[-1][part].append(self.row)

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)
        if "caption" in self.open:
            self.tables[-1]["caption"] += data
        elif {"td", "th"} & set(self.open):
            self.row[-1] += data

    def table(self, caption: str) -> list[dict[str, str]]:
        """Rows of the one table whose caption contains ``caption``, by their column's label."""
        (found,) = (each for each in self.tables if caption in each["caption"])
        return [dict(zip(found["head"][0], row, strict=True)) for row in found["rows"]]

    @property
    def whole(self) -> str:
        return " ".join(" ".join(self.text).split())


def build(folder: Path, files: dict[str, Any]) -> report.Report:
    return report.build(report.load([made.write(folder, files)]))


def page(folder: Path, files: dict[str, Any]) -> Page:
    return Page(build(folder, files).page)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> report.Report:
    return build(tmp_path_factory.mktemp("report") / "all", made.everything())


@pytest.fixture(scope="module")
def whole(everything: report.Report) -> Page:
    return Page(everything.page)


def test_every_section_is_measured(everything: report.Report) -> None:
    assert all(everything.measured.values())
    assert len(everything.measured) == 14
    assert "Not measured here" not in everything.page


def test_nothing_says_nan_or_none(whole: Page) -> None:
    assert not re.search(r"\b(nan|NaN|inf|Infinity|None|null)\b", whole.whole)


def test_the_page_needs_nothing_else(everything: report.Report, whole: Page) -> None:
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in whole.tags}
    for _, attributes in whole.tags:
        for name in ("href", "src", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "@import" not in everything.page
    assert "url(http" not in everything.page


def test_ids_are_there_once_and_every_link_leads_to_one(whole: Page) -> None:
    ids = [attributes["id"] for _, attributes in whole.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in whole.tags:
        for name in ("href", "xlink:href"):
            if name in attributes:
                assert (attributes[name] or "")[1:] in ids
    uses = re.findall(r"url\(#([^)]+)\)", " ".join(str(a) for _, a in whole.tags))
    assert set(uses) <= set(ids)


def test_figures_are_images_with_a_text(whole: Page) -> None:
    panels = [a for tag, a in whole.tags if a.get("role") == "img"]
    drawings = [a for tag, a in whole.tags if tag == "svg"]
    assert len(panels) == len(drawings) > 20
    assert all(len(a["aria-label"] or "") > 20 for a in panels)
    assert all(a["aria-hidden"] == "true" for a in drawings)


def test_tables_have_captions_and_scopes(whole: Page) -> None:
    assert all(table["caption"] for table in whole.tables)
    heads = [attributes for tag, attributes in whole.tags if tag == "th"]
    assert {head.get("scope") for head in heads} == {"col", "row"}


def test_colours_are_the_pages_variables(everything: report.Report) -> None:
    drawings = re.findall(r"<svg.*?</svg>", everything.page, re.S)
    assert not any(re.search(r"#[0-9a-f]{6}\b", drawing) for drawing in drawings)
    assert any("var(--windowed)" in drawing for drawing in drawings)
    used = set(re.findall(r"var\((--[\w-]+)\)", everything.page))
    for block in re.findall(r":root \{([^}]*)\}", everything.page):
        defined = set(re.findall(r"(--[\w-]+):", block))
        assert used - {"--wide"} <= defined


def test_the_same_results_give_the_same_bytes_without_torch_and_under_another_hash_seed(
    tmp_path: Path,
) -> None:
    where = made.write(tmp_path / "a", {"plan.json": made.plan(), "prefill.json": made.prefill()})
    here = report.build(report.load([where]))
    code = (
        "import sys; sys.modules['torch'] = None; from pathlib import Path;"
        "from tllm_wmtp.bench import report; made = report.build(report.load([Path(sys.argv[1])]));"
        "sys.stdout.buffer.write(made.page.encode() + made.figures[0].png())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(where)],
        capture_output=True, check=True, env={"PYTHONHASHSEED": "7"},
    ).stdout  # fmt: skip
    assert other == here.page.encode() + here.figures[0].png()


def test_the_order_of_the_files_changes_nothing(tmp_path: Path) -> None:
    files = {
        "a.json": {**made.demo(), "config_hash": "1"},
        "b.json": {**made.demo(), "config_hash": "2", "model": "demo-mamba2", "context": 4096},
    }
    where = made.write(tmp_path / "r", files)
    pages = []
    for first, second in (("a", "b"), ("b", "a")):
        os.utime(where / f"{first}.json", (1e9, 1e9))
        os.utime(where / f"{second}.json", (2e9, 2e9))
        pages.append(report.build(report.load([where])).page)
    assert pages[0] == pages[1]


def test_step_times_are_those_of_the_rows(whole: Page) -> None:
    rows = whole.table("One step, demo, depth 7, window 4,032, sink 64, float32, KV float32")
    (row,) = (r for r in rows if r["context"] == "65,536" and r["arm"] == "windowed")
    # By hand: draft 6 (0.7 + 4096 * 3.6e-5) = 5.085; verify 3 + 1.05 + 65536 * 6e-5 = 7.982.
    assert (row["step ms"], row["draft ms"], row["verify ms"]) == ("13.1", "5.08", "7.98")
    assert row["quartiles"] == f"12.7{DASH}13.5"
    assert (row["MB read"], row["floor / step"], row["steps"]) == ("67.1", "50 %", "15")


def test_a_changed_row_changes_the_text(tmp_path: Path) -> None:
    content = made.step()
    before = page(tmp_path / "a", {"step.json": content})
    for row in content["rows"]:
        if (row["arm"], row["context"]) == ("native", 1_040_000):
            row["step_ms"], row["step_ms_interquartile"] = 777.7, [700.7, 790.7]
    content["ratios"][-1]["step_native_over_windowed"] = 9.99
    after = page(tmp_path / "b", {"step.json": content})
    for text in ("a native step takes 778 ms (701" + DASH + "791)", "takes 9.99\u00d7 a windowed"):
        assert text not in before.whole
        assert text in after.whole
    assert after.table("One step")[-2]["step ms"] == "778"


def test_the_papers_numbers_are_marked_as_the_papers(whole: Page) -> None:
    text = whole.whole
    mark = "Paper (other models, one B200 GPU; arXiv 2607.21535):"
    expected = (
        "native over windowed step, 261K to 1M tokens: q35 +27 % to +43 %; q122 +24 % to +30 %; "
        "nem +17 % to +26 %."
    )
    assert f"{mark} {expected}" in text
    assert "q35 +46 % to +22 %; q122 +29 % to +15 %; nem about +26 % in both" in text
    assert "9.1 % (q35, 10 layers), 7.7 % (q122, 12 layers), 11.1 % (nem, 8 layers)" in text
    assert "A model of 2 million parameters on a CPU does not show" in text


def test_what_is_not_measured_says_how_to_measure_it(tmp_path: Path) -> None:
    made_page = build(tmp_path, {"plan.json": made.plan()})
    assert [key for key, there in made_page.measured.items() if there] == ["memory"]
    parsed = Page(made_page.page)
    assert parsed.whole.count("Not measured here.") == 13
    assert "wmtp bench fit --model demo" in parsed.whole
    assert len(made_page.figures) == 1


def test_the_commands_that_measure_a_section_parse(tmp_path: Path) -> None:
    results = report.load([made.write(tmp_path / "r", {"demo.json": made.demo()})])
    commands = [line for name in SECTIONS for line in section(name)(results).measure.splitlines()]
    assert len(set(commands)) >= 10
    for command in commands:
        arguments = shlex.split(command.partition(" > ")[0])
        assert callable(build_parser().parse_args(arguments[1:]).run)


def depth_rows() -> list[dict[str, Any]]:
    """TPOT by depth, by hand: native best at 3, windowed at 7, where 5 is no worse."""
    times = {
        "native": {3: (10.0, [9.5, 10.5]), 5: (12.0, [11.5, 12.5]), 7: (14.0, [13.5, 14.5])},
        "windowed": {3: (9.0, [8.8, 9.2]), 5: (8.1, [7.9, 8.3]), 7: (8.0, [7.8, 8.2])},
    }
    return [
        made.run_row(arm, depth=depth, tpot_ms=tpot, tpot_ms_interval=interval)
        for arm, by_depth in times.items()
        for depth, (tpot, interval) in by_depth.items()
    ] + [made.run_row("dense", tpot_ms=11.0, tpot_ms_interval=[10.9, 11.1])]


def test_the_best_depth_is_marked_and_so_is_what_it_cannot_be_told_from(tmp_path: Path) -> None:
    parsed = page(tmp_path, {"run.jsonl": depth_rows()})
    native, windowed = parsed.table("Time per output token by depth")
    assert native["depth 3"] == f"10.0 (9.50{DASH}10.5) \u25c2 best"
    assert native["depth 5"] == f"12.0 (11.5{DASH}12.5)"
    assert windowed["depth 7"] == f"8.00 (7.80{DASH}8.20) \u25c2 best"
    assert windowed["depth 5"] == f"8.10 (7.90{DASH}8.30) \u2248"
    assert windowed["depth 3"] == f"9.00 (8.80{DASH}9.20)"
    (both,) = parsed.table("Both arms at their own best depth")
    assert (both["native depth"], both["windowed depth"]) == ("3", "7")
    assert (both["native / windowed"], both["intervals"]) == ("1.25\u00d7", "apart")


def test_the_window_of_most_depths_shows_them_and_one_depth_is_never_the_best(
    tmp_path: Path,
) -> None:
    """Most cells are at another window, as in a suite with a dose-response at one depth."""
    others = [made.run_row(depth=7, window=512, input=name) for name in ("logs", "vt", "cwe")]
    others += [made.run_row("native", depth=7, input=name) for name in ("vt", "cwe")]
    parsed = page(tmp_path, {"run.jsonl": [*depth_rows(), *others]})
    native, windowed = parsed.table("Time per output token by depth")
    assert windowed["depth 7"] == f"8.00 (7.80{DASH}8.20) \u25c2 best"
    assert windowed["depth 3"] == f"9.00 (8.80{DASH}9.20)"
    one = [row for row in depth_rows() if row["arm"] != "windowed" or row["depth"] == 7]
    parsed = page(tmp_path / "one", {"run.jsonl": one})
    native, windowed = parsed.table("Time per output token by depth")
    assert native["depth 3"].endswith("best")
    assert windowed["depth 7"] == f"8.00 (7.80{DASH}8.20)"
    assert "Both arms at their own best depth" not in parsed.whole
    assert "1 case with several depths in one arm only" in parsed.whole


def test_speed_over_dense_and_outputs_are_those_of_the_rows(tmp_path: Path) -> None:
    rows = depth_rows()
    for row in rows:
        if row["arm"] == "native" and row["depth"] == 7:
            row["output_digest"] = "another"
    parsed = page(tmp_path, {"run.jsonl": rows})
    (speed,) = parsed.table("Acceptance and time per output token, depth 7")
    assert speed["over dense, native"] == "0.79\u00d7"  # 11 / 14
    assert speed["over dense, windowed"] == "1.38\u00d7"  # 11 / 8
    (answers,) = parsed.table("Time to the first token, outputs and answers")
    assert answers["outputs of the arms"] == "DIFFERS"
    assert answers["answers found windowed"] == DASH
    assert "the input has no score" in parsed.whole
    assert "identical in 0 of 1 greedy cases" in parsed.whole


def test_sampled_outputs_are_not_compared(tmp_path: Path) -> None:
    rows = [made.run_row(arm, temperature=1.0, output_digest=arm) for arm in made.ARMS]
    (answers,) = page(tmp_path, {"run.jsonl": rows}).table("Time to the first token, outputs")
    assert answers["outputs of the arms"] == "not compared"


def test_positions_whose_intervals_are_apart_are_named(tmp_path: Path) -> None:
    def alpha(values: list[float]) -> list[dict[str, Any]]:
        known = [{"value": v, "interval": [v - 0.05, v + 0.05], "trials": 90} for v in values]
        return [*known, {"value": None, "interval": [0.0, 1.0], "trials": 0}]

    rows = [
        made.run_row("native", depth=4, alpha=alpha([0.9, 0.8])),
        made.run_row("windowed", depth=4, alpha=alpha([0.88, 0.6])),
    ]
    parsed = page(tmp_path, {"run.jsonl": rows})
    assert "At 1 of 2 draft positions in 1 case" in parsed.whole
    assert "demo, logs, draft 2: 0.80 natively, 0.60 windowed" in parsed.whole
    native, _ = parsed.table("Conditional acceptance with 95 % Wilson intervals")
    assert native["draft 3"] == "not reached"


def test_the_windows_that_lose_acceptance_are_named(tmp_path: Path) -> None:
    al = {256: (3.0, [2.8, 3.2]), 1024: (3.9, [3.7, 4.1]), 4032: (4.2, [4.0, 4.4])}
    rows = [
        made.run_row(window=window, al=value, al_interval=interval)
        for window, (value, interval) in al.items()
    ]
    rows.append(made.run_row("native", al=4.0, al_interval=[3.9, 4.1]))
    text = page(tmp_path, {"run.jsonl": rows}).whole
    assert "AL 3.00 at a window of 256 and 4.20 at 4,032, 4.00 natively; 256 is below" in text
    rows[0] |= {"al": 4.1, "al_interval": [4.0, 4.2]}
    rows[2] |= {"al": 3.0, "al_interval": [2.8, 3.2]}
    text = page(tmp_path / "large", {"run.jsonl": rows}).whole
    assert "natively; 4,032 is below native beyond the intervals" in text
    rows[2] |= {"al": 3.9, "al_interval": [3.7, 4.1]}
    assert "no window is below native" in page(tmp_path / "all", {"run.jsonl": rows}).whole


def test_memory_shares_are_those_of_the_plan(tmp_path: Path) -> None:
    plan = made.plan(context=1024, model="x", draft_share=1 / 11, full_attention_layers=10)
    (row,) = page(tmp_path, {"plan.json": plan}).table("Bytes of one request")
    assert (row["model"], row["layers F"], row["draft share"]) == ("x", "10", "9.1 %")
    assert (row["native"], row["batch, native"]) == ("1.0 MiB", "21")


def test_a_fit_shows_its_break_and_its_error(tmp_path: Path) -> None:
    fit = made.fit()
    fit["fits"][0]["break"] = {"gamma": 4, "jump_ms": 0.54, "jump_ms_interval": [0.5, 0.58]}
    parsed = page(tmp_path, {"fit.json": fit})
    breaks = [row["break"] for row in parsed.table("Step fitted against gamma")]
    assert breaks.count("none") == 3
    assert f"gamma 4: 0.540 (0.500{DASH}0.580) ms" in breaks
    error = parsed.table("The windowed step predicted")[0]["error (95 %)"]
    assert error == "+1.0 % (\u22121.0 % to +2.0 %)"


def test_machines_are_never_in_one_figure(tmp_path: Path) -> None:
    files = {
        "here.json": made.step(),
        "there.json": made.step(**made.OTHER_MACHINE),
        "run.jsonl": [made.run_row(arm) for arm in made.ARMS],
        "run-there.jsonl": [made.run_row(arm, **made.OTHER_MACHINE) for arm in made.ARMS],
    }
    parsed = page(tmp_path, files)
    assert "Results of 2 machines are here" in parsed.whole
    assert sum("One step" in table["caption"] for table in parsed.tables) == 2
    assert sum("Acceptance and time" in table["caption"] for table in parsed.tables) == 2


def test_days_are_named_where_a_figure_has_several(tmp_path: Path) -> None:
    later = made.step(contexts=(16384,), date="2026-01-05")
    files = {"a.json": made.step(contexts=(65536, 262144)), "b.json": later}
    text = page(tmp_path, files).whole
    assert "Measured on several days (2026-01-02 and 2026-01-05)" in text


def test_a_newer_result_is_shown_and_the_page_says_so(tmp_path: Path) -> None:
    old, new = made.plan(), made.plan()
    new["draft_share"] = 0.25
    made.write(tmp_path / "r", {"a.json": old, "b.json": new})
    os.utime(tmp_path / "r" / "a.json", (1e9, 1e9))
    parsed = Page(report.build(report.load([tmp_path / "r"])).page)
    assert parsed.table("Bytes of one request")[0]["draft share"] == "25.0 %"
    assert "1 result of r/a.json" in parsed.whole
    states = {row["file"]: row["state"] for row in parsed.table("Files read")}
    assert states["r/a.json"] == "not shown: r/b.json is newer"


def test_narrower_types_are_compared_on_the_same_case(tmp_path: Path) -> None:
    rows = [
        made.run_row(arm, kv_dtype=kv_dtype, step_ms=step)
        for arm, kv_dtype, step in (
            ("native", "bfloat16", 12.0), ("windowed", "bfloat16", 10.0),
            ("native", "float32", 15.0), ("windowed", "float32", 10.0),
        )
    ] + [made.run_row(arm, kv_dtype="float32", context=4096) for arm in made.ARMS]  # fmt: skip
    parsed = page(tmp_path, {"run.jsonl": rows}).table("Steps on real prompts")
    assert [(row["KV"], row["native / windowed"]) for row in parsed] == [
        ("float32", "1.50\u00d7"), ("bfloat16", "1.20\u00d7"),
    ]  # fmt: skip


def test_what_a_server_does_not_tell_is_a_dash_with_its_reason(tmp_path: Path) -> None:
    unseen = dict.fromkeys(
        ("alpha", "accepted_histogram", "step_ms", "draft_ms", "verify_ms", "output_digest",
         "draft_kv_bytes", "bytes_moved", "floor_ms", "fraction_of_floor",
         "read_bandwidth_gb_per_s", "al_interval", "score")
    )  # fmt: skip
    rows = [
        made.run_row(arm, target="openai", missing=dict.fromkeys(
            [*unseen, "ctx_ms", "fwd_ms"], "the server does not tell"), **unseen)
        for arm in made.ARMS
    ]  # fmt: skip
    parsed = page(tmp_path, {"run.jsonl": rows})
    (answers,) = parsed.table("Time to the first token")
    assert answers["outputs of the arms"] == "not compared"
    assert "output_digest: the server does not tell." in parsed.whole
    assert {row["step ms"] for row in parsed.table("Every cell of the suite")} == {DASH}


def test_older_rows_of_one_setting_are_left_out_and_counted(tmp_path: Path) -> None:
    old = made.step(contexts=(16384,), date="2026-01-01", n_runs=99)
    parsed = page(tmp_path, {"a.json": old, "b.json": made.step(contexts=(16384, 65536))})
    assert "3 older rows of the same setting left out" in parsed.whole
    assert {row["steps"] for row in parsed.table("One step")} == {"15"}
    assert "Measured on 2026-01-02" in parsed.whole


EVIL = "<script>alert(1)</script>\"'&$x_1$"


def test_every_text_of_the_data_is_escaped(tmp_path: Path) -> None:
    files = {
        "step.json": made.step(contexts=(16384, 65536), model=EVIL, processor=EVIL),
        "run.jsonl": [
            made.run_row(arm, model=EVIL, input=EVIL, difficulty=EVIL, window=window,
                         missing={"ctx_ms": EVIL, "fwd_ms": EVIL, "score": EVIL})
            for arm in made.ARMS for window in (512, 4032)
        ],
        "plan.json": made.plan(model=EVIL, kv_dtype=EVIL),
        "probe.json": made.probe(EVIL),
        "demo.json": {**made.demo(), "model": EVIL},
        "depth.json": {**made.depth(), "model": EVIL},
        "<b>.json": {"benchmark": EVIL},
    }  # fmt: skip
    text = build(tmp_path, files).page
    assert "<script" not in text
    parsed = Page(text)
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert EVIL in parsed.whole
    assert "<b>.json" in parsed.whole


def test_control_characters_become_visible() -> None:
    assert escape("a\x00b\x1bc\n") == "a\ufffdb\ufffdc\n"


def png_size(content: bytes) -> tuple[int, int]:
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


def test_the_command_writes_the_page_and_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made.write(tmp_path / "in", {"prefill.json": made.prefill(), "plan.json": made.plan()})
    out, figures = tmp_path / "new" / "r.html", tmp_path / "figures"
    arguments = ["report", str(tmp_path / "in"), "--out", str(out), "--png", str(figures)]
    assert main([*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["measured"]["prefill"]
    assert not summary["measured"]["probe"]
    assert sorted(path.name for path in figures.iterdir()) == ["memory-1.png", "prefill-2.png"]
    for path in figures.iterdir():
        content = path.read_bytes()
        wide, high = png_size(content)
        pixels = imread(io.BytesIO(content))
        assert pixels.shape[:2] == (high, wide)
        assert pixels.std() > 0.02, "nothing is drawn"
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert list(out.parent.iterdir()) == [out]
    assert main(arguments[:4]) == 0
    assert "2 of 14 sections measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no such folder"),
        (["empty"], "no result of a benchmark is there"),
        (["bad"], "line 1"),
        (["in", "--out", "empty"], "it must be a file, and is a folder"),
    ],
)
def test_bad_input_ends_with_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    made.write(tmp_path / "in", {"plan.json": made.plan()})
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.json").write_text('{"benchmark": "step", "rows": [NaN]}')
    assert main(["report", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not (tmp_path / "report.html").exists()


def test_without_matplotlib_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(tmp_path)]) == 2
    assert "pip install 'tllm-wmtp[bench]'" in capsys.readouterr().err
