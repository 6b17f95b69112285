"""``KVFerryOffloadingConnector``: chunks, several groups, policies, waiting for what comes."""

from typing import TYPE_CHECKING

from . import views
from .config import OffloadingOptions
from .connector import OffloadConnectorBase
from .manager import OffloadManager

if TYPE_CHECKING:
    from vllm.v1.request import Request


class OffloadingManager(OffloadManager):
    """Only peeks: a waiting request may be asked about in every step, and nothing is evicted
    between its answer and its allocation. Waits, once, for chunks that somebody is storing or
    loading."""

    def match(self, request: "Request", num_computed_tokens: int) -> int | None:
        return self.core.match(views.request_id_of(request), request.num_tokens, wait=True)

    def record(self, request: "Request", num_hit_tokens: int) -> None:
        """Nothing: recency is refreshed when the chunks are loaded or offered for storing."""


class KVFerryOffloadingConnector(OffloadConnectorBase):
    """The general connector: every model that vLLM serves with prefix caching."""

    manager_type = OffloadingManager
    options_type = OffloadingOptions
