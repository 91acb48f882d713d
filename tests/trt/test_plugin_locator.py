"""The plugin library is found and registered once, or the error says how to build it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tllm_wmtp.engine import plugin

pytestmark = pytest.mark.trt


class Registry:
    def __init__(self, takes: bool):
        self.takes, self.loaded = takes, []  # type: ignore[var-annotated]

    @property
    def all_creators(self) -> list[SimpleNamespace]:
        creator = SimpleNamespace(name="WindowedDraftAttention", plugin_namespace="wmtp")
        return [creator] if self.loaded and self.takes else []

    def load_library(self, path: str) -> object | None:
        self.loaded.append(path)
        return object() if self.takes else None


def module(registry: Registry) -> SimpleNamespace:
    return SimpleNamespace(__name__="tensorrt", get_plugin_registry=lambda: registry)


def test_library_in_the_checkout_is_found(plugin_build: Path) -> None:
    assert plugin.find_plugin().name == "libwmtp_tensorrt.so"


def test_library_is_registered_once(tmp_path: Path) -> None:
    registry = Registry(takes=True)
    for _ in range(2):
        plugin.load_plugin(module(registry), tmp_path / "plugin.so")
    assert registry.loaded == [str(tmp_path / "plugin.so")]


def test_refusal_names_module_and_library(tmp_path: Path) -> None:
    with pytest.raises(plugin.PluginMissing, match=r"tensorrt refuses .*plugin\.so"):
        plugin.load_plugin(module(Registry(takes=False)), tmp_path / "plugin.so")


def test_missing_library_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(plugin, "__file__", str(tmp_path / "pkg/engine/plugin.py"))
    with pytest.raises(plugin.PluginMissing, match="cmake --build build/cuda"):
        plugin.find_plugin()
