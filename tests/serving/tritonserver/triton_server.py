"""A real Triton server on loopback, and clients of it.

The server is the one that the PyPI package ``nvidia-pytriton`` carries: binary, Python backend, and
one stub per Python version.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from toolchain import REPOSITORY
from tritonclient import grpc

from tllm_wmtp.cli.triton_repo import START

FOLDER = REPOSITORY / "build/tritonserver"
VERSION = "0.7.0"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
#: The package's stubs were built for numpy 1, whose last version has no wheels for later Pythons.
PYTHONS = ("3.10", "3.11", "3.12")
START_S, STARTS = 90, 3
#: What the tests' model is served with.
LANES, QUEUE, DEPTH, WINDOW, N_SINK, MAX_SEQ_LEN = 16, 8, 4, 48, 4, 4096
NUMPY_TYPES = {"INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_}


def reason_to_skip() -> str | None:
    """Why this machine cannot run the server, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"nvidia-pytriton has no wheel for {sys.platform} {platform.machine()}"
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(map(int, version.split("."))) < (2, 35):
        return f"the server needs glibc 2.35, this is {libc} {version}"
    if PYTHON not in PYTHONS:
        return f"the server's Python backend serves {', '.join(PYTHONS)} here, this is {PYTHON}"
    libraries = subprocess.run(
        ["ldd", str(install() / "backends/python/triton_python_backend_stub")],
        capture_output=True,
        text=True,
        env=os.environ | {"LD_LIBRARY_PATH": _library_path()},
    ).stdout
    missing = [line.split()[0] for line in libraries.splitlines() if "not found" in line]
    return f"the server's stub needs {', '.join(missing)}" if missing else None


def install() -> Path:
    """The folder with wheel, numpy 1 and a backend folder, fetched once (55 MB)."""
    done = FOLDER / f"installed-{VERSION}-{PYTHON}"
    if done.exists():
        return FOLDER
    shutil.rmtree(FOLDER, ignore_errors=True)
    _pip("wheel", f"nvidia-pytriton=={VERSION}")
    _pip("numpy", "numpy<2")
    server = FOLDER / "wheel/pytriton/tritonserver"
    backend = FOLDER / "backends/python"
    backend.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copy(server / "backends/python" / name, backend)
    stub = server / "python_backend_stubs" / PYTHON / "triton_python_backend_stub"
    shutil.copy(stub, backend)
    (backend / stub.name).chmod(0o755)
    (server / "bin/tritonserver").chmod(0o755)
    done.touch()
    return FOLDER


def _pip(folder: str, requirement: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--target", str(FOLDER / folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(
            f"{requirement} cannot be installed: these tests need PyPI once; connect, or deselect "
            f"them with --ignore tests/serving/tritonserver.\n{result.stderr[-1000:]}"
        )


def _library_path() -> str:
    """The server's libraries, and where this Python's own shared library may be."""
    return f"{FOLDER / 'wheel/nvidia_pytriton.libs'}:{sys.base_prefix}/lib"


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _raise_priority() -> None:
    """Triton takes its Python process for dead when one of its threads has not run for a second; a
    busy test machine should not look like that. Only root may."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)


@dataclass
class Reply:
    """What came back for one request: tensors by name, one dictionary per response."""

    responses: list[dict[str, np.ndarray]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(r["text_output"].item().decode() for r in self.responses)

    @property
    def token_ids(self) -> list[int]:
        return [int(i) for r in self.responses for i in r["token_ids"].reshape(-1)]


class Server:
    """Serves a model repository until it is closed."""

    def __init__(self, repository: Path, log: Path, *options: str):
        self.log = log
        for _ in range(STARTS):
            self.http_port, self.grpc_port, self.metrics_port = _free_ports(3)
            self._start(repository, options)
            if self._wait():
                return
            self.close()
        raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}")

    def _start(self, repository: Path, options: tuple[str, ...]) -> None:
        folder = install()
        # As wmtp triton-repo tells its user to, with ports of its own.
        _, *command = shlex.split(START.format(repository=shlex.quote(str(repository))))
        command.insert(0, str(folder / "wheel/pytriton/tritonserver/bin/tritonserver"))
        command += ["--backend-directory", str(folder / "backends")]
        for what in ("http", "grpc", "metrics"):
            command += [f"--{what}-port", str(getattr(self, f"{what}_port"))]
        environment = os.environ | {
            "LD_LIBRARY_PATH": _library_path(),
            # The stub is an isolated interpreter: it finds the environment by this python3 ...
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=folder / "numpy",  # ... and numpy 1 in the working directory, before it
                start_new_session=True,
                preexec_fn=_raise_priority,
            )

    def _wait(self) -> bool:
        """Whether it is ready; gives up on one that hangs after a model was loaded."""
        deadline = time.monotonic() + START_S
        loaded = False
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if self.get("/v2/health/ready")[0] == 200:
                    return True
            if not loaded and " requests of " in self.log.read_text():
                loaded, deadline = True, time.monotonic() + 8
            time.sleep(0.1)
        return False

    def close(self) -> int:
        """Ends it and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=45)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait()

    def processes(self) -> list[int]:
        """The server's process and its Python process."""
        own = Path("/proc", str(self.process.pid), "task", str(self.process.pid), "children")
        return [self.process.pid, *map(int, own.read_text().split())]

    def get(self, path: str, port: int | None = None) -> tuple[int, str]:
        return self._request(path, None, port)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        return self._request(path, json.dumps(body).encode(), None)

    def _request(self, path: str, body: bytes | None, port: int | None) -> tuple[int, str]:
        address = f"http://127.0.0.1:{port or self.http_port}{path}"
        try:
            with urllib.request.urlopen(address, body, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self, name: str) -> dict[str, float]:
        """Values of a metric by its own label, or by '' where it has none but ours."""
        text = self.get("/metrics", self.metrics_port)[1]
        found = {}
        for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE):
            own = re.findall(r'(\w+)="([^"]*)"', labels)
            case = [value for label, value in own if label not in ("model", "version")]
            found["".join(case)] = float(value)
        return found

    def metric_becomes(self, name: str, holds: Callable[[float], bool], case: str = "") -> None:
        """Waits until the metric does."""
        deadline = time.monotonic() + 30
        while not holds(self.metrics(name).get(case, -1.0)):
            assert time.monotonic() < deadline, self.get("/metrics", self.metrics_port)[1]
            time.sleep(0.1)

    @contextlib.contextmanager
    def stream(self, prompt: str | bytes, model: str = "wmtp", **options: Any) -> Iterator[Stream]:
        """A gRPC stream with one request on it."""
        client = grpc.InferenceServerClient(f"127.0.0.1:{self.grpc_port}")
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client.start_stream(lambda result, error: arrived.put((result, error)))
        try:
            client.async_stream_infer(model, tensors(prompt, options))
            yield Stream(client, arrived)
        finally:
            client.stop_stream(cancel_requests=True)
            client.close()

    def ask(self, prompt: str | bytes, **options: Any) -> Reply:
        """The whole reply to one request."""
        with self.stream(prompt, **options) as stream:
            return stream.rest()


class Stream:
    def __init__(self, client: grpc.InferenceServerClient, arrived: queue.SimpleQueue[Any]):
        self._client, self._arrived = client, arrived
        self.reply, self.finished = Reply(), False

    def next(self) -> None:
        """Takes in one more response."""
        result, error = self._arrived.get(timeout=120)
        if error is not None:
            self.reply.error, self.finished = str(error), True
            return
        response = result.get_response()
        self.reply.times.append(time.monotonic())
        self.reply.responses.append({o.name: result.as_numpy(o.name) for o in response.outputs})
        self.finished = response.parameters["triton_final_response"].bool_param

    def rest(self) -> Reply:
        while not self.finished:
            self.next()
        return self.reply


KINDS = {
    "max_tokens": "INT32", "top_k": "INT32", "stop_token_ids": "INT32", "depth": "INT32",
    "window": "INT32", "n_sink": "INT32", "temperature": "FP32", "top_p": "FP32", "min_p": "FP32",
    "repetition_penalty": "FP32", "presence_penalty": "FP32", "frequency_penalty": "FP32",
    "seed": "UINT64", "random_seed": "UINT64", "stream": "BOOL", "ignore_eos": "BOOL",
    "return_metrics": "BOOL", "return_log_probs": "BOOL", "stop_words": "BYTES",
    "speculation": "BYTES", "text_input": "BYTES",
}  # fmt: skip


def tensors(prompt: str | bytes, options: dict[str, Any]) -> list[grpc.InferInput]:
    """Inputs as a client sends them: shape [1, n]."""
    inputs = []
    for name, value in {"text_input": prompt, **options}.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        kind = KINDS[name]
        if kind == "BYTES":
            values = [v.encode() if isinstance(v, str) else v for v in values]
        array = np.array([values], dtype=NUMPY_TYPES.get(kind, np.object_))
        inputs.append(grpc.InferInput(name, list(array.shape), kind))
        inputs[-1].set_data_from_numpy(array)
    return inputs
