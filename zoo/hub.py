"""Checkpoints on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from zoo.checkpoint import CheckpointError

FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def download(reference: str, files: list[str] = FILES) -> Path:
    """``org/name`` or ``org/name@revision`` -> the local folder; uses the files that are there already when the hub is out of reach.

    files: glob patterns of what is wanted.

    The token comes from the environment or the hub's own store. Raises CheckpointError with the hub's reason.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = reference.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=files))
    except LocalEntryNotFoundError:
        raise CheckpointError(f"{reference}: the hub cannot be reached and the files are not in the local cache; "
                              "download them on a machine with a network, or give a local folder") from None  # fmt: skip
    except (HfHubHTTPError, HFValidationError) as e:
        raise CheckpointError(f"{reference}: {str(e).strip().splitlines()[0]}") from None
