"""Imports run one way: config <- ring <- ops, models, checkpoint <- executor <- hosts <- cli."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tllm_wmtp

ROOT = Path(tllm_wmtp.__file__).parent
LAYERS = (
    {"errors", "config", "sampling", "_core"},
    {"ring", "tree", "memory", "metrics", "step_totals", "latency", "depth", "outputs"},
    {"ops", "models", "checkpoint", "machine"},
    {"executor"},
    {"llm"},
    {"trtllm", "serving", "bench", "engine", "demo"},
    {"cli", "__main__"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# Data and text tools of the demonstration; a training script uses them without the runtime.
LEAVES = {"demo.language", "demo.tokenizer"}
FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


def imported(file: Path) -> set[str]:
    """Modules of this package that a file names, without the package's own name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module or "")
            if node.module == "tllm_wmtp":
                found |= {f"tllm_wmtp.{alias.name}" for alias in node.names}
    return {name.removeprefix("tllm_wmtp.") for name in found if name.startswith("tllm_wmtp.")}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_run_one_way(file: Path) -> None:
    part = file.relative_to(ROOT).parts[0].removesuffix(".py")
    assert part in RANK, f"{part} has no place among the layers: add it to LAYERS"
    for name in imported(file):
        other = name.split(".")[0]
        if name in LEAVES or other not in RANK:
            continue
        assert RANK[other] <= RANK[part], f"{file.name} of {part} imports {name} from above"


def test_models_do_not_import_the_checkpoint_nor_the_other_way_round_in_a_circle() -> None:
    for file in (ROOT / "models").rglob("*.py"):
        assert not any(name.startswith("checkpoint") for name in imported(file)), file
