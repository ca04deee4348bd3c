"""Attention over a sequence that is spread over processes: queries stay, keys and values go round the ring of processes.

``ring`` lets autograd run the exchange backwards and keeps every block that passed; ``ring_flash`` keeps only its own block and lets
keys and values go round once more in the backward pass. Positions say what is seen, so any order of tokens will do.
"""

from zoo.components.ops.ring.exchange import Ring
from zoo.components.ops.ring.flash import ring_flash
from zoo.components.ops.ring.order import striped, zigzag
from zoo.components.ops.ring.reference import ring

__all__ = ["Ring", "ring", "ring_flash", "striped", "zigzag"]
