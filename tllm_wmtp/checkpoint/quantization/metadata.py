"""What a checkpoint's JSON files say of its quantization.

Three dialects exist: NVIDIA Model Optimizer's (``hf_quant_config.json``, and since 0.29 the same in
``quantization_config`` of config.json), compressed-tensors', and ``fp8`` of the DeepSeek-V3 line.
They differ in words and in the names of tensors; all come down to which schemes the weights may
have, for which modules, and which modules are left alone.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tllm_wmtp.checkpoint.quantization.weights import BLOCK
from tllm_wmtp.errors import CheckpointError
from tllm_wmtp.models.fields import Fields

#: Model Optimizer's files; older exports keep the layers of a mixed checkpoint in the second.
HF_QUANT_CONFIG, QUANT_CFG = "hf_quant_config.json", "quant_cfg.json"
MODELOPT, COMPRESSED_TENSORS, FP8 = "modelopt", "compressed-tensors", "fp8"


@dataclass(frozen=True)
class Scheme:
    """How the weights of a module are stored.

    Args:
        format: ``NVFP4`` or ``FP8``.
        scales: what shares an FP8 scale: ``tensor``, ``channel`` (a row) or ``block``.
        block: rows and columns of an FP8 block.
    """

    format: str
    scales: str = "block"
    block: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.format if self.format == "NVFP4" else f"FP8 with a scale per {self.scales}"


NVFP4 = Scheme("NVFP4")
FP8_TENSOR, FP8_CHANNEL = Scheme("FP8", "tensor"), Scheme("FP8", "channel")
FP8_BLOCK = Scheme("FP8", "block", (128, 128))
ALGORITHMS = {
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "FP8": FP8_TENSOR,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL,
    "FP8_PB_WO": FP8_BLOCK,
    "FP8_PB_REAL": FP8_BLOCK,
    "FP8_BLOCK_SCALES": FP8_BLOCK,
}
MIXED = "MIXED_PRECISION"


class Modules:
    """A set of modules, given by names, wildcards (``*mlp.gate``) and ``re:`` expressions.

    Args:
        below: whether a name or wildcard that takes in a module takes in what is below it too.
            compressed-tensors and Model Optimizer list a parent for its own sake, beside children
            that are quantized.
    """

    def __init__(self, patterns: Iterable[str], below: bool = True):
        self.patterns, self.below = frozenset(patterns), below
        expressions = {p for p in self.patterns if p.startswith("re:")}
        wild = {p for p in self.patterns - expressions if any(c in p for c in "*?[")}
        self._names = self.patterns - expressions - wild
        self._expressions = [_compiled(pattern) for pattern in sorted(expressions)]
        translated = "|".join(fnmatch.translate(pattern) for pattern in sorted(wild))
        self._wild = re.compile(translated) if wild else None
        self._seen: dict[str, bool] = {}  # thousands of experts share what is above them

    def __contains__(self, module: str) -> bool:
        if any(expression.match(module) for expression in self._expressions):
            return True
        names = _with_parents(module) if self.below else [module]
        return any(self._takes_in(name) for name in names)

    def _takes_in(self, name: str) -> bool:
        if name not in self._seen:
            wild = self._wild is not None and self._wild.match(name) is not None
            self._seen[name] = wild or name in self._names
        return self._seen[name]


def _with_parents(module: str) -> Iterable[str]:
    while module:
        yield module
        module = module.rpartition(".")[0]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern[3:])
    except re.error as error:
        raise CheckpointError(
            f"module pattern {pattern!r} ({error})",
            "after 're:' the quantization metadata must hold a regular expression",
            "use the config.json that belongs to the weights",
        ) from error


@dataclass(frozen=True)
class Quantization:
    """One statement about a checkpoint.

    Args:
        source: where it stands, for messages.
        algorithm: its own word for what it is.
        dialect: ``modelopt``, ``compressed-tensors`` or ``fp8``: how the tensors are named.
        schemes: schemes of modules that ``named`` does not name.
        named: schemes of modules by name.
        excluded: modules left alone.
        kv_cache: what it says of the KV cache. The runtime keeps keys and values in a type of its
            own choice, so neither this nor the files' KV scales change anything.
    """

    source: str
    algorithm: str
    dialect: str
    schemes: frozenset[Scheme] = frozenset()
    named: tuple[tuple[Modules, Scheme], ...] = ()
    excluded: Modules = field(default_factory=lambda: Modules(()))
    kv_cache: str | None = None

    @property
    def declared(self) -> frozenset[Scheme]:
        return self.schemes | {scheme for _, scheme in self.named}

    def schemes_for(self, module: str) -> list[Scheme]:
        """Schemes that the weights of ``module`` may have, in a fixed order.

        Where the metadata names modules and ``module`` is not among them (prefixes differ between
        libraries), every declared scheme is possible, and the tensors decide.
        """
        named = {scheme for modules, scheme in self.named if module in modules}
        return sorted(named or self.schemes or self.declared, key=str)

    def merged(self, other: Quantization) -> Quantization:
        """Both statements as one.

        Raises:
            CheckpointError: they contradict each other.
        """
        if self.dialect != other.dialect or self.declared != other.declared:
            said = " and ".join(sorted(f"{one.algorithm} ({one.source})" for one in (self, other)))
            raise CheckpointError(
                f"quantization {said}",
                "a checkpoint is quantized in one way, and all its files say so",
                "keep the one that belongs to the weights",
            )
        return Quantization(
            f"{self.source} and {other.source}",
            self.algorithm,
            self.dialect,
            self.schemes or other.schemes,
            self.named or other.named,
            Modules(self.excluded.patterns | other.excluded.patterns, self.excluded.below),
            self.kv_cache or other.kv_cache,
        )


def read_quantization(
    config: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any] | None = None,
    quant_cfg: Mapping[str, Any] | None = None,
) -> Quantization | None:
    """What config.json and hf_quant_config.json say; None where neither speaks of quantization.

    ``quant_cfg`` is the content of quant_cfg.json, if there is one.

    Raises:
        CheckpointError: an unknown algorithm, or statements that contradict each other.
    """
    found = []
    text = config.get("text_config")
    for holder, source in ((config, "config.json"), (text, "text_config of config.json")):
        if isinstance(holder, Mapping):
            for key in ("quantization_config", "compression_config"):
                if holder.get(key):
                    found.append(_statement(Fields(holder[key], key), source))
    if hf_quant_config is not None:
        content = hf_quant_config.get("quantization")
        if isinstance(content, Mapping) and quant_cfg is not None:
            content = {"quantized_layers": quant_cfg.get("quantized_layers"), **content}
        found.append(_modelopt(Fields(content, HF_QUANT_CONFIG), HF_QUANT_CONFIG))
    if not found:
        return None
    merged = found[0]
    for statement in found[1:]:
        merged = merged.merged(statement)
    return merged


def _statement(fields: Fields, source: str) -> Quantization:
    method = str(fields.get("quant_method", "")).lower()
    if method.startswith(MODELOPT) or (not method and fields.get("quant_algo")):
        return _modelopt(fields, source)
    if method == COMPRESSED_TENSORS:
        return _compressed_tensors(fields, source)
    if method == FP8:
        return _fp8(fields, source)
    _unknown(fields.get("quant_method"), source)


def _unknown(algorithm: object, source: str) -> NoReturn:
    raise CheckpointError(
        f"quantization {algorithm} ({source})",
        "weights can be read in NVFP4 and FP8, as nvidia-modelopt and compressed-tensors store "
        "them, in FP8 of quant_method 'fp8', and unquantized",
        "use a checkpoint in one of these",
    )


def _modelopt(fields: Fields, source: str) -> Quantization:
    """Model Optimizer's words, in either file."""
    algorithm = fields.get("quant_algo")
    named: tuple[tuple[Modules, Scheme], ...] = ()
    schemes: frozenset[Scheme] = frozenset()
    layers = fields.get("quantized_layers")
    kv_cache = fields.get("kv_cache_quant_algo", fields.get("kv_cache_scheme"))
    if layers:
        named = _named_layers(layers, source)
    elif algorithm not in (None, MIXED):
        schemes = frozenset({_algorithm(algorithm, fields.get("group_size"), source)})
    elif fields.get("config_groups"):
        schemes, named = _groups(fields, source)
    elif algorithm is not None:
        raise CheckpointError(
            f"quantization {algorithm} ({source})",
            "quantized_layers must say which layer is quantized how",
            "download the complete checkpoint",
        )
    elif kv_cache is None:
        _unknown(None, source)
    excluded = fields.get("exclude_modules", fields.get("ignore", []))
    return Quantization(
        source,
        str(algorithm or "of the KV cache"),
        MODELOPT,
        schemes,
        named,
        Modules(_names(excluded, source), below=False),
        None if kv_cache is None else str(kv_cache),
    )


def _algorithm(algorithm: object, group_size: object, source: str) -> Scheme:
    scheme = ALGORITHMS.get(str(algorithm).upper())
    if scheme is None:
        _unknown(algorithm, source)
    if not group_size:
        return scheme
    if scheme is FP8_BLOCK and isinstance(group_size, int):
        return Scheme("FP8", "block", (group_size, group_size))
    if scheme is NVFP4 and group_size != BLOCK:
        _unknown(f"{algorithm} in groups of {group_size}", source)
    return scheme


def _named_layers(layers: object, source: str) -> tuple[tuple[Modules, Scheme], ...]:
    by_scheme: dict[Scheme, list[str]] = {}
    for module, content in _items(layers, "quantized_layers"):
        layer = Fields(content, f"quantized_layers {module}")
        scheme = _algorithm(layer.get("quant_algo"), layer.get("group_size"), source)
        by_scheme.setdefault(scheme, []).append(module)
    return tuple((Modules(modules), scheme) for scheme, modules in by_scheme.items())


def _compressed_tensors(fields: Fields, source: str) -> Quantization:
    sparsity = fields.get("sparsity_config", {})
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        _unknown(f"with sparse weights ({sparsity['format']})", source)
    if fields.get("transform_config"):
        _unknown("with transforms of weights and activations", source)
    schemes, named = _groups(fields, source)
    kv_cache = fields.get("kv_cache_scheme")
    return Quantization(
        source,
        str(fields.get("format", COMPRESSED_TENSORS)),
        COMPRESSED_TENSORS,
        schemes,
        named,
        Modules(_names(fields.get("ignore", []), source), below=False),
        None if kv_cache is None else str(kv_cache),
    )


def _groups(
    fields: Fields, source: str
) -> tuple[frozenset[Scheme], tuple[tuple[Modules, Scheme], ...]]:
    """Schemes of ``config_groups``: for classes of modules (``Linear``), and by name."""
    schemes, named = set(), []
    for name, content in _items(fields.need("config_groups"), "config_groups"):
        group = Fields(content, f"config_groups {name}")
        scheme = _group_scheme(Fields(group.need("weights"), f"weights of {group.name}"), source)
        targets = _names(group.get("targets", ["Linear"]), source)
        classes = [
            t for t in targets if "." not in t and not t.startswith("re:") and t[:1].isupper()
        ]
        if classes:
            schemes.add(scheme)
        if modules := set(targets) - set(classes):
            named.append((Modules(modules, below=False), scheme))
    return frozenset(schemes), tuple(named)


def _group_scheme(weights: Fields, source: str) -> Scheme:
    kind, bits, group = weights.get("type"), weights.get("num_bits"), weights.get("group_size")
    strategy = weights.get("strategy", "tensor")
    if weights.get("symmetric", True) is not True:
        _unknown(f"{bits}-bit {kind} weights with zero points", source)
    if kind == "float" and bits == 4 and group == BLOCK:
        return NVFP4
    if kind == "float" and bits == 8 and not group:
        if strategy == "block":
            return Scheme("FP8", "block", _block(weights, "block_structure"))
        if strategy in ("tensor", "channel"):
            return Scheme("FP8", strategy)
    in_groups = f" in groups of {group}" if group else ""
    _unknown(f"{bits}-bit {kind} weights{in_groups}, a scale per {strategy}", source)


def _fp8(fields: Fields, source: str) -> Quantization:
    if fields.get("fmt", "e4m3") != "e4m3" or fields.get("expert_dtype", "fp8") != "fp8":
        _unknown(
            f"fp8 with fmt {fields.get('fmt')!r}, experts {fields.get('expert_dtype')!r}", source
        )
    scheme = FP8_TENSOR
    if fields.get("weight_block_size") is not None:
        scheme = Scheme("FP8", "block", _block(fields, "weight_block_size"))
    excluded = fields.get("modules_to_not_convert", fields.get("ignored_layers", []))
    return Quantization(
        source, FP8, FP8, frozenset({scheme}), (), Modules(_names(excluded, source))
    )


def _items(content: object, name: str) -> Iterable[tuple[str, Any]]:
    Fields(content, name)  # refuses what is no JSON object
    assert isinstance(content, Mapping)
    return content.items()


def _block(fields: Fields, key: str) -> tuple[int, int]:
    block = fields.need(key)
    whole = isinstance(block, (list, tuple)) and len(block) == 2
    if not whole or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in block):
        fields.refuse(key, "it must be two whole numbers, rows and columns of a block")
    return block[0], block[1]


def _names(value: object, source: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(
            f"modules {value!r} ({source})",
            "the quantization metadata must list modules by name",
            "use the config.json that belongs to the weights",
        )
    return value
