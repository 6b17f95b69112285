"""A page as headless Chromium shows it, for the tests."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.image import imread

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
LIMIT_S: Final = 120.0
_PREFERENCES: Final = {"dark": 0, "light": 1}

Pixels = npt.NDArray[np.int64]


def find() -> str:
    """Chromium's path. Skips where there is none, and fails where the tests have been told that
    there is one."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    reason = f"none of {', '.join(NAMES)} is on the path: `make chromium` installs it"
    if os.environ.get("KVFERRY_REQUIRE_CHROMIUM"):
        pytest.fail(reason)
    pytest.skip(reason)


def screenshot(
    page: Path, folder: Path, width: int, height: int, theme: Literal["light", "dark"]
) -> Pixels:
    """``page`` in a window of this size: ``[height, width, 3]`` of 0 to 255.

    Whatever the browser keeps goes into ``folder``, and it cannot reach a network.
    """
    shot = folder / "screenshot.png"
    command = [
        find(), "--headless", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
        "--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={_PREFERENCES[theme]}",
        f"--window-size={width},{height}", f"--screenshot={shot}", page.as_uri(),
    ]  # fmt: skip
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")  # root has none
    log = folder / "chromium.log"
    with log.open("wb") as output:
        browser = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            browser.wait(LIMIT_S)
        finally:
            _end(browser)
    assert shot.exists(), log.read_text(errors="replace")
    image: Any = imread(shot)
    return np.rint(image[..., :3] * 255).astype(np.int64)


def _end(browser: "subprocess.Popen[bytes]") -> None:
    """Its helper processes, too, if any are left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(browser.pid, signal.SIGKILL)
    browser.wait(30)
