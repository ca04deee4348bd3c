""".types/zoo shows the same files as an installed zoo."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_links_show_every_entry_of_zoo_and_the_folders_beside_it() -> None:
    wanted = {path.name: path for path in (ROOT / "zoo").iterdir() if path.name != "__pycache__"}
    wanted |= {name: ROOT / name for name in ("components", "quantize", "eval", "recipes")}
    links = {path.name: path.resolve() for path in (ROOT / ".types/zoo").iterdir()}
    assert links == wanted, "the links are out of date: run `make types-links` and commit the result"
