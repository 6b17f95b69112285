"""The tests of ``suite_checksum`` with pages in GPU memory and slots in pinned host memory."""

from suite_checksum import *  # noqa: F403
