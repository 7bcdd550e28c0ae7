"""One case in processes of its own, and what is right of it."""

import faulthandler
import multiprocessing
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from tests.faults.table import EVERY_RANK, Case
from tests.harness.spawn import ENVIRONMENT, PRELOAD

GROUP_TIMEOUT = timedelta(seconds=60)
"""Of the process group: an error that is known at once comes long before it, on a slow machine too."""
HANGS = 150.0
"""Seconds after which a case hangs."""


class Outcome(NamedTuple):
    """How a rank ended.

    Attributes:
        error: the type and text of what it raised; None if nothing, or if it did not say.
        seconds: from the fault to that.
        code: the process's exit code; None where it hung.
        stack: where it hung.
    """

    error: str | None
    seconds: float
    code: int | None
    stack: str = ""


def run(case: Case, folder: Path) -> list[Outcome]:
    """Run a case in `case.world` new processes; `folder` is for its files."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if case.store == "agent" else None
    port = _free_port() if store is None else store.port
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "tests.faults.scene"])
    connections, processes = [], []
    with mock.patch.dict(os.environ, ENVIRONMENT | os.environ):
        for rank in range(case.world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, port, case, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
    try:
        return _outcomes(connections, processes, folder)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _outcomes(connections: list[Connection], processes: list[Any], folder: Path) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    waiting = {connection: rank for rank, connection in enumerate(connections)}
    deadline = time.monotonic() + HANGS
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), left):
            rank = waiting.pop(connection)
            try:
                error, seconds = connection.recv()
            except (EOFError, ConnectionError):
                error, seconds = None, 0.0
            processes[rank].join(60)
            found[rank] = Outcome(error, seconds, processes[rank].exitcode)
    for rank in waiting.values():
        os.kill(processes[rank].pid, signal.SIGUSR1)
        time.sleep(1)
        found[rank] = Outcome(None, HANGS, None, (folder / f"stack{rank}").read_text())
    return [found[rank] for rank in range(len(connections))]


def _rank(rank: int, port: int, case: Case, folder: Path, connection: Connection) -> None:
    """A rank's life. One that fails tells how, and ends by its error, as a script does."""
    from tests.faults.scene import watched_places

    (folder / f"output{rank}").touch()
    output = os.open(folder / f"output{rank}", os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(output, stream)
    faulthandler.register(signal.SIGUSR1, (folder / f"stack{rank}").open("w"))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # of a command in the background it is ignored
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=case.store != "agent" and rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world, timeout=GROUP_TIMEOUT)
    is_victim = case.victim == rank
    builds = [f"torch 9.9.9 of rank {rank}"] if is_victim and case.fault == "other torch build" else None
    try:
        with watched_places(rank, case), _other_builds(builds):
            _train(case, rank, folder)
        connection.send((None, 0.0))
    except BaseException as error:
        if not is_victim or case.place == "start":  # every rank where it is caught
            began = float((folder / "fault").read_text())
            connection.send((f"{type(error).__name__}: {error}", time.time() - began))
        raise
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _other_builds(builds: list[str] | None) -> Iterator[None]:
    if builds is None:
        yield
        return
    with mock.patch("compiled_fsdp.compiler.compilation.BUILD", builds):
        yield


def _train(case: Case, rank: int, folder: Path) -> None:
    from tests.faults.scene import train, unsharded

    ours = train(case, rank, folder)
    if case.fault in ("slow", "caught"):  # training has gone on
        expected = unsharded(case)  # after an exception in backward FSDP2 is not equal to it
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            same = torch.equal if case.world == 2 else torch.allclose  # more ranks are added up in another order
            assert same(ours[name], value), f"{name} is not the unsharded model's"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- what is right ---------------------------------------------------------------------------------------------------
LOST = r"Connection (closed|reset)|Broken pipe|CheckpointException"  # what torch says of it while it saves
STORE_LOST = r"(the process that serves the process group's store|store could not be reached).*has ended"


def expected(case: Case) -> str:
    """What the survivors' errors say: a pattern."""
    ended, failed = (f"rank {case.victim} of the group {how}" for how in ("has ended", "failed to compile"))
    if case.store == "rank 0" and case.victim == 0:
        return f"{ended}|{STORE_LOST}" if case.fault == "killed" else f"{failed}|{ended}|{STORE_LOST}"
    if case.place in ("compiling", "planning") or (case.place == "hook" and case.way != "uncompiled"):
        if case.place == "hook" and case.way == "broken":  # Dynamo goes on after the graph before, and ends there
            return f"{ended}|{failed}"
        return ended if case.fault == "killed" else failed
    if case.place == "saving":
        return LOST
    if case.place == "start":
        what = {
            "option": "option bucket='(none|auto)'", "model": r"\[10, 8\]|\[8, 8\]|\[8, 10\]",
            "dtype": "bfloat16|float32", "torch build": r"torch 9\.9\.9 of rank",
            "wire policy": "WirePolicy|bfloat16.*int8|int8.*bfloat16", "pieces": r"middle\.weight.*(bfloat16|float32)",
            "traceable": r"middle\.weight",
        }[case.fault.removeprefix("other ")]  # fmt: skip
        if case.fault == "other pieces" and case.way == "uncompiled":
            return "(?s)all-gather extensions of parameter 'middle.weight' differ between ranks"
        if case.fault == "other traceable" and case.way == "broken":
            return "run the all-gather extensions of parameter 'middle.weight' in different places"
        if case.fault == "other traceable":  # fullgraph=True: Dynamo's error on that rank
            return f"{ended}|cannot be traced"
        return f"(?s)ranks (compile different regions|run different models).*({what})"
    if (case.place, case.way, case.fault) == ("hook", "uncompiled", "raising"):
        return rf"{ended}.*fsdp_pre_all_gather of parameter 'middle\.weight'.*Told"
    return ended


def problems(case: Case, outcomes: list[Outcome], folder: Path) -> list[str]:
    """What is wrong with how a case ended; nothing if all is right."""
    found = [f"rank {rank} hangs:\n{outcome.stack}" for rank, outcome in enumerate(outcomes) if outcome.code is None]
    lives = case.fault in ("slow", "caught")
    for rank, outcome in enumerate(outcomes):
        output = (folder / f"output{rank}").read_text()[-3000:]
        if lives:
            if outcome.error is not None or outcome.code != 0:
                found.append(f"rank {rank} ended with {outcome.code}: {outcome.error}\n{output}")
        elif rank == case.victim and case.place != "start":
            code = -signal.SIGKILL if case.fault == "killed" else 1
            if outcome.code != code:
                found.append(f"rank {rank}, to which it happened, ended with {outcome.code}\n{output}")
        elif outcome.error is None or not re.search(expected(case), outcome.error):
            found.append(
                f"rank {rank} ended with {outcome.code} and says {outcome.error}, not {expected(case)}\n{output}"
            )
    if not lives and case.place == "saving":
        whole = sorted(path.parent.name for path in folder.glob("step-*/.metadata"))
        if whole != ["step-0"]:
            found.append(f"whole checkpoints: {whole}")
    return found


def check(case: Case) -> tuple[list[str], list[Outcome]]:
    """A case's problems and outcomes."""
    assert case.victim in (EVERY_RANK, *range(case.world))
    with tempfile.TemporaryDirectory() as name:
        outcomes = run(case, Path(name))
        return problems(case, outcomes, Path(name)), outcomes
