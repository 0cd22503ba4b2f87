"""The trained head in vLLM: accepted there as replay says."""

from peagle_tools.shared import engines
from peagle_tools.shared.acceptance import sum_of
from peagle_tools.shared.errors import ToolError
from peagle_tools.train.documents import free_states, read_rows
from peagle_tools.train.lines import read_lines
from peagle_tools.train.peagle_yaml import LOOP, Config
from peagle_tools.train.replay import note_al

APART = 0.02  # of AL


def check(config: Config) -> str:
    """Let vLLM, which checks it, draft with the best head on the held-out prompts, and compare AL with that of replay.

    vLLM's own counts go to al.jsonl.

    Raises:
        ToolError: the two differ by more than APART, or vLLM cannot run the pair.
    """
    free_states()  # the engine needs their memory
    head, file = config.run / "checkpoints/best", config.run / "al.jsonl"
    if not head.exists():
        raise ToolError(f"{head}: no head is there; `peagle-vllm train run` trains one")
    step = int(head.resolve().name.removeprefix("step-"))
    lines = read_lines(file, must_exist=False)
    replayed = {line["K"]: line["al"] for line in lines if line["step"] == step and line["how"] == "replay"}
    if missing := [k for k in config.ks if k not in replayed]:
        raise ToolError(f"{file}: no AL of step {step} at K = {missing[0]} by replay; train again (--from run)")
    rows = read_rows(config).with_format(None)
    held_out = rows.select(range(len(rows))[-config.data.held_out :])
    prompts = [row["input_ids"][: row["loss_mask"].index(1)] for row in held_out]
    pair = engines.Pair(config.target, str(head.resolve()), {"dtype": config.target_dtype, **config.engine})
    how = (config.data.max_tokens, LOOP, len(prompts))  # all prompts at once
    measured = {k: sum_of(engines.in_process(engines.measure, pair, prompts, k, *how)) for k in config.ks}
    note_al(file, step, "vllm", measured)
    lengths = {k: acceptance.length for k, acceptance in measured.items()}
    both = "; ".join(f"K = {k}: AL {al:.3f} in vLLM, {replayed[k]:.3f} by replay" for k, al in lengths.items())
    if any(abs(al / replayed[k] - 1) > APART for k, al in lengths.items()):
        why = "training and serving differ, in the target, its layers, the chat template or the head's files"
        raise ToolError(f"step {step}: more than {APART:.0%} apart: {why}. {both}")
    return f"step {step}: {both}"
