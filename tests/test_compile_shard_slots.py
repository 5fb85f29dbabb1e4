"""What Triton makes of the slot translation for GPUs that are not here."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hikv.kernels.shard_slots import BLOCK, NOT_HERE, own_rows_kernel
from hikv.kernels.submit import interpreted

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        interpreted(own_rows_kernel), reason="kernels of an interpreting process cannot compile"
    ),
]


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_whole_pages_of_64_translate_by_shifts(capability):
    signature = {"slots": "*i64", "rows": "*i64", "count": "i32", "rank": "i32"}
    constants = {"NUM_RANKS": 2, "PAGE_SIZE": 64, "BLOCK": BLOCK, "NOT_HERE": NOT_HERE}
    source = ASTSource(
        own_rows_kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert "div.s64" not in kernel.asm["ptx"]
    assert len(kernel.asm["cubin"]) > 0
