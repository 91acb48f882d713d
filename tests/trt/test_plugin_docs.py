"""docs/plugin.md has a row for each claim, and names each field that the creator announces."""

from __future__ import annotations

import re

import pytest
import toolchain
from toolchain import REPOSITORY

pytestmark = pytest.mark.trt


verification = toolchain.script("build_scripts/plugin_verification.py")


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
