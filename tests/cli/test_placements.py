"""The table of placements of ``compiled-fsdp plan``: its rows, the bytes that each sends, and which one is chosen."""

import json
import pickle
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from compiled_fsdp.passes.cost import PROFILES, Wires
from compiled_fsdp.passes.plan.search import OverBudget
from compiled_fsdp.tools.cli.attempts import attempts
from compiled_fsdp.tools.cli.estimate import estimate, estimates
from compiled_fsdp.tools.cli.placements import advice_of, compare, placements_of, quickest
from compiled_fsdp.tools.cli.plan import plan
from compiled_fsdp.tools.cli.setting import NotPlannable, Setting

RANKS, LAYERS, DIM = 16, 3, 64  # two nodes of eight ranks
NAMES = ["FSDP", "FSDP, 8 in backward", "FSDP, kept", "HSDP", "HSDP, kept", "replicate"]


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def inputs(batch, sequence):
    return (torch.zeros(batch * sequence, DIM, requires_grad=True),)


OWN = Setting(
    f"{__name__}:Layers", f"{__name__}:inputs", RANKS, 1, 1, PROFILES["h100"], 1, 64, "bf16", True, "none", None
)


@pytest.fixture(scope="module")
def rows():
    """The table of the model above, with a budget into which all of its plans fit."""
    return compare(OWN, [1e9], lambda settings: attempts(settings, jobs=1))


def test_a_row_is_the_single_plan_of_its_placement(rows):
    assert [row.placement.name for row in rows] == NAMES
    assert rows[0].placement.options == ""
    for row in (rows[0], rows[4]):
        alone = estimate(row.setting)
        assert (alone.step_s, alone.peak_bytes, alone.sent_bytes) == (
            row.found.step_s,
            row.found.peak_bytes,
            row.found.sent_bytes,
        )
    assert rows[4].placement.options == "--replicate 2 --reshard-after-forward false"


def test_bytes_inside_nodes_and_between_them(rows):
    """A ring sends (n - 1) / n of the bytes, an all-reduce twice that; a hop in n leaves a node of n ranks."""
    elements = LAYERS * DIM * DIM
    gathered, reduced = 2 * elements, 4 * elements  # bfloat16, and float32 sums
    ring, node, hop = 15 / 16, 7 / 8, 1 / 8
    total = {
        "FSDP": (2 * gathered + reduced) * ring,
        "FSDP, kept": (gathered + reduced) * ring,
        "FSDP, 8 in backward": (gathered + reduced) * ring + gathered * node,
        "HSDP": (2 * gathered + reduced) * node + reduced / 8,
        "HSDP, kept": (gathered + reduced) * node + reduced / 8,
        "replicate": 2 * ring * reduced,
    }
    between = {
        "FSDP": (2 * gathered + reduced) * ring * hop,
        "FSDP, kept": (gathered + reduced) * ring * hop,
        "FSDP, 8 in backward": (gathered + reduced) * ring * hop,
        "HSDP": reduced / 8,
        "HSDP, kept": reduced / 8,
        "replicate": 2 * ring * reduced * hop,
    }
    for row in rows:
        name, sent = row.placement.name, row.found.sent_bytes
        assert sum(sent) == pytest.approx(total[name]), name
        assert sent[1] == pytest.approx(between[name]), name


def test_bytes_of_a_step_of_several_microbatches():
    """Replicas and working copies reduce between nodes in the last one only, as ``docs/parallelism.md`` measures it."""
    elements, ring, node, count = LAYERS * DIM * DIM, 15 / 16, 7 / 8, 4
    gathered, reduced = 2 * elements, 4 * elements
    total = {
        "FSDP": count * (2 * gathered + reduced) * ring,
        "HSDP": count * (2 * gathered + reduced) * node + reduced / 8,
        "HFSDP": gathered * ring + (2 * count - 1) * gathered * node + count * reduced * node + reduced / 16,
        "replicate": 2 * ring * reduced,
    }
    between = {"FSDP": total["FSDP"] / 8, "HSDP": reduced / 8, "HFSDP": gathered * ring / 8 + reduced / 16}
    setting = replace(OWN, microbatches=count)
    found = {of.name: of for of in placements_of(setting)}
    assert set(NAMES) | {"HFSDP"} == set(found)
    assert found["HFSDP"].options == "--working-copy 8"
    floors = {}
    for name in total:
        of = found[name]
        step = estimate(replace(setting, replicate=of.replicate, working_copy=of.working_copy))
        assert sum(step.sent_bytes) == pytest.approx(total[name]), name
        assert step.sent_bytes[1] == pytest.approx(between.get(name, step.sent_bytes[1])), name
        assert step.tokens == count * OWN.sequence
        floors[name] = step.floor_bytes
    once = estimate(OWN)
    many = estimate(setting)
    assert many.step_s - many.optimizer_s == pytest.approx(count * (once.step_s - once.optimizer_s))
    assert (many.exposed_s, many.hidden) == pytest.approx((count * once.exposed_s, once.hidden))
    # an eighth of the parameters, and of the gradients that wait for the last microbatch
    assert floors["HFSDP"] == floors["FSDP"] + gathered / 8 + reduced / 8
    assert floors["HSDP"] == 2 * floors["FSDP"] + reduced / 8


def test_microbatches_that_differ():
    """A step of two has no middle ones; alike microbatches are planned once, under a budget, too."""
    two = estimate(replace(OWN, microbatches=2, working_copy=8))
    assert [(graph.name, graph.count) for graph in two.graphs] == [
        ("first forward", 1), ("first backward", 1), ("last forward", 1), ("last backward", 1),
    ]  # fmt: skip
    limited, error = estimates(replace(OWN, microbatches=5), [1e9, 1e3])
    assert [(graph.name, graph.count, graph.budget_bytes) for graph in limited.graphs] == [
        ("forward", 5, 1e9),
        ("backward", 5, 1e9),
    ]
    assert isinstance(error, OverBudget)
    copied = replace(OWN, microbatches=3, working_copy=8)
    [error] = estimates(copied, [1e3])
    assert estimate(replace(copied, budget=float(error.least))).peak_bytes <= error.least
    names = [graph.name for graph in estimate(copied).timeline().graphs]
    assert names[2:4] == ["middle forward", "middle backward"]
    assert [graph.name for graph in limited.timeline().graphs] == ["5 x forward", "5 x backward"]
    for wrong in ({"working_copy": 8}, {"working_copy": 8, "microbatches": 2, "replicate": 2}):
        with pytest.raises(NotPlannable, match="--working-copy is a copy that stays from microbatch to microbatch"):
            estimate(replace(OWN, **wrong))
    with pytest.raises(NotPlannable, match="a number should be a factor of the number of shards, which is 16"):
        estimate(replace(OWN, microbatches=2, working_copy=3))
    for ranks in (1, 16, 32):
        with pytest.raises(
            NotPlannable, match=f"more than 1 and less than the 16 ranks that hold shards, but is {ranks}"
        ):
            estimate(replace(OWN, microbatches=2, working_copy=ranks))
    encoded = placements_of(replace(OWN, microbatches=2, wire="int8"))
    assert "HFSDP" not in [of.name for of in encoded]  # its gradients are reduced in two parts


@pytest.mark.more
def test_plans_under_several_budgets_are_those_under_each():
    tiny = replace(OWN, model="tiny", inputs="", sequence=1024)
    budgets = [None, 0.8 * estimate(tiny).peak_bytes, 1e3]
    alone = [attempt(replace(tiny, budget=limit)) for limit in budgets]
    free, cut, error = estimates(tiny, budgets)
    assert [free.to_json(), cut.to_json(), error.least] == [alone[0].to_json(), alone[1].to_json(), alone[2].least]
    assert cut.for_backward.is_cut


@pytest.mark.parametrize(("jobs", "parts"), [(1, 2), (2, 2), (4, 4)])
def test_the_model_is_captured_once_for_all_budgets(monkeypatch, jobs, parts):
    """Unless processes would have nothing to do. Plans come in the order of the settings."""
    asked = []

    def planned(given, jobs):
        for setting, budgets in given:
            asked.append((setting.replicate, tuple(budgets)))
            yield [(setting.replicate, budget) for budget in budgets]

    monkeypatch.setattr("compiled_fsdp.tools.cli.attempts._plans", planned)
    settings = [
        replace(OWN, replicate=of, budget=limit) for limit in (None, 2e9, 1e9) for of in (1, 2) if limit or of == 1
    ]
    assert list(attempts(settings, jobs)) == [(one.replicate, one.budget) for one in settings]
    assert len(asked) == parts
    assert sum(len(budgets) for _, budgets in asked) == len(settings)


def attempt(setting):
    try:
        return estimate(setting)
    except OverBudget as error:
        return error


def test_bytes_of_an_all_to_all():
    """Each of 16 ranks on two nodes sends a 16th to each other rank: to 7 inside its node and to 8 outside."""
    assert PROFILES["h100"].sent("alltoall", 16, 2) == pytest.approx((7 / 16, 8 / 16))
    assert PROFILES["h100"].sent("gather", 1) == (0, 0)


def test_kept_parameters_are_a_floor_of_memory(rows):
    floor = {row.placement.name: row.found.floor_bytes for row in rows}
    assert floor["FSDP, kept"] == floor["FSDP"] + 2 * LAYERS * DIM * DIM
    assert floor["HSDP"] == 8 * floor["replicate"] / 64  # 1/8 of parameters, gradients and moments
    assert all(row.found.floor_bytes <= row.found.peak_bytes for row in rows)


def test_auto_is_the_better_of_keeping_all_and_resharding():
    """With room and slow wires it sends what keeping all parameters sends; in less memory it is no slower than any."""
    slow = replace(OWN, hardware=replace(OWN.hardware, between=Wires(1e-6, 1e6), low_latency=None))
    room = {"budget": 1e9}
    plain, kept, auto = (estimate(replace(slow, reshard_after_forward=how, **room)) for how in (True, False, "auto"))
    assert auto.sent_bytes == kept.sent_bytes != plain.sent_bytes
    assert auto.step_s <= 1.001 * kept.step_s < plain.step_s
    for budget in (plain.peak_bytes, 0.8 * plain.peak_bytes):
        tight = replace(slow, budget=float(budget))
        plain, kept, auto = (estimate(replace(tight, reshard_after_forward=how)) for how in (True, False, "auto"))
        assert auto.peak_bytes <= budget
        assert kept.peak_bytes <= budget  # with copies of activations
        assert auto.step_s <= 1.0001 * min(plain.step_s, kept.step_s)


GB = 10**9
SECONDS_AND_PEAKS = {
    "FSDP": (9, 30), "FSDP, 8 in backward": (8, 35), "FSDP, auto": (7, None), "FSDP, kept": (6, 50), "HSDP": (5, 55),
    "HSDP, auto": (4.5, None), "HSDP, kept": (4, 70), "replicate": (3, 130),
}  # fmt: skip
FLOORS = {"FSDP": 2, "FSDP, 8 in backward": 2, "FSDP, kept": 18, "HSDP": 16, "HSDP, kept": 32, "replicate": 128}


@pytest.fixture(scope="module")
def by_formula(rows):
    """Plans that take no time: one that does not fit by itself takes longer the smaller the budget is."""
    one = rows[0].found
    names = {(row.placement.replicate, row.placement.reshard_after_forward): row.placement.name for row in rows}
    asked = []

    def planned(settings):
        for setting in settings:
            reshard = setting.reshard_after_forward
            name = names.get((setting.replicate, reshard)) or names[setting.replicate, False].replace("kept", "auto")
            asked.append((name, setting.budget and setting.budget / GB))
            seconds, peak = SECONDS_AND_PEAKS[name]
            if setting.budget is not None:
                if setting.budget < 15 * GB:
                    yield OverBudget("too little", 15 * GB)
                    continue
                seconds, peak = seconds + 1 / (setting.budget / GB), setting.budget / GB
            floor = FLOORS.get(name, 2) * GB
            graph = replace(one.graphs[0], step_s=seconds, peak_bytes=int(peak * GB), floor_bytes=floor)
            yield replace(one, graphs=(graph,), optimizer_s=0.0)

    return planned, asked


def test_the_quickest_that_fits(by_formula):
    """It fits, and a larger budget is never slower, though a plan of a smaller budget may be the quickest in it."""
    planned, asked = by_formula
    budgets = [float(size * GB) for size in (150, 80, 60, 40, 20, 10, 1)]
    found = compare(OWN, budgets, planned)
    chosen = [quickest(found, budget) for budget in budgets]
    assert chosen[-1] is None
    assert chosen[-2] is None  # all plans need 15 GB
    for row, budget in zip(chosen[:-2], budgets, strict=False):
        assert row.found.peak_bytes <= budget
    seconds = [row.step_s for row in chosen[:-2]]
    assert seconds == sorted(seconds)
    assert [row.placement.name for row in chosen[:-2]] == [
        "replicate",
        "HSDP, kept",
        "HSDP, kept",
        "HSDP, kept",
        "HSDP, auto",
    ]
    advice = advice_of(found, [80.0 * GB, 60.0 * GB, float(GB)])
    assert advice[0] == " the quickest in 80.0 GB: HSDP, kept (--replicate 2 --reshard-after-forward false)"
    assert advice[1].endswith("false --budget 60GB)")
    assert advice[2].endswith("no placement fits")
    tried = [name for name, budget in asked if budget == 60]
    assert tried == ["HSDP, kept", "HSDP, auto"]  # replicas need 128 GB, and the others fit without a budget
    assert ("FSDP, kept", 10) not in asked  # 18 GB are below no budget's plan


def test_placements_of_one_node_and_of_broken_nodes():
    assert [of.name for of in placements_of(replace(OWN, world_size=8))] == ["FSDP", "FSDP, kept", "replicate"]
    assert len(placements_of(replace(OWN, world_size=12))) == 3
    split = placements_of(replace(OWN, world_size=32, tensor_parallel=2))  # four neighbours with shards
    assert {of.name: of.replicate for of in split} == {
        "FSDP": 1, "FSDP, kept": 1, "FSDP, 4 in backward": 1, "HSDP": 4, "HSDP, kept": 4, "replicate": 16,
    }  # fmt: skip


def run(*words):
    return CliRunner().invoke(plan, [str(word) for word in words], catch_exceptions=False)


@pytest.mark.more
def test_the_command(tmp_path):
    """The table, the advice and the file agree, whether one process plans or two."""
    words = ("--model", OWN.model, "--inputs", OWN.inputs, "--world-size", RANKS, "--seq", 64, "--placements")
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    outputs = [run(*words, "--jobs", jobs, "--json", file) for jobs, file in enumerate(files, 1)]
    assert outputs[0].output == outputs[1].output
    assert "…" not in outputs[0].output
    data = json.loads(files[0].read_text())
    assert data == json.loads(files[1].read_text())
    assert [row["placement"] for row in data] == NAMES
    best = min(data, key=lambda row: row["step_s"])
    assert [row["placement"] for row in data if row["quickest_at"]] == [best["placement"]]
    assert best["quickest_at"] == [PROFILES["h100"].memory]
    assert f"the quickest in 80.0 GB: {best['placement']} (" in outputs[0].output


def test_an_error_comes_back_from_another_process():
    error = pickle.loads(pickle.dumps(OverBudget("needs 2,000 bytes", 2_000)))
    assert (str(error), error.least) == ("needs 2,000 bytes", 2_000)


@pytest.mark.parametrize(
    "more", [("--replicate", 2), ("--reshard-after-forward", "auto"), ("--batch", "1,2"), ("--fit", "batch")], ids=str
)
def test_only_placements_differ(more):
    done = run("--model", "tiny", "--placements", *more)
    assert done.exit_code == 2
    assert "--placements compares values of --replicate" in " ".join(done.output.split())
