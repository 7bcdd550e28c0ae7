"""What ranks have imported when they start: the modules that nearly every test comes to, once for all of them.

No backward may run here, and no thread may start: autograd refuses to run in a process that is forked from one that has
threads of its own for it.
"""

import gc

import torch._dynamo.backends.common
import torch._export.db.logging
import torch._inductor.compile_fx
import torch._inductor.fx_passes.joint_graph
import torch._inductor.fx_passes.post_grad
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.experimental
import torch.export._trace
import torch.fx.experimental.validator

import compiled_fsdp.compiler.backend
import tests.harness.models
from compiled_fsdp import fully_shard

# What a first compile sets up; a forward alone.
with torch.no_grad():
    tests.harness.loss_of(torch.compile(tests.harness.models.small(), backend="aot_eager"), rank=0, step=0)
torch.compiler.reset()
gc.collect()
gc.freeze()  # pages of what is imported stay shared with the ranks
