"""``compiled-fsdp plan``: its output and its files, priced again by a second simulator, and its errors."""

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from click.testing import CliRunner
from rich.console import Console
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from compiled_fsdp.passes.cost import PROFILES
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.tools.cli import budgets
from compiled_fsdp.tools.cli.estimate import estimate
from compiled_fsdp.tools.cli.plan import budget_of, plan, table_of
from compiled_fsdp.tools.cli.setting import NotPlannable, Setting
from compiled_fsdp.tools.cli.shapes import SHAPES, Decoder
from tests.harness import variants

TINY = Setting("tiny", "", 8, 1, 1, PROFILES["h100"], 1, 128, "bf16", True, "none", None)


def run(*words):
    return CliRunner().invoke(plan, [str(word) for word in words], catch_exceptions=False)


class OfMyOwn(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class Breaking(OfMyOwn):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


class WithoutGradient(OfMyOwn):
    def forward(self, x):
        return F.cross_entropy(super().forward(x), torch.zeros(len(x), dtype=torch.int64, device=x.device))


def of_my_own(batch, sequence):
    return (torch.zeros(batch * sequence, 64),)


def not_a_tuple(batch, sequence):
    return of_my_own(batch, sequence)[0]


def failing():
    raise OSError("no disk\nand more lines")


def of_nothing():
    return None


def test_one_step(tmp_path):
    """The output and the file have the same figures; the file's tasks give its times and its peak again."""
    file, page = tmp_path / "out.json", tmp_path / "out.html"
    done = run("--model", "tiny", "--world-size", 8, "--seq", 128, "--json", file, "--timeline", page)
    assert done.exit_code == 0, done.output
    data = json.loads(file.read_text())
    assert f"{1e3 * data['step_s']:,.1f} ms" in done.output
    assert f"{data['tokens_per_second']:,.0f} on each rank" in done.output
    assert page.stat().st_size > 10**6  # with plotly
    assert [graph["name"] for graph in data["graphs"]] == ["forward", "backward"]
    assert data["step_s"] == pytest.approx(sum(g["step_s"] for g in data["graphs"]) + data["optimizer_s"])
    sizes = [graph["peak_lower_bound_bytes"] for graph in data["graphs"]]
    for graph in data["graphs"]:
        tasks = graph["tasks"]
        assert {task["kind"] for task in tasks} <= {"compute", "gather", "reduce"}
        collectives = [task for task in tasks if task["kind"] != "compute"]
        assert sum(task["duration_s"] for task in collectives) == pytest.approx(graph["comm_s"])
        assert graph["lower_bound_s"] <= graph["step_s"]
        assert min(sizes) <= graph["peak_bytes"] == max(held for _, held in graph["memory"])
        busy = sum(task["duration_s"] for task in tasks if task["kind"] == "compute")
        exposed = sum(task["exposed_s"] for task in collectives)
        assert exposed == pytest.approx(graph["exposed_s"])
        # the host's launches may take longer than all of it, in a model as small as this
        assert busy + exposed <= graph["step_s"] + 1e-9
        for task in collectives:
            if task["kind"] == "gather":
                assert tasks[task["first_use"]]["kind"] == tasks[task["last_use"]]["kind"] == "compute"
            else:
                assert task["producer"] is None or tasks[task["producer"]]["kind"] == "compute"


@pytest.mark.parametrize(("ranks", "batches"), variants([("8", "1"), ("2,8", "1,2")], ("8", "1")))
def test_ranges(ranks, batches):
    """A line for each; a budget that nothing fits into says how much would do."""
    words = "--model", "tiny", "--world-size", ranks, "--batch", batches, "--budget", "none,10kb", "--seq", 64
    done = run(*words)
    assert done.exit_code == 0, done.output
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.output.splitlines() if "│" in line]
    assert "…" not in done.output  # nothing is cut off
    assert [line[:3] for line in lines] == [
        [world, batch, budget]
        for world in ranks.split(",")
        for batch in batches.split(",")
        for budget in ("none", "0.0")
    ]
    assert [line[3] == "no plan" for line in lines] == [False, True] * (len(lines) // 2)


@pytest.mark.more
def test_tables_fit_100_columns():
    """With the numbers of a large model, nothing of them is cut off."""
    huge = replace(estimate(TINY), flops=1e16, peak_flops=1e15, tokens=1e6)
    graphs = [replace(graph, step_s=12.3456, lower_bound_s=12.3456, exposed_s=12.3456, peak_bytes=123_456_700_000)
              for graph in huge.graphs]  # fmt: skip
    console = Console(width=100, record=True, file=io.StringIO())
    settings = [replace(TINY, world_size=131_072, batch=1_000, budget=1.2345e12)]
    console.print(table_of(settings, [replace(huge, graphs=tuple(graphs))]))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    assert "24,691.2" in text


@pytest.mark.more
def test_the_more_ranks_the_less_memory():
    few, many = (estimate(replace(TINY, world_size=ranks)) for ranks in (2, 16))
    least = [max(graph.peak_lower_bound_bytes for graph in e.graphs) for e in (few, many)]
    assert least[1] < least[0]
    assert many.parameters == few.parameters == sum(p.numel() for p in Decoder(SHAPES["tiny"]).parameters())


@pytest.mark.more
def test_codecs_beside_each_other():
    words = ("--model", "tiny", "--seq", 128, "--world-size", 8)
    found = run(*words, "--precision", "fp32", "--wire", "none,bfloat16,int8")
    assert found.exit_code == 0, found.output
    lines = [line.split("│")[1:-1] for line in found.output.splitlines() if "│" in line]
    assert [line[0].strip() for line in lines] == ["none", "bfloat16", "int8"]
    wrong = run(*words, "--wire", "int4")
    assert wrong.exit_code == 2
    assert "gather must be one of bfloat16, int8, float8_e4m3fn or None, but is 'int4'" in " ".join(
        wrong.output.replace("│", " ").split()
    )


@pytest.mark.more
def test_options_are_those_of_training():
    """HSDP, checkpointing, precision, what stays unsharded: each changes what it should."""
    plain = estimate(TINY)

    def moved(e, kind):
        return sum(task.bytes for graph in e.graphs for task in graph.timeline.tasks if task.kind == kind)

    kept = estimate(replace(TINY, reshard_after_forward=False))
    assert moved(kept, "gather") < moved(plain, "gather")
    assert moved(kept, "reduce") == moved(plain, "reduce")
    assert moved(estimate(replace(TINY, precision="fp32")), "gather") == 2 * moved(plain, "gather")
    assert 2 * moved(estimate(replace(TINY, precision="bf16-reduce")), "reduce") == moved(plain, "reduce")
    encoded = estimate(replace(TINY, precision="fp32", wire="int8/none"))
    assert moved(encoded, "gather") < 0.6 * moved(plain, "gather")  # int8 and scales in place of bfloat16
    assert moved(encoded, "reduce") == moved(plain, "reduce")
    replicated = estimate(replace(TINY, replicate=4))
    assert replicated.optimizer_s == pytest.approx(4 * plain.optimizer_s, rel=0.01)
    computed = {kind: sum(g.compute_s for g in estimate(replace(TINY, checkpointing=kind)).graphs) for kind in
                ("none", "selective", "full")}  # fmt: skip
    assert computed["none"] < computed["full"]
    assert computed["selective"] < computed["full"]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama3-8b", 8.03e9), ("llama3-70b", 70.6e9), ("llama3-405b", 405.9e9), ("llama2-7b", 6.738e9),
        ("llama2-70b", 68.98e9), ("mixtral-8x7b", 46.7e9), ("mpt-7b", 6.658e9), ("qwen3-14b", 14.77e9),
    ],
)  # fmt: skip
def test_named_models_have_as_many_parameters_as_published(name, published):
    with torch.device("meta"):
        model = Decoder(SHAPES[name])
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(published, rel=2e-3)


def test_a_model_with_learned_positions_and_a_tied_head():
    shape = replace(SHAPES["mpt-7b"], dim=64, heads=4, kv_heads=4, hidden=256, layers=2, vocabulary=512, positions=128)
    step = estimate(replace(TINY, model=shape))
    assert step.parameters == 512 * 64 + 128 * 64 + 2 * (4 * 64**2 + 2 * 64 * 256 + 2 * 64) + 64
    with pytest.raises(NotPlannable, match="learned positions and the tied head of mpt-7b"):
        estimate(replace(TINY, model=shape, tensor_parallel=2))
    bucketed = estimate(replace(TINY, model=shape, options=(("bucket", "module"),)))
    launches = [task.name for graph in bucketed.graphs for task in graph.timeline.tasks if task.kind == "gather"]
    assert len(launches) == 3 + 3  # in forward and in backward one for each layer, and one for the root


def test_a_model_of_my_own():
    """The root alone is sharded, so its repeated layers are blocks."""
    done = run("--model", f"{__name__}:OfMyOwn", "--inputs", f"{__name__}:of_my_own", "--world-size", 4)
    assert done.exit_code == 0, done.output
    assert "MFU                      not known" in done.output


class Split(OfMyOwn):
    def __init__(self, mesh):
        super().__init__()
        for layer in self.layers:
            parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Replicate()))


@pytest.mark.more
def test_tensor_parallel():
    """Half of each layer on each of two neighbours: half the compute and gathers, and the layers' own collectives."""
    plain, split = (estimate(replace(TINY, tensor_parallel=size, batch=4)) for size in (1, 2))

    def moved(e):
        return sum(task.bytes for graph in e.graphs for task in graph.timeline.tasks if task.kind == "gather")

    def of_the_model(e):
        return [task for graph in e.graphs for task in graph.timeline.tasks if task.kind not in
                ("compute", "gather", "reduce")]  # fmt: skip

    assert {task.stream for task in of_the_model(split)} == {"the model's own, 2 ranks"}
    # norms are whole on both
    assert moved(split) == pytest.approx(moved(plain) / 2, rel=0.05)
    assert not of_the_model(plain)
    # before and behind attention and feed-forward network
    assert len(of_the_model(split)) >= 2 * 4 * SHAPES["tiny"].layers
    assert split.tokens == plain.tokens / 2
    assert split.optimizer_s == pytest.approx(plain.optimizer_s, rel=0.01)  # half as many parameters, on half the ranks
    assert split.parameters == plain.parameters
    own = replace(TINY, model=f"{__name__}:Split", inputs=f"{__name__}:of_my_own", tensor_parallel=2)
    assert of_the_model(estimate(own))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "llama9"), "--model must be one of llama3-8b"),
        (("--model", "nowhere:f", "--inputs", "x:y"), "--model nowhere:f: No module named 'nowhere'"),
        (("--model", f"{__name__}:OfMyOwn"), "needs --inputs"),
        (("--model", f"{__name__}:Breaking", "--inputs", f"{__name__}:of_my_own"), "graph breaks"),
        (("--model", f"{__name__}:WithoutGradient", "--inputs", f"{__name__}:of_my_own"), "nll_loss has no gradient"),
        (
            ("--model", "tiny", "--replicate", 3),
            "--replicate 3 times --tensor-parallel 1 does not divide --world-size 8",
        ),
        (("--model", "tiny", "--tensor-parallel", 4), "--tensor-parallel 4 does not divide the 2 key and value heads"),
        (("--model", "mixtral-8x7b", "--tensor-parallel", 8), "the experts of mixtral-8x7b cannot be split"),
        (("--model", "tiny", "--world-size", 1), "is --world-size 1?"),
        (("--model", "tiny", "--world-size", "8,x"), "invalid literal"),
        (("--model", f"{__name__}:failing", "--inputs", f"{__name__}:of_my_own"), "raised OSError: no disk (at "),
        (("--model", f"{__name__}:of_nothing", "--inputs", f"{__name__}:of_my_own"), "must return a module"),
        (("--model", f"{__name__}:OfMyOwn", "--inputs", f"{__name__}:not_a_tuple"), "must return a tuple"),
        (("--model", "tiny", "--hardware", "abacus"), "'abacus' is not a known profile"),
        (("--model", "tiny", "--hardware", __file__), "does not contain a Hardware"),
        (("--model", "tiny", "--budget", "much"), "a size is a number of bytes"),
        pytest.param(("--model", "tiny", "--budget", "10kb"), "'memory_budget'", marks=pytest.mark.more),
        (("--model", "tiny", "--reshard-after-forward", "maybe"), "is not true, false, auto"),
        (("--model", "tiny", "--reshard-after-forward", 3), "as an int should be a factor of 8, not 3"),
        (("--model", "tiny", "--json", "/nowhere/x.json"), "there is no folder '/nowhere'"),
        (("--model", "tiny", "--timeline", "x.png"), "must end in .html or .json"),
        (("--model", "tiny", "--timeline", "x.html", "--batch", "1,2"), "--timeline draws one step"),
    ],
    ids=lambda value: " ".join(map(str, value[-2:])) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_planned_is_said(words, said):
    done = run("--seq", 64, *words)
    assert done.exit_code != 0
    assert said in " ".join(done.output.split())
    message = done.output.partition("Error: ")[2]
    assert len(message.splitlines()) == 1
    assert not dist.is_initialized()


@pytest.mark.more
def test_a_factory_in_the_current_folder(tmp_path):
    """The console script's path begins with the folder of scripts."""
    (tmp_path / "mine.py").write_text("")
    code = "import sys; sys.path[:] = filter(None, sys.path); import compiled_fsdp.tools.cli.main as m; m.main()"
    words = [sys.executable, "-c", code, "plan", "--model", "mine:factory", "--inputs", "mine:inputs"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "module 'mine' has no attribute 'factory'" in done.stderr


def test_inside_of_a_training_program():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(NotPlannable, match="there is a process group already"):
            estimate(TINY)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("text", "size"), [("60GB", 60e9), ("1.5 GiB", 1.5 * 2**30), ("0.8", 0.8), ("none", None), ("1000", 1000.0)]
)
def test_budgets(text, size):
    assert budget_of(text) == size


def test_a_budget_that_cannot_be_meant():
    with pytest.raises(ValueError, match=r"it is 80 bytes: no model fits. For 80 % .* give 0\.8, for 80 GB"):
        budget_of("80")


def test_without_its_libraries():
    code = "import sys; sys.modules['rich'] = None; import compiled_fsdp.tools.cli.main as m; m.main()"
    done = subprocess.run([sys.executable, "-c", code, "plan"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install click plotly rich" in done.stderr


def test_a_page_without_plotly_is_refused_before_anything_is_planned(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr("compiled_fsdp.tools.cli.attempts.estimates", lambda *_: pytest.fail("it was planned"))
    done = run("--model", "tiny", "--timeline", "x.html")
    assert done.exit_code == 2
    assert "pip install plotly" in " ".join(done.output.split())


# ---- questions about memory ------------------------------------------------------------------------------------------
@pytest.fixture
def by_formula(monkeypatch):
    """Plans that take no time: 100 bytes for each token are needed without a budget, and 10 at least."""
    one = estimate(TINY)

    def planned(setting):
        tokens = setting.batch * setting.sequence
        most, least = 100 * tokens, 10 * tokens
        held = most if setting.budget is None else min(most, setting.budget)
        if held < least:
            raise OverBudget("too little", least)
        graph = replace(one.graphs[0], peak_bytes=int(held), step_s=most / held)
        return replace(one, graphs=(graph,), tokens=tokens)

    def planned_under(setting, limits):
        found = []
        for limit in limits:
            try:
                found.append(planned(replace(setting, budget=limit)))
            except OverBudget as error:
                found.append(error)
        return found

    monkeypatch.setattr(budgets, "estimate", planned)
    monkeypatch.setattr("compiled_fsdp.tools.cli.attempts.estimates", planned_under)


def test_a_curve_of_budgets(tmp_path, by_formula):
    """From the least budget to none, with the knee marked in the table and in the picture."""
    file = tmp_path / "curve.html"
    done = run("--model", "tiny", "--seq", 10**6, "--batch", 1000, "--curve", file)
    assert done.exit_code == 0, done.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.output.splitlines() if "│" in line]
    assert [row[2] for row in rows] == ["10.0", "21.3", "32.5", "43.8", "55.0", "66.3", "77.6", "88.8", "none"]
    assert [row[-1] for row in rows] == ["", "", "knee", *[""] * 6]
    assert "knee: 32.5 GB" in file.read_text()


def test_the_knee_is_where_more_memory_brings_little():
    assert budgets.knee([(0, 10), (1, 2), (10, 0)]) == 1
    assert budgets.knee([(1, 1), (1, 1)]) == 0  # there is none


def test_the_largest_that_fits(by_formula):
    """Within the budget, or within the device's memory; --seq in multiples of what is given."""
    words = "--model", "tiny", "--seq", 1000
    assert "the largest --batch that fits: 13\n" in run(*words, "--budget", 139_999, "--fit", "batch").output
    assert "the largest --seq that fits: 13,000" in run(*words, "--budget", 139_999, "--fit", "seq").output
    assert "the largest --batch that fits: 8,000,000" in run(*words, "--fit", "batch").output
    assert "too little" in run(*words, "--budget", 9_999, "--fit", "batch").output


def test_one_question_at_a_time(tmp_path):
    for words in (("--fit", "batch", "--batch", "1,2"), ("--fit", "seq", "--curve", tmp_path / "a.html")):
        assert "are about one step" in run("--model", "tiny", *words).output
    assert "draws a page" in run("--model", "tiny", "--curve", tmp_path / "a.png").output
