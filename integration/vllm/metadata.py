"""The engine's messages in the envelopes that vLLM carries between its processes."""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from ...engine.messages import StepOrders, StepReports


@dataclass(frozen=True, slots=True)
class OrdersMetadata(KVConnectorMetadata):
    """Scheduler to every worker, in every step."""

    orders: StepOrders


@dataclass(frozen=True, slots=True)
class ReportsMetadata(KVConnectorWorkerMetadata):
    """Every worker to the scheduler; vLLM merges the ranks' with ``aggregate``."""

    reports: StepReports

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ReportsMetadata":
        if not isinstance(other, ReportsMetadata):
            raise TypeError(f"cannot merge the reports of {type(other).__name__} with ours")
        return ReportsMetadata(StepReports.merge((self.reports, other.reports)))


@dataclass(frozen=True, slots=True)
class RankCapacity(KVConnectorHandshakeMetadata):
    """One worker to the scheduler, once at start: how many slots it holds."""

    num_slots: int
