"""The tests of ``suite_copy`` in Triton's interpreter."""

from suite_copy import *  # noqa: F403
