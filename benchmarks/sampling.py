"""Acceptance of a sharpened tiny head at temperatures above 0: how drafts are drawn, how they are verified, how warm.

A draft temperature divides the scores of a position before its token is drawn; an edge holds it as a common factor of
its two scales. For each temperature every factor is measured, then the best factor of each position together, chosen on
other prompts than those that are measured. Model Runner V2, in Triton's interpreter where there is no GPU.
"""

import statistics
from typing import Any

from benchmarks import arms
from benchmarks.engines import inside, prepare_process, tiny_pair
from benchmarks.heldout import read_prompts
from peagle_vllm.acceptance import Acceptance, read_engine
from peagle_vllm.provenance import provenance

TARGET, HEAD = "tiny-llama", "tiny-llama-peagle-sharp"
TEMPERATURES = (0.7, 1.0)
DRAFT_TEMPERATURES = (0.7, 1.0, 1.4)
GROUP, MAX_TOKENS = 12, 64  # prompts in flight, tokens
GREEDY = "greedy"
WAYS = {
    GREEDY: {"draft_sample_method": "greedy"},
    "probabilistic": {"draft_sample_method": "probabilistic"},
    "probabilistic, block": {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
}


def measure(way: str, k: int, prompts: int) -> list[dict[str, Any]]:
    """One row for each temperature and draft temperature, in this process."""
    prepare_process()
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = tiny_pair(TARGET, HEAD, k)
    arguments["speculative_config"] |= WAYS[way]
    llm = LLM(**arguments, max_model_len=512, max_num_seqs=GROUP, disable_log_stats=False)
    asked = read_prompts(llm, arms.ROOT / "models/prompts/heldout.jsonl", 2 * prompts)
    edge = inside(llm)[1].edge
    scales = [scale.clone() for scale in (edge.edge_scale, edge.unary_scale)]

    def acceptance(questions: list[dict[str, Any]], temperature: float, draft: list[float]) -> list[Acceptance]:
        for scale, fitted in zip((edge.edge_scale, edge.unary_scale), scales, strict=True):
            scale.copy_(fitted)
            scale[:k] /= scale.new_tensor(draft)
        groups = []
        for at in range(0, len(questions), GROUP):
            before = read_engine(llm)
            params = [SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=at + i) for i in range(GROUP)]
            llm.generate(questions[at : at + GROUP], params, use_tqdm=False)
            groups.append(read_engine(llm).since(before))
        return groups

    rows = []
    for temperature in TEMPERATURES:
        if way == GREEDY:
            tried: dict[str, list[float]] = {"1": [1.0] * k}
        else:
            tried = {f"{draft:g}": [draft] * k for draft in DRAFT_TEMPERATURES}
            chosen = [acceptance(asked[prompts:], temperature, draft) for draft in tried.values()]
            tried["by position"] = best_by_position(list(tried.values()), chosen)
        for name, draft in tried.items():
            lengths = [group.length for group in acceptance(asked[:prompts], temperature, draft)]
            error = statistics.stdev(lengths) / len(lengths) ** 0.5
            figures = {"al": round(statistics.mean(lengths), 3), "error": round(error, 3)}
            rows.append(
                {"drafts": way, "temperature": temperature, "draft_temperature": name, "by_position": draft} | figures
            )
    return rows


def best_by_position(drafts: list[list[float]], measured: list[list[Acceptance]]) -> list[float]:
    """At each position the draft temperature with which most tokens were accepted of those that were looked at."""
    chosen = []
    for position in range(len(drafts[0])):

        def share(row: int, position: int = position) -> float:
            counts = [group.accepted_per_position for group in measured[row]]
            reached = sum(c[position - 1] for c in counts) if position else sum(g.num_drafts for g in measured[row])
            return sum(c[position] for c in counts) / max(1, reached)

        chosen.append(drafts[max(range(len(drafts)), key=share)][position])
    return chosen


def published(result: dict[str, Any]) -> arms.Published:
    """One row for each way of drafting and draft temperature, a column for each temperature."""
    found = {(row["drafts"], row["draft_temperature"], row["temperature"]): row for row in result["rows"]}
    rows = []
    for way, draft in dict.fromkeys(key[:2] for key in found):
        cells = (found[way, draft, temperature] for temperature in TEMPERATURES)
        rows.append(
            (way, "" if way == GREEDY else draft, *(f"{cell['al']:.2f} ± {cell['error']:.2f}" for cell in cells))
        )
    columns = ("drafts", "draft temperature", *(f"AL at temperature {temperature}" for temperature in TEMPERATURES))
    notes = f"K = {result['k']}, {result['head']}, {result['prompts']} prompts, up to {result['max_tokens']} tokens"
    return columns, rows, notes


def main() -> int:
    parser = arms.parser(__doc__)
    parser.add_argument("--k", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=48, help="measured; as many others choose")
    args = parser.parse_args()
    rows = [row for way in WAYS for row in arms.run(measure, arms.V2, way=way, k=args.k, prompts=args.prompts)]
    counts = {"k": args.k, "prompts": args.prompts, "max_tokens": MAX_TOKENS, "target": TARGET, "head": HEAD}
    report = {**counts, "rows": rows, **provenance()}
    print(arms.table(*published(report)))
    arms.write_result(args.out, __doc__, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
