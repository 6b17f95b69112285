"""``KVFerrySimpleConnector``: eager stores of full blocks, hits pinned until they are taken."""

from typing import TYPE_CHECKING

from . import views
from .config import SimpleOptions
from .connector import OffloadConnectorBase
from .manager import OffloadManager

if TYPE_CHECKING:
    from vllm.v1.request import Request


class SimpleManager(OffloadManager):
    """Chunks are single blocks; a hit is pinned by ``match`` until it is allocated or dropped."""

    def prepare(self, request: "Request", num_computed_tokens: int) -> None:
        self._start_over(request, num_computed_tokens)

    def match(self, request: "Request", num_computed_tokens: int) -> int | None:
        request_id = views.request_id_of(request)
        num_hit_tokens = self.core.match(request_id, request.num_tokens, wait=False)
        if num_hit_tokens:
            self.core.pin(request_id)
        return num_hit_tokens

    def record(self, request: "Request", num_hit_tokens: int) -> None:
        """Nothing: the pin refreshes recency, and storing starts at the first chunk."""


class KVFerrySimpleConnector(OffloadConnectorBase):
    """Stores every full block as it fills, and holds a hit from lookup to load."""

    manager_type = SimpleManager
    options_type = SimpleOptions
