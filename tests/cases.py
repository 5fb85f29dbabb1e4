"""The matrix that all copy tests share: kinds of rows, forms of pools, and the one check of a copy.

Rows are what a pool holds, whatever its form: K and V (or one latent array), each uint8
`[page, layer, token, head, row bytes]`. A form lays rows out in memory and shows that memory to
hikv as a buffer. So the memory that a copy should leave behind is the same form built from the rows
that should be there, and a check compares all of it: other pages, and the gaps of views, included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from oracle import LATENT_ORDERS, ORDERS, pack

from hikv.buffer import KVBuffer
from hikv.spec import KVSpec

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8, torch.float32)
PAIRS = tuple(product(ORDERS, repeat=2))
LATENT_PAIRS = tuple(product(LATENT_ORDERS, repeat=2))
REFUSED_LATENT_PAIRS = tuple(pair for pair in PAIRS if pair not in LATENT_PAIRS)
LATENT_ROW_BYTES = (132, 528, 576, 656, 1152)
ID_FORMS: dict[str, Callable[[np.ndarray], object]] = {
    "int32 array": lambda ids: ids.astype(np.int32),
    "int64 array": lambda ids: ids.astype(np.int64),
    "int32 tensor": lambda ids: torch.from_numpy(ids.astype(np.int32)),
    "int64 tensor": lambda ids: torch.from_numpy(ids.astype(np.int64)),
    "list": lambda ids: ids.tolist(),
}

Rows = list[np.ndarray]
Place = Callable[[torch.Tensor], torch.Tensor]
Form = Callable[[KVSpec, Rows, Place], "Pool"]


@dataclass
class Pool:
    """A buffer, and every tensor whose bytes it may reach."""

    buffer: KVBuffer
    tensors: list[torch.Tensor]

    def bytes(self) -> np.ndarray:
        """All of its memory, gaps included."""
        return np.concatenate([t.cpu().view(torch.uint8).numpy().ravel() for t in self.tensors])


def head_specs(dtype: torch.dtype, num_layers: int = 3) -> Iterator[KVSpec]:
    """MHA with 8 heads in 1, 2, 4 and 8 groups, and GQA with 2 heads."""
    for heads, head_group, page_size in ((8, 8, 4), (8, 4, 5), (8, 2, 4), (8, 1, 6), (2, None, 16)):
        yield KVSpec(num_layers, heads, 16, page_size, dtype, head_group=head_group)


def latent_specs(dtype: torch.dtype, num_layers: int = 3) -> Iterator[KVSpec]:
    """One row a token: multiples of 16 bytes that real models have, and one of 4 bytes alone."""
    for row_bytes, page_size in zip(LATENT_ROW_BYTES, (4, 5, 8, 4, 16), strict=True):
        yield KVSpec(num_layers, 1, row_bytes // dtype.itemsize, page_size, dtype, latent=True)


def wide_specs(dtype: torch.dtype, num_layers: int = 3) -> Iterator[KVSpec]:
    """K rows of 192 elements and V rows of 128, in one group of heads and in two."""
    for head_group in (None, 2):
        yield KVSpec(num_layers, 4, 192, 4, dtype, head_group=head_group, v_head_dim=128)


def random_rows(spec: KVSpec, num_pages: int, rng: np.random.Generator) -> Rows:
    """Random bytes for every row of `num_pages` pages."""
    widths = [c.width * spec.dtype.itemsize for c in spec.components for _ in range(c.kv)]
    shape = (num_pages, spec.num_layers, spec.page_size, spec.num_kv_heads)
    return [rng.integers(0, 256, (*shape, width), dtype=np.uint8) for width in widths]


def logical_bytes(rows: Rows, pages: np.ndarray) -> np.ndarray:
    """What `KVBuffer.logical(pages)` should hold: `[page, layer, kv, token, head, row bytes]`."""
    same = len({array.shape for array in rows}) == 1
    picked = [array[pages] for array in rows]
    return np.stack(picked, 2) if same else np.concatenate(picked, -1)[:, :, None]


def stay(tensor: torch.Tensor) -> torch.Tensor:
    """The place where a tensor is made: CPU memory."""
    return tensor


def check_copy(
    run: Callable[..., Any],
    spec: KVSpec,
    src: Form,
    dst: Form,
    *,
    dst_spec: KVSpec | None = None,
    layers: tuple[int, int] | range | None = None,
    ids: str = "int64 array",
    seed: int = 0,
    src_place: Place = stay,
    dst_place: Place = stay,
) -> Any:
    """Copy 4 of 7 pages to 4 of 6, in random order, and compare every byte of both pools.

    Beforehand the destination differs from what it should become in every byte that is to change.
    Returns what `run` returned.

    Args:
        run: a launcher with the signature of `hikv.kernels.reference.reference`, done on return.
        spec, dst_spec: the source's spec, and the destination's where its head grid differs.
        ids: a key of `ID_FORMS`.
        src_place, dst_place: bring the pool's tensors to where they shall live.
    """
    rng = np.random.default_rng(seed)
    dst_spec = dst_spec or spec
    source, before = random_rows(spec, 7, rng), random_rows(spec, 6, rng)
    src_pages, dst_pages = rng.permutation(7)[:4], rng.permutation(6)[:4]
    span = slice(None) if layers is None else slice(*_ends(layers))
    after = [array.copy() for array in before]
    for old, new, moved in zip(before, after, source, strict=True):
        new[dst_pages, span] = moved[src_pages, span]
        old[dst_pages, span] = ~moved[src_pages, span]

    src_pool, dst_pool = src(spec, source, src_place), dst(dst_spec, before, dst_place)
    as_ids = ID_FORMS[ids]
    result = run(
        src_pool.buffer, dst_pool.buffer, as_ids(src_pages), as_ids(dst_pages), layers=layers
    )
    assert_bytes(dst_pool.bytes(), dst(dst_spec, after, stay).bytes(), "destination")
    assert_bytes(src_pool.bytes(), src(spec, source, stay).bytes(), "source")
    return result


def assert_bytes(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Equal byte for byte; a failure names the first wrong one and how many there are."""
    if not np.array_equal(got, want):
        wrong = np.flatnonzero(got != want)
        at = int(wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(want)} bytes are wrong, "
            f"the first at {at}: {got[at]:#04x} instead of {want[at]:#04x}"
        )


def _ends(layers: tuple[int, int] | range) -> tuple[int, int]:
    return (layers.start, layers.stop) if isinstance(layers, range) else layers


GAP = 0xA5
"""What lies between the rows of a view, where no copy may write."""


def dense(layout: str) -> Form:
    """One flat tensor, packed by the oracle."""

    def build(spec: KVSpec, rows: Rows, place: Place) -> Pool:
        memory = place(torch.from_numpy(pack(layout, rows, spec.heads_per_group)))
        return Pool(KVBuffer.from_tensor(memory, spec, layout), [memory])

    return build


def per_layer(spec: KVSpec, rows: Rows, place: Place) -> Pool:
    """A K and a V tensor for every layer, each an allocation of its own."""
    bases = _columns(spec, rows, place)
    views = [[t.squeeze(2) if spec.latent else t for t in column] for column in bases]
    return _layered(spec, bases, views)


def slots(spec: KVSpec, rows: Rows, place: Place) -> Pool:
    """Page and token as one dimension of slots; a latent row keeps a head dimension of 1."""
    bases = _columns(spec, rows, place)
    return _layered(spec, bases, [[t.flatten(0, 1) for t in column] for column in bases])


def gaps(spec: KVSpec, rows: Rows, place: Place) -> Pool:
    """Views that leave out the last page, token and head and the last 16 bytes of every row."""
    ends = [(0, 1), (0, 0), (0, 1), (0, 1), (0, 16)]
    bases = _columns(spec, [np.pad(a, ends, constant_values=GAP) for a in rows], place)
    cut = -16 // spec.dtype.itemsize
    return _layered(spec, bases, [[t[:-1, :-1, :-1, :cut] for t in column] for column in bases])


def packed_heads(spec: KVSpec, rows: Rows, place: Place) -> Pool:
    """K and V side by side in every head: `[page, token, head, K row then V row]`."""
    bases = _columns(spec, [np.concatenate(rows, -1)], place)
    parts = [(t[..., : spec.head_dim], t[..., spec.head_dim :]) for t in bases[0]]
    return _layered(spec, bases, list(zip(*parts, strict=True)))


def packed_tokens(spec: KVSpec, rows: Rows, place: Place) -> Pool:
    """K and V side by side in every token: `[page, token, all K heads then all V heads]`."""
    joined = np.concatenate([a.reshape(*a.shape[:3], -1) for a in rows], -1)
    bases = _columns(spec, [joined], place)
    heads, cut = spec.num_kv_heads, spec.num_kv_heads * spec.head_dim
    parts = [
        (t[..., :cut].unflatten(-1, (heads, -1)), t[..., cut:].unflatten(-1, (heads, -1)))
        for t in bases[0]
    ]
    return _layered(spec, bases, list(zip(*parts, strict=True)))


def heads_first(spec: KVSpec, rows: Rows, place: Place) -> Pool:
    """Heads before tokens, declared by `axes`."""
    bases = _columns(spec, [a.swapaxes(2, 3) for a in rows], place)
    return _layered(spec, bases, bases, axes="page head token dim")


def transposed(spec: KVSpec, rows: Rows, place: Place) -> Pool:
    """The memory of `heads_first`, shown as a transposed view in the default order of axes."""
    bases = _columns(spec, [a.swapaxes(2, 3) for a in rows], place)
    return _layered(spec, bases, [[t.transpose(1, 2) for t in column] for column in bases])


def one_storage(spec: KVSpec, rows: Rows, place: Place) -> Pool:
    """All layers as views of one tensor per component, pages outside the layers."""
    stacks = [np.stack(rows)] if len(spec.components) == 1 else [a[None] for a in rows]
    bases = [place(_typed(spec, stack)) for stack in stacks]
    return _layered(spec, [bases], [list(kv.unbind(1)) for base in bases for kv in base])


def strided_tensor(spec: KVSpec, rows: Rows, place: Place) -> Pool:
    """One `page_first` tensor with its own strides: 16 bytes are left out behind every row."""
    padded = [np.pad(a.swapaxes(1, 2), [(0, 0)] * 4 + [(0, 16)], constant_values=GAP) for a in rows]
    base = place(_typed(spec, padded[0][:, :, :, 0] if spec.latent else np.stack(padded)))
    view = base[..., : -16 // spec.dtype.itemsize]
    return Pool(KVBuffer.from_tensor(view, spec, "page_first"), [base])


def engine_forms(spec: KVSpec) -> dict[str, Form]:
    """The forms beside the dense layouts that can hold rows of `spec`, by name."""
    forms = [per_layer, slots, gaps, one_storage]
    if not spec.latent:
        forms += [packed_heads, packed_tokens, heads_first, transposed]
    if len(spec.components) == 1:
        forms += [strided_tensor]
    return {form.__name__: form for form in forms}


def _typed(spec: KVSpec, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.copy(order="C")).view(spec.dtype)


def _columns(spec: KVSpec, arrays: Rows, place: Place) -> list[list[torch.Tensor]]:
    """A tensor of the spec's dtype per `[array][layer]`."""
    return [[place(_typed(spec, a[:, i])) for i in range(spec.num_layers)] for a in arrays]


def _layered(
    spec: KVSpec,
    bases: Sequence[Sequence[torch.Tensor]],
    views: Sequence[Sequence[torch.Tensor]],
    axes: str | None = None,
) -> Pool:
    """The pool in `bases` that `from_layers` sees through `views`, `[K, V or neither][layer]`."""
    k, *v = views
    buffer = KVBuffer.from_layers(k, v[0] if v else None, spec, axes=axes)
    return Pool(buffer, [tensor for column in bases for tensor in column])
