"""What serving engines' kernels refuse, and the README beside saved weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import zoo
from tests.quantize.models import MOE, small
from zoo.components.spec import load
from zoo.engines import readme, refusals
from zoo.model import ModelSpec
from zoo.quantize import quantize


def spec(width: int, hidden: int, heads: int, kv_heads: int, head_dim: int, storage: Any, experts: int = 0) -> ModelSpec:
    mlp: dict[str, Any] = {"name": "gated", "hidden": hidden, **dict.fromkeys(("gate", "up", "down"), storage)}
    if experts:
        mlp = {"name": "moe", "router": {"name": "top_k", "k": 1}, "experts": [{"repeat": experts, **mlp}]}
    projection = {"name": "gqa", "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, **dict.fromkeys("qkvo", storage)}
    layer = {"mixer": {"projection": projection, "position": {"name": "rope"}}, "mlp": mlp}
    return load(ModelSpec, {"width": width, "context": 64, "embed": {"name": "tokens", "vocab": 64}, "layers": [layer],
                            "head": {"name": "lm"}})  # fmt: skip


def said(*args: Any, degrees: tuple[int, ...] = (1, 2, 4, 8), **options: Any) -> list[str]:
    return [str(r).replace("layers.0.", "").replace("mixer.projection.", "") for r in refusals(spec(*args, **options), degrees)]


G128 = {"name": "packed_int", "group_size": 128}


def test_shapes_of_llama_2_7b_are_taken_everywhere() -> None:
    assert said(4096, 11008, 32, 32, 128, G128, degrees=(1, 2)) == []
    assert said(4096, 11008, 32, 32, 128, {"name": "packed_int", "group_size": 64}, degrees=(1, 2)) == []


def test_widths_that_a_cut_makes_uneven() -> None:
    """29568 / 2 = 14784 is no multiple of 128 (Qwen2.5-VL-72B)."""
    assert said(8192, 29568, 64, 8, 128, G128) == [
        "on 2 GPUs: mlp.down (14784 inputs are no multiple of 128)",
        "on 4 GPUs: mlp.down (7392 inputs are no multiple of 128)",
        "on 8 GPUs: mlp.gate, mlp.up (7392 outputs are no multiple of 64)",
        "on 8 GPUs: mlp.down (3696 inputs are no multiple of 128)",
    ]


def test_heads_that_do_not_divide() -> None:
    """SmolLM2-135M: 9 heads, and a width of 576 for every number of GPUs."""
    found = said(576, 1536, 9, 3, 64, {"name": "packed_int", "group_size": 64})
    assert "on 1 GPU: q, k, v, o (576 inputs are no multiple of 128)" in found
    assert "on 1 or 2 or 4 or 8 GPUs: mlp.gate, mlp.up (576 inputs are no multiple of 128)" in found
    assert "on 2 GPUs: q, k, v, o (9 heads do not divide among 2)" in found


def test_key_heads_that_are_fewer_than_gpus_are_repeated() -> None:
    """On 8 GPUs each has 4 of 32 query heads and one of 2 key heads: (4 + 1 + 1) * 16 = 96 outputs."""
    assert said(512, 1024, 32, 2, 16, G128, degrees=(8,))[0] == "on 8 GPUs: q, k, v (96 outputs are no multiple of 64)"


@pytest.mark.parametrize(("storage", "reason"), [
    ({"name": "packed_int", "bits": 3, "group_size": 128}, "3 bits"),
    ({"name": "packed_int", "bits": 8, "group_size": 128, "symmetric": False}, "8 bits with zero points"),
    ({"name": "packed_int", "group_size": 16}, "groups of 16"),
    ({"name": "packed_float", "element": "e2m1", "group_size": 64, "scale": "e8m0"}, "groups of 64 with 4-bit floats"),
])  # fmt: skip
def test_kinds_that_are_refused(storage: dict[str, Any], reason: str) -> None:
    assert said(512, 1024, 8, 8, 64, storage, degrees=(1,)) == [f"on 1 GPU: q, k, v, o, mlp.gate, mlp.up, mlp.down ({reason})"]


@pytest.mark.parametrize("storage", ["dense", {"name": "packed_float"}, {"name": "packed_int"},
                                     {"name": "packed_int", "group_size": 32, "symmetric": False},
                                     {"name": "packed_float", "element": "e2m1", "group_size": 16, "scale": "e4m3"}], ids=str)  # fmt: skip
def test_kinds_that_are_taken(storage: Any) -> None:
    assert said(512, 1024, 8, 8, 64, storage, degrees=(1, 2)) == []


def test_experts_have_limits_of_their_own() -> None:
    """gpt-oss' width of 2880 is no multiple of 128; experts may be as narrow as 64."""
    storage = {"name": "packed_float", "element": "e2m1", "group_size": 32, "scale": "e8m0"}
    found = said(2880, 2880, 64, 8, 64, storage, experts=2, degrees=(1,))
    assert "on 1 GPU: mlp.experts.{0,1}.down (2880 outputs are no multiple of 128)" in found
    found = said(512, 64, 8, 8, 64, {"name": "packed_int", "group_size": 32}, experts=2, degrees=(1, 2))
    assert found == ["on 2 GPUs: mlp.experts.{0,1}.gate, mlp.experts.{0,1}.up (32 outputs are no multiple of 64)",
                     "on 2 GPUs: mlp.experts.{0,1}.down (32 inputs are no multiple of 64)"]  # fmt: skip


# ---- saved folders -----------------------------------------------------------------------------------------------------------


def test_saving_warns_and_writes_how_to_load(tmp_path: Path) -> None:
    model = small()
    quantize(model, "rtn", group_size=32, rules=["*.down=keep"], progress=False)
    with pytest.warns(
        UserWarning, match=r"slower kernels than Marlin.*: on 1 GPU layers\.\{0,1\}\.mixer.*64 inputs are no multiple of 128"
    ):
        zoo.save(model, tmp_path / "quantized")
    text = (tmp_path / "quantized/README.md").read_text()
    for words in ("`name: packed_int, group_size: 32`: layers.{0,1}.mixer.projection.q", 'model = zoo.load("quantized")',
                  'AutoModelForCausalLM.from_pretrained("quantized")', "vllm serve quantized", "--model-path quantized",
                  "- on 8 GPUs: layers.{0,1}.mixer.projection.q, ", "(4 heads do not divide among 8)"):  # fmt: skip
        assert words in text
    assert zoo.load(tmp_path / "quantized").spec == model.spec


def test_what_only_zoo_reads_says_so(tmp_path: Path) -> None:
    model = small(MOE)
    quantize(model, "rtn", group_size=32, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zoo.save(model, tmp_path / "own", format="native")
        zoo.save(small(), tmp_path / "plain")
    text = (tmp_path / "own/README.md").read_text()
    for words in ("transformers does not load it: ", "vLLM does not load it.", "SGLang does not load it."):
        assert words in text
    assert "Marlin" not in text
    assert not (tmp_path / "plain/README.md").exists()


@pytest.mark.parametrize(
    ("quantization", "line"),
    [
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, 'from_pretrained("x", dtype="bfloat16")'),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, 'from_pretrained("x")'),
        ({"quant_method": "awq"}, "In transformers (with gptqmodel):"),
    ],
)
def test_the_readme_says_what_transformers_needs(quantization: dict[str, Any], line: str) -> None:
    assert line in readme(small().spec, "x", quantization, None)
