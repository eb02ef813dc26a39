"""From recorded text to a program: collectives, groups of devices, kernels, memory."""

import pytest

from podway.plan.chips import STRAGGLER_LOSS_PER_DOUBLING, device_of
from podway.rehearse.fabric import groups_in
from podway.rehearse.hlo import Instruction, read_module
from podway.rehearse.kernels import attention_of, grouped_of
from podway.rehearse.memory import array_name, read_memory
from podway.rehearse.program import Attention, Program, asynchronous, each
from podway.rehearse.reading import program_of, read_program
from podway.rehearse.timeline import estimate
from tests.rehearse.recorded import fabric, text


def program(name: str, slice: str) -> Program:
    return read_program(text(name), fabric(slice))


def test_permutes_of_a_gradient_run_beside_its_product() -> None:
    found = program("scan_v5e", "v5litepod-4")
    assert found.complete and not found.unread
    assert asynchronous(found) == {"all-gather": (0, 1), "all-reduce": (0, 1), "collective-permute": (5, 0)}
    permutes = [op.exchange for op, _ in each(found.ops) if op.exchange and op.exchange.kind == "collective-permute"]
    assert {(one.hops, one.lane) for one in permutes if one} == {(1, (0, 0)), (1, (0, 1))}, (
        "both directions of one axis"
    )
    waits = {op.waits_for for op, _ in each(found.ops) if op.kind == "wait"}
    starts = {op.name for op, _ in each(found.ops) if op.starts}
    assert waits == starts


def test_a_sparsecore_gathers_beside_other_work() -> None:
    found = program("scan_v6e_sparsecore", "v6e-16")
    assert not found.complete
    assert asynchronous(found)["all-gather"] == (1, 0)
    gather = next(op for op, _ in each(found.ops) if op.exchange and op.exchange.kind == "all-gather")
    assert gather.exchange is not None and gather.exchange.box == (4, 4) and gather.exchange.moved == 1024 * 1024 * 2
    assert any(op.waits_for == gather.name for op, _ in each(found.ops))


def instruction(rest: str, opcode: str = "all-gather") -> Instruction:
    module = read_module(
        f"HloModule m\n\nENTRY %main (a: f32[8]) -> f32[8] {{\n  %a = f32[8]{{0}} parameter(0)\n"
        f"  ROOT %x = f32[64]{{0}} {opcode}(%a), channel_id=1, {rest}\n}}\n"
    )
    return module.entry["x"]


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_1'}, dimensions={0}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_0'}, dimensions={0}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['axis_0'=4] {'axis_0'}", [[0, 1, 2, 3]]),
        ("dimensions={0}", [[0, 1, 2, 3]]),
    ],
)
def test_groups_in_every_way_they_are_written(written: str, groups: list[list[int]]) -> None:
    assert groups_in(instruction(written), 4) == groups


def test_what_a_reduce_scatter_moves_is_what_goes_in() -> None:
    one = instruction("replica_groups={{0,1,2,3}}, dimensions={0}", "reduce-scatter")
    assert fabric("v5litepod-4").exchange_of(one, "reduce-scatter").moved == 64 * 4 * 4


def test_a_group_across_slices() -> None:
    one = instruction("replica_groups={{0,4},{1,5},{2,6},{3,7}}", "all-reduce")
    found = fabric("v5litepod-4", slices=2).exchange_of(one, "all-reduce")
    assert (found.size, found.slices) == (1, 2)


def test_the_way_around_a_ring_is_one_hop_and_back_along_a_line_is_all_of_it() -> None:
    pairs = ",".join(f"{{{i},{(i + 1) % 16}}}" for i in range(16))
    one = instruction(f"source_target_pairs={{{pairs}}}", "collective-permute")
    ring = fabric("v5litepod-256")  # 16 x 16, both axes wrap
    assert ring.exchange_of(one, "collective-permute").hops == 1
    square = ",".join(f"{{{i},{(i + 1) % 4}}}" for i in range(4))
    line = instruction(f"source_target_pairs={{{square}}}", "collective-permute")
    there = fabric("v6e-16").exchange_of(line, "collective-permute")
    assert (there.hops, there.load) == (3, 1)  # the way back is long, and its links are free
    strided = ",".join(f"{{{i},{(i + 2 * 16) % 256}}}" for i in range(256))
    apart = ring.exchange_of(
        instruction(f"source_target_pairs={{{strided}}}", "collective-permute"), "collective-permute"
    )
    assert (apart.hops, apart.load) == (2, 2)  # each link carries the transfers of two


def kernel(name: str, operands: str, settings: str = "") -> Attention:
    lines = "".join(f"  %o{i} = {shape} parameter({i})\n" for i, shape in enumerate(operands.split("; ")))
    names = ", ".join(f"%o{i}" for i in range(len(operands.split("; "))))
    module = read_module(
        f"HloModule m\n\nENTRY %main (a: f32[8]) -> f32[8] {{\n{lines}"
        f'  ROOT %{name}.1 = f32[8]{{0}} custom-call({names}), custom_call_target="tpu_custom_call"{settings}\n}}\n'
    )
    found = attention_of(module.entry, module.entry[f"{name}.1"])
    assert found is not None and found.d_head == 128
    return found


def test_blocks_that_a_mask_leaves() -> None:
    heads = "bf16[2,4,2048,128]; bf16[2,4,2048,128]; bf16[2,4,2048,128]"
    square = 2 * 4 * 4 * 4  # heads and sequences, 4 x 4 blocks of 512
    assert kernel("flash_attention", heads).computed == square
    causal = kernel("splash_mha_fwd_residuals", f"s8[1,4,4]; {heads}")
    assert (causal.computed, causal.grid, causal.size) == (square * 5 / 8, square, 512)
    banded = kernel("splash_mha_fwd_residuals", f"s8[1,4,2]; {heads}")  # a window of two blocks
    assert banded.computed < causal.computed and banded.grid < causal.grid


def test_a_piece_of_a_split_sequence_is_causal_and_no_window() -> None:
    """Each of 8 chips has early and late queries, which in the mean meet half of the keys."""
    piece = kernel("splash_mha_fwd_residuals", "s8[1,2,16]; bf16[1,4,1024,128]; bf16[1,4,8192,128]; bf16[1,4,8192,128]")
    assert piece.grid == 4 * 2 * 16
    assert piece.computed == 4 * 2 * (8192 / 2 + 256) / 512


def test_block_sizes_are_read_from_the_kernel() -> None:
    heads = "s8[1,4,2]; bf16[1,4,4096,128]; bf16[1,4,4096,128]; bf16[1,4,4096,128]"
    said = ', frontend_attributes={kernel_metadata={"xprof_metadata":"{\\"block_q_dkv\\": 1024, \\"block_kv_dkv\\": 2048}"}}'
    found = kernel("splash_mha_dkv_no_residuals", heads, said)
    assert found.fused and found.size == round((1024 * 2048) ** 0.5)
    assert found.grid == found.rows * 4096 / found.size  # all of the square: no window


def test_a_grouped_product_is_its_tiles() -> None:
    lines = "  %a = bf16[8192,4096]{1,0} parameter(0)\n  %w = bf16[8,4096,14336]{2,1,0} parameter(1)\n"
    attributes = 'custom_call_target="tpu_custom_call", frontend_attributes={ragged_dot_tiling="256,4096,4352"}'
    module = read_module(
        f"HloModule m\n\nENTRY %main (a: f32[8]) -> f32[8] {{\n{lines}"
        f"  ROOT %ragged-dot-none.1 = bf16[8192,14336]{{1,0}} custom-call(%a, %w), {attributes}\n}}\n"
    )
    found = grouped_of(module.entry, module.entry["ragged-dot-none.1"], "v5p")
    assert found is not None
    assert (found.rows, found.inner, found.columns, found.groups) == ((32 + 7) * 256, 4096, 4 * 4352, 8)
    assert found.flops > 2 * 8192 * 4096 * 14336
    # Of four devices that share the experts, each has room for all rows and computes its own.
    own = grouped_of(module.entry, module.entry["ragged-dot-none.1"], "v5p", 1 / 4)
    assert own is not None and own.rows == (8 + 7) * 256


def test_slices_exchange_by_a_rendezvous() -> None:
    joined = '_xla_host_transfer_rendezvous="psum.1",_xla_megascale_transfer_type="ALL_REDUCE"'
    module = (
        "HloModule m, is_scheduled=true\n\nENTRY %main (a: f32[8]) -> f32[1024,1024] {\n"
        "  %a = f32[1024,1024]{1,0} parameter(0)\n  %t = token[] after-all()\n"
        f"  %send.1 = (f32[1024,1024]{{1,0}}, u32[], token[]) send(%a, %t), is_host_transfer=true, frontend_attributes={{{joined}}}\n"
        f"  %recv.1 = (f32[1024,1024]{{1,0}}, u32[], token[]) recv(%t), is_host_transfer=true, frontend_attributes={{{joined}}}\n"
        "  %send-done.1 = token[] send-done(%send.1)\n"
        "  ROOT %recv-done.1 = (f32[1024,1024]{1,0}, token[]) recv-done(%recv.1)\n}\n"
    )
    both = fabric("v5litepod-4", slices=2)
    program = read_program(module, both)
    assert [op.kind for op in program.ops] == ["collective", "wait"]
    dcn = both.device.dcn_bandwidth
    assert dcn is not None
    slowest = 1 + STRAGGLER_LOSS_PER_DOUBLING
    assert estimate(program, both).point == pytest.approx(slowest * 2 * 2**22 / 2 / dcn)


def test_transfers_to_the_host_take_its_link() -> None:
    """A slice that is written to a stack in host memory (S(5)), and one that is fetched: each way has a lane of its own."""
    stack, slice = "bf16[28,1024,1024]{2,1,0:T(8,128)(2,1)S(5)}", "bf16[1,1024,1024]{2,1,0:T(8,128)(2,1)}"
    lines = (
        "HloModule m, is_scheduled=true\n\nENTRY %main (a: f32[8]) -> f32[8] {\n"
        f"  %s = {stack} parameter(0)\n  %a = {slice} parameter(1)\n  %i = s32[] parameter(2)\n"
        f"  %out = (({stack}, {slice}, s32[]), {stack}, u32[]{{:S(2)}}) async-start(%s, %a, %i), calls=%x\n"
        f"  %in = (({stack}, s32[]), {slice}, u32[]{{:S(2)}}) async-start(%s, %i), calls=%y\n"
        f"  %out-done = {stack} async-done(%out), calls=%x\n"
        f"  ROOT %in-done = {slice} async-done(%in), calls=%y\n}}\n"
    )
    where = fabric("v5litepod-4")
    found = program_of(read_module(lines), where, complete=False)
    assert {op.name: (op.host, op.bytes) for op in found.ops if op.host} == {"out": ("out", 2**21), "in": ("in", 2**21)}
    seconds = 2**21 / device_of("v5e").host_bandwidth
    assert estimate(found, where).point == pytest.approx(seconds), "both ways at once"


def test_a_slice_that_is_fetched_moves_itself_and_not_its_array() -> None:
    """A quarter of an array in HBM, brought into the chip's own memory (S(1)): libtpu names the whole array in the start."""
    whole, piece = "bf16[2048,32,256]{2,0,1:T(8,128)(2,1)}", "bf16[2048,8,256]{2,0,1:T(8,128)(2,1)S(1)}"
    lines = (
        "HloModule m, is_scheduled=true\n\nENTRY %main (a: f32[8]) -> f32[8] {\n"
        f"  %a = {whole} parameter(0)\n"
        f"  %slice-start = (({whole}), {piece}, s32[]{{:S(2)}}) async-start(%a), calls=%x\n"
        f"  ROOT %slice-done = {piece} async-done(%slice-start), calls=%x\n}}\n"
    )
    where = fabric("v5litepod-4")
    found = program_of(read_module(lines), where, complete=False)
    (start,) = (op for op in found.ops if op.starts)
    assert start.bytes == 2048 * 8 * 256 * 2
    assert estimate(found, where).point == pytest.approx(start.bytes / where.device.hbm_bandwidth)


def test_memory_by_name() -> None:
    module = read_module(text("scan_v5e"))
    found = read_memory(text("scan_v5e_buffers"), text("scan_v5e_live"), module, 2**34)
    weights, rows = 3 * 256 * 1024 * 4, 4096 * 1024 * 2
    assert found.arguments == weights + rows
    assert found.fits and found.total == found.arguments + found.temporary
    names = {buffer.name for buffer in found.buffers}
    assert {"w", "x"} <= names
    assert all(buffer.bytes for buffer in found.buffers)
    # Operands of a computation that a SparseCore runs lie in the buffers of its caller: memory_analysis() does not count them.
    shared = text("scan_v5e_buffers") + "allocation 9999: size 1073741824, page 0, thread-local:\n"
    assert read_memory(shared, text("scan_v5e_live"), module, 2**34).total == found.total
    tight = read_memory(text("scan_v5e_buffers"), text("scan_v5e_live"), module, 2**20)
    assert not tight.fits and "OOM by" in tight.line


def test_the_fullest_moment_has_what_loops_carry() -> None:
    """A stack that the first loop fills and the second one reads is alive between them, though libtpu's own peak leaves it out."""
    module = read_module(
        "HloModule m, is_scheduled=true\n\n"
        "%body (p: (s32[], bf16[4,1024,1024])) -> (s32[], bf16[4,1024,1024]) {\n"
        "  %p = (s32[], bf16[4,1024,1024]{2,1,0}) parameter(0)\n"
        '  %stack = bf16[4,1024,1024]{2,1,0} fusion(%p), kind=kLoop, calls=%x, metadata={op_name="jvp()/dynamic_update_slice"}\n'
        "  ROOT %t = (s32[], bf16[4,1024,1024]{2,1,0}) tuple(%p, %stack)\n}\n\n"
        "ENTRY %main (a: bf16[1024,1024]) -> bf16[1024,1024] {\n"
        "  %a = bf16[1024,1024]{1,0} parameter(0)\n"
        "  %w = (s32[], bf16[4,1024,1024]{2,1,0}) while(%a), condition=%c, body=%body\n"
        "  ROOT %big = bf16[1024,1024]{1,0} fusion(%w), kind=kLoop, calls=%y\n}\n"
    )
    assignment = (
        "BufferAssignment:\nallocation 0: size 2097152, page 0, parameter 0, shape |bf16[1024,1024]|:\n"
        "allocation 1: size 10485760, page 0, preallocated-temp:\n"
        " value: <1 w{} @0> (size=512,offset=10485248): (s32[], bf16[4,1024,1024])\n"
        " value: <2 w{1} (phi) @0> (size=8388608,offset=0): bf16[4,1024,1024]\n"
        " value: <3 stack @0> (size=8388608,offset=0): bf16[4,1024,1024]\n"
        " value: <4 p{1} (phi) @0> (size=8388608,offset=0): bf16[4,1024,1024]\n"
        " value: <5 big @0> (size=2097152,offset=8388608): bf16[1024,1024]\n"
    )
    live = (
        "HloLiveRange (max 12):\n  BufferLiveRange:\n    p{1}:2-4\n    stack{}:4-6\n    w{}:6-7\n    w{1}:6-12\n    big{}:9-11\n"
        "  Live ranges at 9 (peak):\n    big{}: 2097152 bytes (cumulative: 2097152 bytes)\n"
    )
    found = read_memory(assignment, live, module, 2**34)
    assert found.total == 2097152 + 10485760
    made = [(buffer.bytes, buffer.name) for buffer in found.buffers if buffer.made]
    assert made == [(8388608, "jvp()/dynamic_update_slice"), (2097152, "big")]


def test_names_of_arrays() -> None:
    assert array_name("state.trained['layers']['q']") == "trained/layers/q"
    assert array_name("state.moments.mean[\\'embed\\']") == "moments/mean/embed"
