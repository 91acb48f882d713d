"""MTP heads in float64, written out step by step from their description: the oracle of ours.

Nothing here caches, absorbs, fuses or batches: every forward computes all rows, every head of the
attention and every expert on its own.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny_families import is_head

Tensor = torch.Tensor


class HeadReference:
    """The head of a checkpoint under its published names.

    ``inv_freq, attention_scaling`` come from ``transformers``' rotary embedding of the target.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], rotary: Any):
        self.config = config
        self.target = {name: w.double() for name, w in weights.items() if not is_head(config, name)}
        base = "model.mtp_layers.0."
        if config["model_type"] != "mimo":
            base = f"model.layers.{config['num_hidden_layers']}."
        self.own = {
            name.removeprefix(base): tensor.double()
            for name, tensor in weights.items()
            if is_head(config, name)
        }
        self.inv_freq, self.magnitude = rotary.inv_freq.double(), rotary.attention_scaling

    def embed(self, ids: Tensor) -> Tensor:
        own = self.own.get("embed_tokens.weight")
        return (self.target["model.embed_tokens.weight"] if own is None else own)[ids]

    def logits(self, output: Tensor) -> Tensor:
        head = self.own.get("shared_head.head.weight", self.target.get("lm_head.weight"))
        return output @ (self.target["model.embed_tokens.weight"] if head is None else head).T

    def outputs(self, embedding: Tensor, hidden: Tensor, mask: Tensor) -> Tensor:
        """Normed output of rows 0 .. N - 1; ``mask [N, N]`` says which keys a row sees."""
        if self.config["model_type"] == "mimo":
            parts = (
                self.norm(hidden, "hidden_layernorm"),
                self.norm(embedding, "token_layernorm"),
            )
            x = torch.cat(parts, -1) @ self.own["input_proj.weight"].T
            last = "final_layernorm"
        else:
            parts = self.norm(embedding, "enorm"), self.norm(hidden, "hnorm")
            x = torch.cat(parts, -1) @ self.own["eh_proj.weight"].T
            last = "shared_head.norm"
        attention = self.latent if "kv_lora_rank" in self.config else self.grouped
        x = x + attention(self.norm(x, "input_layernorm"), mask)
        experts = "n_routed_experts" in self.config
        feed_forward = self.experts if experts else lambda y: self.mlp(y, "mlp.")
        x = x + feed_forward(self.norm(x, "post_attention_layernorm"))
        return self.norm(x, last)

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        eps = self.config["rms_norm_eps"] if eps is None else eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.own[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = x @ self.own[f"self_attn.{name}.weight"].T
        bias = self.own.get(f"self_attn.{name}.bias")
        return out if bias is None else out + bias

    def mlp(self, x: Tensor, base: str) -> Tensor:
        gate, up = (x @ self.own[f"{base}{part}_proj.weight"].T for part in ("gate", "up"))
        return (gate * torch.sigmoid(gate) * up) @ self.own[f"{base}down_proj.weight"].T

    def experts(self, x: Tensor) -> Tensor:
        config = self.config
        count, groups = config["n_routed_experts"], config["n_group"]
        size = count // groups
        scores = torch.sigmoid(x @ self.own["mlp.gate.weight"].T)
        choice = scores + self.own["mlp.gate.e_score_correction_bias"]
        out = self.mlp(x, "mlp.shared_experts.")
        for row in range(x.shape[0]):
            by_group = [sorted(choice[row].tolist()[g * size :][:size]) for g in range(groups)]
            best = sorted(range(groups), key=lambda g: -sum(by_group[g][-2:]))
            seen = [e for e in range(count) if e // size in best[: config["topk_group"]]]
            chosen = sorted(seen, key=lambda e: -float(choice[row, e]))
            chosen = chosen[: config["num_experts_per_tok"]]
            total = float(scores[row, chosen].sum()) if config["norm_topk_prob"] else 1.0
            for expert in chosen:
                weight = scores[row, expert] / total * config["routed_scaling_factor"]
                out[row] += weight * self.mlp(x[row], f"mlp.experts.{expert}.")
        return out

    def angles(self, rows: int) -> Tensor:
        return torch.arange(rows, dtype=torch.float64)[:, None] * self.inv_freq

    def rotate_halves(self, x: Tensor) -> Tensor:
        """The first dimensions of ``x [N, D]`` by halves, the rest as they are."""
        angles = self.angles(x.shape[0])
        half = angles.shape[1]
        a, b = x[:, :half], x[:, half : 2 * half]
        cos, sin = angles.cos() * self.magnitude, angles.sin() * self.magnitude
        return torch.cat((a * cos - b * sin, a * sin + b * cos, x[:, 2 * half :]), -1)

    def rotate_pairs(self, x: Tensor) -> Tensor:
        """Elements 2i and 2i + 1 of ``x [N, P]`` as one complex number."""
        if not self.config.get("rope_interleave", True):
            return self.rotate_halves(x)
        turn = torch.polar(torch.full_like(self.angles(x.shape[0]), 1.0), self.angles(x.shape[0]))
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn
        return torch.view_as_real(turned).flatten(-2) * self.magnitude

    def grouped(self, x: Tensor, mask: Tensor) -> Tensor:
        config = self.config
        dim, heads = config["head_dim"], config["num_attention_heads"]
        group = heads // config["num_key_value_heads"]
        q, k, v = (self.linear(x, f"{name}_proj").split(dim, dim=-1) for name in "qkv")
        if config.get("use_qk_norm"):
            q = tuple(self.norm(head, "self_attn.q_norm") for head in q)
            k = tuple(self.norm(head, "self_attn.k_norm") for head in k)
        outs = []
        for head in range(heads):
            keys = self.rotate_halves(k[head // group])
            scores = self.rotate_halves(q[head]) @ keys.T / dim**0.5
            outs.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v[head // group])
        return self.linear(torch.cat(outs, -1), "o_proj")

    def latent(self, x: Tensor, mask: Tensor) -> Tensor:
        """Latent attention as published: keys and values of every head from the latent."""
        config = self.config
        rank, rope, nope, value, heads = (
            config[name]
            for name in (
                "kv_lora_rank",
                "qk_rope_head_dim",
                "qk_nope_head_dim",
                "v_head_dim",
                "num_attention_heads",
            )
        )
        if config["q_lora_rank"] is None:
            q = self.linear(x, "q_proj")
        else:
            q_latent = self.norm(self.linear(x, "q_a_proj"), "self_attn.q_a_layernorm", 1e-6)
            q = self.linear(q_latent, "q_b_proj")
        latent, k_pe = self.linear(x, "kv_a_proj_with_mqa").split((rank, rope), dim=-1)
        latent, k_pe = self.norm(latent, "self_attn.kv_a_layernorm", 1e-6), self.rotate_pairs(k_pe)
        expanded = self.linear(latent, "kv_b_proj").split(nope + value, dim=-1)
        scale = (nope + rope) ** -0.5 * self.score_factor()
        outs = []
        for head, q_head in enumerate(q.split(nope + rope, dim=-1)):
            q_nope, q_pe = q_head.split((nope, rope), dim=-1)
            k_nope, v = expanded[head].split((nope, value), dim=-1)
            keys = torch.cat((k_nope, k_pe), -1)
            scores = torch.cat((q_nope, self.rotate_pairs(q_pe)), -1) @ keys.T * scale
            outs.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v)
        assert len(outs) == heads
        return self.linear(torch.cat(outs, -1), "o_proj")

    def score_factor(self) -> float:
        rope = self.config.get("rope_scaling")
        if not rope:
            return 1.0
        factor, mscale = torch.tensor(float(rope["factor"])), rope["mscale_all_dim"]
        return float(0.1 * mscale * factor.log() + 1) ** 2


@torch.inference_mode()
def handed_over(model: Any, config: dict[str, Any], tokens: list[int]) -> Tensor:
    """Hidden states ``[N, H]`` that the target gives the head, from ``transformers`` in float64:
    after the final norm, but before it in MiMo."""
    seen: list[Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda _m, given, out: seen.extend((*given, out)))
    model(torch.tensor([tokens]), use_cache=False)
    hook.remove()
    return seen[0 if config["model_type"] == "mimo" else 1][0]


def visible(rows: int, window: int | None, n_sink: int = 0) -> Tensor:
    """Which keys each of ``rows`` queries sees; every earlier one without a window."""
    query, key = torch.arange(rows)[:, None], torch.arange(rows)
    if window is None:
        return key <= query
    return (key <= query) & ((key < n_sink) | (key > query - window))


@torch.inference_mode()
def proposals(
    head: HeadReference,
    model: Any,
    tokens: list[int],
    draft_len: int,
    window: int | None,
    n_sink: int = 0,
) -> list[int]:
    """Drafts that follow ``tokens``, whose last one the target has not seen yet."""
    hidden = handed_over(model, head.config, tokens[:-1])
    drafts: list[int] = []
    for _ in range(draft_len):
        following = torch.tensor([*tokens[1:], *drafts])
        mask = visible(following.numel(), window, n_sink)
        output = head.outputs(head.embed(following), hidden, mask)[-1:]
        hidden = torch.cat((hidden, output))
        drafts.append(int(head.logits(output).argmax()))
    return drafts
