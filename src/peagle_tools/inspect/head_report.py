"""What ``inspect`` prints of a head: as data (``report``), and as a table for people (``show``, on 80 columns).

A field is never removed or given another meaning without a new ``SCHEMA``; new fields may come.
"""

import json
import shlex
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from peagle_vllm.heads.checks import Problem
from peagle_vllm.heads.config import default_aux_layers
from peagle_vllm.heads.fields import windows
from peagle_vllm.heads.files import SELECTOR_FOLDER, HeadError, read_headers
from peagle_vllm.heads.head import Head, read_map
from peagle_vllm.heads.selector import PROJECTION, read_selector_config
from peagle_vllm.heads.target import Target, Token

SCHEMA = 2
TOKEN_KINDS = {
    "special": "a special token that no text uses",
    "in use": "a special token that the chat template or the end of a text uses",
    "ordinary": "a token of ordinary text",
    "unused": "no token of the tokenizer",
}


def report(
    head: Head, problems: list[Problem], target: Target | None = None, token: Token | None = None
) -> dict[str, Any]:
    """The report's fields, ready for JSON. None is what is unknown, missing, or not on this machine.

    Args:
        token: what the target's tokenizer calls the head's mask token.
    """
    weights = head.tensors.values()
    ids = head.aux_layer_ids or (target and default_aux_layers(target.num_layers))
    mask_hidden, vector = head.tensors.get("mask_hidden"), head.mask_hidden()
    norm = None if vector is None else round(float(np.linalg.norm(vector.astype(np.float64))), 4)
    fit = all(problem.severity != "error" for problem in problems)
    types, size = windows(head) if fit else (None, None)
    window = {"size": size, "layers": types.count("sliding_attention")} if types else None
    return {
        "schema": SCHEMA,
        "head": head.name,  # as it was given
        "commit": head.commit,  # of the hub; None for a folder outside the hub's cache
        "kind": head.kind,  # peagle, eagle3, or target for a plain model
        "dialect": head.dialect,  # of heads/config.py; docs/heads.md has a table
        "architecture": head.architecture,  # the class that vLLM looks up
        "family": head.family,  # llama or qwen3: the layers; None for a class that cannot draft in parallel
        "layers": head.num_layers,
        "hidden_size": head.hidden_size,
        "target_hidden_size": head.target_hidden_size,
        "vocab_size": head.vocab_size,  # of the target
        "draft_vocab_size": head.draft_vocab_size,  # tokens that can be drafted
        "vocabulary_map": read_map(head).form,  # of d2t: none, identity, offsets, target ids, unclear
        # Layers that vLLM captures (None where they depend on a target not given), their field (None for vLLM's
        # default), and how many fc takes.
        "aux_layers": {"ids": list(ids) if ids else None, "key": head.aux_key, "count": head.aux_needed},
        "mask_token": {
            "id": head.mask_token_id if isinstance(head.mask_token_id, (int, str)) else None,
            "key": head.mask_token_key,  # its field
            "text": token.text if token else None,  # in the target's tokenizer
            "kind": token.kind if token else None,  # of TOKEN_KINDS
        },
        "mask_hidden": mask_hidden
        and {
            "shape": list(mask_hidden.shape),
            "dtype": mask_hidden.dtype,
            "norm": norm if norm is not None and np.isfinite(norm) else None,  # Euclidean; JSON has no NaN
        },
        "trained_depth": head.trained_depth,  # tokens drafted ahead in training
        "norms": head.norms,  # flags: norm_before_residual, norm_before_fc, fc_norm
        "sliding_window": window,  # size in tokens, and how many layers have it
        "weights": {
            "tensors": len(weights),
            "parameters": sum(info.num_elements for info in head.weights.values()),
            "bytes": sum(info.num_bytes for info in weights),
            "dtypes": dict(sorted(Counter(info.dtype for info in weights).items())),  # name to tensors
            "files": head.weight_files,
            "embed_tokens": head.has("embed_tokens"),  # its own, or the target's
            "lm_head": head.has("lm_head"),
        },
        "selector": _selector(head),
        "speculative_config": {
            "method": "eagle3",
            "model": head.name,
            "num_speculative_tokens": min(head.trained_depth or 5, 5),
        }
        | ({"parallel_drafting": True} if head.kind == "peagle" else {})
        | ({"revision": head.commit} if head.commit and not head.folder else {}),
        "target": target
        and {
            "name": target.name,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "layers": target.num_layers,
        },
        "problems": [{"severity": problem.severity, "line": problem.line} for problem in problems],
        "fit": fit,
    }


def _selector(head: Head) -> dict[str, Any] | None:
    """Of a sharpened head on this machine; what cannot be read is a problem of its own."""
    try:
        selector_config = read_selector_config(head.config, head.config_file)
        tensors = read_headers(head.folder / SELECTOR_FOLDER) if head.folder else {}
    except HeadError:
        return None
    if selector_config is None:
        return None
    return {
        "rank": selector_config.selector_rank,
        "candidates": selector_config.selector_top_k,
        "gated": PROJECTION in tensors,
        "bytes": sum(info.num_bytes for info in tensors.values()),
    }


def show(console: Console, data: dict[str, Any]) -> None:
    """Print a ``report``."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in _rows(data):
        table.add_row(name, Text(value))
    console.print(table)
    console.print()
    if data["fit"]:
        config = shlex.quote(json.dumps(data["speculative_config"]))
        console.print("Serve it with", highlight=False)
        console.print(f"--speculative-config {config}\n", style="bold", highlight=False, soft_wrap=True, markup=False)
    for problem in data["problems"]:
        error = problem["severity"] == "error"
        mark = Text("unfit    " if error else "warning  ", "bold red" if error else "yellow")
        console.print(mark + Text(problem["line"], "default"), soft_wrap=True, highlight=False)
    fits = f"fits {data['target']['name']}" if data["target"] else "sound; --target checks it against its target"
    if data["fit"]:
        kind = "an EAGLE-3 head, which drafts its tokens one after the other; " if data["kind"] == "eagle3" else ""
        console.print(Text(kind + fits, "green"), soft_wrap=True)


def _rows(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "head", data["head"]
    if data["commit"]:
        yield "commit", data["commit"]
    yield "dialect", data["dialect"]
    yield "served as", f"{data['architecture'] or 'nothing in vLLM'} ({data['family'] or 'no P-EAGLE class'})"
    window = data["sliding_window"]
    windowed = f", {window['layers']} of them see the last {window['size']} tokens" if window else ""
    yield "layers", f"{data['layers']}{windowed}"
    yield "width", f"{data['hidden_size']}; reads hidden states {data['target_hidden_size']} wide"

    form = data["vocabulary_map"]
    drafted = "all can be drafted" + (" (identity d2t)" if form == "identity" else "")
    if data["draft_vocab_size"] != data["vocab_size"]:
        drafted = f"{data['draft_vocab_size']:,} can be drafted (d2t: {form or 'not read'})"
    yield "vocabulary", f"{data['vocab_size']:,} tokens, {drafted}"

    aux, target = data["aux_layers"], data["target"]
    if aux["ids"] is None:
        yield "aux layers", f"{aux['count']}; not named, so vLLM's default: 2, L//2 and L-3 of the target's L layers"
    else:
        named = f"from {aux['key']}" if aux["key"] else f"vLLM's default for {target['layers']} layers"
        outputs = ", ".join("the embeddings" if i == 0 else str(i) for i in aux["ids"])
        yield "aux layers", f"{aux['ids']} ({named}): what leaves the target's layers {outputs}, counted from 1"

    mask, hidden = data["mask_token"], data["mask_hidden"]
    words = [repr(mask["text"])] if mask["text"] else []
    words += [TOKEN_KINDS[mask["kind"]]] if mask["kind"] else []
    known = f"{json.dumps(mask['id'])} ({mask['key']}){'; ' if words else ''}{', '.join(words)}"
    yield "mask token", "no id in the config" if mask["id"] is None else known
    norm = f", norm {hidden['norm']:.4g}" if hidden and hidden["norm"] is not None else ""
    yield "mask_hidden", f"{hidden['shape']} {hidden['dtype']}{norm}" if hidden else "missing"

    yield "norms", ", ".join(name for name, on in data["norms"].items() if on) or "none but the layers' own"
    yield "trained depth", str(data["trained_depth"] or "not in the config")
    weights = data["weights"]
    dtypes = ", ".join(weights["dtypes"])
    yield "weights", f"{weights['parameters']:,} parameters, {decimal(weights['bytes'])}, {dtypes}"
    shared = [name for name in ("embed_tokens", "lm_head") if not weights[name]]
    yield "from target", ", ".join(shared) or "neither embed_tokens nor lm_head"
    if selector := data["selector"]:
        gated = "gated by the hidden state" if selector["gated"] else "without a gate"
        size = f"rank {selector['rank']}, {selector['candidates']} candidates a position"
        yield "selector", f"{size}, {gated}, {decimal(selector['bytes'])}"
    if target:
        yield "target", f"{target['name']}: {target['layers']} layers, width {target['hidden_size']}"
