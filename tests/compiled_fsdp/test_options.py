"""Options of the backend: what is taken, every bad value named, errors that nothing hides. Also row N12."""

import dataclasses
import gc
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._inductor import config as inductor_config

from compiled_fsdp import Options, explain, fully_shard
from compiled_fsdp.passes.pipeline import pass_names
from tests.harness import assert_same, compiled, distributed, run_ranks, train
from tests.harness.fake import fake_group

BAD: list[tuple[str, Any, str]] = [
    ("bucket", "modul", "takes 'module', 'none', but got 'modul'"),
    ("bucket", None, "takes 'module', 'none', but got None"),
    ("overlap", 1, "must be True or False, but got 1"),
    ("prefetch", "never", "takes 'before', 'after', but got 'never'"),
    ("codegen", "eager", "takes 'inductor', 'aot_eager', but got 'eager'"),
    ("verify", True, "takes 'plan', 'full', 'off', but got True"),
    ("verify", ["plan"], r"takes 'plan', 'full', 'off', but got \['plan'\]"),
    ("disable_passes", "bucket", "must be a sequence of names, but got 'bucket'"),
    ("disable_passes", 3, "must be a sequence of names, but got 3"),
    (
        "disable_passes",
        ["bucket", "schedul"],
        "takes 'reshard', 'bucket', 'schedule', 'lower', 'verify', but got 'schedul'",
    ),
    ("inductor", "max_autotune", "must be a dict of Inductor's options, but got 'max_autotune'"),
    ("inductor", None, "must be a dict of Inductor's options, but got None"),
    ("collectives_at_world_size_1", "yes", "must be True or False, but got 'yes'"),
    ("optimizer_bytes", "8", "must be a number of bytes >= 0, but got '8'"),
    ("optimizer_bytes", -1, "must be a number of bytes >= 0, but got -1"),
    ("optimizer_bytes", True, "must be a number of bytes >= 0, but got True"),
    ("optimizer_bytes", float("nan"), "must be a number of bytes >= 0, but got nan"),
    ("memory_budget", "all", "takes None, but got 'all'"),
    ("reshard_after_forward", True, "takes 'as sharded', but got True"),
]

NOT_YET: list[tuple[str, Any]] = [
    ("bucket", "auto"),
    ("bucket", 25),
    ("bucket", 0.5),
    ("memory_budget", 0.9),
    ("memory_budget", 10**9),
    ("reshard_after_forward", "auto"),
    ("hardware", "H100"),
]


@pytest.fixture
def model() -> Iterator[nn.Module]:
    with fake_group(2):
        yield fully_shard(nn.Linear(4, 4))


def names(option: str, message: str) -> str:
    """The pattern of a message about an option."""
    return f"compiled_fsdp.*{re.escape(repr(option))}.*{message}"


@pytest.mark.parametrize(("option", "value", "message"), BAD)
def test_bad_value(option, value, message):
    with pytest.raises(ValueError, match=names(option, message)):
        Options.parse({option: value})


@pytest.mark.parametrize(("option", "value"), NOT_YET)
def test_value_that_is_not_there_yet(option, value):
    with pytest.raises(NotImplementedError, match=names(option, re.escape(repr(value)) + ".*not supported yet; use")):
        Options.parse({option: value})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("buckets", "Did you mean 'bucket'"),
        ("disable_pass", "Did you mean 'disable_passes'"),
        ("max_autotune", "Inductor's own go into 'inductor'"),
        ("zzz", f"Known options: {', '.join(f.name for f in dataclasses.fields(Options))}"),
    ],
)
def test_unknown_option(option, message):
    with pytest.raises(ValueError, match=f"unknown option '{option}'.*{message}"):
        Options.parse({option: True})


def test_defaults():
    assert Options.parse(None) == Options.parse({}) == Options()
    options = Options()
    assert (options.bucket, options.overlap, options.prefetch) == ("module", True, "before")
    assert (options.codegen, options.verify, options.disable_passes) == ("inductor", "plan", ())
    assert (options.inductor, options.memory_budget, options.optimizer_bytes) == ({}, None, 8)
    assert Options.parse({"disable_passes": ["lower"]}).disable_passes == ("lower",)


@pytest.mark.parametrize("suppress", [False, True])
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"options": {"bukcet": "none"}}, ValueError, "unknown option 'bukcet'.*Did you mean 'bucket'"),
        ({"options": {"bucket": "moduel"}}, ValueError, "option 'bucket' takes 'module', 'none', but got 'moduel'"),
        ({"options": {"bucket": "auto"}}, NotImplementedError, "option 'bucket': 'auto' is not supported yet"),
        ({"options": {"inductor": {"max_autotuen": True}}}, ValueError, "'inductor': Inductor has no option 'max_autotuen'"),
        ({"options": {"inductor": {"reorder_for_peak_memory": True}}}, ValueError, "the backend itself works with"),
        ({"mode": "fast"}, ValueError, "mode takes 'default', .*but got 'fast'"),
    ],
)  # fmt: skip
def test_an_error_is_raised_at_the_first_call_and_not_hidden(model, arguments, error, match, suppress):
    run = torch.compile(model, backend="compiled_fsdp", **arguments)
    with torch._dynamo.config.patch(suppress_errors=suppress):
        for _ in range(2):
            with pytest.raises(error, match=match):
                run(torch.ones(2, 4))


class Scale(nn.Module):
    """Quick for Inductor to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, False),
        ({"mode": "default"}, False),
        ({"mode": "max-autotune-no-cudagraphs"}, True),
        ({"options": {"inductor": {"max_autotune": True}}}, True),
        ({"options": {"inductor": {"max-autotune": True}}}, True),  # as torch.compile takes it, too
    ],
)
def test_mode_and_inductors_options_reach_inductor(arguments, expected):
    seen = []

    def witness(graph: torch.fx.Graph) -> None:
        seen.append(inductor_config.max_autotune)

    with fake_group(1), inductor_config.patch(post_grad_custom_post_pass=witness, force_disable_caches=True):
        model = fully_shard(Scale())
        run = torch.compile(model, backend="compiled_fsdp", **arguments)
        assert torch.equal(run(torch.ones(4)).detach(), torch.full((4,), 2.0))
    assert seen == [expected] * 2  # forward and backward
    assert not inductor_config.max_autotune


def test_options_of_two_models_do_not_mix():
    with fake_group(2):
        first, second = (fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) for _ in range(2))
        x = torch.ones(2, 4)
        one, other = compiled(first, bucket="module"), compiled(second, bucket="none")
        for run in (one, other, one, other):
            run(x)
        counts = [[graph.count("gather") for graph in explain(model).graphs] for model in (first, second)]
        assert counts == [[2, 0], [4, 0]]


def layers() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def sharded(shard: Callable[..., Any]) -> nn.Module:
    model = layers()
    for layer in (model[0], model[2]):
        shard(layer, reshard_after_forward=True)
    return shard(model, reshard_after_forward=True)


def step(model: nn.Module, index: int) -> torch.Tensor:
    loss = model(torch.linspace(-1, 1, 24).view(4, 6) * (dist.get_rank() + index + 1)).square().mean()
    loss.backward()
    return loss.detach()


@distributed(world_size=2)
@pytest.mark.parametrize(
    "options",
    [
        *({"disable_passes": [name]} for name in pass_names()),
        {"disable_passes": list(pass_names())},
        {"bucket": "none", "verify": "full"},
        {"overlap": False, "verify": "full"},
        {"prefetch": "after", "verify": "full"},
        {"verify": "off"},
    ],
    ids=str,
)
def test_options_do_not_change_the_result(rank, world_size, options):
    """And passes that are switched off say so."""
    model = sharded(fully_shard)
    assert_same(train(compiled(model, **options), step), train(sharded(torch.distributed.fsdp.fully_shard), step))
    graphs = explain(model).graphs
    assert [graph.phase for graph in graphs] == ["forward", "backward"]
    for graph in graphs:
        off = {name for name, summary in graph.summary.items() if summary == "switched off"}
        assert off == set(options.get("disable_passes", ())) - {"reshard"}, graph.summary


# ---- a model that is not sharded -------------------------------------------------------------------------------------
def unsharded(rank: int, world_size: int) -> tuple[bool, list[str], list[str]]:
    """In a fresh process: whether the result is Inductor's, and what was said of `fully_shard`: beside a sharded model,
    and without any."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("compiled_fsdp").addHandler(handler)
    x = torch.linspace(-1, 1, 4)

    def run(backend: str) -> tuple[torch.Tensor, ...]:
        models = [nn.Sequential(Scale(), nn.Tanh()) for _ in range(2)]
        outs = [torch.compile(model, backend=backend)(x) for model in models]
        sum(out.sum() for out in outs).backward()
        return *outs, *(model[0].weight.grad for model in models)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other = fully_shard(nn.Linear(4, 4))
        compiled(nn.ReLU())(torch.ones(2))
        beside, said = [text for text in said if "fully_shard" in text], []
        del other
        gc.collect()
        same = all(torch.equal(*pair) for pair in zip(run("compiled_fsdp"), run("inductor"), strict=True))
    texts = [*said, *(str(w.message) for w in caught)]
    return same, beside, [text for text in texts if "fully_shard" in text]


def test_unsharded_model():
    """N12. Once a process has a sharded model, something else that is not (a metric, a loss) is nothing to warn of."""
    [(same, beside, alone)] = run_ranks(unsharded, 1)
    assert same
    assert beside == []
    assert len(alone) == 1
    assert "compiled_fsdp.fully_shard(model) before torch.compile" in alone[0]
