"""docs/plugin.md has a row for each claim, and names each field that the creator announces."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.trt

REPOSITORY = Path(__file__).resolve().parents[2]

_SPEC = importlib.util.spec_from_file_location(
    "plugin_verification", REPOSITORY / "build_scripts/plugin_verification.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
verification = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = verification
_SPEC.loader.exec_module(verification)


def claims_of(page: str) -> list[str]:
    """The rows between the marks without their last cell, which depends on the run."""
    table = page.partition(verification.BEGIN)[2].partition(verification.END)[0]
    return [row.rpartition(" | ")[0] for row in table.strip().splitlines()[2:]]


def test_page_has_every_claim() -> None:
    page = verification.PAGE.read_text()
    assert claims_of(verification.page_with(verification.table({}), page)) == claims_of(page)


def test_claims_without_a_test_run_are_not_called_verified() -> None:
    assert all(verification.outcome(one, {}) == "not run" for one in verification.CLAIMS)


def test_page_names_every_field() -> None:
    announced = re.findall(
        r'{"(\w+)", nullptr, PluginFieldType',
        (REPOSITORY / "plugins/attentionFields.cpp").read_text(),
    )
    page = verification.PAGE.read_text()
    assert len(announced) == 10
    assert [name for name in announced if f"`{name}`" not in page] == []
