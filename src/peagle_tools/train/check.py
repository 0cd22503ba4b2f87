"""The trained head in vLLM: accepted there as replay says."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import takewhile

from peagle_tools.shared import engines
from peagle_tools.shared.acceptance import BY_REQUEST, acceptance_of
from peagle_tools.shared.errors import ToolError
from peagle_tools.train.checkpoints import REPLAYED, STATE
from peagle_tools.train.documents import free_states, read_rows
from peagle_tools.train.peagle_yaml import LOOP, Config
from peagle_tools.train.replay import note_al
from peagle_vllm.heads.files import read_json

APART = 0.02  # of AL


def check(config: Config) -> str:
    """Let vLLM draft with the best head on the held-out prompts, and compare what it accepts with replay.

    By rounding, vLLM's answers soon part from the held-out ones, and another text has another AL. So rounds are
    compared as far as the text is the same. vLLM's AL over all rounds goes to al.jsonl. ToolError where AL of the
    compared rounds differs by more than APART, there are none, or vLLM cannot run the pair.
    """
    free_states()  # the engine needs their memory
    head = config.run / "checkpoints/best"
    state = read_json(head / STATE) if head.exists() else {}
    if len(replayed := state.get(REPLAYED) or ()) != config.data.held_out:
        what = f"has {len(replayed)} replayed answers, where data.held_out is {config.data.held_out}"
        raise ToolError(f"{head}: {what}; `peagle-vllm train run` makes a head with them, or put held_out back")
    rows = read_rows(config).with_format(None)
    held_out = rows.select(range(len(rows))[-config.data.held_out :])
    split = [(row["input_ids"], row["loss_mask"].index(1)) for row in held_out]
    prompts, texts = [ids[:at] for ids, at in split], [ids[at:] for ids, at in split]
    arguments = {"dtype": config.target_dtype, **config.engine, "per_request_spec_decode_metrics": BY_REQUEST[1]}
    pair = engines.Pair(config.target, str(head.resolve()), arguments)
    measured = {k: engines.in_process(answer, pair, prompts, k, config.data.max_tokens) for k in config.ks}
    seen = {k: acceptance_of([n for _, steps in answers for n in steps], k) for k, answers in measured.items()}
    note_al(config.run / "al.jsonl", state["step"], "vllm", seen)
    reports, is_apart = [], False
    for k, answers in measured.items():
        whole = zip(answers, texts, replayed, strict=True)
        rounds = [both for (ids, steps), text, own in whole for both in same_text(ids, steps, text, own, k)]
        ours, theirs = (acceptance_of([both[i] for both in rounds], k).length for i in (0, 1))
        is_apart |= not rounds or abs(ours / theirs - 1) > APART
        same = f"in {len(rounds)} rounds of the same text {ours:.3f}, {theirs:.3f} by replay"
        reports.append(f"K = {k}: AL {seen[k].length:.3f} in vLLM; {same}")
    report = "; ".join(reports)
    if is_apart:
        why = "training and serving differ, in the target, its layers, the chat template or the head's files"
        raise ToolError(f"step {state['step']}: more than {APART:.0%} apart, or no text in common: {why}. {report}")
    return f"step {state['step']}: {report}"


def answer(pair: engines.Pair, prompts: list[list[int]], k: int, max_tokens: int) -> list[tuple[list[int], list[int]]]:
    """For each prompt, the token ids of vLLM's greedy answer, and how many drafts each of its rounds accepted."""
    from vllm import EngineArgs
    from vllm.sampling_params import RepetitionDetectionParams

    # ``engine`` may have some of the server alone; it alone starts data parallel ranks, too.
    of_engine = {field.name for field in fields(EngineArgs) if not field.name.startswith("data_parallel")}
    pair = replace(pair, arguments={name: value for name, value in pair.arguments.items() if name in of_engine})
    until = RepetitionDetectionParams(**LOOP)
    with pair.engine(k, prompts, max_tokens) as llm:
        outputs = engines.generate(llm, prompts, max_tokens, repetition_detection=until)
    answers = (output.outputs[0] for output in outputs)
    return [([*each.token_ids], each.spec_decode_metrics.per_step_accepted) for each in answers]


def same_text(
    tokens: Sequence[int], accepted: Sequence[int], text: Sequence[int], replayed: Sequence[int], num_k: int
) -> Iterator[tuple[int, int]]:
    """Accepted drafts, in vLLM and by replay, of each round whose drafts are all verified by the same tokens.

    Args:
        tokens: vLLM's answer, and ``accepted`` drafts of each of its rounds.
        text: the held-out answer, and the drafts that it accepts after each of its tokens (``replayed``).
    """
    shared, at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, text, strict=False))), 0
    for number in accepted:
        if at + num_k >= shared:
            return
        yield number, min(replayed[at], num_k)
        at += number + 1
