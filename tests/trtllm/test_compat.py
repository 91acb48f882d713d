"""Names and signatures: what the shim needs against what was read in the public source."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vendor_stub.package import LAYOUTS

from tllm_wmtp.errors import ConfigError
from tllm_wmtp.trtllm import compat, models, settings

RECORDED = json.loads((Path(__file__).parent / "signatures.json").read_text())


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_recorded_source_has_every_parameter_that_the_shim_needs(name: str) -> None:
    checked = 0
    for symbol in compat.SYMBOLS:
        for method, needed in symbol.methods:
            known = RECORDED[name].get(symbol.name, {}).get(method)
            if known is not None and "kwargs" not in known:
                assert set(needed) <= set(known), f"{symbol.name}.{method}"
                checked += 1
    assert checked >= 4


def test_the_stand_in_has_the_recorded_signatures(layout: str) -> None:
    for name, methods in RECORDED[layout].items():
        found, finding = compat.probe(compat.BY_NAME[name])
        assert finding.holds, finding.problem
        for method, parameters in methods.items():
            function = getattr(found, method) if method else found
            assert list(inspect.signature(function).parameters) == parameters, f"{name}.{method}"


def test_names_are_found_where_their_layout_has_them(layout: str) -> None:
    places = {one.symbol.name: one.place for one in compat.probe_all()}
    module = "attention.attention" if layout == "late" else "modules.attention"
    assert places["Attention"] == f"tensorrt_llm._torch.{module}:Attention"
    absent = {one.symbol.name for one in compat.probe_all() if not one.holds}
    assert absent == (set() if layout == "late" else {"EXTERNAL_MODULES"})


def test_a_changed_signature_is_named_with_what_was_found_and_the_remedy(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = compat.resolve("Attention")
    monkeypatch.setattr(attention, "forward", lambda self, hidden, metadata: None)
    with pytest.raises(ConfigError) as refusal:
        compat.resolve("Attention")
    text = str(refusal.value)
    assert "Attention.forward(self, hidden, metadata) lacks position_ids, hidden_states" in text
    assert "TRTLLM_WMTP_MODE=off" in text


def test_a_missing_name_lists_the_places(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = importlib.import_module("tensorrt_llm._torch.speculative.utils")
    monkeypatch.delattr(utils, "get_spec_resource_manager")
    with pytest.raises(
        ConfigError, match=r"speculative\.utils:get_spec_resource_manager \(no such"
    ):
        compat.resolve("get_spec_resource_manager")


def test_a_function_is_replaced_wherever_it_was_imported(layout: str) -> None:
    creator = importlib.import_module("tensorrt_llm._torch.pyexecutor.py_executor_creator")
    original = compat.resolve("get_spec_resource_manager")

    def replacement(model_engine: Any) -> None:
        return None

    places = compat.rebind(original, replacement)
    assert sorted(places) == [
        "tensorrt_llm._torch.pyexecutor.py_executor_creator:get_spec_resource_manager",
        "tensorrt_llm._torch.speculative.utils:get_spec_resource_manager",
    ]
    assert creator.get_spec_resource_manager is replacement


def test_without_tensorrt_llm_importing_is_free_and_registering_says_what_is_missing() -> None:
    code = (
        "import sys, tllm_wmtp.trtllm as plugin\n"
        "import tllm_wmtp.trtllm.compat, tllm_wmtp.trtllm.settings\n"
        "print('torch' in sys.modules, 'tensorrt_llm' in sys.modules)\n"
        "try:\n    plugin.register()\nexcept ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "False False"
    assert second.startswith("package tensorrt_llm: this part runs inside TensorRT-LLM")


def test_every_family_is_registered_under_its_architectures(layout: str) -> None:
    found = models.vendor_models()
    assert set(found) == {
        "Qwen3NextForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "NemotronHForCausalLM",
        "Glm4MoeForCausalLM",
        "DeepseekV3ForCausalLM",
    }


def read(**values: str) -> settings.Settings:
    return settings.read({f"TRTLLM_WMTP_{k.upper()}": v for k, v in values.items()} | {"HOME": "/"})


def test_settings_come_from_the_environment_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "wmtp.yaml"
    file.write_text("window: 2048\nn_sink: 16\nmode: pages\n")
    assert read() == settings.Settings()
    assert read(config=str(file)) == settings.Settings("pages", 2048, 16)
    assert read(config=str(file), window="1024").window == 1024


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"window": "0"}, "window is a number of tokens, at least 1"),
        ({"window": "many"}, "TRTLLM_WMTP_WINDOW 'many'"),
        ({"mode": "rings"}, "is one of ring, pages, engine, off"),
        ({"windows": "3"}, "TRTLLM_WMTP_WINDOWS: no such setting"),
        ({"mode": "engine"}, "names the directory of mode 'engine'"),
        ({"engine": "/x"}, "set both or neither"),
        ({"config": "/nowhere.yaml"}, "cannot be read"),
    ],
)
def test_bad_settings_name_value_rule_and_remedy(values: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(**values)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "wmtp.yaml"
    file.write_text("{window: [")
    with pytest.raises(ConfigError, match="YAML or JSON"):
        read(config=str(file))
    file.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="it holds names and values"):
        read(config=str(file))
