"""KV caches of every physical order, made the way vLLM lays them out."""

import torch

ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def layer_views(order: str, sizes: tuple[int, int, int, int, int]) -> list[torch.Tensor]:
    """One uint8 view ``[B, H, N, C]`` for each layer, over one allocation in this order.

    ``sizes`` are ``(L, B, H, N, C)``.
    """
    axes = ORDERS[order]
    memory = torch.zeros([sizes[axis] for axis in axes], dtype=torch.uint8)
    logical = memory.permute([axes.index(axis) for axis in range(5)])
    return list(logical)
