"""Targets of other architectures: answers and drafts, on every arm; ``make targets`` writes the table of all of them.

The reference knows no such target, so it drafts from the hidden states that vLLM captured. Where an arm fails, the
test says how, and fails when that ends. Targets that read images are run where torchvision is (`make torchvision`).
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from peagle_tools.shared.provenance import provenance
from tests.conftest import ARM
from tests.drafts import targets
from tests.support import random_heads as tiny_heads
from tests.support.engines import Request, Settings, engine, without_speculation
from tests.support.recorder import DifferentError, serve_exactly
from tests.support.reference import Reference

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2", "stock-v1")

K, MAX_MODEL_LEN = 5, 160
NAMES = [*targets.CONFIGS, *(targets.WITH_IMAGES if find_spec("torchvision") else ())]
# Of stock vLLM's one defect is enough of ``make test``.
FULL = NAMES[1:] if ARM == "stock-v1" else []
# On both sides of a window, and across it.
LENGTHS = (5, 24, 90)
ANSWER = 12 if ARM == "plugin-v2" else 24  # the interpreter takes a tenth of a second for a row

# What happens instead of exact drafts, as a pattern of the error's words.
SPLIT = r"splits the head's layers over KV cache groups.* on a GPU use Model Runner V2"
STOCK_SPLIT = r"All drafting layers should belong to the same kv cache group"
# The second where the CPU has AMX tiles: vLLM then takes another MLA.
BLOCKS = r"No common block size for 16|expect weight to be bfloat16"
FAILS = {
    **{("plugin-v1", name): SPLIT for name in ("gpt_oss", "gemma4_text", "gemma4")},
    **{("stock-v1", name): STOCK_SPLIT for name in ("gpt_oss", "gemma4_text", "gemma4")},
    ("stock-v1", "mistral"): r"rows differ",
    **{(arm, "deepseek_v2"): BLOCKS for arm in ("plugin-v1", "plugin-v2", "stock-v1")},
}


def note(target: str, k: int, drafts: str) -> None:
    """For the table: add to the file that PEAGLE_TARGETS names."""
    if path := os.environ.get("PEAGLE_TARGETS"):
        results = json.loads(Path(path).read_text()) | provenance()
        name = target + ", with an image" * (target in targets.WITH_IMAGES)
        results["targets"].setdefault(name, {})[f"{ARM}, K={k}"] = drafts
        Path(path).write_text(json.dumps(results, indent=1) + "\n")


def requests(with_image: bool) -> list[Request]:
    text = [Request(f"{n}", tiny_heads.prompt(n, seed=n), ANSWER) for n in LENGTHS]
    if not with_image:
        return text
    prompt = *tiny_heads.prompt(6, seed=2), targets.AROUND_IMAGES["image_token"], *tiny_heads.prompt(5, seed=3)
    return [text[1], Request("image", prompt, ANSWER, image=targets.image())]


def drafts(target: Path, head: Path, k: int) -> str:
    """Serve ``target`` with ``head``: "n of n" rows equal to the reference, or DifferentError."""
    with_image = target.name in targets.WITH_IMAGES
    asked, llm = requests(with_image), (("skip_tokenizer_init", False),) * with_image
    alone = without_speculation(Settings(target, max_model_len=MAX_MODEL_LEN, llm=llm), asked)
    right = {req: done.tokens for req, done in alone.items()}
    assert len({t for tokens in right.values() for t in tokens[-ANSWER:]}) > ANSWER, "a target that repeats itself"
    live = engine(Settings(target, head, k=k, max_model_len=MAX_MODEL_LEN, llm=llm))
    report, _ = serve_exactly(live, asked, Reference(None, head), right, keep_hidden=True)
    assert report.rows >= 6 and not report.ties
    return f"{report.rows} of {report.rows}"


@pytest.mark.parametrize("k", [pytest.param(3, marks=pytest.mark.full), K, pytest.param(7, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if n in FULL else ()) for n in NAMES])
def test_drafts_for_a_target(name: str, k: int, tmp_path: Path):
    target = targets.write(tmp_path, name)
    head = tiny_heads.write_head(tmp_path / "head", target, tiny_heads.HeadSpec())
    expected = FAILS.get((ARM, name))
    if expected is None:
        note(name, k, drafts(target, head, k))
        return
    with pytest.raises(Exception, match=expected) as caught:
        drafts(target, head, k)
    first = str(caught.value).splitlines()[0]
    note(name, k, first if caught.type is DifferentError else f"{caught.typename}: {first}")
