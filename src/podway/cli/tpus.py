"""`podway tpus`: TPU types: sizes, memory, speed and price.

With no name a row for each generation; with a generation (`v6e`) a row for each of its sizes; with a slice (`v6e-16`)
all its facts, and its price in each zone. All from the catalog in this package: no network, no account.
"""

import click
import msgspec

from podway.catalog.generations import GENERATIONS, GIB, Generation
from podway.catalog.names import ALIASES, find_generation
from podway.catalog.prices import ZonePrice, chip_price_of, offers_for, price_of, zones_of
from podway.catalog.slices import Slice, find_slice, slices_of
from podway.cli.tables import table


def _complete(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Shell completion: generations first; their sizes once one is typed."""
    generation = find_generation(typed.rpartition("-")[0])
    words = [row.accelerator_type for row in slices_of(generation)] if generation else list(ALIASES)
    return [word for word in dict.fromkeys(words) if word.startswith(typed)]


@click.command(name="tpus")
@click.argument("name", required=False, shell_complete=_complete)
@click.option(
    "-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format."
)
def command(name: str | None, output: str) -> None:
    """Show TPU types: sizes, memory, speed and price.

    NAME is a generation (v6e) or a slice (v6e-16, v4-4x8x8); without it, all generations are shown.

    Prices are dollars per hour as published; `-` is unknown. WRAP lists the axes of the topology that form a ring.
    """
    click.echo(_json(name) if output == "json" else _page(name))


def _page(name: str | None) -> str:
    """The page of NAME."""
    if name is None:
        return generations_table()
    if generation := find_generation(name):
        return sizes_table(generation)
    return slice_page(find_slice(name))


def _json(name: str | None) -> str:
    """The same as JSON."""
    if name is None:
        records: object = [generation_record(facts) for facts in GENERATIONS.values()]
    elif generation := find_generation(name):
        records = [slice_record(row) for row in slices_of(generation)]
    else:
        found = find_slice(name)
        records = {**slice_record(found), "offers": offers_for(found)}
    return msgspec.json.format(msgspec.json.encode(records)).decode()


def generations_table() -> str:
    """A row for each generation."""
    headers = (
        *("GENERATION", "SIZES", "CHIPS/HOST", "HBM/CHIP", "TFLOP/S", "HBM GB/S", "ICI GB/S"),
        *("$/CHIP-H", "$/CHIP-H(SPOT)", "ZONES"),
    )
    rows = []
    for facts in GENERATIONS.values():
        sizes = slices_of(facts.name)
        rows.append(
            (
                facts.name,
                f"{sizes[0].accelerator_type}..{sizes[-1].accelerator_type.rpartition('-')[2]}",
                ",".join(str(count) for count in sorted({row.chips_per_host for row in sizes})),
                f"{facts.chip_hbm_bytes // GIB} GiB",
                f"{facts.peak_bf16 / 1e12:,.0f}",
                f"{facts.chip_hbm_bandwidth / 1e9:,.0f}",
                f"{2 * facts.ici_axes}x{facts.ici_link_bandwidth / 1e9:.0f}",
                _dollars(chip_price_of(facts.name), 4),
                _dollars(chip_price_of(facts.name, spot=True), 4),
                len(zones_of(facts.name)),
            )
        )
    drop = ("ICI GB/S", "HBM GB/S", "ZONES", "CHIPS/HOST", "$/CHIP-H(SPOT)", "SIZES")
    return table(headers, rows, right=headers[2:], drop=drop)


def sizes_table(generation: str) -> str:
    """A row for each size of a generation."""
    headers = (
        *("TYPE", "CHIPS", "HOSTS", "TOPOLOGY", "WRAP", "HBM", "TFLOP/S"),
        *("$/H", "$/H(SPOT)", "ZONES"),
    )
    rows = [
        (
            row.accelerator_type,
            row.chips,
            row.hosts,
            row.topology_text,
            _wrapped_axes(row),
            f"{row.hbm_bytes // GIB:,} GiB",
            f"{row.peak_bf16 / 1e12:,.0f}",
            _dollars(price_of(row)),
            _dollars(price_of(row, spot=True)),
            _zone_count(offers_for(row)),
        )
        for row in slices_of(generation)
    ]
    return table(
        headers,
        rows,
        right=("CHIPS", "HOSTS", "HBM", "TFLOP/S", "$/H", "$/H(SPOT)", "ZONES"),
        drop=("WRAP", "ZONES", "TFLOP/S", "HBM"),
    )


def slice_page(row: Slice) -> str:
    """All facts of one slice, and its price in each zone."""
    facts = row.generation_facts
    per_chip = f"{facts.chip_hbm_bytes // GIB} GiB per chip"
    if facts.hbm_usable_bytes is not None:
        per_chip += f", {facts.hbm_usable_bytes / GIB:.2f} usable"
    lines = [
        ("generation", facts.title),
        ("chips", f"{row.chips:,} ({_count(row.cores, 'TensorCore')}, {_count(row.devices, 'jax device')})"),
        ("hosts", _hosts(row)),
        ("topology", f"{row.topology_text} (rings along: {_wrapped_axes(row) or 'none'})"),
        ("HBM", f"{row.hbm_bytes // GIB:,} GiB ({per_chip}; {facts.chip_hbm_bandwidth / 1e9:,.0f} GB/s)"),
        ("compute", _compute(row)),
        ("ICI", f"{2 * facts.ici_axes} links per chip, {facts.ici_link_bandwidth / 1e9:.0f} GB/s each way"),
        ("DCN", "-" if row.dcn_bandwidth is None else f"{row.dcn_bandwidth / row.hosts / 1e9:.1f} GB/s per host"),
        ("runtime", facts.default_runtime),
        ("GKE", f"{row.gke_accelerator} on {row.gke_machine_type}" if row.gke_accelerator else "-"),
        ("compiler", row.aot_name),
    ]
    offers = offers_for(row)
    prices = table(
        ("ZONE", "$/H", "$/H(SPOT)", "NOTE"),
        [
            (offer.zone or f"{offer.region} (any)", _dollars(offer.on_demand), _dollars(offer.spot), offer.note)
            for offer in offers
        ],
        right=("$/H", "$/H(SPOT)"),
    )
    sources = "; ".join(dict.fromkeys(offer.source for offer in offers))
    head = table((row.accelerator_type, ""), [(f"  {key}", value) for key, value in lines])
    return f"{head}\n\n{prices}\n\nPrices as published by: {sources}. `-` is unknown."


def generation_record(facts: Generation) -> dict[str, object]:
    """A generation as `-o json` gives it."""
    return {
        **msgspec.to_builtins(facts),
        "sizes": list(dict.fromkeys(row.accelerator_type for row in slices_of(facts.name))),
        "price_per_chip_hour": chip_price_of(facts.name),
        "spot_price_per_chip_hour": chip_price_of(facts.name, spot=True),
        "zones": zones_of(facts.name),
    }


def slice_record(row: Slice) -> dict[str, object]:
    """A slice as `-o json` gives it."""
    return {
        **msgspec.to_builtins(row),
        "topology": row.topology_text,
        "devices": row.devices,
        "hbm_bytes": row.hbm_bytes,
        "peak_bf16": row.peak_bf16,
        "default_runtime": row.generation_facts.default_runtime,
        "price_per_hour": price_of(row),
        "spot_price_per_hour": price_of(row, spot=True),
        "zones": [offer.zone for offer in offers_for(row) if offer.zone],
    }


def _hosts(row: Slice) -> str:
    """How many hosts of which make, and the other layout that GKE has of the same size."""
    text = f"{row.hosts:,} of {_count(row.chips_per_host, 'chip')}"
    if row.host is not None:
        text += f" ({row.host.vcpus} vCPUs, {row.host.ram_bytes // GIB:,} GiB RAM each)"
    for other in slices_of(row.generation):
        if other.accelerator_type == row.accelerator_type and other.hosts != row.hosts:
            text += f"; on GKE also {other.hosts} of {_count(other.chips_per_host, 'chip')} ({other.gke_machine_type})"
    return text


def _compute(row: Slice) -> str:
    """Peak rates of the whole slice; int8 and fp8 only where they are faster than bf16."""
    facts = row.generation_facts
    text = f"{row.peak_bf16 / 1e12:,.0f} TFLOP/s bf16"
    for name, peak in (("int8", facts.peak_int8), ("fp8", facts.peak_fp8)):
        if peak is not None and peak > facts.peak_bf16:
            text += f", {row.chips * peak / 1e12:,.0f} {name}"
    return f"{text} ({facts.peak_bf16 / 1e12:,.0f} per chip)"


def _wrapped_axes(row: Slice) -> str | None:
    """`xy` for the axes whose ends are joined; None where there is no such axis."""
    return "".join(axis for axis, closed in zip("xyz", row.wrap, strict=False) if closed) or None


def _zone_count(offers: list[ZonePrice]) -> int:
    return sum(1 for offer in offers if offer.zone)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def _dollars(amount: float | None, digits: int = 2) -> str | None:
    return None if amount is None else f"{amount:,.{digits}f}"
