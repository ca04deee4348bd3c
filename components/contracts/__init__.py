"""What the parts say to each other: family base classes, and the tensors that cross between the axes of the mixer.

Shape legend for the whole package: B batch, T new tokens, S visible tokens (past and new), H query heads, G key/value heads,
D head width, M model width, V vocabulary.
"""

from zoo.components.contracts.attention import Ask, Kernel, Operands, Pattern, Projection, ProjectionModule, Tokens, View, identity
from zoo.components.contracts.cache import Cache, CachePolicy, NoCache
from zoo.components.contracts.feed_forward import MLP, Chained, Experts, ExpertsModule, Precise, Router, RouterModule, Routing
from zoo.components.contracts.model import Embed, Head, HeadModule, Wiring
from zoo.components.contracts.position import Position, PositionEmbedding, PositionModule, RopeScaling
from zoo.components.contracts.step import Slot, Step
from zoo.components.contracts.weights import Linear, Norm, Prepared, StoredLinear, attach, unfilled
from zoo.components.cost import Call

__all__ = [
    "MLP",
    "Ask",
    "Cache",
    "CachePolicy",
    "Call",
    "Chained",
    "Embed",
    "Experts",
    "ExpertsModule",
    "Head",
    "HeadModule",
    "Kernel",
    "Linear",
    "NoCache",
    "Norm",
    "Operands",
    "Pattern",
    "Position",
    "PositionEmbedding",
    "PositionModule",
    "Precise",
    "Prepared",
    "Projection",
    "ProjectionModule",
    "RopeScaling",
    "Router",
    "RouterModule",
    "Routing",
    "Slot",
    "Step",
    "StoredLinear",
    "Tokens",
    "View",
    "Wiring",
    "attach",
    "identity",
    "unfilled",
]
