"""The largest activations that each quantized layer meets, from a run over some text.

The model runs as the embedded runtime runs it, unquantized, and hooks read what goes into its
linear layers. (Model Optimizer's own calibration runs the ``transformers`` model, which has no MTP
head.) A quantized layer's input scale is the largest magnitude over ``6 * 448``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tllm_wmtp.checkpoint.loader import LoadedModel
from tllm_wmtp.checkpoint.recipe import HEAD, TARGET
from tllm_wmtp.errors import RequestError
from tllm_wmtp.models.causal import CausalStates
from tllm_wmtp.models.layers.moe import RoutedExperts

#: Called with the key of an input and that input; keys are those of :mod:`.recipe`.
Record = Callable[[str, torch.Tensor], None]


def token_chunks(ids: Sequence[int], tokens: int, length: int) -> list[list[int]]:
    """The first ``tokens`` ids in sequences of ``length``; a rest of fewer than 8 is left out."""
    ids = list(ids[:tokens])
    chunks = [ids[start : start + length] for start in range(0, len(ids), length)]
    chunks = [chunk for chunk in chunks if len(chunk) >= 8]
    if not chunks:
        raise RequestError(
            f"a calibration text of {len(ids)} tokens",
            "activations are observed over at least 8",
            "give a longer text",
        )
    return chunks


@torch.inference_mode()
def observe(
    model: LoadedModel,
    sequences: Sequence[Sequence[int]],
    done: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Largest magnitude by input, over ``sequences``; ``done`` is called after each of them."""
    largest: dict[str, torch.Tensor] = {}

    def record(key: str, x: torch.Tensor) -> None:
        if x.numel():
            found = x.detach().abs().amax().float()
            largest[key] = torch.maximum(largest[key], found) if key in largest else found

    with _recorded(TARGET, model.target, record), _recorded(HEAD, model.head, record):
        for sequence in sequences:
            _run(model, sequence)
            done()
    return {key: float(value) for key, value in largest.items()}


def _run(model: LoadedModel, sequence: Sequence[int]) -> None:
    """One forward of the target, and two of the head: on its states, and on the head's own."""
    caches = model.config.caches
    kernel = 1 if caches.recurrent is None else caches.recurrent.conv_kernel
    device = model.target.embed_tokens.weight.device
    ids = torch.tensor([list(sequence)], device=device)
    positions = torch.arange(ids.shape[1], device=device)
    states = CausalStates(kernel, scale=caches.attention.scale)
    hidden = model.target(ids, positions[None], states)[0]
    if model.head is None:
        return
    draft = CausalStates(scale=caches.draft.scale)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return draft(q[None], k[None], v[None])[0]

    for ahead in (1, 2):
        embedding = model.head.embed(model.target, ids[0, ahead:])
        rows = embedding.shape[0]
        hidden = model.head(embedding, hidden[:rows], positions[:rows], attend)


@contextmanager
def _recorded(root: str, model: nn.Module | None, record: Record) -> Iterator[None]:
    """Hooks on every linear layer and every mixture of experts of ``model``."""
    undo: list[Callable[[], None]] = []
    for path, module in () if model is None else model.named_modules():
        if isinstance(module, nn.Linear):
            hook = _linear_hook(f"{root}:{path}", record)
            undo.append(module.register_forward_pre_hook(hook).remove)
        elif isinstance(module, RoutedExperts):
            undo.append(_record_experts(f"{root}:{path}", module, record))
    try:
        yield
    finally:
        for step in undo:
            step()


def _linear_hook(key: str, record: Record) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    return lambda module, inputs: record(key, inputs[0])


def _record_experts(path: str, module: RoutedExperts, record: Record) -> Callable[[], None]:
    """Experts' weights are parameters, not layers, so their two products are watched from inside.

    Every row goes through its chosen experts only, as in a server: an expert's answer to rows that
    were not sent to it must not widen the scale.
    """
    activate = module.activate

    def mix(x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        record(f"{path}:rise", x)
        return module._chosen_experts(x, weights, experts)

    def recorded_activate(x: torch.Tensor) -> torch.Tensor:
        activated = activate(x)
        record(f"{path}:down", activated)
        return activated

    shadows = {"mix": mix, "activate": recorded_activate}
    module.__dict__.update(shadows)

    def undo() -> None:
        for name in shadows:
            del module.__dict__[name]

    return undo
