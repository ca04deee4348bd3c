"""Models that are spread over devices and the disk: where each part goes, what is refused, and that results stay the same."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import zoo
from tests.eval.made import make_tiny
from tests.zoo.oracle import llama_checkpoint
from zoo.checkpoint import CheckpointError
from zoo.cli import app
from zoo.components.spec import dump
from zoo.eval import perplexity
from zoo.loading import GIB, NotEnoughMemory
from zoo.model import Model
from zoo.placement import Plan, plan, unfit, unit_bytes
from zoo.quantize import quantize
from zoo.streaming import PREFIX, SplitCache

IDS = torch.arange(24)[None] % 50
MAPS: list[dict[str, int | str]] = [
    {"": "disk"},
    {"": "cpu", "layers": "disk"},
    {"": "disk", "layers.1": "cpu"},
    {"": "cpu", "embed": "disk"},
    {"": "cpu", "head": "disk"},
    {"": "cpu"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spread") / "model"
    make_tiny(path)
    return path


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "tied"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("either")
    llama_checkpoint(path, tie_word_embeddings=request.param)
    return path


def logits(model: Model, *, cached: bool) -> torch.Tensor:
    ids = IDS.to(model.device)
    with torch.no_grad():
        if not cached:
            return model(ids)
        cache = model.new_cache(1)
        return torch.cat([model(ids[:, :9], cache=cache), *(model(ids[:, i : i + 1], cache=cache) for i in range(9, 24))], 1)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("where", MAPS, ids=str)
def test_logits_are_those_of_the_plain_model_to_the_bit(either: Path, tmp_path: Path, where: dict[str, int | str], cached: bool) -> None:
    spread = zoo.load(either, device_map=where, offload_folder=tmp_path)
    assert torch.equal(logits(spread, cached=cached), logits(zoo.load(either), cached=cached))
    assert any(p.is_meta for p in spread.parameters()) == ("disk" in where.values())


def test_large_weights_lie_as_in_the_plain_model(tmp_path: Path) -> None:
    """Products with a weight that lies column by column sum in another order."""
    llama_checkpoint(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_attention_heads=8, head_dim=64)
    plain = zoo.load(tmp_path / "model", dtype="float32")
    spread = zoo.load(tmp_path / "model", dtype="float32", device_map={"": "disk"}, offload_folder=tmp_path / "weights")
    assert torch.equal(spread(IDS[:, :1]), plain(IDS[:, :1]))


def test_generation_is_the_same(folder: Path, tmp_path: Path) -> None:
    spread = zoo.load(folder, device_map={"": "cpu", "layers": "disk"}, offload_folder=tmp_path)
    assert spread.generate(IDS.tolist(), max_new_tokens=12) == zoo.load(folder).generate(IDS.tolist(), max_new_tokens=12)


def test_perplexity_is_the_same(folder: Path, tmp_path: Path) -> None:
    spread = zoo.load(folder, device_map={"": "disk", "norm": "cpu"}, offload_folder=tmp_path / "weights")
    (tmp_path / "text.txt").write_text("a line of text to score\n" * 60)
    scored = [perplexity(m, tmp_path / "text.txt", context=32, limit=3).value for m in (spread, zoo.load(folder))]
    assert scored[0] == scored[1]


def test_a_spread_model_is_saved_whole(either: Path, tmp_path: Path) -> None:
    spread = zoo.load(either, device_map={"": "disk", "norm": "cpu"}, offload_folder=tmp_path / "weights")
    zoo.save(spread, tmp_path / "saved")
    zoo.save(zoo.load(either), tmp_path / "plain")
    saved, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "plain"))
    assert saved.keys() == plain.keys()
    assert all(torch.equal(saved[n], plain[n]) for n in plain)


@pytest.mark.parametrize(
    "act",
    [lambda m: m.to(torch.float64), lambda m: quantize(m, "rtn"), lambda m: zoo.convert(m, "mha")],
    ids=["move", "quantize", "convert"],
)
def test_what_needs_the_whole_model_refuses(folder: Path, tmp_path: Path, act: Any) -> None:
    spread = zoo.load(folder, device_map={"": "disk"}, offload_folder=tmp_path)
    with pytest.raises(ValueError, match="load it without device_map"):
        act(spread)


def test_a_copy_streams_as_the_original(folder: Path, tmp_path: Path) -> None:
    spread = zoo.load(folder, device_map={"": "disk"}, offload_folder=tmp_path)
    expected, twin = spread(IDS), copy.deepcopy(spread)
    del spread
    assert torch.equal(twin(IDS), expected)


# ---- plans


def large() -> tuple[zoo.ModelSpec, dict[str, int]]:
    layer = {"mixer": {"projection": {"name": "gqa", "heads": 64, "kv_heads": 8, "head_dim": 128}, "position": "rope"},
             "mlp": {"name": "gated", "hidden": 28672}}  # fmt: skip
    spec = zoo.spec({"width": 8192, "context": 8192, "embed": {"name": "tokens", "vocab": 128256}, "layers": [layer] * 80, "head": "lm"})
    return spec, unit_bytes(spec, torch.bfloat16)


def planned(device_map: Any, max_memory: Mapping[int | str, int | str]) -> tuple[Plan, list[str]]:
    spec, _ = large()
    found = plan(spec, torch.bfloat16, device_map, max_memory)
    return found, unfit(found, spec, torch.bfloat16)


def test_a_model_of_70_billion_parameters_is_planned_for_gpus_that_are_not_there() -> None:
    spec, sizes = large()
    found, problems = planned("auto", {0: "80GiB", 1: "80GiB", "cpu": "100GiB"})
    assert not problems
    assert list(found.places) == list(spec.children())
    assert sum(found.held().values()) == sum(sizes.values())
    assert set(found.places.values()) == {0, 1}
    assert found.device("layers.79") == torch.device("cuda", 1)
    assert found.main == torch.device("cuda", 0)


def test_balanced_fills_the_gpus_alike() -> None:
    _, sizes = large()
    held = planned("balanced", {0: "140GiB", 1: "140GiB"})[0].held()
    assert abs(held[0] - held[1]) < 4 * sizes["layers.0"]
    assert set(planned("auto", {0: "140GiB", 1: "140GiB"})[0].places.values()) == {0}


def test_what_one_gpu_cannot_hold_goes_to_the_cpu_and_then_to_the_disk() -> None:
    _, sizes = large()
    found, problems = planned("auto", {0: "40GiB", "cpu": "60GiB"})
    held = found.held()
    assert not problems
    assert set(held) == {0, "cpu", "disk"}
    assert held[0] + sizes["embed"] <= 40 * GIB
    assert held["cpu"] <= 60 * GIB
    assert found.streamed("layers.79")
    assert found.device("layers.79") == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("device_map", "limits", "reason"),
    [
        ({"": 0}, {0: "40GiB"}, "GPU 0 would hold 131"),
        ({"": 0}, {"cpu": "400GiB"}, "GPU 0 would hold 131.417 GiB of weights, it has 0.000 GiB"),
        ({"": "disk"}, {"cpu": "1GiB"}, "embed needs 1.957 GiB of the CPU while it runs"),
    ],
)
def test_a_plan_says_what_does_not_fit(device_map: Any, limits: dict[int | str, str], reason: str) -> None:
    assert any(reason in problem for problem in planned(device_map, limits)[1])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device_map": "automatic"}, "did you mean 'auto'"),
        ({"device_map": {"embed": "cpu"}}, "no place for layers.0, layers.1, norm, head"),
        ({"device_map": {"": "cpu", "layer.1": "disk"}}, "'layer.1' is no module"),
        ({"device_map": {"": "cpu", "layers.1.mlp": "disk"}}, "lies inside layers.1, which is not split"),
        ({"device_map": {"": "tpu"}}, "'tpu' is no place"),
        ({"device_map": {"": 99}, "max_memory": {99: "1GiB"}}, "needs GPU 99"),
        ({"device_map": "auto", "max_memory": {"cpu": "much"}}, "'much' for cpu is no size"),
        ({"device_map": "auto", "max_memory": {"disk": "-1"}}, "is no size"),
        ({"device_map": "auto", "lazy": True}, "leave lazy out"),
        ({"device_map": "auto", "device": "cuda"}, "leave device out"),
        ({"max_memory": {"cpu": 1}}, "give device_map='auto'"),
        ({"override": ["checkpoint=lama"]}, "no family is named 'lama'; did you mean 'llama'"),
    ],
)
def test_options_that_say_nothing_of_the_model_are_refused(folder: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        zoo.load(folder, **options)


@pytest.mark.parametrize("more", [{}, {"max_memory": {"cpu": 100}}], ids=["no folder", "too small"])
def test_a_model_that_fits_nowhere_is_refused_before_anything_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr("zoo.checkpoint.SafetensorsFolder.read", lambda self, name: pytest.fail("a tensor was read"))
    options = {"offload_folder": tmp_path / "weights"} if more else {}
    with pytest.raises(NotEnoughMemory, match="does not fit"):
        zoo.load(folder, device_map={"": "disk"}, **options, **more)
    assert not (tmp_path / "weights").exists()


@pytest.mark.filterwarnings("ignore:vLLM and SGLang")
def test_packed_weights_that_rearrange_themselves_stay_in_one_place(folder: Path, tmp_path: Path) -> None:
    model = zoo.load(folder)
    quantize(model, "rtn", bits=4, group_size=None)
    zoo.save(model, tmp_path / "packed")
    with pytest.raises(ValueError, match="is packed and takes the layout of one device"):
        zoo.load(tmp_path / "packed", device_map={"": "cpu", "layers": "disk"}, offload_folder=tmp_path / "weights")
    kept = zoo.load(tmp_path / "packed", device_map={"": "cpu", "embed": "disk"}, offload_folder=tmp_path / "weights")
    assert torch.equal(kept(IDS), zoo.load(tmp_path / "packed")(IDS))


@pytest.mark.filterwarnings("ignore:vLLM and SGLang")
@pytest.mark.parametrize("where", [{"": "disk"}, {"": "disk", "layers.1": "cpu"}], ids=str)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fp8", {"scale_per": "tensor"}),
        ("fp8", {"inputs": "token"}),
        ("w8a8", {}),
        ("nf4", {"nested": True}),
        ("llm_int8", {}),
        ("mxfp", {"rules": ["*.mlp.down=keep"]}),  # of 48 inputs
        ("nvfp4", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_packed_weights_are_streamed_to_the_same_logits(
    folder: Path, tmp_path: Path, method: str, options: dict[str, Any], where: dict[str, int | str]
) -> None:
    model = zoo.load(folder)
    quantize(model, method, progress=False, **options)
    zoo.save(model, tmp_path / "packed")
    for quantized in ("keep", "dequantize"):
        spread = zoo.load(tmp_path / "packed", quantized=quantized, device_map=where, offload_folder=tmp_path / "weights")
        plain = zoo.load(tmp_path / "packed", quantized=quantized)
        assert torch.equal(logits(spread, cached=True), logits(plain, cached=True))


@pytest.mark.parametrize(("limit", "status"), [("0=80GiB", 0), ("0=1GiB", 1)])
def test_the_command_line_prints_a_plan_and_what_does_not_fit(tmp_path: Path, limit: str, status: int) -> None:
    (tmp_path / "large.yaml").write_text(json.dumps(dump(large()[0])))
    command = [
        "show",
        str(tmp_path / "large.yaml"),
        "--no-full",
        "--device-map",
        "auto",
        "--max-memory",
        limit,
        "--max-memory",
        "cpu=20GiB",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == status, result.output
    assert "layers.79" in result.output
    assert "the disk" in result.output
    assert "cuda:0, streamed" in result.output
    assert ("does not fit: embed needs 1.957 GiB of GPU 0" in result.output) == bool(status)


# ---- the folder


def test_the_folder_is_empty_once_the_model_is_gone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    model = zoo.load(folder, device_map={"": "disk"}, offload_folder=tmp_path)
    assert len(list(tmp_path.glob(f"{PREFIX}*/*.safetensors"))) == len(model.source.table)
    del model
    assert not list(tmp_path.glob(f"{PREFIX}*/"))
    assert (tmp_path / "mine.txt").exists()


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(folder: Path, tmp_path: Path) -> None:
    first = zoo.load(folder, device_map={"": "disk"}, offload_folder=tmp_path)
    expected = first(IDS)
    left = tmp_path / f"{PREFIX}killed"
    left.mkdir()
    for name in ("lock", "embed.weight.safetensors", "norm.weight.part"):
        (left / name).write_bytes(b"half")
    second = zoo.load(folder, device_map={"": "disk"}, offload_folder=tmp_path)
    assert not left.exists()
    assert len(list(tmp_path.glob(f"{PREFIX}*/"))) == 2
    assert torch.equal(first(IDS), expected)
    assert torch.equal(second(IDS), expected)


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-9])], ids=["removed", "cut"])
def test_a_damaged_file_is_named_and_the_model_holds_no_half_layer(folder: Path, tmp_path: Path, damage: Any) -> None:
    model = zoo.load(folder, device_map={"": "disk"}, offload_folder=tmp_path)
    path = next(tmp_path.glob(f"{PREFIX}*/layers.1.mlp.down.weight.safetensors"))
    whole = path.read_bytes()
    damage(path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down\.weight\.safetensors.*Load the model again"):
        model(IDS)
    assert all(p.is_meta for p in model.parameters())
    path.write_bytes(whole)
    assert torch.equal(model(IDS), zoo.load(folder)(IDS))


PEAK = """
import json, resource, sys, torch, zoo, zoo.streaming
ids = torch.arange(8)[None]
zoo.load(sys.argv[3])(ids)  # what code takes
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = zoo.load(sys.argv[1], device_map={"": "disk"}, offload_folder=sys.argv[2])
model(ids)
print(json.dumps([1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), sum(p.nbytes for p in model.parameters())]))
"""


@pytest.mark.slow
def test_peak_memory_with_the_disk_is_far_below_the_models_size(folder: Path, tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=8, head_dim=64)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "model"), str(tmp_path / "weights"), str(folder)]
    peak, size = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=90).stdout)
    assert size > 200e6
    assert peak < size / 3


# ---- several devices


def test_the_caches_of_several_devices_act_as_one(folder: Path) -> None:
    """Two caches on one device stand for those of two: every call reaches both."""
    model = zoo.load(folder)
    slots, build = model.spec.slots(), model.spec.cache.build
    parts = [build([s if i == j else {} for j, s in enumerate(slots)], 2, model.dtype, model.device) for i in range(2)]
    split, plain = SplitCache(parts), model.new_cache(2)
    ids = IDS.view(2, 12)
    for cache in (split, plain):
        model(ids, cache=cache)
        cache.trim([5, 12])
    split, plain = split.fork([1, 0]), plain.fork([1, 0])
    assert torch.equal(model(ids[:, :3], cache=split), model(ids[:, :3], cache=plain))
    assert split.length == plain.length == [15, 8]
    assert split.pending == [0, 0]
    split.check()
    assert plain.bytes() <= split.bytes() < 1.1 * plain.bytes()  # each keeps the positions
    assert split.reserve(64)
    assert split.budget() == plain.budget()


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [False, True])
def test_one_gpu_the_cpu_and_the_disk(either: Path, tmp_path: Path, cached: bool) -> None:
    where = {"": "cpu", "embed": 0, "layers.0": 0, "norm": "disk"}
    spread = zoo.load(either, device_map=where, offload_folder=tmp_path)
    assert torch.equal(logits(spread, cached=cached).cpu(), logits(zoo.load(either, device="cuda"), cached=cached).cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [False, True])
def test_two_gpus(either: Path, cached: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    spread = zoo.load(either, device_map={"": 0, "layers.1": 1, "head": 1})
    assert spread.get_submodule("layers.1").get_parameter("mixer_norm.weight").device.index == 1
    assert torch.equal(logits(spread, cached=cached).cpu(), logits(zoo.load(either, device="cuda"), cached=cached).cpu())
