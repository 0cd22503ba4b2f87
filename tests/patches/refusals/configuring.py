"""Building vLLM's whole configuration for a target and a head: no engine, no weights."""

from pathlib import Path

import pytest

from peagle_vllm.serving import RefusedError


def configure(target: Path, head: Path, **changes):
    """vLLM's whole configuration for the pair; ``changes`` override entries of the speculative config."""
    from vllm.engine.arg_utils import EngineArgs

    engine = {key.removeprefix("engine_"): changes.pop(key) for key in list(changes) if key.startswith("engine_")}
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3, "parallel_drafting": True}
    speculative = {key: value for key, value in (speculative | changes).items() if value is not None}
    return EngineArgs(
        model=str(target), skip_tokenizer_init=True, dtype="float32", speculative_config=speculative, **engine
    ).create_engine_config()


def refusal(target: Path, head: Path, **changes) -> str:
    with pytest.raises(RefusedError) as refused:
        configure(target, head, **changes)
    line = str(refused.value)
    assert "\n" not in line and line.startswith("P-EAGLE refused: ")
    return line
