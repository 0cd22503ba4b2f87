"""The selector of a sharpened head: each fault is one line, convert takes it along, and inspect shows it."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from peagle_vllm.heads import selector as files
from peagle_vllm.heads.checks import check_head, check_pair
from peagle_vllm.heads.fields import vllm_fields
from peagle_vllm.heads.files import SELECTOR, SELECTOR_FOLDER
from peagle_vllm.heads.head import read_head
from peagle_vllm.sampling.selection import load_selector
from tests.heads import writers
from tests.heads.judging import only
from tests.heads.writers import DRAFT_VOCAB, SERVED, TARGET, VOCAB, Written
from tests.support.command import run
from tests.support.dialects import Tensors
from tests.support.random_heads import write_selector

RANK, TOP_K = 6, 4
Change = Callable[[dict, Tensors], object]


def sharpened(head: Written, folder: Path, change: Change = lambda selector, tensors: None) -> Path:
    """Save ``head`` with a selector; ``change`` spoils the config's entry or the tensors before."""
    return write_selector(head.save(folder), torch.Generator(), candidates=TOP_K, rank=RANK, change=change)


# What the line says -> the change to a sound selector
FAULTS: dict[str, Change] = {
    f"successor_codebook is F32 [{VOCAB}, {RANK}], this head needs floats [{DRAFT_VOCAB}, {RANK}]": (
        lambda s, t: t.update({files.SUCCESSORS: torch.ones(VOCAB, RANK)})
    ),
    "hidden_projection.weight is F32": lambda s, t: t.update({files.PROJECTION: torch.ones(RANK, 2)}),
    "successor_codebook, which is missing": lambda s, t: t.pop(files.SUCCESSORS),
    "edge_scale is [3], ": lambda s, t: t.update({files.EDGE_SCALE: torch.ones(3)}),
    "fitted to another head (hash 0123, this one's is ": lambda s, t: s.update(head_hash="0123"),
    "selector_top_k is 500, the draft vocabulary has 384 tokens": lambda s, t: s.update(selector_top_k=500),
    "candidate_selector are [6, 0], need 1 to 1024": lambda s, t: s.update(selector_top_k=0),
}


@pytest.mark.parametrize("missing", [files.EDGE_SCALE, files.UNARY_SCALE])
def test_a_missing_scale_is_1_at_every_position(missing: str, tmp_path: Path):
    folder = sharpened(writers.vllm(), tmp_path / "head", lambda selector, tensors: tensors.pop(missing))
    assert check_head(read_head(folder)) == []
    hf_config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    draft = SimpleNamespace(model=str(folder), revision=None, dtype=torch.float32, hf_config=hf_config)
    served = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=draft, draft_load_config=None),
        load_config=SimpleNamespace(load_format="auto"),
    )
    selector = load_selector(torch.nn.Module(), served, torch.device("cpu"))
    assert getattr(selector, missing.rpartition(".")[2]).tolist() == [1.0] * 5


@pytest.mark.parametrize("line", FAULTS)
def test_every_fault_is_one_line(line: str, tmp_path: Path):
    folder = sharpened(writers.vllm(draft_vocab=DRAFT_VOCAB), tmp_path / "head", FAULTS[line])
    text = only(check_head(read_head(folder)))
    assert line in text
    assert str(folder) in text
    assert "sharpen" in text.rpartition("; ")[2]


def test_an_entry_that_is_no_object_and_a_damaged_folder(tmp_path: Path):
    head = writers.vllm()
    file = sharpened(head, tmp_path / "head") / SELECTOR_FOLDER / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert "is not a complete safetensors file" in only(check_head(read_head(tmp_path / "head")))
    file.unlink()
    lines = [problem.line for problem in check_head(read_head(tmp_path / "head"))]
    assert len(lines) == 2 and all("which is missing" in line for line in lines)
    head.config[SELECTOR] = [6, 4]
    problems = check_head(read_head(head.save(tmp_path / "head")))
    assert "candidate_selector is [6, 4], needs a JSON object" in only(problems)


@pytest.mark.parametrize("to", ["vllm", "speculators"])
@pytest.mark.parametrize("name", SERVED)
def test_inspect_shows_the_selector_and_convert_takes_it_along(name: str, to: str, tmp_path: Path):
    folder, out = sharpened(SERVED[name](), tmp_path / "head"), tmp_path / "out"
    assert check_pair(read_head(folder), TARGET, num_speculative_tokens=5) == []
    assert vllm_fields(read_head(folder))[SELECTOR]  # which the runners read
    assert json.loads(run("inspect", folder, "--json").stdout)["selector"] == {"rank": RANK, "candidates": TOP_K}
    ran = run("convert", folder, out, "--to", to)
    assert ran.exit_code == 0, ran.stderr
    assert check_pair(read_head(out), TARGET, num_speculative_tokens=5) == []
    before, after = (load_file(place / SELECTOR_FOLDER / "model.safetensors") for place in (folder, out))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
