"""One rank fails: every other one ends with an error that names it, and nothing hangs. `python -m tests.faults`."""
