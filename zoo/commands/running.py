"""``zoo generate`` and ``zoo classify``: models at work."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from zoo.commands.options import Loading, ModelArgument, with_loading
from zoo.commands.output import console


@with_loading()
def generate(loading: Loading, model: ModelArgument, prompt: str, max_new_tokens: int = 128, temperature: float = 0.0,
             top_k: int | None = None, top_p: float | None = None, min_p: float | None = None, repetition_penalty: float = 1.0,
             seed: int = 0, stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer. Repeatable.")] = None,
             chat: Annotated[bool, typer.Option(help="Put the prompt into the model's chat template.")] = False) -> None:  # fmt: skip
    """Continue a prompt, printing the text as it comes."""
    from zoo.generation import stream

    loaded = loading.load(model)
    asked = [{"role": "user", "content": prompt}] if chat else prompt
    for piece in stream(loaded, asked, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                        repetition_penalty=repetition_penalty, seed=seed, stop=stop or ()):  # fmt: skip
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


@with_loading()
def classify_images(loading: Loading, model: ModelArgument, image: Annotated[list[Path], typer.Argument(help="Image files.")],
                    top: Annotated[int, typer.Option(help="Labels to show of each.")] = 5,
                    json_out: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
                    batch_size: int = 16) -> None:  # fmt: skip
    """Say what is on images, most likely label first."""
    from zoo.classify import as_data, as_table, classify

    scores = classify(loading.load(model, lazy=True), image, top=top, batch_size=batch_size)
    if json_out:
        sys.stdout.write(json.dumps(as_data(image, scores), indent=2) + "\n")
    else:
        console().print(as_table(image, scores))
