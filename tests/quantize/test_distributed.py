"""Quantization by two processes against the same by one."""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor

import zoo
from tests.quantize.models import MOE, ids, small
from tests.zoo.oracle import llama_checkpoint
from zoo.components.spec import dump
from zoo.model import Model
from zoo.quantize import Report, quantize, runner
from zoo.quantize.activations import Activations
from zoo.quantize.conversation import Failed
from zoo.quantize.distributed import Processes, joined
from zoo.quantize.stats.channels import ChannelSizes
from zoo.quantize.stats.hessian import Hessian

SIZE = 2
WINDOWS = ids(7, 24)  # which two processes cannot share evenly
CASES: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn"},
    "rtn without data": {"method": "rtn", "calibration": None},
    "gptq": {"tied": False, "rules": ["head.*={bits: 8}"]},
    "experts": {"mlp": MOE, "layers": 1, "least_tokens": 8, "true_sequential": True},
    "all experts": {"mlp": MOE, "layers": 1, "all_experts": True},
    "awq": {"method": "awq"},
    "smoothquant, gptq": {"transforms": ["smoothquant"]},
    "rotation, awq, experts": {"method": "awq", "mlp": MOE, "layers": 1, "transforms": ["rotation"]},
    "auto_round, gptq": {"method": "auto_round", "iterations": 4, "rules": ["*.v={name: gptq}"]},
    "nvfp4": {"method": "nvfp4"},
    "budget": {"bits": 3.9, "choices": (3, 4)},
}
EXACT = ("rtn", "rtn without data", "nvfp4", "auto_round, gptq")
RESUMED = "auto_round, gptq"
LAZILY = "budget of a model still to be loaded"


class Killed(BaseException):
    pass


def run(settings: dict[str, Any], **further: Any) -> tuple[Model, Report]:
    settings = {"method": "gptq", "calibration": WINDOWS, "group_size": 32, **settings, **further}
    if settings["method"] == "nvfp4":
        del settings["group_size"]
    model = small(settings.pop("mlp", None), settings.pop("layers", 2), settings.pop("tied", True), bias=True)
    return model, quantize(model, progress=False, **settings)


@contextmanager
def dying(module: str, error: BaseException) -> Iterator[None]:
    """Within this, the process that comes to a module raises an error."""
    real = runner.quantize_module

    def die(model: Model, path: str, *rest: Any) -> Any:
        if path == module:
            raise error
        return real(model, path, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "quantize_module", die)
        yield


def message(act: Callable[[], Any]) -> str:
    with pytest.raises((Failed, Killed, ValueError)) as caught:
        act()
    return f"{caught.type.__name__}: {caught.value}"


# ---- in each process -----------------------------------------------------------------------------------------------------------


@contextmanager
def group(rank: int, store: Path) -> Iterator[None]:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE, timeout=dt.timedelta(seconds=60))
    try:
        yield
    finally:
        dist.destroy_process_group()


def worker(rank: int, folder: Path) -> None:
    with group(rank, folder / "store"):
        for name, settings in CASES.items():
            keep(folder, name, rank, *run(settings))
        lazy = zoo.load(folder / "model", lazy=True)
        keep(folder, LAZILY, rank, lazy, quantize(lazy, calibration=WINDOWS, group_size=32, progress=False, **CASES["budget"]))
        keep(folder, "resumed", rank, *killed_and_resumed(folder / "work"))
        said = {name: message(act) for name, act in failures(rank).items()} | {"pooled": pooled(rank)}
        (folder / f"said.{rank}.json").write_text(json.dumps(said))


def dead_worker(rank: int, folder: Path) -> None:
    """The second process is gone in the middle of a layer."""
    with group(rank, folder / "first"), pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(Activations, "advance", lambda *_: os._exit(9))
        (folder / "said").write_text(message(lambda: run({}, work_dir=folder / "work")))


def whole_worker(rank: int, folder: Path) -> None:
    with group(rank, folder / "second"):
        keep(folder, "resumed", rank, *run({}, work_dir=folder / "work"))
        keep(folder, "whole", rank, *run({}))


def keep(folder: Path, name: str, rank: int, model: Model, report: Report) -> None:
    said = {"spec": dump(model.spec), "report": report.to_dict()}
    save_file({n: t.contiguous().clone() for n, t in model.state_dict().items()}, folder / f"{name}.{rank}", {"said": json.dumps(said)})
    (folder / f"{name}.{rank}.json").write_text(json.dumps(said))


def killed_and_resumed(work: Path) -> tuple[Model, Report]:
    with dying("layers.1.mixer.projection.v", Killed()):
        message(lambda: run(CASES[RESUMED], work_dir=work))
    return run(CASES[RESUMED], work_dir=work)


def failures(rank: int) -> dict[str, Callable[[], Any]]:
    def damaged() -> None:
        """One process dies in its own share, while the other waits for its results."""
        with dying("layers.1.mlp.up", ValueError("it is damaged")):
            run({})

    return {
        "one process fails": damaged,
        "other settings": lambda: run({"seed": rank, "bits": 3 + rank}),
        "one window": lambda: run({"calibration": ids(1, 24)}),
        "a folder of other work": lambda: run({}, work_dir=Path(__file__).parent),
    }


def pooled(rank: int) -> dict[str, Any]:
    """Statistics of what one process saw, what both saw, and of a module that shares its input."""
    x = torch.arange(24.0).view(SIZE, 4, 3)[rank]
    with joined() as processes:
        both, mine = Hessian(3), Hessian(3)
        both.update(x[: 2 + rank])
        mine.update(x)
        found = processes.pooled({"a": both, "b": both} | ({"only": mine} if rank else {}), Hessian, torch.device("cpu"))
        sizes = ChannelSizes(3)
        sizes.update(-x)
        channels = processes.pooled({"a": sizes}, ChannelSizes, torch.device("cpu"))["a"]
        mean = processes.mean(2.0 * rank, 3 - 2 * rank)
        share = processes.share({"x": 1.0, "y": 5.0, "z": 3.0, "w": 1.0})
    values = {name: [h.tokens, h.matrix.tolist()] for name, h in found.items()}
    return {"shared": found["a"] is found["b"], "values": values, "share": share, "mean": mean,
            "channels": [channels.tokens, channels.largest.tolist(), channels.mean.tolist()]}  # fmt: skip


# ---- the tests -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes leave."""
    where = tmp_path_factory.mktemp("two")
    zoo.save(small(), where / "model")
    mp.spawn(worker, args=(where,), nprocs=SIZE)
    return where


def found(folder: Path, name: str, rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_file(folder / f"{name}.{rank}"), json.loads((folder / f"{name}.{rank}.json").read_text())


@pytest.mark.parametrize("name", CASES)
def test_two_processes_do_what_one_does(name: str, folder: Path) -> None:
    model, report = run(CASES[name])
    (first, said), (second, repeated) = (found(folder, name, rank) for rank in range(SIZE))
    expected, wanted = model.state_dict(), json.loads(report.to_json())
    assert said["spec"] == repeated["spec"] == dump(model.spec)
    assert first.keys() == second.keys() == expected.keys()
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert all(first[n].dtype == expected[n].dtype for n in first)
    assert said["report"]["rows"] == repeated["report"]["rows"]
    for row, alone in zip(said["report"]["rows"], wanted["rows"], strict=True):
        assert (row["module"], row["tokens"], row["facts"].keys()) == (alone["module"], alone["tokens"], alone["facts"].keys())
        assert row["weight_error"] == pytest.approx(alone["weight_error"], rel=5e-3)  # one code more or less of 2,048
    assert layer_errors(said["report"]["rows"]) == pytest.approx(layer_errors(wanted["rows"]), rel=1e-3)
    if name in EXACT:
        assert all(torch.equal(first[n], expected[n]) for n in first)
    codes = [n for n in first if n.endswith("packed")]
    same = sum(int((first[n] == expected[n]).sum()) for n in codes), sum(first[n].numel() for n in codes)
    assert name == "nvfp4" or same[0] > 0.99 * same[1]


def test_a_budget_is_found_for_a_model_still_to_be_loaded(folder: Path) -> None:
    """The first process loads it to find the budget, and the others do not."""
    (first, said), (second, repeated) = (found(folder, LAZILY, rank) for rank in range(SIZE))
    assert said["spec"] == repeated["spec"]
    assert {row["settings"]["bits"] for row in said["report"]["rows"]} == {3, 4}
    assert all(torch.equal(first[n], second[n]) for n in first)


def layer_errors(rows: list[dict[str, Any]]) -> list[float]:
    """Root mean squares of the output errors of each layer's modules."""
    squares: dict[str, list[float]] = {}
    for row in rows:
        squares.setdefault(row["module"].split(".")[1], []).append((row["output_error"] or 0.0) ** 2)
    return [(sum(layer) / len(layer)) ** 0.5 for layer in squares.values()]


def test_a_run_killed_in_all_processes_ends_in_the_same_bits(folder: Path) -> None:
    for rank in range(SIZE):
        (resumed, said), (whole, expected) = found(folder, "resumed", rank), found(folder, RESUMED, rank)
        assert all(torch.equal(resumed[n], whole[n]) for n in whole)
        assert said["spec"] == expected["spec"]
        assert [row["facts"] for row in said["report"]["rows"]] == [row["facts"] for row in expected["report"]["rows"]]
    with pytest.raises(ValueError, match="belongs to another quantization: processes was 2, is 1"):
        run(CASES[RESUMED], work_dir=folder / "work")


def start(target: Callable[[int, Path], None], folder: Path) -> list[int | None]:
    """Exit codes of two processes, of which none outlives a minute."""
    context = mp.get_context("spawn")
    processes = [context.Process(target=target, args=(rank, folder)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    return [process.exitcode for process in processes]


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others_and_leaves_work_to_take_up(tmp_path: Path) -> None:
    assert start(dead_worker, tmp_path) == [0, 9]
    assert (tmp_path / "said").read_text().startswith("Lost: another process has died")
    assert start(whole_worker, tmp_path) == [0, 0]
    for rank in range(SIZE):
        resumed, whole = (found(tmp_path, name, rank)[0] for name in ("resumed", "whole"))
        assert all(torch.equal(resumed[n], whole[n]) for n in whole)


@pytest.mark.slow
def test_the_command_line_under_torchrun(tmp_path: Path) -> None:
    llama_checkpoint(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16, max_position_embeddings=64)
    arguments = ["-m", "zoo", "quantize", str(tmp_path / "model"), "rtn", "--group-size", "32", "--out"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(SIZE)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for command, out in ((torchrun, "two"), ([sys.executable], "one")):
        done = subprocess.run([*command, *arguments, str(tmp_path / out)], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"wrote {tmp_path / out}") == 1
        assert done.stderr.count("quantizing takes") == 1
    two, one = (load_file(tmp_path / out / "model.safetensors") for out in ("two", "one"))
    assert two.keys() == one.keys()
    assert all(torch.equal(two[n], one[n]) for n in one)


@pytest.mark.parametrize(
    ("name", "own", "others"),
    [
        ("one process fails", "ValueError: it is damaged", "Failed: process {} failed: it is damaged"),
        (
            "a folder of other work",
            "ValueError: {folder} is where finished layers are kept, and holds other files",
            "Failed: process {} failed: {folder} is where finished layers are kept, and holds",
        ),
    ],
)
def test_all_processes_fail_with_the_message_of_one(name: str, own: str, others: str, folder: Path) -> None:
    said = [json.loads((folder / f"said.{rank}.json").read_text())[name] for rank in range(SIZE)]
    failed = next(rank for rank in range(SIZE) if said[rank].startswith("ValueError"))
    here = Path(__file__).parent
    assert said[failed].startswith(own.format(folder=here))
    assert said[1 - failed].startswith(others.format(failed, folder=here))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other settings", "ValueError: the processes differ in method, seed; give all of them the same model and settings"),
        ("one window", "ValueError: 1 calibration windows are too few for 2 processes; give more samples, or start fewer"),
    ],
)
def test_mistakes_are_raised_in_all_processes(name: str, message: str, folder: Path) -> None:
    assert [json.loads((folder / f"said.{rank}.json").read_text())[name] for rank in range(SIZE)] == [message] * SIZE


def test_statistics_are_those_of_all_windows(folder: Path) -> None:
    said = [json.loads((folder / f"said.{rank}.json").read_text())["pooled"] for rank in range(SIZE)]
    x = torch.arange(24.0).view(SIZE, 4, 3)
    seen = torch.cat([x[0, :2], x[1, :3]])
    assert said[0] | {"share": []} == said[1] | {"share": []}
    assert said[0]["shared"]
    assert [said[rank]["share"] for rank in range(SIZE)] == [["y"], ["x", "z", "w"]]
    for name, tokens in (("a", seen), ("b", seen), ("only", x[1])):
        count, matrix = said[0]["values"][name]
        assert count == len(tokens)
        torch.testing.assert_close(torch.tensor(matrix), tokens.T @ tokens / len(tokens))
    count, largest, mean = said[0]["channels"]
    assert count == 8
    assert largest == [21, 22, 23]
    torch.testing.assert_close(torch.tensor(mean), x.flatten(0, 1).mean(0))
    assert said[0]["mean"] == 0.5


def test_one_process_exchanges_nothing() -> None:
    with joined() as alone:
        assert type(alone) is Processes
        assert alone.mine(WINDOWS) is not None
        assert torch.equal(alone.mine(WINDOWS), WINDOWS)
        assert alone.share({"a": 1.0, "b": 2.0}) == ["a", "b"]
