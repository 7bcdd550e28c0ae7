"""Another simulator of schedules, to compare the planner's with: slow, and as literal as its docstrings.

Compute is a list of steps that is worked off one by one, collectives are queues of seconds left; time moves to whatever
is done next. Memory is a list of (first segment, last segment, bytes), summed up for each segment.
"""

from dataclasses import dataclass, field

from compiled_fsdp.passes.plan.tasks import COALESCED, FLAT, Launch, Schedule, Tasks


@dataclass
class Played:
    """A schedule in time; ``issued``, ``start``, ``end`` and ``exposed`` by place in the schedule."""

    now: float = 0.0
    reached: list[float] = field(default_factory=list)
    issued: dict[int, float] = field(default_factory=dict)
    start: dict[int, float] = field(default_factory=dict)
    end: dict[int, float] = field(default_factory=dict)
    exposed: dict[int, float] = field(default_factory=dict)


def play(tasks: Tasks, schedule: Schedule) -> Played:
    """Run a schedule; the host may be slower than the device with all of it."""
    played = Played()
    queues: dict[int, list[list]] = {
        channel.stream: [] for channel in tasks.channels.values()
    }  # of [place, seconds left]

    def pass_time(seconds: float) -> None:
        """Up to the end of a collective at most."""
        played.now += seconds
        for queue in queues.values():
            if queue:
                queue[0][1] -= seconds

    def settle() -> None:
        """Take off what is done, and start what is next."""
        for queue in queues.values():
            while queue:
                place, left = queue[0]
                played.start.setdefault(place, played.now)
                if left > 1e-12:
                    break
                played.end[place] = played.now
                queue.pop(0)

    for step, of in _steps(tasks, schedule):
        settle()
        if step == "segment":
            played.reached.append(played.now)
        elif step == "launch":
            played.issued[of] = played.now
            members = tasks.members_of(schedule[of])
            queues[tasks.channels[members[0].channel].stream].append([of, seconds_on_channel(tasks, schedule[of])])
        elif step == "wait":
            before = played.now
            while of not in played.end:
                pass_time(min(queue[0][1] for queue in queues.values() if queue))
                settle()
            played.exposed[of] = played.now - before
        else:
            left = of
            while left > 1e-12:
                flying = [queue[0][1] for queue in queues.values() if queue]
                rate = 1 / (1 + tasks.contention) if flying else 1.0
                seconds = min([left / rate, *flying])
                pass_time(seconds)
                left -= seconds * rate
                settle()
    played.now = max(played.now, tasks.host_seconds + sum(tasks.host_launch_seconds for _ in schedule))
    return played


def _steps(tasks: Tasks, schedule: Schedule) -> list[tuple]:
    """What the compute stream does: ("work", seconds), ("launch", place), ("wait", place), ("segment", index)."""
    steps: list[tuple] = []

    def wait(place: int) -> None:
        steps.extend([("wait", place), ("work", copies(tasks, schedule[place])[1])])

    for index, segment in enumerate(tasks.segments):
        here = [(place, launch) for place, launch in enumerate(schedule) if index in (launch.at, launch.wait)]
        for place, launch in here:
            if not launch.gathers and launch.at < launch.wait == index:
                wait(place)
        for place, launch in here:
            if launch.at == index:
                steps.extend([("work", copies(tasks, launch)[0]), ("launch", place)])
        for place, launch in here:
            if launch.gathers and launch.wait == index:
                wait(place)
        for place, launch in here:
            if not launch.gathers and launch.at == launch.wait == index:
                wait(place)
        steps.extend([("segment", index), ("work", segment.seconds)])
    return steps


def seconds_on_channel(tasks: Tasks, launch: Launch) -> float:
    """Latency, the tensors after the first of a coalesced bucket, and bytes."""
    members = tasks.members_of(launch)
    channel = tasks.channels[members[0].channel]
    seconds = channel.latency
    for place, task in enumerate(members):
        seconds += task.bytes / channel.bytes_per_second
        if place and launch.form == COALESCED:
            seconds += channel.each
    return seconds


def copies(tasks: Tasks, launch: Launch) -> tuple[float, float]:
    """Seconds of copies ahead of the launch, with the launch itself, and after the wait.

    A flat gather packs shards and unpacks full tensors; a flat reduction packs full gradients; what needs a copy is
    copied in any form; what an all-to-all has received is summed.
    """
    ahead = behind = 0.0
    for task in tasks.members_of(launch):
        channel = tasks.channels[task.channel]
        if launch.gathers:
            ahead += task.bytes / channel.world if launch.form == FLAT or task.needs_copy else 0
            behind += task.bytes if launch.form == FLAT else 0
        elif not launch.gathers:
            ahead += task.bytes if launch.form == FLAT or task.needs_copy else 0
            behind += task.bytes if channel.received_share == 1 and channel.world > 1 else 0
    return tasks.launch_seconds + ahead * tasks.copy_seconds, behind * tasks.copy_seconds


def curve(tasks: Tasks, schedule: Schedule) -> list[int]:
    """Bytes alive during each segment."""
    alive: list[tuple[int, int, int]] = []  # first segment, last segment, bytes
    for launch in schedule:
        for task in tasks.members_of(launch):
            if launch.gathers:
                alive.append((launch.wait if launch.form == FLAT else launch.at, task.last, task.bytes))
                if launch.form == FLAT:
                    alive.append((launch.at, launch.wait, task.bytes))
                if launch.form == FLAT or task.needs_copy:  # the shards as they are sent
                    read = task.bytes // tasks.channels[task.channel].world
                    alive.append((launch.at, max(launch.at, launch.wait - 1), read))
                continue
            # waited for before the segment `wait`, so gone in it; waited for at once it is there in its segment
            end = launch.at if launch.at == launch.wait else launch.wait - 1
            channel = tasks.channels[task.channel]
            shard = task.bytes // channel.world
            if launch.form == FLAT or task.needs_copy:
                alive += [(task.first, launch.at, task.bytes), (launch.at, end, task.bytes)]
                if launch.form == FLAT and task.needs_copy:  # and once more to be packed
                    alive.append((launch.at, launch.at, task.bytes))
            else:
                alive.append((task.first, end, task.bytes))
            alive.append((launch.at, end, task.bytes if channel.received_share == 1 else shard))
            alive.append((end + 1, tasks.end, shard))
    return [
        tasks.persistent + segment.bytes + sum(size for first, last, size in alive if first <= index <= last)
        for index, segment in enumerate(tasks.segments)
    ]
