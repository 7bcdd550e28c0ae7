"""Train for a long time in two real processes beside FSDP2: nothing may grow, and every loss must equal FSDP2's.

    python -m tests.soak [--steps 5000] [--every 100] [--minutes M]

Two models train: one is compiled as a whole, the other has a graph break after every block. Each has a twin under FSDP2
in eager mode, on the same batches. The script of steps repeats after ``PERIOD`` steps. It has batch sizes by step and
by rank, several lengths, two microbatches of which only the last one reduces, evaluation, clipping, gradient sync and
resharding switched on and off, an exception on all ranks in forward, and a checkpoint that DCP saves and loads. After
two periods the program counts its resources every ``--every`` steps. Exits with 1 if something grew.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from tests.harness.models import VOCABULARY, Transformer
from tests.harness.reference import full, shard
from tests.harness.spawn import run_ranks

PERIOD = 60
"""The number of steps after which the script begins again."""
MAX_GROWTH_OF_MEMORY = 24 * 2**20
"""Bytes by which the resident set may grow from the first to the last quarter of counts: allocators keep some."""
MAX_GROWTH_OF_OBJECTS = 500
"""Python objects by which a count may grow, because caches of fixed size may still fill."""
MAX_GROWTH_OF_TENSORS = 16
"""Tensors by which a count may grow. If each period leaves a tensor behind, the growth soon exceeds this."""


class Broken(Transformer):
    """A ``Transformer`` with a graph break after each block."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.head(self.norm(x))


class Told(ArithmeticError):
    """Raised by every rank when the script says so."""


class Pair:
    """A compiled model under compiled_fsdp and its twin under FSDP2, each with an optimizer."""

    def __init__(self, kind: type[Transformer]) -> None:
        from compiled_fsdp import fully_shard

        self.ours, self.theirs = shard(kind(dim=16), fully_shard), shard(kind(dim=16), fsdp2_fully_shard)
        self.run = torch.compile(self.ours, backend="compiled_fsdp", options={"codegen": "aot_eager"})
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, foreach=False) for m in (self.ours, self.theirs)]

    @property
    def models(self) -> tuple[tuple[nn.Module, Callable[..., Tensor]], ...]:
        """Both models, each with the callable that runs it."""
        return (self.ours, self.run), (self.theirs, self.theirs)

    def step(self, number: int, rank: int, folder: Path) -> None:
        """Run one step of the script on both models. Their losses must be equal."""
        in_period = number % PERIOD
        found = [
            self._train(model, run, optimizer, number, rank)
            for (model, run), optimizer in zip(self.models, self.optimizers, strict=True)
        ]
        assert torch.equal(*found), f"step {number}: losses {found[0].tolist()}, FSDP2's {found[1].tolist()}"
        if in_period % 20 == 7:
            with torch.no_grad():
                found = [_loss(run, *_batch(number, rank, 5, 12)) for _, run in self.models]
            assert torch.equal(*found), f"step {number}: evaluation"
        if in_period == 33:
            for (model, run), optimizer in zip(self.models, self.optimizers, strict=True):
                self._fail(model, run, optimizer, number, rank)
        if in_period == 47:
            for i, ((model, _), optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                self._save_and_load(model, optimizer, folder / f"{type(model).__name__}-{i}")

    def _train(self, model: Any, run: Any, optimizer: Any, number: int, rank: int) -> Tensor:
        in_period = number % PERIOD
        optimizer.zero_grad()
        losses = []
        microbatches = 2 if in_period % 4 == 3 else 1
        for micro in range(microbatches):
            is_last = micro == microbatches - 1
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            model.set_reshard_after_backward(is_last or in_period < 30)  # else parameters stay unsharded
            rows, length = 2 + (number + rank) % 3, (8, 12, 16)[number % 3]
            loss = _loss(run, *_batch(2 * number + micro, rank, rows, length))
            loss.backward()
            losses.append(loss.detach())
        losses.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        return torch.stack(losses)

    def _fail(self, model: Any, run: Any, optimizer: Any, number: int, rank: int) -> None:
        """Make every rank raise in a forward pre-hook, catch the exception, and go on."""

        def hook(*_: Any) -> None:
            raise Told

        handle = model.blocks[1].register_forward_pre_hook(hook)
        try:
            model(*_batch(number, rank, 3, 8)[:1])  # eager, because compiled code with a hook would be another variant
        except Told:
            pass
        else:
            raise AssertionError("the hook did not run")
        finally:
            handle.remove()
        reset = getattr(model, "reset_iter_state", None)
        if reset is not None:
            reset()
        optimizer.zero_grad()

    def _save_and_load(self, model: Any, optimizer: Any, path: Path) -> None:
        saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(saved, checkpoint_id=path)
        dcp.load(saved, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)


def _batch(number: int, rank: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    tokens = torch.randint(VOCABULARY, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _loss(run: Callable[..., Tensor], tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(run(tokens).flatten(0, 1), targets.flatten())


# ---- counts ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Counts:
    """The resources of a rank's process after a step."""

    step: int
    # Bytes of the resident set.
    memory: int
    # Python objects that the garbage collector knows, and tensors among them.
    objects: int
    tensors: int
    # Graphs that Dynamo made, and reports of graphs that compiled_fsdp's backend keeps.
    graphs: int
    reports: int
    # Open file descriptors, and threads of the process.
    descriptors: int
    threads: int
    # Keys of the process group's store, and process groups.
    store_keys: int
    groups: int


def count(step: int) -> Counts:
    """Count this process's resources, after a garbage collection."""
    from compiled_fsdp.reporting.compile_log import COMPILE_LOG

    gc.collect()
    objects = gc.get_objects()
    store = dist.distributed_c10d._get_default_store()
    proc = Path("/proc/self")
    return Counts(
        step=step,
        memory=int((proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        objects=len(objects),
        tensors=sum(issubclass(type(o), Tensor) for o in objects),
        graphs=torch._dynamo.utils.counters["stats"]["unique_graphs"],
        reports=len(COMPILE_LOG.graphs),
        descriptors=len(os.listdir(proc / "fd")),
        threads=len(os.listdir(proc / "task")),
        store_keys=store.num_keys(),
        groups=dist.distributed_c10d.get_pg_count(),
    )


def growth(counts: list[Counts]) -> list[str]:
    """Return a line for each resource that grew from the first quarter of the counts to the last one."""
    if len(counts) < 2:
        return ["there are fewer than two counts"]
    quarter = max(1, len(counts) // 4)
    allowed = {"memory": MAX_GROWTH_OF_MEMORY, "objects": MAX_GROWTH_OF_OBJECTS, "tensors": MAX_GROWTH_OF_TENSORS}
    found = []
    for name in (field.name for field in fields(Counts) if field.name != "step"):
        values = [getattr(of, name) for of in counts]
        before, after = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
        if after > before + allowed.get(name, 0):
            found.append(f"{name} grew from {before:,.0f} to {after:,.0f}: {values}")
    return found


def soak(
    rank: int, world_size: int, steps: int, every: int, folder: str, minutes: float = float("inf")
) -> list[dict[str, int]]:
    """Run one rank's steps; return its counts, the first one at the end of the second period or later."""
    torch.set_num_threads(1)
    pairs = [Pair(Transformer), Pair(Broken)]
    counts: list[Counts] = []
    end = time.monotonic() + 60 * minutes
    for number in range(steps):
        for pair in pairs:
            pair.step(number, rank, Path(folder) / f"{number}")
        if number + 1 >= 2 * PERIOD and (number + 1) % every == 0:
            counts.append(count(number + 1))
            is_over = torch.tensor(time.monotonic() > end)
            dist.broadcast(is_over, 0)  # also a barrier: no rank adds keys to the store while another counts
            if rank == 0:
                print(json.dumps(asdict(counts[-1])), flush=True)
            if is_over:
                break
    return [asdict(of) for of in counts]


def run(steps: int, every: int, minutes: float = float("inf")) -> tuple[int, list[str]]:
    """Run both ranks; return the number of steps, and a line for each resource that grew on a rank."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank = run_ranks(soak, 2, steps, every, folder, minutes, timeout=12 * 3600)
    found = []
    for rank, counts in enumerate(by_rank):
        found += [f"rank {rank}: {what}" for what in growth([Counts(**of) for of in counts])]
    return by_rank[0][-1]["step"], found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--every", type=int, default=100, help="count after so many steps")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most, from the first step on")
    options = parser.parse_args()
    steps, found = run(options.steps, options.every, options.minutes)
    print("\n".join(found) or f"{steps} steps, each loss FSDP2's, and nothing grew")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
