"""Every check of a quantization notices the fault that it is there for: before the work, in its report, and in the saved folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from tests.quantize.damaged import Tensors, damage, edit, quantized_and_saved
from tests.quantize.families import family_model
from tests.quantize.models import MOE, ids, small
from tests.zoo.oracle import llama_checkpoint
from zoo.commands.output import print_saved
from zoo.components.spec import load
from zoo.model import Model
from zoo.quantize import quantize, verify
from zoo.quantize.contracts import Quantizer
from zoo.quantize.rules import plan
from zoo.quantize.verification import VerificationError, findings
from zoo.verification import faults, same_bits, scales_apart
from zoo.weights import linears

Q = "model.layers.0.self_attn.q_proj."
pytestmark = pytest.mark.filterwarnings("ignore:vLLM and SGLang multiply")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """A quantized model and the folder that it was saved to."""
    return quantized_and_saved(tmp_path_factory.mktemp("made"))


@pytest.fixture
def model(made: tuple[Model, Path]) -> Model:
    return made[0]


@pytest.fixture
def saved(made: tuple[Model, Path], tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(made[1], tmp_path / "saved"))


def test_an_intact_folder_passes(model: Model, saved: Path) -> None:
    found = verify(model, saved)
    assert found.logit_difference == 0
    assert found.expected_bytes < found.bytes < 2 * found.expected_bytes
    assert found.tensors == len(model.state_dict())


# ---- a, b, d, i, k: before the work and in the report ----------------------------------------------------------------------------


def planned(model: Model, **options: Any) -> dict[str, Quantizer]:
    rules = options.pop("rules", ())
    return plan(model.spec, load(Quantizer, {"name": "rtn", **options}), rules, {})


def test_shapes_that_engines_refuse_are_named_for_every_number_of_gpus() -> None:
    model = small({"name": "gated", "hidden": 192})
    found = findings(model.spec, planned(model, group_size=64), "")
    assert any(line.startswith("on 1 GPU: ") and "64 inputs are no multiple of 128" in line for line in found.engines)
    assert any(line.startswith("on 2 GPUs: ") and "mlp.down (96 inputs are no multiple of 128)" in line for line in found.engines)
    assert "vLLM and SGLang" in next(found.lines())


def test_what_engines_take_is_not_remarked_on() -> None:
    model = small()
    found = findings(model.spec, planned(model, bits=4, group_size=32, rules=["layers.1.*=keep"]), "")
    fp8 = findings(model.spec, plan(model.spec, load(Quantizer, "fp8"), (), {}), "")
    assert not any("layers.1" in line for line in found.engines)
    assert fp8.engines == fp8.sensitive == ()
    assert list(fp8.lines()) == []


def test_the_plan_is_said_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    report = quantize(small(), "rtn", group_size=32)
    lines = capsys.readouterr().err.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("1/2 layers.0"))
    assert report.findings is not None
    assert lines[0] == f"quantizing takes {report.findings.memory}"
    assert "MiB of memory (" in lines[0]
    assert lines[1:first] == list(report.findings.lines())
    assert json.loads(report.to_json())["checks"] == report.to_dict()["checks"]


def test_experts_without_tokens_are_named_in_the_report_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = small(MOE, layers=1)
    with torch.no_grad():
        model.get_parameter("layers.0.mlp.router.weight")[3:].zero_()
        model.get_parameter("layers.0.mlp.router.weight")[:3].mul_(100)
    report = quantize(model, "gptq", group_size=32, calibration=ids())
    starved = {row.module.split(".")[4] for row in report.rows if row.facts.get("fallback") == "rtn: no tokens"}
    seen = {row.module.split(".")[4]: row.tokens for row in report.rows if ".experts." in row.module and row.tokens}
    assert starved == {str(i) for i in range(8)} - seen.keys()
    assert len(starved) >= 2
    assert sum(seen.values()) == ids().numel()
    said = f"fallback to rtn: no tokens for layers.0.mlp.experts.{{{min(starved)}"
    assert said in capsys.readouterr().err
    assert report.totals["fallbacks"] == 3 * len(starved)


def test_a_damping_that_had_to_grow_is_in_the_row() -> None:
    model = small(layers=1)
    with torch.no_grad():
        model.get_parameter("embed.weight").copy_(torch.ones(50, 1) * torch.randn(1, 64))  # inputs all alike: a matrix of rank one
    rows = quantize(model, "gptq", group_size=32, damping=1e-12, calibration=ids(), progress=False).rows
    assert {row.facts["damping"] for row in rows if row.module.endswith((".q", ".k", ".v"))} == {0.01}


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_heads_routers_and_absorbed_matrices_are_left_out_by_default(family: str) -> None:
    spec = family_model(family).spec
    chosen = plan(spec, load(Quantizer, {"name": "rtn", "group_size": None}), (), {})
    left = [path for path, _ in linears(spec) if path not in chosen]
    assert findings(spec, chosen, "").sensitive == ()
    assert "head.out" in left
    assert not any("router" in path or path.endswith(".kv_up") or "norm" in path or path.startswith("embed") for path in chosen)


def test_a_rule_that_quantizes_them_is_remarked_on() -> None:
    spec = family_model("deepseek_v3").spec
    rules = ["*.kv_up={bits: 8}", "head.out={bits: 8}"]
    found = findings(spec, plan(spec, load(Quantizer, {"name": "rtn", "group_size": None}), rules, {}), "")
    assert found.sensitive == (*(f"layers.{i}.mixer.projection.kv_up" for i in range(2)), "head.out")
    assert list(found.lines())[-1].endswith("kept by default: layers.{0,1}.mixer.projection.kv_up, head.out")


# ---- c: ties ---------------------------------------------------------------------------------------------------------------------


def test_weights_tied_in_memory_alone_are_named(tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "model", hidden_size=64, max_position_embeddings=64)
    model = zoo.load(tmp_path / "model")
    head: Any = model.get_submodule("head.out")
    head.weight = model.get_parameter("embed.weight")
    quantize(model, "rtn", group_size=16, progress=False)
    with pytest.raises(ValueError, match=r"embed\.weight = head\.out\.weight: one tensor in memory, which files would hold several times"):
        zoo.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_tied_flag_beside_another_head_does_not_load(model: Model, saved: Path) -> None:
    edit(saved / "config.json", lambda config: config.update(tie_word_embeddings=True))
    with pytest.raises(ValueError, match=r"the head is tied, but lm_head\.weight differs"):
        verify(model, saved)


# ---- e, f: what the tensors hold -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[Q + "weight_packed"].fill_(-2004318072), r"q_proj\.weight_packed: every element is -2004318072"),
        (lambda t: t[Q + "weight_scale"].zero_(), r"q_proj\.weight_scale: every element is 0\.0"),
        (lambda t: t["model.embed_tokens.weight"].fill_(0.5), r"embed_tokens\.weight: every element is 0\.5"),
        (lambda t: t["lm_head.weight"][0].fill_(torch.inf), r"lm_head\.weight: holds NaN or infinity"),
        (lambda t: t[Q + "weight_scale"][0].fill_(torch.nan), r"q_proj\.weight_scale: holds NaN"),
        (lambda t: t[Q + "weight_packed"][3, 3].add_(1), r"q\.packed: the values differ"),
        (lambda t: t["model.norm.weight"][0].mul_(2), r"norm\.weight: the values differ"),
        (lambda t: t["model.norm.weight"].mul_(2), r"the logits differ by [\d.e+-]+ of the largest, where 8e-06 is allowed"),
        (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].half()}), r"norm\.weight: the values differ"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*hold NaN or infinite")
def test_damage_is_named(change: Callable[[Tensors], Any], message: str, model: Model, saved: Path) -> None:
    damage(saved, change)
    with pytest.raises(VerificationError, match=message):
        verify(model, saved)


@pytest.mark.parametrize(
    ("name", "tensor", "fault"),
    [
        ("a.weight_packed", torch.full((4, 4), 0x88, dtype=torch.uint8), "every element is 136"),
        ("a.qweight", torch.zeros(4, 4, dtype=torch.int32), "every element is 0"),
        ("a.weight", torch.zeros(4, 4).to(torch.float8_e4m3fn), None),  # plain floats may be what the model was built with
        ("a.weight", torch.full((4,), torch.nan).to(torch.float8_e4m3fn), "holds NaN or infinity"),
        ("a.weight_scale", torch.full((4, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu), "holds NaN or infinity"),
        ("a.qzeros", torch.full((4, 4), 0x77777777, dtype=torch.int32), None),
        ("a.weight_scale", torch.full((4, 1), 0.25), None),
        ("a.bias", torch.zeros(4), None),
        ("a.norm.weight", torch.ones(4), None),
    ],
)
def test_single_tensors(name: str, tensor: Tensor, fault: str | None) -> None:
    assert list(faults(name, tensor, None)) == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("value", "place", "share"),
    [
        (torch.inf, ("lm_head.weight", 3), "one of the vocabulary"),
        (torch.nan, ("lm_head.weight", 3), "one of the vocabulary"),
        (torch.nan, ("model.norm.weight", 5), "all"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*hold NaN or infinite")
def test_values_that_the_checkpoint_has_too_are_no_fault_and_logits_made_of_them_are_not_compared(
    value: float, place: tuple[str, int], share: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama_checkpoint(tmp_path / "model", hidden_size=64, max_position_embeddings=64)
    damage(tmp_path / "model", lambda t: t[place[0]][place[1]].fill_(value))
    model = zoo.load(tmp_path / "model", lazy=True)
    quantize(model, "rtn", group_size=16, progress=False)
    saved = zoo.save(model, tmp_path / "saved")
    assert saved.verified is not None
    assert saved.verified.logit_difference == 0
    expected = 1.0 if share == "all" else 1 / model.spec.embed.vocab  # type: ignore[attr-defined]
    assert saved.verified.not_finite == pytest.approx(expected)
    print_saved(saved)
    assert "of the logits are NaN or infinite, as values of the model's own checkpoint are, and not compared" in capsys.readouterr().out
    damage(tmp_path / "saved", lambda t: t[place[0]][place[1] + 1].fill_(value))
    with pytest.raises(VerificationError, match="the values differ"):
        verify(model, tmp_path / "saved")


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (torch.nan, torch.nan, True),
        (torch.inf, torch.inf, True),
        (0.0, -0.0, False),
        (1.0, torch.nan, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64])
def test_bits_are_compared(ours: float, theirs: float, same: bool, dtype: torch.dtype) -> None:
    a, b = torch.tensor(ours).to(dtype), torch.tensor(theirs).to(dtype)
    assert same_bits(a, b) == same
    assert same_bits(a.expand(2, 3), b.expand(2, 3)) == same


def test_what_the_checkpoint_has_too_is_no_fault(tmp_path: Path) -> None:
    """A matrix of zeros in the model's own files is packed to codes that are all alike."""
    llama_checkpoint(tmp_path / "model", hidden_size=64, max_position_embeddings=64)
    damage(tmp_path / "model", lambda t: [t[Q + "weight"].zero_(), t["model.layers.1.input_layernorm.weight"].zero_()])
    model = zoo.load(tmp_path / "model")
    quantize(model, "rtn", group_size=16, progress=False)
    zoo.save(model, tmp_path / "saved")
    assert verify(model, tmp_path / "saved").logit_difference == 0


# ---- g: names and sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q + "weight_scale"), r"1 missing: .*q_proj\.weight_scale"),
        (lambda t: t.update({f"model.{Q}weight_packed": t.pop(Q + "weight_packed")}), r"1 unexpected: model\.model\.layers\.0"),
        (lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.ones(2, 2)}), r"1 unexpected: model\.layers\.9"),
    ],
)
def test_names_that_do_not_fit_do_not_load(change: Callable[[Tensors], Any], message: str, model: Model, saved: Path) -> None:
    damage(saved, change)
    with pytest.raises(ValueError, match=message):
        verify(model, saved)


def test_another_scheme_is_named(model: Model, saved: Path) -> None:
    edit(saved / "config.json", lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=16))
    with pytest.raises(ValueError, match="weight_scale is"):
        verify(model, saved)


def test_files_that_are_no_shards(model: Model, saved: Path) -> None:
    (saved / "extra.safetensors").write_bytes(bytes(1 << 10))
    with pytest.raises(VerificationError, match=r"extra\.safetensors: no shard of the model"):
        verify(model, saved)


def test_sizes_that_are_not_those_of_the_bits(model: Model, saved: Path) -> None:
    """The same values in files that take twice the bytes: the spec of the model says less than what was written."""
    damage(saved, lambda tensors: tensors.update({n: t.double() for n, t in tensors.items() if n.startswith(("lm_head", "model.embed"))}))
    with pytest.raises(VerificationError, match=r"the tensors in the files take .* bytes, the model's .*, more than 5% apart"):
        verify(model, saved)


@pytest.fixture
def shards(model: Model, tmp_path: Path) -> Path:
    zoo.save(model, tmp_path / "shards", shard_bytes=20_000)
    return tmp_path / "shards"


def test_a_missing_shard(model: Model, shards: Path) -> None:
    verify(model, shards)
    sorted(shards.glob("*.safetensors"))[1].unlink()
    with pytest.raises(ValueError, match="shards are missing"):
        verify(model, shards)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["weight_map"].pop("model.norm.weight"), r"does not say where model\.norm\.weight lies"),
        (lambda index: index["metadata"].update(total_size=44), "speaks of 44 bytes"),
    ],
)
def test_an_index_that_is_wrong(change: Callable[[dict[str, Any]], Any], message: str, model: Model, shards: Path) -> None:
    edit(shards / "model.safetensors.index.json", change)
    with pytest.raises(VerificationError, match=message):
        verify(model, shards)


def test_layers_that_predict_more_tokens_ahead(tmp_path: Path) -> None:
    """They are left out with a warning, and a config that goes on to tell of them is a fault."""
    model = family_model("deepseek_v3").float()
    zoo.save(model, tmp_path / "model")
    edit(tmp_path / "model/config.json", lambda config: config.update(num_nextn_predict_layers=1))
    damage(tmp_path / "model", lambda t: t.update({"model.layers.2.eh_proj.weight": torch.randn(32, 64)}))
    with pytest.warns(UserWarning, match=r"not loaded: model\.layers\.2\.eh_proj\.weight"):
        model = zoo.load(tmp_path / "model")
    quantize(model, "rtn", group_size=None, progress=False)
    with pytest.warns(UserWarning, match=r"not written: model\.layers\.2\.eh_proj\.weight"):
        zoo.save(model, tmp_path / "saved")
    edit(tmp_path / "saved/config.json", lambda config: config.update(num_nextn_predict_layers=1))
    with pytest.raises(VerificationError, match=r"layers that predict more tokens ahead, but there is no model\.layers\.2"):
        verify(model, tmp_path / "saved")


# ---- h: one global scale for what is fused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "modules", "rule"),
    [
        ("llama", "q .*, .*k .*, .*v", "*.q={largest: 50.0}"),
        ("llama", "gate .*, .*up", "layers.1.mlp.up={largest: 50.0}"),
        ("mixtral", r"experts\.2\.gate .*, .*experts\.2\.up", "layers.0.mlp.experts.2.up={largest: 50.0}"),
        ("deepseek_v3", "q_down .*, .*kv_down", "*.q_down={largest: 50.0}"),
    ],
)
def test_scales_of_fused_modules_that_differ(family: str, modules: str, rule: str) -> None:
    model = family_model(family).float()
    quantize(model, "nvfp4", progress=False)
    assert list(scales_apart(model)) == []
    model = family_model(family).float()
    quantize(model, "nvfp4", rules=[rule], progress=False)
    faulty = list(scales_apart(model))
    assert faulty
    assert all(line.startswith("divisor differs among modules that engines fuse") for line in faulty)
    assert pytest.importorskip("re").search(modules, faulty[0])


def test_such_a_model_is_not_saved_unless_it_was_loaded_so(tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "model", hidden_size=64, max_position_embeddings=64)
    model = zoo.load(tmp_path / "model")
    quantize(model, "nvfp4", rules=["*.q={largest: 50.0}"], progress=False)
    with pytest.raises(VerificationError, match="divisor differs"):
        zoo.save(model, tmp_path / "saved")
    zoo.save(model, tmp_path / "saved", check=lambda _: None)
    zoo.save(zoo.load(tmp_path / "saved"), tmp_path / "again")


# ---- j: protocols ------------------------------------------------------------------------------------------------------------------


def test_a_perplexity_carries_its_protocol_and_one_without_is_not_compared() -> None:
    from zoo.eval import perplexity
    from zoo.eval.changes import perplexity_change
    from zoo.eval.results import variant

    figure = perplexity(small(), ids(1, 40)[0], context=8)
    base, other = variant("a", perplexity=figure), variant("b", perplexity=figure)
    assert base.measured["perplexity"]["protocol"]["context"] == 8
    assert perplexity_change(other, base).refused == ""
    del other.measured["perplexity"]
    assert perplexity_change(other, base).refused != ""
    changed = variant("c", perplexity=replace(figure, protocol=replace(figure.protocol, stride=4)))
    assert "stride" in perplexity_change(changed, base).refused
