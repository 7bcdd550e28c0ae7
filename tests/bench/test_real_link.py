"""``bench.real_link``: intervals, settings, models, one system's account; and the link itself where there is root."""

import contextlib
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from bench import link, link_models, real_link
from bench.link_cases import BUDGETS, CODECS, EXTENSIONS, LAYOUTS, STEPS, UNSHARDED
from bench.medians import interval_of_median


@pytest.mark.parametrize(
    ("n", "low", "high", "coverage"),
    [(3, 0, 2, 0.75), (5, 0, 4, 0.9375), (6, 0, 5, 0.96875), (10, 1, 8, 0.978515625), (15, 3, 11, 0.96484375)],
)
def test_interval_of_a_median_is_the_one_of_the_textbooks(n, low, high, coverage):
    assert interval_of_median([float(i) for i in reversed(range(n))]) == (low, high, pytest.approx(coverage))


def test_one_value_has_no_interval():
    assert interval_of_median([2.0]) == (2.0, 2.0, 0.0)


def test_ratios_are_of_the_same_round():
    def record(*steps):
        return {
            "step_s": steps, "cpu_s": steps, "forward_s": steps, "backward_s": steps, "wire_bytes": [0] * len(steps),
            "peak_bytes": 0, "inside_bytes": [0] * len(steps), "reported_bytes": [0] * len(steps),
            "first_step_s": 9.0, "loss": 1.0,
        }  # fmt: skip

    system = SimpleNamespace(sharded=True, reshard=True, compiles=True, trains=True)
    records = {"fsdp2": record(1.0, 4.0, 2.0), "ddp": record(2.0, 2.0, 3.0)}
    row = real_link.summary(real_link.CASES["mlp"][0], records, dict.fromkeys(records, system))[1]
    assert (row["ratio_to_fsdp2"], row["ratio_ci"]) == (1.5, [0.5, 2.0])  # 3/2, 2/4, 2/1
    assert (row["step_s"], row["compile_s"]) == (2.0, 7.0)


def test_without_root_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(link.os, "geteuid", lambda: 1000)
    monkeypatch.setattr("sys.argv", ["real_link"])
    assert real_link.main() == 2
    assert "need root" in capsys.readouterr().err


def test_a_failed_command_removes_what_was_made(monkeypatch):
    ran = []

    def run(command, **_):
        ran.append(list(command))
        return SimpleNamespace(
            returncode=int(command[:2] == ["ip", "link"] or "link" in command), stderr="no", stdout=""
        )

    monkeypatch.setattr(subprocess, "run", run)
    network = link.Link("1gbit")
    with pytest.raises(RuntimeError, match="failed: no"):
        network.__enter__()
    assert [command[2:] for command in ran if "del" in command] == [["del", name] for name in network.namespaces]


def test_systems_are_named_alike():
    from bench.link_systems import SYSTEMS

    chosen = (*CODECS, *EXTENSIONS, *real_link.ACCUMULATING, *real_link.ON_MACHINES[1:], *BUDGETS, *UNSHARDED, *STEPS)
    assert tuple(SYSTEMS) == (*real_link.NAMES, *chosen)


@pytest.mark.parametrize("model", link_models.MODELS)
@pytest.mark.parametrize("broken", ["after", "inside"])
def test_a_broken_model_computes_the_same(model, broken, monkeypatch):
    """In code of its own: Dynamo gives up a function that breaks in a loop for all who call it."""
    kind = link_models.MODELS[model]
    for name, small in {"WIDTH": 8, "DIM": 64, "LAYERS": 2, "VOCABULARY": 300}.items():
        if hasattr(kind, name):
            monkeypatch.setattr(kind, name, small)
    x = kind.batch(128, torch.Generator().manual_seed(0))
    whole, other = kind(), kind(broken)
    losses = [kind.loss(one(x), x) for one in (whole, other)]
    assert torch.equal(*losses)
    assert type(other).forward.__code__ is not type(whole).forward.__code__
    units = [module for modules, _ in whole.units() for module in modules]
    parameters = [p for module in (*units, *whole.left()) for p in module.parameters()]
    assert {*map(id, parameters)} == {*map(id, whole.parameters())}
    assert len(parameters) == len(list(whole.parameters()))


def test_ranks_are_numbered_machine_by_machine():
    network = link.Link("1gbit", ranks_per_machine=2)
    assert [network.command(rank, ["x"])[3] for rank in range(4)] == [network.namespaces[side] for side in (0, 0, 1, 1)]
    environments = [network.environment(rank, 1) for rank in range(4)]
    assert [e["LOCAL_RANK"] for e in environments] == ["0", "1", "0", "1"]
    assert {(e["WORLD_SIZE"], e["LOCAL_WORLD_SIZE"]) for e in environments} == {("4", "2")}
    for layout in LAYOUTS.values():
        assert math.prod(layout.mesh) == layout.ranks


def test_what_knows_one_group_only_is_left_out(capsys):
    assert "functional" in real_link.parse(["--layout", "four"]).systems
    assert "functional" not in real_link.parse(["--layout", "hsdp"]).systems
    with pytest.raises(SystemExit):
        real_link.parse(["--layout", "reshard", "--systems", "compiled_fsdp,floor_wire"])
    assert "floor_wire: not with --layout reshard" in capsys.readouterr().err


@pytest.mark.more
@pytest.mark.skipif(link.why_not() is not None, reason=f"no link can be made here: {link.why_not()}")
def test_bytes_inside_of_a_machine_do_not_pass_the_link():
    """Of two ranks in a namespace, which know each other by the link's address."""
    try:
        network = link.Link("1gbit", ranks_per_machine=2).__enter__()
    except RuntimeError as error:
        pytest.skip(f"no link can be made here: {error}")
    with contextlib.ExitStack() as stack:
        stack.push(network.__exit__)
        ranks = [
            subprocess.Popen(
                network.command(rank, [sys.executable, "-c", COUNTING]),
                env={**os.environ, **network.environment(rank, 29500), "PYTHONPATH": str(real_link.ROOT)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(4)
        ]
        inside, between = (json.loads(rank.communicate(timeout=120)[0]) for rank in ranks[::2])
        assert [rank.wait(60) for rank in ranks] == [0] * 4
    assert inside["link"] < 1e5 < 2 * inside["size"] <= inside["lo"]
    assert between["rank"] == 2
    assert between["lo"] < 1e5 < 2 * between["size"] <= between["link"]


COUNTING = """
import json, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from bench.link import sent_bytes

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "inside"))
piece = torch.ones(1 << 18)
for name in ("inside", "between"):  # of the first machine's ranks one reports the first, of the second's the other
    dist.barrier()
    before = {device: sent_bytes(device) for device in ("lo", "link0")}
    dist.barrier()  # or the other rank may have sent what is counted already
    dist.all_gather_into_tensor(torch.empty(2 << 18), piece, group=mesh.get_group(name))
    dist.barrier()
    if dist.get_rank() == {"inside": 0, "between": 2}[name]:
        sent = {device: sent_bytes(device) - before[device] for device in before}
        print(json.dumps({"rank": dist.get_rank(), "lo": sent["lo"], "link": sent["link0"], "size": 4 << 18}))
dist.barrier()
"""
