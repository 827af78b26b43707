"""What tests share: the tiny recipe, and where the shared data lies."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).parent.parent


@pytest.fixture
def shared() -> Path:
    """../shared/data beside the checkout; tests that need it are skipped elsewhere."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data beside the checkout")
    return folder


@pytest.fixture(autouse=True)
def _signals_as_they_were():
    """A run inside a test installs its stop signal; the next test must get Ctrl-C back."""
    import signal

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
