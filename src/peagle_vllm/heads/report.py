"""What ``inspect`` tells about a head: as data (``report``), and as a table for people (``show``, on 80 columns).

``FIELDS`` documents the data. A field is never removed or given another meaning without a new ``SCHEMA``; new fields
may come.
"""

import json
from collections import Counter
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from peagle_vllm.heads.checks import Problem
from peagle_vllm.heads.config import default_aux_layers
from peagle_vllm.heads.head import Head
from peagle_vllm.heads.target import Target, Token
from peagle_vllm.heads.vocabulary import read_map

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
DIALECTS = {
    "aws": "AWS (flat config, ptd_token_id)",
    "flat": "AWS training config (flat, plain Llama architecture)",
    "nemo": "NeMo Automodel",
    "specforge": "SpecForge",
    "speculators": "speculators",
    "vllm": "vLLM's own",
    "unknown": "unknown",
}
TOKEN_KINDS = {
    "special": "a special token that no text uses",
    "in use": "a special token that the chat template or the end of a text uses",
    "ordinary": "a token of ordinary text",
    "unused": "no token of the tokenizer",
}


def report(
    head: Head, problems: list[Problem], target: Target | None = None, token: Token | None = None
) -> dict[str, Any]:
    """The report's fields, each of ``FIELDS``, ready for JSON."""
    weights = head.tensors.values()
    ids = list(head.aux_layer_ids) if head.aux_layer_ids is not None else None
    if ids is None and target is not None:
        ids = list(default_aux_layers(target.num_layers))
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
        "aux_layers": {"ids": ids, "key": head.aux_key, "count": head.aux_needed},
        "mask_token": {
            "id": head.mask_token_id if isinstance(head.mask_token_id, (int, str)) else None,
            "key": head.mask_token_key,
            "text": token.text if token else None,
            "kind": token.kind if token else None,
        },
        "mask_hidden": _mask_hidden(head),
        "trained_depth": head.trained_depth,
        "norms": head.norms,
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
    """JSON knows no NaN, so a norm that is none is null."""
    import numpy as np

    if not head.has_mask_hidden:
        return None
    info, values = head.tensors["mask_hidden"], head.mask_hidden()
    norm = None if values is None else round(float(np.linalg.norm(values.astype(np.float64))), 4)
    return {"shape": list(info.shape), "dtype": info.dtype, "norm": norm if np.isfinite(norm or 0) else None}


def _vocabulary_map(head: Head) -> str | None:
    if "d2t" not in head.tensors:
        return "none"
    if not head.is_reduced:
        return "identity"
    found, fault = read_map(head)
    return found.form if found else fault and "unclear"


def _sliding_window(head: Head) -> dict[str, Any] | None:
    types = head.served.get("layer_types")
    if not isinstance(types, list) or "sliding_attention" not in types:
        return None
    return {"size": head.served.get("sliding_window"), "layers": types[: head.num_layers].count("sliding_attention")}


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
        config = json.dumps(data["speculative_config"])
        console.print("Serve it with", highlight=False)
        console.print(f"--speculative-config '{config}'\n", style="bold", highlight=False, soft_wrap=True, markup=False)
    for problem in data["problems"]:
        error = problem["severity"] == "error"
        mark = Text("unfit    " if error else "warning  ", "bold red" if error else "yellow")
        console.print(mark + Text(problem["line"], "default"), soft_wrap=True, highlight=False)
    fits = f"fits {data['target']['name']}" if data["target"] else "sound; --target checks it against its target"
    if data["fit"]:
        console.print(Text(fits, "green"), soft_wrap=True)


def _rows(data: dict[str, Any]) -> list[tuple[str, str]]:
    weights, mask, target = data["weights"], data["mask_token"], data["target"]
    dtypes, files = weights["dtypes"], weights["files"]
    own = ", ".join(name for name in ("embed_tokens", "lm_head") if weights[name])
    shared = ", ".join(name for name in ("embed_tokens", "lm_head") if not weights[name])
    kinds = " and ".join(f"{count} {dtype}" for dtype, count in dtypes.items()) if len(dtypes) > 1 else "".join(dtypes)
    rows = [
        ("head", data["head"]),
        ("dialect", DIALECTS[data["dialect"]]),
        ("served as", f"{data['architecture'] or 'nothing that vLLM knows'} ({data['family'] or 'no P-EAGLE class'})"),
        ("layers", f"{data['layers']}{_window(data['sliding_window'])}"),
        ("width", f"{data['hidden_size']}; reads hidden states {data['target_hidden_size']} wide"),
        ("vocabulary", f"{data['vocab_size']:,} tokens, {_drafted(data)}"),
        ("aux layers", _aux(data["aux_layers"], target)),
        ("mask token", _mask_token(mask)),
        ("mask_hidden", _mask_vector(data["mask_hidden"])),
        ("norms", ", ".join(name for name, on in data["norms"].items() if on) or "none but the layers' own"),
        ("trained depth", str(data["trained_depth"] or "not in the config")),
        ("weights", f"{weights['parameters']:,} parameters, {decimal(weights['bytes'])}, {kinds}"),
        ("files", f"{len(files)}: {', '.join(files[:2])}{' ...' if files[2:] else ''}"),
        ("of its own", (own or "neither") + (f" ({shared} shared with the target)" if shared else "")),
    ]
    if data["mapped"]:
        fields = (f"{key} = {json.dumps(value)}" for key, value in data["mapped"].items())
        rows.append(("set for vLLM", ", ".join(fields)))
    if target:
        rows.append(("target", f"{target['name']}: {target['layers']} layers, width {target['hidden_size']}"))
    return rows


def _window(window: dict[str, int] | None) -> str:
    return f", {window['layers']} of them see the last {window['size']} tokens" if window else ""


def _drafted(data: dict[str, Any]) -> str:
    if data["draft_vocab_size"] != data["vocab_size"]:
        return f"{data['draft_vocab_size']:,} can be drafted (d2t: {data['vocabulary_map'] or 'not read'})"
    return "all can be drafted" + (" (identity d2t)" if data["vocabulary_map"] == "identity" else "")


def _aux(aux: dict[str, Any], target: dict[str, Any] | None) -> str:
    if aux["ids"] is None:
        return f"{aux['count']}; not named, so vLLM's default: 2, L//2 and L-3 of the target's L layers"
    named = f"from {aux['key']}" if aux["key"] else f"vLLM's default for {target['layers']} layers" if target else ""
    outputs = ", ".join("the embeddings" if i == 0 else str(i) for i in aux["ids"])
    return f"{aux['ids']} ({named}): what leaves the target's layers {outputs}, counted from 1"


def _mask_token(mask: dict[str, Any]) -> str:
    if mask["id"] is None:
        return "no id in the config"
    kind = TOKEN_KINDS.get(mask["kind"])
    text = f"; {mask['text']!r}, {kind}" if mask["text"] else f"; {kind}" if kind else ""
    return f"{json.dumps(mask['id'])} ({mask['key']}){text}"


def _mask_vector(found: dict[str, Any] | None) -> str:
    if found is None:
        return "missing"
    norm = "" if found["norm"] is None else f", norm {found['norm']:.4g}"
    return f"{found['shape']} {found['dtype']}{norm}"
