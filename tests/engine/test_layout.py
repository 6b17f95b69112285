"""Fragments: the right bytes of every block, as few runs as the order in memory allows."""

import pytest
import torch
from cache_shapes import ORDERS, layer_views
from kvferry.engine.layout import GroupLayout, Layout, group_layout, merge_fragments, page_view
from kvferry.engine.types import GroupId

SIZES = (3, 5, 2, 4, 6)  # L, B, H, N, C
GROUP = GroupId(0)


def addresses_of(views: list[torch.Tensor], block: int) -> list[int]:
    """Where each byte of a block lies, by the views themselves."""
    places: list[int] = []
    for view in views:
        offsets = torch.zeros((), dtype=torch.int64)
        for stride, size in zip(view.stride()[1:], view.shape[1:], strict=True):
            offsets = offsets.unsqueeze(-1) + torch.arange(size) * stride
        item = view.element_size()
        starts = view[block].data_ptr() + offsets.flatten() * item
        places += [int(start) + byte for start in starts for byte in range(item)]
    return places


def addresses_in(layout: GroupLayout, block: int) -> list[int]:
    return [
        fragment.base_address + block * fragment.block_stride_bytes + byte
        for fragment in layout.fragments
        for byte in range(fragment.num_bytes)
    ]


def whole(views: list[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    return [(view, view[0].numel() * view.element_size()) for view in views]


@pytest.mark.parametrize(
    ("order", "num_fragments"),
    [("LBHNC", 3), ("LBNHC", 3), ("LHBNC", 6), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 1)],
)
def test_every_order_gives_the_bytes_of_a_block_once(order: str, num_fragments: int) -> None:
    views = layer_views(order, SIZES)
    layout = group_layout(GROUP, 2, whole(views))
    assert len(layout.fragments) == num_fragments
    assert layout.num_blocks == 5
    assert layout.block_bytes == 3 * 2 * 4 * 6
    assert layout.slot_bytes == 2 * layout.block_bytes
    for block in range(5):
        covered = addresses_in(layout, block)
        assert len(set(covered)) == len(covered)
        assert sorted(covered) == sorted(addresses_of(views, block))
        assert covered == sorted(covered), "a slot is not in the order of the device"


def test_all_orders_are_tested() -> None:
    assert len(ORDERS) == 6


def test_wider_elements_and_split_k_and_v() -> None:
    memory = torch.zeros(2, 5, 4, 8, dtype=torch.bfloat16)  # K and V apart
    views = [memory[0], memory[1]]
    layout = group_layout(GROUP, 1, whole(views))
    assert [fragment.num_bytes for fragment in layout.fragments] == [64, 64]
    assert sorted(addresses_in(layout, 3)) == sorted(addresses_of(views, 3))


def test_one_layer_with_k_and_v_apart_in_one_view() -> None:
    view = torch.zeros(2, 5, 4, 8, dtype=torch.bfloat16).transpose(0, 1)  # [B, 2, ...]
    layout = group_layout(GROUP, 1, whole([view]))
    assert len(layout.fragments) == 2
    assert sorted(addresses_in(layout, 4)) == sorted(addresses_of([view], 4))


def test_packed_block_is_wider_than_the_pages_of_one_group() -> None:
    memory = torch.zeros(5, 100, dtype=torch.uint8)
    views = [memory[:, 0:30], memory[:, 40:60]]
    layout = group_layout(GROUP, 1, whole(views))
    assert [(f.block_stride_bytes, f.num_bytes) for f in layout.fragments] == [(100, 30), (100, 20)]


def test_neighbours_of_different_sizes_merge() -> None:
    memory = torch.zeros(5, 100, dtype=torch.uint8)
    views = [memory[:, 30:50], memory[:, 0:30]]
    layout = group_layout(GROUP, 1, whole(views))
    assert [fragment.num_bytes for fragment in layout.fragments] == [50]


def test_padding_is_copied_where_it_joins_two_pages_and_nowhere_else() -> None:
    memory = torch.zeros(5, 3, 32, dtype=torch.uint8)
    views = [memory[:, layer, :24] for layer in range(3)]
    joined = group_layout(GROUP, 1, [(view, 32) for view in views])
    assert [fragment.num_bytes for fragment in joined.fragments] == [32 + 32 + 24]
    apart = group_layout(GROUP, 1, [(view, 24) for view in views])
    assert [fragment.num_bytes for fragment in apart.fragments] == [24, 24, 24]


def test_padding_in_a_layer_first_order_stays_out() -> None:
    views = [torch.zeros(5, 32, dtype=torch.uint8)[:, :24] for _ in range(2)]
    layout = group_layout(GROUP, 1, [(view, 32) for view in views])
    assert [fragment.num_bytes for fragment in layout.fragments] == [24, 24]


def test_a_shared_cache_is_moved_once() -> None:
    view = torch.zeros(5, 24, dtype=torch.uint8)
    assert len(group_layout(GROUP, 1, [(view, 24), (view, 24)]).fragments) == 1


def test_overlapping_layers_of_one_group_are_refused() -> None:
    memory = torch.zeros(5, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="overlap"):
        merge_fragments([page_view(memory[:, :24], 24), page_view(memory[:, 16:40], 24)])


def test_groups_may_alias_the_same_bytes() -> None:
    memory = torch.zeros(5, 64, dtype=torch.uint8)
    one = group_layout(GroupId(0), 1, [(memory, 64)])
    two = group_layout(GroupId(1), 1, [(memory.view(5, 2, 32), 64)])
    assert one.fragments == two.fragments


def test_one_slot_size_with_its_waste() -> None:
    small = group_layout(GroupId(0), 2, [(torch.zeros(5, 24, dtype=torch.uint8), 24)])
    large = group_layout(GroupId(3), 1, [(torch.zeros(5, 72, dtype=torch.uint8), 72)])
    layout = Layout((small, large))
    assert layout.slot_stride_bytes == 128
    assert layout.wasted_bytes() == {0: 128 - 48, 3: 128 - 72}
    assert layout.checksum_stride_bytes == 16
    assert layout.bytes_per_slot(checksums=True) == 144
    assert layout.bytes_per_slot(checksums=False) == 128
    assert layout.group(GroupId(3)) is large
    with pytest.raises(ValueError, match=r"no group 1 .*allowed: \[0, 3\]"):
        layout.group(GroupId(1))


@pytest.mark.parametrize(
    ("cache", "page_bytes", "message"),
    [
        (torch.zeros(5), 4, "shape"),
        (torch.zeros(5, 8, dtype=torch.uint8), 7, "a block of 8 bytes"),
        (torch.zeros(1, 8, dtype=torch.uint8).expand(5, 8), 8, "twice"),
        (torch.zeros(5, 1, 8, dtype=torch.uint8).expand(5, 2, 8), 16, "twice"),
    ],
)
def test_bad_caches_are_refused(cache: torch.Tensor, page_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        page_view(cache, page_bytes)


def test_caches_of_different_pools_are_refused() -> None:
    caches = [(torch.zeros(count, 8, dtype=torch.uint8), 8) for count in (4, 5)]
    with pytest.raises(ValueError, match="one count"):
        group_layout(GROUP, 1, caches)
