"""Acceptance of a sharpened tiny head at temperatures above 0: how drafts are drawn, how they are verified, how warm.

A draft temperature divides the scores of a position before its token is drawn; an edge holds it as a common factor of
its two scales. "by position": the best of those tried at each position, chosen on other prompts than are measured.
Block verification is Model Runner V2's, in Triton's interpreter where there is no GPU; the rest is measured on V1.
"""

import statistics
from typing import Any

from benchmarks import arms
from benchmarks.engines import inside, prepare_process, tiny_pair
from benchmarks.heldout import read_prompts
from peagle_tools.shared.acceptance import Acceptance, read_engine
from peagle_tools.shared.provenance import provenance

TARGET, HEAD, K = "tiny-llama", "tiny-llama-peagle-sharp", 7
PROMPTS, GROUP, MAX_TOKENS = 48, 8, 64  # measured, and as many others to choose by; in flight; of an answer
TEMPERATURES = ("0.7", "1.0")  # keys of JSON
EVEN = {f"{draft:g}": [draft] * K for draft in (0.6, 0.8, 1.0, 1.25, 1.6)}
BY_POSITION = "by position"
WAYS = {
    "greedy": {"draft_sample_method": "greedy"},
    "probabilistic": {"draft_sample_method": "probabilistic"},
    "probabilistic, block": {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
}


def measure(way: str, tried: dict[str, dict[str, list[float]]], choosing: bool) -> list[dict[str, Any]]:
    """One row for each temperature and each of its draft temperatures by position, in this process."""
    prepare_process()
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = tiny_pair(TARGET, HEAD, K)
    arguments["speculative_config"] |= WAYS[way]
    llm = LLM(**arguments, max_model_len=512, max_num_seqs=GROUP, disable_log_stats=False)
    asked = read_prompts(llm, arms.ROOT / "models/prompts/heldout.jsonl", 2 * PROMPTS)
    asked = asked[PROMPTS:] if choosing else asked[:PROMPTS]
    edge = inside(llm)[1].edge
    fitted = [(scale, scale.clone()) for scale in (edge.edge_scale, edge.unary_scale)]

    def group_of(at: int, temperature: str) -> Acceptance:
        before, heat = read_engine(llm), float(temperature)
        params = [SamplingParams(temperature=heat, max_tokens=MAX_TOKENS, seed=at + i) for i in range(GROUP)]
        llm.generate(asked[at : at + GROUP], params, use_tqdm=False)
        return read_engine(llm).since(before)

    rows = []
    for temperature, drafts in tried.items():
        for name, draft in drafts.items():
            for scale, as_fitted in fitted:
                scale.copy_(as_fitted)
                scale[:K] /= scale.new_tensor(draft)
            groups = [group_of(at, temperature) for at in range(0, PROMPTS, GROUP)]
            lengths = [group.length for group in groups]
            error = statistics.stdev(lengths) / len(lengths) ** 0.5
            accepted = [sum(column) for column in zip(*(g.accepted_per_position for g in groups), strict=True)]
            setting = {"drafts": way, "temperature": temperature, "draft_temperature": name, "by_position": draft}
            figures = {"al": round(statistics.mean(lengths), 3), "error": round(error, 3)}
            rows.append(setting | figures | {"accepted": [sum(g.num_drafts for g in groups), *accepted]})
    return rows


def best_by_position(rows: list[dict[str, Any]]) -> list[float]:
    """Each position's draft temperature with which most of what was reached was accepted."""

    def share(row: dict[str, Any], position: int) -> float:
        return row["accepted"][position + 1] / max(1, row["accepted"][position])

    best = (max(rows, key=lambda row: share(row, position)) for position in range(K))
    return [row["by_position"][position] for position, row in enumerate(best)]


def published(result: dict[str, Any]) -> arms.Published:
    """One row for each way of drafting and draft temperature, a column for each temperature."""
    found = {(row["drafts"], row["draft_temperature"], row["temperature"]): row for row in result["rows"]}
    rows = []
    for way, draft in dict.fromkeys(key[:2] for key in found):
        cells = (found[way, draft, temperature] for temperature in TEMPERATURES)
        rows.append((way, draft, *(f"{cell['al']:.2f} ± {cell['error']:.2f}" for cell in cells)))
    columns = ("drafts", "draft temperature", *(f"AL at temperature {temperature}" for temperature in TEMPERATURES))
    tokens = f"{result['prompts']} held-out prompts, up to {result['max_tokens']} tokens"
    return columns, rows, f"K = {result['k']}, {result['head']}, {tokens}; block on V2, else V1; ±: one standard error"


def main() -> int:
    args = arms.parser(__doc__).parse_args()
    plain = {temperature: {"1": EVEN["1"]} for temperature in TEMPERATURES}
    tried = dict.fromkeys(TEMPERATURES, EVEN)
    chosen = arms.run(measure, arms.V1, way="probabilistic", tried=tried, choosing=True)
    by_temperature = {t: [row for row in chosen if row["temperature"] == t] for t in tried}
    best = {t: {BY_POSITION: best_by_position(rows)} for t, rows in by_temperature.items()}
    whole = {t: EVEN | best[t] for t in tried}
    rows = arms.run(measure, arms.V1, way="greedy", tried=plain, choosing=False)
    rows += arms.run(measure, arms.V1, way="probabilistic", tried=whole, choosing=False)
    rows += arms.run(measure, arms.V2, way="probabilistic, block", tried=plain, choosing=False)
    counts = {"k": K, "prompts": PROMPTS, "max_tokens": MAX_TOKENS, "target": TARGET, "head": HEAD}
    report = {**counts, "rows": rows, **provenance()}
    print(arms.table(*published(report)))
    arms.write_result(args.out, __doc__, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
