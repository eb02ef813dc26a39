"""How far a planned step may be off: an interval with stated coverage, the evidence behind it, and what is not modelled.

The width comes from published steps, each predicted by rates that were fitted without its model (`evidence_training.py`). Their
errors are pooled over all generations, because no generation has enough of them alone; a kind of step with few rows (mixtures of
experts, int8 and fp8 products) gets the wider interval that so few rows allow (Student's t). A generation whose rate one model sets
gets 1.4 times the width, since that model's own deviation is in it as well as the next one's; one without any gets twice, as a row does
that is judged without the only model of its generation. The figures below are constants so that a plan need not compute them; a test
computes them again.
"""

from collections.abc import Mapping

import msgspec

COVERAGE = 0.80
SPREAD = 0.082  # root mean square of the unseen errors of the dense rows of published/training.csv
# Student's t of a two-sided interval of 80%, by the number of published rows of that kind.
_T80 = {"dense": 1.36, "mixture": 1.89, "quantised": 1.89}


class GenerationEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner knows of a generation from published steps."""

    calibrated_on: str
    models: int  # that its rate was fitted on or judged on before it was used
    rows: int
    median_error: float  # with the row's model left out of the fit


GENERATION_EVIDENCE = {
    "v4": GenerationEvidence(models=1, calibrated_on="MaxText 22B", rows=2, median_error=0.172),
    "v5e": GenerationEvidence(models=4, calibrated_on="MaxText 32B", rows=24, median_error=0.020),
    "v5p": GenerationEvidence(models=2, calibrated_on="MaxText 32B and 128B", rows=5, median_error=0.020),
    "v6e": GenerationEvidence(models=3, calibrated_on="Llama 3.1 8B and 70B, GPT-3 175B", rows=7, median_error=0.033),
    "tpu7x": GenerationEvidence(models=1, calibrated_on="Llama 3.1 70B", rows=3, median_error=0.046),
}

_own_runs: dict[str, int] = {}  # a person's own measured runs by generation (`own_rates.py`)


def set_own_runs(runs: Mapping[str, int]) -> None:
    """How many own runs stand behind the rate of a generation from here on."""
    _own_runs.clear()
    _own_runs.update(runs)


_ALWAYS = ("input pipeline", "checkpoints", "failures and restarts")


class Uncertainty(msgspec.Struct, frozen=True, kw_only=True):
    """An interval around a step time."""

    low: float  # seconds
    high: float
    coverage: float
    evidence: str
    not_modelled: tuple[str, ...]


def kind_of_step(compute: str, *, mixture: bool) -> str:
    """What published rows a step is like."""
    return "quantised" if compute != "bfloat16" else "mixture" if mixture else "dense"


_BY_MODELS = {0: 2.0, 1: 1.4}  # of the width, by the models that a generation's rate stands on


def relative_width(generation: str, kind: str, models: int | None = None) -> float:
    """Of the 80% interval, to each side; `models`: as if so many stood behind the rate of the generation."""
    known = GENERATION_EVIDENCE.get(generation)
    if models is None:
        models = max(known.models if known else 0, _own_runs.get(generation, 0))
    return _T80[kind] * SPREAD * _BY_MODELS.get(models, 1.0)


def uncertainty_of(
    seconds: float, generation: str, kind: str, *, slices: int = 1, offloads: bool = False, models: int | None = None
) -> Uncertainty:
    """The interval around a planned or rehearsed step."""
    width = 1 + relative_width(generation, kind, models)
    missing = [*_ALWAYS]
    if kind == "mixture":
        missing.append("experts that get more tokens than others")
    if slices > 1:
        missing.append("other traffic on the data-centre network")
    if offloads:
        missing.append("HBM that transfers to host memory take from the step")
    return Uncertainty(
        low=seconds / width,
        high=seconds * width,
        coverage=COVERAGE,
        evidence=evidence_text(generation, kind),
        not_modelled=tuple(missing),
    )


def evidence_text(generation: str, kind: str) -> str:
    """`calibrated on ...; judged on n published rows, median error x%`."""
    known = GENERATION_EVIDENCE.get(generation)
    if own := _own_runs.get(generation):
        return f"calibrated on {own} of your own {'run' if own == 1 else 'runs'} (podway calibrate)"
    if known is None:
        return f"no published step of {generation} is known: rates are those of v4"
    text = f"calibrated on {known.calibrated_on}; {known.rows} published {generation} steps, median error "
    text += f"{100 * known.median_error:.1f}% with the model unseen"
    return text if kind == "dense" else f"{text}; no {kind} step calibrates anything"
