"""Run functions in several processes that form one gloo process group on this machine.

`run_ranks` starts new interpreters for one function. `Ranks` keeps its processes, forked from one that has imported
torch already, and runs one function after the other in them; `tests.harness.distributed` makes pytest tests that run in
`Ranks`.
"""

import contextlib
import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

# Limits that detect hangs: no test comes near them, even on a machine that is ten times slower.
TIMEOUT = 600.0  # seconds one function may take; the longest takes 30 on an idle machine
ASLEEP = 240.0  # seconds for which all ranks may sleep at once, as they do in a hang, or while a C++ compiler runs
START_TIMEOUT = 600.0  # seconds until all processes have imported torch and joined the group
GRACE = 3.0  # seconds the other ranks get to report after the first failure; many wait for the failed rank forever
STACK_TIMEOUT = 30.0  # seconds until a rank has written its stack
EXIT_TIMEOUT = 120.0  # seconds until all processes have left the group and exited
STOP = b""
OBJECTS = 100_000  # new objects between garbage collections; with Python's 700, collections take a sixth of the time

PRELOAD = ["tests.harness.preload"]  # imported once, in the process that ranks are forked from

# Defaults: the caller's environment overrides them. For example, a test of the caches turns them on in a folder.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no pool of compile processes beside every rank
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",  # a graph cached by an earlier run would hide a change in the lowerings
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
}


class RankFailure(AssertionError):
    """A rank raised, died, hung or exited badly. The message has the outcome of each rank, with tracebacks."""


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = TIMEOUT, **kwargs: Any) -> list:
    """Run `fn(rank, world_size, *args, **kwargs)` in `world_size` new interpreters; return the results by rank.

    The interpreters have the environment that this process has now. `fn` must be importable by name; arguments and
    results must pickle, and tensors are sent by value. Raises `RankFailure` when a rank fails, takes over `timeout`
    seconds or exits with a code other than 0.
    """
    with Ranks(world_size, method="spawn") as ranks:
        return ranks.run(fn, *args, timeout=timeout, **kwargs)


class Ranks:
    """`world_size` processes in one gloo group. Any failure kills them all: then `alive` is False.

    They receive calls through pipes. This process decides whether a call has succeeded on all ranks, because a
    collective for that would hang as soon as one rank fails. With `method="forkserver"` a start needs no imports, and
    the environment is that of the first start in this process; with "spawn" each rank is a new interpreter.
    """

    def __init__(self, world_size: int, method: Literal["forkserver", "spawn"] = "forkserver") -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        # This process serves the store: the system chooses a free port, and the store outlives every rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connections: list[Connection] = []
        self._processes: list[multiprocessing.Process] = []
        context = multiprocessing.get_context(method)
        context.set_forkserver_preload(PRELOAD)
        with mock.patch.dict(os.environ, ENVIRONMENT | os.environ):
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                arguments = (rank, world_size, self._store.port, theirs, self._stack(rank))
                process = context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {rank}")
                process.start()
                theirs.close()  # else the pipe would stay open after the rank's death, and we would not notice
                self._connections.append(ours)
                self._processes.append(process)
        self._collect("start", START_TIMEOUT)

    @property
    def alive(self) -> bool:
        """Whether `run` can be called."""
        return bool(self._processes)

    @property
    def threads(self) -> int:
        """The number of the first rank's threads; 0 if the system does not tell."""
        tasks = Path(f"/proc/{self._processes[0].pid}/task")
        return len(list(tasks.iterdir())) if tasks.exists() else 0

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, grace: float = GRACE, reset: bool = False,
        asleep: float = ASLEEP, **kwargs: Any,
    ) -> list:  # fmt: skip
        """Run a function like `run_ranks`, in these processes, which stay. With `reset` compiled code is dropped before
        and after. After the first failure the other ranks have `grace` seconds to end. If all ranks have been asleep
        for `asleep` seconds, they count as hung."""
        __tracebackhide__ = True  # pytest: the report is in the message
        call = pickle.dumps((fn.__module__, fn.__qualname__, args, kwargs, reset))
        for connection in self._connections:
            with contextlib.suppress(ConnectionError):  # that rank is dead, which _collect reports
                connection.send_bytes(call)
        return self._collect(fn.__qualname__, timeout, grace, asleep)

    def close(self) -> None:
        """End the processes. Raises RankFailure when one does not exit, or exits with a code other than 0."""
        for connection in self._connections:
            with contextlib.suppress(ConnectionError):
                connection.send_bytes(STOP)
        deadline = time.monotonic() + EXIT_TIMEOUT
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        bad = {p.name: p.exitcode for p in self._processes if p.exitcode != 0}
        self.kill()
        if bad:
            raise RankFailure(f"after their last function these ranks exited badly (None: not at all): {bad}")

    def kill(self) -> None:
        """End the processes at once and free their resources. May be called twice."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._folder.cleanup()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _stack(self, rank: int) -> Path:
        return Path(self._folder.name, f"stack{rank}")

    def _collect(self, what: str, timeout: float, grace: float = GRACE, asleep: float = ASLEEP) -> list:
        """Wait for every rank's outcome; if one is bad or missing, kill all ranks and raise."""
        __tracebackhide__ = True
        outcomes: dict[int, tuple[bool, Any]] = {}
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout
        awake = time.monotonic()
        try:
            while waiting and (left := deadline - time.monotonic()) > 0:
                if asleep < timeout:
                    left = min(left, 0.2)
                    awake = awake if all(map(self._is_asleep, waiting.values())) else time.monotonic()
                    if time.monotonic() - awake > asleep:
                        break
                for connection in wait(list(waiting), left):
                    rank = waiting.pop(connection)
                    outcomes[rank] = self._receive(rank)
                    if not outcomes[rank][0]:
                        deadline = min(deadline, time.monotonic() + grace)
            failed = bool(waiting) or not all(good for good, _ in outcomes.values())
            if failed:
                for rank in waiting.values():
                    outcomes[rank] = (False, f"was still running; its stack:\n{self._ask_stack(rank)}")
        except BaseException:  # a test's own timeout, or Ctrl-C
            self.kill()
            raise
        if failed:
            self.kill()
            report = "\n".join(f"rank {r}: {text if not ok else 'ok'}" for r, (ok, text) in sorted(outcomes.items()))
            raise RankFailure(f"{what} failed (limit {timeout:.0f} s)\n{report}")
        return [outcomes[rank][1] for rank in range(self.world_size)]

    def _is_asleep(self, rank: int) -> bool:
        """Whether the rank's main thread waits for anything but a processor; False if the system does not tell."""
        stat = Path(f"/proc/{self._processes[rank].pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "S"

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, ConnectionError):
            self._processes[rank].join(EXIT_TIMEOUT)
            return False, f"exited with code {self._processes[rank].exitcode}"

    def _ask_stack(self, rank: int) -> str:
        """Return the Python stack at which a rank hangs, as text."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + STACK_TIMEOUT
        while not self._stack(rank).stat().st_size and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)  # it writes line by line
        return self._stack(rank).read_text() or "(it did not answer)"


_environment: dict[str, str] = {}  # a rank's environment when it starts


def _serve(rank: int, world_size: int, port: int, connection: Connection, stack: Path) -> None:
    """Run as a rank: join the group, run the calls that come through the pipe, leave in order."""
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        torch.set_num_threads(1)
        _environment.update(os.environ)
        # High limits, because models of many tests follow each other here, and share compiled code where they can.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
        # Saves time: in each compile Dynamo would measure how long guards take with cold caches, only for its logs.
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
        gc.set_threshold(OBJECTS)
        collectives = torch.library.Library("_c10d_functional", "IMPL")  # in force while this object lives
        collectives.impl("all_gather_into_tensor", _gather, "CPU")
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        connection.send_bytes(pickle.dumps((True, None)))
        while call := connection.recv_bytes():
            connection.send_bytes(_outcome(call, rank, world_size))
        # gloo's thread drops the last collective's tensors some time later, for which it needs the GIL. Without a
        # barrier that may happen while the interpreter shuts down, which aborts the process (exit code -6).
        dist.barrier()
        dist.destroy_process_group()


def _gather(tensor: torch.Tensor, world_size: int, group: str) -> torch.Tensor:
    """Do torch's functional gather by its variant that writes into a given tensor.

    gloo does the plain variant as "ALLGATHER_COALESCED". Its two threads write the name of their last collective into
    one `std::string` without a lock (ProcessGroupGloo::runLoop, torch 2.13). A name of more than 15 characters lies on
    the heap, and is sometimes freed twice. `full_tensor` does such a gather for each tensor that we compare.
    """
    out = tensor.new_empty(world_size * tensor.shape[0], *tensor.shape[1:])
    sent, received = (torch.view_as_real(t) if t.is_complex() else t for t in (tensor, out))  # like the plain variant
    torch.ops._c10d_functional.all_gather_into_tensor_out(sent, world_size, group, out=received)
    return out


def _outcome(call: bytes, rank: int, world_size: int) -> bytes:
    """Run a pickled call and pickle (True, its result) or (False, its traceback)."""
    try:
        module, name, args, kwargs, reset = pickle.loads(call)
        fn = importlib.import_module(module)
        for attribute in name.split("."):
            fn = getattr(fn, attribute)
        _tidy(reset)
        result = inspect.unwrap(fn)(rank, world_size, *args, **kwargs)
        if reset:  # no other test may use code that was compiled under this test's switches
            torch.compiler.reset()
        return pickle.dumps((True, result))
    except BaseException:  # SystemExit and pytest's skip, too, because the caller has to see them
        return pickle.dumps((False, traceback.format_exc()))


def _tidy(reset: bool) -> None:
    """Undo changes that an earlier function may have left in this process; drop its compiled code only on `reset`."""
    if reset:
        torch.compiler.reset()
    os.environ.clear()
    os.environ.update(_environment)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    random.seed(0)
    gc.collect()
    gc.freeze()  # the objects left are torch's, and more with each compile: later collections need not check them
