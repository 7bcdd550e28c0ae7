"""``compiled-fsdp hardware``: list, show and compare profiles of hardware that are built in or were measured."""

from __future__ import annotations

from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from compiled_fsdp.compiler.samples import SAMPLES, Samples, cached, kept, samples_from_json
from compiled_fsdp.passes.cost import PROFILES, Curve, Hardware

WIDTH = 100
"""Columns of a table in a file or a pipe."""
_ANY = 10**6
"""``ranks_per_node`` of a profile whose ranks are all on one node."""
KINDS = ("gather", "reduce", "alltoall", "all_reduce")


def find(name: str) -> Hardware:
    """Return a built-in profile, a measured profile by its name in the list, or the profile in a file.

    Raises:
        click.BadParameter: there is no such profile, or the file holds no profile.
    """
    if name.lower() in PROFILES:
        return PROFILES[name.lower()]
    file = cached().get(name, Path(name))
    try:
        return Hardware.from_json(file.read_text())
    except OSError as error:
        raise click.BadParameter(
            f"{name!r} is not a known profile; `compiled-fsdp hardware list` names them."
        ) from error
    except ValueError as error:
        raise click.BadParameter(f"{str(file)!r} does not contain a Hardware: {error}") from error


def samples_of(name: str) -> tuple[Samples, ...]:
    """Return the samples that a measured profile was fitted to; no samples for another profile.

    Raises:
        click.BadParameter: the file of samples holds something else.
    """
    file = cached().get(name, Path(name)).with_suffix(SAMPLES)
    if name.lower() in PROFILES or not file.exists():
        return ()
    try:
        return samples_from_json(file.read_text())
    except ValueError as error:
        raise click.BadParameter(f"{str(file)!r} does not contain samples: {error}") from error


@click.group()
def hardware() -> None:
    """Profiles of hardware: those that are built in, and those that `compiled-fsdp measure` has measured."""


@hardware.command(name="list")
def list_all() -> None:
    """Name all profiles, with their rates."""
    table = _table(
        "", "device", "GB", "bf16 TFLOP/s", "copies GB/s", "in a node", "between", "latency of a collective, us"
    )
    measured = {name: found[0] for name, file in cached().items() if (found := kept(file)) is not None}
    for name, known in (PROFILES | measured).items():
        rows = facts(known)
        device = known.name if name in measured else ""
        table.add_row(
            name, device, rows["memory, GB"], rows["bfloat16, TFLOP/s"], rows["copies, GB/s"],
            rows["wires in a node, GB/s"], rows["wires between, GB/s"], rows["latency of a collective, us"],
        )  # fmt: skip
    _print(table)


@hardware.command()
@click.argument("name")
def show(name: str) -> None:
    """Show one profile: every number, and how well measured curves fit."""
    known = find(name)
    table = _table("", name)
    for fact, value in facts(known).items():
        table.add_row(fact, value)
    _print(table)
    show_fit(known, samples_of(name))


@hardware.command()
@click.argument("names", nargs=-1, required=True)
def compare(names: tuple[str, ...]) -> None:
    """Compare profiles number by number, beside the first one."""
    found = [facts(find(name)) for name in names]
    table = _table("", *names)
    for fact in dict.fromkeys(fact for facts_ in found for fact in facts_):
        cells = [facts_.get(fact, "") for facts_ in found]
        table.add_row(fact, cells[0], *(f"{cell}{_times(cell, cells[0])}" for cell in cells[1:]))
    _print(table)


def facts(known: Hardware) -> dict[str, str]:
    """Format a profile's numbers for people, by their names."""
    rows = {f"{dtype}, TFLOP/s": _number(rate / 1e12) for dtype, rate in known.flops.items()}
    rows |= {
        "memory, GB": f"{known.memory / 1e9:,.0f}",
        "copies, GB/s": _number(known.copy / 1e9),
        "a kernel, us": f"{1e6 * known.kernel:.3g}",
        "host: a kernel, us": f"{1e6 * known.host_kernel:.3g}",
        "host: a collective, us": f"{1e6 * known.host_collective:.3g}",
        "beside a collective: matrix products": f"{1 + known.contention.product:.2f}",
        "beside a collective: attention": f"{1 + known.contention.attention:.2f}",
        "beside a collective: other kernels": f"{1 + known.contention.memory:.2f}",
        "a collective beside compute": f"{1 + known.contention.collective:.2f}",
        "attention, of matrix products": " and ".join(f"{share:.2f}" for share in known.attention),
        "ranks in a node": f"{known.ranks_per_node}" if known.ranks_per_node < _ANY else "any number",
        "wires in a node, GB/s": _number(known.inside.bytes_per_second / 1e9),
        "wires between, GB/s": _number(known.between.bytes_per_second / 1e9),
        "latency of a collective, us": _latency(known.latency),
    }
    for kind in KINDS:
        for (ranks, nodes), curve in getattr(known, kind).items():
            group = f"{kind}, {ranks} ranks on {nodes} node{'s' if nodes > 1 else ''}"
            rows |= {
                f"{group}, us": _latency(curve.latency),
                f"{group}, GB/s": _number(curve.bytes_per_second / 1e9),
            }
    return rows


def show_fit(known: Hardware, samples: tuple[Samples, ...]) -> None:
    """Print each measured size beside its curve."""
    for of in samples:
        curve: Curve = getattr(known, of.kind)[of.ranks, of.nodes]
        table = _table(f"{of.kind}, {of.ranks} ranks", "measured, ms", "curve, ms", "off by")
        for size, took, off in zip(of.sizes, of.seconds, of.residuals(curve), strict=True):
            fitted = took / (1 + off)
            table.add_row(f"{size / 1e6:,.3f} MB", f"{1e3 * took:.3g}", f"{1e3 * fitted:.3g}", f"{off:+.0%}")
        _print(table)


def _latency(seconds: float) -> str:
    """Format seconds as microseconds.

    A fitted curve may begin at zero, because the times of large sizes say nothing of the latency.
    """
    return f"{1e6 * seconds:.3g}" if seconds > 0 else "too short to tell"


def _number(value: float) -> str:
    """Format a number with three digits, or with all digits before the point if there are more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _times(cell: str, first: str) -> str:
    """Say how many times as large as the first profile's number a number is; "" if they are equal or one is missing."""
    try:
        number, base = (float(text.replace(",", "")) for text in (cell, first))
    except ValueError:  # a profile does not have the number
        return ""
    return f" ({number / base:.3g}x)" if base and number != base else ""


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 else "right", overflow="fold", no_wrap=number == 0)
    return table


def _print(table: Table) -> None:
    console = Console()
    (console if console.is_terminal else Console(width=WIDTH)).print(table)
