"""Which module is quantized how."""

from __future__ import annotations

from typing import Any

import pytest

from tests.quantize.models import MOE, small
from zoo.components.spec import SpecError
from zoo.model import ModelSpec
from zoo.quantize.contracts import Quantizer
from zoo.quantize.methods.gptq import GPTQ
from zoo.quantize.methods.rtn import RTN
from zoo.quantize.rules import plan

LAYER = ["mixer.projection.q", "mixer.projection.k", "mixer.projection.v", "mixer.projection.o", "mlp.gate", "mlp.up", "mlp.down"]
BASE = GPTQ(bits=4, group_size=32)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return small(tied=False).spec


def chosen(spec: ModelSpec, *rules: str, base: Quantizer = BASE, names: dict[str, str] | None = None) -> dict[str, Quantizer]:
    return plan(spec, base, rules, names or {})


def test_all_linear_modules_but_the_head(spec: ModelSpec) -> None:
    assert chosen(spec) == {f"layers.{i}.{name}": BASE for i in range(2) for name in LAYER}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (["*.mlp.down={bits: 8}"], GPTQ(bits=8, group_size=32)),
        (["*.mlp.down={bits: 8}", "layers.1.*={group_size: null}"], GPTQ(bits=8, group_size=None)),
        (["layers.1.*={bits: 8}", "*.mlp.down={bits: 3}"], GPTQ(bits=3, group_size=32)),
        (["*.mlp.down={name: rtn}"], RTN(bits=4, group_size=32)),
        (["*.mlp.down={name: rtn, bits: 2}"], RTN(bits=2, group_size=32)),
        (["*.mlp.down={order: activation}", "*.down={name: rtn}", "*.down={name: gptq}"], GPTQ(bits=4, group_size=32)),
        (["*.mlp.down=keep"], None),
        (["*.mlp.down=keep", "layers.1.mlp.*={bits: 8}"], GPTQ(bits=8, group_size=32)),
        ([" layers.1.mlp.down = keep "], None),
        (["model.layers.1.mlp.down_proj={bits: 8}"], GPTQ(bits=8, group_size=32)),
    ],
)
def test_later_rules_win(spec: ModelSpec, rules: list[str], expected: Quantizer | None) -> None:
    found = chosen(spec, *rules, names={"layers.1.mlp.down": "model.layers.1.mlp.down_proj"})
    assert found.get("layers.1.mlp.down") == expected
    assert found["layers.0.mixer.projection.q"] == BASE


def test_heads_by_rule(spec: ModelSpec) -> None:
    assert chosen(spec, "head.*={bits: 8}")["head.out"] == GPTQ(bits=8, group_size=32)
    with pytest.raises(ValueError, match=r"head\.out: the head is tied to the embedding"):
        chosen(small().spec, "head.out={bits: 8}")


def test_routers_are_kept_and_experts_are_not() -> None:
    found = chosen(small(MOE).spec)
    assert {f"layers.0.mlp.experts.{i}.{name}" for i in range(8) for name in ("gate", "up", "down")} <= found.keys()
    assert not any("router" in path for path in found)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("*.mpl.down=keep", r"rule '\*\.mpl\.down=keep' matches no module; near are .*mlp\.down"),
        ("*.mlp.down", "write pattern=keep"),
        ("=keep", "write pattern=keep"),
        ("*.mlp.down=skip", "the value is keep or settings in braces"),
        ("*.mlp.down={bits: 8", "not YAML"),
        ("*.mlp.down={bits: 5}", r"rule '\*\.mlp\.down=\{bits: 5\}'\.bits"),
        ("*.mlp.down={bit: 8}", "did you mean 'bits'"),
        ("*.mlp.down={name: gptk}", "did you mean 'gptq'"),
        ("*.mlp.down={name: [gptq]}", "no quantizer named"),
        ("*.mlp.down={damping: 7}", "damping: must be above 0"),
        ("*=keep", "nothing to quantize"),
    ],
)
def test_mistakes_in_rules(spec: ModelSpec, rule: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(spec, rule)


def test_every_module_that_does_not_divide_is_listed(spec: ModelSpec) -> None:
    with pytest.raises(ValueError, match="2 modules cannot be quantized") as error:
        chosen(spec, base=RTN(group_size=64))
    assert all(f"layers.{i}.mlp.down.group_size: 96 inputs do not divide into groups of 64" in str(error.value) for i in range(2))
    assert "'*.mlp.down=keep'" in str(error.value)


def test_quantized_modules_are_refused() -> None:
    model = small()
    data: dict[str, Any] = {"name": "packed_int", "group_size": 32}
    from zoo.components.contracts import Linear
    from zoo.components.spec import load
    from zoo.storages import set_storage

    spec = set_storage(model.spec, "layers.1.mlp.up", load(Linear, data))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up: is quantized already \(packed_int\)"):
        chosen(spec)
    assert "layers.1.mlp.up" not in chosen(spec, "layers.1.mlp.up=keep")


def test_errors_come_together(spec: ModelSpec) -> None:
    with pytest.raises(SpecError) as error:
        chosen(spec, "*.mlp.down={bits: 5, damp: 1}")
    assert len(error.value.errors) >= 2


@pytest.mark.parametrize(("size", "proposed"), [(64, "32"), (96, "64")])
def test_a_group_that_divides_is_proposed(size: int, proposed: str, spec: ModelSpec) -> None:
    """96 inputs of down do not divide by 64, the 64 of all others do not by 96."""
    with pytest.raises(ValueError, match=r"cannot be quantized as asked:\n(?:.*\n)*.*\{group_size: " + proposed + r"\}'; group_size: null"):
        chosen(spec, base=GPTQ(bits=4, group_size=size))
