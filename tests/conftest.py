"""What tests share: the tiny recipe, and where the shared data lies."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).parent.parent


@pytest.fixture
def shared() -> Path:
    """../shared/data beside the checkout; tests that need it are skipped elsewhere."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data beside the checkout")
    return folder


@pytest.fixture(scope="session")
def write_classes() -> Callable[..., Path]:
    """write_classes(folder, train=20, test=5, names="abc"): train/a/0.png ...; a few steps learn their brightness."""

    def write(folder: Path, train: int, test: int, names: Sequence[str] = "abc") -> Path:
        rng = np.random.default_rng(0)
        for split, count in (("train", train), ("test", test)):
            for number, name in enumerate(names):
                (folder / split / name).mkdir(parents=True)
                for index in range(count):
                    pixels = rng.integers(0, 60, (34, 40, 3), dtype=np.uint8) + np.uint8(80 * number)
                    Image.fromarray(pixels).save(folder / split / name / f"{index}.png")
        return folder

    return write


@pytest.fixture(autouse=True)
def _signals_as_they_were():
    """A run inside a test installs its stop signal; the next test must get Ctrl-C back."""
    import signal

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
