"""A folder with config.json alone can be shown, counted and planned; what is too large for settings is not read."""

from __future__ import annotations

from pathlib import Path

import pytest

import zoo
from tests.zoo.oracle import llama_checkpoint
from zoo.checkpoint import LARGEST_JSON, CheckpointError


def test_a_config_is_enough_for_a_spec(tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "whole")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    assert zoo.spec(tmp_path / "alone") == zoo.spec(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="safetensors"):
        zoo.load(tmp_path / "alone")


def test_settings_of_a_gigabyte_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(LARGEST_JSON + 1)
    with pytest.raises(CheckpointError, match="which no settings have"):
        zoo.spec(tmp_path)
