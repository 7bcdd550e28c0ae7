"""Imports that all ranks share: modules that nearly every test needs, loaded in the process that ranks are forked from.

No backward may run here, and no thread may start, because autograd refuses to run in a process that was forked from one
with autograd threads.
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

# A first compile, so that ranks need not set up torch's compiler; forward only, because no backward may run here.
with torch.no_grad():
    tests.harness.loss_of(torch.compile(tests.harness.models.small(), backend="aot_eager"), rank=0, step=0)
torch.compiler.reset()
gc.collect()
gc.freeze()  # the memory pages of the modules stay shared with the ranks
