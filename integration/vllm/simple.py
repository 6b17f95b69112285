"""``KVFerrySimpleConnector``: eager stores of full blocks, hits pinned until they are taken."""

from typing import TYPE_CHECKING

from . import views
from .connector import OffloadConnectorBase
from .manager import OffloadManager

if TYPE_CHECKING:
    from vllm.v1.request import Request


class SimpleManager(OffloadManager):
    """Chunks are single blocks; a hit is pinned by ``match`` until it is allocated or dropped."""

    def prepare(self, request: "Request", num_computed_tokens: int) -> None:
        self._start_over(request, num_computed_tokens)

    def match(self, request: "Request", num_computed_tokens: int) -> int:
        request_id = views.request_id_of(request)
        core = self.core
        keys = core.match(request_id, num_computed_tokens, request.num_tokens)
        if keys:
            self._pins[request_id] = core.ledger.pin(core.geometry.group, keys)
        return len(keys) * core.geometry.chunk_tokens

    def record(self, request: "Request", num_hit_tokens: int) -> None:
        """Nothing: the pin refreshes recency, and storing starts at the first chunk."""


class KVFerrySimpleConnector(OffloadConnectorBase):
    """One KV cache group of full attention, stored block by block as it fills."""

    manager_type = SimpleManager
