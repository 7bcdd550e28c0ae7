"""Faults at real processes: `table.py` has the cases, `processes.py` what is right."""

import pytest

from tests.faults.processes import check
from tests.faults.table import CORE, Case, more_cases
from tests.harness import variants

CASES = [*CORE, *(case for case in more_cases() if case not in CORE)]
# A slow rank takes as long as several other cases.
QUICK = [case for case in CORE if case.fault != "slow"]


@pytest.mark.parametrize("case", variants(CASES, *QUICK), ids=str)
def test_every_survivor_names_the_cause(case: Case):
    problems, _ = check(case)
    assert not problems, "\n".join(problems)
