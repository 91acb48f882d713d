"""The part of a build that reads the checkpoint: checks, graph, compiled engine, config.json."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import tllm_wmtp
from tllm_wmtp.engine.attention import PLUGIN
from tllm_wmtp.engine.backends import FP4_TARGETS, BuildError, compile_graph
from tllm_wmtp.engine.build import (
    BuildOptions,
    Ingredients,
    Progress,
    hash_json,
    is_whole,
    rename_directory,
)
from tllm_wmtp.engine.directory import CONFIG, LOG, SCHEMA, hash_file
from tllm_wmtp.engine.draft import DraftSpec, write_draft_graph
from tllm_wmtp.engine.graph import WrittenGraph
from tllm_wmtp.engine.target import TargetSpec, check_target, write_target_graph
from tllm_wmtp.engine.weights import ModelSource, open_model, tensors_hash
from tllm_wmtp.errors import ConfigError
from tllm_wmtp.ops.checks import CUDA_MAX_HEAD_DIM
from tllm_wmtp.ring import RingSpec

#: TensorRT's TopK has this limit.
_MOST_CANDIDATES = 3840


def compose(
    model: Path, ingredients: Ingredients, engines: Path, progress: Progress
) -> tuple[Path, bool]:
    """The directory below ``engines`` with this engine, and whether it was there already.

    Raises: as :func:`~tllm_wmtp.engine.build.build_engine`.
    """
    options = ingredients.options
    source = open_model(model, with_head=options.engine == "draft")
    if options.engine == "target":
        check_target(source)
    else:
        _check_heads(source)
        _check_candidates(source, options)
    _check_reach(source, options)
    quantized = _keeps_nvfp4(source, options)
    if quantized and options.target not in FP4_TARGETS:
        raise ConfigError(
            f"target {options.target!r} with NVFP4 weights",
            f"FP4 matrix products need {', '.join(FP4_TARGETS)}",
            "use --weights bf16",
        )
    progress("hashing weights")
    identity = _identity(source, ingredients, quantized)
    entry = engines / hash_json(identity)
    if is_whole(entry):
        return entry, True
    engines.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".building-", dir=engines))
    try:
        try:
            _fill(work, source, ingredients, quantized, identity, progress)
        except BuildError as error:
            raise _with_log(error, work, engines.parent) from None
        work.chmod(0o755)
        if not is_whole(entry):  # else another process was faster
            rename_directory(work, entry)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return entry, False


def _with_log(error: BuildError, work: Path, cache: Path) -> BuildError:
    """The same error, naming a copy of the builder's log that outlives the failed build."""
    if not (work / LOG).exists() or (work / LOG).stat().st_size == 0:
        return error
    kept = cache / "failed-build.log"
    shutil.copy(work / LOG, kept)
    return BuildError(error.value, error.rule, f"{error.remedy}; the builder's log is {kept}")


def draft_spec(options: BuildOptions, quantized: bool) -> DraftSpec:
    return DraftSpec(
        RingSpec.for_chain(options.n_sink, options.window, options.depth),
        options.lanes,
        options.rows,
        dtype="bfloat16",
        top_k=options.top_k,
        quantized=quantized,
        lowering=PLUGIN,
    )


def target_spec(options: BuildOptions, quantized: bool, capacity: int) -> TargetSpec:
    return TargetSpec(
        options.lanes,
        capacity,
        options.depth,
        options.rows_per_lane,
        dtype="bfloat16",
        quantized=quantized,
        lowering=PLUGIN,
    )


def _write(
    source: ModelSource, options: BuildOptions, quantized: bool, folder: Path
) -> WrittenGraph:
    if options.engine == "draft":
        return write_draft_graph(source, draft_spec(options, quantized), folder)
    capacity = options.max_seq_len or source.config.max_position_embeddings
    return write_target_graph(source, target_spec(options, quantized, capacity), folder)


def _check_heads(source: ModelSource) -> None:
    """What the plugin would refuse, before anything is written."""
    head_dim = source.config.caches.draft.head_dim
    if head_dim > CUDA_MAX_HEAD_DIM or head_dim % 16:
        raise ConfigError(
            f"draft attention heads {head_dim} wide",
            f"the plugin serves multiples of 16 up to {CUDA_MAX_HEAD_DIM}",
            "run this checkpoint on the embedded runtime on a CPU",
        )


def _check_candidates(source: ModelSource, options: BuildOptions) -> None:
    most = min(source.config.vocab_size, _MOST_CANDIDATES)
    if options.top_k > most:
        raise ConfigError(
            f"top_k {options.top_k}",
            f"TensorRT finds at most {most} of {source.config.vocab_size} tokens",
            "lower it, or use 0 for all logits",
        )


def _check_reach(source: ModelSource, options: BuildOptions) -> None:
    limit = source.config.max_position_embeddings
    if options.engine == "draft":
        reach, remedy = options.n_sink + options.window, "lower window or n_sink"
        value = f"n_sink {options.n_sink} + window {options.window} = {reach}"
    else:
        reach, remedy = options.max_seq_len or limit, "lower max_seq_len"
        value = f"max_seq_len {reach}"
    if reach > limit:
        raise ConfigError(value, f"the model has {limit} positions", remedy)


def _keeps_nvfp4(source: ModelSource, options: BuildOptions) -> bool:
    there = source.is_quantized(options.engine)
    if options.weights == "nvfp4" and not there:
        raise ConfigError(
            "weights 'nvfp4'",
            f"no weight of the {options.engine} in {source.path} is quantized to NVFP4",
            f"quantize it first (wmtp quantize --model {source.path} --out DIR), "
            "or use --weights bf16",
        )
    return options.weights != "bf16" and there


def _identity(source: ModelSource, ingredients: Ingredients, quantized: bool) -> dict[str, Any]:
    """Everything that the engine depends on, and nothing else."""
    options, facts = ingredients.options, ingredients.facts()
    facts["options"]["weights"] = "nvfp4" if quantized else "bf16"
    model = {
        "family": source.model_type,
        "config_sha256": hash_json(source.head_weights.directory.config),
        "weights_sha256": tensors_hash(source, options.engine),
    }
    return {"schema": SCHEMA, "kind": options.engine, "model": model, **facts}


def _fill(
    work: Path,
    source: ModelSource,
    ingredients: Ingredients,
    quantized: bool,
    identity: dict[str, Any],
    progress: Progress,
) -> None:
    options, backend = ingredients.options, ingredients.backend
    progress("writing the graph")
    begin = time.monotonic()
    written = _write(source, options, quantized, work)
    graph_s = time.monotonic() - begin
    progress(f"compiling for {options.target} with {backend.name} {backend.version}")
    answer = compile_graph(
        backend,
        {
            "onnx": str(written.file),
            "engine": str(work / f"{options.engine}.engine"),
            "log": str(work / LOG),
            "plugin": None if ingredients.plugin is None else str(ingredients.plugin),
            "profiles": written.profiles,
        },
    )
    config = identity | _facts(source, written, answer, graph_s)
    (work / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _facts(
    source: ModelSource,
    written: WrittenGraph,
    answer: dict[str, Any],
    graph_s: float,
) -> dict[str, Any]:
    """What a reader of config.json wants to know beside the identity."""
    work = written.file.parent
    data = written.file.with_name(f"{written.file.name}.data")
    return {
        "tool_version": tllm_wmtp.__version__,
        "checkpoint": str(source.path.resolve()),
        "nvfp4_weights": list(written.quantized_weights),
        "state": written.state,
        "inputs": written.inputs,
        "outputs": written.outputs,
        "profiles": written.profiles,
        "graph": {
            "bytes": sum(file.stat().st_size for file in work.glob(f"{written.file.name}*")),
            "sha256": hash_file(written.file),
            "data_sha256": hash_file(data) if data.exists() else None,
            "seconds": round(graph_s, 2),
        },
        "engine": {
            "bytes": answer["bytes"],
            "sha256": hash_file(written.file.with_suffix(".engine")),
            "seconds": round(answer["seconds"], 2),
        },
    }
