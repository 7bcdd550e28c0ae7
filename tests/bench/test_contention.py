"""What plans lose if contention was assumed wrong."""

from bench.contention import TIMES, Loss, losses, report
from tests.passes.plan.cases import tasks_of


def test_a_step_without_contention_has_one_plan():
    found = losses(("model", 2, 8), [tasks_of([4, 4, 4], [(2, 1, 1), (2, 2, 2)])])
    assert found == Loss(("model", 2, 8), found.step, (0.0,) * len(TIMES), (False,) * len(TIMES))


def test_losses_are_simulated_with_the_true_contention():
    """Whatever plan it is, its step is not shorter than compute."""
    tasks = tasks_of([4, 4, 4], [(2, 1, 1), (2, 2, 2)], contention=0.5)
    found = losses(("model", 2, 8), [tasks])
    assert all(found.step * (1 + loss) >= 12 for loss in found.losses)


def test_the_report_names_the_worst_loss():
    text = "\n".join(
        report([Loss(("a", 2, 8), 1e-3, (0.0, 0.01, 0.2), (False, True, True)),
                Loss(("b", 2, 8), 1e-3, (0.005, -0.01, 0.0), (True, True, False))])
    )  # fmt: skip
    assert "| a | 2 | 8 | 1.0 | +0.00% | +1.00% | +20.00% |" in text
    assert "planned with 0.5 times the contention: 1 of 2 steps have another plan, which takes at most 0.50%" in text
    assert "planned with 0 times the contention: 1 of 2 steps have another plan, which takes at most 20.00%" in text
