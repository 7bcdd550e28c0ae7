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

import compiled_fsdp.backend
import tests.harness
from compiled_fsdp import fully_shard

gc.freeze()  # pages of what is imported stay shared with the ranks
