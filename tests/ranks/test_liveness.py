"""Which ranks of this machine have ended, as each rank knows it by itself."""

from unittest import mock

import torch
import torch.distributed as dist

from compiled_fsdp.ranks.failures import lost_store
from compiled_fsdp.ranks.liveness import Liveness, sign_in
from compiled_fsdp.state.registry import parameters_by_param
from tests.harness import distributed
from tests.harness.ours import new_group, two_layers


@distributed(world_size=2, reset=True)
def test_a_rank_that_came_late_is_named_without_the_store(rank, world_size):
    """Rank 1 signs in after rank 0 has looked who is there, on a slow machine; then no process can be asked any more
    that serves the store."""
    mesh, others = new_group(), dist.new_group()
    look = Liveness.look

    def look_and_let_come(liveness: Liveness) -> None:
        look(liveness)
        if not come:
            come.append(True)
            dist.barrier(others)

    come = [True] if rank == 1 else []
    if rank == 1:
        dist.barrier(others)
    model = two_layers(mesh=mesh)
    with mock.patch.object(Liveness, "look", look_and_let_come):
        model(torch.ones(2, 4)).sum().backward()
    liveness = sign_in(parameters_by_param()[model[0].weight].group)
    with mock.patch("compiled_fsdp.ranks.liveness.start_time", return_value=None):
        assert f"rank {1 - rank} of the group has ended" in lost_store(liveness)
