"""peft's adapters in sharded models: docs/ecosystem.md, "peft"."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.clients import recipe
from tests.clients.huggingface import full_state, graphs, launched, llama, samples, without_ours
from tests.harness import distributed
from tests.harness.reference import assert_equal

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
pytestmark = pytest.mark.more

RECIPE = recipe("peft")

CONFIGS = {
    "lora": re.search(r"LoraConfig\(.*\)", RECIPE)[0],
    "dora": 'LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])',
    "ia3": 'peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])',
    "prompts": 'peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)',
}


def trained(code: str) -> tuple[nn.Module, dict[str, Any]]:
    """The recipe's model after three steps, and what they gave."""
    torch.manual_seed(0)  # adapters
    names: dict[str, Any] = {"torch": torch, "peft": peft, "model": llama(), "fully_shard": torch_fully_shard}
    exec(code, names)
    model, losses = names["model"], []
    for index, sample in enumerate(samples(3, seed=dist.get_rank())):
        torch.manual_seed(index)  # dropout
        loss = model(**{name: value[None] for name, value in sample.items()}).loss
        loss.backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()
        losses.append(loss.detach())
    return model, {"losses": losses, "parameters": full_state(model.state_dict())}


@distributed(world_size=2)
@pytest.mark.parametrize("config", CONFIGS)
def test_recipe(rank, world_size, tmp_path, config):
    code = RECIPE.replace(CONFIGS["lora"], CONFIGS[config])
    with launched(rank, world_size):
        theirs, expected = trained(without_ours(code))
        ours, found = trained(code)
    assert_equal(found, expected)
    assert not hasattr(theirs, "_fsdp_unit")
    assert graphs(ours) == 2
    frozen = "layers.0.mlp.up_proj.weight"
    base = next(value for name, value in found["parameters"].items() if name.endswith(frozen))
    assert torch.equal(base, llama().get_parameter(f"model.{frozen}"))

    if config == "prompts":
        for model in (ours, theirs):
            with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
                peft.get_peft_model_state_dict(model)
        assert_equal(full_state(ours.prompt_encoder.state_dict()), full_state(theirs.prompt_encoder.state_dict()))
    else:
        adapters = full_state(peft.get_peft_model_state_dict(ours))
        assert_equal(adapters, full_state(peft.get_peft_model_state_dict(theirs)))
        whole = get_model_state_dict(ours, options=StateDictOptions(full_state_dict=True))
        ours.save_pretrained(tmp_path / str(rank), state_dict=whole)
        again = peft.PeftModel.from_pretrained(llama(), tmp_path / str(rank))
        assert_equal(full_state(peft.get_peft_model_state_dict(again)), adapters)
