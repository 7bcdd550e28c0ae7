"""A training script for FSDP2. To use compiled_fsdp, change the import of `fully_shard` and the backend, as two
comments below say.

    torchrun --nproc-per-node 4 examples/fsdp2_script.py

The script shows bf16 computation with fp32 reduction, sharding with replicas (HSDP), gradient accumulation, gradient
clipping, activation checkpointing, and DCP checkpoints. It trains the model of train_lm.py on the same data, with one
GPU per process (NCCL) if there are enough GPUs, else on the CPU (gloo).
"""

import argparse
import json
import os
from pathlib import Path

import stdlib_text
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from llama import Block, Llama
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # for compiled_fsdp: "from compiled_fsdp import"
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

BACKEND = "inductor"  # for compiled_fsdp: "compiled_fsdp"


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--micro", type=int, default=2, help="microbatches per step")
    parser.add_argument("--batch", type=int, default=2, help="sequences per process and microbatch")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--replicas", type=int, help="default: 2 from 4 processes on, else 1")
    parser.add_argument("--compile-options", type=json.loads, metavar="JSON", help="options of the backend")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write a checkpoint after the last step")
    parser.add_argument("--load", type=Path, metavar="DIR", help="continue from a checkpoint")
    parser.add_argument("--losses", type=Path, metavar="FILE", help="write each step's loss, as a JSON list")
    return parser.parse_args(argv)


def build(flags: argparse.Namespace, device: torch.device) -> nn.Module:
    """Build the sharded model, compiled in place."""
    world = dist.get_world_size()
    replicas = flags.replicas or (2 if world >= 4 else 1)
    mesh = init_device_mesh(device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    torch.manual_seed(0)  # the same on every process: each keeps its shards of the same weights
    model = Llama(flags.dim, flags.layers, flags.seq_len).to(device)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.compile(backend=BACKEND, options=flags.compile_options)
    return model


def loss_of(model: nn.Module, data: Tensor, flags: argparse.Namespace, micro: int, device: torch.device) -> Tensor:
    """Mean nats per byte over this process's microbatch number `micro` of the whole run, a scalar."""
    seed, length = dist.get_rank(), flags.seq_len
    starts = stdlib_text.random_starts(data, flags.batch, length, seed, micro)
    inputs, targets = stdlib_text.windows(data, starts, length)
    logits = model(inputs.to(device)).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())


def train(flags: argparse.Namespace, device: torch.device) -> list[float]:
    """Train, and return the loss of each step, averaged over microbatches and processes."""
    data, _ = stdlib_text.load()
    model = build(flags, device)
    optimizer = AdamW(model.parameters(), lr=flags.lr, betas=(0.9, 0.95), weight_decay=0.1)

    first = 0
    if flags.load:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": torch.zeros((), dtype=torch.int64)}
        dcp.load(state, checkpoint_id=flags.load)
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        first = int(state["step"])

    losses = []
    for step in range(first, flags.steps):
        total = torch.zeros((), device=device)
        for micro in range(flags.micro):
            last = micro + 1 == flags.micro
            model.set_requires_gradient_sync(last)
            model.set_is_last_backward(last)
            loss = loss_of(model, data, flags, step * flags.micro + micro, device) / flags.micro
            loss.backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        if dist.get_rank() == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)

    if flags.save:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": torch.tensor(flags.steps)}
        dcp.save(state, checkpoint_id=flags.save)
    return losses


def main() -> None:
    flags = parse_flags()
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    losses = train(flags, device)
    if flags.losses and dist.get_rank() == 0:
        flags.losses.write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
