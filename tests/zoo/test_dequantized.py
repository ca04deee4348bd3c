"""Checkpoints that are published in MXFP4 or in FP8 blocks load as the plain ones that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import zoo
from tests.zoo.families.harness import Case, ids
from zoo.checkpoint import CheckpointError
from zoo.components.spec import TensorInfo
from zoo.dequantized import fp8, from_fp8, from_mxfp4
from zoo.weights import linears

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "head_dim": None,
          "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 2,
          "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip


def codes(*shape: int, most: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_mxfp4_equals_transformers_bit_for_bit() -> None:
    blocks, scales = codes(3, 10, 2, 16), 97 + codes(3, 10, 2, most=60, seed=1)
    got, want = from_mxfp4(blocks, scales), convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert got.shape == want.shape == (3, 64, 10)
    assert torch.equal(got, want)


def test_mxfp4_by_hand() -> None:
    """The even element lies in the low half of a byte; scale 128 doubles."""
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[..., 0] = 0x72  # 1 and then 6
    blocks[..., 1] = 0x0F  # -6 and then 0
    got = from_mxfp4(blocks, torch.tensor([[[128]]], dtype=torch.uint8))
    assert got.flatten().tolist() == [2.0, 12.0, -12.0, 0.0] + [0.0] * 28


def test_fp8_blocks_may_be_cut_at_the_edges() -> None:
    weight, scale = torch.randn(5, 7).to(torch.float8_e4m3fn), torch.rand(2, 3)
    want = torch.stack([torch.stack([weight[r, c].float() * scale[r // 4, c // 3] for c in range(7)]) for r in range(5)])
    assert torch.equal(from_fp8(weight, scale, [4, 3]), want)
    assert torch.equal(from_fp8(weight, scale[0, 0], None), weight.float() * scale[0, 0])


def rewritten(folder: Path, out: Path, tensors: dict[str, Tensor], quantization: Any) -> Path:
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plain checkpoint of transformers whose experts are on MXFP4's grid, and the same in MXFP4."""
    plain, root = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("packed")
    case = Case("gpt_oss", "GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64})
    case.write(plain)
    tensors = load_file(plain / "model.safetensors")
    packed = dict(tensors)
    for seed, name in enumerate(n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))):
        experts, inputs, rows = tensors[name].shape
        blocks, scales = codes(experts, rows, inputs // 32, 16, seed=seed), 120 + codes(experts, rows, inputs // 32, most=5, seed=seed)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return plain, rewritten(plain, root / "mxfp4", packed, MXFP4)


@torch.no_grad()
def test_gpt_oss_in_mxfp4(gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    plain, packed = gpt_oss
    model, x = zoo.load(packed, quantized="dequantize"), ids(1)
    assert model.spec == zoo.spec(plain)
    assert torch.equal(model(x), zoo.load(plain)(x))
    narrow = zoo.load(packed, dtype="bfloat16", quantized="dequantize")
    assert narrow.get_parameter("layers.0.mlp.experts.0.up.weight").dtype == torch.bfloat16
    result = zoo.save(model, tmp_path / "saved")  # as the plain checkpoint that it has become
    assert result.transformers is None
    assert "quantization_config" not in json.loads((result.folder / "config.json").read_text())
    assert load_file(result.folder / "model.safetensors").keys() == load_file(plain / "model.safetensors").keys()


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plain checkpoint whose matrices are products of FP8 numbers and block scales, and the same in FP8."""
    plain, root = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("packed")
    Case("deepseek_v3", "DeepseekV3ForCausalLM", LATENT).write(plain)
    tensors = load_file(plain / "model.safetensors")
    packed = dict(tensors)
    for name in (n for n in tensors if n.endswith("_proj.weight")):
        scale = torch.rand(-(-tensors[name].shape[0] // 16), -(-tensors[name].shape[1] // 16)) / 8
        packed |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
        tensors[name] = from_fp8(packed[name], scale, [16, 16])
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return plain, rewritten(plain, root / "fp8", packed, FP8)


@torch.no_grad()
def test_deepseek_in_fp8(deepseek: tuple[Path, Path]) -> None:
    plain, packed = deepseek
    model = zoo.load(packed, quantized="dequantize")
    assert model.spec == zoo.spec(plain)
    assert torch.equal(model(ids(1)), zoo.load(plain)(ids(1)))


@torch.no_grad()
def test_deepseek_stays_in_fp8(deepseek: tuple[Path, Path]) -> None:
    """Every matrix that was in FP8 is, experts too, and stands for the plain one."""
    plain, packed = (zoo.load(folder) for folder in deepseek)
    kinds = {path: child.spec.name for path, child in linears(packed.spec)}
    wanted = {path for path in kinds if "projection" in path or (".mlp." in path and "router" not in path)}
    wanted -= {path for path in kinds if path.endswith("kv_down")}  # kv_a_proj_with_mqa is plain in these files
    assert {path for path, kind in kinds.items() if kind == "packed_float"} == wanted
    for path in kinds:
        ours, exact = (m.get_submodule(path).dense_weight(torch.float32) for m in (packed, plain))  # type: ignore[operator]
        assert torch.equal(ours, exact), path
    assert (packed(ids(1)) - plain(ids(1))).norm() < 0.2 * plain(ids(1)).norm()  # the inputs are rounded to FP8


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size must be \[rows, columns\] or null"),
        ({"weight_block_size": [8, 8]}, r"_scale_inv must be there, \[\d+, \d+\], for model\.layers"),
        ({"quant_method": "fp9"}, "quant_method: 'fp9' is not supported"),
    ],
)
def test_what_does_not_fit_is_named(deepseek: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    _, packed = deepseek
    broken = rewritten(packed, tmp_path / "broken", load_file(packed / "model.safetensors"), FP8 | change)
    with pytest.raises(CheckpointError, match=reason):
        zoo.load(broken)


@pytest.mark.parametrize("quantized", ["keep", "dequantize"])
def test_missing_scales_are_named(gpt_oss: tuple[Path, Path], tmp_path: Path, quantized: Any) -> None:
    tensors = load_file(gpt_oss[1] / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.down_proj_scales must be there, uint8 \[4, 32, 2\]"):
        zoo.load(rewritten(gpt_oss[1], tmp_path / "broken", tensors, MXFP4), quantized=quantized)


def test_a_block_larger_than_the_weight_takes_no_memory() -> None:
    weight, scale = torch.ones(4, 8).to(torch.float8_e4m3fn), torch.full((1, 1), 2.0)
    assert torch.equal(from_fp8(weight, scale, [1_500_000_000, 128]), torch.full((4, 8), 2.0))


def test_a_vector_in_fp8_has_no_blocks_and_is_named(deepseek: tuple[Path, Path], tmp_path: Path) -> None:
    tensors = load_file(deepseek[1] / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    broken = rewritten(deepseek[1], tmp_path / "broken", tensors, FP8)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is \[\d+\], and a tensor of one dimension has no blocks"):
        zoo.load(broken, quantized="dequantize")


def test_scales_of_inputs_are_no_part_of_weights(tmp_path: Path) -> None:
    """Also of those that several modules share, beside a module's weight or beside stacked ones, which are plain in any case."""
    Case("phi3", "Phi3ForCausalLM", {"pad_token_id": 0}).write(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain/model.safetensors")
    packed = dict(tensors)
    for name in (n for n in tensors if n.endswith("_proj.weight")):
        packed |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.tensor(0.5)}
        packed[f"{name.removesuffix('weight')}activation_scale"] = torch.tensor(0.25)
        tensors[name] = packed[name].float() * 0.5
    save_file(tensors, tmp_path / "plain/model.safetensors", metadata={"format": "pt"})
    static = FP8 | {"activation_scheme": "static", "weight_block_size": None}
    folder = rewritten(tmp_path / "plain", tmp_path / "fp8", packed, static)
    with pytest.warns(UserWarning, match="the 8 scales that inputs are rounded by are left out"):
        plain = zoo.load(folder, quantized="dequantize")
    with pytest.warns(UserWarning, match="the 4 scales that inputs are rounded by are left out"):
        kept = zoo.load(folder)
    exact = zoo.load(tmp_path / "plain")
    for path, _ in linears(exact.spec):
        for model in (plain, kept):
            assert torch.equal(model.get_submodule(path).dense_weight(torch.float32), exact.get_submodule(path).dense_weight()), path


def test_scales_of_stacked_inputs_are_consumed() -> None:
    infos = {"experts.down_proj": TensorInfo((2, 4, 4), "float8_e4m3fn"), "experts.down_proj_scale_inv": TensorInfo((), "float32"),
             "experts.down_proj_activation_scale": TensorInfo((2,), "float32")}  # fmt: skip
    assert fp8({}, infos)["experts.down_proj"].parts == tuple(infos)
