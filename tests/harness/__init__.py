"""Helpers that the tests share: processes, a model, its training by torch's own means, and the comparison."""

from tests.harness.cases import distributed, variants
from tests.harness.models import Transformer, batch, loss_of
from tests.harness.ours import WAYS, collectives_of, compiled, planned_ops, ways, ways_and
from tests.harness.reference import Record, alone, assert_same, ddp, forward_backward, fsdp2, fsdp2_record, shard, train
from tests.harness.spawn import RankFailure, Ranks, run_ranks

__all__ = [
    "WAYS",
    "RankFailure",
    "Ranks",
    "Record",
    "Transformer",
    "alone",
    "assert_same",
    "batch",
    "collectives_of",
    "compiled",
    "ddp",
    "distributed",
    "forward_backward",
    "fsdp2",
    "fsdp2_record",
    "loss_of",
    "planned_ops",
    "run_ranks",
    "shard",
    "train",
    "variants",
    "ways",
    "ways_and",
]
