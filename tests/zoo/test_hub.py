"""The hub: what is in the local cache works without a network; fetching and publishing, against a stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.zoo.hub_server import Hub, serving
from tests.zoo.oracle import llama_checkpoint
from zoo.hub import chosen

SECRET = "hf_notToBePrinted"
REVISION = "0123456789012345678901234567890123456789"


def cached(cache: Path, repository: str) -> None:
    """Lay a checkpoint into a hub cache as huggingface-hub does."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    llama_checkpoint(folder / "snapshots" / REVISION)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(REVISION)


def run(code: str, cache: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)


def test_cached_models_load_offline(tmp_path: Path) -> None:
    cached(tmp_path, "org/name")
    for reference in ("org/name", "org/name@main", f"org/name@{REVISION}"):
        found = run(f"import zoo; print(zoo.load({reference!r}).source.reference)", tmp_path)
        assert found.stdout.strip() == reference, found.stderr


def test_what_is_not_there_says_so(tmp_path: Path) -> None:
    found = run("import zoo; zoo.load('org/absent')", tmp_path)
    assert "HubError: org/absent: the hub library is switched offline (HF_HUB_OFFLINE)" in found.stderr
    assert "the files are not in the local cache" in found.stderr


# ---- against a stand-in on loopback ------------------------------------------------------------------------------------------


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving() as found:
        yield found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    llama_checkpoint(tmp_path / "tiny")
    return tmp_path / "tiny"


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def zoo_command(hub: Hub, cache: Path, *words: str, seconds: int = 10) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, for the client reads its settings when it is imported. seconds: for an answer."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": SECRET, "NO_COLOR": "1"}
    env |= {"HF_HUB_ETAG_TIMEOUT": str(seconds), "HF_HUB_DOWNLOAD_TIMEOUT": str(seconds)}
    return subprocess.run([sys.executable, "-m", "zoo", *words], capture_output=True, text=True, env=env, check=False, timeout=120)


def test_pull_fetches_checks_and_does_not_fetch_again(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", files_of(checkpoint) | {"pickle.bin": b"not wanted"})
    first = zoo_command(hub, tmp_path / "home", "pull", "org/tiny", "--to", str(tmp_path / "here"))
    assert first.returncode == 0, first.stderr
    assert files_of(checkpoint) == files_of(tmp_path / "here")
    again = zoo_command(hub, tmp_path / "home", "pull", "org/tiny", "--to", str(tmp_path / "here"))
    assert "0 fetched" in again.stdout
    assert len([(m, p) for m, p in hub.requests if m == "GET" and p.endswith("model.safetensors")]) == 1
    assert SECRET not in first.stdout + first.stderr


@pytest.mark.slow
def test_a_broken_connection_goes_on_where_it_broke(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", files_of(checkpoint))
    hub.breaks["model.safetensors"] = 5000
    found = zoo_command(hub, tmp_path / "home", "pull", "org/tiny", "--to", str(tmp_path / "here"))
    if found.returncode:  # the client may give up; then what it has is kept, and the second call goes on
        assert "error:" in found.stderr
        found = zoo_command(hub, tmp_path / "home", "pull", "org/tiny", "--to", str(tmp_path / "here"))
    assert found.returncode == 0, found.stderr
    assert files_of(checkpoint) == files_of(tmp_path / "here")


def test_a_wrong_checksum_is_told_and_the_file_deleted(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", files_of(checkpoint))
    hub.altered.add("model.safetensors")
    found = zoo_command(hub, tmp_path / "home", "pull", "org/tiny")
    assert found.returncode == 2
    assert "model.safetensors is damaged" in found.stderr
    hub.altered.clear()
    again = zoo_command(hub, tmp_path / "home", "pull", "org/tiny")
    assert again.returncode == 0, again.stderr
    assert "1 fetched and checked" in again.stdout


@pytest.mark.slow
def test_every_damaged_file_is_deleted(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", files_of(checkpoint))
    hub.altered |= {"model.safetensors", "config.json"}
    found = zoo_command(hub, tmp_path / "home", "pull", "org/tiny")
    assert "config.json, model.safetensors are damaged" in found.stderr
    hub.altered.clear()
    again = zoo_command(hub, tmp_path / "home", "pull", "org/tiny", "--to", str(tmp_path / "here"))
    assert again.returncode == 0, again.stderr
    assert files_of(checkpoint) == files_of(tmp_path / "here")


def test_of_several_sets_of_weights_one_is_fetched() -> None:
    names = ["config.json", "model.safetensors", "consolidated.safetensors", "original/model.safetensors", "tokenizer.json", "x.bin"]
    assert chosen(names) == ["config.json", "model.safetensors", "tokenizer.json"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert chosen([*shards, "adapter.safetensors"]) == shards
    assert chosen(["config.json", "weights.safetensors"]) == ["config.json", "weights.safetensors"]


@pytest.mark.slow
def test_a_private_push_never_goes_public(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.add("me/tiny", {})
    found = zoo_command(hub, tmp_path / "home", "push", str(checkpoint), "me/tiny", "--private")
    assert found.returncode == 2
    assert "public" in found.stderr
    assert not hub.repositories["me/tiny"].branches["main"]


@pytest.mark.slow
def test_a_refused_push_leaves_no_branch(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.add("me/tiny", {"model-00001-of-00002.safetensors": b"old"})
    refused = zoo_command(hub, tmp_path / "home", "push", str(checkpoint), "me/tiny")
    assert refused.returncode == 2
    assert list(hub.repositories["me/tiny"].branches) == ["main"]
    branched = zoo_command(hub, tmp_path / "home", "push", str(checkpoint), "me/tiny", "--revision", "new")
    assert branched.returncode == 0, branched.stderr
    assert "model-00001-of-00002.safetensors" not in hub.repositories["me/tiny"].branches["new"]
    assert "model-00001-of-00002.safetensors" in hub.repositories["me/tiny"].branches["main"]


@pytest.mark.slow
def test_a_branch_that_moves_meanwhile_damages_nothing(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", files_of(checkpoint))
    hub.moves["model.safetensors"] = {"config.json": b'{"model_type": "llama", "of": "the next commit"}'}
    found = zoo_command(hub, tmp_path / "home", "pull", "org/tiny")
    assert found.returncode == 0, found.stderr
    assert hub.repositories["org/tiny"].commits == 2


@pytest.mark.slow
def test_pull_says_what_is_wrong(hub: Hub, tmp_path: Path) -> None:
    found = zoo_command(hub, tmp_path / "home", "pull", "org/absent")
    assert found.returncode == 2
    assert "org/absent" in found.stderr
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    full = zoo_command(hub, tmp_path / "home", "pull", "org/absent", "--to", str(tmp_path / "full"))
    assert full.returncode == 2
    assert "is not empty" in full.stderr


def test_push_publishes_a_checkpoint_that_loads_again(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    found = zoo_command(hub, tmp_path / "home", "push", str(checkpoint), "me/tiny", "--private", "--base", "org/base")
    assert found.returncode == 0, found.stderr
    assert SECRET not in found.stdout + found.stderr
    there = hub.repositories["me/tiny"]
    assert there.private
    assert there.branches["main"]["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()
    card = there.branches["main"]["README.md"].decode()
    assert 'base_model: "org/base"' in card
    assert 'zoo.load("me/tiny")' in card
    back = zoo_command(hub, tmp_path / "other", "show", "me/tiny")
    assert back.returncode == 0, back.stderr


@pytest.mark.slow
def test_push_refuses_to_overwrite_and_removes_stale_weights_when_told(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.add("me/tiny", {"model-00001-of-00002.safetensors": b"old", "notes.md": b"kept"})
    refused = zoo_command(hub, tmp_path / "home", "push", str(checkpoint), "me/tiny")
    assert refused.returncode == 2
    assert "model-00001-of-00002.safetensors, notes.md" in refused.stderr
    assert "model.safetensors" not in hub.repositories["me/tiny"].branches["main"]
    done = zoo_command(hub, tmp_path / "home", "push", str(checkpoint), "me/tiny", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert "model-00001-of-00002.safetensors" not in hub.repositories["me/tiny"].branches["main"]
    assert hub.repositories["me/tiny"].branches["main"]["notes.md"] == b"kept"


@pytest.mark.slow
def test_push_to_a_branch_leaves_main_alone(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    found = zoo_command(hub, tmp_path / "home", "push", str(checkpoint), "me/tiny", "--revision", "int4")
    assert found.returncode == 0, found.stderr
    assert "model.safetensors" in hub.repositories["me/tiny"].branches["int4"]
    assert not hub.repositories["me/tiny"].branches["main"]


@pytest.mark.slow
def test_a_push_that_broke_leaves_nothing_half_and_can_be_run_again(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.refuse_uploads = 100
    broken = zoo_command(hub, tmp_path / "home", "push", str(checkpoint), "me/tiny")
    assert broken.returncode == 2, broken.stderr
    assert "Nothing was published" in broken.stderr
    assert not hub.repositories["me/tiny"].branches["main"]
    hub.refuse_uploads = 0
    assert zoo_command(hub, tmp_path / "home", "push", str(checkpoint), "me/tiny").returncode == 0
    assert "model.safetensors" in hub.repositories["me/tiny"].branches["main"]


def test_dry_run_lists_the_files_and_sends_nothing(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    found = zoo_command(hub, tmp_path / "home", "push", str(checkpoint), "me/tiny", "--dry-run")
    assert found.returncode == 0, found.stderr
    for name in ("config.json", "model.safetensors", "README.md"):
        assert name in found.stdout
    assert not hub.requests


@pytest.mark.slow
@pytest.mark.parametrize(("name", "why"), [("tiny", "no owner"), ("a/b/c", "no name on the hub"), ("me/..", "no name on the hub")])
def test_push_checks_the_name_first(hub: Hub, checkpoint: Path, tmp_path: Path, name: str, why: str) -> None:
    found = zoo_command(hub, tmp_path / "home", "push", str(checkpoint), name)
    assert found.returncode == 2
    assert why in found.stderr


@pytest.mark.slow
def test_push_wants_a_checkpoint(hub: Hub, tmp_path: Path) -> None:
    found = zoo_command(hub, tmp_path / "home", "push", str(tmp_path), "me/tiny")
    assert found.returncode == 2
    assert "is not a saved checkpoint" in found.stderr


# ---- a hub that takes the connection and is silent ----------------------------------------------------------------------------

SILENT = {"all": ".*", "the list of files": "GET .*/tree/", "the commit": "GET .*/revision/"}


@pytest.mark.parametrize("what", [pytest.param(what, marks=pytest.mark.slow if what != "all" else ()) for what in SILENT])
def test_a_silent_hub_is_one_error_in_time(hub: Hub, checkpoint: Path, tmp_path: Path, what: str) -> None:
    hub.add("org/tiny", files_of(checkpoint))
    hub.silent = SILENT[what]
    began = time.monotonic()
    found = zoo_command(hub, tmp_path / "home", "show", "org/tiny", seconds=1)
    assert time.monotonic() - began < 90  # the library tries six times for the list of files
    assert found.returncode == 2, found.stderr
    assert f"error: org/tiny: the hub at {hub.url} cannot be reached or does not answer (HF_HUB_ETAG_TIMEOUT=1 s" in found.stderr
    assert "give a local folder" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.slow
def test_a_hub_that_is_silent_about_a_file_is_given_up(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.add("org/tiny", files_of(checkpoint))
    hub.silent = r"GET .*/resolve/.*/model\.safetensors"
    found = zoo_command(hub, tmp_path / "home", "pull", "org/tiny", seconds=1)
    assert found.returncode == 2, found.stderr
    assert "does not answer" in found.stderr
    assert "HF_HUB_OFFLINE=1" in found.stderr
    hub.silent = "(?!)"
    assert zoo_command(hub, tmp_path / "home", "pull", "org/tiny").returncode == 0


@pytest.mark.slow
def test_what_is_in_the_cache_loads_although_the_hub_is_silent(hub: Hub, tmp_path: Path) -> None:
    cached(tmp_path / "home/hub", "org/name")
    hub.silent = ".*"
    found = zoo_command(hub, tmp_path / "home", "show", "org/name", seconds=1)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_a_push_to_a_silent_hub_ends(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.silent = "GET "
    found = zoo_command(hub, tmp_path / "home", "push", str(checkpoint), "me/tiny", seconds=1)
    assert found.returncode == 2, found.stderr
    assert "does not answer" in found.stderr
