"""Breaks of the product, each a text replacement, and the test that must notice it.

Greedy output notices none of them: the target corrects every wrong draft. That is why drafts are tested.
"""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DECODING = "tests/drafts/test_basics.py::test_decoding"
# What tests of a folder need, and whoever runs a broken file of one.
ARMS = {"tests/kernels/": "kernels", "tests/v2/": "plugin-v2", "src/peagle_vllm/v2/": "plugin-v2"}


@dataclass(frozen=True)
class Mutation:
    """One break."""

    name: str
    file: str
    old: str  # stands exactly once in ``file``
    new: str
    killer: str = DECODING  # pytest node id of the test that must fail
    named_arm: str = ""  # PEAGLE_TEST_ARM for it, where its place does not tell

    @property
    def arm(self) -> str:
        """plugin-v1 runs the torch twins, plugin-v2 the kernels; "kernels" runs those without vLLM."""
        needed = (arm for place, arm in ARMS.items() if self.killer.startswith(place) or self.file.startswith(place))
        return self.named_arm or next(needed, "plugin-v1")

    def fits(self) -> bool:
        return (ROOT / self.file).read_text().count(self.old) == 1
