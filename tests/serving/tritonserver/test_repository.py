"""The files of a repository, and what is read from requests; no server."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from google.protobuf import text_format
from tiny_model import tiny_checkpoint
from tritonclient.grpc import model_config_pb2

from tllm_wmtp.cli import main
from tllm_wmtp.errors import CheckpointError, ConfigError, RequestError
from tllm_wmtp.metrics import RequestMetrics
from tllm_wmtp.serving.triton import llmapi, repository
from tllm_wmtp.serving.triton.call import read_call
from tllm_wmtp.serving.triton.replies import measurements
from tllm_wmtp.serving.triton.settings import InstanceSettings
from tllm_wmtp.serving.triton.tensors import INPUTS, MEASUREMENTS, OUTPUTS

PAGE = Path(__file__).resolve().parents[3] / "docs/triton.md"


def command(*arguments: object) -> int:
    return main(["triton-repo", *map(str, arguments)])


def parsed(model: Path) -> model_config_pb2.ModelConfig:
    """The configuration as Triton reads it."""
    text = (model / "config.pbtxt").read_text(encoding="utf-8")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_the_command_writes_what_triton_can_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / 'a "strange\\ name'
    options = ["--depth", 5, "--window", 512, "--n-sink", 8, "--max-batch-size", 3, "--json"]
    assert command("--model", "demo", "--out", out, "--name", "fox", *options) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["files"] == ["1/model.py", "config.pbtxt"]
    config = parsed(Path(shown["path"]))
    assert (config.name, config.backend) == ("fox", "python")
    assert config.model_transaction_policy.decoupled
    assert config.instance_group[0].count == 1
    given = {key: value.string_value for key, value in config.parameters.items()}
    assert (given["depth"], given["window"], given["n_sink"]) == ("5", "512", "8")
    assert given["max_batch_size"] == "3"
    assert (config.input[0].name, config.input[0].optional) == ("text_input", False)
    assert all(i.optional for i in config.input[1:])


def test_the_start_command_binds_loopback_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--model", "demo", "--out", tmp_path) == 0
    start = capsys.readouterr().out.splitlines()[-1]
    for server in ("http", "grpc", "metrics"):
        assert f"--{server}-address 127.0.0.1" in start
    assert "0.0.0.0" not in start


def test_settings_survive_the_configuration(tmp_path: Path, tiny: Path) -> None:
    settings = InstanceSettings(
        str(tiny), "native", depth=3, max_batch_size=5, max_seq_len=300, kv_tokens=4000,
        max_queue_size=0, max_prompt_bytes=77, cancellation_check_period_ms=9,
    )  # fmt: skip
    config = parsed(repository.write_python_repository(tmp_path / "repo", "m", settings))
    read = {key: {"string_value": v.string_value} for key, v in config.parameters.items()}
    assert InstanceSettings.from_parameters(read) == settings
    assert InstanceSettings.from_parameters(read | {"EXECUTION_ENV_PATH": {}}) == settings
    with pytest.raises(ConfigError, match="windw.*correct it to one of model"):
        InstanceSettings.from_parameters(read | {"windw": {"string_value": "4"}})
    with pytest.raises(ConfigError, match="depth 'deep'.*integer"):
        InstanceSettings.from_parameters(read | {"depth": {"string_value": "deep"}})


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tiny_checkpoint(tmp_path / "tiny")
    (path / "tokenizer.json").write_text((REAL_TOKENIZER).read_text())
    return path


REAL_TOKENIZER = Path(repository.__file__).parents[2] / "demo/checkpoint/tokenizer.json"


def test_a_model_that_exists_is_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wmtp").mkdir()
    assert command("--model", "demo", "--out", tmp_path) == 2
    assert "it exists" in capsys.readouterr().err
    assert list((tmp_path / "wmtp").iterdir()) == []


def test_what_cannot_be_finished_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def full(self: Path, *given: object, **named: object) -> int:
        if self.name == "model.py":
            raise OSError(28, "No space left on device")
        return write(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        repository.write_model(tmp_path, "m", {"config.pbtxt": "", "1/model.py": ""})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", ".", "a/b", "../up", "-x", "a b"])
def test_unusable_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        repository.write_model(tmp_path, name, {})


def test_what_the_server_would_refuse_is_refused_now(tmp_path: Path, tiny: Path) -> None:
    cases: list[tuple[type[Exception], str, InstanceSettings]] = [
        (ConfigError, "4096 positions", InstanceSettings(str(tiny), max_seq_len=5000)),
        (CheckpointError, "checkpoint directory", InstanceSettings(str(tmp_path / "none"))),
    ]
    for kind, message, settings in cases:
        with pytest.raises(kind, match=message):
            repository.write_python_repository(tmp_path / "repo", "m", settings)
    (tiny / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        repository.write_python_repository(tmp_path / "repo", "m", InstanceSettings(str(tiny)))
    assert not (tmp_path / "repo").exists()
    with pytest.raises(ConfigError, match="depth 1"):
        InstanceSettings(str(tiny), depth=1)


# Requests.


def call_of(**tensors: object) -> object:
    arrays = {name: np.array([value]) for name, value in tensors.items()}
    settings = InstanceSettings("m", "dense")
    return read_call(arrays, "", settings, prompt_bytes=1000)


def test_a_float_means_the_decimal_that_its_client_wrote() -> None:
    call = call_of(text_input=[b"a"], temperature=np.array([0.1], np.float32))
    assert call.params.temperature == 0.1  # type: ignore[attr-defined]


def test_every_option_reaches_the_sampling_parameters() -> None:
    values = {
        "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "top_k": 3, "top_p": 0.25,
        "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": -1.0,
        "frequency_penalty": 0.75, "seed": 9,
    }  # fmt: skip
    call = call_of(
        text_input=[b"a"],
        stop_words=[b"x", b"", b"yz"],
        stop_token_ids=[4, 5],
        **{name: [value] for name, value in values.items()},
    )
    params = call.params  # type: ignore[attr-defined]
    for name, value in values.items():
        assert getattr(params, name) == value
    assert params.stop == ("x", "yz")
    assert params.stop_token_ids == (4, 5)
    named = {tensor.option for tensor in INPUTS if tensor.option}
    assert named == {*values, "stop", "stop_token_ids"}


def test_a_dense_instance_has_no_window_to_agree_on() -> None:
    with pytest.raises(RequestError, match=r"does not exist \(dense arm\)"):
        call_of(text_input=[b"a"], window=[4032])


def test_measurements_name_declared_outputs() -> None:
    values = measurements(RequestMetrics("windowed", 3, [0] * 4))
    assert tuple(values) == MEASUREMENTS
    assert {tensor.name for tensor in OUTPUTS} >= set(MEASUREMENTS)
    assert values["tpot_ms"] is None


def test_the_manual_lists_every_tensor() -> None:
    listed = re.findall(r"^\| `(\w+)` \| (\w+)", PAGE.read_text(encoding="utf-8"), re.M)
    assert listed == [(t.name, t.data_type.removeprefix("TYPE_")) for t in (*INPUTS, *OUTPUTS)]


# TensorRT-LLM's own backend: its files are not here, so a stand-in of the same form is.

STAND_IN = """
import json

LLM = None


class TritonPythonModel:
    def initialize(self, args):
        self.devices_chosen = True
        global LLM
        from tensorrt_llm import (
            LLM,
        )
        from tensorrt_llm.llmapi.llm import RequestOutput
        self.registered = list(LLM.registered)
"""


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = tmp_path / "tensorrt_llm"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('# theirs\nname: "tensorrt_llm"\nbackend: "python"\n')
    (folder / "1/model.py").write_text(STAND_IN)
    (folder / "1/helpers.py").write_text("theirs = 1\n")
    return folder


def test_the_llmapi_variant_registers_between_import_and_model(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "repo"
    options = ["--depth", 4, "--window", 2048, "--sink", 32, "--max-seq-len", "8k"]
    names = ["--model", "some/name", "--out", out, "--name", "q"]
    assert command(*names, "--backend", "llmapi", "--template", template, *options) == 0
    assert parsed(out / "q").name == "q"
    assert (out / "q/1/helpers.py").read_text() == "theirs = 1\n"
    settings = json.loads((out / "q/1/wmtp.json").read_text())
    assert settings == {"mode": "ring", "window": 2048, "n_sink": 32}

    fake = types.ModuleType("tensorrt_llm")
    fake.LLM = types.SimpleNamespace(registered=[])  # type: ignore[attr-defined]
    inner = types.ModuleType("tensorrt_llm.llmapi.llm")
    inner.RequestOutput = None  # type: ignore[attr-defined]
    for name, module in (
        ("tensorrt_llm", fake),
        ("tensorrt_llm.llmapi", types.ModuleType("tensorrt_llm.llmapi")),
        ("tensorrt_llm.llmapi.llm", inner),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("TRTLLM_WMTP_CONFIG", raising=False)
    monkeypatch.setattr("tllm_wmtp.trtllm.register", lambda: fake.LLM.registered.append("ours"))
    model = runpy.run_path(str(out / "q/1/model.py"))["TritonPythonModel"]()
    model.initialize({})
    assert model.registered == ["ours"]
    assert os.environ["TRTLLM_WMTP_CONFIG"] == str(out / "q/1/wmtp.json")


#: What TensorRT-LLM's public source has of LLM()'s arguments, and what its backend takes out first.
LLM_ARGUMENTS = {
    "model": str,
    "backend": str,
    "max_batch_size": int,
    "max_seq_len": int,
    "kv_cache_config": {"enable_block_reuse": bool, "max_tokens": int},
    "speculative_config": {
        "decoding_type": str,
        "max_draft_len": int,
        "num_nextn_predict_layers": int,
    },
    "triton_config": {"max_batch_size": int, "decoupled": bool},
}


def check_fields(given: dict[str, Any], known: dict[str, Any]) -> None:
    for name, value in given.items():
        if isinstance(known[name], dict):
            check_fields(value, known[name])
        else:
            assert type(value) is known[name], name


@pytest.mark.parametrize("arm", ["windowed", "native", "dense"])
@pytest.mark.parametrize("limits", [{}, {"max_seq_len": 8192, "kv_tokens": 65536}])
def test_every_field_of_model_yaml_is_one_that_tensorrt_llm_has(
    arm: str, limits: dict[str, int]
) -> None:
    settings = InstanceSettings("some: 'name\u00e9\u201d", arm, depth=4, max_batch_size=3, **limits)
    given = yaml.safe_load(llmapi.model_yaml(settings))
    check_fields(given, LLM_ARGUMENTS)
    assert (given["model"], given["backend"]) == (settings.model, "pytorch")
    assert given["max_batch_size"] == 3
    assert given.get("max_seq_len") == limits.get("max_seq_len")
    kv_cache = given.get("kv_cache_config", {})
    assert kv_cache.get("max_tokens") == limits.get("kv_tokens")
    # Rings start cold after a prefix hit; stock drafts do not care.
    assert kv_cache.get("enable_block_reuse") == (False if arm == "windowed" else None)
    # Releases differ in which of the two names they read.
    drafts = {"decoding_type": "MTP", "max_draft_len": 3, "num_nextn_predict_layers": 3}
    assert given.get("speculative_config") == (None if arm == "dense" else drafts)
    assert given["triton_config"] == {"max_batch_size": 0, "decoupled": True}


def test_what_tensorrt_llm_would_not_be_told_is_refused(
    tmp_path: Path, template: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = ["--model", "m", "--out", tmp_path / "r", "--backend", "llmapi", "--template", template]
    for option, value in (
        ("--dtype", "bfloat16"), ("--kv-dtype", "bfloat16"), ("--max-queue-size", 3),
    ):  # fmt: skip
        assert command(*to, option, value) == 2
        assert f"{option[2:].replace('-', '_')} {value!r}" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
    assert command(*to, "--device", "cuda") == 0


def test_the_plugin_reads_what_the_llmapi_variant_writes(tmp_path: Path) -> None:
    from tllm_wmtp.trtllm.settings import read

    for arm, mode in (("windowed", "ring"), ("native", "off"), ("dense", "off")):
        file = tmp_path / f"{arm}.json"
        settings = InstanceSettings("m", arm, window=96, n_sink=3)
        file.write_text(json.dumps(llmapi.plugin_settings(settings)))
        found = read({"TRTLLM_WMTP_CONFIG": str(file)})
        assert found.mode == mode
        if arm == "windowed":
            assert (found.window, found.n_sink) == (96, 3)


def test_a_missing_or_strange_template_is_named(
    tmp_path: Path, template: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llmapi_to = ["--model", "m", "--out", tmp_path / "repo", "--backend", "llmapi"]
    assert command(*llmapi_to, "--template", tmp_path / "none") == 2
    assert "NVIDIA's container" in capsys.readouterr().err
    (template / "1/model.py").write_text("import json\n")
    assert command(*llmapi_to, "--template", template) == 2
    assert "does not import tensorrt_llm" in capsys.readouterr().err
    assert command("--model", "demo", "--out", tmp_path / "r", "--template", template) == 2
    assert "--backend llmapi" in capsys.readouterr().err
