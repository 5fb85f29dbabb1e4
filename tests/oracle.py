"""An independent statement of every layout, written from the axis definitions in numpy.

It shares no code with hikv: a pool is the K rows and V rows, each transposed into the layout's
order, with K and V concatenated where the `kv` axis stands.
"""

from __future__ import annotations

import numpy as np

ORDERS = {
    "layer_first": "kv layer page token head dim",
    "page_head": "kv page head token layer dim",
    "page_first": "kv page token layer head dim",
    "page_first_direct": "kv page layer token head dim",
    "page_first_direct_group": "kv page group layer token head dim",
    "page_unified": "page group layer kv token head dim",
}
LATENT_ORDERS = {
    "layer_first": "layer page token dim",
    "page_first": "page token layer dim",
    "page_first_direct": "page layer token dim",
    "page_unified": "page layer token dim",
}


def pack(layout: str, rows: list[np.ndarray], heads_per_group: int) -> np.ndarray:
    """Flat bytes of a dense pool.

    `rows` holds K and V (or one latent array), each uint8 `[page, layer, token, head, row bytes]`.
    """
    latent = len(rows) == 1
    order = (LATENT_ORDERS if latent else ORDERS)[layout].split()
    split = 0 if latent else order.index("kv")
    order = [axis for axis in order if axis != "kv"]
    pieces = []
    for array in rows:
        pages, layers, tokens, heads, width = array.shape
        grouped = array.reshape(pages, layers, tokens, -1, heads_per_group, width)
        axes = ["page", "layer", "token", "group", "head", "dim"]
        if "group" not in order:
            grouped = grouped.reshape(pages, layers, tokens, 1, heads, width)
        wanted = [a for a in axes if a not in order] + order
        moved = grouped.transpose([axes.index(a) for a in wanted])
        moved = moved.reshape(moved.shape[len(wanted) - len(order) :])
        pieces.append(moved.reshape(*moved.shape[:split], -1))
    return np.concatenate(pieces, axis=-1).ravel()


def unpack(
    layout: str, flat: np.ndarray, shapes: list[tuple[int, ...]], heads_per_group: int
) -> list[np.ndarray]:
    """The inverse of `pack`: arrays of `shapes` from flat bytes.

    Inverts by packing the positions of the bytes, so it needs no second statement of a layout.
    """
    offsets = np.cumsum([0] + [int(np.prod(s)) for s in shapes])
    positions = [
        np.arange(lo, hi).reshape(shape)
        for lo, hi, shape in zip(offsets[:-1], offsets[1:], shapes, strict=True)
    ]
    where = pack(layout, positions, heads_per_group)
    out = np.empty(offsets[-1], dtype=np.uint8)
    out[where] = flat
    return [
        out[lo:hi].reshape(s) for lo, hi, s in zip(offsets[:-1], offsets[1:], shapes, strict=True)
    ]
