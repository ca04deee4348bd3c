"""What encoders of texts share: every token sees every other, and config.json's ``architectures`` names the head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from zoo.components.contracts import Head, Pattern
from zoo.components.head.classification import Classification
from zoo.components.head.hidden import Hidden
from zoo.components.head.masked_lm import MaskedLM
from zoo.components.head.pooling import Pooling
from zoo.components.pattern.full import Full
from zoo.families._classic import Classic, refuse
from zoo.families._decoder import Config, Fields, same
from zoo.families._tower import label_fields
from zoo.model import ModelSpec
from zoo.weights import Rule, below

TASKS = {"ForMaskedLM": "masked_lm", "ForPreTraining": "masked_lm", "ForSequenceClassification": "classification", "Model": "hidden"}


@dataclass(frozen=True, kw_only=True)
class Encoder(Classic):
    """stem: what the names of transformers' classes begin with; a model without a task's head gives its last hidden states.

    tables: by the word of a head, its modules and tensors (ours -> theirs). Names below the prefix lose it in files of models without
    a task's head. unread: modules of other heads that files may hold as well.
    """

    stem: ClassVar[str]
    tables: ClassVar[Mapping[str, Mapping[str, str]]]
    unread: ClassVar[tuple[str, ...]]
    norm_key = "layer_norm_eps"

    # ---- config.json -> spec

    def settled(self, config: Config) -> Config:
        config = super().settled(config)
        refuse(config, is_decoder=False, add_cross_attention=False)
        return config

    def pattern(self, config: Config, l: int) -> Pattern:
        return Full()

    def head(self, config: Config) -> Head:
        return {"masked_lm": self.masked_lm, "classification": self.classification, "hidden": self.hidden}[self.task(config)](config)

    def task(self, config: Config) -> str:
        """The word of the head that ``architectures`` asks for; none is a model without a head."""
        named = (config.get("architectures") or [f"{self.stem}Model"])[0]
        known = {f"{self.stem}{ending}": word for ending, word in TASKS.items()}
        if named not in known:
            raise ValueError(f"architectures is {named!r}, supported are {', '.join(known)}")
        return known[named]

    @abstractmethod
    def masked_lm(self, config: Config) -> MaskedLM: ...

    @abstractmethod
    def classification(self, config: Config) -> Classification: ...

    @abstractmethod
    def hidden(self, config: Config) -> Hidden: ...

    # ---- spec -> config.json

    def loader(self, spec: ModelSpec) -> str:
        ending = next((ending for ending, word in TASKS.items() if word == spec.head.name), "Model")
        return f"{self.stem}{ending}"

    def fields(self, spec: ModelSpec, config: Config) -> Fields:
        found = super().fields(spec, config)
        return found | label_fields(spec.head.labels, config) if isinstance(spec.head, Classification) else found

    def head_fields(self, head: Head) -> Fields:
        return {"tie_word_embeddings": head.tied} if isinstance(head, MaskedLM) else {}

    # ---- names

    def rules(self, spec: ModelSpec) -> list[Rule]:
        modules = {ours: self.prefix + theirs for ours, theirs in self.beside.items()} | {"norm": self.prefix + self.final_norm}
        table = Rule.same(f"{self.prefix}{self.table}.weight", "embed.weight")
        rules = [table, *tensors(modules), *self.layer_rules(spec), *tensors(self.head_table(spec))]
        return [self.without_prefix(rule) for rule in rules] if is_bare(spec.head) else rules

    def head_table(self, spec: ModelSpec) -> dict[str, str]:
        """The names of what the head has."""
        has = spec.head.children(spec.width, spec.embed)
        return {ours: theirs for ours, theirs in self.tables.get(spec.head.name, {}).items() if ours.split(".")[1] in has}

    def without_prefix(self, rule: Rule) -> Rule:
        return replace(rule, theirs=tuple(name.removeprefix(self.prefix) for name in rule.theirs))

    def known_as(self, names: Collection[str], spec: ModelSpec) -> dict[str, str]:
        """With the prefix or without, as the head wants; the first releases call a norm's weight gamma and its bias beta."""
        modern = {n: n.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias") for n in names}
        if is_bare(spec.head):
            return {old: name.removeprefix(self.prefix) for old, name in modern.items()}
        whole = any(name.startswith(self.prefix) for name in names)
        outer = tuple(root for root in self.unread if not root.startswith(self.prefix))
        return {old: n if whole or n.startswith(outer) else self.prefix + n for old, n in modern.items()}

    def ignores(self, name: str, spec: ModelSpec) -> bool:
        own = self.head_table(spec).values()
        others = [root for root in self.unread if not any(below(root, theirs) for theirs in own)]
        return super().ignores(name, spec) or any(below(root, name) or below(root, self.prefix + name) for root in others)


def is_bare(head: Head) -> bool:
    """Whether files of a model with this head hold the encoder alone."""
    return isinstance(head, (Hidden, Pooling))


def tensors(names: Mapping[str, str]) -> list[Rule]:
    """Rules for modules, and for single tensors where a name ends in that of one."""
    single = {ours: theirs for ours, theirs in names.items() if ours.endswith((".weight", ".bias", ".segment"))}
    modules = {ours: theirs for ours, theirs in names.items() if ours not in single}
    return [*same(modules), *(Rule.same(theirs, ours) for ours, theirs in single.items())]
