"""How many random cases a property gets.

In the suite a few, the same ones each time; in a run of ``python -m tests.fuzz_graphs`` batches of other ones.
"""

from hypothesis import HealthCheck, Phase, settings

FUZZ = "fuzz"
BATCH = 50
"""Cases of a property before it is the next one's turn, in a fuzzing run."""


def load(*, shrink: bool) -> None:
    """Let properties that are imported from now on be fuzzed."""
    phases = [Phase.generate, *[Phase.shrink] * shrink]
    settings.register_profile(
        FUZZ, deadline=None, derandomize=False, database=None, max_examples=BATCH, phases=phases,
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    settings.load_profile(FUZZ)


def cases(count: int) -> settings:
    """For a property: ``count`` cases of it in the suite."""
    if settings.get_current_profile_name() == FUZZ:
        return settings(settings.get_profile(FUZZ))
    return settings(deadline=None, max_examples=count, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
