"""``zoo pull`` and ``zoo push``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pull(model: Annotated[str, typer.Argument(help="org/name, or org/name@revision.")],
         to: Annotated[Path | None, typer.Option(help="A folder; by default the hub's cache.")] = None,
         include: Annotated[list[str] | None, typer.Option(help="Glob of files to fetch; repeatable. By default weights in "
                                                           "safetensors, configs and tokenizer.")] = None) -> None:  # fmt: skip
    """Fetch a checkpoint from the Hugging Face hub; every fetched file is checked against the hub's hash. Goes on where it broke off."""
    from zoo.hub import pull

    found = pull(model, to, files=include)
    typer.echo(f"{found.folder}: {len(found.files)} files, {size(found.bytes)}; {len(found.fetched)} fetched and checked")


def push(folder: Annotated[Path, typer.Argument(help="A saved checkpoint, as RUN/models/LABEL of a recipe's run.")],
         name: Annotated[str, typer.Argument(help="org/name on the hub; made if it is not there.")],
         results: Annotated[Path | None, typer.Option(help="results.json of the run that measured it; found by itself beside "
                                                      "RUN/models.")] = None,
         base: Annotated[str | None, typer.Option(help="The model that it was made of; by default the recipe's.")] = None,
         revision: Annotated[str | None, typer.Option(help="A branch; made if it is not there.")] = None,
         private: Annotated[bool, typer.Option(help="Make it visible to its owners alone.")] = False,
         overwrite: Annotated[bool, typer.Option(help="Replace files that are there.")] = False,
         message: Annotated[str, typer.Option(help="Of the commit.")] = "Upload by zoo",
         dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files and show the model card; sends nothing.")] = False,
         ) -> None:  # fmt: skip
    """Publish a checkpoint on the Hugging Face hub with a model card written from its results."""
    from zoo.eval.card import run_of, write_card
    from zoo.hub import gather, push

    check_name(name)
    run = run_of(folder, results)
    publication = gather(folder)
    card = write_card(folder, name, run, base)
    publication = gather(folder, {"README.md": card.encode(), **(run.files() if run else {})})
    sizes = publication.sizes()
    for file, count in sizes.items():
        typer.echo(f"  {file}  {size(count)}")
    total = f"{len(sizes)} files, {size(sum(sizes.values()))}"
    if dry_run:
        typer.echo(f"{total} would be published as {name}; README.md would say:\n\n{card}")
        return
    typer.echo(f"published {total}: " + push(publication, name, revision=revision, private=private, overwrite=overwrite, message=message))


def check_name(name: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as e:
        raise ValueError(f"{name!r} is no name on the hub: {e}") from None
    if "/" not in name:
        raise ValueError(f"{name!r} has no owner; give it as OWNER/{name}")


def size(count: int) -> str:
    """Bytes for people."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
