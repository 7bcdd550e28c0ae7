"""Another simulator of schedules, to compare the planner's with: slow, and as literal as its docstrings.

Compute is a list of steps that is worked off one by one, collectives are queues of seconds left; time moves to whatever
is done next. Memory is a list of (first segment, last segment, bytes), summed up for each segment.
"""

from dataclasses import dataclass, field

from compiled_fsdp.buckets.layout import MAX_GAP
from compiled_fsdp.buckets.spec import COALESCED, FLAT, SINGLE
from compiled_fsdp.passes.plan.channels import CommChannel, ModelCollective
from compiled_fsdp.passes.plan.tasks import Launch, Schedule, Tasks


@dataclass
class Played:
    """A schedule in time; ``issued``, ``start``, ``end`` and ``exposed`` by place in the schedule.

    Of the model's own collectives by "model 0", "model 1" and so on.
    """

    now: float = 0.0
    reached: list[float] = field(default_factory=list)
    issued: dict[int | str, float] = field(default_factory=dict)
    start: dict[int | str, float] = field(default_factory=dict)
    end: dict[int | str, float] = field(default_factory=dict)
    exposed: dict[int | str, float] = field(default_factory=dict)


def play(tasks: Tasks, schedule: Schedule) -> Played:
    """Run a schedule; the host may be slower than the device with all of it."""
    played = Played()
    streams = {stream for of in tasks.model_collectives for stream in of.streams}
    streams |= {channel.stream for channel in tasks.channels.values()}
    # of [place, seconds left, streams, whether it is a copy to host memory or back]
    queues: dict[int, list[list]] = {stream: [] for stream in streams}

    def running() -> list[list]:
        """The collectives that run: each is the first in all of its queues."""
        heads = [queue[0] for queue in queues.values() if queue]
        found = [head for head in heads if all(queues[stream][0] is head for stream in head[2])]
        return list({id(head): head for head in found}.values())

    def pass_time(seconds: float, slower: float = 0.0) -> None:
        """Up to the end of a collective at most, which takes longer by the share ``slower``."""
        played.now += seconds
        for entry in running():
            entry[1] -= seconds / (1 + slower)

    def settle() -> None:
        """End the collectives that have no seconds left, and start those behind them."""
        done = True
        while done:
            for place, *_ in running():
                played.start.setdefault(place, played.now)
            done = [entry for entry in running() if entry[1] <= 1e-12]
            for place, _, on, _ in done:
                played.end[place] = played.now
                for stream in on:
                    queues[stream].pop(0)

    for step, of in _steps(tasks, schedule):
        settle()
        if step == "segment":
            played.reached.append(played.now)
        elif step == "launch":
            played.issued[of] = played.now
            if isinstance(of, str):
                collective = tasks.model_collectives[int(of.split()[1])]
                on, seconds = collective.streams, seconds_of_model(tasks, collective)
                is_copy = collective.kind in ("offload", "reload")
            else:
                on = (tasks.channels[tasks.members_of(schedule[of])[0].channel].stream,)
                seconds, is_copy = seconds_on_channel(tasks, schedule[of]), False
            entry = [of, seconds, on, is_copy]
            for stream in on:
                queues[stream].append(entry)
        elif step == "wait":
            before = played.now
            while of not in played.end:
                pass_time(min(left for _, left, *_ in running()))
                settle()
            played.exposed[of] = played.now - before
        else:
            left, contention = of
            while left > 1e-12:
                # copies alone neither slow compute down nor become slower
                beside = any(not is_copy for *_, is_copy in running())
                slower = tasks.collective_contention if beside else 0.0
                rate = 1 / (1 + contention) if beside else 1.0
                seconds = min([left / rate, *(flying * (1 + slower) for _, flying, *_ in running())])
                pass_time(seconds, slower)
                left -= seconds * rate
                settle()
    played.now = max(played.now, tasks.host_seconds + sum(tasks.host_launch_seconds for _ in schedule))
    return played


def _steps(tasks: Tasks, schedule: Schedule) -> list[tuple]:
    """The work of the compute stream, in order.

    ("work", (seconds, contention)), ("launch", place), ("wait", place), or ("segment", index).
    """
    steps: list[tuple] = []

    def copying(seconds: float) -> tuple:
        return "work", (seconds, tasks.copy_contention)

    def wait(place: int) -> None:
        steps.extend([("wait", place), copying(copies(tasks, schedule[place])[1])])

    for index, segment in enumerate(tasks.segments):
        here = [(place, launch) for place, launch in enumerate(schedule) if index in (launch.at, launch.wait)]
        for place, launch in here:
            if not launch.kind.supplies and launch.at < launch.wait == index:
                wait(place)
        for place, launch in here:
            if launch.at == index:
                steps.extend([copying(copies(tasks, launch)[0]), ("launch", place)])
        for place, launch in here:
            if launch.kind.supplies and launch.wait == index:
                wait(place)
        for place, launch in here:
            if not launch.kind.supplies and launch.at == launch.wait == index:
                wait(place)
        steps.append(("segment", index))
        for number, collective in enumerate(tasks.model_collectives):
            if collective.at == index:
                steps.extend([copying(tasks.launch_seconds), ("launch", f"model {number}")])
        steps += [("wait", f"model {n}") for n, of in enumerate(tasks.model_collectives) if of.wait == index]
        steps.append(("work", (segment.seconds, segment.contention)))
    return steps


def seconds_of_model(tasks: Tasks, collective: ModelCollective) -> float:
    channel = tasks.channels[collective.channel]
    return on_channel(channel, collective.bytes) + (collective.tensors - 1) * channel.each


def on_channel(channel: CommChannel, size: float) -> float:
    """The quicker one of two protocols."""
    protocols = [(channel.latency, channel.bytes_per_second), *([channel.quick] if channel.quick else [])]
    return min(latency + size / rate for latency, rate in protocols)


def seconds_on_channel(tasks: Tasks, launch: Launch) -> float:
    """Latency, the tensors after the first of a coalesced bucket, and bytes."""
    members = tasks.members_of(launch)
    channel = tasks.channels[members[0].channel]
    seconds = on_channel(channel, sum(task.size.sent for task in members))
    for place in range(len(members)):
        if place and launch.form == COALESCED:
            seconds += channel.each
    return seconds


def copies(tasks: Tasks, launch: Launch) -> tuple[float, float]:
    """Seconds of copies ahead of the launch, with the launch itself, and after the wait.

    A flat gather packs shards and unpacks full tensors. A flat reduction packs full gradients. Tensors that need a copy
    are copied in any form, and the parts that an all-to-all has received are summed. A shard in host memory is copied
    to the device first. Each copy is a kernel, but all tensors that are packed into one are one kernel, and with our
    kernels or a codec all that are copied at once. A codec encodes and decodes, each as long as a copy of the full
    tensor takes.
    """
    ahead = behind = offloaded = 0.0
    ahead_kernels = behind_kernels = offloaded_kernels = 0
    for task in tasks.members_of(launch):
        channel = tasks.channels[task.channel]
        full = task.size.decoded or task.size.sent
        if launch.form == FLAT or task.size.copied or task.size.decoded:
            ahead += full / channel.world if launch.kind.supplies else full
            ahead_kernels += 1
        unpacked = launch.form == FLAT or task.size.unpacked or task.size.decoded
        if unpacked if launch.kind.supplies else channel.received_share == 1 and channel.world > 1:
            behind += full
            behind_kernels += 1
        if launch.kind.supplies and task.size.host:
            offloaded += task.size.host
            offloaded_kernels += 1
    encoded = tasks.members_of(launch)[0].size.decoded > 0
    if launch.form == FLAT or tasks.kernels or encoded:
        ahead_kernels = min(ahead_kernels, 1)
    if launch.kind.supplies and launch.form == FLAT and tasks.kernels and not encoded:
        behind_kernels = min(behind_kernels, 1)
    first = tasks.launch_seconds + ahead * tasks.copy_seconds + offloaded * tasks.host_copy_seconds
    kernels = ahead_kernels + offloaded_kernels
    return first + kernels * tasks.kernel_seconds, behind * tasks.copy_seconds + behind_kernels * tasks.kernel_seconds


def curve(tasks: Tasks, schedule: Schedule) -> list[int]:
    """Bytes alive during each segment."""
    alive: list[tuple[int, int, int]] = []  # first segment, last segment, bytes
    for launch in schedule:
        together = tasks.kernels and launch.form == FLAT  # our kernels unpack full parameters into one tensor
        last_of_all = max([launch.wait, *(task.last for task in tasks.members_of(launch))])
        for task in tasks.members_of(launch):
            encoded = task.size.decoded > 0
            world = tasks.channels[task.channel].world
            if launch.kind.supplies and encoded:
                alive.append((launch.wait, max(task.last, launch.wait), task.size.decoded))
                alive.append((launch.at, launch.wait, task.size.sent))
                alive.append((launch.at, max(launch.at, launch.wait - 1), task.size.sent // world))
                continue
            # what our kernels leave free between tensors that they pack
            packed = task.size.sent + (task.size.gap if launch.form != SINGLE else 0)
            if launch.kind.supplies:
                last = last_of_all if together else max(task.last, launch.wait)
                held = task.size.sent + (MAX_GAP if together else 0)
                unpacked = launch.form == FLAT or task.size.unpacked
                alive.append((launch.wait if unpacked else launch.at, last, held))
                if unpacked:
                    alive.append((launch.at, launch.wait, packed if launch.form == FLAT else task.size.sent))
                if launch.form == FLAT or task.size.copied:  # the shards as they are sent
                    until = max(launch.at, launch.wait - 1) if launch.form == FLAT else launch.wait
                    alive.append((launch.at, until, packed // world))
                continue
            # The wait is before the segment `wait`, so the memory is free in that segment. If launch and wait are at
            # one segment, the memory is held in it.
            end = launch.at if launch.at == launch.wait else launch.wait - 1
            channel = tasks.channels[task.channel]
            if encoded:  # the gradient, perhaps padded first, and its encoded bytes, sent and received
                alive += [(task.first, launch.at, task.size.decoded), (launch.at, end, task.size.sent)]
                if task.size.copied:
                    alive.append((launch.at, launch.at, task.size.decoded))
                alive += [(launch.at, end, task.size.sent), (end + 1, tasks.end, task.size.full // world)]
                alive.append((end if world == 1 else end + 1, end + 1, task.size.cast_shard))
                continue
            received = packed if launch.form == FLAT else task.size.sent
            if launch.form == FLAT or task.size.copied:
                alive += [(task.first, launch.at, task.size.sent + task.size.wider), (launch.at, end, packed)]
                if launch.form == FLAT and task.size.copied:  # and once more to be packed
                    alive.append((launch.at, launch.at, task.size.sent))
            else:
                alive.append((task.first, end, task.size.sent + task.size.wider))
            alive.append((launch.at, end, received if channel.received_share == 1 else received // world))
            alive.append((end + 1, tasks.end, received // world // channel.parts + task.size.wider_shard))
            if channel.parts > 1:  # a second reduction is sent, and received by pieces
                alive.append((end + 1, end + 1, (1 + int(channel.received_share)) * received // world))
            alive.append((end if world == 1 else end + 1, end + 1, task.size.cast_shard))
    return [
        tasks.persistent + segment.bytes + sum(size for first, last, size in alive if first <= index <= last)
        for index, segment in enumerate(tasks.segments)
    ]
