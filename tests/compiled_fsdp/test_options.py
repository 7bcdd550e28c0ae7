"""Options of the backend: what is taken, every bad value named, errors that nothing hides."""

import dataclasses
import gc
import itertools
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
from compiled_fsdp.compiler.backend import compiled_fsdp as backend
from compiled_fsdp.compiler.resources import PatternsDiffer
from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.pipeline import pass_names
from compiled_fsdp.reporting.report import GraphReport
from tests.harness import assert_same, compiled, distributed, run_ranks, train
from tests.harness.fake import fake_group

BUCKETS = "takes 'auto', 'module', 'none', a number of MB, or a list of lists of parameter-name patterns"
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
        "takes 'reshard', 'regather', 'arrange', 'plan', 'bucket', 'schedule', 'lower', 'verify', but got 'schedul'",
    ),
    ("inductor", "max_autotune", "must be a dict of Inductor's options, but got 'max_autotune'"),
    ("inductor", None, "must be a dict of Inductor's options, but got None"),
    ("collectives_at_world_size_1", "yes", "must be True or False, but got 'yes'"),
    ("recheck_prefetched", 1, "must be True or False, but got 1"),
    ("kernels", "yes", "takes 'auto', True, False, but got 'yes'"),
    ("kernels", 1, "takes 'auto', True, False, but got 1"),
    ("optimizer_bytes", "8", "must be a number of bytes >= 0, but got '8'"),
    ("optimizer_bytes", -1, "must be a number of bytes >= 0, but got -1"),
    ("optimizer_bytes", True, "must be a number of bytes >= 0, but got True"),
    ("optimizer_bytes", float("nan"), "must be a number of bytes >= 0, but got nan"),
    *(
        ("memory_budget", value, f"must be a number of bytes, or a fraction .* at most 1.0, but got {value!r}")
        for value in ("all", 0, -1, 1.5, True, float("nan"), float("inf"))
    ),
    ("reshard_after_forward", True, "takes 'as sharded', 'auto', but got True"),
    ("hardware", "H100", "takes 'auto', 'a100', 'h100', 'h200', 'b200', 'cpu', but got 'H100'"),
    ("hardware", None, "takes 'auto', .*, but got None"),
    ("prefetch", "after", "'after' is for bucket='module' or 'none', but bucket is 'auto'"),
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


@pytest.mark.parametrize("bucket", ["auto", 25, 0.5, [["0.*"]]])
def test_prefetch_is_for_a_plan_without_planner(bucket):
    """Everywhere else it would do nothing."""
    for prefetch in ("before", "after"):
        for fixed in ("module", "none"):
            assert Options.parse({"bucket": fixed, "prefetch": prefetch}).prefetch == prefetch
    with pytest.raises(ValueError, match=names("prefetch", "'after' is for .*whose launches the planner places")):
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
    assert (options.inductor, options.memory_budget, options.optimizer_bytes) == ({}, None, 8)
    assert Options.parse({"disable_passes": ["lower"]}).disable_passes == ("lower",)


@pytest.mark.parametrize("suppress", [False, True])
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"options": {"bukcet": "none"}}, ValueError, "unknown option 'bukcet'.*Did you mean 'bucket'"),
        ({"options": {"bucket": "moduel"}}, ValueError, f"option 'bucket' {BUCKETS}, but got 'moduel'"),
        ({"options": {"prefetch": "after"}}, ValueError, "option 'prefetch': 'after' is for bucket='module' or 'none'"),
        ({"options": {"hardware": "H100"}}, ValueError, "option 'hardware' takes 'auto', .*but got 'H100'"),
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
        pytest.param({}, False, marks=pytest.mark.more),
        ({"mode": "max-autotune-no-cudagraphs"}, True),
        pytest.param({"mode": "default"}, False, marks=pytest.mark.more),
        pytest.param({"options": {"inductor": {"max_autotune": True}}}, True, marks=pytest.mark.more),
        pytest.param(
            {"options": {"inductor": {"max-autotune": True}}}, True, marks=pytest.mark.more
        ),  # as torch.compile takes it, too
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


# ---- what each value does --------------------------------------------------------------------------------------------
def tower(*sizes: int) -> nn.Module:
    """Square layers of these sizes; each is a unit."""
    return nn.Sequential(*(Square(size) for size in sizes))


class Square(nn.Linear):
    """A layer between activations of 512 that uses `size` of them."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(torch.tanh(super().forward(x[:, : self.in_features])), (0, 512 - self.out_features))


def reports_of(model: nn.Module, **options: Any) -> list[GraphReport]:
    """The graphs of a compiled step of a model whose layers are units, on one of two ranks."""
    with fake_group(2):
        for layer in model:
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(model, reshard_after_forward=True)
        compiled(model, verify="full", **options)(torch.ones(2, 512)).sum().backward()
        graphs = list(explain(model).graphs)
    assert [graph.phase for graph in graphs] == ["forward", "backward"]
    return graphs


def launched(graph: GraphReport, kind: str) -> list[list[str]]:
    """Parameter names by bucket, in the order of launches."""
    return [list(flight.names) for flight in graph.flights if flight.bucket.kind == kind]


SIZES = (64, 128, 256, 512, 256, 128, 64, 64)  # weights of 16 kB to 1.05 MB


@pytest.mark.parametrize("megabytes", [0.3, pytest.param(1, marks=pytest.mark.more)])
def test_buckets_of_a_size(megabytes):
    """As many neighbours as fit; a parameter that is larger is alone."""
    forward, backward = reports_of(tower(*SIZES), bucket=megabytes)
    for graph, kind in ((forward, "gather"), (backward, "gather"), (backward, "reduce")):
        buckets = [flight.bucket for flight in graph.flights if flight.bucket.kind == kind]
        size = {read.index: read.bytes for read in graph.reads}
        assert len(buckets) > 1
        assert any(len(bucket.reads) > 1 for bucket in buckets)
        assert any(len(bucket.reads) == 1 and bucket.bytes > megabytes * 1e6 for bucket in buckets)
        for bucket in buckets:
            assert bucket.bytes <= megabytes * 1e6 or len(bucket.reads) == 1, bucket
        for this, following in itertools.pairwise(buckets):
            assert this.bytes + size[following.reads[0]] > megabytes * 1e6, f"{this} has room for one of {following}"
    read = [index for flight in forward.flights for index in flight.bucket.reads]
    assert sorted(read) == list(range(2 * len(SIZES)))


@pytest.mark.more
def test_a_size_that_holds_everything():
    forward, backward = reports_of(tower(*SIZES), bucket=25)
    assert (forward.count("gather"), backward.count("gather"), backward.count("reduce")) == (1, 1, 1)


def test_buckets_of_your_own():
    """By the first list that matches; what matches none is alone."""
    own = [["0.weight", "[12].*"], ["*.weight"]]
    forward, backward = reports_of(tower(64, 64, 64, 64, 64), bucket=own)
    expected = [
        {"0.weight", "1.weight", "1.bias", "2.weight", "2.bias"},
        {"3.weight", "4.weight"},
        *({f"{i}.bias"} for i in (0, 3, 4)),
    ]
    assert {launched(forward, "gather")[i][0][0] for i in (0, 1)} == {"0"}  # what is needed first
    found = launched(forward, "gather"), launched(backward, "reduce")
    for buckets in found:
        assert sorted(map(sorted, buckets)) == sorted(map(sorted, expected))
    again = {name for bucket in launched(backward, "gather") for name in bucket}
    assert again == {f"{i}.weight" for i in range(1, 5)}  # of a linear layer backward reads the weight
    assert sorted(["1.weight", "2.weight"]) in map(sorted, launched(backward, "gather"))


class Layer(nn.Linear):
    """Of torch's own Dynamo does not compile the forward alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(x))


class Layers(nn.Module):
    """Equal layers behind graph breaks: each is compiled alone, and the compiled code is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = layer(x)
        return x


def run_layers(bucket: list[list[str]]) -> nn.Module:
    model = fully_shard(Layers())
    compiled(model, bucket=bucket)(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return model


@pytest.mark.parametrize(
    ("bucket", "other"),
    [
        ([["layers.0.*"], ["layers.1.weight"], ["layers.1.bias"]], "layers.1.bias"),
        ([["layers.0.*", "layers.1.*"]], "layers.2.weight"),  # what matches nothing is alone
        ([["layers.1.*"]], "layers.1.bias"),
    ],
)
def test_patterns_that_tell_equal_layers_apart(bucket, other):
    with (
        fake_group(2),
        pytest.raises(PatternsDiffer, match=r"option 'bucket'.*shares compiled code with.*equal buckets") as caught,
    ):
        run_layers(bucket)
    assert other.rsplit(".", 1)[0] in str(caught.value)


@pytest.mark.parametrize(
    "bucket",
    [[["layers.*"]], [["layers.0.*"], ["layers.1.*"], ["layers.2.*"]], [["*.bias"], ["*.weight"]]],
)
def test_patterns_that_divide_equal_layers_alike(bucket):
    with fake_group(2):
        graphs = explain(run_layers(bucket)).graphs
    assert [graph.phase for graph in graphs] == ["forward", "backward"]
    together = len(graphs[0].plan.launches) == 1
    assert together == (bucket[0][0] in ("layers.*", "layers.0.*"))


def test_hardware():
    """A name, or numbers of your own: what is planned for changes."""
    slow = dataclasses.replace(PROFILES["cpu"], latency=0.5)
    seconds = []
    for hardware in (PROFILES["h100"], "h100", "cpu", slow):
        forward, _ = reports_of(tower(64, 64), hardware=hardware)
        seconds.append(forward.simulation.seconds)
    assert seconds[0] == seconds[1] < seconds[2] < 0.5 < seconds[3]


def test_overlap():
    """Off, each gather is launched where it is waited for."""
    hidden = {}
    for overlap in (True, False):
        forward, _ = reports_of(tower(64, 64, 64, 64), bucket="module", overlap=overlap)
        hidden[overlap] = [flight.hidden_behind for flight in forward.flights]
    assert sum(hidden[True]) > 0
    assert sum(hidden[False]) == 0


# ---- none of it changes the result -----------------------------------------------------------------------------------
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
        {"bucket": 25, "hardware": "h100", "verify": "full"},
        {"bucket": [["0.*", "4.bias"], ["*.weight"]], "verify": "full"},
        {"bucket": [["0.*", "4.bias"]], "overlap": False, "verify": "full"},
        {"bucket": "module", "prefetch": "after", "verify": "full"},
        pytest.param({"bucket": "none", "overlap": False, "verify": "full"}, marks=pytest.mark.more),
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
        assert off == set(options.get("disable_passes", ())) - {"reshard", "regather"}, graph.summary


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
