"""Breaks of the product, each a text replacement, and the test that must notice it: ``mutants.txt`` has them.

Greedy output notices none of them: the target corrects every wrong draft. That is why drafts are tested.

The file reads like a diff. Below the path of a product file its mutants, with a blank line between them:

    what is broken
    - the text, without its indentation; it is there exactly once in the file
    + what replaces it; nothing deletes it
    ! the test that must fail on plugin-v2        left out: DECODING, on the arm that the places tell
"""

from collections.abc import Iterator
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
    old: str  # exactly once in ``file``
    new: str
    killer: str  # pytest node id of the test that must fail
    named_arm: str  # PEAGLE_TEST_ARM for it, where its place does not tell

    @property
    def arm(self) -> str:
        """plugin-v1 runs the torch twins, plugin-v2 the kernels; "kernels" runs those without vLLM."""
        needed = (arm for place, arm in ARMS.items() if self.killer.startswith(place) or self.file.startswith(place))
        return self.named_arm or next(needed, "plugin-v1")

    def fits(self) -> bool:
        return (ROOT / self.file).read_text().count(self.old) == 1


def read(text: str) -> Iterator[Mutation]:
    for section in text.split("=== ")[1:]:
        file, _, mutants = section.partition("\n")
        for mutant in mutants.strip().split("\n\n"):
            name, *lines = mutant.split("\n")
            assert name and all(line[0] in "-+!" for line in lines), f"{file}: {mutant}"
            old, new, killer = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+!")
            killer, _, arm = (killer or DECODING).partition(" on ")
            yield Mutation(name, file, old, new, killer, arm)


MUTATIONS = tuple(read(Path(__file__).with_name("mutants.txt").read_text()))
