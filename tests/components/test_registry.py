from __future__ import annotations

import importlib
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

import zoo
from zoo.components import registry
from zoo.components.contracts import Norm, Pattern
from zoo.components.registry import RegistryError, part


def test_every_part_has_a_line_a_source_and_a_working_example() -> None:
    for p in zoo.parts():
        assert p.summary.endswith((".", ";", ":")) or len(p.summary) > 10, p
        assert p.source, f"{p.family} {p.name} has no source"
        if p.family in ("quantizer", "format", "family"):
            continue
        assert type(p.small()).name == p.name


def test_parts_are_found_by_file_name() -> None:
    assert {"sdpa", "eager"} <= {p.name for p in zoo.parts("kernel")}


def test_unknown_names_give_the_nearest() -> None:
    with pytest.raises(RegistryError, match="no kernel named 'spda'; did you mean 'sdpa'"):
        registry.get("kernel", "spda")
    with pytest.raises(RegistryError, match="no family named 'kernels'; did you mean 'kernel'"):
        zoo.parts("kernels")


def test_duplicates_raise_naming_both() -> None:
    with pytest.raises(RegistryError, match=r"norm 'rms' is defined twice: by zoo\.components\.norm\.rms\.RMS and by .*Mine"):

        @part(Norm, "rms")
        @dataclass(frozen=True, kw_only=True)
        class Mine(Norm):
            """Takes a name that is taken."""


def test_a_part_must_be_of_its_family() -> None:
    with pytest.raises(TypeError, match="does not derive from Norm"):

        @part(Norm, "wrong")
        @dataclass(frozen=True, kw_only=True)
        class Wrong(Pattern):
            """Not a norm."""


def test_families_declared_twice() -> None:
    registry.declare("norm", "zoo.components.norm", registry.family_named("norm").about)
    with pytest.raises(RegistryError, match="family 'norm' is already declared"):
        registry.declare("norm", "elsewhere", "x")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another distribution with one part, named by an entry point."""
    (tmp_path / "their_parts.py").write_text(
        textwrap.dedent('''
        from dataclasses import dataclass
        from zoo.components.contracts import Pattern
        from zoo.components.registry import part

        @part(Pattern, "odd_positions", source="a test")
        @dataclass(frozen=True, kw_only=True)
        class Odd(Pattern):
            """Sees odd positions."""

            def see(self, qpos, kpos):
                return (kpos % 2 == 1) & (kpos <= qpos)
        ''')
    )
    info = tmp_path / "their-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[zoo.parts]\npattern.odd_positions = their_parts\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    registry._entry_points.cache_clear()
    yield info  # type: ignore[misc]
    registry._entry_points.cache_clear()
    registry._parts.pop(("pattern", "odd_positions"), None)
    sys.modules.pop("their_parts", None)


def test_entry_points_add_parts(plugin: Path) -> None:
    assert "odd_positions" in registry.names("pattern")
    assert "their_parts" not in sys.modules
    edited = zoo.spec("smollm2-135m", "layers.*.mixer.pattern=odd_positions")
    assert edited.layers[0].mixer.pattern.name == "odd_positions"


def test_an_entry_point_may_not_take_a_name(plugin: Path) -> None:
    (plugin / "entry_points.txt").write_text("[zoo.parts]\npattern.causal = their_parts\n")
    importlib.invalidate_caches()
    registry._entry_points.cache_clear()
    with pytest.raises(
        RegistryError, match=r"pattern 'causal' is defined twice: by zoo\.components\.pattern\.causal and by the entry point their_parts"
    ):
        registry.names("pattern")
