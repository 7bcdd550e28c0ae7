"""Train a byte-level Llama on Python's own standard library, sharded by the compiler.

    torchrun --nproc-per-node 2 examples/train_lm.py

The script is one for FSDP2 (fully_shard, AdamW, clip_grad_norm_, DCP checkpoints) except for the import of
`fully_shard` and the backend of `torch.compile`. Only `--wire` and the summary at the end (`explain`) do not exist in
FSDP2. Each process uses one GPU (NCCL) if there are enough GPUs, else the CPU (gloo).

To restart from the last checkpoint whenever a process dies:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_lm.py --resume=auto

The variable gives restarted processes a new key-value store. In the store of torchrun's agent, which stays, they may
find the addresses of the dead processes and fail to connect.
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import stdlib_text
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from llama import HEAD_DIM, Llama
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from tqdm import tqdm

from compiled_fsdp import MixedPrecisionPolicy, WirePolicy, explain, fully_shard

WARMUP_STEPS = 20
MAX_GRAD_NORM = 1.0
EVAL_BATCHES = 16
# The flags that decide the loss curve. A resumed run must have the same values, because others would change the curve.
CURVE_FLAGS = ("steps", "batch", "accumulate", "seq_len", "dim", "layers", "bf16", "wire", "lr", "seed")
WIRES = {
    "none": WirePolicy(),
    "bfloat16": WirePolicy(gather="bfloat16", reduce="bfloat16"),
    "float8_e4m3fn/bfloat16": WirePolicy(gather="float8_e4m3fn", reduce="bfloat16"),
    "int8": WirePolicy(gather="int8", reduce="int8"),
    "int8-feedback": WirePolicy(gather="int8", reduce="int8", error_feedback=True),
}


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    def at_least(least: int):
        def integer(text: str) -> int:
            if int(text) < least:
                raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
            return int(text)

        return integer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=at_least(1), default=400)
    parser.add_argument("--batch", type=at_least(1), default=8, help="sequences per step, over all processes")
    parser.add_argument(
        "--accumulate",
        type=at_least(1),
        default=1,
        metavar="N",
        help="microbatches that a step's batch is cut into, without communication of gradients before the last",
    )
    parser.add_argument("--seq-len", type=at_least(1), default=128, help="bytes per sequence")
    parser.add_argument("--dim", type=at_least(1), default=256, help=f"model width, a multiple of {HEAD_DIM}")
    parser.add_argument("--layers", type=at_least(1), default=4)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16; reduce gradients and step in float32")
    parser.add_argument(
        "--wire",
        choices=WIRES,
        default="none",
        help="what travels between processes: parameters and gradients as they are, or encoded "
        "(docs/compressed-communication.md)",
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--eval-every", type=at_least(1), default=100, metavar="STEPS")
    parser.add_argument("--checkpoint-every", type=at_least(1), default=100, metavar="STEPS")
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("runs/demo"))
    parser.add_argument(
        "--resume",
        nargs="?",
        const="required",
        choices=("required", "auto"),
        help="continue from the last checkpoint; with --resume=auto begin anew if there is none, as in a restarted job",
    )
    parser.add_argument("--codegen", choices=("inductor", "aot_eager"), default="inductor")
    flags = parser.parse_args(argv)

    if "RANK" not in os.environ:
        parser.error("launch this with torchrun, e.g. torchrun --nproc-per-node 2 examples/train_lm.py")
    world = int(os.environ["WORLD_SIZE"])
    if flags.batch % (world * flags.accumulate):
        parser.error(
            f"--batch {flags.batch} does not divide among {world} processes with {flags.accumulate} microbatches each"
        )
    if flags.dim % HEAD_DIM:
        parser.error(f"--dim {flags.dim} is not a multiple of the head size {HEAD_DIM}")
    if not 0 < flags.lr < math.inf:
        parser.error(f"--lr must be positive, got {flags.lr}")
    checkpoint = last_checkpoint(flags.checkpoint_dir)
    if flags.resume == "required" and checkpoint is None:
        parser.error(f"--resume: no checkpoint in {flags.checkpoint_dir}; --resume=auto begins anew then")
    if checkpoint is not None and not flags.resume:
        parser.error(
            f"{flags.checkpoint_dir} already holds {checkpoint.name} of an earlier run: continue it with --resume, "
            "or delete it, or choose another --checkpoint-dir"
        )
    if checkpoint is not None:
        for name, saved in json.loads((checkpoint / "flags.json").read_text()).items():
            if saved != getattr(flags, name):
                flag = "--" + name.replace("_", "-")
                parser.error(f"--resume: {checkpoint} was saved under {flag} {saved}, not {getattr(flags, name)}")
        if steps_taken(checkpoint) == flags.steps and flags.resume == "required":
            parser.error(f"--resume: {checkpoint} is the end of the run, there are no steps left to take")
    flags.checkpoint = checkpoint  # found once, before any process can save another checkpoint
    return flags


# --- checkpoints: one directory per saved step, written by DCP --------------------------------------------


def last_checkpoint(directory: Path) -> Path | None:
    """The latest complete checkpoint. DCP writes `.metadata` last, so an interrupted save has none."""
    return max((path.parent for path in directory.glob("step-*/.metadata")), default=None)


def steps_taken(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def save_checkpoint(flags: argparse.Namespace, step: int, model: nn.Module, optimizer: AdamW) -> None:
    path = flags.checkpoint_dir / f"step-{step:08d}"
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
        (path / "flags.json").write_text(json.dumps({name: getattr(flags, name) for name in CURVE_FLAGS}))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: AdamW) -> None:
    """Load `path` in place; the number of processes may differ from when it was saved."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


# --- training ---------------------------------------------------------------------------------------------


def learning_rate(step: int, flags: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak rate."""
    if step < WARMUP_STEPS:
        return flags.lr * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, flags.steps - WARMUP_STEPS)
    return flags.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def mine(starts: Tensor) -> Tensor:
    """This process's share of the window starts; together the processes' shares are `starts`."""
    return starts[dist.get_rank() :: dist.get_world_size()]


def mean_over_ranks(value: Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def next_byte_loss(model: nn.Module, data: Tensor, starts: Tensor, length: int, device: torch.device) -> Tensor:
    """Mean nats per byte over the windows at `starts` [B], a scalar."""
    inputs, targets = stdlib_text.windows(data, starts, length)
    logits = model(inputs.to(device))
    return F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())


@torch.no_grad()
def evaluate(model: nn.Module, held_back: Tensor, flags: argparse.Namespace, device: torch.device) -> float:
    """Nats per byte over windows spread evenly through the held-back files, averaged across processes."""
    starts = mine(stdlib_text.even_starts(held_back, EVAL_BATCHES * flags.batch, flags.seq_len))
    losses = [next_byte_loss(model, held_back, part, flags.seq_len, device) for part in starts.chunk(EVAL_BATCHES)]
    return mean_over_ranks(torch.stack(losses).mean())


def train(flags: argparse.Namespace, device: torch.device) -> list[float]:
    """Train, and return the loss of each step that was taken, averaged across processes."""
    world, chief = dist.get_world_size(), dist.get_rank() == 0
    say = tqdm.write if chief else lambda line: None  # prints above the progress bar

    data, held_back = stdlib_text.load()
    if flags.seq_len >= len(held_back):
        raise ValueError(f"--seq-len {flags.seq_len} is longer than the {len(held_back)} held-back bytes")
    unigram = stdlib_text.unigram_entropy(held_back)

    torch.manual_seed(flags.seed)  # the same on every process: each keeps its shards of the same weights
    model = Llama(flags.dim, flags.layers, flags.seq_len).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    mesh = init_device_mesh(device.type, (world,))
    low, full = torch.bfloat16 if flags.bf16 else None, torch.float32
    common = {"mesh": mesh, "wire_policy": WIRES[flags.wire]}
    for block in model.layers:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=full), **common)
    # The root's output, the logits, are float32 again for the loss.
    of_root = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=full, output_dtype=full)
    fully_shard(model, mp_policy=of_root, **common)
    # torch.compile wraps the model and prefixes its state-dict keys: train through `compiled`, save `model`.
    compiled = torch.compile(model, backend="compiled_fsdp", options={"codegen": flags.codegen}, fullgraph=True)
    optimizer = AdamW(model.parameters(), lr=flags.lr, betas=(0.9, 0.95), weight_decay=0.1)

    first = 0
    if flags.checkpoint is not None:
        load_checkpoint(flags.checkpoint, model, optimizer)
        first = steps_taken(flags.checkpoint)
        say(f"resumed from {flags.checkpoint}")
    say(
        f"{parameters / 1e6:.1f}M parameters on {world} x {device.type}; {len(data) / 1e6:.1f} MB of Python to train "
        f"on, {len(held_back) / 1e6:.1f} MB held back; the first step compiles"
    )

    losses = []
    with tqdm(total=flags.steps, initial=first, unit="step", mininterval=0.5, disable=not chief) as bar:
        for step in range(first, flags.steps):
            began = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, flags)
            starts = mine(stdlib_text.random_starts(data, flags.batch, flags.seq_len, flags.seed, step))
            loss = torch.zeros((), device=device)
            for micro, part in enumerate(starts.chunk(flags.accumulate), start=1):
                # Called before the forward. Without sync each process adds up full gradients.
                model.set_requires_gradient_sync(micro == flags.accumulate)
                micro_loss = next_byte_loss(compiled, data, part, flags.seq_len, device) / flags.accumulate
                micro_loss.backward()
                loss += micro_loss.detach()
            clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()

            train_loss = mean_over_ranks(loss)
            losses.append(train_loss)
            rate = flags.batch * flags.seq_len / (time.perf_counter() - began)
            bar.set_postfix_str(f"loss {train_loss:.3f}, {rate:,.0f} tokens/s", refresh=False)
            bar.update()
            done, last = step + 1, step + 1 == flags.steps
            if done % flags.eval_every == 0 or last:
                held_back_loss = evaluate(compiled, held_back, flags, device)
                say(
                    f"step {done}: training loss {train_loss:.4f}, evaluation loss {held_back_loss:.4f} nats per byte "
                    f"(unigram entropy {unigram:.4f})"
                )
            if done % flags.checkpoint_every == 0 or last:
                save_checkpoint(flags, done, model, optimizer)

    say(str(explain(model)))
    return losses


def main() -> None:
    flags = parse_flags()
    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    train(flags, device)
    # Without the barrier gloo's thread may drop the last collective's tensors while Python shuts down, which aborts the
    # process.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
