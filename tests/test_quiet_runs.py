"""A plain run prints what the script prints, and Dynamo compiles no function of compiled_fsdp by itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._dynamo.utils import get_compilation_metrics, set_compilation_metrics_limit
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import compiled_fsdp
from compiled_fsdp import explain, fully_shard


set_compilation_metrics_limit(100_000)  # torch keeps 64


class Block(nn.Module):
    # parameters of ten shapes, one and two-dimensional, so that a function of theirs has many variants
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)
        self.gate, self.scale = nn.Linear(dim, 1, bias=False), nn.Parameter(torch.ones(2 * dim, 1, 1))

    def forward(self, x):
        y = self.down(torch.relu(self.up(self.norm(x))))
        return x + y * self.gate(x).sigmoid() * self.scale.mean()


class Net(nn.Module):
    def __init__(self, breaks):
        super().__init__()
        self.breaks, self.first = breaks, nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.last = nn.Linear(16, 5)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(x)


def train(way, folder, batches=(4,), **options):
    torch.manual_seed(0)
    model = Net(breaks=way == "graph break")
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    compiling = {"backend": "compiled_fsdp", "options": {"codegen": "aot_eager"}}
    if way != "eager":
        model.compile(**compiling)
    for batch in batches:
        for last in (False, True) if way == "eager" else (True,):
            model.set_requires_gradient_sync(last)
            model(torch.ones(batch, 8)).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(torch.ones(batch + 1, 8))
        model.train()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(states, checkpoint_id=folder)
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    model(torch.ones(4, 8)).float().mean().backward()
    model.unshard()
    model.reshard()
    assert str(explain(model))


dist.init_process_group("gloo")
train("whole", f"{sys.argv[1]}/whole", (4, 3))
torch.compiler.reset()
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
train("graph break", f"{sys.argv[1]}/broken", mesh=mesh, mp_policy=policy)
train("eager", f"{sys.argv[1]}/eager")
folder = compiled_fsdp.__path__[0]
places = [(m.co_name, m.co_filename or "") for m in get_compilation_metrics()]
assert any(name == "forward" and file == __file__ for name, file in places), places
alone = {f"{name} ({file})" for name, file in places if file.startswith(folder)}
assert not alone, alone
if dist.get_rank() == 0:
    print("done")
dist.destroy_process_group()
"""


@pytest.mark.more
@pytest.mark.filterwarnings("default")
def test_a_plain_run_prints_nothing_of_its_own(tmp_path):
    """Training in two shapes, evaluation, accumulation, clipping, checkpoints, explain.

    In a whole graph, in a broken one, and in eager code.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path)], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert not done.stderr
