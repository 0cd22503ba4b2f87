"""The smallest draft tests, one for each thing that can go wrong. ``tests/mutants`` names them.

Each runs in a second on V1 and in ten under the interpreter on V2; ``test_exact.py`` is the thorough one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_heads
from tests.conftest import ARM
from tests.drafts.recorder import Recording, Report, compare, planter, record
from tests.drafts.reference import Reference
from tests.engines import Engine, Finished, Request, Settings, engine

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2")

K = 4
MAX_MODEL_LEN = 96


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    target = tiny_heads.write_target(folder / "target")
    return target, tiny_heads.write_head(folder / "head", target, tiny_heads.HeadSpec())


def start(pair: tuple[Path, Path], k: int = K, **changes: Any) -> Engine:
    return engine(Settings(*pair, k=k, max_model_len=MAX_MODEL_LEN, **changes))


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    gen = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, tiny_heads.MASK_TOKEN, (length,), generator=gen).tolist())


def run(live: Engine, right: dict[str, list[int]], requests: list[Request]) -> tuple[Recording, dict[str, Finished]]:
    """Run with planted drafts; ``right`` are the unspeculated sequences."""
    with record(live, planter(right, tiny_heads.VOCAB)) as noted:
        return noted, live.run(requests)


def exact(pair: tuple[Path, Path], live: Engine, requests: list[Request]) -> Report:
    reference = Reference(*pair)
    right = {r.id: greedy(reference, r) for r in requests}
    noted, finished = run(live, right, requests)
    report = compare(noted, finished, reference, k=live.settings.k, max_model_len=MAX_MODEL_LEN)
    print(report)
    assert {req: done.tokens for req, done in finished.items()} == right
    return report


def greedy(reference: Reference, request: Request) -> list[int]:
    """The target's own continuation, by the simulation: no engine is needed for it."""
    tokens = list(request.prompt)
    with torch.no_grad():
        for _ in range(request.max_tokens):
            last = reference.target.states(torch.tensor(tokens))[-1][-1:]
            tokens.append(int(reference.target.logits(last).argmax()))
    return tokens


def test_decoding(pair: tuple[Path, Path]):
    """Prompts in one piece, then decode batches of two with some drafts refused."""
    report = exact(pair, start(pair), [Request("a", prompt(9), 24), Request("b", prompt(30, 1), 24)])
    assert len(report.rejections) > 2


def test_chunked_prefill_beside_decoding(pair: tuple[Path, Path]):
    """Chunks that are not the last take the next prompt token, and decoding goes on beside them."""
    requests = [Request("a", prompt(5), 20), Request("chunked", prompt(80, 1), 10, arrives=2)]
    report = exact(pair, start(pair, token_budget=32), requests)
    assert report.dropped["partial prefill"] > 0


def test_next_to_max_model_len(pair: tuple[Path, Path]):
    """One request reaches the end of its sequence; the other must not notice, and the last drafts are right."""
    requests = [Request("end", prompt(MAX_MODEL_LEN - 14), 14), Request("other", prompt(20, 1), 20)]
    report = exact(pair, start(pair, k=8), requests)
    assert report.near_end > 1


def test_fewer_drafts_some_steps(pair: tuple[Path, Path]):
    """Dynamic K: two of four drafts where two requests run, none where three do; nobody's KV may miss a row."""
    schedule = [(1, 1, K), (2, 2, K // 2), (3, 4, 0)]
    live = start(pair, speculative=(("num_speculative_tokens_per_batch_size", schedule),))
    requests = [
        Request("a", prompt(9), 30),
        Request("b", prompt(30, 1), 18, arrives=3),
        Request("c", prompt(12, 2), 6, arrives=6),
    ]
    reference = Reference(*pair)
    right = {r.id: greedy(reference, r) for r in requests}
    noted, finished = run(live, right, requests)
    report = compare(noted, finished, reference, k=K, max_model_len=MAX_MODEL_LEN)
    print(report)
    assert {len(row.draft) for row in noted.rows} == {0, K // 2, K}
    assert {req: done.tokens for req, done in finished.items()} == right


def test_seeded_probabilistic_drafts_belong_to_their_request(pair: tuple[Path, Path]):
    """A seeded request draws the same drafts alone and beside others, whose seeds differ."""
    live = start(pair, speculative=(("draft_sample_method", "probabilistic"),))

    def request(name: str, seed: int) -> Request:
        return Request(name, prompt(20, seed), 8, sampling=(("temperature", 1.0), ("seed", seed)))

    def drafts(name: str, requests: list[Request]) -> list[tuple]:
        with record(live) as noted:
            live.run(requests)
        return [(row.p_last, row.bonus, row.draft) for row in noted.rows if row.req == name]

    alone = drafts("a", [request("a", 7)])
    beside = drafts("a", [request("x", 8), request("a", 7), request("y", 9)])
    assert alone == beside
    assert len({draft for _, _, draft in alone}) > 1


def test_arm_is_what_it_says(pair: tuple[Path, Path]):
    wanted = {"plugin-v1": "ParallelEagleProposer", "plugin-v2": "ParallelEagleSpeculator"}
    assert type(start(pair).drafter).__name__ == wanted[ARM]
