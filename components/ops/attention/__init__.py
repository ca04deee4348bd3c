"""Softmax attention as pure functions of one ``Scene``, in the loop orders in which it was published.

``reference.attention`` is the formula; every other function computes the same numbers in another order.
"""

from zoo.components.ops.attention.flash import flash_v1, flash_v2, flash_v3
from zoo.components.ops.attention.online import online
from zoo.components.ops.attention.reference import Scene, attention, naive_attention
from zoo.components.ops.attention.split import split, split_unified

__all__ = ["Scene", "attention", "flash_v1", "flash_v2", "flash_v3", "naive_attention", "online", "split", "split_unified"]
