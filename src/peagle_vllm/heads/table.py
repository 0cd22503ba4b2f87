"""The report of ``inspect`` for people; it reads well on 80 columns."""

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

DIALECTS = {
    "aws": "AWS (flat config, ptd_token_id)",
    "flat": "AWS training config (flat, plain Llama architecture)",
    "nemo": "NeMo Automodel",
    "specforge": "SpecForge",
    "speculators": "speculators",
    "vllm": "vLLM's own",
    "unknown": "unknown",
}


def show(console: Console, data: dict[str, Any]) -> None:
    """Print a report (``report.report``)."""
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
    own = [name for name in ("embed_tokens", "lm_head") if weights[name]]
    shared = [name for name in ("embed_tokens", "lm_head") if not weights[name]]
    rows = [
        ("head", data["head"]),
        ("dialect", DIALECTS[data["dialect"]]),
        ("served as", f"{data['architecture'] or 'nothing that vLLM knows'} ({data['family'] or 'no P-EAGLE class'})"),
        ("layers", f"{data['layers']}{_window(data['sliding_window'])}"),
        ("width", f"{data['hidden_size']}; reads hidden states {data['target_hidden_size']} wide"),
        ("vocabulary", f"{data['vocab_size']:,} tokens, {_drafted(data)}"),
        ("aux layers", _aux(data["aux_layers"], target)),
        ("mask token", _mask_token(mask)),
        ("mask_hidden", _mask_hidden(data["mask_hidden"])),
        ("norms", ", ".join(name for name, on in data["norms"].items() if on) or "none but the layers' own"),
        ("trained depth", str(data["trained_depth"] or "not in the config")),
        ("weights", f"{weights['parameters']:,} parameters, {_size(weights['bytes'])}, {_dtypes(weights['dtypes'])}"),
        (
            "files",
            f"{len(weights['files'])}: {', '.join(weights['files'][:2])}{' ...' if weights['files'][2:] else ''}",
        ),
        (
            "of its own",
            (", ".join(own) or "neither") + (f" ({', '.join(shared)} shared with the target)" if shared else ""),
        ),
    ]
    if data["mapped"]:
        rows.append(
            ("set for vLLM", ", ".join(f"{key} = {json.dumps(value)}" for key, value in data["mapped"].items()))
        )
    if target:
        rows.append(("target", f"{target['name']}: {target['layers']} layers, width {target['hidden_size']}"))
    return rows


def _window(window: dict[str, int] | None) -> str:
    return f", {window['layers']} of them see the last {window['size']} tokens" if window else ""


def _drafted(data: dict[str, Any]) -> str:
    forms = {
        "identity": "all can be drafted (identity d2t)",
        "none": "all can be drafted",
    }
    if data["draft_vocab_size"] == data["vocab_size"]:
        return forms.get(data["vocabulary_map"], forms["none"])
    return f"{data['draft_vocab_size']:,} can be drafted (d2t: {data['vocabulary_map'] or 'not read'})"


def _aux(aux: dict[str, Any], target: dict[str, Any] | None) -> str:
    if aux["ids"] is None:
        return f"{aux['count']}; not named, so vLLM's default: 2, L//2 and L-3 of the target's L layers"
    named = f"from {aux['key']}" if aux["key"] else f"vLLM's default for {target['layers']} layers" if target else ""
    outputs = ", ".join("the embeddings" if i == 0 else str(i) for i in aux["ids"])
    return f"{aux['ids']} ({named}): what leaves the target's layers {outputs}, counted from 1"


def _mask_token(mask: dict[str, Any]) -> str:
    if mask["id"] is None:
        return "no id in the config"
    kinds = {
        "special": "a special token that no text uses",
        "in use": "a special token that the chat template or the end of a text uses",
        "ordinary": "a token of ordinary text",
        "unused": "no token of the tokenizer",
        None: None,
    }
    kind = kinds[mask["kind"]]
    text = f"; {mask['text']!r}, {kind}" if mask["text"] else f"; {kind}" if kind else ""
    return f"{json.dumps(mask['id'])} ({mask['key']}){text}"


def _mask_hidden(found: dict[str, Any] | None) -> str:
    if found is None:
        return "missing"
    norm = "" if found["norm"] is None else f", norm {found['norm']:.4g}"
    return f"{found['shape']} {found['dtype']}{norm}"


def _dtypes(dtypes: dict[str, int]) -> str:
    return " and ".join(f"{count} {dtype}" if len(dtypes) > 1 else dtype for dtype, count in dtypes.items())


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
