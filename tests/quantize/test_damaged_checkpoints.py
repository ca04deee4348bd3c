"""Quantized checkpoints that are damaged or contradict themselves: each is named when it is loaded, and never computed with in silence."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import zoo
from tests.quantize.models import ids, small
from zoo.checkpoint import CheckpointError
from zoo.components.contracts import Linear
from zoo.components.linear.bnb_4bit import BnB4Bit
from zoo.components.linear.int8 import Int8
from zoo.components.linear.llm_int8 import LLMInt8
from zoo.components.linear.packed_float import FloatInputs, PackedFloat
from zoo.components.linear.packed_int import PackedInt
from zoo.components.linear.rotated import Rotated
from zoo.components.numerics import int8, scaled
from zoo.components.numerics.floats import ELEMENTS
from zoo.components.spec import TensorInfo, override
from zoo.formats import Format
from zoo.loading import not_finite
from zoo.quantize import quantize
from zoo.quantize.formats.awq import AWQFormat
from zoo.quantize.formats.bitsandbytes import BitsAndBytesFormat
from zoo.quantize.formats.compressed_tensors import CompressedTensors
from zoo.quantize.formats.fp8_block import FP8Block
from zoo.quantize.formats.gptq import GPTQFormat
from zoo.quantize.formats.gptq_v2 import GPTQv2Format
from zoo.quantize.formats.modelopt import ALGORITHMS, ModelOpt
from zoo.quantize.formats.native import Native
from zoo.storages import format_for

CT, FP8, OPT, NATIVE, BNB = CompressedTensors(), FP8Block(), ModelOpt(), Native(), BitsAndBytesFormat()
NAME = "model.layers.0.mlp.down_proj"
INPUTS, OUTPUTS = 64, 32
STATIC = FloatInputs(scale=None, tensor_scale="multiplier")
NVFP4 = PackedFloat(element="e2m1", group_size=16, scale="e4m3", tensor_scale="divisor")
LOCAL = FloatInputs(element="e2m1", group_size=16, scale="e4m3", tensor_scale="divisor")

pytestmark = pytest.mark.filterwarnings("ignore:vLLM and SGLang")


def ones(storage: Linear) -> dict[str, Tensor]:
    infos = storage.tensors(INPUTS, OUTPUTS, False)
    return {name: torch.ones(info.shape, dtype=getattr(torch, info.dtype or "float32")) for name, info in infos.items()}


def disk(format: Format, storage: Linear) -> dict[str, Tensor]:
    return format.encode(storage, ones(storage), INPUTS, OUTPUTS)


# ---- packed floats that are no numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "name", "code", "is_none"),
    [
        (PackedFloat(element="e4m3"), "packed", 0x7F, True),
        (PackedFloat(element="e4m3"), "packed", 0xFF, True),
        (PackedFloat(element="e4m3"), "packed", 0x7E, False),
        (PackedFloat(element="e5m2"), "packed", 0x7C, True),  # infinity
        (PackedFloat(element="e5m2"), "packed", 0x7B, False),
        (PackedFloat(element="e2m1", group_size=32, scale="e8m0"), "packed", 0xFF, False),
        (PackedFloat(element="e2m1", group_size=32, scale="e8m0"), "scale", 0xFF, True),
        (PackedFloat(element="e2m1", group_size=32, scale="e8m0"), "scale", 0xFE, False),
        (NVFP4, "scale", 0x7F, True),
        (NVFP4, "scale", 0xFF, True),
        (PackedInt(), "packed", -1, False),
    ],
    ids=str,
)
def test_codes_that_are_no_numbers_are_counted(storage: Linear, name: str, code: int, is_none: bool) -> None:
    module: Any = storage.build(INPUTS, OUTPUTS, False)
    tensor = ones(storage)[name]
    tensor[0, 0] = code
    assert not_finite(module.numbers(name, tensor)) == is_none
    assert not any(storage.faults(ones(storage) | {name: tensor}))


@pytest.mark.parametrize("element", [e.name for e in ELEMENTS.values() if e.dtype])
def test_every_code_counts_as_its_number(element: Any) -> None:
    module: Any = PackedFloat(element=element).build(INPUTS, OUTPUTS, False)
    codes, kind = torch.arange(256, dtype=torch.uint8).view(4, 64), ELEMENTS[element].dtype
    assert kind is not None
    assert not_finite(module.numbers("packed", codes)) == int((~codes.view(kind).float().isfinite()).sum())


KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fp8": ("fp8", "compressed_tensors", {}),
    "mxfp4": ("mxfp", "compressed_tensors", {}),
    "nvfp4": ("nvfp4", "compressed_tensors", {}),
    "native": ("fp8", "native", {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A saved model of each kind, made when it is first asked for."""
    base = tmp_path_factory.mktemp("damaged")

    def folder(kind: str) -> Path:
        if not (base / kind).exists():
            method, format, options = KINDS[kind]
            model = small()
            quantize(model, method, progress=False, **options)
            zoo.save(model, base / kind, format=format)
        return base / kind

    return folder


@pytest.mark.parametrize(
    ("kind", "leaf", "code"),
    [("fp8", "weight", 0x7F), ("mxfp4", "weight_scale", 0xFF), ("nvfp4", "weight_scale", 0x7F), ("native", "packed", 0xFF)],
)
def test_a_model_with_them_is_loaded_with_a_warning(
    kind: str, leaf: str, code: int, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders(kind), tmp_path / "model"))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{NAME}.{leaf}"].view(torch.uint8)[0, 0] = code
    save_file(tensors, file, {"format": "pt"})
    with pytest.warns(UserWarning, match=r"1 tensors hold NaN or infinite values: .*down.*\(1\)"):
        zoo.load(folder)


# ---- scales ------------------------------------------------------------------------------------------------------------------

FIXED: list[tuple[Format, Linear, str]] = [
    (CT, PackedFloat(inputs=STATIC), "input_scale"),
    (CT, Int8(inputs="tensor"), "input_scale"),
    (CT, NVFP4, "weight_global_scale"),
    (CT, replace(NVFP4, inputs=LOCAL), "input_global_scale"),
    (OPT, ALGORITHMS["FP8"], "input_scale"),
    (OPT, ALGORITHMS["NVFP4"], "input_scale"),
    (FP8, PackedFloat(group_outputs=None, inputs=STATIC), "activation_scale"),
    (NATIVE, Int8(inputs="tensor"), "input_scale"),
    (NATIVE, Rotated(inner=Int8(inputs="tensor")), "inner.input_scale"),
    (NATIVE, NVFP4, "divisor"),
]


@pytest.mark.parametrize(("format", "storage", "name"), FIXED, ids=str)
def test_fixed_scales_of_inputs_and_divisors_are_positive_numbers(format: Format, storage: Linear, name: str) -> None:
    theirs = disk(format, storage)
    format.decode(storage, theirs, INPUTS, OUTPUTS)
    for value in (0.0, -1.0, math.nan, math.inf):
        wrong = theirs | {name: torch.full_like(theirs[name], value)}
        with pytest.raises(ValueError, match=rf"^{name} must hold positive, finite numbers; the file is damaged: download it again"):
            format.decode(storage, wrong, INPUTS, OUTPUTS)
    for dtype in (torch.int32, torch.bool, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=rf"^{name} is {str(dtype).removeprefix('torch.')}, it must be float"):
            format.decode(storage, theirs | {name: theirs[name].to(dtype)}, INPUTS, OUTPUTS)


WEIGHTS: list[tuple[Format, Linear, str]] = [
    (CT, PackedInt(group_size=32), "weight_scale"),
    (CT, PackedFloat(), "weight_scale"),
    (CT, Int8(), "weight_scale"),
    (GPTQFormat(), PackedInt(group_size=32, scale_dtype="float16"), "scales"),
    (AWQFormat(), PackedInt(group_size=32, symmetric=False, scale_dtype="float16"), "scales"),
    (FP8, PackedFloat(group_outputs=None), "weight_scale_inv"),
    (OPT, ALGORITHMS["FP8"], "weight_scale"),
]


@pytest.mark.parametrize(("format", "storage", "name"), WEIGHTS, ids=str)
def test_scales_of_weights_are_floats_of_either_sign(format: Format, storage: Linear, name: str) -> None:
    """AutoRound writes negative scales of integers; a sign passes through every product."""
    theirs = disk(format, storage)
    found = format.decode(storage, theirs | {name: -theirs[name]}, INPUTS, OUTPUTS)
    assert bool((found["scale"] < 0).all())
    for dtype in (torch.int32, torch.bool):
        with pytest.raises(ValueError, match=rf"{name} is {str(dtype).removeprefix('torch.')}, it must be "):
            format.decode(storage, theirs | {name: theirs[name].to(dtype)}, INPUTS, OUTPUTS)


@pytest.mark.parametrize(("format", "storage"), [(CT, NVFP4), (OPT, ALGORITHMS["W4A16_NVFP4"])], ids=str)
def test_kernels_know_no_sign_of_e4m3_scales(format: Format, storage: Linear) -> None:
    theirs = disk(format, storage)
    theirs["weight_scale"].view(torch.uint8)[0, 0] = 0x81
    with pytest.raises(ValueError, match=r"^weight_scale holds negative numbers, which kernels read as positive ones"):
        format.decode(storage, theirs, INPUTS, OUTPUTS)


# ---- groups ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [-1, 2, 2**31 - 1])
@pytest.mark.parametrize(
    ("format", "name"), [(GPTQFormat(), "g_idx"), (GPTQv2Format(), "g_idx"), (NATIVE, "group_index")], ids=["gptq", "gptq_v2", "native"]
)
def test_inputs_belong_to_groups_that_there_are(format: Format, name: str, group: int) -> None:
    storage = PackedInt(group_size=32, scattered=True, scale_dtype="float16")
    theirs = disk(format, storage)
    theirs[name] = theirs[name].clone()
    theirs[name][5] = group
    least, most = min(group, 1), max(group, 1)
    with pytest.raises(ValueError, match=rf"^{name} must lie in 0\.\.1, the weight's groups, but reaches from {least} to {most}; "):
        format.decode(storage, theirs, INPUTS, OUTPUTS)


@pytest.mark.parametrize("size", [2**40, 2**63])
def test_blocks_larger_than_the_matrix_are_cut(size: int) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [size, size]}
    infos = {"weight": TensorInfo((OUTPUTS, INPUTS), "float8_e4m3fn")}
    storage = FP8.storage(config, NAME, infos)
    assert storage is not None
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    whole = replace(storage, group_outputs=OUTPUTS, group_size=INPUTS, inputs=FloatInputs(group_size=INPUTS))
    outputs = []
    for kind in (storage, whole):
        module: Any = kind.build(INPUTS, OUTPUTS, False)
        module.hold(kind.encode(weight, scaled.fit(weight, kind.grid)))
        outputs.append(module(weight[:3]))
    assert torch.equal(*outputs)


# ---- configs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["checkpoint_format", "format"])
@pytest.mark.parametrize(
    ("word", "answer"),
    [(None, "gptq"), ("gptq", "gptq"), ("gptq_v2", "gptq_v2"), *((w, None) for w in ("", "marlin", 0, 2, [], ["gptq"], {}))],
)
def test_the_version_of_gptq_is_a_known_word(field: str, word: Any, answer: str | None) -> None:
    config = {"quant_method": "gptq", field: word}
    assert [f.name for f in (GPTQFormat(), GPTQv2Format()) if f.answers(config)] == ([answer] if answer else [])
    if answer is None:
        with pytest.raises(ValueError, match="of no known kind of gptq; known: gptq, gptq_v2; see its checkpoint_format or format"):
            format_for(config)


ROUNDED: list[Linear] = [PackedFloat(inputs=FloatInputs()), Int8(), NVFP4, PackedInt(group_size=32)]


@pytest.mark.parametrize("storage", ROUNDED, ids=str)
@pytest.mark.parametrize("value", ["", 0, [], {}, False])
@pytest.mark.parametrize("field", ["input_activations", "output_activations"])
def test_what_is_not_null_is_no_absent_scheme(storage: Linear, field: str, value: Any) -> None:
    config = CT.config({NAME: storage})
    config["config_groups"]["group_0"][field] = value
    with pytest.raises(ValueError, match=rf"quantization_config\.config_groups\.group_0\.{field}"):
        CT.storage(config, NAME, {})


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("input_activations", {"strategy": "group", "group_size": None}, "input_activations.group_size: a positive number is needed"),
        ("input_activations", {"group_size": 3}, "input_activations.group_size: 3 is for the strategies .*, not for 'token'"),
        ("input_activations", {"strategy": ""}, "input_activations.strategy: '' is not supported"),
        ("input_activations", {"strategy": []}, r"input_activations.strategy: \[\] is not supported"),
        ("weights", {"group_size": 32}, "weights.group_size: 32 is for the strategies group and tensor_group, not for 'channel'"),
        ("weights", {"group_size": True}, "weights.group_size: True is for"),
        ("weights", {"block_structure": [2, 2]}, "weights.block_structure is for the strategy block, not for 'channel'"),
    ],
)  # fmt: skip
def test_sizes_belong_to_strategies_that_have_them(part: str, change: dict[str, Any], named: str) -> None:
    config = CT.config({NAME: PackedFloat(inputs=FloatInputs())})
    config["config_groups"]["group_0"][part] |= change
    with pytest.raises(ValueError, match=named):
        CT.storage(config, NAME, {})


@pytest.mark.parametrize("size", [3, 128, 2**63])
def test_groups_of_inputs_divide_them(size: int) -> None:
    storage = PackedFloat(inputs=FloatInputs(group_size=size))
    assert list(storage.problems(INPUTS, OUTPUTS, False)) == [("inputs.group_size", f"{INPUTS} inputs do not divide into groups of {size}")]
    assert not list(replace(storage, group_outputs=128, group_size=size).problems(INPUTS, OUTPUTS, False))  # cut as the weight's blocks are


@pytest.mark.parametrize("field", ["transform_config", "sparsity_config"])
def test_other_schemes_are_absent_where_they_are_empty(field: str) -> None:
    config = CT.config({NAME: PackedInt()})
    for value in (None, {}):
        assert CT.storage(config | {field: value}, NAME, {}) == PackedInt()
    for value in ("", 0, [], {"config_groups": {}}):
        with pytest.raises(ValueError, match=f"{field} is not supported"):
            CT.storage(config | {field: value}, NAME, {})


@pytest.mark.parametrize(
    ("kind", "storage"),
    [
        ("fp8", "bnb_4bit"),
        ("fp8", "llm_int8"),
        ("fp8", "{name: packed_float, element: e3m2}"),
        ("mxfp4", "{name: offset_int, group_size: 32}"),
    ],
)
def test_an_override_names_a_storage_that_the_format_holds(kind: str, storage: str, folders: Callable[[str], Path]) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.\{0,1\}\.mlp\.down: compressed-tensors has no scheme for .*; leave the storage as"):
        zoo.load(folders(kind), override=[f"layers.*.mlp.down={storage}"])


def test_an_override_names_a_product(folders: Callable[[str], Path]) -> None:
    """Which need not suit the device without memory that the model is first built on."""
    model = zoo.load(folders("fp8"), override=["layers.0.mlp.down.matmul=reference"])
    down: Any = model.get_submodule("layers.0.mlp.down")
    assert down.matmul.name == "reference"
    for storage in (BnB4Bit(), LLMInt8()):
        named: Any = override(storage, "matmul=bitsandbytes")
        with torch.device("meta"):
            named.build(INPUTS, OUTPUTS, False)


# ---- bitsandbytes ------------------------------------------------------------------------------------------------------------

STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: state.float(), r"weight\.quant_state is float32 \[\d+\], it must be bytes, uint8 of one dimension"),
        (lambda state: state[None], r"weight\.quant_state is uint8 \[1, \d+\], it must be bytes"),
        (lambda state: state[0], r"weight\.quant_state is uint8 \[\], it must be bytes"),
        (lambda state: torch.tensor(list(b"[" * 99_999), dtype=torch.uint8), r"weight\.quant_state is no JSON"),
    ],
)
def test_states_of_another_kind_are_named(change: Callable[[Tensor], Tensor], named: str) -> None:
    storage = BnB4Bit(nested=True)
    theirs = BNB.encode(storage, storage.encode(torch.randn(OUTPUTS, INPUTS)), INPUTS, OUTPUTS)
    with pytest.raises(ValueError, match=named):
        BNB.decode(storage, theirs | {STATE: change(theirs[STATE])}, INPUTS, OUTPUTS)


@pytest.mark.parametrize(
    ("storage", "name"), [(BnB4Bit(), "weight.absmax"), (BnB4Bit(nested=True), "weight.nested_absmax"), (LLMInt8(), "SCB")], ids=str
)
def test_largest_magnitudes_are_not_negative(storage: BnB4Bit | LLMInt8, name: str) -> None:
    weight = torch.randn(OUTPUTS, INPUTS)
    codes, absmax = int8.encode_absmax(weight)
    coded = storage.encode(weight) if isinstance(storage, BnB4Bit) else {"weight": codes, "absmax": absmax}
    theirs = BNB.encode(storage, coded, INPUTS, OUTPUTS)
    with pytest.raises(ValueError, match=f"^{name} holds negative numbers, which no largest magnitude is"):
        BNB.decode(storage, theirs | {name: -theirs[name]}, INPUTS, OUTPUTS)


@pytest.mark.parametrize("offset", ["NaN", "1e999", str(10**400), "true", '"1"'])
def test_the_offset_of_nested_scales_is_a_finite_number(offset: str) -> None:
    storage = BnB4Bit(nested=True)
    theirs = BNB.encode(storage, storage.encode(torch.randn(OUTPUTS, INPUTS)), INPUTS, OUTPUTS)
    state = json.loads(bytes(theirs[STATE].tolist())) | {"nested_offset": 12345}
    text = json.dumps(state).replace("12345", offset)
    with pytest.raises(ValueError, match="no finite number nested_offset"):
        BNB.decode(storage, theirs | {STATE: torch.tensor(list(text.encode()), dtype=torch.uint8)}, INPUTS, OUTPUTS)


# ---- weights beyond float16 --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_llm_int8_of_weights_beyond_float16() -> None:
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    plain = int8.encode_absmax(weight)
    codes, absmax = int8.encode_absmax(weight.index_fill(0, torch.tensor([1]), 1e6))
    assert int8.decode_absmax(codes, absmax, torch.float32)[1].tolist() == [1e6] * 8
    others = [0, 2, 3]
    assert torch.equal(codes[others], plain[0][others])
    assert torch.equal(absmax[others], plain[1][others])
    model = small()
    model.layers[0].mlp.down.weight[3, 5] = 1e6
    report = quantize(model, "llm_int8", progress=False)
    row = next(row for row in report.rows if row.module == "layers.0.mlp.down")
    assert row.facts == {"fallback": "1 outputs not rounded to float16 before, which cannot hold their weights"}
    assert row.weight_error < 1e-2
    assert report.totals["fallbacks"] == 1
    assert bool(model(ids(1, 8)).isfinite().all())


def test_reports_hold_no_number_that_json_lacks() -> None:
    report = quantize(small(), "rtn", group_size=32, progress=False)
    rows = (replace(report.rows[0], weight_error=math.nan, facts={"damping": math.inf, "tried": [math.nan, 1.0]}), *report.rows[1:])
    data = json.loads(replace(report, rows=rows).to_json(), parse_constant=pytest.fail)
    assert data["rows"][0]["weight_error"] is None
    assert data["rows"][0]["facts"] == {"damping": None, "tried": [None, 1.0]}
    assert data["totals"]["weight_error"] is None


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_scales_are_never_infinite(kind: scaled.ScaleName) -> None:
    grid = scaled.Grid(ELEMENTS["e2m1"], scale=kind)
    found = scaled.store(torch.tensor([[0.0], [1.0], [1e38], [math.inf]]), grid)
    assert bool((found > 0).all())
    assert bool(found.isfinite().all())
