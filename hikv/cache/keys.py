"""Names of pages: a chain of 256-bit hashes, seeded by who may share the prefix.

The tree never needs one, it compares tokens. They name a page to the outside: to whoever reads the
cache's events, and in storage. The bytes that are hashed do not depend on the process, the type of
the caller's integers, or the machine's byte order.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from hikv.cache.allocator import as_ids
from hikv.cache.node import Namespace, Node

_SCHEME = b"hikv-prefix-1"


def namespace_seed(namespace: Namespace) -> bytes:
    """What the chain of a namespace starts from, 32 bytes.

    Each field enters as name, type and value, the strings with their lengths, so no two sets of
    fields read alike: `lora="X"` and `salt="X"` differ, and `1` and `"1"`.
    """
    digest = hashlib.sha256(_SCHEME)
    for name, value in namespace.fields:
        if isinstance(value, bytes):
            kind, raw = b"b", value
        else:
            kind, raw = (b"s" if isinstance(value, str) else b"i"), str(value).encode()
        for text in (name.encode(), kind, raw):
            digest.update(len(text).to_bytes(8, "little") + text)
    return digest.digest()


def page_hashes(tokens: npt.ArrayLike, page_size: int, prior: bytes) -> list[bytes]:
    """One hash for each whole page of `tokens` `[n]`, 32 bytes each.

    A page's hash is SHA-256 of the hash before it (`prior` for the first) and of its tokens as
    little-endian int64. So it names the whole prefix that ends with the page.
    """
    ids = as_ids("tokens", tokens)
    raw, step = ids.astype("<i8", copy=False).view(np.uint8).data, page_size * 8
    hashes = []
    for at in range(0, ids.size // page_size * step, step):
        prior = hashlib.sha256(prior + bytes(raw[at : at + step])).digest()
        hashes.append(prior)
    return hashes


def prefix_hash(node: Node) -> bytes:
    """The hash of the last page that ends with `node`, or its namespace's seed for a root.

    Fills in `node.hashes`, and those above that are missing, once.
    """
    missing = []
    while node.parent is not None and node.hashes is None:
        missing.append(node)
        node = node.parent
    last = namespace_seed(node.namespace) if node.hashes is None else node.hashes[-1]
    for lower in reversed(missing):
        page_size = lower.tokens.size // lower.num_pages
        lower.hashes = page_hashes(lower.tokens, page_size, last)
        last = lower.hashes[-1]
    return last
