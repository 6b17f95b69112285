"""The tests of ``suite_pack`` in Triton's interpreter."""

from suite_pack import *  # noqa: F403
