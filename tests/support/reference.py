"""What a P-EAGLE head must draft, in plain torch, without vLLM and without a KV cache.

Written from the geometry (``peagle_kernels.geometry``), not from either runner. For one sequence x with
target hidden states h, and any position p_last whose next token x[p_last+1] is known:

    rows      (x[1], h[0]) .. (x[p_last+1], h[p_last])   (MASK, m) x (K-1)
    position   0           ..  p_last                     p_last+1 .. p_last+K-1

Attention is causal, and the last K rows give the K drafts. Valid rows are the same whatever p_last is,
so all p_last of a sequence go through one forward: the valid rows once, then K-1 mask rows for each
p_last, which see the valid rows up to p_last and the earlier mask rows of their own group.

Everything is computed in float32. For an engine in half precision values are rounded to it wherever vLLM stores
them (``Round``), because rounding moves logits by more than the distance of close candidates.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from peagle_tools.shared.engines import quick_dtype

Weights = dict[str, Tensor]
Round = Callable[[Tensor], Tensor]

ROUND: dict[str, Round] = {
    "float32": lambda x: x,
    "float16": lambda x: x.half().float(),
    "bfloat16": lambda x: x.bfloat16().float(),
}


def cut_off(x: Tensor) -> Tensor:
    """``x`` in bfloat16, towards zero: so vLLM's kernels write it on an x86 CPU without instructions for bfloat16."""
    return (x.contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32)


@dataclass(frozen=True)
class Draft:
    tokens: tuple[int, ...]  # K draft tokens in target ids
    logits: Tensor  # [K, draft vocabulary] of the head
    target_ids: Tensor  # [draft vocabulary] target id of each logit
    candidate_sampler: "CandidateSampler | None" = None  # of a sharpened head: what ``after`` needs

    def logit(self, column: int, token: int) -> float:
        """The head's logit of target token ``token``; -inf where the draft vocabulary lacks it."""
        row = (self.target_ids == token).nonzero()
        return float(self.logits[column, row[0, 0]]) if len(row) else -math.inf

    def after(self, bonus: int, drafted: Sequence[int], tolerance: float) -> "Draft":
        """What each column must choose given the tokens that were drafted before it: its own head's selector decides.

        Args:
            tolerance: logits as close as this to the last candidate's, or to the first one's that is none, may be
                candidates or not.
        """
        sampler = self.candidate_sampler
        return self if sampler is None else sampler.draft(self, [bonus, *drafted], tolerance)


@dataclass(frozen=True)
class CandidateSampler:
    """The selector of a sharpened head over one row of drafts; ``gates`` is [K, rank]."""

    weights: Weights
    num_candidates: int
    gates: Tensor

    def draft(self, plain: Draft, previous: Sequence[int], tolerance: float) -> Draft:
        at = torch.arange(len(plain.logits)).clamp(max=len(self.weights["edge_scale"]) - 1)
        before = self.weights["predecessor_codebook"][list(previous)[: len(at)]]
        if len(before) < len(at):  # a row that asked for fewer drafts
            before = F.pad(before, (0, 0, 0, len(at) - len(before)))
        pair = (before * self.gates) @ self.weights["successor_codebook"].T
        scores = self.weights["unary_scale"][at, None] * plain.logits + self.weights["edge_scale"][at, None] * pair
        worst, next_one = plain.logits.topk(self.num_candidates + 1).values[:, -2:].split(1, dim=1)
        # What the candidates choose, and the sure ones alone: where these differ, rounding decides.
        likely, sure = (
            plain.target_ids[scores.masked_fill(out, -math.inf).argmax(-1)].tolist()
            for out in (plain.logits < worst, plain.logits - next_one <= tolerance)
        )
        drafted = list(previous[1:])
        tokens = tuple(a if [a] == drafted[i : i + 1] else b for i, (a, b) in enumerate(zip(likely, sure, strict=True)))
        return Draft(tokens, scores.masked_fill(plain.logits < worst - tolerance, -math.inf), plain.target_ids)


def load_weights(folder: Path, cut: Round) -> Weights:
    """Every tensor of a checkpoint, floats in float32."""
    weights: Weights = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        weights |= load_file(file)
    return {name: cut(w.float()) if w.is_floating_point() else w for name, w in weights.items()}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, head_dim]; cos and sin are [T, 1, head_dim / 2], the halves pair up."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Stack:
    """Decoder layers of a Llama, Qwen3 or Qwen3-MoE checkpoint.

    Between layers flows the residual sum [T, hidden], not yet rounded: norms read it so.
    """

    def __init__(self, config: dict, weights: Weights, cut: Round):
        self.weights, self.cut = weights, cut
        # What vLLM's kernels store, not torch's: rotary embedding and attention.
        self.store = cut_off if cut is ROUND["bfloat16"] and quick_dtype() == "float32" else cut
        self.eps = config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config.get("head_dim") or config["hidden_size"] // self.heads
        rope = config.get("rope_parameters") or config
        assert rope.get("rope_type", "default") == "default" and not config.get("rope_scaling")
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        self.freqs = 1.0 / rope.get("rope_theta", 10000.0) ** exponents  # [head_dim / 2], rotary
        self.num_experts, self.experts_per_token = config.get("num_experts", 0), config.get("num_experts_per_tok", 0)

    def norm(self, x: Tensor, name: str) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.cut(self.cut(x) * self.weights[f"{name}.weight"])

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self.cut(F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")))

    def attention(self, x: Tensor, name: str, positions: Tensor, visible: Tensor) -> Tensor:
        """Attention of rows x [T, width] at ``positions`` [T]; visible [T, T] says which rows a row sees."""
        q, k, v = (self.linear(x, f"{name}.{p}_proj").unflatten(-1, (-1, self.head_dim)) for p in "qkv")
        if f"{name}.q_norm.weight" in self.weights:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        angle = (positions[:, None].float() * self.freqs)[:, None]
        cos, sin = self.cut(angle.cos()), self.cut(angle.sin())
        q, k = self.store(rotate(q, cos, sin)), self.store(rotate(k, cos, sin))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.head_dim)
        probs = scores.masked_fill(~visible, -math.inf).softmax(-1)
        return self.linear(self.store(torch.einsum("hqk,khd->qhd", probs, v)).flatten(1), f"{name}.o_proj")

    def rest(self, h: Tensor, name: str) -> Tensor:
        """What follows attention in a layer: the gated MLP or the experts, added to the residual."""
        x = self.norm(h, f"{name}.post_attention_layernorm")
        mlp = self.experts if f"{name}.mlp.gate.weight" in self.weights else self.mlp
        return self.cut(h) + mlp(x, f"{name}.mlp")

    def mlp(self, x: Tensor, name: str) -> Tensor:
        gate, up = self.linear(x, f"{name}.gate_proj"), self.linear(x, f"{name}.up_proj")
        return self.linear(self.cut(self.cut(F.silu(gate)) * up), f"{name}.down_proj")

    def experts(self, x: Tensor, name: str) -> Tensor:
        """A mixture of experts: the chosen ones' outputs, their router probabilities scaled to a sum of 1."""
        probs, chosen = self.linear(x, f"{name}.gate").softmax(-1).topk(self.experts_per_token)
        weights = torch.zeros(len(x), self.num_experts).scatter_(1, chosen, probs / probs.sum(-1, keepdim=True))
        outputs = torch.stack([self.mlp(x, f"{name}.experts.{e}") for e in range(self.num_experts)], dim=1)
        return self.cut((weights[..., None] * outputs).sum(1))

    def layer(self, h: Tensor, name: str, positions: Tensor, visible: Tensor) -> Tensor:
        normed = self.norm(h, f"{name}.input_layernorm")
        return self.rest(self.cut(h) + self.attention(normed, f"{name}.self_attn", positions, visible), name)


class Target:
    """The served model: its hidden states, and its greedy choice for checking the reference itself."""

    def __init__(self, folder: Path, cut: Round):
        self.config = json.loads((Path(folder) / "config.json").read_text())
        self.weights, self.cut = load_weights(folder, cut), cut
        self.digest = sha256(b"".join(file.read_bytes() for file in sorted(folder.glob("*.safetensors")))).hexdigest()
        self.num_layers = self.config["num_hidden_layers"]
        self.stack = Stack(self.config, self.weights, cut)
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.lm_head = self.weights.get("lm_head.weight", self.embedding)

    def states(self, tokens: Tensor) -> list[Tensor]:
        """[T, hidden] residual entering each layer, and that leaving the last: vLLM's layer id n is item n."""
        positions = torch.arange(len(tokens))
        visible = positions[None, :] <= positions[:, None]
        out = [self.embedding[tokens]]
        for i in range(self.num_layers):
            out.append(self.stack.layer(out[-1], f"model.layers.{i}", positions, visible))
        return out

    def logits(self, last_state: Tensor) -> Tensor:
        return self.cut(F.linear(self.stack.norm(last_state, "model.norm"), self.lm_head))


class Head:
    """A P-EAGLE head in either format, with the embeddings and output matrix it shares with its target."""

    def __init__(self, folder: Path, target: Target | None, cut: Round, selector: bool):
        raw = json.loads((Path(folder) / "config.json").read_text())
        config = raw.get("transformer_layer_config", {}) | {k: v for k, v in raw.items() if v is not None}
        stored = load_weights(folder, cut).items()
        names = {name.removeprefix("model.").replace("midlayer.", "layers.0."): w for name, w in stored}
        self.weights, self.cut = names, cut
        self.stack = Stack(config, names, cut)
        self.num_layers = config["num_hidden_layers"]
        self.mask_token = config.get("mask_token_id", config.get("ptd_token_id"))
        self.norm_before_residual = config.get("norm_before_residual", False)
        slides = [kind == "sliding_attention" for kind in config.get("layer_types") or ()]
        self.windows = [config["sliding_window"] if slide else None for slide in slides] or [None] * self.num_layers
        aux_layers = config.get("eagle_aux_hidden_state_layer_ids")
        if target:
            n = target.num_layers
            aux_layers = aux_layers or (2, n // 2, n - 3)
            shared = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.lm_head[: config["vocab_size"]]}
            names = shared | names
        self.aux_layers = sorted(set(aux_layers))
        self.embedding, self.lm_head = names["embed_tokens.weight"], names["lm_head.weight"]
        self.target_ids = torch.arange(len(self.lm_head)) + names.get("d2t", 0)
        self.selector = load_weights(Path(folder) / "edge", cut) if selector else {}
        self.selector = {name.removeprefix("candidate_selector."): w for name, w in self.selector.items()}
        if target:  # may have more tokens than the head
            self.embedding = F.pad(self.embedding, (0, 0, 0, len(target.embedding) - len(self.embedding)))
            if self.selector:
                before = self.selector["predecessor_codebook"]
                self.selector["predecessor_codebook"] = F.pad(before, (0, 0, 0, len(self.embedding) - len(before)))
        self.num_candidates = raw.get("candidate_selector", {}).get("selector_top_k", 0)

    def project(self, aux: Tensor) -> Tensor:
        """fc, after the norms that some heads have: [..., n_aux * target hidden] -> [..., hidden]."""
        if "input_norm.weight" in self.weights:
            aux = self.stack.norm(aux, "input_norm")
        if "fc_norm.0.weight" in self.weights:
            chunks = aux.chunk(len(self.aux_layers), dim=-1)
            aux = torch.cat([self.stack.norm(c, f"fc_norm.{i}") for i, c in enumerate(chunks)], dim=-1)
        return self.stack.linear(aux, "fc")

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
        """[T, hidden] normed output of rows (token, projected hidden state)."""
        s, first = self.stack, "layers.0"
        embeds = s.norm(self.embedding[tokens], f"{first}.input_layernorm")
        normed = s.norm(hidden, f"{first}.hidden_norm")
        residual = normed if self.norm_before_residual else hidden
        both = torch.cat([embeds, normed], dim=-1)
        back = positions[:, None] - positions[None, :]
        seen = [visible if window is None else visible & (back < window) for window in self.windows]
        h = s.rest(residual + s.attention(both, f"{first}.self_attn", positions, seen[0]), first)
        for i in range(1, self.num_layers):
            h = s.layer(h, f"layers.{i}", positions, seen[i])
        return s.norm(h, "norm")

    def drafts(self, tokens: list[int], aux: Tensor, p_lasts: list[int], k: int) -> dict[int, Draft]:
        """The K drafts after each p_last of one sequence.

        Args:
            tokens: the sequence, prompt and output.
            aux: [>= max(p_lasts) + 1, n_aux * target hidden] captured hidden states.
            p_lasts: positions whose next token is known, p_last + 1 < len(tokens).
        """
        x, last = torch.tensor(tokens), torch.tensor(p_lasts)
        depth = k - 1
        num_valid = max(p_lasts) + 1
        valid = torch.arange(num_valid)
        step = torch.arange(1, k).repeat(len(last))  # mask rows, group by group
        group_last = last.repeat_interleave(depth)
        positions = torch.cat([valid, group_last + step])
        ids = torch.cat([x[1 : num_valid + 1], torch.full_like(step, self.mask_token)])
        m = self.project(self.weights["mask_hidden"].flatten())
        hidden = torch.cat([self.project(aux[:num_valid]), m.expand(len(step), -1)])
        # A row sees valid rows up to its own position or its group's p_last, and its own group's earlier masks.
        reach = torch.cat([valid, group_last])
        group = torch.cat([torch.full_like(valid, -1), torch.arange(len(last)).repeat_interleave(depth)])
        is_valid = group < 0
        visible = is_valid[None, :] & (positions[None, :] <= reach[:, None])
        visible |= ~is_valid[None, :] & (group[None, :] == group[:, None]) & (positions[None, :] <= positions[:, None])
        states = self.forward(ids, hidden, positions, visible)
        logits = self.cut(F.linear(states, self.lm_head))
        gates = self.cut(F.linear(states, self.selector["hidden_projection.weight"])) if self.selector else None
        out = {}
        for g, p in enumerate(p_lasts):
            rows = torch.cat([torch.tensor([p]), num_valid + g * depth + torch.arange(depth)])
            chosen = self.target_ids[logits[rows].argmax(-1)]
            sampler = None if gates is None else CandidateSampler(self.selector, self.num_candidates, gates[rows])
            out[p] = Draft(tuple(chosen.tolist()), logits[rows], self.target_ids, sampler)
        return out


# By target, dtype and prompt: most tests have the same of each.
_continuations: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}


class Reference:
    """A target with its head, as an engine of ``dtype`` would run them.

    Without a target, a head that shares nothing with it drafts from hidden states that are given.
    """

    def __init__(self, target: Path | None, head: Path, dtype: str = "float32", selector: bool = True):
        self.dtype, self.cut = dtype, ROUND[dtype]
        self.target = Target(target, self.cut) if target else None
        self.head = Head(head, self.target, self.cut, selector)

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The target's own continuation by ``count`` tokens, prompt first: no engine is needed for it."""
        assert self.target
        tokens = _continuations.setdefault((self.target.digest, self.dtype, tuple(prompt)), list(prompt))
        while len(tokens) < len(prompt) + count:
            last = self.target.states(torch.tensor(tokens))[-1][-1:]
            tokens.append(int(self.target.logits(last).argmax()))
        return tokens[: len(prompt) + count]

    @torch.no_grad()
    def drafts(self, tokens: list[int], p_lasts: list[int], k: int, aux: Tensor | None = None) -> dict[int, Draft]:
        """The K drafts after each p_last of the sequence ``tokens``.

        Args:
            aux: [> max(p_lasts), n_aux * hidden] hidden states to use instead of the target's own.
        """
        if aux is None:
            assert self.target
            states = self.target.states(torch.tensor(tokens[: max(p_lasts) + 1]))
            aux = torch.cat([self.cut(states[n]) for n in self.head.aux_layers], dim=-1)
        return self.head.drafts(tokens, aux, sorted(p_lasts), k)


def looked_up(tokens: list[int], k: int, min_match: int, max_match: int = 5) -> list[int] | None:
    """What followed the earlier occurrence that agrees with most last tokens, the latest of those; None: there is none.

    Where the text ends before ``k`` tokens, it continues as if it repeated itself.
    """
    last = len(tokens) - 1

    def agreement(end: int) -> int:
        return next((n for n in range(max_match) if n > end or tokens[end - n] != tokens[last - n]), max_match)

    best = max(range(last), key=lambda end: (agreement(end), end), default=None)
    if best is None or agreement(best) < min_match:
        return None
    text = list(tokens)
    for i in range(k):
        text.append(text[best + 1 + i])
    return text[last + 1 :]
