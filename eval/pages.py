"""Pages from templates; each is one file that needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zoo.eval.grids import plain

TEMPLATES = Path(__file__).parent / "templates"


def filled(template: str, **values: Any) -> str:
    """A page as text. values: what the template names, all of it."""
    import jinja2

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True,
                                     undefined=jinja2.StrictUndefined)  # fmt: skip
    environment.filters["plain"] = plain
    return environment.get_template(template).render(values)
