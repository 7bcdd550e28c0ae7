"""Wrong modules, meshes and arguments: a named error, before anything has been changed."""

import contextlib

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from compiled_fsdp import FSDPModule, fully_shard
from tests.harness import Transformer
from tests.harness.untouched import refused

WORLD = 4
pytestmark = pytest.mark.usefixtures("rank_0_of_4")


# ---- modules ---------------------------------------------------------------------------------------------------------
def test_applied_twice():
    model = fully_shard(nn.Linear(4, 4))
    with refused(ValueError, "already applied to this Linear", model):
        fully_shard(model)


def test_not_a_module():
    with pytest.raises(ValueError, match=r"module must be an nn\.Module or a list of them, but got str"):
        fully_shard("model")
    with pytest.raises(ValueError, match="empty list"):
        fully_shard([])
    model = nn.Linear(4, 4)
    with refused(ValueError, "but got Parameter", model):
        fully_shard([model, model.weight])


@pytest.mark.parametrize("container", [nn.ModuleList, lambda layers: nn.ModuleDict({"a": layers[0]})])
def test_container_without_forward(container):
    model = container([nn.Linear(4, 4), nn.Linear(4, 4)])
    with refused(ValueError, "containers that do not implement forward", model):
        fully_shard(model)


def test_container_with_forward_is_taken():
    class Layers(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[0](x)

    assert isinstance(fully_shard(Layers([nn.Linear(4, 4)])), FSDPModule)


@pytest.mark.parametrize("whole", [True, False])
def test_module_of_torchs_fsdp2_inside(whole):
    model = Transformer()
    torch.distributed.fsdp.fully_shard(model if whole else model.blocks[1])
    with refused(ValueError, r"sharded by torch\.distributed\.fsdp\.fully_shard", model):
        fully_shard(model)
    if not whole:
        with pytest.raises(ValueError, match=r"'blocks\.1'"):
            fully_shard(model)


@pytest.mark.filterwarnings("ignore")
def test_replicated_module():
    from torch.distributed._composable.replicate import replicate

    model = nn.Sequential(nn.Linear(4, 4))
    with contextlib.suppress(Exception):  # its DDP does not go with a fake group; the mark is what counts
        replicate(model[0])
    with refused(ValueError, "replicate.*'0'", model):
        fully_shard(model)


# ---- parameters ------------------------------------------------------------------------------------------------------
class OneParameter(nn.Module):
    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.fine = nn.Parameter(torch.ones(4))
        self.odd = nn.Parameter(value)


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (torch.ones(()), ValueError, "scalar parameters. Change 'odd' of OneParameter to a 1D tensor"),
        (torch.ones(0, 3), ValueError, "'odd' of OneParameter has no elements"),
        (
            torch.ones(3, 2).t(),
            NotImplementedError,
            r"non-contiguous parameters.*'odd' of OneParameter.*\.contiguous\(\)",
        ),
        (
            torch.ones(4, dtype=torch.float64),
            ValueError,
            r"uniform.*dtype.*float32 \('fine' of OneParameter\), torch.float64 \('odd' of OneParameter\)",
        ),
    ],
)
def test_odd_parameter(value, error, match):
    model = OneParameter(value)
    with refused(error, match, model):
        fully_shard(model)
    fully_shard(model, ignored_params={model.odd})  # the way out
    assert isinstance(model.fine, DTensor)
    assert not isinstance(model.odd, DTensor)


def test_frozen_parameter_of_another_dtype_is_taken():
    model = OneParameter(torch.ones(4, dtype=torch.float64))
    model.odd.requires_grad_(False)
    fully_shard(model)
    assert model.odd.dtype == torch.float64


def test_layers_after_the_root():
    """The likeliest mistake; torch's own FSDP2 says "Invariant encountered"."""
    model = fully_shard(Transformer())
    with refused(ValueError, "is already part of the unit of Transformer.*: shard layers before the root", model):
        fully_shard(model.blocks[0])
    with refused(ValueError, "shard layers before the root", model):
        fully_shard([model.blocks[0], model.blocks[1]])


def test_tied_to_a_sharded_layer_afterwards():
    """As ``tie_weights()`` of other libraries may do it: the layers were sharded in the right order."""
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    fully_shard(model[0])
    model[1].weight = model[0].weight
    with pytest.raises(ValueError, match=r"'1\.weight' of Sequential is shared with 'weight', of another unit"):
        fully_shard(model)


def test_tied_across_units():
    model = Transformer(ties=True)
    fully_shard(model.embedding)
    with refused(
        ValueError,
        r"'weight' of Linear is shared with 'weight', of another unit.*fully_shard\(\[module_a, module_b\]\)",
        model,
    ):
        fully_shard(model.head)
    with refused(ValueError, "is shared", model):
        fully_shard(model)
    model = Transformer(ties=True)
    fully_shard([model.embedding, model.head])
    fully_shard(model)
    assert model.head.weight is model.embedding.weight


def test_dtensor_parameter_on_a_mesh_that_has_nothing_to_do_with_ours():
    mesh = init_device_mesh("cpu", (WORLD,))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()], run_check=False))
    with refused(ValueError, "'weight' of Linear is a DTensor on mesh .* which cannot be joined with mesh=", model):
        fully_shard(model)


@pytest.mark.parametrize("how", ["root", "policy", "list"])
def test_errors_name_the_whole_path(how):
    """From the module that the call was given, with a policy too, which shards the inner module."""
    model = Transformer()
    model.blocks[1].up.odd = nn.Parameter(torch.ones(()))
    policy = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})} if how == "policy" else {}
    given = [model.embedding, model.blocks[0], model.blocks[1]] if how == "list" else model
    whole = (
        rf"'up\.odd' of {type(model.blocks[1]).__name__}" if how == "list" else r"'blocks\.1\.up\.odd' of Transformer"
    )
    with refused(ValueError, f"scalar parameters. Change {whole} to a 1D tensor", model):
        fully_shard(given, **policy)


def test_ways_out_of_odd_parameters():
    """As the errors say them."""
    model = OneParameter(torch.ones(3, 2).t())
    model.odd.data = model.odd.data.contiguous()
    assert isinstance(fully_shard(model).odd, DTensor)


# ---- arguments -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("placement", "error", "match"),
    [
        ("rows", ValueError, "should return a Shard or None, but for 'weight' of Linear it returned 'rows'"),
        (0, ValueError, "it returned 0"),
        (Replicate(), ValueError, "it returned Replicate"),
        (Shard(2), ValueError, r"2\) is invalid for 'weight' of Linear of shape \(6, 5\)"),
        (Shard(-3), ValueError, "is invalid for 'weight' of Linear"),
        (
            Shard(1),
            NotImplementedError,
            r"uneven sharding on dim 1 is not supported: 'weight' of Linear has size \(6, 5\)",
        ),
        (Shard(-1), NotImplementedError, "uneven sharding on dim 1"),
    ],
)
def test_placement(placement, error, match):
    model = nn.Linear(5, 6, bias=False)
    with refused(error, match, model):
        fully_shard(model, shard_placement_fn=lambda param: placement)


def test_placement_on_another_mesh():
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip("torch 2.13 and later")
    result = common.ShardPlacementResult(Shard(0), None)
    model = nn.Linear(4, 6)
    with refused(ValueError, "mesh_info that it returned for 'weight' of Linear has to be a FSDPMeshInfo", model):
        fully_shard(model, shard_placement_fn=lambda param: result)


@pytest.mark.parametrize("placement", [None, Shard(0), Shard(-2)])
def test_placement_by_rows_is_taken(placement):
    model = fully_shard(nn.Linear(4, 6, bias=False), shard_placement_fn=lambda param: placement)
    assert model.weight.placements == (Shard(0),)


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        ("yes", ValueError, "reshard_after_forward should be a bool, an int or None, but got str"),
        (1.0, ValueError, "but got float"),
        (3, ValueError, "reshard_after_forward as an int should be a factor of 4, not 3"),
        (0, ValueError, "a factor of 4, not 0"),
        (-2, ValueError, "a factor of 4, not -2"),
        (8, ValueError, "a factor of 4, not 8"),
    ],
)
def test_reshard_after_forward(value, error, match):
    model = nn.Linear(4, 4)
    with refused(error, match, model):
        fully_shard(model, reshard_after_forward=value)


@pytest.mark.parametrize(("value", "keep"), [(1, True), (4, False)])
def test_reshard_after_forward_to_one_rank_or_all(value, keep):
    assert fully_shard(nn.Linear(4, 4), reshard_after_forward=value)._fsdp_unit.keep_for_backward == keep


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"dp_mesh_dims": ("dp",)}, ValueError, "mesh must be a torch.distributed.DeviceMesh, but got NoneType"),
        ({"offload_policy": "cpu"}, ValueError, "offload_policy must be OffloadPolicy.* but got str"),
        ({"mp_policy": torch.bfloat16}, ValueError, "mp_policy must be a MixedPrecisionPolicy"),
        (
            {"mp_policy": MixedPrecisionPolicy(torch.int8)},
            ValueError,
            "mp_policy: param_dtype must be a floating-point",
        ),
    ],
)
def test_options(options, error, match):
    model = nn.Linear(4, 4)
    with refused(error, match, model):
        fully_shard(model, **options)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned here")
def test_pinned_memory_without_an_accelerator():
    model = nn.Linear(4, 4)
    with refused(ValueError, r"pin_memory=True.*no accelerator.*CPUOffloadPolicy\(pin_memory=False\)", model):
        fully_shard(model, offload_policy=CPUOffloadPolicy())


def test_methods_that_can_be_called():
    """Before the first forward; tests/clients/test_fsdp2_surface.py has those without a meaning here."""
    model = fully_shard(nn.Linear(4, 4))
    for name, arguments in {
        "set_requires_gradient_sync": (True,), "set_requires_all_reduce": (True,),
        "set_reshard_after_backward": (True,), "set_is_last_backward": (True,), "set_unshard_in_backward": (False,),
        "set_gradient_divide_factor": (2.0,), "set_reduce_scatter_divide_factor": (2.0,),
        "set_force_sum_reduction_for_comms": (True,), "finalize_backward": (),
        "set_manual_backward_finalization": (True,), "set_post_optim_event": (None,), "reset_iter_state": (),
    }.items():  # fmt: skip
        getattr(model, name)(*arguments)
    with pytest.raises(ValueError, match="factor must be a positive number, but got 0"):
        model.set_gradient_divide_factor(0)


def test_set_reshard_after_forward_takes_a_bool():
    model = fully_shard(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="should be a bool, got <class 'int'>"):
        model.set_reshard_after_forward(2)


# ---- meshes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mesh", "error", "match"),
    [
        (lambda: init_device_mesh("cpu", (1, 2, 2)), ValueError, "expects a 1D or 2D DeviceMesh"),
        (lambda: init_device_mesh("cpu", (2, 2)), ValueError, "needs mesh_dim_names"),
        (lambda: DeviceMesh("cpu", [1, 2]), ValueError, "does not contain rank 0"),
        (lambda: "cpu", ValueError, "mesh must be a torch.distributed.DeviceMesh, but got str"),
        (lambda: 4, ValueError, "but got int"),
        (lambda: DeviceMesh("xpu", [0, 1, 2, 3]), RuntimeError, "the mesh is on 'xpu', but this process has"),
    ],
)
def test_mesh(mesh, error, match):
    mesh = mesh()
    model = nn.Linear(4, 4)
    with refused(error, match, model):
        fully_shard(model, mesh=mesh)


def test_no_process_group():
    torch.distributed.destroy_process_group()
    try:
        model = nn.Linear(4, 4)
        with refused(RuntimeError, r"no process group. Call torch\.distributed\.init_process_group\(\) first", model):
            fully_shard(model)
    finally:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
