"""What vLLM's worker does with the states of recurrent layers in align mode, on symbolic ranks.

A block holds one state: the content of its last place is that of the last token that the state has
seen. ``vllm/v1/worker/mamba_utils.py`` (``preprocess_mamba``) and
``vllm/model_executor/layers/mamba/checkpoint.py`` are followed, without speculative decoding: at
the beginning of a step a request's state is copied into the block in which the step ends, where
that is another one; the step advances it there, in place; and where the group has blocks for it,
the state at the last boundary inside the step is saved into the block before.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from symbolic_ranks import SymbolicEngine

Row = tuple[str, int, Sequence[int], Sequence[Sequence[int]]]
"""A request in a step: its id, the tokens computed before, the nodes of all, its block tables."""


class RecurrentStates:
    """The recurrent groups of an engine; nothing where it has none."""

    def __init__(self, engine: "SymbolicEngine") -> None:
        self._engine = engine
        groups = engine.kv_cache_config.kv_cache_groups
        self._specs = {
            index: group.kv_cache_spec
            for index, group in enumerate(groups)
            if isinstance(group.kv_cache_spec, MambaSpec)
        }
        self._columns: dict[str, int] = {}
        """The column of its block table in which a request's state is."""

    def forget(self, output: SchedulerOutput) -> None:
        """Requests that have ended, or start over in this step."""
        gone = {*output.finished_req_ids, *(output.preempted_req_ids or ())}
        for req_id in gone | set(output.scheduled_cached_reqs.resumed_req_ids):
            self._columns.pop(req_id, None)

    def advance(self, rows: Sequence[Row]) -> None:
        """What the requests of a step compute; all states are copied before any is advanced."""
        for group, spec in self._specs.items():
            size = spec.block_size
            for req_id, start, nodes, tables in rows:
                before = self._columns.get(req_id, (start - 1) // size)
                column = _column(nodes, size)
                if before not in (-1, column):
                    self._copy(group, tables[group][before], tables[group][column], req_id)
            for req_id, start, nodes, tables in rows:
                block = tables[group][_column(nodes, size)]
                if start:
                    self._engine.ranks.read(group, block, -1, nodes[start - 1], req_id)
                self._save_checkpoint(group, spec, req_id, start, nodes, tables[group])
                self._write(group, block, nodes[-1], req_id)
        for spec in self._specs.values():  # of one block size, or vLLM refuses them
            self._columns.update((row[0], _column(row[2], spec.block_size)) for row in rows)

    def _save_checkpoint(
        self,
        group: int,
        spec: MambaSpec,
        req_id: str,
        start: int,
        nodes: Sequence[int],
        table: Sequence[int],
    ) -> None:
        if not spec.num_prefill_checkpoint_blocks:
            return
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            [len(nodes)],
            [len(nodes) - start],
            hash_block_size=self._engine.block_tokens,
            mamba_block_size=spec.block_size,
            checkpoint_alignment=spec.prefill_checkpoint_alignment,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=self._engine.block_tokens,
        )
        if column >= 0 and table[column]:
            self._write(group, table[column], nodes[start + offset - 1], req_id)

    def _copy(self, group: int, source: int, target: int, by: str) -> None:
        ranks = self._engine.ranks
        ranks.about_to_write([target], by)
        for gpu in ranks.gpu:
            gpu[target] = list(gpu.get(source, [None]))

    def _write(self, group: int, block: int, node: int, by: str) -> None:
        self._engine.ranks.about_to_write([block], by)
        self._engine.ranks.write(group, block, -1, node)


def _column(nodes: Sequence[int], block_tokens: int) -> int:
    """Where in its block table a request's state is when it has computed ``nodes``."""
    return -(-len(nodes) // block_tokens) - 1
