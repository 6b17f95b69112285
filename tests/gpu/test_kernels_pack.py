"""The tests of ``suite_pack`` with pages in GPU memory and slots in pinned host memory."""

from suite_pack import *  # noqa: F403
