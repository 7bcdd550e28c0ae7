"""transformers' Trainer with ours in FSDP2's place: docs/ecosystem.md, "transformers: Trainer"."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

from tests.clients import recipe
from tests.clients.huggingface import accelerated, full_state, graphs, launched, llama, samples, without_ours
from tests.harness import distributed
from tests.harness.reference import assert_equal

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.more

HEADING = "transformers: Trainer"


def trained(code: str, folder: Path, resume: str | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """The model that the recipe has trained, and what was logged of it."""
    args = transformers.TrainingArguments(
        folder, fsdp=True, use_cpu=True, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
        learning_rate=0.01, max_grad_norm=0.5, logging_steps=1, save_steps=2, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    accelerated()
    # which the Trainer says to a model that it is given, for as long as it trains
    without = {"use_cache": False}
    names = {"model": llama(**without), "model_init": lambda: llama(**without), "args": args, "data": samples(48)}
    exec(code, names)
    trainer = names["trainer"]
    trainer.train(resume_from_checkpoint=resume)
    logged = [
        {key: entry[key] for key in ("loss", "grad_norm")} for entry in trainer.state.log_history if "loss" in entry
    ]
    return trainer.model.eval(), {"logged": logged, "parameters": full_state(trainer.model.state_dict())}


def generated(model: nn.Module, rank: int) -> torch.Tensor:
    """Each rank continues a text of its own."""
    text = torch.arange(3 + rank)[None]
    return model.generate(
        text, attention_mask=torch.ones_like(text), max_new_tokens=2, min_new_tokens=2, do_sample=False
    )


@distributed(world_size=2)
def test_recipe(rank, world_size, tmp_path):
    """Accumulation and clipping; the second recipe goes on from a checkpoint of the first, and generates."""
    with launched(rank, world_size):
        theirs, expected = trained(without_ours(recipe(HEADING)), tmp_path / "theirs")
        assert not hasattr(theirs, "_fsdp_unit")
        ours, found = trained(recipe(HEADING), tmp_path / "ours")
        assert_equal(found, expected)
        assert len(expected["logged"]) == 3
        assert graphs(ours) == 4  # a forward and a backward, with reductions and without

        resumed, found = trained(recipe(HEADING, 1), tmp_path / "ours", str(tmp_path / "ours/checkpoint-2"))
        assert_equal(found, expected)
        assert graphs(resumed) == 4
        assert_equal(generated(resumed, rank), generated(theirs, rank))
        assert graphs(resumed) > 4


def test_backends_are_a_list(tmp_path):
    args = transformers.TrainingArguments(tmp_path, use_cpu=True, torch_compile_backend="compiled_fsdp", report_to=[])
    with pytest.raises(ValueError, match="'COMPILED_FSDP' is not a valid DynamoBackend"):
        transformers.Trainer(llama(), args)
