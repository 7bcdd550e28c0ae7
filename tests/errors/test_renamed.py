"""Old public names work, and say which name is right."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import compiled_fsdp
from compiled_fsdp import Options, explain, fully_shard, measure_hardware, profile
from compiled_fsdp.base.renamed import FUNCTIONS
from tests.harness import compiled, distributed


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    with pytest.warns(FutureWarning, match=rf"compiled_fsdp\.{name} is called compiled_fsdp\.{FUNCTIONS[name]} now"):
        old = getattr(compiled_fsdp, name)
    assert old is getattr(compiled_fsdp, FUNCTIONS[name])


def test_options():
    with pytest.warns(FutureWarning, match="option 'optimizer_bytes' is called 'optimizer_bytes_per_element' now"):
        assert Options.parse({"optimizer_bytes": 4}) == Options(optimizer_bytes_per_element=4)
    with pytest.warns(FutureWarning, match="option 'bucket': 'none' is called 'parameter' now"):
        assert Options(bucket="none") == Options(bucket="parameter")


@distributed(world_size=2)
def test_methods_and_arguments(rank, world_size):
    model = fully_shard(torch.nn.Linear(4, 4))
    run = compiled(model)
    run(torch.ones(2, 4)).sum().backward()
    explained = explain(model)
    with pytest.warns(FutureWarning, match=r"Explanation\.json\(\) is called to_dict\(\) now"):
        assert explained.json() == explained.to_dict()
    with profile(model) as p:
        run(torch.ones(2, 4)).sum().backward()
    with pytest.warns(FutureWarning, match=r"StepProfile\.json\(\) is called to_dict\(\) now"):
        assert p.json() == p.to_dict()
    mesh = init_device_mesh("cpu", (world_size,))
    with pytest.warns(
        FutureWarning, match=r"measure_hardware\(again=\.\.\.\) is called measure_hardware\(force=\.\.\.\)"
    ):
        measure_hardware(mesh, again=False)
