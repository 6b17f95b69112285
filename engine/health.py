"""What the transfer engine counts, and when it has failed often enough to be off."""

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Health:
    """Counters since the start. ``off`` is final: it comes with one log line and stays."""

    max_failures: int
    stored_bytes: int = 0
    loaded_bytes: int = 0
    failed_jobs: int = 0
    skipped_jobs: int = 0
    corrupt_chunks: int = 0
    failures_in_a_row: int = 0
    off: bool = False

    def count_success(self) -> None:
        self.failures_in_a_row = 0

    def count_failure(self, error: Exception) -> None:
        """A failure of the device; a mismatch or a skipped store is none."""
        if self.off:
            return
        self.failures_in_a_row += 1
        if self.failures_in_a_row < self.max_failures:
            first = error if self.failures_in_a_row == 1 else None
            logger.warning("a transfer failed: %s", error, exc_info=first)
            return
        self.off = True
        logger.error(
            "offloading is off: %d transfers in a row have failed, the last with: %s. The model "
            "goes on without it",
            self.failures_in_a_row,
            error,
            exc_info=error,
        )

    def snapshot(self) -> dict[str, int | float]:
        return {
            "stored_bytes": self.stored_bytes,
            "loaded_bytes": self.loaded_bytes,
            "failed_jobs": self.failed_jobs,
            "skipped_jobs": self.skipped_jobs,
            "corrupt_chunks": self.corrupt_chunks,
            "off": int(self.off),
        }
