"""Every break, in the order in which they are tried."""

from tests.mutants.drafting import DRAFTING
from tests.mutants.heads import HEADS
from tests.mutants.training import TRAINING

MUTATIONS = (*DRAFTING, *HEADS, *TRAINING)
