"""The page's style sheet: light, dark and print."""

from __future__ import annotations

from collections.abc import Mapping

from tllm_wmtp.bench.report.style import DARK, LIGHT


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{role}: {colour};" for role, colour in colours.items())


def style_sheet() -> str:
    return (
        f":root {{ color-scheme: light dark; {_variables(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}\n"
        f"@media print {{ :root {{ color-scheme: light; {_variables(LIGHT)} }} }}\n" + _RULES
    )


_RULES = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans",
    Arial, sans-serif;
  font-variant-numeric: tabular-nums lining-nums;
}
header, main, footer { max-width: 1168px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 48px; }
h1 { font-size: 30px; line-height: 1.2; font-weight: 650; margin: 0 0 12px; }
h2 { font-size: 22px; line-height: 1.3; font-weight: 650; margin: 0 0 6px; }
h3 { font-size: 15px; line-height: 1.45; font-weight: 600; margin: 0 0 10px; }
h3 span, summary span { color: var(--muted); font-weight: 400; }
p { max-width: 46em; margin: 0 0 10px; }
a { color: var(--windowed); text-underline-offset: 2px; }
.lede { font-size: 17px; }
.question { color: var(--muted); margin-bottom: 22px; }
.limits { border-left: 3px solid var(--ink); padding-left: 14px; margin: 18px 0 24px; }
section { border-top: 1px solid var(--rule); margin-top: 44px; padding-top: 28px; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: 4px 22px; margin: 22px 0; }
dl.facts dt { color: var(--muted); }
dl.facts dd { margin: 0; }
ol.findings { list-style: none; padding: 0; margin: 8px 0 30px; }
ol.findings li {
  display: grid; grid-template-columns: 15em 1fr; gap: 0 20px; padding: 5px 0;
  border-bottom: 1px solid var(--rule);
}
ol.findings .absent { color: var(--muted); }
ol.findings a { text-decoration: none; }
ol.findings a:hover { text-decoration: underline; }
figure { margin: 0 0 34px; break-inside: avoid; }
.panels { display: flex; flex-wrap: wrap; gap: 14px 20px; margin: 0 -4px 8px; }
.panel { flex: 1 1 min(var(--wide), 100%); max-width: calc(var(--wide) * 1.25); min-width: 0; }
.panel svg { display: block; width: 100%; height: auto; overflow: visible; stroke-linejoin: round; }
.panel svg text { font-family: inherit; white-space: pre; }
figcaption { flex: 1 1 100%; font-size: 15px; padding: 0 4px; }
figcaption.beside { flex: 1 1 400px; align-self: center; padding-left: 16px; }
.source {
  border-left: 3px solid var(--source); padding-left: 12px; color: var(--ink); font-size: 14.5px;
}
.source b { color: var(--source); }
.origin, .note { color: var(--muted); font-size: 13px; margin-bottom: 6px; }
.table { margin: 0 0 34px; }
.scroll { overflow-x: auto; margin-bottom: 8px; }
table { border-collapse: collapse; font-size: 14px; line-height: 1.4; }
.unseen {
  position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap;
}
th, td { padding: 4px 0 4px 16px; text-align: left; vertical-align: baseline; white-space: nowrap; }
td small { color: var(--muted); font-size: 12.5px; font-weight: 400; }
th:first-child, td:first-child { padding-left: 0; }
th.n, td.n { text-align: right; }
thead th {
  color: var(--muted); font-weight: 500; font-size: 13px; line-height: 1.25; vertical-align: bottom;
  border-bottom: 1px solid var(--muted); white-space: normal; min-width: 3.4em; max-width: 9em;
}
tbody th { font-weight: 400; position: sticky; left: 0; background: var(--ground); }
tbody td, tbody th { border-bottom: 1px solid var(--rule); }
strong { font-weight: 700; }
.missing { border: 1px dashed var(--muted); border-radius: 4px; padding: 14px 18px 6px; }
pre { overflow-x: auto; margin: 0 0 10px; }
code { font: 13.5px/1.5 ui-monospace, "SF Mono", "DejaVu Sans Mono", Menlo, Consolas, monospace; }
.warning { border-left: 3px solid var(--native); padding-left: 12px; }
summary { cursor: pointer; font-weight: 600; font-size: 15px; margin-bottom: 10px; }
footer { color: var(--muted); font-size: 13px; padding-top: 28px; padding-bottom: 48px; }
:focus-visible { outline: 2px solid var(--windowed); outline-offset: 2px; }
@media (max-width: 640px) {
  header, main, footer { padding-left: 16px; padding-right: 16px; }
  header { padding-top: 28px; }
  h1 { font-size: 25px; }
  ol.findings li { grid-template-columns: 1fr; }
  dl.facts { grid-template-columns: 1fr; gap: 0; }
  dl.facts dd { margin-bottom: 8px; }
  th, td { padding-left: 14px; }
  tbody th { white-space: normal; min-width: 5em; max-width: 10em; }
}
@media print {
  @page { margin: 16mm 14mm; }
  body { font-size: 10.5pt; }
  header, main, footer { max-width: none; padding: 0; }
  section { break-inside: auto; }
  h2, h3 { break-after: avoid; }
  tr { break-inside: avoid; }
  .scroll { overflow: visible; }
  table { font-size: 8.5pt; }
  th, td { padding-left: 10px; }
  .panel { max-width: 48%; }
  a { color: inherit; text-decoration: none; }
}
"""
