"""Experts in MXFP4 as gpt-oss publishes them: they stay packed, and are written as they were read."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import Mxfp4Config
from typer.testing import CliRunner

import zoo
from tests.quantize.models import same_bits
from tests.zoo.families.harness import TOLERANCE, Case, ids
from tests.zoo.oracle import llama_checkpoint, relative_error
from zoo.checkpoint import CheckpointError
from zoo.cli import app
from zoo.components.contracts import Linear
from zoo.components.linear.dense import Dense
from zoo.components.linear.packed_float import FloatInputs, FloatLinear, PackedFloat
from zoo.loading import weight_bytes
from zoo.quantize import quantize
from zoo.quantize.formats.mxfp4 import KEPT, MXFP4, STORAGE
from zoo.storages import format_for
from zoo.weights import linears

FORMAT = MXFP4()
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": list(KEPT)}
CASE = Case("gpt_oss", "GptOssForCausalLM", {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4,
                                             "num_experts_per_tok": 2})  # fmt: skip
EXPERTS = "model.layers.1.mlp.experts"
ONLY_EXPERTS = ["layers.*.mixer.*=keep"]


def codes(shape: tuple[int, ...], first: int, last: int, seed: int) -> Tensor:
    return torch.randint(first, last, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def rewritten(folder: Path, out: Path, tensors: dict[str, Tensor], quantization: Any = None) -> Path:
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | ({"quantization_config": quantization} if quantization else {})
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plain checkpoint, and one that differs from it in experts, which are random blocks with every code and zeros of both signs."""
    root = tmp_path_factory.mktemp("gpt_oss")
    CASE.write(root / "plain")
    tensors = load_file(root / "plain/model.safetensors")
    for seed, name in enumerate([n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]):
        experts, inputs, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = codes((experts, rows, inputs // 32, 16), 0, 256, seed)
        tensors[f"{name}_scales"] = codes((experts, rows, inputs // 32), 120, 125, seed)
    return root / "plain", rewritten(root / "plain", root / "packed", tensors, CONFIG)


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> Path:
    return folders[0]


@pytest.fixture(scope="module")
def packed(folders: tuple[Path, Path]) -> Path:
    return folders[1]


@pytest.fixture(scope="module")
def want(packed: Path) -> Tensor:
    """The logits of transformers, which decodes the experts."""
    return theirs(packed)


@torch.no_grad()
def theirs(folder: Path) -> Tensor:
    decoded = Mxfp4Config(dequantize=True)
    options = {"quantization_config": decoded, "dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()(ids(2)).logits


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def kinds(model: zoo.Model) -> dict[str, str]:
    return {path: child.spec.name for path, child in linears(model.spec)}


def weight(module: torch.nn.Module) -> Tensor:
    assert isinstance(module, FloatLinear)
    return module.dense_weight()


# ---- loading -----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_experts_stay_packed(packed: Path, want: Tensor) -> None:
    model = zoo.load(packed)
    assert zoo.spec(packed) == model.spec
    assert {path for path, kind in kinds(model).items() if kind == "packed_float"} == {p for p in kinds(model) if ".experts." in p}
    assert relative_error(model(ids(2)), want) < TOLERANCE


@torch.no_grad()
def test_plain_weights_are_read_where_they_are_wanted(packed: Path, want: Tensor) -> None:
    model = zoo.load(packed, quantized="dequantize")
    assert set(kinds(model).values()) == {"dense"}
    assert relative_error(model(ids(2)), want) < TOLERANCE
    assert torch.equal(model(ids(2)), zoo.load(packed)(ids(2)))


def test_the_even_rows_are_the_gate(packed: Path) -> None:
    model, tensors = zoo.load(packed), tensors_of(packed)
    both = convert_moe_packed_tensors(*(tensors[f"{EXPERTS}.gate_up_proj_{part}"] for part in ("blocks", "scales")), dtype=torch.float32)
    down = convert_moe_packed_tensors(*(tensors[f"{EXPERTS}.down_proj_{part}"] for part in ("blocks", "scales")), dtype=torch.float32)
    for number in range(4):
        gate, up, last = (model.get_submodule(f"layers.1.mlp.experts.{number}.{part}") for part in ("gate", "up", "down"))
        for first, part in enumerate((gate, up)):
            assert torch.equal(weight(part), both[number, :, first::2].t())
            assert torch.equal(part.get_parameter("bias"), tensors[f"{EXPERTS}.gate_up_proj_bias"][number, first::2])
        assert torch.equal(weight(last), down[number].t())
        assert torch.equal(last.get_parameter("bias"), tensors[f"{EXPERTS}.down_proj_bias"][number])


def test_a_weight_takes_four_and_a_quarter_bits(packed: Path) -> None:
    """In the spec, which ``zoo show`` counts, and in memory; the scales have a byte for 32 weights of 4 bits."""
    model = zoo.load(packed)
    held = sum(t.nbytes for t in model.get_submodule("layers.0.mlp.experts.0").buffers())
    assert held == 3 * 64 * 96 * 4.25 / 8
    assert weight_bytes(model.spec, torch.float32) == sum(t.nbytes for t in tensors_of(packed).values())


@torch.no_grad()
def test_weights_on_disk_are_streamed(packed: Path, tmp_path: Path) -> None:
    loop = ["layers.*.mlp.dispatch=loop"]
    spread = zoo.load(packed, override=loop, device_map={"": "cpu", "layers.1": "disk"}, offload_folder=tmp_path / "offload")
    assert torch.equal(spread(ids(2)), zoo.load(packed, override=loop)(ids(2)))
    zoo.save(spread, tmp_path / "saved")
    written, read = tensors_of(tmp_path / "saved"), tensors_of(packed)
    assert all(torch.equal(written[name], read[name]) for name in read)


@torch.no_grad()
def test_one_tensor_can_be_made_plain(packed: Path, want: Tensor) -> None:
    model = zoo.load(packed, override=["layers.0.mlp.experts.*.down=dense"])
    assert kinds(model)["layers.0.mlp.experts.1.down"] == "dense"
    assert kinds(model)["layers.1.mlp.experts.1.down"] == kinds(model)["layers.0.mlp.experts.1.up"] == "packed_float"
    assert relative_error(model(ids(2)), want) < TOLERANCE


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("layers.0.mlp.experts.*.up=dense", r"layers\.0\.mlp\.experts\.\{0\.\.3\}\.up lie in one tensor with packed ones"),
        ("layers.0.mlp.experts.1.down=dense", r"layers\.0\.mlp\.experts\.1\.down lie in one tensor with packed ones"),
        ("layers.0.mixer.projection.q=packed_float", r"but each of layers\.0\.mixer\.projection\.q lies in its own; keep these plain"),
    ],
)
def test_what_the_files_do_not_hold_is_named(packed: Path, override: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        zoo.load(packed, override=[override])


def cut(name: str, *index: slice) -> Any:
    return lambda tensors: tensors | {name: tensors[name][index].contiguous()}


BLOCKS, SCALES = f"{EXPERTS}.gate_up_proj_blocks", f"{EXPERTS}.gate_up_proj_scales"


def odd(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One row fewer, so that the last gate has no up."""
    return tensors | {BLOCKS: tensors[BLOCKS][:, 1:].contiguous(), SCALES: tensors[SCALES][:, 1:].contiguous()}


def narrow(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One block of 32 inputs where the model has 64."""
    return tensors | {BLOCKS: tensors[BLOCKS][:, :, :1].contiguous(), SCALES: tensors[SCALES][:, :, :1].contiguous()}


def few(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {BLOCKS: tensors[BLOCKS][:3].contiguous(), SCALES: tensors[SCALES][:3].contiguous()}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (cut(BLOCKS, slice(None), slice(None), slice(None), slice(8)),
         rf"{BLOCKS} must be uint8 \[experts, rows, blocks, 16\], it is uint8 \[4, 192, 2, 8\]"),
        (lambda t: t | {BLOCKS: t[BLOCKS].to(torch.int16)}, rf"{BLOCKS} must be uint8 .* it is int16"),
        (lambda t: {n: x for n, x in t.items() if n != SCALES}, rf"{SCALES} must be there, uint8 \[4, 192, 2\]"),
        (cut(SCALES, slice(2)), rf"{SCALES} must be there, uint8 \[4, 192, 2\]"),
        (lambda t: t | {SCALES: t[SCALES].float()}, rf"{SCALES} must be there, uint8 \[4, 192, 2\]"),
        (lambda t: {n: x for n, x in t.items() if n != BLOCKS}, "missing: .*gate_up_proj"),
        (odd, r"cannot be read as .* from the shapes \[4, 191, 2, 16\], \[4, 191, 2\]"),
        (narrow, r"experts: gate_up_proj: blocks is \[96, 1, 16\], an expert's weight of \[96, 64\] has \[96, 2, 16\]"),
        (few, "experts: gate_up_proj holds 6 weights, the model has 8 there"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(packed: Path, tmp_path: Path, change: Any, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        zoo.load(rewritten(packed, tmp_path / "broken", change(tensors_of(packed)), CONFIG))


def test_inputs_that_do_not_fill_blocks_are_refused(packed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(packed, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(CheckpointError, match=r"down_proj: group_size: 80 inputs do not divide into groups of 32"):
        zoo.load(folder)


# ---- saving ------------------------------------------------------------------------------------------------------------------


def test_what_is_read_is_written_to_the_bit(packed: Path, want: Tensor, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        result = zoo.save(zoo.load(packed), tmp_path / "saved")  # without a word of the format: it is the family's own
    assert result.transformers is None
    written, read = tensors_of(result.folder), tensors_of(packed)
    assert written.keys() == read.keys()
    assert all(torch.equal(written[n], read[n]) and written[n].dtype == read[n].dtype for n in read)
    assert json.loads((result.folder / "config.json").read_text())["quantization_config"] == CONFIG
    assert "vllm serve" in (result.folder / "README.md").read_text()
    assert torch.equal(theirs(result.folder), want)


@torch.no_grad()
def test_a_plain_model_is_quantized_into_it(plain: Path, tmp_path: Path) -> None:
    model = zoo.load(plain)
    quantize(model, "mxfp", rules=ONLY_EXPERTS, progress=False)
    zoo.save(model, tmp_path / "saved", format="mxfp4")
    again = zoo.load(tmp_path / "saved")
    assert again.spec == model.spec
    assert same_bits(again, model)
    assert relative_error(model(ids(2)), theirs(tmp_path / "saved")) < TOLERANCE


@torch.no_grad()
def test_layers_may_be_plain(plain: Path, tmp_path: Path) -> None:
    model = zoo.load(plain)
    quantize(model, "mxfp", rules=[*ONLY_EXPERTS, "layers.1.*=keep"], progress=False)
    zoo.save(model, tmp_path / "saved")
    skipped = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert skipped == [*KEPT, EXPERTS]
    assert [should_convert_module(f"model.layers.{l}.mlp.experts", skipped) for l in (0, 1, 11)] == [True, False, True]
    assert same_bits(zoo.load(tmp_path / "saved"), model)
    assert relative_error(model(ids(2)), theirs(tmp_path / "saved")) < TOLERANCE


def test_a_model_that_no_config_describes_is_read_back(packed: Path, tmp_path: Path) -> None:
    model = zoo.load(packed, override=["layers.0.mixer.position.theta=7.0"])
    result = zoo.save(model, tmp_path / "saved")
    assert result.transformers is not None
    again = zoo.load(result.folder)
    assert again.spec == model.spec
    assert same_bits(again, model)


@pytest.mark.filterwarnings("ignore:vLLM and SGLang multiply some:UserWarning")
@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("mxfp", {}, r"but each of layers\.\{0,1\}\.mixer\.projection\.k.* lies in its own; keep these plain"),
        ("mxfp", {"rules": [*ONLY_EXPERTS, "layers.*.up=keep"]}, r"experts\.\{0\.\.3\}\.up lie in one tensor with packed ones"),
        ("mxfp", {"rules": [*ONLY_EXPERTS, "layers.1.*.3.down=keep"]}, r"layers\.1\.mlp\.experts\.3\.down lie in one tensor"),
        ("mxfp", {"rules": [*ONLY_EXPERTS, "layers.1.*.down=keep"]},
         r"all weights of a layer's experts or none, but model\.layers\.1\.mlp\.experts\.down_proj would be plain"),
        ("mxfp", {"rules": ONLY_EXPERTS, "input_element": "e2m1"}, "mxfp4 holds E2M1 in groups of 32 .* quantize with mxfp"),
        ("rtn", {"rules": ONLY_EXPERTS, "group_size": 32}, "mxfp4 holds E2M1 in groups of 32 .* quantize with mxfp"),
    ],
)  # fmt: skip
def test_other_models_are_refused(plain: Path, tmp_path: Path, method: str, options: dict[str, Any], reason: str) -> None:
    model = zoo.load(plain)
    quantize(model, method, progress=False, **options)
    with pytest.raises(ValueError, match=reason):
        zoo.save(model, tmp_path / "saved", format="mxfp4")
    assert not (tmp_path / "saved").exists()
    result = zoo.save(model, tmp_path / "other")  # without a word of the format another one is found
    assert json.loads((result.folder / "config.json").read_text())["quantization_config"]["quant_method"] != "mxfp4"
    assert same_bits(zoo.load(result.folder), model)


def test_other_families_are_refused(tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16)
    model = zoo.load(tmp_path / "model")
    quantize(model, "mxfp", progress=False)
    with pytest.raises(ValueError, match=r"mxfp4 cannot hold this model: it holds weights that lie together in one tensor, as the experts"):
        zoo.save(model, tmp_path / "saved", format="mxfp4")


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        (["layers.*.q=keep"], r"each of layers\.\{0,1\}\.mixer\.projection\.k, .* lies in its own"),
        ([*ONLY_EXPERTS, "layers.1.*.down=keep"], r"or none, but model\.layers\.1\.mlp\.experts\.down_proj would be plain"),
    ],
)
def test_the_command_refuses_before_it_works(plain: Path, tmp_path: Path, rules: list[str], reason: str) -> None:
    options = [word for rule in rules for word in ("--rule", rule)]
    result = CliRunner().invoke(app, ["quantize", str(plain), "mxfp", "--out", str(tmp_path / "out"), "--format", "mxfp4", *options])
    assert result.exit_code != 0
    assert re.search(reason, str(result.exception))
    assert list(tmp_path.iterdir()) == []  # not even a folder to continue from


# ---- the format --------------------------------------------------------------------------------------------------------------


def test_the_format_is_found_by_its_word() -> None:
    assert format_for(CONFIG) == FORMAT
    assert FORMAT.accepts(STORAGE) == []
    for storage in (Dense(), PackedFloat(), PackedFloat(element="e2m1", group_size=32, scale="e8m0", inputs=FloatInputs())):
        (reason,) = FORMAT.accepts(storage)
        assert reason.startswith("mxfp4 holds E2M1 in groups of 32")


def test_decode_inverts_encode() -> None:
    ours = {"packed": codes((6, 48), 0, 256, 1), "scale": codes((6, 3), 0, 255, 2)}
    disk = FORMAT.encode(STORAGE, ours, 96, 6)
    assert list(disk) == FORMAT.disk_names(STORAGE, True)
    assert {name: list(t.shape) for name, t in disk.items()} == {"blocks": [6, 3, 16], "scales": [6, 3]}
    again = FORMAT.decode(STORAGE, disk, 96, 6)
    assert all(torch.equal(again[name], ours[name]) for name in ours)


def test_the_config_names_what_is_plain() -> None:
    storages: dict[str, Linear] = {"model.layers.0.self_attn.q_proj": Dense(), "model.layers.0.mlp.experts.gate_up_proj": STORAGE,
                                   "model.layers.1.mlp.experts.gate_up_proj": Dense(), "lm_head": Dense()}  # fmt: skip
    assert FORMAT.config(storages)["modules_to_not_convert"] == [*KEPT, "model.layers.1.mlp.experts"]
    with pytest.raises(ValueError, match=re.escape("none, but model.layers.0.mlp.experts.down_proj would be plain")):
        FORMAT.config(storages | {"model.layers.0.mlp.experts.down_proj": Dense()})
