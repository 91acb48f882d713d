#!/usr/bin/env python3
"""Train a demonstration checkpoint: a small hybrid with a built-in MTP head.

Seeded, from scratch, on the CPU; ``demo_recipes`` holds what differs by family. The target and the
head are the package's own modules; the text is the synthetic language of
``tllm_wmtp.demo.language``. The curriculum first teaches the one attention layer to copy (words
repeated), then the head to do the same on its own, then both to look records up, then the whole
language. The head is trained as it is used: row p reads the target's hidden state and the next
token, the following five rows read its own, and in part of the batches it sees a sink and a window
only. Its gradient flows into the target's layers, so that hidden states learn to carry what the
head cannot see.

    python build_scripts/train_demo_checkpoint.py --out DIR [--family nemotron_h] [--seed 0]

    python build_scripts/train_demo_checkpoint.py --out DIR --family nemotron_h --resume EARLIER \
        --seed 1 --learning-rate 2e-3

writes ``DIR`` (a Hugging Face directory) and ``DIR/training.json`` (settings, curve, evaluation).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_recipes import RECIPES, Head, Recipe, Target
from torch import nn

from tllm_wmtp.checkpoint.loader import load_model
from tllm_wmtp.demo import language
from tllm_wmtp.demo.tokenizer import END_OF_TEXT_ID, build_tokenizer
from tllm_wmtp.models.causal import CausalStates

DRAFT_STEPS = 6  # gamma of the paper's operating point


@dataclass(frozen=True)
class Stage:
    """``steps`` batches of ``batch x tokens``.

    Ends early once answer accuracy reaches ``until`` (and, with the head, the acceptance length
    ``until_length``). ``windowed`` is the share of batches in which the head sees a window only.
    """

    name: str
    steps: int
    batch: int
    tokens: int
    mixture: dict[str, float]
    head: bool
    until: float | None = None
    alphabets: tuple[int, ...] = ()
    longest: int = 0
    until_length: float = 0.0
    windowed: float = 0.0


LANGUAGE = {"logs": 0.22, "sentences": 0.18, "passages": 0.14, "records": 0.18, "lists": 0.28}
ALPHABETS = (32, 64, 128, 250)
STAGES = (
    Stage("copy-32", 800, 32, 64, {}, False, 0.85, ALPHABETS[:1], longest=16),
    Stage("copy-64", 400, 32, 64, {}, False, 0.85, ALPHABETS[:2], longest=16),
    Stage("copy-128", 400, 32, 64, {}, False, 0.85, ALPHABETS[:3], longest=16),
    Stage("copy-all", 600, 32, 64, {}, False, 0.90, ALPHABETS[1:], longest=24),
    Stage("copy-head", 900, 32, 64, {}, True, 0.90, ALPHABETS[1:], longest=24, until_length=5.0),
    Stage("look-up", 200, 12, 256, {"recall": 0.2, "records": 0.4, "lists": 0.4}, True),
    Stage("language-512", 1000, 6, 512, LANGUAGE | {"recall": 0.05}, True, windowed=0.4),
    Stage("language-1k", 500, 3, 1024, LANGUAGE, True, windowed=0.4),
    Stage("language-4k", 220, 1, 4096, LANGUAGE, True, windowed=0.4),
)


class DraftHistory:
    """Attention of the head in training: a causal first row, then chains of the head's own rows.

    The first call stores K and V of every row. Later calls are one row for each anchor: it sees the
    stored rows up to its anchor and the chain rows since, all within the sink and the window.
    """

    def __init__(self, positions: torch.Tensor, window: int | None, n_sink: int):
        self.positions, self.window, self.n_sink = positions, window, n_sink
        self.anchors: torch.Tensor | None = None
        self.steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _visible(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = key <= query
        if self.window is not None:
            seen &= (key < self.n_sink) | (key > query - self.window)
        return seen

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[2] // k.shape[2]
        if self.anchors is None:
            self.keys, self.values = k, v
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            if self.window is None:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                mask = self._visible(self.positions[:, None], self.positions[None])
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            return out.transpose(1, 2)
        self.steps.append((k, v))
        query = self.anchors + len(self.steps)  # [B, A]
        grouped = q.unflatten(2, (-1, group)) * q.shape[-1] ** -0.5
        past = torch.einsum("bahgd,bthd->bhgat", grouped, self.keys)
        seen = self._visible(query[..., None], self.positions) & (
            self.positions <= self.anchors[..., None]
        )
        past = past.masked_fill(~seen[:, None, None], float("-inf"))
        own_k = torch.stack([k for k, _ in self.steps], 2)  # [B, A, steps, Hkv, D]
        own_v = torch.stack([v for _, v in self.steps], 2)
        own = torch.einsum("bahgd,bashd->bhgas", grouped, own_k)
        weights = torch.cat((past, own), -1).softmax(-1)
        split = self.positions.shape[0]
        out = torch.einsum("bhgat,bthd->bahgd", weights[..., :split], self.values)
        out = out + torch.einsum("bhgas,bashd->bahgd", weights[..., split:], own_v)
        return out.flatten(2, 3)


@dataclass
class Losses:
    total: torch.Tensor
    language: float
    answers: tuple[int, int]  # right, all
    #: int [batch, draft step, 2]: of the chains that reached the step, how many got it right; all
    accepted: torch.Tensor | None


def soft_cross_entropy(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return -(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def draft_loss(
    target: Target,
    head: Head,
    ids: torch.Tensor,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    answer: torch.Tensor,
    rng: random.Random,
    windowed: float,
    n_anchors: int = 40,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy of the head's rows against the target's distribution, and acceptance counts."""
    batch, rows = ids.shape[0], ids.shape[1] - 1
    window = int(2 ** (6 + rng.random() * 4)) if rng.random() < windowed else None
    positions = torch.arange(rows)
    history = DraftHistory(positions, window, rng.choice((0, 4, 16, 64)))
    embedding = target.embed_tokens(ids)
    teacher = logits.detach()
    state = head(embedding[:, 1:], hidden[:, :-1], positions.expand(batch, -1), history)
    weight = 1.0 + 2.0 * answer[:, 1:].float()
    first = soft_cross_entropy(target.logits(state[:, :-1]), teacher[:, 1:-1]) * weight[:, 1:]
    loss = first.sum() / weight[:, 1:].sum()

    limit = rows - DRAFT_STEPS - 1
    anywhere = torch.randint(0, limit, (batch, n_anchors))
    chance = answer[:, 1 : limit + 1].float() + 1e-4
    anchors = torch.multinomial(chance, n_anchors, replacement=True)
    anchors[:, ::2] = anywhere[:, ::2]
    history.anchors = anchors
    index = torch.arange(batch)[:, None]
    state = state[index, anchors]
    best = teacher.argmax(-1)
    alive = target.logits(state.detach()).argmax(-1) == best[index, anchors + 1]
    counts = [torch.stack((alive.sum(1), torch.full((batch,), n_anchors)), -1)]
    for step in range(2, DRAFT_STEPS + 1):
        position = anchors + step - 1
        state = head(embedding[index, anchors + step], state, position, history)
        out = target.logits(state)
        loss = loss + soft_cross_entropy(out, teacher[index, anchors + step]).mean()
        right = (out.argmax(-1) == best[index, anchors + step]) & alive
        counts.append(torch.stack((right.sum(1), alive.sum(1)), -1))
        alive = right
    return loss / DRAFT_STEPS, torch.stack(counts, 1)


class RouterBalance:
    """Load-balancing loss over all routers of a forward (Switch Transformer, eq. 4)."""

    def __init__(self, recipe: Recipe, *modules: nn.Module):
        self.recipe = recipe
        self.logits: list[torch.Tensor] = []
        for module in modules:
            for name, gate in module.named_modules():
                if name.endswith(recipe.gate):
                    gate.register_forward_hook(self._keep)

    def _keep(self, gate: nn.Module, inputs: tuple[torch.Tensor], output: object) -> None:
        self.logits.append(self.recipe.router_logits(gate, inputs[0], output))

    def loss(self) -> torch.Tensor:
        total, top_k = torch.zeros(()), self.recipe.top_k
        for logits in self.logits:
            probs = self.recipe.router_probs(logits.flatten(0, -2))
            chosen = torch.zeros_like(probs).scatter(1, probs.topk(top_k).indices, 1.0)
            total = total + probs.shape[1] * (chosen.mean(0) / top_k * probs.mean(0)).sum()
        count, self.logits = max(len(self.logits), 1), []
        return total / count


def copying(rng: random.Random, tokens: int, alphabet: int, longest: int) -> language.Document:
    """A segment of 4 to ``longest`` different words of a fixed alphabet, again and again.

    No word comes twice in a segment, so that every match is unambiguous: the plainest thing that
    an attention layer can learn copying from.
    """
    words = list(language.SYMBOLS[:alphabet])
    size = 4 + int(rng.random() * (longest - 3))
    segment = rng.sample(words, size)
    ids = (segment * (tokens // size + 1))[:tokens]
    return language.Document("copy", ids, [(size, tokens)])


def batches(
    stage: Stage, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[str]]]:
    """Endless ``ids, answer mask [batch, tokens], kinds [batch]`` of a stage."""
    while True:
        ids, kinds, mask = [], [], torch.zeros(stage.batch, stage.tokens, dtype=torch.bool)
        for row in range(stage.batch):
            if stage.alphabets:
                alphabet = rng.choice(stage.alphabets)
                document = copying(rng, stage.tokens, alphabet, stage.longest)
            else:
                document = language.mixture(rng, stage.tokens, stage.mixture)
            ids.append(document.ids)
            kinds.append(document.kind)
            for begin, end in document.answer_spans:
                mask[row, begin:end] = True
        yield torch.tensor(ids), mask, kinds


def losses(
    target: Target,
    head: Head | None,
    ids: torch.Tensor,
    answer: torch.Tensor,
    balance: RouterBalance,
    rng: random.Random,
    states: CausalStates,
    windowed: float,
) -> Losses:
    positions = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
    hidden = target(ids, positions, states)
    logits = target.logits(hidden)
    per_token = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    ).view(ids.shape[0], -1)
    weight = 1.0 + 2.0 * answer[:, 1:].float()
    language_loss = (per_token * weight).sum() / weight.sum()
    total, accepted = language_loss, None
    if head is not None:
        draft, accepted = draft_loss(target, head, ids, hidden, logits, answer, rng, windowed)
        total = total + draft
    total = total + 0.01 * balance.loss()
    right = (logits[:, :-1].argmax(-1) == ids[:, 1:])[answer[:, 1:]]
    return Losses(total, language_loss.item(), (int(right.sum()), right.numel()), accepted)


def acceptance(counts: torch.Tensor) -> tuple[list[float], float]:
    """alpha_j and the acceptance length ``1 + sum_j prod_{k <= j} alpha_k`` of ``[steps, 2]``."""
    alpha = (counts[:, 0] / counts[:, 1].clamp(min=1)).double()
    return [round(a, 3) for a in alpha.tolist()], round(1 + float(alpha.cumprod(0).sum()), 3)


def save(recipe: Recipe, target: Target, head: Head, out: Path) -> None:
    """Writes the Hugging Face layout: bf16 weights, the decay parameters in float32."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for part, module in (("target", target), ("head", head)):
        for name, tensor in module.state_dict().items():
            published = recipe.published_name(part, name)
            if published is None:
                continue
            dtype = torch.float32 if published.endswith(recipe.float32) else torch.bfloat16
            for stored, values in recipe.store(published, tensor.detach()):
                tensors[stored] = values.to(dtype, copy=True).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(recipe.hf_config, indent=2) + "\n")
    (out / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "eos_token_id": END_OF_TEXT_ID}, indent=2) + "\n"
    )
    build_tokenizer().save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|endoftext|>",
                "clean_up_tokenization_spaces": False,
                "model_max_length": recipe.hf_config["max_position_embeddings"],
            },
            indent=2,
        )
        + "\n"
    )


def resume(run: Path, target: Target, head: Head) -> dict[str, object]:
    """Gives the modules the weights of an earlier run, as it stored them; its report."""
    earlier = load_model(run, with_head=True)
    assert earlier.head is not None
    target.load_state_dict(earlier.target.state_dict())
    head.load_state_dict(earlier.head.state_dict())
    return json.loads((run / "training.json").read_text())


def parameter_groups(modules: tuple[nn.Module, ...]) -> list[dict[str, object]]:
    """Weight decay on matrices only."""
    weights = {id(p): p for module in modules for p in module.parameters()}
    matrices = [p for p in weights.values() if p.dim() >= 2]
    vectors = [p for p in weights.values() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--family", choices=RECIPES, default="qwen3_5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every stage's steps")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument(
        "--resume", type=Path, help="run the language stages again from this run's weights"
    )
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    recipe = RECIPES[args.family]
    target, head = recipe.build()
    resumed = resume(args.resume, target, head) if args.resume else None
    balance = RouterBalance(recipe, target, head)
    states = CausalStates(recipe.conv_kernel)
    optimizer = torch.optim.AdamW(
        parameter_groups((target, head)), lr=args.learning_rate, betas=(0.9, 0.98), fused=True
    )
    stages = [Stage(**{**asdict(s), "steps": max(2, round(s.steps * args.scale))}) for s in STAGES]
    if resumed:
        stages = [stage for stage in stages if stage.name.startswith("language")]
    planned = sum(s.steps * s.batch * s.tokens for s in stages)
    scheduled = [s for s in stages if s.name.startswith("language")]
    language_tokens = sum(s.steps * s.batch * s.tokens for s in scheduled)
    curve: list[dict[str, object]] = []
    begin, seen, seen_language, step = time.monotonic(), 0, 0, 0
    head_begun = resumed is not None
    torch.set_flush_denormal(True)
    for stage in stages:
        if stage.head and not head_begun:
            recipe.warm_start_head(target, head)
            head_begun = True
        active = head if stage.head else None
        window: list[Losses] = []
        kinds: list[str] = []
        source = batches(stage, rng)
        for index in range(stage.steps):
            ids, answer, drawn = next(source)
            kinds += drawn
            progress = seen_language / language_tokens
            rate = args.learning_rate * min(1.0, (step + 1) / 50)
            if progress > 0.4:  # cosine over the last 60 % of the language stages
                rate *= 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - 0.4) / 0.6))
            for group in optimizer.param_groups:
                group["lr"] = rate
            result = losses(target, active, ids, answer, balance, rng, states, stage.windowed)
            optimizer.zero_grad(set_to_none=True)
            result.total.backward()
            result.total = result.total.detach()  # lets go of the graph
            nn.utils.clip_grad_norm_([p for m in (target, head) for p in m.parameters()], 1.0)
            optimizer.step()
            step += 1
            seen += ids.numel()
            seen_language += ids.numel() if stage in scheduled else 0
            window.append(result)
            if (index + 1) % 50 and index + 1 < stage.steps:
                continue
            right, asked = (sum(r.answers[i] for r in window) for i in (0, 1))
            accuracy = right / max(asked, 1)
            alpha: list[float] = []
            length, by_kind = 1.0, {}
            if stage.head:
                counts = torch.cat([r.accepted for r in window if r.accepted is not None])
                alpha, length = acceptance(counts.sum(0))
                for kind in sorted(set(kinds)):
                    members = torch.tensor([k == kind for k in kinds])
                    by_kind[kind] = acceptance(counts[members].sum(0))[1]
            elapsed = time.monotonic() - begin
            row = {
                "stage": stage.name,
                "step": step,
                "tokens": seen,
                "seconds": round(elapsed, 1),
                "loss": round(sum(r.language for r in window) / len(window), 4),
                "answer_accuracy": round(accuracy, 4),
                "alpha": alpha,
                "acceptance_length": length,
                "acceptance_length_by_kind": by_kind,
            }
            curve.append(row)
            bar = "#" * int(30 * seen / planned)
            print(
                f"[{bar:<30}] {stage.name:<14} step {step:5d}  {elapsed:6.0f} s"
                f"  loss {row['loss']:.3f}  answers {accuracy:.3f}  AL {length:.2f} {alpha}"
                f" {by_kind}",
                flush=True,
            )
            window, kinds = [], []
            reached = stage.until is not None and accuracy > stage.until
            if reached and length >= stage.until_length:
                planned -= (stage.steps - index - 1) * stage.batch * stage.tokens
                break
        save(recipe, target, head, args.out)
    report = {
        "family": args.family,
        "seed": args.seed,
        "scale": args.scale,
        "learning_rate": args.learning_rate,
        "stages": [asdict(s) for s in stages],
        "parameters": sum(
            p.numel() for p in {id(p): p for m in (target, head) for p in m.parameters()}.values()
        ),
        "seconds": round(time.monotonic() - begin, 1),
        "curve": curve,
        "resumed": resumed,
    }
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {args.out} after {report['seconds']:.0f} s")


if __name__ == "__main__":
    main()
