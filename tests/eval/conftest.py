"""Models and results that the evaluation tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.eval.made import Pair, load_pair, make_results, make_tiny
from zoo.eval.results import Results


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random LLaMA of 64 positions with a tokenizer, ours and transformers'."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session", params=["tiny", "stories260K", "babyllama"])
def pair(request: pytest.FixtureRequest) -> Pair:
    """Checkpoints to compare with transformers: a random one and two real ones."""
    if request.param == "tiny":
        return request.getfixturevalue("tiny")
    return load_pair(request.getfixturevalue("shared_data") / "weights" / request.param)


@pytest.fixture
def results() -> Results:
    return make_results()


@pytest.fixture(scope="session")
def prose() -> str:
    """Some English of about 6000 characters."""
    from zoo import corpus

    return corpus.text("test")[:6000]
