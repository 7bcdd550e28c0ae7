"""accelerate's `prepare` with ours in FSDP2's place: docs/ecosystem.md, "accelerate"."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.clients import recipe
from tests.clients.huggingface import accelerated, full_state, graphs, launched, llama, samples, without_ours
from tests.harness import distributed
from tests.harness.reference import assert_equal

pytest.importorskip("accelerate")
pytestmark = pytest.mark.more

RECIPE = recipe("accelerate")
PLUGIN, ACCELERATOR = 'auto_wrap_policy="transformer_based_wrap"', "gradient_accumulation_steps=2"
PREPARE, COMPILE = RECIPE.splitlines(keepends=True)[-2:]


def prepared(code: str, **options: Any) -> dict[str, Any]:
    """The recipe's names, after it has run."""
    accelerated()
    model = llama(**options)
    loader = DataLoader(samples(24), batch_size=2)
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01), "loader": loader}
    exec(code, names)
    return names


def trained(names: dict[str, Any], start: int = 0, stop: int = 6) -> dict[str, Any]:
    """An epoch's batches from `start` to `stop`, as accelerate's documentation has it."""
    accelerator, model, optimizer = names["accelerator"], names["model"], names["optimizer"]
    losses, norms = [], []
    for batch in list(names["loader"])[start:stop]:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(full_state({"norm": accelerator.clip_grad_norm_(model.parameters(), 0.5)}))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": losses, "norms": norms, "parameters": full_state(model.state_dict())}


@distributed(world_size=2)
def test_recipe(rank, world_size, tmp_path):
    """Accumulation, clipping, a state saved, and loaded into another model, which goes on."""
    with launched(rank, world_size):
        theirs = prepared(without_ours(RECIPE))
        expected = trained(theirs)
        assert not hasattr(theirs["model"], "_fsdp_unit")

        ours = prepared(RECIPE)
        assert_equal(trained(ours, stop=4)["losses"], expected["losses"][:4])
        assert graphs(ours["model"]) == 4  # a forward and a backward, with reductions and without
        ours["accelerator"].save_state(tmp_path)
        resumed = prepared(RECIPE)
        with torch.no_grad():
            for parameter in resumed["model"].parameters():
                parameter.zero_()
        resumed["accelerator"].load_state(tmp_path)
        rest = trained(resumed, start=4)
        assert_equal(
            rest,
            {"losses": expected["losses"][4:], "norms": expected["norms"][2:], "parameters": expected["parameters"]},
        )

        whole, other = (names["accelerator"].get_state_dict(names["model"]) for names in (resumed, theirs))
        assert_equal(dict(whole), dict(other))
        assert (list(whole) == list(expected["parameters"])) == (rank == 0)


@distributed(world_size=2)
def test_further_arguments(rank, world_size):
    """bf16, checkpointed layers, weights of rank 0 alone, one unit for tied weights; and compiled before `prepare`."""
    plugin = f"{PLUGIN}, activation_checkpointing=True, cpu_ram_efficient_loading=True"
    code = RECIPE.replace(PLUGIN, plugin).replace(ACCELERATOR, f'{ACCELERATOR}, mixed_precision="bf16"')
    code = code.replace(PREPARE + COMPILE, COMPILE + PREPARE)
    assert code.count("activation_checkpointing") == code.count("bf16") == 1
    assert code.endswith(PREPARE)
    options = {"tie_word_embeddings": True, "use_cache": False}
    with launched(rank, world_size):
        expected = trained(prepared(without_ours(code), **options))
        ours = prepared(code, **options)
        assert_equal(trained(ours), expected)
        assert graphs(ours["model"]) == 4


def test_backends_are_a_list():
    from accelerate.utils import TorchDynamoPlugin

    with pytest.raises(ValueError, match="'COMPILED_FSDP' is not a valid DynamoBackend"):
        TorchDynamoPlugin(backend="compiled_fsdp")
