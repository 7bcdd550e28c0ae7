"""Faults at real processes: `table.py` has the cases, `processes.py` what is right."""

import pytest

from tests.faults.processes import check
from tests.faults.table import CORE, Case, more_cases

VARIANTS = [pytest.param(case, marks=pytest.mark.more, id=str(case)) for case in more_cases() if case not in CORE]


@pytest.mark.parametrize("case", [*(pytest.param(case, id=str(case)) for case in CORE), *VARIANTS])
def test_every_survivor_names_the_cause(case: Case):
    problems, _ = check(case)
    assert not problems, "\n".join(problems)
