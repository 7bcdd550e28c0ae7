"""Options of the backend: what is taken, every bad value named, errors that nothing hides, and results that do not
depend on them."""

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

from compiled_fsdp import Options, compiled_autograd, count_communication, explain, fully_shard
from compiled_fsdp.compiler.backend import compiled_fsdp as backend
from compiled_fsdp.passes.pipeline import pass_names
from compiled_fsdp.passes.verify import GraphIsWrong
from compiled_fsdp.reporting.report import GraphReport
from tests.harness import assert_same, batch, compiled, distributed, loss_of, run_ranks, shard, train, variants
from tests.harness.fake import fake_group
from tests.harness.models import broken, small
from tests.harness.reference import full_gradients

BUCKETS = "takes 'auto', 'module', 'parameter', a number of MB, or a list of lists of parameter-name patterns"
OWN_PLAN = "as your own plan must be a list of lists of parameter-name patterns, e.g. "

BAD: list[tuple[str, Any, str]] = [
    ("bucket", "modul", f"{BUCKETS}, but got 'modul'"),
    ("bucket", None, f"{BUCKETS}, but got None"),
    ("bucket", True, f"{BUCKETS}, but got True"),
    ("bucket", {"0.*": 1}, f"{BUCKETS}, but got {{'0.*': 1}}"),
    ("bucket", 0, "must be a size above 0 MB, but got 0"),
    ("bucket", -0.5, "must be a size above 0 MB, but got -0.5"),
    ("bucket", float("nan"), "must be a size above 0 MB, but got nan"),
    ("bucket", float("inf"), "must be a size above 0 MB, but got inf"),
    ("bucket", [], rf"{OWN_PLAN}.*, but got \[\]"),
    ("bucket", ["0.*", "1.*"], rf"{OWN_PLAN}.*, but got \['0"),
    ("bucket", [["0.*"], "1.*"], rf"{OWN_PLAN}.*, but got \[\['0"),
    ("bucket", [["0.*"], [1]], rf"{OWN_PLAN}.*, but got \[\['0"),
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
        "takes 'reshard', 'regather', 'arrange', 'start_copies', 'plan', 'bucket', 'schedule', 'lower', "
        "'verify', 'share', but got 'schedul'",
    ),
    ("inductor", "max_autotune", "must be a dict of Inductor's options, but got 'max_autotune'"),
    ("inductor", None, "must be a dict of Inductor's options, but got None"),
    ("collectives_at_world_size_1", "yes", "must be True or False, but got 'yes'"),
    ("recheck_prefetched", 1, "must be True or False, but got 1"),
    ("kernels", "yes", "takes 'auto', True, False, but got 'yes'"),
    ("kernels", 1, "takes 'auto', True, False, but got 1"),
    ("transport", "nvshmem", "takes 'backend', 'symm_mem', but got 'nvshmem'"),
    ("optimizer_bytes_per_element", "8", "must be a number of bytes >= 0, but got '8'"),
    ("optimizer_bytes_per_element", -1, "must be a number of bytes >= 0, but got -1"),
    ("optimizer_bytes_per_element", True, "must be a number of bytes >= 0, but got True"),
    ("optimizer_bytes_per_element", float("nan"), "must be a number of bytes >= 0, but got nan"),
    *(
        (
            "memory_budget",
            value,
            f"must be a number of bytes, or a fraction .* at most 1.0, or a size .*, but got {value!r}",
        )
        for value in (0, -1, 1.5, True, float("nan"), float("inf"), "0", "0GB")
    ),
    *(
        ("memory_budget", value, f"a size is a number of bytes, or has a unit: 80GB .*; but got {value!r}")
        for value in ("all", "80 apples", "-1GB", "1.5.2GB", "")
    ),
    ("memory_budget", 2, "is 2, which is 2 bytes: no model fits. For 2 % .* give 0.02, for 2 GB give '2GB'"),
    ("memory_budget", 80, "is 80, which is 80 bytes: no model fits. For 80 % .* give 0.8, for 80 GB give '80GB'"),
    ("memory_budget", "80", "is '80', which is 80 bytes: no model fits. For 80 % .* give 0.8"),
    ("reshard_after_forward", True, "takes 'as sharded', 'auto', but got True"),
    ("hardware", "H1000", "takes 'auto', 'a10g', 'a100', .*'l40s', but got 'H1000'"),
    ("hardware", 7, "takes 'auto', 'a10g', .*, but got 7"),
    ("hardware", None, "takes 'auto', .*, but got None"),
    ("prefetch", "after", "'after' needs bucket='module' or 'parameter'. With bucket='auto' the planner decides"),
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


def test_a_budget_may_be_a_share_that_the_user_computed():
    """As 0.8 times the device's memory, in bytes."""
    for given, taken in ((0.8 * 85_026_543_616, 68_021_234_893.0), (0.8, 0.8), (10**9, 10**9), ("1.5MiB", 1572864.0)):
        assert Options.parse({"memory_budget": given}).memory_budget == taken


@pytest.mark.parametrize("bucket", ["auto", 25, 0.5, [["0.*"]]])
def test_prefetch_is_for_a_plan_without_planner(bucket):
    """Everywhere else it would do nothing."""
    for prefetch in ("before", "after"):
        for fixed in ("module", "parameter"):
            assert Options.parse({"bucket": fixed, "prefetch": prefetch}).prefetch == prefetch
    with pytest.raises(ValueError, match=names("prefetch", "'after' needs .*the planner decides when to launch")):
        Options.parse({"bucket": bucket, "prefetch": "after"})


def test_a_pattern_that_matches_nothing(model):
    run = torch.compile(
        model, backend="compiled_fsdp", options={"bucket": [["weight"], ["bia*", "wieght"]], "codegen": "aot_eager"}
    )
    with pytest.raises(
        ValueError, match=names("bucket", "no sharded parameter has a name that matches 'wieght'; .* like 'weight'")
    ):
        run(torch.ones(2, 4))


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
    assert (options.bucket, options.overlap, options.prefetch) == ("auto", True, "before")
    assert (options.hardware, options.reshard_after_forward) == ("auto", "as sharded")
    assert (options.codegen, options.verify, options.disable_passes) == ("inductor", "plan", ())
    assert (options.inductor, options.memory_budget, options.optimizer_bytes_per_element) == ({}, None, 8)
    assert Options.parse({"disable_passes": ["lower"]}).disable_passes == ("lower",)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"memory_budget": "80GB"}, {"memory_budget": 80e9}),
        ({"memory_budget": "1.5 gib"}, {"memory_budget": 1.5 * 2**30}),
        ({"memory_budget": "0.9"}, {"memory_budget": 0.9}),
        ({"memory_budget": 1}, {"memory_budget": 1}),
        ({"memory_budget": 10**9}, {"memory_budget": 10**9}),
        ({"hardware": "H100"}, {"hardware": "h100"}),
        ({"hardware": "Auto"}, {"hardware": "auto"}),
    ],
)
def test_other_ways_to_write_a_value(given, kept):
    assert Options.parse(given) == Options(**given) == Options(**kept)


@pytest.mark.more
def test_options_as_an_object():
    """In each call that takes a dictionary of them."""
    options = Options(bucket="module", codegen="aot_eager")
    assert Options.parse(options) is options
    with fake_group(2):
        model = sharded(fully_shard)
        expected = explain(model, (torch.ones(4, 6),), options={"bucket": "module", "codegen": "aot_eager"})
        assert explain(model, (torch.ones(4, 6),), options=options).graphs[0].plan == expected.graphs[0].plan
        run = torch.compile(model, backend="compiled_fsdp", options=options)
        assert explain(run, (torch.ones(4, 6),)).graphs[0].plan == expected.graphs[0].plan
        with compiled_autograd(options):
            run(torch.ones(4, 6)).sum().backward()
        assert explain(model).graphs[0].plan == expected.graphs[0].plan
        assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize(
    ("given", "more", "match"),
    [
        (None, {"budget": 1}, "unknown option 'budget'"),
        ({"bukcet": "auto"}, {}, "unknown option 'bukcet'. Did you mean 'bucket'"),
        ({"bucket": "module"}, {"verify": "all"}, "option 'verify' takes"),
        (Options(bucket="module"), {"prefech": "after"}, "unknown option 'prefech'. Did you mean 'prefetch'"),
    ],
)
def test_compiled_autograd_refuses_options_when_it_is_called(given, more, match):
    with pytest.raises(ValueError, match=match):
        compiled_autograd(given, **more)


@pytest.mark.parametrize("suppress", [False, True])
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"options": {"bukcet": "parameter"}}, ValueError, "unknown option 'bukcet'.*Did you mean 'bucket'"),
        ({"options": {"bucket": "moduel"}}, ValueError, f"option 'bucket' {BUCKETS}, but got 'moduel'"),
        ({"options": {"prefetch": "after"}}, ValueError, "option 'prefetch': 'after' needs bucket='module'"),
        ({"options": {"hardware": "abacus"}}, ValueError, "option 'hardware' takes 'auto', .*but got 'abacus'"),
        ({"options": ["bucket"]}, ValueError, r"options must be a dict or compiled_fsdp.Options, but got \['bucket'\]"),
        ({"options": {"inductor": {"max_autotuen": True}}}, ValueError,
         "'inductor': Inductor has no option 'max_autotuen'"),
        ({"options": {"inductor": {"reorder_for_peak_memory": True}}}, ValueError, "the backend itself sets"),
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


@pytest.mark.more
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, False),
        ({"mode": "max-autotune-no-cudagraphs"}, True),
        ({"mode": "default"}, False),
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
        one, other = compiled(first, bucket="module"), compiled(second, bucket="parameter")
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
        *(pytest.param({"disable_passes": [name]}, marks=pytest.mark.more) for name in pass_names()),
        {"disable_passes": list(pass_names())},
        pytest.param({"bucket": 0.0001, "verify": "full"}, marks=pytest.mark.more),
        pytest.param({"bucket": 25, "hardware": "h100", "verify": "full"}, marks=pytest.mark.more),
        {"bucket": [["0.*", "4.bias"], ["*.weight"]], "verify": "full"},
        pytest.param({"bucket": [["0.*", "4.bias"]], "overlap": False, "verify": "full"}, marks=pytest.mark.more),
        pytest.param({"bucket": "module", "prefetch": "after", "verify": "full"}, marks=pytest.mark.more),
        pytest.param({"bucket": "parameter", "overlap": False, "verify": "full"}, marks=pytest.mark.more),
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
        others = {"reshard", "regather", "share"}  # which run on the joint graph, or for Inductor
        assert off == set(options.get("disable_passes", ())) - others, graph.summary


@distributed(world_size=2, reset=True)
@pytest.mark.parametrize("make", variants([broken, small], broken))
def test_a_model_that_is_compiled_again_with_other_options_has_other_plans(rank, world_size, make):
    """For example, with the costs of a profile. The code for the first options is made again when it runs again."""
    model = shard(make(blocks=2), fully_shard)
    runs = [compiled(model, bucket=bucket) for bucket in ("module", "parameter")]
    gradients, launches = [], []
    for run in (*runs, *runs):
        model.zero_grad()
        with count_communication() as volume:
            loss_of(run, rank, 0).backward()
        launches.append(volume["gather"].launches)
        gradients.append(full_gradients(model))
    assert max(launches[::2]) < min(launches[1::2])
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0], rtol=0, atol=0)


def planned_forward(**options: Any) -> GraphReport:
    model = shard(small(blocks=2), fully_shard)
    compiled(model, **options)(batch(0, 0)[0])
    return explain(model).graphs[0]


def test_options_that_passes_read_come_to_them():
    """Where the next gather goes out, and what optimizer state counts for."""
    with fake_group(2):
        elements = sum(param.to_local().numel() for param in shard(small(blocks=2), fully_shard).parameters())
        before = planned_forward(bucket="module", prefetch="before", optimizer_bytes_per_element=0)
        after = planned_forward(bucket="module", prefetch="after", optimizer_bytes_per_element=8)
    for graph, ahead in ((before, True), (after, False)):
        first, second, *_ = graph.collectives
        assert (second.launch < first.wait) == ahead
    more = after.tasks.persistent - before.tasks.persistent
    assert more == pytest.approx(8 * elements, rel=0.1)  # of the padding, too


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


@pytest.mark.parametrize("codegen", ["inductor", "aot_eager"])
def test_a_graph_without_operations(codegen):
    """It hands out what it gets, for which Inductor has no code."""
    x = torch.ones(2)
    code = backend(torch.fx.symbolic_trace(lambda x: (x,)), [x], options={"codegen": codegen})
    for _ in range(2):
        assert torch.equal(code(x)[0], x)


@pytest.mark.more
def test_unsharded_model():
    """Once a process has a sharded model, something else that is not (a metric, a loss) is nothing to warn of."""
    [(same, beside, alone)] = run_ranks(unsharded, 1)
    assert same
    assert beside == []
    assert len(alone) == 1
    assert "compiled_fsdp.fully_shard(model) before torch.compile" in alone[0]


def test_a_graph_that_fails_its_check_is_an_error_that_can_be_caught(monkeypatch):
    """Under its own name, and not as Dynamo's error about a backend."""
    monkeypatch.setattr("compiled_fsdp.compiler.compilation.GRAPH_PASSES", (_breaks_the_graph,))
    with fake_group(2):
        model = shard(small(blocks=1), fully_shard)
        with pytest.raises(GraphIsWrong, match="told to"):
            compiled(model)(batch(0, 0)[0])


def _breaks_the_graph(gm, ctx):
    raise GraphIsWrong("told to")
