"""The gated delta rule: the recurrence inside Gated DeltaNet (Yang et al., arXiv 2412.06464, eq. 10).

`sequential` is the definition, `chunked` the form for whole prompts, `replay` the form for decode
rounds. They compute the same function; the tests hold them against each other.
"""

from model.kernels.gated_delta_rule.chunked import chunked
from model.kernels.gated_delta_rule.reference import replay, sequential

__all__ = ["chunked", "replay", "sequential"]
