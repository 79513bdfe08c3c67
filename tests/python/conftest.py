# SPDX-License-Identifier: Apache-2.0 OR MIT
"""What all Python tests share: backends to run on, hypothesis' settings, and what is left out where torch is not installed."""

import importlib.util
import os

import hypothesis
import pytest
import topkey

HAS_TORCH = importlib.util.find_spec("torch") is not None
CPU_BACKENDS = [b.name for b in topkey.backends() if b.device == "cpu" and not b.unusable]

# The same examples on every run; TOPKEY_EXAMPLES=1000 for a long look.
hypothesis.settings.register_profile(
    "topkey",
    max_examples=int(os.environ.get("TOPKEY_EXAMPLES", "40")),
    derandomize="TOPKEY_EXAMPLES" not in os.environ,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("topkey")


@pytest.fixture(params=CPU_BACKENDS)
def backend(request):
    """Every backend that takes host memory and runs here."""
    return request.param


@pytest.fixture
def on(backend):
    """An Exec that forces the backend."""
    return topkey.Exec(backend=backend)


def pytest_collection_modifyitems(items):
    if not HAS_TORCH:
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(pytest.mark.skip(reason="torch is not installed"))
