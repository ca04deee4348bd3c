"""Softmax in its published forms, and the running and merged forms that attention is built from.

All take logits in which -inf stands for "not seen" and give 0 (never NaN) where a row sees nothing; ``naive`` alone overflows.
Results have the dtype of the logits, which callers widen first (``wide``).
"""

from zoo.components.ops.softmax.reference import naive, online, safe, tempered, with_sink
from zoo.components.ops.softmax.running import Partial, Running, merge, wide

__all__ = ["Partial", "Running", "merge", "naive", "online", "safe", "tempered", "wide", "with_sink"]
