"""Every command on a small model, and mistakes as one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import zoo
from tests.eval.made import make_tiny
from zoo import cli


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_tiny(folder)
    return str(folder)


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """(exit status, output, errors) of a command line."""
    monkeypatch.setattr("sys.argv", ["zoo", *words])
    status = 0
    try:
        cli.main()
    except SystemExit as e:
        status = int(e.code or 0)
    found = capsys.readouterr()
    return status, found.out, found.err


@pytest.fixture
def zoo_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *words: run(monkeypatch, capsys, *words)


def test_list_and_show_and_diff(zoo_command, model: str) -> None:
    status, out, _ = zoo_command("list", "pattern")
    assert status == 0
    assert "window" in out
    status, out, _ = zoo_command("show", model, "--set", "layers.1.mixer.pattern={name: window, size: 8}")
    assert status == 0
    assert "layers.1.mixer.pattern" in out
    assert "bits per parameter" in out
    status, out, _ = zoo_command("diff", "llama3-8b", "llama3.1-8b")
    assert "layers.0:32.mixer.position.scaling" in out


def test_generate(zoo_command, model: str) -> None:
    status, out, _ = zoo_command("generate", model, "a b", "--max-new-tokens", "4")
    assert status == 0
    assert out.endswith("\n")


def test_quantize_writes_a_verified_folder(zoo_command, model: str, tmp_path: Path) -> None:
    out = tmp_path / "int4"
    status, _, err = zoo_command("quantize", model, "rtn", "--out", str(out), "--group-size", "16", "--rule", "*.down=keep")
    assert status == 0, err
    assert json.loads((out / "quantization_report.json").read_text())["totals"]["modules"] == 12
    assert zoo.load(out).spec.layers[0].mixer.projection.q.name == "packed_int"
    assert not out.with_name("int4.work").exists()
    status, _, err = zoo_command("quantize", model, "rtn", "--out", str(out))
    assert status == 2
    assert "is not empty" in err


def test_quantize_takes_transforms_and_a_methods_own_defaults(zoo_command, model: str, tmp_path: Path) -> None:
    out = tmp_path / "awq"
    words = ("--samples", "2", "--length", "16", "--transform", "{name: rotation, block: 16}", "--transform", "smoothquant",
             "--least-tokens", "3", "--offload", str(tmp_path), "--option", "symmetric=true")  # fmt: skip
    status, _, err = zoo_command("quantize", model, "rtn", "--out", str(out), "--group-size", "16", *words)
    assert status == 0, err
    report = json.loads((out / "quantization_report.json").read_text())
    assert report["settings"]["transforms"] == [{"name": "rotation", "block": 16}, "smoothquant"]
    assert report["settings"]["method"] == {"name": "rtn", "group_size": 16}
    assert {c["transform"] for c in report["changes"]} >= {"smoothquant"}
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("activations")]
    for given in ("bits=3", "symmetric"):
        status, _, err = zoo_command("quantize", model, "rtn", "--out", str(tmp_path / "no"), "--option", given)
        assert status == 2
        assert f"--option {given}: write name=value" in err


def test_convert_says_what_it_costs_and_writes_a_verified_folder(zoo_command, model: str, tmp_path: Path) -> None:
    out, figures = tmp_path / "converted", tmp_path / "r.json"
    words = ("convert", model, "--to", "mha", "--to", "layers.0.mixer.projection={name: mla, rank: 20}", "--samples", "2",
             "--context", "32", "--limit", "2", "--out", str(out), "--json", str(figures))  # fmt: skip
    status, printed, err = zoo_command(*words)
    assert status == 0, err
    assert "gqa to gqa" in printed
    assert "layers.0:2" in printed
    assert "gqa to latent" in printed
    assert "read back" in printed
    before, after = json.loads(figures.read_text())["variants"]
    assert f"perplexity {before['perplexity']:.4g} -> {after['perplexity']:.4g}" in printed
    assert [(row["conversion"], row["where"], row["exact"]) for row in after["modules"]] == [
        ("gqa_to_gqa", "layers.0:2", True),
        ("gqa_to_latent", "layers.0", False),
    ]
    assert [layer.mixer.projection.name for layer in zoo.load(out).spec.layers] == ["latent", "gqa"]
    status, _, err = zoo_command(*words)
    assert status == 2
    assert "converted" in err
    assert zoo_command(*words, "--overwrite")[0] == 0


@pytest.mark.parametrize(("words", "message"), [
    (["--to", "mqb"], "nothing converts to 'mqb'; did you mean 'mqa'"),
    (["--to", "{name: gqa, kv_heads: 3}"], "layers.0: kv_heads: 3 is neither"),
    (["--to", "mha", "--to", "layers.7.mixer.projection=mla"], "nothing at layers.7.mixer.projection"),
    (["--to", "{name: learned, count: 9}"], "nothing in this model converts to 'learned'"),
    (["--to", "mha", "--out", "MODEL"], "config.json"),
    (["--to", "mha", "--context", "1"], "context must be at least 2"),
    (["--to", "mha", "--text", "OUT"], "out"),
    (["--to", "{name: mla, rank: 8}", "--calibration", "OUT"], "out"),
    (["--to", "{name: mla, rank: 8}", "--samples", "100000"], "samples"),
])  # fmt: skip
def test_convert_refuses_before_any_work(zoo_command, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str],
                                         message: str) -> None:  # fmt: skip
    monkeypatch.setattr("zoo.conversion.convert", lambda *_, **__: pytest.fail("it was converted"))
    monkeypatch.setattr("zoo.eval.held_out._run", lambda *_: pytest.fail("the model ran"))
    given = [{"MODEL": model, "OUT": str(tmp_path / "out")}.get(w, w) for w in words]
    status, _, err = zoo_command("convert", model, *given)
    assert status == 2
    assert message in err


def test_eval_and_bench(zoo_command, model: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a line of text to score\n" * 60)
    status, _, err = zoo_command("eval", model, "--context", "16", "--text", str(tmp_path / "text.txt"), "--json", str(tmp_path / "r.json"))
    assert status == 0, err
    assert json.loads((tmp_path / "r.json").read_text())["variants"][0]["perplexity"] > 1
    status, _, err = zoo_command("bench", model, "--prompt-tokens", "8", "--new-tokens", "2", "--repeats", "1")
    assert status == 0, err


@pytest.mark.parametrize(("words", "message"), [
    (["show", "./nowhere"], "nothing is there"),
    (["list", "norms"], "did you mean 'norm'"),
    (["generate", "MODEL", "x", "--set", "layers.*.mixer.kernel=sdpaa"], "did you mean 'sdpa'"),
    (["quantize", "MODEL", "gptk", "--out", "OUT"], "did you mean 'gptq'"),
    (["quantize", "MODEL", "rtn", "--out", "OUT", "--option", "bits=3"], "write name=value"),
    (["quantize", "MODEL", "rtn", "--out", "OUT", "--option", "foo"], "write name=value"),
    (["quantize", "MODEL", "rtn", "--out", "OUT", "--option", "x={"], "not YAML"),
    (["quantize", "MODEL", "rtn", "--out", "OUT", "--group-size", "7"], "7"),
    (["run", "quickstrat", "--out", "OUT"], "did you mean 'quickstart'"),
    (["eval", "MODEL", "--context", "0"], "context must be at least 2"),
    (["eval", "./nowhere", "--json", "MODEL/config.json"], "holds no results, so it is not replaced"),
    (["eval", "./nowhere", "--json", "MODEL"], "is a folder; give the name of a file"),
    (["quantize", "./nowhere", "rtn", "--out", "MINE", "--overwrite"], "is no checkpoint (it has no config.json); it holds notes.txt"),
])  # fmt: skip
def test_mistakes_are_one_message(zoo_command, model: str, tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    filled = {"MODEL": model, "MODEL/config.json": f"{model}/config.json", "OUT": str(tmp_path / "out"), "MINE": str(tmp_path / "mine")}
    given = [filled.get(w, w) for w in words]
    status, _, err = zoo_command(*given)
    assert status == 2
    assert message in err
    assert "Traceback" not in err
