"""SageAttention's number formats, emulated: every value is rounded as the kernels round it, sums are kept as wide as they keep them.

``formats`` holds the roundings, ``attention`` the four published combinations. Emulation is for accuracy, not for speed.
"""

from zoo.components.ops.sage.attention import sage1, sage2, sage2pp, sage3

__all__ = ["sage1", "sage2", "sage2pp", "sage3"]
