"""Every fault of the table, a line each: `python -m tests.faults [PATTERN]`.

PATTERN: a regular expression that the cases' lines must match.
"""

import re
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.faults.processes import check
from tests.faults.table import every_case

AT_ONCE = 2  # cases


def main(pattern: str = "") -> int:
    """The number of cases that went wrong."""
    wrong = 0
    cases = [case for case in every_case() if re.search(pattern, str(case))]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for case, (problems, outcomes) in zip(cases, pool.map(check, cases), strict=True):
            told = [outcome.seconds for outcome in outcomes if outcome.error is not None]
            after = f"known after {max(told):.1f} s" if told else "went on"
            print(f"{'WRONG' if problems else 'right'}: {case}: {after}", flush=True)
            for problem in problems:
                print(f"  {problem}", flush=True)
            wrong += bool(problems)
    print(f"{len(cases)} cases, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) > 0)
