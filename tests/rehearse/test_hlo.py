"""Reading libtpu's text: shapes, lines, loops."""

import pytest

from podway.rehearse.costs import hbm_bytes, product_dtype, product_flops
from podway.rehearse.hlo import Computation, Instruction, Module, Shape, read_module, trips
from podway.rehearse.program import each
from podway.rehearse.reading import read_program
from tests.rehearse.recorded import fabric, text

LAYERS, ROWS, WIDTH = 3, 4096, 1024  # of fixtures/make_scan.py


def loops(module: Module) -> list[Instruction]:
    return [one for one in module.entry if one.opcode == "while"]


@pytest.mark.parametrize("name", ["scan_v5e", "scan_v6e_sparsecore"])
def test_every_line_is_read_and_every_loop_turns_as_often_as_there_are_layers(name: str) -> None:
    module = read_module(text(name))
    assert module.unread == 0
    assert len(module.entry.parameters) == 2
    assert [trips(module, loop, module.entry) for loop in loops(module)] == [LAYERS, LAYERS]


@pytest.mark.parametrize(("name", "slice"), [("scan_v5e", "v5litepod-4"), ("scan_v6e_sparsecore", "v6e-16")])
def test_flops_are_those_of_the_model(name: str, slice: str) -> None:
    program = read_program(text(name), fabric(slice))
    counted = sum(times * op.flops for op, times in each(program.ops))
    assert counted == 3 * LAYERS * 2.0 * ROWS * WIDTH * WIDTH  # forward, and both gradients


def test_settings_of_a_kernel_may_go_over_several_lines() -> None:
    module = read_module(
        "HloModule m\n\n"
        "%body (p: f32[8]) -> f32[8] {\n"
        "  %p = f32[8]{0:T(128)} parameter(0)\n"
        '  %kernel.1 = f32[8]{0:T(128)} custom-call(%p), custom_call_target="tpu_custom_call", x={kernel_metadata={\n'
        '"xprof_metadata":"{\\"block_q\\": 128}"\n'
        '}}, metadata={op_name="jit(f)/attention/pallas_call"}\n'
        "  ROOT %copy.2 = f32[8]{0:T(128)} copy(%kernel.1)\n"
        '}, execution_thread="sparsecore"\n\n'
        "ENTRY %main (a: f32[8]) -> f32[8] {\n"
        "  %a = f32[8]{0:T(128)} parameter(0)\n"
        "  ROOT %r = f32[8]{0:T(128)} call(%a), to_apply=%body\n"
        "}\n"
    )
    assert [one.name for one in module.computations["body"]] == ["p", "kernel.1", "copy.2"]
    assert module.computations["body"]["kernel.1"].op_name.endswith("attention/pallas_call")
    assert module.entry.name == "main"


def test_bytes_hold_the_padding_of_tiles_and_leave_out_the_chip() -> None:
    shape = Shape("bf16", (20, 256), (1, 0), (8, 128))
    assert shape.bytes == 24 * 256 * 2
    assert Shape("bf16", (20, 256), (0, 1), (8, 128)).bytes == 128 * 256 * 2
    module = read_module(text("scan_v5e"))
    entry = module.entry
    start = next(one for one in entry if one.opcode == "copy-start")
    assert {shape.space for shape in start.shapes[:2]} == {0, 1}
    assert hbm_bytes(module, entry, start) == next(s.bytes for s in start.shapes[:2] if s.space == 0)


def test_a_stack_that_is_updated_in_place_counts_as_the_update() -> None:
    module = read_module(text("scan_v6e_sparsecore"))
    body = module.called(loops(module)[0], "body")
    assert body is not None
    saved = body["bitcast_dynamic-update-slice_fusion.6"]
    assert saved.shapes[0].dims == (LAYERS, ROWS, WIDTH)
    assert hbm_bytes(module, body, saved) <= 2 * ROWS * WIDTH * 2


def convolution(left: str, right: str, out: str, rest: str) -> tuple[Instruction, Computation]:
    module = read_module(
        f"HloModule m\n\nENTRY %main (a: f32[8], b: f32[8]) -> f32[8] {{\n  %a = {left} parameter(0)\n"
        f"  %b = {right} parameter(1)\n  ROOT %c = {out} convolution(%a, %b), {rest}\n}}\n"
    )
    return module.entry["c"], module.entry


def test_products_written_as_convolutions() -> None:
    plain = convolution("bf16[64,32]", "bf16[32,16]", "bf16[64,16]", "dim_labels=bf_io->bf")
    assert product_flops(*plain) == 2 * 64 * 32 * 16
    # 8 heads as positions of a kernel that is slid over one padded position: each meets it once.
    heads = convolution(
        "bf16[2,64,32,1]", "bf16[32,8,16,1]", "bf16[2,64,8,16]",
        "window={size=1x8 pad=0_0x7_7 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f",
    )  # fmt: skip
    assert product_flops(*heads) == 2 * (2 * 64) * 32 * (8 * 16)


@pytest.mark.parametrize(
    ("left", "right", "kind"), [("s8", "s8", "int8"), ("f8e4m3fn", "f8e5m2", "fp8"), ("bf16", "s8", "")]
)
def test_products_of_bytes(left: str, right: str, kind: str) -> None:
    nothing = read_module("HloModule m\n\nENTRY %e (a: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n")
    one, here = convolution(f"{left}[64,32]", f"{right}[32,16]", "s32[64,16]", "dim_labels=bf_io->bf")
    assert product_dtype(nothing, here, one) == kind


def test_a_dot() -> None:
    module = read_module(
        "HloModule m\n\nENTRY %main (a: f32[4,8], b: f32[8,2]) -> f32[4,2] {\n  %a = f32[4,8]{1,0} parameter(0)\n"
        "  %b = f32[8,2]{1,0} parameter(1)\n"
        "  ROOT %c = f32[4,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n"
    )
    assert product_flops(module.entry["c"], module.entry) == 2 * 4 * 8 * 2


def test_a_loop_whose_turns_cannot_be_told_is_not_guessed() -> None:
    module = read_module(
        "HloModule m\n\n%cond (p: (s32[], f32[])) -> pred[] {\n  %p = (s32[], f32[]) parameter(0)\n"
        "  %x = f32[] get-tuple-element(%p), index=1\n  %limit = f32[] constant(1)\n"
        "  ROOT %lt = pred[] compare(%x, %limit), direction=LT\n}\n\n"
        "%body (p: (s32[], f32[])) -> (s32[], f32[]) {\n  ROOT %p = (s32[], f32[]) parameter(0)\n}\n\n"
        "ENTRY %main (a: (s32[], f32[])) -> (s32[], f32[]) {\n  %a = (s32[], f32[]) parameter(0)\n"
        "  ROOT %w = (s32[], f32[]) while(%a), condition=%cond, body=%body\n}\n"
    )
    assert trips(module, module.entry["w"], module.entry) is None


def test_a_text_without_a_program_is_refused() -> None:
    with pytest.raises(ValueError, match="ENTRY"):
        read_module("nothing of the kind\n")
