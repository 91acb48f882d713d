"""The examples parse, and every key and option in them is one that is known."""

from __future__ import annotations

import ast
import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from tllm_wmtp.trtllm import settings

FOLDER = Path(__file__).resolve().parents[2] / "examples/trtllm"

#: Keys of TensorRT-LLM's LLM arguments that the examples may use, as its public source has them.
LLM_ARGUMENTS = {
    "backend": str,
    "tensor_parallel_size": int,
    "moe_expert_parallel_size": int,
    "max_batch_size": int,
    "max_seq_len": int,
    "max_num_tokens": int,
    "enable_chunked_prefill": bool,
    "speculative_config": {
        "decoding_type": str,
        "max_draft_len": int,
        "num_nextn_predict_layers": int,
    },
    "kv_cache_config": {"enable_block_reuse": bool, "free_gpu_memory_fraction": float},
    "cuda_graph_config": {"enable_padding": bool, "max_batch_size": int},
}
DRAFT_LENGTH = ("max_draft_len", "num_nextn_predict_layers")
ARGUMENT_FILES = sorted(file for file in FOLDER.glob("*.yaml") if not file.name.startswith("wmtp"))


def check_keys(given: dict, known: dict, where: str) -> None:
    for key, value in given.items():
        assert key in known, f"{where}: {key}"
        if isinstance(known[key], dict):
            if value is not None:
                check_keys(value, known[key], f"{where}.{key}")
        else:
            assert type(value) is known[key], f"{where}.{key}: {value!r}"


@pytest.mark.parametrize("file", ARGUMENT_FILES, ids=lambda file: file.name)
def test_llm_arguments_are_known_ones(file: Path) -> None:
    given = yaml.safe_load(file.read_text())
    check_keys(given, LLM_ARGUMENTS, file.name)
    lengths = [given["speculative_config"][name] for name in DRAFT_LENGTH]
    assert lengths == [6, 6]
    # A prefix hit starts a ring cold, so the examples do without.
    assert given["kv_cache_config"]["enable_block_reuse"] is False


def test_there_is_one_for_every_model_of_the_paper() -> None:
    names = {file.name for file in ARGUMENT_FILES}
    for model in ("qwen3.6-35b-a3b", "qwen3.5-122b-a10b", "nemotron-3-super-120b"):
        (file,) = [FOLDER / name for name in names if name.startswith(model)]
        assert yaml.safe_load(file.read_text())["max_seq_len"] == 2**20


@pytest.mark.parametrize("name", ["wmtp.yaml", "wmtp-engine.yaml"])
def test_settings_files_are_read_by_the_plug_in(name: str) -> None:
    found = settings.read({"TRTLLM_WMTP_CONFIG": str(FOLDER / name)})
    assert (found.window, found.n_sink) == (4032, 64)
    given = yaml.safe_load((FOLDER / name).read_text())
    assert set(given) <= {field.name for field in fields(settings.Settings)}


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda file: file.name)
def test_python_compiles(file: Path) -> None:
    tree = ast.parse(file.read_text(), file.name)
    compile(tree, file.name, "exec")
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    assert "tllm_wmtp.trtllm.plugin" in {alias.name for node in imports for alias in node.names}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.sh")), ids=lambda file: file.name)
def test_shell_scripts_parse(file: Path) -> None:
    done = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_serving_script_gives_the_server_what_it_is_told(tmp_path: Path) -> None:
    """With a ``trtllm-serve`` that prints its arguments and the environment it sees."""
    server = tmp_path / "trtllm-serve"
    server.write_text(
        '#!/bin/sh\n[ "$2" = --help ] && { echo "  --config TEXT"; exit; }\n'
        'echo "$TRTLLM_WMTP_CONFIG $@"\n'
    )
    server.chmod(0o755)
    done = subprocess.run(
        [FOLDER / "serve.sh", "/models/q35", "qwen3.6-35b-a3b-1m.yaml", "--port", "8001"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    told = done.stdout.split()
    assert told[0] == str(FOLDER / "wmtp.yaml")
    assert told[1:3] == ["serve", "/models/q35"]
    options = dict(zip(told[3::2], told[4::2], strict=True))
    assert options == {
        "--custom_module_dirs": str(FOLDER / "wmtp_plugin"),
        "--config": str(FOLDER / "qwen3.6-35b-a3b-1m.yaml"),
        "--port": "8001",
    }


def test_the_serving_script_shows_how_to_use_it() -> None:
    done = subprocess.run([FOLDER / "serve.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "serve.sh CHECKPOINT LLM_ARGUMENTS.yaml" in done.stderr
    models = re.findall(r"serve\.sh /models/\S+ (\S+\.yaml)", done.stderr)
    assert models
    assert all((FOLDER / name).exists() for name in models)
