"""Cycles of a kernel from the compiler's text, and what they say of a batch."""

from tools.bench.attention import Kernel, decode_cost
from tools.bench.bundles import Loop, read_bundles

TEXT = """
= control target key start
LB: loop body
     0   :  { %s1 = smov 1 }
   0x1   :  {}
   0x2 LB: > { %s2 = sphi }
   0x3   : > { %s3 = sld }
   0x4 LB: >> { %v1 = vld }
   0x5   :  {} /* an empty bundle of the inner loop */
   0x6   : >> { sbr.rel }
   0x7 PF: > { vst }
   0x8 LB: >> { dma.done.wait }
   0x9   :  { shalt }
"""


def test_bundles_belong_to_their_loops() -> None:
    assert read_bundles(TEXT) == Loop(3, (Loop(3, (Loop(3), Loop(1))),))


def test_rows_walk_their_blocks_and_cores_share_them() -> None:
    kernel = Kernel(what="decode", generation="v5p", heads=8, tokens=512)
    loops = Loop(100, (Loop(5), Loop(10, (Loop(1000, (Loop(9), Loop(3))),))))
    cost = decode_cost(kernel, loops, batch=128, context=1025, cores=2)
    assert cost.cycles == 100 + 64 * (10 + 3 * 1000)
    assert cost.bytes == 128 * 1025 * 8 * 512
