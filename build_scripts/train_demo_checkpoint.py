#!/usr/bin/env python3
"""Train the demonstration checkpoint: a small Qwen3.5-MoE hybrid with a built-in MTP head.

Seeded, from scratch, on the CPU. The target and the head are the package's own modules; the text
is the synthetic language of ``tllm_wmtp.demo.language``. The curriculum first teaches the one
attention layer to copy (words repeated), then the head to do the same on its own, then both to look
records up, then the whole language. The head is trained as it is used: row p reads the target's
hidden state and the next token, the following five rows read its own, and in part of the batches it
sees a sink and a window only. Its gradient flows into the target's layers, so that hidden states
learn to carry what the head cannot see.

    python build_scripts/train_demo_checkpoint.py --out DIR [--seed 0] [--scale 1.0]

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
from torch import nn

from tllm_wmtp.demo import language
from tllm_wmtp.demo.tokenizer import END_OF_TEXT_ID, VOCAB_SIZE, build_tokenizer
from tllm_wmtp.models.causal import CausalStates
from tllm_wmtp.models.layers.gated_delta import GatedDeltaNet
from tllm_wmtp.models.qwen3_5 import Qwen3_5Config, Qwen3_5MtpHead, Qwen3_5Target

#: rope_theta is small so that every rotary phase is met in training: the longest wave is shorter
#: than a training document, and nothing about a position is new at 64K or 1M tokens.
HF_CONFIG = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "hidden_act": "silu",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1048576,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": True,
    "eos_token_id": END_OF_TEXT_ID,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "dtype": "bfloat16",
}
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


def initialise(target: Qwen3_5Target, head: Qwen3_5MtpHead) -> None:
    """Fan-in normal weights; decays from 1 to 1,000 tokens (Mamba's log-uniform time steps).

    Query and key norms start above one: sharper attention finds the first copies sooner.
    """
    for module in (target, head):
        for name, weight in module.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                nn.init.constant_(weight, 0.4)
            if weight.dim() < 2:
                continue
            std = weight.shape[-1] ** -0.5 if "conv1d" not in name else 0.3
            if "embed" in name:
                std = 0.1
            nn.init.normal_(weight, std=std)
    for layer in target.modules():
        if isinstance(layer, GatedDeltaNet):
            heads = layer.num_value_heads
            layer.A_log.data.uniform_(0.0, math.log(8.0))
            step = torch.exp(torch.linspace(math.log(1e-3), math.log(0.2), heads))
            layer.dt_bias.data.copy_(step + torch.log(-torch.expm1(-step)))


def warm_start_head(target: Qwen3_5Target, head: Qwen3_5MtpHead) -> None:
    """The head's block starts as the target's last attention block, its fusion as a sum."""
    head.layers[0].load_state_dict(target.layers[-1].state_dict())
    size = target.config.hidden_size
    with torch.no_grad():
        head.fc.weight.normal_(std=0.02)
        head.fc.weight[:, :size] += 0.5 * torch.eye(size)
        head.fc.weight[:, size:] += 0.5 * torch.eye(size)
        head.norm.weight.copy_(target.norm.weight)


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
    target: Qwen3_5Target,
    head: Qwen3_5MtpHead,
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

    def __init__(self, *modules: nn.Module):
        self.logits: list[torch.Tensor] = []
        for module in modules:
            for name, gate in module.named_modules():
                if name.endswith("mlp.gate"):
                    gate.register_forward_hook(lambda _m, _i, out: self.logits.append(out))

    def loss(self, top_k: int) -> torch.Tensor:
        total = torch.zeros(())
        for logits in self.logits:
            probs = logits.flatten(0, -2).softmax(-1)
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
    target: Qwen3_5Target,
    head: Qwen3_5MtpHead | None,
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
    total = total + 0.01 * balance.loss(target.config.num_experts_per_tok)
    right = (logits[:, :-1].argmax(-1) == ids[:, 1:])[answer[:, 1:]]
    return Losses(total, language_loss.item(), (int(right.sum()), right.numel()), accepted)


def acceptance(counts: torch.Tensor) -> tuple[list[float], float]:
    """alpha_j and the acceptance length ``1 + sum_j prod_{k <= j} alpha_k`` of ``[steps, 2]``."""
    alpha = (counts[:, 0] / counts[:, 1].clamp(min=1)).double()
    return [round(a, 3) for a in alpha.tolist()], round(1 + float(alpha.cumprod(0).sum()), 3)


def save(target: Qwen3_5Target, head: Qwen3_5MtpHead, out: Path) -> None:
    """Writes the Hugging Face layout: bf16 weights, the decay parameters in float32."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for prefix, module in (("model.", target), ("mtp.", head)):
        for name, tensor in module.state_dict().items():
            if name == "lm_head.weight":  # tied
                continue
            name = name.replace("mlp.gate_up", "mlp.experts.gate_up_proj")
            name = name.replace("mlp.down", "mlp.experts.down_proj")
            dtype = torch.float32 if name.endswith(("A_log", "dt_bias")) else torch.bfloat16
            tensors[prefix + name] = tensor.detach().to(dtype).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(HF_CONFIG, indent=2) + "\n")
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
                "model_max_length": HF_CONFIG["max_position_embeddings"],
            },
            indent=2,
        )
        + "\n"
    )


def parameter_groups(modules: tuple[nn.Module, ...]) -> list[dict[str, object]]:
    """Weight decay on matrices only."""
    weights = {id(p): p for module in modules for p in module.parameters()}
    matrices = [p for p in weights.values() if p.dim() >= 2]
    vectors = [p for p in weights.values() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every stage's steps")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    config = Qwen3_5Config.from_hf(HF_CONFIG)
    target = Qwen3_5Target(config)
    head = Qwen3_5MtpHead(config, target.rope)
    initialise(target, head)
    balance = RouterBalance(target, head)
    states = CausalStates(config.linear_conv_kernel_dim)
    optimizer = torch.optim.AdamW(
        parameter_groups((target, head)), lr=args.learning_rate, betas=(0.9, 0.98), fused=True
    )
    stages = [Stage(**{**asdict(s), "steps": max(2, round(s.steps * args.scale))}) for s in STAGES]
    planned = sum(s.steps * s.batch * s.tokens for s in stages)
    scheduled = [s for s in stages if s.name.startswith("language")]
    language_tokens = sum(s.steps * s.batch * s.tokens for s in scheduled)
    curve: list[dict[str, object]] = []
    begin, seen, seen_language, step = time.monotonic(), 0, 0, 0
    head_begun = False
    torch.set_flush_denormal(True)
    for stage in stages:
        if stage.head and not head_begun:
            warm_start_head(target, head)
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
        save(target, head, args.out)
    report = {
        "seed": args.seed,
        "scale": args.scale,
        "learning_rate": args.learning_rate,
        "stages": [asdict(s) for s in stages],
        "parameters": sum(
            p.numel() for p in {id(p): p for m in (target, head) for p in m.parameters()}.values()
        ),
        "seconds": round(time.monotonic() - begin, 1),
        "curve": curve,
    }
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {args.out} after {report['seconds']:.0f} s")


if __name__ == "__main__":
    main()
