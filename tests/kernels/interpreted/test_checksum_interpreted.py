"""The tests of ``suite_checksum`` in Triton's interpreter."""

from suite_checksum import *  # noqa: F403
