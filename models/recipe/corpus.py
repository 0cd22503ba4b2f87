"""Text for the tiny models: the standard library of the running interpreter, cut into short pieces.

A piece is a run of whole lines, 300 to 1,000 characters, that starts after a blank line. Files are divided into
a training and a held-out part by a hash of their name, so no held-out prompt comes from a file the models read.
"""

import hashlib
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SEED = 0  # of everything that is built
HELD_OUT_BUCKETS = 16  # one file in 16 is held out
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "turtledemo", "ensurepip"}
PIECE_MIN, PIECE_MAX = 300, 1000  # characters
PROMPT_MAX = 160  # characters


@dataclass(frozen=True)
class Piece:
    """A run of source lines: ``prompt`` is shown by the user, ``answer`` is what follows it in the file."""

    prompt: str
    answer: str


def library_files() -> list[tuple[str, str]]:
    """(name relative to the library, text) of every source file used, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIPPED_FOLDERS & set(name.parts) or name.name.startswith("_sysconfigdata") or "config-" in name.parts[0]:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.isascii() and len(text) > PIECE_MIN:
            files.append((name.as_posix(), text.expandtabs(4)))
    return files


def split_pieces(text: str, rng: random.Random) -> list[str]:
    """Cut a file at blank lines into pieces of PIECE_MIN..PIECE_MAX characters."""
    pieces, current = [], ""
    wanted = rng.randint(PIECE_MIN, PIECE_MAX)
    for line in text.splitlines(keepends=True):
        at_break = not line.strip() and len(current) >= wanted
        if at_break or len(current) + len(line) > PIECE_MAX:
            if len(current) >= PIECE_MIN:
                pieces.append(current.strip("\n") + "\n")
            current, wanted = "", rng.randint(PIECE_MIN, PIECE_MAX)
        current += line
    return pieces


def as_prompt(piece: str, rng: random.Random) -> Piece | None:
    """Divide a piece after one to five lines; None where its first lines are too long for a prompt."""
    lines = piece.splitlines(keepends=True)
    for count in rng.sample(range(1, 6), 5):
        prompt = "".join(lines[:count])
        if 12 <= len(prompt) <= PROMPT_MAX and prompt.strip() and len(lines) > count + 1:
            return Piece(prompt.rstrip("\n"), "".join(lines[count:]))
    return None


def pieces(held_out: bool, seed: int = SEED) -> list[Piece]:
    """Every piece of the training (or held-out) files, shuffled with ``seed``."""
    rng = random.Random(seed)
    found = []
    for name, text in library_files():
        is_held_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_BUCKETS == 0
        if is_held_out == held_out:
            found += [p for p in (as_prompt(t, rng) for t in split_pieces(text, rng)) if p]
    rng.shuffle(found)
    return found


def fingerprint() -> str:
    """Short hash of the text the models are made from: a different Python release gives different models."""
    digest = hashlib.sha256()
    for name, text in library_files():
        digest.update(name.encode() + b"\0" + text.encode())
    return digest.hexdigest()[:16]
