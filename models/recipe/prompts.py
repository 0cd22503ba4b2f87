"""Write the held-out prompts: openings of pieces from files that no model was trained on."""

import json
from pathlib import Path

from corpus import pieces
from tokens import load_tokenizer

COUNT, MAX_TOKENS = 96, 100


def held_out_prompts(tokenizer_folder: Path, seed: int) -> list[str]:
    """``COUNT`` prompts of at most ``MAX_TOKENS`` tokens, none of them a training prompt."""
    tokenizer = load_tokenizer(tokenizer_folder)
    seen = {piece.prompt for piece in pieces(held_out=False, seed=seed)}
    found: list[str] = []
    for piece in pieces(held_out=True, seed=seed):
        if piece.prompt not in seen and len(tokenizer.encode(piece.prompt)) <= MAX_TOKENS:
            seen.add(piece.prompt)
            found.append(piece.prompt)
    return found[:COUNT]


def write_prompts(tokenizer_folder: Path, file: Path, seed: int) -> int:
    """One JSON object a line, ``{"prompt": ...}``; returns their number."""
    prompts = held_out_prompts(tokenizer_folder, seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return len(prompts)
