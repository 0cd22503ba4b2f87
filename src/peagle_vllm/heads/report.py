"""What ``inspect`` tells about a head, as data. ``FIELDS`` is its documented shape.

A field is never removed or given another meaning without a new ``SCHEMA``; new fields may come.
"""

from collections import Counter
from typing import Any

from peagle_vllm.heads.checks import aux_needed
from peagle_vllm.heads.config import default_aux_layers
from peagle_vllm.heads.files import HeadError
from peagle_vllm.heads.head import Head, Problem
from peagle_vllm.heads.target import Target, Token
from peagle_vllm.heads.vocabulary import form_of_d2t, known_targets

SCHEMA = 1
FIELDS = {
    "schema": "version of this shape, a whole number",
    "head": "folder or hub id, as it was given",
    "dialect": "`aws`, `speculators`, `nemo`, `specforge`, `flat`, `vllm` or `unknown`",
    "architecture": "the class that vLLM looks up, or null",
    "family": "`llama` or `qwen3`: the layers; null for a class that cannot draft in parallel",
    "layers": "decoder layers",
    "hidden_size": "width of the head",
    "target_hidden_size": "width of the target's hidden states",
    "vocab_size": "tokens of the target",
    "draft_vocab_size": "tokens that can be drafted",
    "vocabulary_map": "form of d2t: `none`, `identity`, `offsets`, `target ids`, `unclear`, or null where its values "
    "are not on this machine",
    "aux_layers": "object: `ids` (layers that vLLM captures; null where they depend on a target not given), `key` "
    "(their field; null for vLLM's default), `count` (what `fc` takes)",
    "mask_token": "object: `id`, `key` (its field), `text` and `kind` in the target's tokenizer (`special`, `in use`, "
    "`ordinary`, `unused`); null where unknown",
    "mask_hidden": "object: `shape`, `dtype`, `norm` (Euclidean); null where it is missing",
    "trained_depth": "tokens drafted ahead in training; null where the config does not tell",
    "norms": "object of flags: `norm_before_residual`, `norm_before_fc`, `fc_norm`",
    "sliding_window": "object: `size` (tokens), `layers` (how many have it); null without one",
    "weights": "object: `tensors`, `parameters`, `bytes`, `dtypes` (name to tensors), `files`, `embed_tokens` and "
    "`lm_head` (whether the head has its own)",
    "mapped": "fields that serving sets for vLLM, because it does not find them in config.json by itself",
    "speculative_config": "what to give to `--speculative-config`",
    "target": "object: `name`, `hidden_size`, `vocab_size`, `layers`; null where none was given",
    "problems": "list of objects: `severity` (`error`, `warning`), `line` (what, where, how to mend it)",
    "fit": "true where no problem is an error",
}


def report(
    head: Head, problems: list[Problem], target: Target | None = None, token: Token | None = None
) -> dict[str, Any]:
    """The report's fields, each of ``FIELDS``, ready for JSON."""
    served, weights = head.served, head.tensors.values()
    ids = list(head.aux_layer_ids) if head.aux_layer_ids is not None else None
    if ids is None and target is not None:
        ids = list(default_aux_layers(target.num_layers))
    eagle = served.get("eagle_config") or {}
    return {
        "schema": SCHEMA,
        "head": head.name,
        "dialect": head.dialect,
        "architecture": head.architecture,
        "family": head.family,
        "layers": head.num_layers,
        "hidden_size": head.hidden_size,
        "target_hidden_size": head.target_hidden_size,
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.draft_vocab_size,
        "vocabulary_map": _vocabulary_map(head),
        "aux_layers": {"ids": ids, "key": head.aux_key, "count": aux_needed(head)},
        "mask_token": {
            "id": head.mask_token_id if isinstance(head.mask_token_id, (int, str)) else None,
            "key": head.mask_token_key,
            "text": token.text if token else None,
            "kind": token.kind if token else None,
        },
        "mask_hidden": _mask_hidden(head),
        "trained_depth": head.trained_depth,
        "norms": {
            "norm_before_residual": bool(served.get("norm_before_residual", False)),
            "norm_before_fc": bool(eagle.get("norm_before_fc", served.get("norm_before_fc", False))),
            "fc_norm": bool(served.get("fc_norm", False)),
        },
        "sliding_window": _sliding_window(head),
        "weights": {
            "tensors": len(weights),
            "parameters": sum(info.num_elements for name, info in head.tensors.items() if name not in ("d2t", "t2d")),
            "bytes": sum(info.num_bytes for info in weights),
            "dtypes": dict(sorted(Counter(info.dtype for info in weights).items())),
            "files": sorted({info.file for info in weights}),
            "embed_tokens": head.has("embed_tokens"),
            "lm_head": head.has("lm_head"),
        },
        "mapped": dict(head.mapped),
        "speculative_config": {
            "method": "eagle3",
            "model": head.name,
            "num_speculative_tokens": min(head.trained_depth or 5, 5),
            "parallel_drafting": True,
        },
        "target": target
        and {
            "name": target.name,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "layers": target.num_layers,
        },
        "problems": [{"severity": problem.severity, "line": problem.line} for problem in problems],
        "fit": all(problem.severity != "error" for problem in problems),
    }


def _mask_hidden(head: Head) -> dict[str, Any] | None:
    import numpy as np

    if not head.has_mask_hidden:
        return None
    info = head.tensors["mask_hidden"]
    try:
        values = head.mask_hidden()
    except HeadError:
        values = None
    norm = None if values is None else float(np.linalg.norm(values.astype(np.float64)))
    if norm is not None:
        norm = round(norm, 4) if np.isfinite(norm) else None  # JSON knows no NaN
    return {"shape": list(info.shape), "dtype": info.dtype, "norm": norm}


def _vocabulary_map(head: Head) -> str | None:
    if "d2t" not in head.tensors:
        return "none"
    if head.draft_vocab_size == head.vocab_size:
        return "identity"
    try:
        d2t = head.values("d2t")
        if d2t is None:
            return None
        return form_of_d2t(d2t.reshape(-1), known_targets(head), head.vocab_size)[0] or "unclear"
    except HeadError:
        return "unclear"


def _sliding_window(head: Head) -> dict[str, Any] | None:
    types = head.served.get("layer_types")
    if not isinstance(types, list) or "sliding_attention" not in types:
        return None
    return {"size": head.served.get("sliding_window"), "layers": types[: head.num_layers].count("sliding_attention")}
