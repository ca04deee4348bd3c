"""DeepSeek-V3's layer that predicts two tokens ahead, as its checkpoints hold it, against transformers' own loader of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpModel

import zoo
from tests.zoo.families.harness import BASE, TOLERANCE, Case, ids
from tests.zoo.families.test_moe import V3, YARN
from tests.zoo.oracle import relative_error
from zoo import multi_token
from zoo.checkpoint import CheckpointError
from zoo.components.contracts import NoCache

WIDTH, VOCAB, LAYERS = BASE["hidden_size"], BASE["vocab_size"], BASE["num_hidden_layers"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer more, whose last layer becomes the one that predicts ahead."""
    folder = tmp_path_factory.mktemp("ahead")
    Case("deepseek_v3", "DeepseekV3ForCausalLM", V3 | {"num_hidden_layers": LAYERS + 1, "rope_parameters": YARN}).write(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    last = f"model.layers.{LAYERS}"
    tensors |= {f"{last}.{n}.weight": 1 + torch.randn(WIDTH, generator=generator) / 2 for n in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{last}.eh_proj.weight"] = torch.randn(WIDTH, 2 * WIDTH, generator=generator) / 8
    tensors[f"{last}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{last}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return written(folder, tensors, num_hidden_layers=LAYERS)


def written(folder: Path, tensors: dict[str, Tensor], config: Path | None = None, **changes: Any) -> Path:
    data = json.loads((config or folder / "config.json").read_text()) | changes
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(data))
    return folder


@torch.no_grad()
def test_equals_transformers(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = transformers.DeepseekV3ForCausalLM
    monkeypatch.setattr(kind, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{LAYERS}.*"])  # it knows the number 61 alone
    main = kind.from_pretrained(checkpoint, attn_implementation="eager")
    theirs, x = MtpModel.from_pretrained(main), ids(2)
    states = theirs.forward_layer(0, main.model(x).last_hidden_state[:, :-1], torch.arange(1, x.shape[1])[None], None, input_ids=x[:, 1:])
    model, ahead = zoo.load(checkpoint), multi_token.load(checkpoint)
    step = model.step(x)
    got = ahead(model.hidden(x, step, NoCache()), x, step, model.embed, model.head)[:, :-1, 0]
    assert relative_error(got, theirs._project_to_logits(states)) < TOLERANCE
    assert relative_error(model(x), main(x).logits) < TOLERANCE


def test_dtype_is_kept_but_for_routers(checkpoint: Path) -> None:
    layer: Any = multi_token.load(checkpoint, dtype="bfloat16").depths[0].layer
    assert layer.mlp.experts[0].up.weight.dtype == torch.bfloat16
    assert layer.mlp.router.correction.dtype == layer.mlp.router.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("drop", "change", "reason"),
    [
        ("hnorm.weight", None, r"1 tensors of the multi-token layers are missing: model\.layers\.2\.hnorm\.weight"),
        ("mlp.experts.3.up_proj.weight", None, r"1 tensors .* model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight"),
        ("", "shared_head.head.weight", r"shared_head\.head\.weight differs from lm_head\.weight"),
    ],
)
def test_what_is_wrong_is_named(checkpoint: Path, tmp_path: Path, drop: str, change: str | None, reason: str) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors.pop(f"model.layers.{LAYERS}.{drop}", None)
    if change:
        tensors[f"model.layers.{LAYERS}.{change}"] += 1
    with pytest.raises(CheckpointError, match=reason):
        multi_token.load(written(tmp_path, tensors, checkpoint / "config.json"))


def test_a_layer_too_many_is_no_layer_ahead(checkpoint: Path, tmp_path: Path) -> None:
    tensors = {n: t for n, t in load_file(checkpoint / "model.safetensors").items() if "eh_proj" not in n}
    with pytest.raises(CheckpointError, match=r"layers \[2\], which predict nothing ahead .* num_hidden_layers is 2"):
        zoo.load(written(tmp_path, tensors, checkpoint / "config.json"))


def test_checkpoints_without_one_say_so(checkpoint: Path, tmp_path: Path) -> None:
    plain = written(tmp_path, load_file(checkpoint / "model.safetensors"), checkpoint / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match="no layers that predict more tokens ahead"):
        multi_token.load(plain)
