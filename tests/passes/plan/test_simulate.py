"""Schedules in time and memory: worked out by hand, and against another simulator."""

from dataclasses import replace

import pytest
from hypothesis import given

from compiled_fsdp.buckets.layout import TensorSize
from compiled_fsdp.buckets.spec import COALESCED, FLAT, Kind
from compiled_fsdp.passes.plan.channels import CommChannel, ModelCollective
from compiled_fsdp.passes.plan.simulate import check, makespan, memory_curve, simulate
from compiled_fsdp.passes.plan.tasks import CollectiveTask, Tasks
from tests.passes.plan.cases import QUICK, gather, reduction, tasks_and_schedules, tasks_of, with_size
from tests.passes.plan.simulator import curve, play


# ---- time, by hand ---------------------------------------------------------------------------------------------------
def test_the_first_gather_is_exposed():
    """Two layers of 4 s, gathers of 3 s: one ahead, the second one hides.

    compute  | wait 0-3 | layer 0 3-7 | layer 1 7-11 |
    channel     | g0 0-3   | g1 3-6      |
    """
    tasks = tasks_of([4, 4], [(3, 0, 0), (3, 1, 1)])
    seen = simulate(tasks, (gather(0, 0, 0), gather(1, 0, 1)))
    assert seen.seconds == 11
    assert seen.reached == (3, 7, 11)
    assert [(f.issued, f.start, f.end, f.exposed) for f in seen.timings] == [(0, 0, 3, 3), (0, 3, 6, 0)]
    assert seen.exposed == 3


def test_nothing_ahead_exposes_both():
    """g0 0-3, layer 0 3-7, g1 7-10, layer 1 10-14."""
    tasks = tasks_of([4, 4], [(3, 0, 0), (3, 1, 1)])
    seen = simulate(tasks, (gather(0, 0, 0), gather(1, 1, 1)))
    assert (seen.seconds, seen.exposed, seen.reached) == (14, 6, (3, 10, 14))


def test_a_slow_channel_is_a_queue():
    """Gathers of 6 s, layers of 4 s: g0 0-6, g1 6-12; layer 0 6-10, 2 s of waiting, layer 1 12-16."""
    tasks = tasks_of([4, 4], [(6, 0, 0), (6, 1, 1)])
    seen = simulate(tasks, (gather(0, 0, 0), gather(1, 0, 1)))
    assert (seen.seconds, [f.exposed for f in seen.timings]) == (16, [6, 2])


def test_the_last_reduction_is_exposed():
    """Two layers of 4 s; gradients of 3 s: r0 4-7, r1 8-11 and compute waits for it."""
    tasks = tasks_of([4, 4], reductions=[(3, 1), (3, 2)])
    seen = simulate(tasks, (reduction(0, 1, 2), reduction(1, 2, 2)))
    assert (seen.seconds, seen.exposed) == (11, 3)
    assert [(f.start, f.end) for f in seen.timings] == [(4, 7), (8, 11)]
    assert seen.reached == (0, 4, 11)


@pytest.mark.parametrize(
    ("order", "seconds"),
    [
        # g 4-6, layer 1 6-10, r 6-11: 1 s of r is exposed
        ("gather first", 11),
        # r 4-9, g 9-11, layer 1 11-15
        ("reduction first", 15),
    ],
)
def test_gathers_and_reductions_share_a_channel_in_launch_order(order, seconds):
    tasks = tasks_of([4, 4], [(2, 1, 1)], [(5, 1)])
    schedule = (gather(0, 1, 1), reduction(0, 1, 2))
    if order == "reduction first":
        schedule = schedule[::-1]
    assert simulate(tasks, schedule).seconds == seconds


def test_two_streams_run_side_by_side():
    """As above with a stream each: r 4-9, g 4-6, layer 1 6-10."""
    tasks = tasks_of([4, 4], [(2, 1, 1)], [(5, 1)])
    own = replace(tasks.channels["channel"], stream=1)
    tasks = replace(
        tasks,
        channels={**tasks.channels, "own": own},
        reductions=tuple(replace(r, channel="own") for r in tasks.reductions),
    )
    assert simulate(tasks, (reduction(0, 1, 2), gather(0, 1, 1))).seconds == 10


SLOW = CommChannel(latency=2.0, each=0.5, bytes_per_second=2.0, world=2, received_share=0.5)


@pytest.mark.parametrize(
    ("form", "issued", "end", "seconds"),
    [
        # 2 + 8/2 on the channel; then layers of 5 s
        (COALESCED, 0.0, 6.5, 16.5),  # 0.5 s more for the second tensor
        (FLAT, 0.4, 6.4, 17.2),  # half of 8 bytes packed at 0.1 s, all of them unpacked
    ],
)
def test_forms_of_a_gather(form, issued, end, seconds):
    tasks = tasks_of([5, 5], [(4, 0, 0), (4, 1, 1)], channel=SLOW, copy_seconds=0.1)
    seen = simulate(tasks, (gather((0, 1), 0, 0, form),))
    assert seen.timings[0].issued == pytest.approx(issued)
    assert seen.timings[0].end == pytest.approx(end)
    assert seen.seconds == pytest.approx(seconds)


def test_a_single_gather_has_no_copies():
    """2 + 4/2 on the channel, layer of 5 s."""
    tasks = tasks_of([5], [(4, 0, 0)], channel=SLOW, copy_seconds=0.1)
    assert simulate(tasks, (gather(0, 0, 0),)).seconds == 9


@pytest.mark.parametrize(
    ("form", "copied", "received", "issued", "seconds"),
    [
        # compute until 10, then the channel's 2 + 8/2
        (COALESCED, False, 0.5, 10.0, 16.5),  # 0.5 s more for the second tensor
        (COALESCED, True, 0.5, 10.4, 16.9),  # the first tensor's 4 bytes are copied at 0.1 s
        (FLAT, False, 0.5, 10.8, 16.8),  # all are packed; what arrives is not unpacked
        (FLAT, True, 0.5, 10.8, 16.8),  # and not copied twice
        (FLAT, False, 1.0, 10.8, 17.6),  # an all-to-all's 8 bytes are summed
    ],
)
def test_forms_of_a_reduction(form, copied, received, issued, seconds):
    channel = replace(SLOW, received_share=received)
    tasks = tasks_of([5, 5], reductions=[(4, 1), (4, 2)], channel=channel, copy_seconds=0.1)
    tasks = replace(tasks, reductions=(with_size(tasks.reductions[0], copied=copied), tasks.reductions[1]))
    seen = simulate(tasks, (reduction((0, 1), 2, 2, form),))
    assert seen.timings[0].issued == pytest.approx(issued)
    assert seen.seconds == pytest.approx(seconds)


def test_a_single_gradient_that_is_copied():
    """Compute until 5, 0.4 s of copies, 2 + 4/2 on the channel."""
    tasks = tasks_of([5], reductions=[(4, 1)], channel=SLOW, copy_seconds=0.1)
    tasks = replace(tasks, reductions=(with_size(tasks.reductions[0], copied=True),))
    assert simulate(tasks, (reduction(0, 1, 1),)).seconds == pytest.approx(9.4)


def test_compute_is_slower_beside_a_collective():
    """A quarter more: g1 runs 0-5, beside which 4 of layer 0's 8 s are done; the other 4 end at 9."""
    tasks = tasks_of([8, 1], [(5, 1, 1)], contention=0.25)
    seen = simulate(tasks, (gather(0, 0, 1),))
    assert seen.reached == (0, 9, 10)


def test_a_collective_is_slower_beside_compute():
    """Both at three quarters of their speed: g1 takes 5 s until 8, beside which 6 of layer 0's 9 s are done.

    Of a wait it takes the rest at its own speed: layer 0 alone would end at 4, at which 3 s of g1 are done.
    """
    tasks = replace(tasks_of([9, 1], [(6, 1, 1)], contention=1 / 3), collective_contention=1 / 3)
    seen = simulate(tasks, (gather(0, 0, 1),))
    assert (seen.reached, seen.timings[0].end) == (pytest.approx((0, 11, 12)), pytest.approx(8))
    assert seen.contention == pytest.approx(2)
    tasks = replace(tasks_of([3, 1], [(6, 1, 1)], contention=1 / 3), collective_contention=1 / 3)
    seen = simulate(tasks, (gather(0, 0, 1),))
    assert (seen.reached, seen.timings[0].exposed) == (pytest.approx((0, 7, 8)), pytest.approx(3))


def test_contention_of_each_segment():
    """g2 0-8 beside layers that it slows down by half, and not at all."""
    tasks = tasks_of([4, 4, 1], [(8, 2, 2)])
    slowed = replace(tasks.segments[0], contention=0.5)
    tasks = replace(tasks, segments=(slowed, *tasks.segments[1:]))
    assert simulate(tasks, (gather(0, 0, 2),)).reached == (0, 6, 10, 11)


def test_contention_does_not_add_up():
    """Two streams at once are as bad as one: g0 0-5 and g1 0-10, beside which 8 of layer 0's 9 s are done."""
    tasks = tasks_of([9], [(5, 1, 1), (10, 1, 1)], contention=0.25)
    tasks = replace(tasks, channels={**tasks.channels, "own": replace(tasks.channels["channel"], stream=1)})
    tasks = replace(tasks, gathers=(tasks.gathers[0], replace(tasks.gathers[1], channel="own")))
    assert simulate(tasks, (gather(0, 0, 1), gather(1, 0, 1))).seconds == 11


def test_a_reduction_is_waited_for_before_what_is_launched_at_the_same_run():
    """r 2-8 is waited for at segment 2, and only then g is launched: 8-11; layer 2 11-15."""
    tasks = tasks_of([2, 2, 4], [(3, 2, 2)], [(6, 1)])
    seen = simulate(tasks, (reduction(0, 1, 2), gather(0, 2, 2)))
    assert (seen.seconds, [f.issued for f in seen.timings]) == (15, [2, 8])


# ---- beside collectives of the model's own, by hand ------------------------------------------------------------------
def with_models_own(tasks: Tasks, *own: tuple[int, int, int], shared: bool = False) -> Tasks:
    """The tasks with collectives (bytes, at, wait) of the model's own, over the same link or over one of their own."""
    streams = (0, 1) if shared else (1,)
    return replace(
        tasks,
        channels={**tasks.channels, "model": replace(tasks.channels["channel"], stream=1)},
        model_collectives=tuple(ModelCollective("all_reduce", "model", of[0], 1, *of[1:], streams) for of in own),
    )


@pytest.mark.parametrize(
    ("shared", "at", "seconds", "exposed"),
    [
        # layer 0 0-4; the model's 4-9, g 4-10; 1 s of g is exposed; layer 1 10-14
        (False, 1, 14, 5),
        # the model's queues behind g: g 4-10, the model's 10-15; layer 1 15-19
        (True, 1, 19, 11),
        # g after the model's: 9-15
        (True, 2, 19, 5),
        # g ahead of layer 0: 0-6, the model's 6-11; layer 1 11-15
        (True, 0, 15, 7),
    ],
)
def test_a_gather_beside_one_of_the_models_own(shared, at, seconds, exposed):
    """Layers of 4 s; in between the model communicates for 5 s, and waits; g takes 6 s."""
    tasks = tasks_of([4, 0, 4], [(6, 2, 2)])
    tasks = with_models_own(tasks, (5, 1, 1), shared=shared)
    seen = simulate(tasks, (gather(0, at, 2),))
    assert (seen.seconds, seen.model_timings[0].exposed) == (seconds, exposed)
    assert tasks.alone_before == (0, 4, 9, 13, 13)


def test_the_models_own_can_be_waited_for_later():
    """Launched ahead of layer 1, 4-9, and waited for behind it: 1 s is exposed."""
    tasks = with_models_own(tasks_of([4, 4, 4]), (5, 1, 2))
    seen = simulate(tasks, ())
    assert (seen.seconds, seen.model_timings[0].exposed, seen.reached) == (13, 1, (0, 4, 8, 13))


# ---- memory, by hand -------------------------------------------------------------------------------------------------
def test_memory_of_gathers():
    """10 and 20 bytes over persistent 100 and the segments' own."""
    tasks = tasks_of([1, 1, 1], [(10, 1, 1), (20, 2, 2)], memory=[1, 2, 3], persistent=100)
    assert memory_curve(tasks, (gather(0, 0, 1), gather(1, 1, 2))) == (111, 132, 123, 100)
    assert memory_curve(tasks, (gather(0, 1, 1), gather(1, 2, 2))) == (101, 112, 123, 100)
    # coalesced: both from the launch, each to its last use
    assert memory_curve(tasks, (gather((0, 1), 1, 1, COALESCED),)) == (101, 132, 123, 100)
    # flat: 30 bytes from launch to wait, and there once more; the packed shards, a half, until the wait
    assert memory_curve(tasks, (gather((0, 1), 0, 1, FLAT),)) == (146, 162, 123, 100)


def test_memory_of_reductions():
    """Two ranks, gradients of 8 and 16 bytes."""
    tasks = tasks_of([1, 1, 1, 1], reductions=[(8, 1), (16, 2)], channel=replace(SLOW, received_share=0.5))
    # r0: 8 + 4 in segments 1 and 2, then 4. r1: 16 + 8 in segment 2, then 8
    assert memory_curve(tasks, (reduction(0, 1, 3), reduction(1, 2, 3))) == (0, 12, 36, 12, 12)
    # waited for at once: the same as at the next segment
    assert memory_curve(tasks, (reduction(0, 1, 1), reduction(1, 2, 2))) == (0, 12, 28, 12, 12)
    # coalesced at segment 2: 8; then 24 + 12; then 12
    assert memory_curve(tasks, (reduction((0, 1), 2, 3, COALESCED),)) == (0, 8, 36, 12, 12)
    # flat: at the launch both the gradients and the bucket
    assert memory_curve(tasks, (reduction((0, 1), 2, 4, FLAT),)) == (0, 8, 60, 36, 12)


def test_memory_of_an_all_to_all_and_of_copied_gradients():
    """An all-to-all receives as much as it sends; a copied gradient is there twice at its launch."""
    tasks = tasks_of([1, 1, 1], reductions=[(8, 1)], channel=replace(SLOW, received_share=1.0))
    assert memory_curve(tasks, (reduction(0, 1, 3),)) == (0, 16, 16, 4)
    tasks = replace(tasks, reductions=(with_size(tasks.reductions[0], copied=True),))
    assert memory_curve(tasks, (reduction(0, 1, 3),)) == (0, 24, 16, 4)


def test_peak_and_curve():
    tasks = tasks_of([1, 1], [(10, 0, 0)], memory=[5, 7])
    seen = simulate(tasks, (gather(0, 0, 0),))
    assert seen.curve == (15, 7, 0)
    assert seen.peak == 15


# ---- what cannot run -------------------------------------------------------------------------------------------------
BOTH = tasks_of([1, 1, 1], [(2, 1, 1), (2, 2, 2)], [(2, 1), (2, 2)])
GOOD = (gather(0, 0, 1), reduction(0, 1, 2), gather(1, 1, 2), reduction(1, 2, 3))


def test_a_good_schedule_passes():
    check(BOTH, GOOD)


@pytest.mark.parametrize(
    ("place", "other", "message"),
    [
        (0, None, r"gathers \[1\] are not all, once each"),
        (1, None, r"reductions \[1\] are not all, once each"),
        (2, gather(0, 1, 1), r"gathers \[0, 0\] are not all, once each"),
        (3, reduction((0, 1), 2, 3), r"reductions \[0, 0, 1\] are not all, once each"),
        (2, gather(1, 0, 2), "goes out behind a later launch"),
        (0, gather(0, -1, 1), "goes out behind a later launch"),
        (2, gather(1, 1, 3), "is not there at its first use"),
        (0, gather(0, 0, 2), "is not there at its first use"),
        (2, gather(1, 2, 1), "waits before its launch"),
        (1, reduction(0, 0, 2), "goes out before its gradients are complete"),
        (3, reduction(1, 2, 1), "waits before its launch"),
    ],
)
def test_what_cannot_run_is_an_error(place, other, message):
    bad = list(GOOD)
    bad[place : place + 1] = [] if other is None else [other]
    with pytest.raises(ValueError, match=message):
        simulate(BOTH, tuple(bad))


@pytest.mark.parametrize(("last", "wait"), [(2, 3), (3, 4)], ids=["after its need", "after the end"])
def test_a_reduction_that_comes_too_late_is_an_error(last, wait):
    """Segment ``last`` needs the reduced gradient."""
    reductions = (replace(BOTH.reductions[0], last=last), BOTH.reductions[1])
    tasks = replace(BOTH, reductions=reductions)
    good = (GOOD[0], reduction(0, 1, last), *GOOD[2:])
    check(tasks, good)
    with pytest.raises(ValueError, match="is not there when it is needed"):
        check(tasks, (GOOD[0], reduction(0, 1, wait), *GOOD[2:]))


# ---- against another simulator ---------------------------------------------------------------------------------------
@QUICK
@given(tasks_and_schedules())
def test_time_agrees_with_another_simulator(case):
    tasks, schedule = case
    seen, expected = simulate(tasks, schedule), play(tasks, schedule)
    close = {"rel": 1e-9, "abs": 1e-9}
    assert seen.seconds == pytest.approx(expected.now, **close)
    assert seen.reached == pytest.approx(expected.reached, **close)
    for place, timing in enumerate(seen.timings):
        assert timing.launch == schedule[place]
        for name in ("issued", "start", "end", "exposed"):
            assert getattr(timing, name) == pytest.approx(getattr(expected, name)[place], **close), (place, name)
    for number, timing in enumerate(seen.model_timings):
        place = f"model {number}"
        other = [getattr(expected, name)[place] for name in timing._fields]
        assert timing == pytest.approx(other, **close), place
    assert makespan(tasks, schedule) == seen.seconds
    ours = {place: seconds for place, seconds in expected.exposed.items() if isinstance(place, int)}
    assert seen.exposed == pytest.approx(sum(ours.values()), **close)


@QUICK
@given(tasks_and_schedules())
def test_memory_agrees_with_another_simulator(case):
    tasks, schedule = case
    seen = simulate(tasks, schedule)
    assert list(seen.curve) == curve(tasks, schedule)
    assert seen.peak == max(curve(tasks, schedule))


@QUICK
@given(tasks_and_schedules())
def test_tasks_survive_json(case):
    tasks, schedule = case
    again = Tasks.from_json(tasks.to_json())
    assert again == tasks
    assert again.segment_of_milestone == tasks.segment_of_milestone
    assert simulate(again, schedule) == simulate(tasks, schedule)


def test_best_form_counts_copies_as_time():
    """Two gathers of 4 bytes, two ranks: 0.5 s for the second tensor, or copies of 4 + 8 bytes."""
    members = [CollectiveTask(i, 0, i, "channel", TensorSize(4), 0, 0) for i in range(2)]
    cheap = tasks_of([1], channel=SLOW, copy_seconds=0.04)  # 0.48 s
    dear = tasks_of([1], channel=SLOW, copy_seconds=0.05)  # 0.6 s
    assert [tasks.best_form(members, Kind.GATHER) for tasks in (cheap, dear)] == [FLAT, COALESCED]
    assert cheap.best_form(members[:1], Kind.GATHER) == "single"
