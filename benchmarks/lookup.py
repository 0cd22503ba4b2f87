"""What look-up adds to a head's drafts, on the same answers: ``benchmarks.real --lookup``.

An engine without look-up drafts after every token of an answer, because none of its drafts is accepted. From these
drafts and the product's look-up follows what each would have had accepted, step by step, so both see the same text at
any temperature.
"""

import json
import sysconfig
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.engines import drafter_of
from benchmarks.real import Engine, RealArm, al_of, gain_of, live, read_set
from peagle_kernels import lookup_drafts_torch

K, PROMPTS, MAX_TOKENS, TEMPERATURES, MIN_MATCHES = 5, 16, 80, (0.0, 0.7, 1.0), (2, 3, 4)
SETS = ("humaneval", "mt-bench", "long prompts", "structured", "lists", "penalized")
LONG_TOKENS = 1500  # of a source file, before the question
FREQUENCY_PENALTY = 1.5
LISTED = (
    "unusual surnames",
    "rivers of the world",
    "unrelated English nouns",
    "random six-digit numbers",
    "inventions with their inventors",
    "species of birds",
    "random passwords",
    "spices, each with a dish that uses it",
)
LISTS = [f"List 40 {what}, one per line, no two alike. Write nothing else." for what in LISTED]
LISTS += [f"Write 60 {what} in one paragraph, in random order, separated by commas, none twice." for what in LISTED]
FIELDS = {"topic": {"type": "string", "maxLength": 120}, "confidence": {"enum": ["low", "medium", "high"]}}
FIELDS["points"] = {"type": "array", "items": FIELDS["topic"], "minItems": 2, "maxItems": 4}
SCHEMA = {"type": "object", "properties": FIELDS, "required": list(FIELDS), "additionalProperties": False}


def prompt_sets(engine: Engine) -> dict[str, tuple[list[list[str]], dict[str, Any]]]:
    """By name of ``SETS`` its chats, and what the requests ask for besides. Answers to the last two repeat nothing."""
    from vllm.sampling_params import StructuredOutputsParams

    tokenizer, files = engine.llm.get_tokenizer(), []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        ids = tokenizer(file.read_text(encoding="utf-8"))["input_ids"]
        if len(ids) > LONG_TOKENS:
            text = tokenizer.decode(ids[:LONG_TOKENS])
            files.append([f"What does this Python file do? Name its main functions.\n\n{text}"])
    questions = [turns[:1] for turns in read_set("mt-bench", PROMPTS)]
    stated = [[f"{turns[0]}\n\nAnswer as JSON of this schema: {json.dumps(SCHEMA)}"] for turns in questions]
    return {
        "humaneval": ([turns[:1] for turns in read_set("humaneval", PROMPTS)], {}),
        "mt-bench": (questions, {}),
        "long prompts": (files[:: len(files) // PROMPTS][:PROMPTS], {}),
        "structured": (stated, {"structured_outputs": StructuredOutputsParams(json=SCHEMA)}),
        "lists": ([[text] for text in LISTS], {}),
        "penalized": (questions, {"frequency_penalty": FREQUENCY_PENALTY}),
    }


def drafted_answers(
    engine: Engine, name: str, temperature: float
) -> list[tuple[list[int], list[int], list[list[int]]]]:
    """Of each answer the prompt's tokens, its own, and the head's K drafts after each of its own."""
    from vllm import SamplingParams

    drafter, steps = drafter_of(engine.llm), []  # a step: request ids, bonus tokens, drafts
    propose = type(drafter).propose

    def rejected(self: Any, *args: Any, **inputs: Any) -> torch.Tensor:
        drafts = propose(self, *args, **inputs)
        steps.append((list(self.runner.input_batch.req_ids), inputs["next_token_ids"].tolist(), drafts.tolist()))
        return drafts.zero_()  # the end of a text, which the target does not choose inside one

    chats, asked = prompt_sets(engine)[name]
    how = SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, **asked)
    with patch.object(type(drafter), "propose", rejected):
        outputs = engine.llm.generate([engine.prompt(chat) for chat in chats], how, use_tqdm=False)
    answers = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        mine = [
            (bonus[at], drafts[at])
            for ids, bonus, drafts in steps
            for at, request in enumerate(ids)
            if request.partition("-")[0] == output.request_id.partition("-")[0]
        ]
        bonuses = [token for token, _ in mine]
        # Chunks of the prompt have drafts too; the last token has none, where it ends the request.
        first = next(at for at in range(len(mine)) if bonuses[at : at + len(tokens) - 1] == tokens[:-1])
        answers.append((list(output.prompt_token_ids), tokens, [drafts for _, drafts in mine[first:]]))
    return answers


def accepted(drafts: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """How many of the drafts after each of the answer's first n tokens, [n, K], are its next ones, [n]."""
    following = answer.new_full((len(answer) + drafts.shape[1],), -1)
    following[: len(answer)] = answer
    right = drafts == following.unfold(0, drafts.shape[1], 1)[1 : 1 + len(drafts)]
    return right.long().cumprod(1).sum(1)


def counts_of(prompt: list[int], answer: list[int], drafts: list[list[int]], min_match: int | None) -> list[int]:
    """In how many steps of this answer 0, 1 .. K drafts are accepted, [K + 1]; None: without look-up."""
    steps = len(answer) - 1
    if not steps:
        return [0] * (K + 1)
    tokens, taken = torch.tensor([prompt + answer], dtype=torch.int32), torch.tensor(drafts[:steps])
    if min_match:
        last = len(prompt) + torch.arange(steps)
        lookup_drafts_torch(taken, tokens, torch.zeros(steps, dtype=torch.int64), last, min_match, 1 << 30)
    lengths, counts, at = accepted(taken, torch.tensor(answer)).tolist(), [0] * (K + 1), 0
    while at < steps:
        counts[lengths[at]] += 1
        at += lengths[at] + 1
    return counts


def measure_lookup() -> list[dict[str, Any]]:
    """A row for the settings, then one for each set and temperature: acceptance without look-up and what it adds."""
    arm = RealArm("P-EAGLE", "peagle", K, selector=True, max_model_len=4096)
    settings = {"head": arm.head, "k": K, "max_tokens": MAX_TOKENS, "long_tokens": LONG_TOKENS, "engine": arm.engine}
    rows = [{"settings": settings | {"frequency_penalty": FREQUENCY_PENALTY}}]
    with live(arm) as call:
        for temperature, name in product(TEMPERATURES, SETS):
            answers = call(drafted_answers, name, temperature)
            head = np.array([counts_of(*answer, None) for answer in answers])
            row = {"set": name, "temperature": temperature, "prompts": len(answers), "without": al_of(head)}
            for min_match in MIN_MATCHES:
                counts = np.array([counts_of(*answer, min_match) for answer in answers])
                row[f"from {min_match}"] = {"al": al_of(counts)["al"], **gain_of(counts, head)}
            print(row, flush=True)
            rows.append(row)
    return rows
