"""``bench.chart``: the picture of docs/benchmarks.md is made from its first table."""

from bench import chart


def test_the_picture_is_that_of_the_table():
    systems, cases = chart.summary(chart.PAGE.read_text())
    assert len(systems) == len(chart.COLOURS)
    assert len(cases) >= 9
    assert all(bars[0] is not None and bars[0].low <= bars[0].median <= bars[0].high for bars in cases.values())
    assert chart.PICTURE.read_text() == chart.svg(systems, cases)
