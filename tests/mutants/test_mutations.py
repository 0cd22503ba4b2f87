"""Every mutant can be planted, and the test that must notice it exists: `make mutants` runs them."""

import pytest

from tests.mutants.run import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutant_fits_the_code(mutation: Mutation) -> None:
    assert mutation.fits() and mutation.old != mutation.new
    assert mutation.arm in ("kernels", "plugin-v1", "plugin-v2")
    file, _, test = mutation.killer.partition("::")
    assert f"def {test.partition('[')[0]}" in (ROOT / file).read_text()
