"""Breaks of the product, each a text replacement, and the test that must notice it.

Greedy output notices none of them: the target corrects every wrong draft. That is why drafts are tested.
"""

from dataclasses import dataclass

DECODING = "tests/drafts/test_basics.py::test_decoding"


@dataclass(frozen=True)
class Mutation:
    """One break.

    Attributes:
        old: text that stands exactly once in ``file``.
        killer: pytest node id of the test that must fail.
        arm: PEAGLE_TEST_ARM for it; plugin-v1 runs the torch twins, plugin-v2 the kernels; kernels and compile
            import no vLLM, and run under Triton's interpreter and without it.
    """

    name: str
    file: str
    old: str
    new: str
    killer: str = DECODING
    arm: str = "plugin-v1"
