"""Linear attention with a decaying state: S_t = exp(decay_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t.

Without decay it is Katharopoulos et al. 2020, with a fixed decay per head it is lightning attention or RetNet, with one per token and
key channel it is gated linear attention. ``recurrent`` is the definition, ``chunked`` the form for many tokens at once.
"""

from zoo.components.ops.linear_attention.chunked import chunked
from zoo.components.ops.linear_attention.reference import recurrent

__all__ = ["chunked", "recurrent"]
