"""The tests of ``suite_copy`` with pages in GPU memory and slots in pinned host memory."""

from suite_copy import *  # noqa: F403
