"""The contract of checkpoint families: what a config.json means, and which tensor is which."""

from __future__ import annotations

import dataclasses
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from zoo.components import registry
from zoo.components.contracts import CachePolicy, Experts, Kernel, Linear
from zoo.components.spec import Spec, compact, diff, load, transform
from zoo.model import ModelSpec
from zoo.weights import Rule

if TYPE_CHECKING:
    from zoo.multi_token import StoredDepths


@dataclass(frozen=True, kw_only=True)
class Family(Spec):
    """A family of checkpoints. Its part name is the ``model_type`` of config.json.

    architecture: what config.json calls the class that loads it. ignored: pattern of tensors that are in files but are no weights.
    left_out: pattern of weights in files that are no part of the model, as a vision tower; loading and saving name them.
    spelling: this family's words for config fields, by the usual word. towers: of a checkpoint that holds several models, for each of
    their names the config fields that say how it is read alone (see zoo.towers). filled: whether rows of texts are filled with the
    padding id to the whole context, all of which tokens see.
    """

    family: ClassVar[str] = "family"
    architecture: ClassVar[str] = ""
    ignored: ClassVar[str] = r"(?!)"
    left_out: ClassVar[str] = r"(?!)"
    spelling: ClassVar[Mapping[str, str]] = {}
    towers: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    filled: ClassVar[bool] = False

    @abstractmethod
    def read(self, config: Mapping[str, Any]) -> ModelSpec:
        """config.json -> spec. Raises KeyError for a field that must be there and ValueError for a value that is not supported."""

    @abstractmethod
    def fields(self, spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config fields that describe a spec; ``config`` shows in which spelling. May raise ValueError through ``expect``."""

    def write(self, spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
        """spec -> config.json that transformers loads, over ``config``, whose other fields are kept.

        Raises ValueError for a spec that the family's code cannot run: what is written is read back and must say the same.
        """
        wanted = architecture(spec)
        loader = self.loader(wanted)
        written = {**config, "architectures": [loader] if loader else [], "model_type": self.name, **self.fields(wanted, config)}
        rows = compact(diff(architecture(self.read(written)), wanted))
        if rows:
            lost = "; ".join(f"{path} is {have} where it can only say {says}" for path, says, have in rows)
            raise ValueError(f"a {self.name} config cannot say all of this model: {lost}")
        return written

    def loader(self, spec: ModelSpec) -> str:
        """What config.json calls the class that loads a spec; it differs where heads do."""
        return self.architecture

    @abstractmethod
    def rules(self, spec: ModelSpec) -> list[Rule]:
        """The weight table; rules for tensors that the spec does not have are left out by the caller."""

    def rules_for(self, spec: ModelSpec, names: Collection[str]) -> list[Rule]:
        """``rules`` in the layout of files that hold tensors of these names, for families whose files come in several layouts."""
        return self.rules(spec)

    def known_as(self, names: Collection[str], spec: ModelSpec) -> dict[str, str]:
        """Name of each tensor in the files -> its name in the table, for files that spell names in another way."""
        return {name: name for name in names}

    def multi_token(self, config: Mapping[str, Any]) -> StoredDepths | None:
        """The modules beside the model that predict more tokens ahead, None for checkpoints without. See zoo.multi_token.load."""
        return None

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        """Whether a tensor that is in the files is no weight."""
        return re.fullmatch(self.ignored, name) is not None

    def leaves_out(self, name: str, spec: ModelSpec) -> bool:
        """Whether a weight that is in the files is no part of the model."""
        return re.fullmatch(self.left_out, name) is not None


P = TypeVar("P", bound=Spec)


def expect(part: Spec, kind: type[P]) -> P:
    """The part, if it is of the kind that a family's config can describe. Raises ValueError naming both."""
    if not isinstance(part, kind):
        raise ValueError(f"the config can only say {kind.family} {kind.name}, the model has {part.name}")
    return part


def architecture(spec: ModelSpec) -> ModelSpec:
    """The spec without what changes nothing in its function: storages, exact kernels, dispatches and caches are the defaults."""
    plain = transform(spec, _plain)
    return dataclasses.replace(plain, cache=load(CachePolicy, "dense")) if spec.cache.transparent else plain


def _plain(spec: Spec) -> Spec:
    if isinstance(spec, Linear):
        return load(Linear, "dense")
    if isinstance(spec, Experts) and spec.exact:
        return load(Experts, "grouped")
    return load(Kernel, "sdpa") if isinstance(spec, Kernel) and spec.softmax else spec


def family_for(config: Mapping[str, Any], reference: str) -> Family:
    """The family that a config names. Raises ValueError listing the known ones."""
    word = str(config.get("model_type", "")).replace("-", "_")
    known = registry.names("family")
    if word not in known:
        raise ValueError(f"{reference}: model_type {config.get('model_type')!r} is not known; known: {', '.join(known)}")
    part = registry.get("family", word).spec
    assert issubclass(part, Family)
    return part()
