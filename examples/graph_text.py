"""Print the changes that each pass makes to the graphs of a small model, the one that docs/concepts.md explains.

    python examples/graph_text.py

One process is enough: it is rank 0 of two, and rank 1 does not exist. The text is that of
TORCH_LOGS="+compiled_fsdp.passes.diff", but shorter: without namespaces of ops, comments, freed tensors and the number
of ranks, and with "p1" for "primals_1".
"""

import logging
import re

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from compiled_fsdp import fully_shard


class Model(torch.nn.Module):
    """Three layers; forward calls the second one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(8, 8)
        self.b, self.c = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.b(self.a(x))))


# The lines to leave out, and replacements that shorten the other lines.
LEFT_OUT = re.compile(r"^.?\s*$|# |^.\s+(primals|tangents)_1[:,]|^(---|\+\+\+|@@) |class GraphModule")
SHORTER = (
    (r";  .*= None$", ""),  # freed tensors
    (r"torch\.(ops\.\w+\.)?", ""),
    (r"\.default\(", "("),
    (r"_default", ""),
    (r"(?<=[\w]): \"[^\"]*\"(?=[,)])", ""),  # types of a graph's inputs
    (r"^([-+ ])(        |    )", r"\1"),
    (r": \"([^\"]*)\" =", r": \1 ="),
    (r"primals_", "p"),
    (r", in [\d.]+ ms$", ""),  # the time that a pass took
    (r"; world 2", ""),  # the same in every bucket
)


class Printed(logging.Handler):
    """A log handler that prints messages in their short form."""

    def emit(self, record: logging.LogRecord) -> None:
        for line in record.getMessage().splitlines():
            if not LEFT_OUT.search(line):
                for long, short in SHORTER:
                    line = re.sub(long, short, line)
                print(line)


def main() -> None:
    """Compile a training step of the model, and print the changes of each pass."""
    for name in ("compiled_fsdp.passes.pipeline", "compiled_fsdp.passes.diff"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.DEBUG)
        logger.addHandler(Printed())
        logger.propagate = False
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = Model()
    for layer in (model.a, model.b, model.c):
        fully_shard(layer)
    fully_shard(model)
    options = {"codegen": "aot_eager", "bucket": "module"}
    compiled = torch.compile(model, backend="compiled_fsdp", fullgraph=True, options=options)
    compiled(torch.ones(4, 8)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
