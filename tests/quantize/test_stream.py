"""The layer stream: taking up what was killed, experts, memory, and modules that belong together."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.quantize.families import family_model, tokens
from tests.quantize.models import MOE, ids, same_bits, small
from zoo.loading import NotEnoughMemory
from zoo.model import Model
from zoo.quantize import Report, estimate, modules, quantize, resume, runner
from zoo.quantize.capture import every_expert, second_moments
from zoo.quantize.contracts import Quantizer
from zoo.quantize.distributed import Processes
from zoo.quantize.methods.auto_round import AutoRound
from zoo.quantize.methods.rtn import RTN

LAYERS = 3
ROOT = Path(__file__).parents[2]


class Killed(BaseException):
    pass


def run(model: Model, method: str = "gptq", **settings: Any) -> tuple[Model, Report]:
    options: dict[str, Any] = {"group_size": 32, "calibration": ids(), "progress": False} | settings
    return model, quantize(model, method, **options)


# ---- resume ------------------------------------------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "smoothquant": {"transforms": ["smoothquant"], "rules": ["*.o=keep", "layers.1.*=keep"]},
    "rotation, awq": {"method": "awq", "transforms": ["rotation"], "rules": ["*.up=keep"]},
    "auto_round": {"method": "auto_round", "iterations": 5, "batch": 3, "bits": 3},
    "auto_round, gptq": {"method": "auto_round", "iterations": 5, "transforms": ["awq"], "rules": ["*.v={name: gptq}"]},
}


def kill(monkeypatch: pytest.MonkeyPatch, work: Path, moment: int, settings: dict[str, Any]) -> None:
    """Run and die at the given call of what quantizes a module or writes a file, half of it written."""
    left = [moment]

    def dying(name: str, owner: Any) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*args, **options)

        patch.setattr(owner, name, call)

    with monkeypatch.context() as patch:
        for name, owner in (("put", modules), ("put", runner), ("save_file", resume), ("replace", Path)):
            dying(name, owner)
        with pytest.raises(Killed):
            run(small(layers=LAYERS, bias=True), work_dir=work, **settings)


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS.keys())
def test_a_run_killed_again_and_again_ends_in_the_same_bits(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, expected = run(small(layers=LAYERS, bias=True), **settings)
    draw = random.Random(str(settings))
    for moment in (draw.randint(6, 16), draw.randint(1, 12)):
        kill(monkeypatch, tmp_path / "work", moment, settings)
    resumed, report = run(small(layers=LAYERS, bias=True), work_dir=tmp_path / "work", **settings)
    assert same_bits(whole, resumed)
    assert resumed.spec == whole.spec
    assert report.changes == expected.changes
    assert [(r.module, r.facts, r.tokens) for r in report.rows] == [(r.module, r.facts, r.tokens) for r in expected.rows]


SCRIPT = """
import sys
from tests.quantize.models import small
from tests.quantize.test_stream import RUNS, run
print("ready", flush=True)
run(small(layers=4), work_dir=sys.argv[2], **(RUNS[sys.argv[1]] | {"iterations": 10}))
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_work_to_take_up(tmp_path: Path) -> None:
    settings = RUNS["auto_round, gptq"] | {"iterations": 10}
    command = [sys.executable, "-c", SCRIPT, "auto_round, gptq", str(tmp_path / "work")]
    for seconds in (0.5, random.Random(0).uniform(1, 3)):
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(seconds)
            process.kill()
    resumed, _ = run(small(layers=4), work_dir=tmp_path / "work", **settings)
    assert same_bits(resumed, run(small(layers=4), **settings)[0])


@pytest.mark.parametrize("missing", ["hidden", "layers.1"])
def test_blockwise_work_without_its_activations_begins_again(missing: str, tmp_path: Path) -> None:
    settings = RUNS["auto_round"]
    whole, _ = run(small(layers=LAYERS), work_dir=tmp_path, **settings)
    (tmp_path / f"layers.{LAYERS - 1}.safetensors").unlink()
    (tmp_path / f"{missing}.safetensors").unlink()
    assert same_bits(whole, run(small(layers=LAYERS), work_dir=tmp_path, **settings)[0])


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"transforms": ["awq"]}, "transforms was"), ({"least_tokens": 5}, "least_tokens was 1, is 5")],
    ids=str,
)
def test_work_under_other_settings_is_refused(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    run(small(), work_dir=tmp_path)
    with pytest.raises(ValueError, match=f"belongs to another quantization: .*{named}"):
        run(small(), work_dir=tmp_path, **settings)


# ---- memory ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, RUNS["auto_round"]], ids=str)
def test_activations_on_disk_give_the_same_bits_and_leave_no_file(settings: dict[str, Any], tmp_path: Path) -> None:
    there = run(small(), offload=tmp_path, **settings)[0]
    assert same_bits(there, run(small(), **settings)[0])
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        run(small(), offload=tmp_path / "nowhere")


def test_the_estimate_adds_up() -> None:
    model, quantizer = small(), RTN(group_size=32)
    chosen = {f"layers.0.mlp.{name}": quantizer for name in ("gate", "up", "down")}
    found = estimate.estimate(model, chosen, (6, 24), (), None)
    assert found.hessians == 4 * (64**2 + 96**2)  # gate and up share theirs
    assert found.factor == 3 * 4 * 96**2
    assert found.activations == 6 * 24 * 64 * 4
    assert found.finished == 0
    assert estimate.estimate(model, chosen, (6, 24), (), Path()).activations == 0
    assert estimate.estimate(model, dict.fromkeys(chosen, AutoRound()), (6, 24), (), None).activations == 2 * found.activations
    assert estimate.estimate(model, chosen, None, (), None).hessians == 0
    assert found.stage == 3 * 4 * 64 * 96
    assert estimate.estimate(model, dict.fromkeys(chosen, AutoRound()), (6, 24), (), None).stage == 6 * 4 * 3 * 64 * 96


@pytest.mark.parametrize(
    ("method", "kept", "held"), [(RTN(group_size=32), False, 3), (RTN(group_size=32), True, 9), (AutoRound(), False, 18)]
)
def test_the_estimate_is_of_the_first_of_several_processes(method: Quantizer, kept: bool, held: int) -> None:
    """It runs three of six windows, and gathers all where it writes them or tunes a layer for them."""
    model, several = small(), Processes()
    several.size, several.here = 2, 2
    chosen = {f"layers.0.mlp.{name}": method for name in ("gate", "up", "down")}
    found = estimate.estimate(model, chosen, (6, 24), (), None, several, kept)
    assert found.activations == held * 24 * 64 * 4
    assert found.hessians == 4 * (64**2 + 96**2)
    assert "of memory in each of 2 processes (hessians" in str(found)


def test_processes_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, several = small(), Processes()
    chosen = {"layers.0.mlp.up": RTN(group_size=32)}
    alone = estimate.estimate(model, chosen, (6, 24), (), None, several)
    parts = (alone.hessians, alone.factor, alone.stage, alone.finished, alone.run, alone.activations)
    monkeypatch.setattr(estimate, "available_bytes", lambda _: int(1.5 * sum(parts)))
    alone.check()
    several.here = 2
    with pytest.raises(NotEnoughMemory):
        estimate.estimate(model, chosen, (6, 24), (), None, several).check()


def test_too_little_memory_is_said_before_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = small()
    monkeypatch.setattr(estimate, "available_bytes", lambda _: 1 << 16)
    with pytest.raises(NotEnoughMemory, match=r"needs [\d.]+ MiB on cpu, of which 0.1 MiB are free; .*hessians.*offload=folder"):
        run(model, work_dir=tmp_path / "work")
    assert same_bits(model, small())
    assert not (tmp_path / "work").exists()


# ---- experts -----------------------------------------------------------------------------------------------------------------


def test_experts_that_saw_few_tokens_are_rounded_without_data() -> None:
    _, report = run(small(MOE), calibration=ids(4, 24), least_tokens=12)
    rows = [r for r in report.rows if "experts" in r.module and r.tokens is not None]
    few = [r for r in rows if r.tokens is not None and r.tokens < 12]
    assert 0 < len(few) < len(rows)
    assert all(r.facts == {"fallback": "rtn: no tokens", "few_tokens": f"{r.tokens}, at least 12 are wanted"} for r in few)
    assert all("fallback" not in r.facts for r in rows if r not in few)


def test_every_expert_may_see_every_token() -> None:
    _, report = run(small(MOE), calibration=ids(2, 10), all_experts=True)
    assert {r.tokens for r in report.rows} == {20}
    assert report.totals["fallbacks"] == 0


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3"])
@torch.no_grad()
def test_showing_tokens_to_every_expert_changes_no_output(name: str) -> None:
    model, x = family_model(name), tokens()
    experts = {n: m for n, m in model.named_modules() if n.endswith(".down") and ".experts." in n}
    expected = model(x)
    with every_expert(model):
        assert torch.allclose(model(x), expected, rtol=1e-4, atol=1e-5)
        assert {h.tokens for h in second_moments(experts, [lambda: model(x)]).values()} == {x.numel()}
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("mlp", "settings", "message"),
    [
        (None, {"all_experts": True}, "all_experts changes nothing: the model has no experts"),
        (MOE, {"all_experts": True, "method": "rtn", "calibration": None}, "all_experts changes nothing: no data is used"),
        (MOE | {"dispatch": {"name": "capacity"}}, {"all_experts": True}, r"layers\.0\.mlp\.dispatch capacity drops tokens"),
        (MOE | {"router": {"name": "top_k", "k": 1, "on_input": True}}, {"all_experts": True}, "multiplies experts' inputs"),
        (None, {"least_tokens": -1}, "least_tokens must not be negative"),
        (None, {"method": "auto_round", "true_sequential": True}, "auto_round quantizes the modules of a layer together"),
        (None, {"method": "auto_round", "rules": ["head.*={bits: 8}"], "tied": False}, r"head\.out: auto_round fits layers"),
        (None, {"method": "auto_round", "scale_search": "mse"}, "auto_round learns the range itself"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(mlp: Any, settings: dict[str, Any], message: str) -> None:
    model = small(mlp, tied=settings.pop("tied", True))
    with pytest.raises(ValueError, match=message):
        run(model, **settings)


# ---- modules that belong together ----------------------------------------------------------------------------------------------


def test_siblings_are_shown_to_their_quantizer_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []

    def look(self: RTN, weights: Sequence[Tensor]) -> RTN:
        seen.append(tuple(len(w) for w in weights))
        return RTN(bits=8, group_size=self.group_size)

    monkeypatch.setattr(RTN, "for_siblings", look)
    _, report = run(small(MOE, layers=1), "rtn", rules=["*.experts.0.gate=keep"])
    assert seen == [(64, 32, 32), *[(32, 32)] * 7]
    bits = {r.module.removeprefix("layers.0."): r.settings["bits"] for r in report.rows}
    assert [bits[n] for n in ("mixer.projection.v", "mixer.projection.o", "mlp.experts.0.up", "mlp.experts.1.up")] == [8, 4, 4, 8]


def test_up_projections_of_latent_attention_are_kept_unless_asked_for() -> None:
    _, report = run(family_model("deepseek_v3"), "rtn", group_size=None, calibration=None)
    assert {"layers.0.mixer.projection.kv_up", "layers.1.mixer.projection.kv_up"} <= set(report.kept)
    model, report = run(family_model("deepseek_v3"), "rtn", group_size=None, calibration=None, rules=["*.kv_up={bits: 8}"])
    assert "layers.1.mixer.projection.kv_up" in [r.module for r in report.rows]
    assert model(tokens()).isfinite().all()


def test_weights_shared_in_memory_are_found() -> None:
    model = small()
    model.layers[1].mlp.up.weight = model.layers[0].mlp.up.weight
    with pytest.raises(ValueError, match=r"shared? cannot be quantized.*\n  layers\.0\.mlp\.up\.weight = layers\.1\.mlp\.up\.weight"):
        run(model, "rtn")
    _, report = run(model, "rtn", rules=["*.mlp.up=keep"])
    assert "layers.0.mlp.down" in [r.module for r in report.rows]


# ---- auto_round --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
@torch.no_grad()
def test_auto_round_lowers_the_layers_error(symmetric: bool) -> None:
    before = small(layers=1)
    settings: dict[str, Any] = {"bits": 3, "symmetric": symmetric, "calibration": ids(16, 24)}
    learned, report = run(copy.deepcopy(before), "auto_round", iterations=60, **settings)
    plain, _ = run(copy.deepcopy(before), "rtn", **settings)
    x = ids(8, 24, seed=5)
    errors = [float((m(x) - before(x)).norm()) for m in (learned, plain)]
    assert errors[0] < 0.8 * errors[1]
    facts = report.rows[0].facts
    assert facts["layer_error"] < 0.5 * facts["layer_error_before"]


@torch.no_grad()
def test_auto_round_that_learns_nothing_is_rounding_to_nearest() -> None:
    """One step of a tiny rate moves no weight over a threshold, and what is kept is the start where nothing is better."""
    settings: dict[str, Any] = {"bits": 4, "calibration": ids()}
    learned, _ = run(small(layers=1), "auto_round", iterations=1, learning_rate=1e-12, **settings)
    plain, _ = run(small(layers=1), "rtn", **settings)
    assert same_bits(learned, plain)


def test_auto_round_fits_what_was_quantized_before_to_what_was_meant() -> None:
    """The second layer is shown the first one's quantized output, and judged by the model's own."""
    seen: list[tuple[Tensor, Tensor]] = []
    real = AutoRound.quantize_block

    def look(self: AutoRound, block: Any) -> Any:
        seen.append((block.inputs.clone(), block.targets.clone()))
        return real(self, block)

    before = small(bias=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoRound, "quantize_block", look)
        model, _ = run(copy.deepcopy(before), "auto_round", iterations=2)
    with torch.no_grad():
        outputs: list[list[Tensor]] = [[], []]
        for of, found in zip((before, model), outputs, strict=True):
            for layer in of.layers:
                layer.register_forward_hook(lambda _, args, y, found=found: found.append(y))
            of(ids())
    assert torch.allclose(seen[1][0], outputs[1][0], atol=1e-6)
    assert torch.allclose(seen[1][1], outputs[0][1], atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("settings", [RUNS["rotation, awq"], RUNS["auto_round"], {"transforms": ["smoothquant"]}], ids=str)
def test_on_a_gpu(settings: dict[str, Any], dtype: torch.dtype) -> None:
    before = small(bias=True).to("cuda", dtype)
    model, _ = run(copy.deepcopy(before), bits=8, **{k: v for k, v in settings.items() if k != "bits"})
    x = ids(4, 24, seed=3).cuda()
    assert all(t.is_cuda for t in model.state_dict().values())
    assert (model(x) - before(x)).float().norm() < 0.05 * before(x).float().norm()
    assert isinstance(model.layers[0].mlp, nn.Module)
