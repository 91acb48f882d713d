"""Where ``wmtp bench``, ``probe`` and ``plan`` write: refused before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tllm_wmtp.cli import build_parser
from tllm_wmtp.cli.bench.output import folder


def test_a_folder_is_there_or_can_be_made(tmp_path: Path) -> None:
    assert folder(str(tmp_path)) == tmp_path
    assert folder(str(tmp_path / "new" / "deeper")) == tmp_path / "new" / "deeper"
    assert not (tmp_path / "new").exists()
    assert folder("results") == Path("results")


def test_a_file_or_what_is_under_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(argparse.ArgumentTypeError, match="it must be a folder .* choose"):
            folder(str(path))


@pytest.mark.parametrize(
    "command",
    ["bench step", "bench depth", "bench prefill", "bench fit", "bench attention", "probe", "plan"],
)
def test_every_command_refuses_it_at_once(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args([*command.split(), "--out", str(file)])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert "argument --out" in shown
    assert shown.count("\n") == 1
