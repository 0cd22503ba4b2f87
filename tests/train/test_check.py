"""vLLM's answers are compared with replay as far as they are the held-out ones."""

import json
from pathlib import Path

import pytest

from peagle_tools.shared import engines
from peagle_tools.shared.errors import ToolError
from peagle_tools.train.check import answer, check, same_text
from peagle_tools.train.documents import read_rows
from peagle_tools.train.peagle_yaml import read_config
from tests.train.runs import toy_run, train

KEPT = 30  # tokens until vLLM's answer is another text


@pytest.mark.parametrize(("shared", "rounds"), [(8, [(2, 2), (0, 1), (1, 1)]), (7, [(2, 2), (0, 1)]), (3, []), (0, [])])
def test_rounds_of_the_same_text(shared: int, rounds: list[tuple[int, int]]) -> None:
    """At K = 3, after tokens 0, 3 and 4: of each, all three drafts are verified by tokens that are the same."""
    text = [*range(10, 20)]
    served = [*text[:shared], 0, 0, 0]
    assert [*same_text(served, [2, 0, 1, 3, 3], text, [2, 9, 9, 1, 1, 9, 0, 9, 9, 9], 3)] == rounds


def test_the_engine_gets_no_key_of_the_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.Pair, "engine", lambda pair, *_: (_ for _ in ()).throw(TypeError(pair.arguments)))
    given = {"dtype": "float32", "default_chat_template_kwargs": {}, "data_parallel_size": 8}
    with pytest.raises(TypeError, match=r"\{'dtype': 'float32'\}"):
        answer(engines.Pair("target", "head", given), [[1]], 3, 4)


def test_another_text_has_another_al(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rounds of the same text decide; without any, nothing was compared."""
    file = toy_run(tmp_path / "run", [(60, 4)] * 12, every={"checkpoint": 2, "replay": 2}, optimizer={"steps": 2})
    train(file)
    config = read_config(file)
    state = json.loads((config.run / "checkpoints/best/training_state.json").read_text())
    texts = [row["input_ids"][4:] for row in read_rows(config).with_format(None)][-config.data.held_out :]
    replayed = [[1] * len(text) for text in texts]
    (config.run / "checkpoints/best/training_state.json").write_text(json.dumps(state | {"replayed": replayed}))
    assert [len(own) for own in state["replayed"]] == [len(text) for text in texts]

    def served(kept: int, accepted: list[int]) -> str:
        """``accepted`` drafts in the rounds of the same text, and none after it."""
        answers = [([*text[:kept], *(kept + 8) * [-1]], accepted + 20 * [0]) for text in texts]
        monkeypatch.setattr(engines, "in_process", lambda *_: answers)
        return check(config)

    assert "in 56 rounds of the same text 2.000, 2.000 by replay" in served(KEPT, 15 * [1])
    more = config.model_copy(update={"data": config.data.model_copy(update={"held_out": len(texts) + 1})})
    with pytest.raises(ToolError, match="best: has 4 replayed answers, where data"):
        check(more)
    for kept, accepted in ((KEPT, [2, *14 * [1]]), (0, 15 * [1])):
        with pytest.raises(ToolError, match="step 2: more than 2% apart, or no text in common: training"):
            served(kept, accepted)
