"""Replay counts what vLLM counted, for every K at once."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peagle_tools.shared.selector_file import write_selector
from peagle_tools.train.draft_model import PEagleDraftModel
from peagle_tools.train.replay import replay
from peagle_tools.train.selector_training import new_selector, served
from peagle_vllm.heads.head import read_head
from tests.support.models import MODELS, PEAGLE, PEAGLE_REDUCED, TARGET, prompt_token_ids
from tests.support.reference import Reference

PUBLISHED = json.loads((MODELS / "RESULTS.json").read_text())
AUX_LAYERS = [2, 5, 7]
NUM_K = 7
# vLLM counts a round that begins before the last token with all its drafts, of which it knows what the target says.
TOKENS = PUBLISHED["protocol"]["max_tokens"] - 1 + NUM_K


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Tensor]]:
    """The target's greedy answers to the published prompts, with its states, as ``shift_batch`` leaves them."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    prompts = prompt_token_ids()[: PUBLISHED["protocol"]["prompts"]]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    rows = []
    with torch.no_grad():
        texts = target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
        for row, prompt in zip(texts, prompts, strict=True):
            text = row[longest - len(prompt) :]
            states = target(text[None], output_hidden_states=True).hidden_states
            hidden = torch.cat([states[layer][0] for layer in AUX_LAYERS], dim=-1)
            answer = torch.arange(len(text)) >= len(prompt)
            rows.append({"input_ids": text[1:], "hidden_states": hidden[:-1], "loss_mask": answer[1:].long()})
    return rows


@pytest.mark.parametrize("folder", [PEAGLE, PEAGLE_REDUCED], ids=["all-tokens", "reduced-vocabulary"])
def test_acceptance_is_what_vllm_counted(folder: Path, documents: list[dict[str, Tensor]]) -> None:
    """Each position over the same prompts, in models/RESULTS.json. At K = 7 the rounds are the very same ones."""
    head = PEagleDraftModel.from_pretrained(folder).float()
    replayed = replay(head, documents, NUM_K, TOKENS, chunk_rows=512)
    arms = [arm for arm in PUBLISHED["arms"] if arm["head"] == folder.name]
    assert [arm["k"] for arm in arms] == [3, 5, 7]
    for arm in arms:
        acceptance, same = replayed[arm["k"]], arm["k"] == NUM_K
        assert acceptance.length == pytest.approx(arm["al"], rel=0 if same else 0.01, abs=0.0006)
        assert list(acceptance.shares) == pytest.approx(arm["acceptance"], rel=0, abs=0.0006 if same else 0.01)


@pytest.mark.parametrize("folder", [PEAGLE, PEAGLE_REDUCED], ids=["all-tokens", "reduced-vocabulary"])
def test_a_selectors_drafts_are_walked(folder: Path, documents: list[dict[str, Tensor]], tmp_path: Path) -> None:
    """Round by round, each draft after those before it, by the reference that served drafts are compared with."""
    head, k = PEagleDraftModel.from_pretrained(folder).float(), 5
    torch.manual_seed(3)
    head.candidate_selector = selector = new_selector(head, 8, None)
    torch.nn.init.normal_(selector.predecessor_codebook, std=0.3)
    sharp = shutil.copytree(folder, tmp_path / "head")
    tables = selector.predecessor_codebook, selector.successor_codebook, selector.hidden_projection.weight
    write_selector(sharp, read_head(folder), served(*(table.detach() for table in tables)))
    reference, accepted = Reference(TARGET, sharp), []
    replayed = replay(head, documents[:6], k, TOKENS)
    for document in documents[:6]:
        first, ids = int(document["loss_mask"].nonzero()[0]), document["input_ids"].tolist()
        at, tokens = first, [0, *ids]
        drafts = reference.drafts(tokens, [*range(first, len(ids) - k)], k, document["hidden_states"])
        while at < len(ids) - k:
            truth = ids[at + 1 : at + 1 + k]
            chosen = drafts[at].after(ids[at], truth, 0).tokens
            right = next((i for i in range(k) if chosen[i] != truth[i]), k)
            accepted.append(right)
            at += right + 1
    assert (replayed[k].num_drafts, sum(replayed[k].accepted_per_position)) == (len(accepted), sum(accepted))
    head.candidate_selector = None
    assert replay(head, documents[:6], k, TOKENS) != replayed


def test_after_a_loop_nothing_is_known(documents: list[dict[str, Tensor]]) -> None:
    """As after ``max_tokens``: rounds with drafts past the end are left out."""
    head = PEagleDraftModel.from_pretrained(PEAGLE).float()
    answer = documents[0]["input_ids"].clone()
    answer[-4:] = answer[-8:-4] = answer[-12:-8]
    length = int(documents[0]["loss_mask"].sum())
    for ids, is_same in ((answer, True), (torch.cat([answer[:-1], answer[:1]]), False)):
        document = [documents[0] | {"input_ids": ids}]
        assert (replay(head, document, 5, length + 1) == replay(head, document, 5, length)) is is_same
