"""The report: one HTML page and its figures, from the JSON that the benchmarks write."""

from tllm_wmtp.bench.report.page import Report, as_markdown, build
from tllm_wmtp.bench.report.plot import need_matplotlib
from tllm_wmtp.bench.report.results import Results, load

__all__ = ["Report", "Results", "as_markdown", "build", "load", "need_matplotlib"]
