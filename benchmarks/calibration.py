"""Full batches on the real target: what adaptive verification expects to be accepted, and ``disable_eagle_block_drop``.

``make real-target`` first. vLLM's estimator reads greedy drafts on V2, in Triton's interpreter; its coefficients are
those that it starts with, and those that its own refits reach on the other half of the drafts. Prefixes are shared on
V1: they end with a block, and prompts differ in the next token, which the drafter's last cached row has read.
"""

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import arms
from benchmarks.engines import inside
from benchmarks.real import OFF, SETS, Engine, RealArm, al_of, gain_of, live, read_set
from peagle_tools.shared.provenance import provenance

K, PROMPTS, TOKENS, IN_FLIGHT, REFITS = 5, 8, 48, 4, 20
SHARED = {"k": 3, "prompts": 40, "max_tokens": 32, "block_size": 32}  # the smallest block of vLLM's CPU attention
PREFIX = "You answer questions of a programmer. Be brief and exact, and say so where you do not know. " * 4


@dataclass(frozen=True)
class Interpreted(RealArm):
    env = property(lambda self: super().env | arms.V2)
    engine = property(lambda self: super().engine | {"enforce_eager": True, "dtype": "float32"})


@dataclass(frozen=True)
class Shared(RealArm):
    keep: bool = False
    engine = property(lambda self: super().engine | {"enable_prefix_caching": True, "block_size": SHARED["block_size"]})

    def speculative_config(self) -> dict[str, Any]:
        return (super().speculative_config() or {}) | {"disable_eagle_block_drop": self.keep}


def estimated(engine: Engine, alone: bool) -> dict[str, Any]:
    """Shares of drafts whose first 1 .. K tokens are accepted, and expected to be; ``alone``: from candidates only."""
    import torch
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator as Estimator

    from peagle_vllm.v2 import candidate_sampler
    from tests.support.interpreter import torch_twins

    drafter, noted, accepted = inside(engine.llm)[1], [], []
    drafter.acceptance_estimator = Estimator(drafter.max_num_reqs, K, drafter.device)

    def note(idx_mapping: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
        verified = num_sampled + num_rejected == K + 1
        noted.append(drafter.acceptance_estimator.features[idx_mapping[verified]])
        accepted.append(num_sampled[verified] - 1)

    chats = [turns[:1] for pair in zip(*(read_set(name, PROMPTS // 2) for name in SETS), strict=True) for turns in pair]
    read = (lambda scores, _: scores) if alone else candidate_sampler.beside_others
    noting = patch.object(drafter, "observe_verification", note)
    with torch_twins(), noting, patch.object(candidate_sampler, "beside_others", read):
        for at in range(0, PROMPTS, IN_FLIGHT):
            engine.answer(chats[at : at + IN_FLIGHT], TOKENS)
    features, counts = torch.cat(noted), torch.cat(accepted)
    halves = torch.arange(len(counts)).chunk(2)

    def expected(refits: int) -> torch.Tensor:
        found = []
        for on, other in (halves, halves[::-1]):
            fit = Estimator(len(other), K, drafter.device)
            fit.REFIT_INTERVAL, fit.features = 1, features[other]
            for _ in range(refits):
                fit.predictions = torch.sigmoid(fit.slope * fit.features + fit.intercepts)
                fit.step(torch.arange(len(other)), counts[other] + 1, K - counts[other])
            found.append(torch.sigmoid(fit.slope * features[on] + fit.intercepts).cumprod(1))
        return torch.cat(found)

    shares = {"accepted": counts[:, None] > torch.arange(K), "at the start": expected(0), "refitted": expected(REFITS)}
    return {"drafts": len(counts)} | {of: [round(x, 3) for x in y.float().mean(0).tolist()] for of, y in shares.items()}


def shared(engine: Engine) -> list[list[int]]:
    """The accepted counts of each answer; the first prompt alone fills the cache."""
    from vllm import SamplingParams

    ids = [engine.prompt([PREFIX + turns[0]])["prompt_token_ids"] for turns in read_set("mt-bench", SHARED["prompts"])]
    common = next(i for i, column in enumerate(zip(*ids, strict=False)) if len(set(column)) > 1)
    beyond = common % SHARED["block_size"]
    asked = [{"prompt_token_ids": one[:1] + one[1 + beyond :]} for one in ids]
    how = SamplingParams(temperature=0.0, max_tokens=SHARED["max_tokens"])
    outputs = [output for part in (asked[:1], asked[1:]) for output in engine.llm.generate(part, how, use_tqdm=False)]
    return [engine.counts(output.outputs[0]) for output in outputs]


def main() -> None:
    args = arms.parser(__doc__).parse_args()
    rows, counts = [], {}
    for name in (OFF, "P-EAGLE, candidates alone", "P-EAGLE"):
        with live(Interpreted(name, "peagle", K, selector=name != OFF)) as call:
            rows.append({"arm": name} | call(estimated, "alone" in name))
            print(rows[-1], flush=True)
    for keep in (False, True):
        with live(Shared(f"P-EAGLE, last block kept {keep}", "peagle", SHARED["k"], selector=True, keep=keep)) as call:
            counts[keep] = np.asarray(call(shared))
    found = {"dropped": al_of(counts[False]), "kept": al_of(counts[True])} | gain_of(counts[True], counts[False])
    how = {"k": K, "prompts": PROMPTS, "max_tokens": TOKENS, "in_flight": IN_FLIGHT, "refits": REFITS}
    report = {"estimator": how | {"arms": rows}, "block_drop": SHARED | found}
    arms.write_result(args.out, __doc__, report | provenance())


if __name__ == "__main__":
    main()
