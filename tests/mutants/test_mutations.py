"""Every mutant can be planted, and the test that must notice it exists: `make mutants` runs them."""

from pathlib import Path

import pytest

from tests.mutants.mutation import Mutation
from tests.mutants.mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutant_fits_the_code(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    file, _, test = mutation.killer.partition("::")
    assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text()
