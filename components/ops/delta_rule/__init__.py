"""The delta rule with a decaying state: what the state already says of a key is taken off the value before it is added.

S'_t = exp(decay_t) S_{t-1}, S_t = S'_t + beta_t k_t (v_t - S'_t^T k_t)^T, o_t = S_t^T q_t. Without decay it is DeltaNet, with it gated
DeltaNet. ``recurrent`` is the definition, ``chunked`` the form for many tokens at once.
"""

from zoo.components.ops.delta_rule.chunked import chunked
from zoo.components.ops.delta_rule.reference import recurrent

__all__ = ["chunked", "recurrent"]
