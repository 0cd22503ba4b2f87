"""Targets of other architectures: answers and drafts, on every arm; ``make targets`` writes the table of all of them.

The reference knows no such target, so it drafts from the hidden states that vLLM captured. Where an arm fails, the
test says how, and fails when that ends.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny_heads
from tests.conftest import ARM
from tests.drafts import targets
from tests.drafts.recorder import DifferentError, compare, planter, record
from tests.drafts.reference import Reference
from tests.engines import Request, Settings, engine

pytestmark = pytest.mark.arm("plugin-v1", "plugin-v2", "stock-v1")

K, MAX_MODEL_LEN = 5, 160
# On both sides of a window, and across it.
LENGTHS = (5, 24, 90)
ANSWER = 12 if ARM == "plugin-v2" else 24  # the interpreter takes a tenth of a second for a row

# What happens instead of exact drafts, as a pattern of the error's words.
REFUSED = r"splits the head's over KV cache groups.* use Model Runner V2"
DIFFERENT = r"rows differ"
FAILS = {
    ("plugin-v1", "gpt_oss"): REFUSED,
    ("plugin-v1", "gemma4_text"): REFUSED,
    ("plugin-v1", "gemma4"): REFUSED,
    ("stock-v1", "gpt_oss"): r"",
    ("stock-v1", "gemma4_text"): r"",
    ("stock-v1", "gemma4"): r"",
    ("stock-v1", "mistral"): DIFFERENT,
}
Note = Callable[[str, object], None]


@pytest.fixture
def note(record_property: Note) -> Note:
    """Keeps a value of this test for the table."""
    return record_property


def words(error: BaseException) -> str:
    """The first line of an error, its type before it where it is no comparison of rows."""
    line = (str(error) or "without words").splitlines()[0]
    return line if isinstance(error, DifferentError) else f"{type(error).__name__}: {line}"


def requests() -> list[Request]:
    return [Request(f"{n}", tiny_heads.prompt(n, seed=n), ANSWER) for n in LENGTHS]


def answers(target: Path) -> dict[str, list[int]]:
    """The target's own, without speculation."""
    alone = engine(Settings(target, max_model_len=MAX_MODEL_LEN)).run(requests())
    right = {req: done.tokens for req, done in alone.items()}
    said = {token for tokens in right.values() for token in tokens[-ANSWER:]}
    assert len(said) > ANSWER, "a target that repeats itself"
    return right


def drafts(target: Path, head: Path, k: int) -> str:
    """Serve ``target`` with ``head``: "n of n" rows equal to the reference.

    Raises:
        DifferentError: rows that are not.
    """
    right = answers(target)
    live = engine(Settings(target, head, k=k, max_model_len=MAX_MODEL_LEN))
    with record(live, planter(right, tiny_heads.VOCAB), keep_hidden=True) as noted:
        finished = live.run(requests())
    assert {req: done.tokens for req, done in finished.items()} == right
    report = compare(noted, finished, Reference(None, head), k=k, max_model_len=MAX_MODEL_LEN)
    assert report.rows > ANSWER and not report.ties
    return f"{report.rows} of {report.rows}"


KS = [pytest.param(3, marks=pytest.mark.full), K, pytest.param(7, marks=pytest.mark.full)]


@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("name", targets.CONFIGS)
def test_drafts_for_a_target(name: str, k: int, tmp_path: Path, note: Note) -> None:
    target = targets.write(tmp_path, name)
    head = tiny_heads.write_head(tmp_path / "head", target, tiny_heads.HeadSpec())
    note("target", name)
    note("k", k)
    expected = FAILS.get((ARM, name))
    if expected is None:
        note("drafts", drafts(target, head, k))
        return
    with pytest.raises(Exception, match=expected) as caught:
        drafts(target, head, k)
    note("drafts", words(caught.value))


@pytest.mark.full
@pytest.mark.arm("stock-v1")
@pytest.mark.parametrize("name", targets.CONFIGS)
def test_the_target_alone_and_under_eagle3(name: str, tmp_path: Path, note: Note) -> None:
    """The controls of the table: vLLM answers as transformers does, and vLLM's EAGLE-3 does not change an answer."""
    target = targets.write(tmp_path, name)
    right = answers(target)
    note("target", name)
    note("alone", f"{sum(targets.greedy(target, r.prompt, ANSWER) == right[r.id] for r in requests())} of {len(right)}")
    head = tiny_heads.write_head(tmp_path / "head", target, tiny_heads.HeadSpec(fmt="aws"))
    try:
        live = engine(Settings(target, head, k=K, max_model_len=MAX_MODEL_LEN, parallel_drafting=False))
        finished = live.run(requests())
    except AssertionError as error:
        note("eagle3", words(error))
    else:
        note("eagle3", f"{sum(finished[req].tokens == right[req] for req in right)} of {len(right)}")
