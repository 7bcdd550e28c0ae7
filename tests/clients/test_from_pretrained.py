"""transformers' own sharding at load time, with ours in FSDP2's place: docs/ecosystem.md."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_

from tests.clients import recipe
from tests.clients.huggingface import full_state, graphs, launched, llama, samples, without_ours
from tests.harness import distributed
from tests.harness.reference import assert_equal

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers wants it under a device's context")
pytestmark = pytest.mark.more

RECIPE = recipe("transformers: from_pretrained")


def trained(code: str, path: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model that the recipe has loaded, after three steps."""
    names: dict[str, Any] = {"torch": torch, "path": path}
    exec(code, names)
    model, losses = names["model"], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for sample in samples(3, seed=dist.get_rank()):
        loss = model(**{name: value[None] for name, value in sample.items()}).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, {"losses": losses, "parameters": full_state(model.state_dict())}


@distributed(world_size=2)
@pytest.mark.parametrize("arguments", ["", ", fsdp_mixed_precision=True"])
def test_recipe(rank, world_size, tmp_path, arguments):
    """The vocabulary's rows do not divide evenly. Saved by each rank for itself, and as a whole, and loaded again."""
    import transformers.distributed.fsdp as client  # so that it has torch's own by now

    torchs = client.fully_shard
    code = RECIPE.replace("get_world_size()", f"get_world_size(){arguments}")
    if rank == 0:
        llama().save_pretrained(tmp_path / "plain")
    dist.barrier()
    with launched(rank, world_size):
        theirs, expected = trained(without_ours(code), tmp_path / "plain")
        ours, found = trained(code, tmp_path / "plain")
        assert client.fully_shard is not torchs
    assert_equal(found, expected)
    assert not hasattr(theirs, "_fsdp_unit")
    assert graphs(ours) == 2
    assert isinstance(ours, transformers.LlamaForCausalLM)
    if arguments:
        return
    text = torch.arange(3 + rank)[None]
    options = {"attention_mask": torch.ones_like(text), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert_equal(ours.eval().generate(text, **options), theirs.eval().generate(text, **options))

    ours.save_pretrained(tmp_path / "whole")
    ours.save_pretrained(tmp_path / "rows", distributed_checkpoint=True)
    dist.barrier()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    assert_equal(full_state(again.state_dict()), expected["parameters"])
    with launched(rank, world_size):
        names: dict[str, Any] = {"torch": torch, "path": tmp_path / "rows"}
        exec(code, names)
    assert_equal(full_state(names["model"].state_dict()), expected["parameters"])
