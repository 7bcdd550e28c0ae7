"""Draw the summary of docs/benchmarks.md as a picture: docs/pictures/benchmarks.svg.

    python -m bench.chart [--check]

The bars and their intervals are those of the page's first table, so that no number is written twice. ``--check`` draws
nothing, and fails if the picture is not that of the table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import dropwhile, takewhile
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
PAGE, PICTURE = DOCS / "benchmarks.md", DOCS / "pictures" / "benchmarks.svg"
COLOURS = ("#1f5fa6", "#8fbbe8", "#e8833a", "#c7c1bb", "#6aa84f")
"""One for each system, in the order of the table's columns."""
LEFT, WIDTH, RIGHT = 215, 560, 60  # pixels: names of cases, the axis, numbers behind the longest bar
BAR, GAP, TOP = 13, 14, 102  # pixels: a bar, the space between cases, the legend
MOST = 1.4  # the axis ends here, in steps of FSDP2


@dataclass(frozen=True)
class Bar:
    """One number of the table: a median, and the interval around it."""

    median: float
    low: float
    high: float


def summary(page: str) -> tuple[list[str], dict[str, list[Bar | None]]]:
    """Read the page's first table: the names of systems, and for each case a bar for each system, or None."""
    below = page.partition("## Summary\n")[2].splitlines()
    table = takewhile(_is_row, dropwhile(lambda line: not _is_row(line), below))
    rows = [line.strip("| ").split("|") for line in table]
    head = [cell.strip() for cell in rows[0]]
    cases = {row[0].strip(): [_bar(cell) for cell in row[1:-1]] for row in rows[2:]}
    return head[1:-1], cases


def _is_row(line: str) -> bool:
    return line.startswith("|")


def _bar(cell: str) -> Bar | None:
    found = re.match(r"\s*([\d.]+) \(([\d.]+) \.\. ([\d.]+)\)", cell)
    return Bar(*map(float, found.groups())) if found else None


def svg(systems: list[str], cases: dict[str, list[Bar | None]]) -> str:
    """Return the picture."""
    height = TOP + sum(BAR * sum(bar is not None for bar in bars) + GAP for bars in cases.values()) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + RIGHT}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="{height}" fill="white"/>',
        _text(LEFT, 18, "time of a step, as a share of eager FSDP2's (shorter is better)", 'font-weight="bold"'),
    ]
    for i, (system, colour) in enumerate(zip(systems, COLOURS, strict=True)):
        x, y = LEFT + 300 * (i % 2), 38 + 18 * (i // 2)
        lines.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        lines.append(_text(x + 18, y, system))
    lines += _axis(height - 34)
    y = TOP
    for case, bars in cases.items():
        there = [(bar, colour) for bar, colour in zip(bars, COLOURS, strict=True) if bar is not None]
        middle = y + BAR * len(there) / 2 + 4
        lines.append(_text(LEFT - 8, middle, case, 'text-anchor="end"'))
        for bar, colour in there:
            lines += _drawn(bar, colour, y)
            y += BAR
        y += GAP
    return "\n".join([*lines, "</svg>\n"])


def _x(value: float) -> float:
    return round(LEFT + WIDTH * value / MOST, 1)


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{escape(text)}</text>'


def _axis(bottom: float) -> Iterator[str]:
    for tenth in range(0, 15, 2):
        x, is_one = _x(tenth / 10), tenth == 10
        style = 'stroke="black" stroke-dasharray="4 3"' if is_one else 'stroke="#dddddd"'
        yield f'<line x1="{x}" y1="{TOP - 8}" x2="{x}" y2="{bottom}" {style}/>'
        label = "1.0 (FSDP2, eager)" if is_one else f"{tenth / 10:.1f}"
        yield _text(x, bottom + 16, label, 'text-anchor="middle"')


def _drawn(bar: Bar, colour: str, y: float) -> Iterator[str]:
    middle = y + BAR / 2
    yield f'<rect x="{LEFT}" y="{y + 1}" width="{round(_x(bar.median) - LEFT, 1)}" height="{BAR - 2}" fill="{colour}"/>'
    yield f'<line x1="{_x(bar.low)}" y1="{middle}" x2="{_x(bar.high)}" y2="{middle}" stroke="black"/>'
    for end in (bar.low, bar.high):
        yield f'<line x1="{_x(end)}" y1="{middle - 3}" x2="{_x(end)}" y2="{middle + 3}" stroke="black"/>'
    yield _text(_x(bar.high) + 5, middle + 4, f"{bar.median:.2f}")


def main() -> int:
    """Draw; with ``--check`` return 1 if the picture is another one."""
    picture = svg(*summary(PAGE.read_text()))
    if "--check" in sys.argv[1:]:
        if not PICTURE.exists() or PICTURE.read_text() != picture:
            print(f"{PICTURE} is not the picture of {PAGE}'s table: python -m bench.chart", file=sys.stderr)
            return 1
        return 0
    PICTURE.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
