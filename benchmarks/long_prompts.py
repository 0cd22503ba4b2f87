"""Acceptance on prompts far longer than the documents that the head was trained on, with windows of several sizes.

``make real-target`` first. The prompts are source files of Python's standard library, cut to a number of tokens, and a
question about them; the same files for every length and window. What was measured is kept in .cache/real-bench: remove
it after a change.
"""

import sysconfig
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import arms
from benchmarks.real import WORK, Engine, RealArm, al_of, answered, gain_of
from peagle_tools.shared.provenance import provenance

TOKENS, FILES, ANSWER = (512, 1024, 2048, 4096, 7168), 24, 64
QUESTION = "What does this Python file do? Name its main functions.\n\n"


def answers(engine: Engine, files: int) -> dict[int, list[list[int]]]:
    """By length the accepted counts of an answer to each file's first tokens, two in flight."""
    tokenizer, texts = engine.llm.get_tokenizer(), []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        ids = tokenizer(file.read_text(encoding="utf-8"))["input_ids"]
        if len(ids) > max(TOKENS) and len(texts) < files:
            texts.append(ids)
    found: dict[int, list[list[int]]] = {tokens: [] for tokens in TOKENS}
    for at in range(0, len(texts), 2):  # of the same files the shorter ones first: they are the longer ones' prefixes
        for tokens in TOKENS:
            chats = [[QUESTION + tokenizer.decode(ids[:tokens])] for ids in texts[at : at + 2]]
            found[tokens] += [engine.counts(output) for output in engine.answer(chats, ANSWER)]
    return found


def main() -> None:
    parser = arms.parser(__doc__)
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--windows", type=int, nargs="*", default=[128, 256, 512])
    parser.add_argument("--k", type=int, default=3)
    args = parser.parse_args()
    head = RealArm("P-EAGLE", "peagle", args.k, selector=True, max_model_len=8192, prefix_caching=True)
    measured = [head, *(replace(head, window=window) for window in args.windows)]
    measured += [replace(head, name="P-EAGLE with look-up", lookup=2)]
    measured += [replace(head, name="n-gram", head="ngram", k=5, selector=False)]
    plain: dict[str, np.ndarray] = {}
    rows = []
    for arm in measured:
        row: dict[str, Any] = {"arm": asdict(arm), "by_prompt_tokens": {}}
        file = WORK / f"long-{arm.label}-{arm.window}-{args.files}-{arm.digest()}.json"
        found = {tokens: np.asarray(counts) for tokens, counts in answered(file, arm, answers, args.files).items()}
        plain = plain or found
        for tokens, counts in found.items():
            row["by_prompt_tokens"][tokens] = al_of(counts) | (gain_of(counts, plain[tokens]) if arm != head else {})
        print(arm.label, arm.window, row["by_prompt_tokens"], flush=True)
        rows.append(row)
    arms.write_result(args.out, __doc__, {"files": args.files, "answer": ANSWER, "arms": rows, **provenance()})


if __name__ == "__main__":
    main()
