"""Lightning's Trainer, and Fabric, which are one package."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from compiled_fsdp import explain
from tests.clients import recipe
from tests.harness import batch, distributed
from tests.harness.checkpoints import state_of
from tests.harness.models import small
from tests.harness.reference import assert_equal, full

pytestmark = pytest.mark.more
lightning = pytest.importorskip("lightning.pytorch")

# What makes FSDP2's program of a recipe. Lightning itself compiles nothing.
FSDP2 = [("from compiled_fsdp import", "from torch.distributed.fsdp import"), ('"compiled_fsdp"', '"eager"')]
Change = tuple[str, str]
ON_CPU: Change = ("devices=2", 'devices=2, accelerator="cpu"')
NONE: Change = ("", "")


def follow(heading: str, ours: bool, *changes: Change, **names: Any) -> dict[str, Any]:
    """Run the page's recipe, with changes of its text, or as FSDP2's program. Returns what it defines."""
    text = recipe(heading)
    for old, new in [*changes, *([] if ours else FSDP2)]:
        assert old in text, old
        text = text.replace(old, new, 1)
    exec(compile(text, f"ecosystem.md: {heading}", "exec"), names)
    return names


@contextlib.contextmanager
def launched(rank: int) -> Iterator[None]:
    """What a launcher tells Lightning. Graphs of ours run as they are, which is quick to compile, and exact."""
    as_it_was = torch.compile

    def quick(model: Any, *, backend: str, **options: Any) -> Any:
        more = {"options": {"codegen": "aot_eager"}} if backend == "compiled_fsdp" else {}
        return as_it_was(model, backend=backend, **{**options, **more})

    with (
        mock.patch.dict(os.environ, LOCAL_RANK=str(rank), NODE_RANK="0"),
        mock.patch.object(torch, "compile", quick),
    ):
        yield


def phases(model: nn.Module) -> set[str]:
    return {graph.phase for graph in explain(model).graphs}


# ---- the Trainer -----------------------------------------------------------------------------------------------------
class Trained(lightning.LightningModule):
    """A LightningModule as anybody writes it; it keeps its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small(blocks=2)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())
        self.losses.append(loss.detach())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.losses.append(F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)


def loader(samples: int, shuffle: bool) -> DataLoader:
    """Of the same samples everywhere: the Trainer gives each rank its own."""
    return DataLoader(TensorDataset(*batch(0, 0, size=samples)), batch_size=4, shuffle=shuffle)


def fit(
    ours: bool, folder: Path, change: Change = NONE, checkpoint: str | None = None, **options: Any
) -> tuple[Any, Any]:
    """The LightningModule and its Trainer, which has trained it, from a checkpoint if one is given."""
    names = follow("Lightning", ours, change, Trained=Trained)
    module = names["Sharded"]()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=names["strategy"], default_root_dir=folder, logger=False,
        enable_progress_bar=False, **options,
    )  # fmt: skip
    trainer.fit(module, loader(32, shuffle=True), ckpt_path=checkpoint)
    assert not ours or phases(module.model) >= {"forward", "backward"}
    return module, trainer


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@distributed(world_size=2)
def test_trainer(rank, world_size, tmp_path, precision):
    """Accumulation, clipping, validation, all of Lightning's own callbacks."""
    options = {"max_epochs": 1, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "precision": precision}
    results = []
    with launched(rank):
        for ours in (True, False):
            module, trainer = fit(ours, tmp_path / str(ours), **options)
            trainer.validate(module, loader(8, shuffle=False), verbose=False)
            assert trainer.global_step == 2
            if ours:
                assert "inference" in phases(module.model)
                backwards = [graph for graph in explain(module.model).graphs if graph.phase == "backward"]
                assert all("reduce" in {bucket.kind for bucket in graph.plan.launches} for graph in backwards)
            losses = {f"loss {index}": loss for index, loss in enumerate(module.losses)}
            results.append(losses | state_of(module, trainer.optimizers[0]))
    mine, theirs = results
    assert sum(name.startswith("loss") for name in mine) == 5
    assert mine["model.head.weight"].dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert_equal(mine, theirs)


@pytest.mark.parametrize("distributed_files", [True, False])
@distributed(world_size=2)
def test_checkpoints_of_the_trainer(rank, world_size, tmp_path, distributed_files):
    """Each continues what the other's ModelCheckpoint has saved, to what comes of training without a stop."""
    change = ("_size=1", f"_size=1, save_distributed_checkpoint={distributed_files}")
    with launched(rank):
        module, trainer = fit(False, tmp_path / "whole", change, max_epochs=2)
        expected = state_of(module, trainer.optimizers[0])
        for ours in (True, False):
            _, trainer = fit(ours, tmp_path / str(ours), change, max_epochs=1)
            saved = trainer.checkpoint_callback.best_model_path
            assert Path(saved).is_dir() == distributed_files
            for other in (True, False):
                module, trainer = fit(other, tmp_path / f"{ours}-{other}", change, saved, max_epochs=2)
                assert len(module.losses) == 4, "the second epoch"
                assert_equal(state_of(module, trainer.optimizers[0]), expected)


@distributed(world_size=2)
def test_what_the_trainer_cannot_do(rank, world_size, tmp_path):
    """A compiled LightningModule is refused by Lightning, whatever the backend. One that is sharded itself works with
    FSDP2 no more than with ours. By default ranks of a node share no data."""

    def train(module: Any, strategy: Any) -> None:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=strategy, default_root_dir=tmp_path, max_epochs=1, logger=False,
            enable_progress_bar=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, loader(8, shuffle=False))

    with launched(rank):
        for ours in (True, False):
            names = follow("Lightning", ours, Trained=Trained)
            compiled = torch.compile(names["Sharded"](), backend="compiled_fsdp" if ours else "eager")
            with pytest.raises(RuntimeError, match="Using a compiled model is incompatible with the current strategy"):
                train(compiled, names["strategy"])
            names = follow("Lightning", ours, ("fully_shard(self.model", "fully_shard(self"), Trained=Trained)
            with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
                train(names["Sharded"](), names["strategy"])
            names = follow("Lightning", ours, ("data_parallel_size=2, tensor_parallel_size=1", ""), Trained=Trained)
            train(names["Sharded"](), names["strategy"])
            assert names["strategy"].device_mesh["data_parallel"].size() == 1


# ---- Fabric ----------------------------------------------------------------------------------------------------------
def start(ours: bool, change: Change = NONE, *, model: nn.Module | None = None) -> tuple[Any, nn.Module, Any]:
    """Fabric, the model and the optimizer that it has set up."""
    names = follow("Fabric", ours, change, ON_CPU, torch=torch, model=model or small(blocks=2))
    return names["fabric"], names["model"], names["optimizer"]


def loop(fabric: Any, model: nn.Module, optimizer: Any, steps: range, **clip: float) -> dict[str, torch.Tensor]:
    """Fabric's loop, with two microbatches a step, of which the last alone reduces. What is clipped by norm tells the
    norm."""
    record = {}
    for step in steps:
        for micro in range(2):
            tokens, targets = batch(fabric.global_rank, 2 * step + micro)
            with fabric.no_backward_sync(model, enabled=micro == 0):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                fabric.backward(loss)
            record[f"loss {step} {micro}"] = loss.detach()
        norm = fabric.clip_gradients(model, optimizer, **clip)
        if norm is not None:
            record[f"norm {step}"] = full(norm)
        optimizer.step()
        optimizer.zero_grad()
    return record


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@distributed(world_size=2)
def test_fabric(rank, world_size, precision):
    results = []
    with launched(rank):
        for ours in (True, False):
            fabric, model, optimizer = start(ours, ("devices=2", f'devices=2, precision="{precision}"'))
            results.append(loop(fabric, model, optimizer, range(2), max_norm=0.5))
            results[-1] |= loop(fabric, model, optimizer, range(2, 4), clip_val=0.01)
            results[-1] |= state_of(model, optimizer)
            assert not ours or phases(model) == {"forward", "backward"}
            # Lightning's own: at the end of `no_backward_sync(enabled=False)` reductions are off
            fabric.backward(model(batch(rank, 0)[0]).sum())
            assert all(param.grad is None for param in model.parameters())
    assert len([name for name in results[0] if name.startswith("norm ")]) == 2
    assert results[0]["head.weight"].dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    assert_equal(*results)


@distributed(world_size=2)
def test_a_model_made_on_the_meta_device(rank, world_size):
    """Fabric gives it memory, and initializes each module's shards by `reset_parameters`."""
    results = []
    with launched(rank):
        for ours in (True, False):
            with torch.device("meta"):
                model = small(blocks=2)
            torch.manual_seed(1)
            fabric, model, optimizer = start(ours, model=model)
            results.append(loop(fabric, model, optimizer, range(2), max_norm=0.5) | state_of(model, optimizer))
    assert_equal(*results)


@distributed(world_size=2)
def test_an_optimizer_that_fabric_is_given_with_the_model(rank, world_size):
    """It has the parameters from before."""
    together = ("optimizer = fabric.setup_optimizers(optimizer)", "")
    with launched(rank):
        names = follow("Fabric", True, ON_CPU, together, torch=torch, model=small(blocks=2))
        fabric, plain = names["fabric"], small(blocks=2)
        model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
        with pytest.raises(ValueError, match="AdamW was built before fully_shard"):
            loop(fabric, model, optimizer, range(1), max_norm=0.5)
        names = follow("Fabric", False, ON_CPU, together, torch=torch, model=small(blocks=2))
        fabric, plain = names["fabric"], small(blocks=2)
        model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
        loop(fabric, model, optimizer, range(1), max_norm=0.5)
        assert_equal(state_of(model), small(blocks=2).state_dict())


@pytest.mark.parametrize("distributed_files", [True, False])
@distributed(world_size=2)
def test_checkpoints_of_fabric(rank, world_size, tmp_path, distributed_files):
    """Each continues what the other has saved, to what comes of training without a stop."""
    change = ("_size=1", f"_size=1, save_distributed_checkpoint={distributed_files}")
    with launched(rank):
        fabric, model, optimizer = start(False, change)
        expected = loop(fabric, model, optimizer, range(4), max_norm=0.5) | state_of(model, optimizer)
        for ours in (True, False):
            fabric, model, optimizer = start(ours, change)
            before = loop(fabric, model, optimizer, range(2), max_norm=0.5)
            path = tmp_path / str(ours)
            fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2})
            assert path.is_dir() == distributed_files
            for other in (True, False):
                fabric, model, optimizer = start(other, change, model=small(blocks=2, seed=1))
                state = {"model": model, "optimizer": optimizer, "step": 0}
                fabric.load(path, state)
                after = loop(fabric, model, optimizer, range(state["step"], 4), max_norm=0.5)
                assert_equal(before | after | state_of(model, optimizer), expected)


@distributed(world_size=2)
def test_a_plain_models_file(rank, world_size, tmp_path):
    """`fabric.load_raw`."""
    path = tmp_path / "weights.pt"
    if rank == 0:
        torch.save(small(blocks=2).state_dict(), path)
    dist.barrier()
    with launched(rank):
        fabric, model, _ = start(True, model=small(blocks=2, seed=1))
        fabric.load_raw(path, model)
    assert_equal(state_of(model), small(blocks=2).state_dict())
