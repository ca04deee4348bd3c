"""Every command on a small model, and mistakes as one line."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import zoo
from tests.eval.made import make_tiny
from zoo import cli, saving
from zoo.commands.options import with_home
from zoo.quantize.resume import reserved


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
             "--least-tokens", "3", "--offload", str(tmp_path), "--option", "symmetric=true", "--calibrated-cache", "fp8")  # fmt: skip
    status, _, err = zoo_command("quantize", model, "rtn", "--out", str(out), "--group-size", "16", *words)
    assert status == 0, err
    report = json.loads((out / "quantization_report.json").read_text())
    assert report["settings"]["transforms"] == [{"name": "rotation", "block": 16}, "smoothquant"]
    assert report["settings"]["method"] == {"name": "rtn", "group_size": 16}
    assert {c["transform"] for c in report["changes"]} >= {"smoothquant"}
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("activations")]
    cache: Any = zoo.load(out).spec.cache
    assert cache.name == "fp8"
    assert cache.scales
    status, _, err = zoo_command("quantize", model, "rtn", "--out", str(tmp_path / "no"), "--calibrated-cache", "kivi")
    assert (status, "those that have: fp8, int8" in err) == (2, True)
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


# ---- where things are written ----------------------------------------------------------------------------------------------------


def test_a_tilde_is_the_home_folder_in_every_option(zoo_command, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a line of text to round for\n" * 60)
    words = ("quantize", model, "rtn", "--out=~/q", "--text=~/text.txt", "--offload=~", "--samples=1", "--length=8", "--group-size=16")
    status, _, err = zoo_command(*words)
    assert status == 0, err
    assert sorted(p.name for p in tmp_path.glob("[!.]*")) == ["q", "text.txt"]  # hidden ones are caches of libraries
    status, _, err = zoo_command(*words)
    assert (status, "is not empty; it holds a checkpoint" in err) == (2, True)


def test_paths_in_lists_are_expanded_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = {}
    with_home(lambda **given: found.update(given))(image=[Path("~/a"), Path("b")], name="~/c", count=3)
    assert found == {"image": [tmp_path / "a", Path("b")], "name": "~/c", "count": 3}


def test_model_and_report_come_into_place_together(zoo_command, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(made: Path, target: Path) -> None:
        raise OSError(", ".join(sorted(p.name for p in made.iterdir() if p.suffix != ".png")))

    monkeypatch.setattr(saving, "move_in", failing)
    _, _, err = zoo_command("quantize", model, "rtn", "--out", str(tmp_path / "q"), "--group-size", "16")
    assert "model.safetensors, quantization_report.html, quantization_report.json" in err
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q.work"]
    status, _, err = zoo_command("quantize", model, "rtn", "--out", str(tmp_path / "q"), "--group-size", "16")
    assert status == 0, err
    assert [p.name for p in tmp_path.iterdir()] == ["q"]


@pytest.mark.parametrize("words", [["quantize", "MODEL", "rtn", "--group-size", "16"], ["convert", "MODEL", "--to", "mha"]], ids=" ".join)
def test_the_model_that_is_read_is_not_replaced(zoo_command, model: str, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr("zoo.quantize.quantize", lambda *_, **__: pytest.fail("it was quantized"))
    monkeypatch.setattr("zoo.conversion.convert", lambda *_, **__: pytest.fail("it was converted"))
    before = {p.name: p.read_bytes() for p in Path(model).iterdir()}
    status, _, err = zoo_command(*(model if w == "MODEL" else w for w in words), "--out", model, "--overwrite")
    assert status == 2
    assert "which the model is read from, so it is never replaced" in err
    assert {p.name: p.read_bytes() for p in Path(model).iterdir()} == before


@pytest.mark.parametrize(("there", "message"), [
    ("file", "q.work is a file, where there should be the folder where finished layers are kept; move it away"),
    ("other files", "holds other files: notes.txt; move them away"),
    ("other work", "belongs to another quantization: all_experts was None, is False"),
    ("another run", "q.work, where finished layers are kept, is in use by another process; wait until that is done"),
])  # fmt: skip
def test_what_is_in_the_place_of_the_work_folder(zoo_command, model: str, tmp_path: Path, there: str, message: str) -> None:
    work = tmp_path / "q.work"
    lock = reserved(work)
    with ThreadPoolExecutor(1) as other, ExitStack() as held:
        if there == "file":
            work.write_text("mine")
        else:
            work.mkdir()
        if there == "other files":
            (work / "notes.txt").write_text("mine")
        if there == "other work":
            (work / "fingerprint.json").write_text("{}")
        if there == "another run":
            other.submit(lock.__enter__).result()
            held.callback(lambda: other.submit(lock.__exit__, None, None, None).result())
        status, _, err = zoo_command("quantize", model, "rtn", "--out", str(tmp_path / "q"), "--group-size", "16")
    assert status == 2
    assert message in err
    assert "work_dir" not in err
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("bits", ["nan", "inf", "-3.5", "1e400"])
@pytest.mark.parametrize("format", [[], ["--format", "gptq"]], ids=str)
def test_bits_that_are_no_number_of_bits(zoo_command, tmp_path: Path, bits: str, format: list[str]) -> None:
    status, _, err = zoo_command("quantize", "./nowhere", "rtn", "--out", str(tmp_path / "q"), f"--bits={bits}", *format)
    assert status == 2
    assert f"bits={float(bits)}: give a positive, finite number of bits per weight" in err
