"""Imports go one way: components <- the model (zoo) <- quantize <- eval <- recipes <- the command line and the facade."""

import sys
from collections.abc import Callable
from pathlib import Path

import grimp
import pytest

LINKS = Path(__file__).parents[2] / ".types"
MODEL = 1  # every module of zoo/ that LAYERS does not name
LAYERS = {"components": 0, "quantize": 2, "eval": 3, "recipes": 4, "": 5, "__main__": 5, "cli": 5, "commands": 5}
SHARED = {"contracts", "cost", "numerics", "ops", "registry", "repeats", "spec"}  # what a family may import


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(LINKS)
        patch.delitem(sys.modules, "zoo", raising=False)  # another test may have imported the installed one
        return grimp.build_graph("zoo", cache_dir=None)


def violations(graph: grimp.ImportGraph, allowed: Callable[[str, str], bool]) -> str:
    pairs = ((module, target) for module in graph.modules for target in graph.find_modules_directly_imported_by(module))
    return "\n".join(sorted(f"{module} imports {target}" for module, target in pairs if not allowed(module, target)))


def part(module: str, depth: int) -> str:
    """``part("zoo.components.norm.rms", 2) == "norm"``; "" for the packages above."""
    return [*module.split("."), "", ""][depth]


def layer(module: str) -> int:
    return LAYERS.get(part(module, 1), MODEL)


def test_every_file_is_seen(graph: grimp.ImportGraph) -> None:
    files = [path.relative_to(LINKS) for top in (LINKS / "zoo").iterdir() for path in [top, *top.rglob("*.py")] if path.suffix == ".py"]
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files}
    assert modules == graph.modules, "a folder has no __init__.py, or the links are out of date (`make types-links`)"


def test_no_module_imports_a_layer_above_its_own(graph: grimp.ImportGraph) -> None:
    wrong = violations(graph, lambda module, target: layer(target) <= layer(module))
    assert not wrong, wrong


def test_families_of_parts_do_not_import_each_other(graph: grimp.ImportGraph) -> None:
    def allowed(module: str, target: str) -> bool:
        family, other = part(module, 2), part(target, 2)
        return layer(module) > 0 or family == "" or other in {family, *SHARED}

    wrong = violations(graph, allowed)
    assert not wrong, f"a family imports itself and {sorted(SHARED)} only, other parts come through the registry:\n{wrong}"
