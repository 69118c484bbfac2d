"""Seeds derived from (seed, step), so that a generator's state never has to be saved."""

from __future__ import annotations

import numpy as np


def derive(*numbers: int) -> int:
    """A seed that depends on all of the numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> np.uint64(1))
