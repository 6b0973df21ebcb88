"""What holds for every test: offline, few threads, and properties that fail the same way twice."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

# Before anything imports torch or huggingface_hub: both read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.e2e.conftest import Server

settings.register_profile(
    "house",
    deadline=None,  # a wall-clock limit fails on a busy machine, not on a bug
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("house")


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Server"]:
    """One `pageturner serve` for all rooms: the default model in float32, where a greedy answer doesn't depend on its
    company."""
    from tests.e2e.conftest import serving_default  # only here: most rooms need no client library

    with serving_default(tmp_path_factory.mktemp("serve") / "log") as running:
        yield running
