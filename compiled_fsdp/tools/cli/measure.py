"""``compiled-fsdp measure``, under torchrun: measure this machine, and show how well its curves fit."""

from __future__ import annotations

import os

import click
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from compiled_fsdp.compiler.measure import measure as measure_hardware
from compiled_fsdp.tools.cli.hardware import facts, show_fit


@click.command()
@click.option(
    "--replicate", type=click.IntRange(1), default=1,
    help="Groups of ranks with the same shards (HSDP); as many as ranks: whole parameters on each rank.",
)  # fmt: skip
@click.option(
    "--reshard-after-forward", type=click.IntRange(1), metavar="RANKS",
    help="As an int for fully_shard: its gathers in backward are measured, too.",
)  # fmt: skip
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to measure; auto: on a GPU if there is one.",
)
@click.option("--force", "--again", "force", is_flag=True, help="Measure even if the cache has a result.")
def measure(replicate: int, reshard_after_forward: int | None, device: str, force: bool) -> None:
    """Measure matrix products, copies and collectives, for later plans and training.

    To be started by torchrun, as the training is: torchrun --nproc-per-node 8 -m compiled_fsdp measure. The
    result is cached: a training that calls measure_hardware(mesh) on the same ranks takes it from there.
    """
    if "RANK" not in os.environ:
        raise click.UsageError(
            "measure runs on all ranks: torchrun --nproc-per-node 8 -m compiled_fsdp measure (with --nnodes and "
            "--rdzv-endpoint on several machines)."
        )
    world = int(os.environ["WORLD_SIZE"])
    if world % replicate:
        raise click.BadParameter(f"{replicate} does not divide {world} ranks.", param_hint="--replicate")
    on_gpu = torch.cuda.is_available() if device == "auto" else device == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        shape = (world,) if replicate in (1, world) else (replicate, world // replicate)
        mesh = init_device_mesh("cuda" if on_gpu else "cpu", shape)
        whole = replicate == world > 1
        found = measure_hardware(mesh, reshard_after_forward=reshard_after_forward, replicates=whole, force=force)
        if dist.get_rank() == 0:
            click.echo(found.hardware.name)
            for fact, value in facts(found.hardware).items():
                click.echo(f"  {fact}: {value}")
            show_fit(found.hardware, found.samples)
            if found.path is None:
                click.echo("not kept: other programs were probably running. Measure again when the machine is idle.")
            else:
                click.echo(f"kept as measured-{found.path.stem.removeprefix('hardware-')[:8]}, in {found.path}")
        dist.barrier()
    finally:
        dist.destroy_process_group()
