"""The whole page: header, contents, sections, files."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tllm_wmtp
from tllm_wmtp.bench.report import html, markdown, words
from tllm_wmtp.bench.report.blocks import Column, Section, Table
from tllm_wmtp.bench.report.css import style_sheet
from tllm_wmtp.bench.report.html import Drawn, Numbered, escape
from tllm_wmtp.bench.report.results import Results
from tllm_wmtp.bench.report.schema import (
    DepthResult,
    FitResult,
    PrefillRow,
    ProbeResult,
    RunRow,
    StepRow,
)

TITLE = "Windowed MTP: measurements"
LEDE = (
    "Speculative decoding with a built-in MTP head in three arms: dense does not draft, native "
    "drafts over the whole context, windowed drafts over the first tokens and the last ones. The "
    "target verifies every token with full attention in all of them."
)
MADE_BY = f"Made by wmtp report {tllm_wmtp.__version__} from the files above."
LIMITS = (
    "What this shows: the mechanism, and the ratios between the arms of this implementation, on "
    "the machine and with the models named here. A model of 2 million parameters on a CPU does not "
    "show what models of 120 billion do on a GPU; the paper's figures stand beside ours for "
    "orientation and are of other models, on one B200 GPU."
)
#: In the order of the page.
SECTIONS = (
    "step", "phases", "window", "alpha", "best_depth", "pareto", "tasks", "probe", "memory",
    "kv_types", "prefill", "adaptive", "attention", "demo",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """The page, its figures and which sections were measured."""

    page: str
    sections: tuple[Section, ...]
    figures: tuple[Drawn, ...]
    measured: dict[str, bool]
    notes: tuple[str, ...]


def build(results: Results) -> Report:
    """The report of ``results``; the same results give the same bytes."""
    sections = [section(name)(results) for name in SECTIONS]
    numbered = Numbered()
    body = "\n".join(numbered.section(section) for section in sections)
    files = numbered.section(files_section(results))
    page = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(TITLE)}</title>\n<style>\n{style_sheet()}</style>\n</head>\n<body>\n"
        f"{header(results, sections)}\n<main>\n{body}\n{files}\n</main>\n"
        f"<footer>{html.paragraph(MADE_BY)}</footer>\n</body>\n</html>\n"
    )
    return Report(
        page,
        tuple(sections),
        tuple(numbered.figures),
        {section.key: bool(section.blocks) for section in sections},
        results.notes,
    )


def as_markdown(report: Report, pictures: Sequence[str]) -> str:
    """What was measured as Markdown, with ``pictures`` in the order of the figures."""
    parts = [f"# {TITLE}", LEDE, LIMITS, *markdown.lines(report.sections, pictures)]
    return "\n\n".join(parts) + "\n"


def section(name: str) -> Callable[[Results], Section]:
    """What builds the section of that name."""
    module = importlib.import_module(f"tllm_wmtp.bench.report.sections.{name}")
    built: Callable[[Results], Section] = module.build
    return built


def header(results: Results, sections: Sequence[Section]) -> str:
    facts = [
        ("Machines" if len(results.machines) > 1 else "Machine", map(str, results.machines)),
        ("Dates (UTC)" if len(results.dates) > 1 else "Date (UTC)", results.dates),
        ("Models", models(results)),
        ("Software", [f"tllm-wmtp {tllm_wmtp.__version__} (this report)"]),
        ("Files", [f"{len(results.sources)}, listed with their hashes at the end"]),
    ]
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape('; '.join(values) or 'none named')}</dd>"
        for name, values in facts
    )
    warnings = "".join(html.paragraph(note, "warning") for note in warnings_of(results))
    return (
        f"<header>\n<h1>{escape(TITLE)}</h1>\n{html.paragraph(LEDE, 'lede')}\n"
        f'{html.paragraph(LIMITS, "limits")}\n<dl class="facts">{rows}</dl>\n{warnings}\n'
        f'<nav aria-label="Contents">\n<h2>Contents and findings</h2>\n'
        f'<ol class="findings">{contents(sections)}</ol>\n</nav>\n</header>'
    )


def contents(sections: Sequence[Section]) -> str:
    """Every section with what it found, or that it was not measured."""
    entries = [(each.key, each.title, each.headline) for each in sections]
    entries.append(("files", "Files", "What was read, with hashes."))
    return "\n".join(
        f'<li><a href="#{escape(key)}">{escape(title)}</a>{finding(said)}</li>'
        for key, title, said in entries
    )


def finding(said: str) -> str:
    if not said:
        return '<span class="absent">not measured here</span>'
    return f"<span>{escape(said)}</span>"


def models(results: Results) -> list[str]:
    measured: list[StepRow | PrefillRow | DepthResult | FitResult | ProbeResult | RunRow] = []
    measured += [row for result in results.step for row in result.rows]
    measured += [row for result in results.prefill for row in result.rows]
    measured += [*results.depth, *results.fit, *results.probe, *results.run]
    return sorted({row.model for row in measured})


def warnings_of(results: Results) -> list[str]:
    notes = list(results.notes)
    if len(results.machines) > 1:
        notes.insert(
            0,
            f"Results of {len(results.machines)} machines are here; no figure mixes them, and each "
            "names its own.",
        )
    return notes


def files_section(results: Results) -> Section:
    rows = tuple(
        (
            source.path,
            source.kind or words.ABSENT,
            hashes(source.hashes),
            words.listed(source.dates) or words.ABSENT,
            source.sha256[:16],
            source.state,
        )
        for source in results.sources
    )
    labels = ("file", "benchmark", "configuration", "date", "SHA-256 (first 16)", "state")
    return Section(
        key="files",
        title="Files",
        question="All that was read. Of one configuration on one machine the newest is shown.",
        measure="",
        blocks=(Table("Files read", tuple(Column(label, False) for label in labels), rows),),
    )


def hashes(names: Sequence[str]) -> str:
    if len(names) <= 2:
        return ", ".join(names) or words.ABSENT
    return f"{names[0]} and {len(names) - 1} more"
