"""`make bench-maxtext`: its recipes, and the table it writes."""

from tools.bench.maxtext import KEPT, PAGE, RECIPES, REQUIREMENTS, Pair, Side, page_of

from podway.catalog.slices import find_slice
from podway.decoding import from_json
from podway.model.families import find_model


def test_every_recipe_is_a_job_of_both() -> None:
    assert len({(recipe.name, recipe.slice) for recipe in RECIPES}) == len(RECIPES)
    for recipe in RECIPES:
        find_model(recipe.model)
        assert recipe.batch % find_slice(recipe.slice).devices == 0
        assert all(flag.startswith("--xla_") for flag in recipe.flags)
        assert all("=" in word and not word.startswith("-") for word in recipe.settings)


def test_maxtext_is_compiled_by_the_same_versions() -> None:
    pins = dict(line.split("==") for line in REQUIREMENTS.read_text().split())
    assert {"maxtext", "jax", "libtpu", "flax"} <= pins.keys()
    if KEPT.exists():
        for pair in from_json(KEPT.read_bytes(), dict[str, Pair]).values():
            assert pair.versions == f"jax {pins['jax']}, libtpu {pins['libtpu']}" and pair.name in PAGE.read_text()


def test_the_table_says_what_does_not_fit_or_compile() -> None:
    large, small = Side(gib=33.4, limit=31.24, step=3.0), Side(gib=25.0, limit=31.24, step=2.7)
    broken = Side(failed="the compiler ended")
    more = {"slice": "v6e-16", "published": 3.0, "proposal": "mesh.shape=fsdp=16", "versions": "jax 1, libtpu 2"}
    page = page_of(
        [Pair(name="a", maxtext=large, podway=small, **more), Pair(name="b", maxtext=broken, podway=small, **more)]
    )
    assert "33.40 (does not fit in 31.24) | 3.00 |" in page and "| 25.00 | 2.70 | 0.90 |" in page
    assert "| a | v6e-16 | 3.00 | 33.40" in page
    assert "does not compile | the compiler ended |" in page
