"""Tiles of experts' products: only those that were compiled, which divide; what was not compiled is priced as what was."""

import pytest

from podway.model.expert_tiles import CORES, KERNELS, Pass, Tiles, alike_cycles, step_cycles

PASSES: tuple[Pass, ...] = ("forward", "input gradient", "weight gradient")
MODELS = {"mixtral-8x7b": (4096, 14336, 8), "qwen3-30b-a3b": (2048, 768, 128), "qwen1.5-moe-a2.7b": (2048, 1408, 60)}


def test_what_was_not_compiled_is_priced_as_what_was() -> None:
    assert {generation for generation, _ in KERNELS} == set(CORES)
    for (generation, which), kernels in KERNELS.items():
        for tile in kernels:
            expected = step_cycles(generation, which, tile)
            assert alike_cycles(generation, which, tile) == pytest.approx(expected, rel=0.15), (generation, tile)


@pytest.mark.parametrize("generation", sorted(CORES))
def test_only_compiled_tiles_that_divide_are_given(generation: str) -> None:
    given = 0
    for inner, columns, experts in MODELS.values():
        for which in PASSES:
            for sides in ((inner, columns), (columns, inner)):
                product = {"rows": 131072, "inner": sides[0], "columns": sides[1], "groups": experts}
                tile = Tiles(None, generation, CORES[generation].vmem).choose(which, **product)
                if tile is None:
                    continue
                given += 1
                assert tile in KERNELS[generation, "weight gradient" if which == "weight gradient" else "forward"]
                assert sides[0] % tile[1] == 0 and sides[1] % tile[2] == 0
                assert which == "weight gradient" or tile[1] == sides[0]
                assert tile[0] <= 131072 / experts
    assert given


def test_what_is_asked_for_is_taken() -> None:
    product = {"rows": 4096, "inner": 2048, "columns": 768, "groups": 8}
    assert Tiles((256, 4096, 512), "v6e").choose("forward", **product) == (256, 2048, 512)
    assert Tiles((), "v6e").choose("forward", **product) is None


def test_what_was_not_compiled_is_left_to_the_compiler() -> None:
    mixtral = {"rows": 65536, "inner": 14336, "columns": 4096, "groups": 8}
    given = CORES["v6e"].vmem
    assert Tiles(None, "v6e", given).choose("forward", **mixtral) == (256, 14336, 512)
    assert Tiles(None, "v6e", 64 * 2**20).choose("forward", **mixtral) is None, "a kernel was given more VMEM than this"
    assert Tiles(None, "v6e").choose("forward", **mixtral) is None, "the compiler gives it less by itself"
    assert Tiles(None, "v4").choose("forward", **mixtral) is None
    assert Tiles(None, "v6e", given).choose("forward", rows=65536, inner=7168, columns=4096, groups=8) is None
    assert Tiles(None, "v6e", given).choose("forward", rows=1024, inner=14336, columns=4096, groups=8) is None
