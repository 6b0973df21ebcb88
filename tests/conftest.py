"""What holds for every test: offline, few threads, and properties that fail the same way twice."""

import os

# Before anything imports torch or huggingface_hub: both read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "house",
    deadline=None,  # a wall-clock limit fails on a busy machine, not on a bug
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("house")
