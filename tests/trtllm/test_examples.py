"""The examples parse, and every key and option in them is one that is known."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from tllm_wmtp.trtllm import compat, settings

HERE = Path(__file__).parent
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


class Container:
    """Runs the smoke script with commands that say what they were told, or fail on demand."""

    def __init__(self, folder: Path, stub: Path | None):
        self.folder, self.stub, self.told = folder, stub, folder / "told"
        bodies = {
            "python3": f'case "$*" in *" pip "*) [ -z "$NO_PACKAGE" ]; exit;; esac\n'
            f'exec {sys.executable} "$@"\n',
            "cmake": '[ -n "$NO_KERNELS" ] && { echo "no nvcc"; exit 1; }\n'
            '[ "$1" = -S ] && mkdir -p "$4/lib" && touch "$4/lib/libwmtp_cuda.so"\nexit 0\n',
            "cp": "exit 0\n",
        }
        for name, body in bodies.items():
            file = folder / name
            file.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.told}\n{body}')
            file.chmod(0o755)

    def run(self, *options: str, **environment: str) -> tuple[int, list[str]]:
        paths = [str(HERE), str(FOLDER.parents[1])] + ([str(self.stub)] if self.stub else [])
        done = subprocess.run(
            [FOLDER / "smoke.sh", *options],
            env={"PATH": f"{self.folder}:/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(paths)}
            | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_the_smoke_script_says_what_holds(tmp_path: Path, stub_roots: dict[str, Path]) -> None:
    """Every feature holds; no model runs here, tests of the check run one."""
    container = Container(tmp_path, stub_roots["late"])
    code, lines = container.run("--names-only")
    assert code == 0, lines
    assert [line.split(maxsplit=1) for line in lines[:4]] == [
        ["holds", "TensorRT-LLM is installed"],
        ["holds", "the package builds"],
        ["holds", "the CUDA kernels build"],
        ["holds", "the kernels are where the package looks"],
    ]
    assert {line.split()[0] for line in lines[4:]} == {"holds", "skipped"}
    assert any(line.split()[:2] == ["holds", "Attention"] for line in lines)
    told = container.told.read_text().splitlines()
    assert f"python3 -m pip install --no-deps {FOLDER.parents[1]}" in told
    (copied,) = [line for line in told if line.startswith("cp ")]
    assert copied.endswith("tllm_wmtp")


@pytest.mark.slow
def test_the_smoke_script_goes_on_without_kernels_and_fails(
    tmp_path: Path, stub_roots: dict[str, Path]
) -> None:
    container = Container(tmp_path, stub_roots["early"])
    code, lines = container.run("--names-only", NO_KERNELS="1")
    assert code == 1
    assert [line.split(maxsplit=1) for line in lines[2:5]] == [
        ["fails", "the CUDA kernels build"],
        ["no", "nvcc"],
        ["skipped", "the kernels are where the package looks"],
    ]
    assert any(line.split()[:2] == ["holds", "registration"] for line in lines)


def test_the_smoke_script_stops_without_a_package(
    tmp_path: Path, stub_roots: dict[str, Path]
) -> None:
    code, lines = Container(tmp_path, stub_roots["late"]).run(NO_PACKAGE="1")
    assert code == 1
    assert [line.split()[0] for line in lines] == ["holds", "fails", "skipped"]


def test_the_smoke_script_stops_without_tensorrt_llm(tmp_path: Path) -> None:
    if compat.is_installed():
        pytest.skip("this machine has TensorRT-LLM")
    code, lines = Container(tmp_path, None).run()
    assert code == 2
    assert lines[0].split(maxsplit=1) == ["fails", "TensorRT-LLM is installed"]
    assert "No module named 'tensorrt_llm'" in lines[-1]


@pytest.mark.slow
def test_the_smoke_script_passes_on_that_an_option_is_wrong(
    tmp_path: Path, stub_roots: dict[str, Path]
) -> None:
    code, _ = Container(tmp_path, stub_roots["late"]).run("--model", "/nowhere")
    assert code == 2


@pytest.mark.slow
def test_the_smoke_script_fails_where_the_check_does(
    tmp_path: Path, stub_roots: dict[str, Path]
) -> None:
    """A release without one of the names."""
    broken = tmp_path / "broken"
    shutil.copytree(stub_roots["late"], broken)
    (broken / "tensorrt_llm/_torch/speculative/utils/__init__.py").write_text("")
    (broken / "tensorrt_llm/_torch/pyexecutor/py_executor_creator/__init__.py").write_text("")
    folder = tmp_path / "bin"
    folder.mkdir()
    code, lines = Container(folder, broken).run()
    assert code == 1
    (line,) = [one for one in lines if "get_spec_resource_manager" in one]
    assert line.startswith("fails")
    assert any(one.split()[:2] == ["skipped", "runs"] for one in lines)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["late"], indirect=True)
def test_the_python_example_runs(
    layout: str, checkpoints: dict[str, Path], stub_roots: dict[str, Path]
) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / "generate.py", checkpoints["Qwen3NextForCausalLM"], "a prompt"],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(stub_roots[layout]), str(HERE)]),
            "TRTLLM_WMTP_CONFIG": str(FOLDER / "wmtp.yaml"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 128
