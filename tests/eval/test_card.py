"""Model cards say what was measured, and how to load what was published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.zoo.oracle import llama_checkpoint
from zoo.eval.card import auto_class, run_of, vllm_loads, write_card
from zoo.eval.results import Results, Variant, save_results


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with two saved variants, of which one is quantized and one only zoo can load."""
    results = Results(
        environment={"zoo": "0"},
        variants=[Variant(name="baseline", perplexity=10.0, bytes=4000), Variant(name="int4", perplexity=10.5, bytes=600),
                  Variant(name="swapped", perplexity=11.0, bytes=4000)],
        recipe={"model": "org/base@main",
                "variants": [{"label": "baseline"}, {"label": "int4"}, {"label": "swapped", "model": "org/other"}]},
    )  # fmt: skip
    save_results(results, tmp_path / "results.json")
    (tmp_path / "pareto.png").write_bytes(b"a picture")
    llama_checkpoint(tmp_path / "models" / "int4")
    shutil.copytree(tmp_path / "models" / "int4", tmp_path / "models" / "swapped")
    for label, extra in (("int4", {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized",
                                                          "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}}),
                         ("swapped", {"zoo_spec": {}})):  # fmt: skip
        path = tmp_path / "models" / label / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | extra))
    return tmp_path


def test_a_run_is_found_where_its_models_lie(run: Path) -> None:
    found = run_of(run / "models" / "int4")
    assert found is not None
    assert found.variant.perplexity == 10.5
    assert sorted(found.files()) == ["pareto.png", "results.json"]


def test_results_of_other_variants_are_refused(run: Path) -> None:
    llama_checkpoint(run / "elsewhere")
    assert run_of(run / "elsewhere") is None
    with pytest.raises(ValueError, match="no variant 'elsewhere'"):
        run_of(run / "elsewhere", run)


def test_the_card_has_base_table_picture_and_recipe(run: Path) -> None:
    folder = run / "models" / "int4"
    card = write_card(folder, "me/int4", run_of(folder))
    header = yaml.safe_load(card.split("---")[1])
    assert header["base_model"] == "org/base"
    assert header["library_name"] == "transformers"
    assert "compressed-tensors" in header["tags"]
    row = next(line for line in card.splitlines() if line.startswith("| **int4** |"))
    assert "10.5" in row
    assert "| baseline |" in card
    assert "pareto.png" in card
    assert '"model": "org/base@main"' in card
    assert "vllm serve me/int4" in card


def test_what_only_zoo_loads_is_not_promised_to_others(run: Path) -> None:
    folder = run / "models" / "swapped"
    card = write_card(folder, "me/swapped", run_of(folder))
    assert "vllm" not in card
    assert "transformers" not in card
    assert 'zoo.load("me/swapped")' in card
    assert 'base_model: "org/other"' in card


def test_a_checkpoint_without_a_run_has_a_card_too(run: Path) -> None:
    folder = run / "models" / "int4"
    card = write_card(folder, "me/int4", base="a-local-folder/that is no hub id")
    assert "base_model" not in yaml.safe_load(card.split("---")[1])
    assert "What was measured" not in card


@pytest.mark.parametrize(
    ("config", "auto", "vllm"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "AutoModelForCausalLM", True),
        ({"architectures": ["GPT2LMHeadModel"]}, "AutoModelForCausalLM", True),
        ({"architectures": ["ViTForImageClassification"]}, "AutoModelForImageClassification", False),
        ({"architectures": ["BertModel"]}, "AutoModel", False),
        ({"architectures": ["LlamaForCausalLM"], "zoo_spec": {}}, None, False),
        ({"architectures": ["LlamaForCausalLM"], "quantization_config": {"config_groups": {"a": {"weights": {"num_bits": 3}}}}},
         "AutoModelForCausalLM", False),
    ],
)  # fmt: skip
def test_only_what_loads_it_is_named(config: dict[str, Any], auto: str | None, vllm: bool) -> None:
    assert auto_class(config) == auto
    assert vllm_loads(config) == vllm


def test_a_path_of_this_machine_is_not_published(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    results["recipe"]["model"] = str(run / "private")
    (run / "results.json").write_text(json.dumps(results))
    folder = run / "models" / "int4"
    card = write_card(folder, "me/int4", run_of(folder))
    assert "Made of" not in card
    assert str(run) not in card
