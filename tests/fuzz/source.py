"""Write a program as Python text. The fuzzer runs this same text, so that a finding's script is the code that ran.

The text defines `train(way, note)`. `way` is "ours" (compiled_fsdp), "fsdp2", "plain" (unsharded, with gradients
averaged after backward), "nudged" (plain, with parameters that differ in their last bit), "torch" (plain, compiled by
torch's own backend) or "partitioned" (plain, compiled by torch's backend that recomputes in backward to save memory, as
compiled_fsdp does). `note(name, tensor)` keeps a value for the comparison.
"""

from __future__ import annotations

from tests.fuzz.program import Layer, Program, Step
from tests.fuzz.source_model import Lines, add_model

IMPORTS = """import contextlib, copy, enum, os, tempfile
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp, torch.nn as nn, torch.nn.functional as F
from torch._dynamo.compiled_autograd import _enable
from torch.distributed._composable.replicate_with_fsdp import replicate as fsdp2_replicate
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard as fsdp2
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from compiled_fsdp import compiled_autograd, explain, fully_shard as ours, replicate as our_replicate
from compiled_fsdp.optim.compiled import CompiledUpdate
from compiled_fsdp.optim.norm import norm_of_gradients
from compiled_fsdp.training.train_step import Update
from tests.harness.budgets import tight_for
from tests.harness.short_layers import trace_short_layers_once
from tests.harness.symm_mem import symm_mem_from_now_on
"""

DIVISOR = 3.0
WAYS = ("ours", "fsdp2", "plain", "nudged", "torch", "partitioned")
COMPILED = ("ours", "torch", "partitioned")
"""Ways that compile, in all modes but "eager"."""

TRAIN = "def train(way, note):"
"""The line between the text of the model and the text of the training."""

SHARDED_ALONE = ("set_", "reshard(", "unshard(")
"""Parts of the toggles that a plain model does not have."""


def source_of(program: Program, ways: tuple[str, ...] = WAYS) -> str:
    """Return the text of the classes and of `train`, for the given ways."""
    lines = Lines(ways)
    add_model(lines, program)
    _train(lines, program)
    return "\n".join(lines.text) + "\n"


# ---- sharding and running --------------------------------------------------------------------------------------------
_GROUPED = ("model.layers[0]", "model.layers[1]")
MESHES = {"HSDP 2": "(2, world // 2)", "HSDP all": "(world, 1)", "HSDP none": "(1, world)", "TP": "(2, 2)"}


def _train(lines: Lines, program: Program) -> None:
    lines.add(TRAIN)
    lines.depth = 1
    who = "dist.get_rank() // 2" if program.mesh == "TP" else "dist.get_rank()"
    sharded = "" if lines.all_sharded else '; sharded = way in ("ours", "fsdp2")'
    lines.add(f"torch.manual_seed(0); who, world, model = {who}, {program.world}, Model(){sharded}")
    for path, layer in _paths(program.layers, "model.layers"):
        if layer.dtype:
            lines.add(f"{path}.to(torch.{layer.dtype})")
    if "nudged" in lines.ways:
        lines.add(
            '[p.data.mul_(1 + 2**-23) for p in model.parameters() if way == "nudged" and p.dtype == torch.float32]'
        )
    if program.mesh in MESHES:
        names = ("dp", "tp") if program.mesh == "TP" else ("replicate", "shard")
        lines.add(f'mesh = init_device_mesh("cpu", {MESHES[program.mesh]}, mesh_dim_names={names})')
    for path, layer in _paths(program.layers, "model.layers"):
        if layer.frozen:
            lines.add(
                f"for p in list({path}.parameters()){'[:1]' if layer.frozen == 'first' else ''}:\n"
                "    p.requires_grad_(False)"
            )
    if not lines.all_sharded:
        lines.add("if sharded:")
    lines.depth += not lines.all_sharded
    _shard(lines, program)
    lines.depth = 1
    _compile(lines, program)
    if program.in_backward:
        _step_in_backward(lines, program)
    else:
        lines.add(f"optimizer = {program.optimizer.replace('params', 'model.parameters()')}")
        if program.compiles_update:
            lines.add('compiled_update = CompiledUpdate(optimizer, "aot_eager") if way == "ours" else None')
    if any(step.kind == "load" for step in program.steps):
        lines.add("saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))")
    keeps = False
    for number, step in enumerate(program.steps):
        keeps = step.before.endswith("_after_backward(False)") or (keeps and "_after_backward" not in step.before)
        _step(lines, program, number, step, keeps)
    lines.add('look(note, "end", model, None)')
    if program.in_backward:
        lines.add(
            'for name, p in model.named_parameters():\n    note(f"end: steps of {name}", torch.tensor(noted.get(p, 0)))'
        )
    lines.depth = 0


def _paths(layers: tuple[Layer, ...], container: str) -> list[tuple[str, Layer]]:
    """Return all layers with their paths in the model, inner layers first."""
    found = []
    for i, layer in enumerate(layers):
        found += _paths(layer.inner, f"{container}[{i}].before")
        found.append((f"{container}[{i}]", layer))
    return found


def _shard(lines: Lines, program: Program) -> None:
    if program.mesh == "TP":
        for i, layer in enumerate(program.layers):
            if layer.kind == "mlp" and layer.hidden % 2 == 0:
                lines.add(
                    f'parallelize_module(model.layers[{i}], mesh["tp"], '
                    '{"up": ColwiseParallel(), "down": RowwiseParallel()})'
                )
    replicates = program.mesh == "replicate"
    arguments = [] if replicates else [f"reshard_after_forward={program.reshard}"]
    if program.mesh in MESHES:
        arguments.append('mesh=mesh["dp"]' if program.mesh == "TP" else "mesh=mesh")
    if program.policy:
        arguments.append(f"mp_policy=MixedPrecisionPolicy({program.policy})")
    if program.offload:
        arguments.append("offload_policy=CPUOffloadPolicy(pin_memory=False)")
    if program.columns:
        lines.add("columns = lambda p: Shard(p.dim() - 1) if p.dim() > 1 and p.shape[-1] % world == 0 else None")
        arguments.append("shard_placement_fn=columns")
    ours, theirs = ("our_replicate", "fsdp2_replicate") if replicates else ("ours", "fsdp2")
    each = f'{{"ours": {ours}, "fsdp2": {theirs}}}[way]' if "fsdp2" in lines.ways else ours
    lines.add(f"shard, options = {each}, dict({', '.join(arguments)})")
    for path, layer in _paths(program.layers, "model.layers"):
        group = program.grouped and path in _GROUPED
        if group and path == "model.layers[1]":
            lines.add("shard([model.layers[0], model.layers[1]], **options)")
        elif layer.unit and not group:
            lines.add(f"shard({path}, **options)")
    if program.root_policy:
        lines.add(f'options["mp_policy"] = MixedPrecisionPolicy({program.root_policy})')
    lines.add("shard(model, **options)")
    for call in program.sharding:
        lines.add(call)


def _own_of_divided(program: Program) -> str:
    """Return code for the parameters of the unit that has its own divisor; "" if no unit has one."""
    call = next((call for call in program.sharding if "divide_factor" in call), "")
    unit = call.partition(".set_force")[0]
    paths = _paths(program.layers, "model.layers")
    units = [path for path, layer in paths if layer.unit or (program.grouped and path in _GROUPED)]
    inner = [path for path in units if path != unit and (unit == "model" or path.startswith(f"{unit}."))]
    others = f" if all(p is not q for m in ({', '.join(inner)},) for q in m.parameters())" if inner else ""
    return f"[p for p in {unit}.parameters(){others}]" if call else ""


def _compile(lines: Lines, program: Program) -> None:
    if program.mode == "eager":
        lines.add("run = model")
        return
    inductor = program.mode == "inductor"
    backend, torchs = "compiled_fsdp", "inductor" if inductor else "aot_eager"
    options = dict(program.options)
    if not inductor:
        options["codegen"] = '"aot_eager"'
    given = "{" + ", ".join(f'"{key}": {value}' for key, value in options.items()) + "}"
    arguments = f'backend="{backend}", options={given}'
    if "tight" in options.get("memory_budget", ""):
        largest = max(size for step in program.steps for size in step.sizes)
        others = "".join(f", {key}={value}" for key, value in options.items() if key != "memory_budget")
        budgets = f"tight_for(model, {_batch(program, 0, str(largest))}{others})"
        lines.add(f'tight = {budgets} if way == "ours" else lambda share: None')
    if "trace_equal_layers_once" in options:
        lines.add("trace_short_layers_once()")
    if "transport" in options:
        lines.add("symm_mem_from_now_on()  # torch has kernels for GPUs only")
    if program.mode == "torch's aot_eager":
        arguments = 'backend="aot_eager"'
    dynamic = ", dynamic=True" if program.mode == "dynamic" else ""
    ways = {"ours": f"dict({arguments}{dynamic})", "torch": f'dict(backend="{torchs}"{dynamic})'}
    ways["partitioned"] = f'dict(backend="aot_eager_decomp_partition"{dynamic})'
    if "torch" not in lines.ways and program.mode != "per block":
        lines.add(f'run = torch.compile(model, {arguments}{dynamic}) if way == "ours" else model')
        return
    given = ", ".join(f"{way}={arguments}" for way, arguments in ways.items() if way in lines.ways)
    lines.add(f"ways = dict({given})")
    if program.mode == "per block":
        lines.add("run = model\nfor layer in model.layers if way in ways else ():\n    layer.compile(**ways[way])")
    else:
        lines.add("run = torch.compile(model, **ways[way]) if way in ways else model")


def _step_in_backward(lines: Lines, program: Program) -> None:
    optimizer = program.optimizer.replace("params", "[p]")
    lines.add("params = [p for p in model.parameters() if p.requires_grad]")
    lines.add(f"noted, optimizers = {{}}, {{p: {optimizer} for p in params}}")
    lines.add(
        "def step(p):\n    noted[p] = noted.get(p, 0) + 1\n    optimizers[p].step()\n    optimizers[p].zero_grad()"
    )
    lines.add(
        f"for p in params{'' if lines.all_sharded else ' if sharded else ()'}:\n"
        "    p.register_post_accumulate_grad_hook(step)"
    )


# ---- steps -----------------------------------------------------------------------------------------------------------
def _step(lines: Lines, program: Program, number: int, step: Step, keeps: bool) -> None:
    sizes = f"{step.sizes[: program.world]}[who]"
    if step.before:
        alone = any(name in step.before for name in SHARDED_ALONE)
        (lines.add_sharded if alone else lines.add)(step.before)
    if step.odd >= 0:
        lines.add(f"model.odd = who == {step.odd}")
    if step.preview:
        lines.add(f'if way == "ours":\n    explain(run, ({_batch(program, 1000 * number, sizes)},))')
    if step.kind in ("evaluate", "inference"):
        how = "torch.no_grad()" if step.kind == "evaluate" else "torch.inference_mode()"
        output = _output(program, f"run({_batch(program, 1000 * number, sizes)})")
        lines.add(f'model.eval()\nwith {how}:\n    note("step {number}: output", {output})\nmodel.train()')
    elif step.kind == "save":
        lines.add("saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))")
    elif step.kind == "load":
        lines.add("model.load_state_dict(saved[0])\noptimizer.load_state_dict(copy.deepcopy(saved[1]))")
    elif step.kind == "checkpoint":
        lines.add(_CHECKPOINT)  # the unsharded model, too: torch runs an empty step so that there are states to save
    else:
        _train_step(lines, program, number, step, sizes, keeps)
    if step.odd >= 0:
        lines.add("model.odd = False")


# makes buffers equal first: a checkpoint has one rank's buffers, and with shards it is another rank than without
_CHECKPOINT = """[dist.broadcast(buffer, 0) for buffer in model.buffers()]
folder = f"{tempfile.gettempdir()}/fuzz-{os.getppid()}-{way}"
states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.save(states, checkpoint_id=folder)
with torch.no_grad():
    [p.zero_() for p in model.parameters()]
states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
dcp.load(states, checkpoint_id=folder)
set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])"""


def _output(program: Program, call: str) -> str:
    return call + {"tensor": "", "dict": '["y"]'}.get(program.output, "[0]")


def _batch(program: Program, number: object, sizes: str) -> str:
    generator = f"generator=torch.Generator().manual_seed({number} + who)"
    if program.tokens:
        return f"torch.randint(11, ({sizes}, 4), {generator})"
    return f"torch.randn({sizes}, 4, 8, {generator})"


def _loss(program: Program, number: str, sizes: str) -> str:
    return _output(program, f"run({_batch(program, number, sizes)})") + _MEAN


_MEAN = ".float().square().mean()"


def _losses(program: Program, step: Step, number: str, sizes: str) -> str:
    """Return code for the loss, or for both losses if the model's second output is used."""
    if not step.losses:
        return f"loss = {_loss(program, number, sizes)}"
    losses = f"out{_MEAN} for out in run({_batch(program, number, sizes)})"
    return f"loss = sum({losses})" if step.losses == "sum" else f"loss, other = ({losses})"


def _train_step(lines: Lines, program: Program, number: int, step: Step, sizes: str, keeps: bool) -> None:
    """Write a training step. `keeps`: whether parameters stay unsharded after backward.

    Then FSDP2 would go on with full parameters that the optimizer's step has not updated, and compiled_fsdp drops them
    (docs/differences.md). So FSDP2's are resharded before the optimizer's step.
    """
    if step.fails:
        _failing(lines, program, number, step, sizes)
    first = f"{1000 * number}"
    if step.microbatches > 1:
        lines.add(f"for micro in range({step.microbatches}):")
        lines.depth += 1
        if step.sync != "each":
            name = "set_requires_gradient_sync" if step.sync == "last" else "set_requires_all_reduce"
            last = f"micro == {step.microbatches - 1}"
            if step.sync == "node":
                lines.add_sharded(f"model.set_reshard_after_backward(True if {last} else 2)")
            lines.add_sharded(f"model.{name}({last})")
        first = f"{1000 * number} + 100 * micro"
    lines.add(_losses(program, step, first, sizes))
    if step.forwards > 1:
        lines.add(f"loss = loss + {_loss(program, first + ' + 50', sizes)}")
    if step.own:
        own = "torch.autograd.grad(loss, model.head.weight, retain_graph=True)[0]"
        lines.add(f'note("step {number}: own gradient of the head", {own})')
    again = "loss.backward(retain_graph=True), " if step.again else ""
    backward = {"two": "loss.backward(retain_graph=True), other.backward()",
                "together": "torch.autograd.backward([loss, other])"}  # fmt: skip
    _backward(lines, program, again + backward.get(step.losses, "loss.backward()"))
    if step.microbatches > 1:
        lines.depth -= 1
    if not lines.all_sharded:
        lines.add(
            "[dist.all_reduce(p.grad, dist.ReduceOp.AVG)"
            " for p in model.parameters() if not sharded and p.grad is not None]"
        )
        if own := _own_of_divided(program):
            count = 2 if program.mesh == "TP" else program.world
            lines.add(f"[p.grad.mul_({count} / {DIVISOR}) for p in {own} if not sharded and p.grad is not None]")
    if keeps and "fsdp2" in lines.ways:
        lines.add('[m.reshard() for m in model.modules() if way == "fsdp2" and hasattr(m, "reshard")]')
    if program.in_backward and not lines.all_sharded:
        lines.add("[step(p) for p in params if not sharded and p.grad is not None]")
    if program.on_shards and not program.in_backward:
        _update(lines, program, number, step)
        return
    if step.clip and not program.in_backward:
        lines.add(f'note("step {number}: norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))')
    lines.add(f'look(note, "step {number}", model, loss)')
    if not program.in_backward:
        lines.add(f"optimizer.step(), optimizer.zero_grad({'set_to_none=False' if step.zero else ''})")


def _update(lines: Lines, program: Program, number: int, step: Step) -> None:
    """Write clipping and update as in a `TrainStep`."""
    lines.add(f'look(note, "step {number}", model, loss)')
    lines.add('update = Update(optimizer) if way == "ours" else optimizer')
    if program.compiles_update:
        lines.add("update.compiled = compiled_update")
    if step.clip:
        ours = "norm_of_gradients(p.grad for p in model.parameters() if p.grad is not None)"
        theirs = "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"
        lines.add(f'norm = {ours} if way == "ours" else {theirs}\nnote("step {number}: norm", norm)')
        lines.add("update.clip = 0.1, norm")
    lines.add(f"update.step(), optimizer.zero_grad({'set_to_none=False' if step.zero else ''})")


def _backward(lines: Lines, program: Program, backward: str) -> None:
    if program.mode != "compiled autograd":
        lines.add(backward)
        return
    given = "".join(f", {key}={value}" for key, value in program.options)
    contexts = f'compiled_autograd(codegen="aot_eager"{given}) if way == "ours" else '
    if "torch" in lines.ways:
        contexts += '_enable(torch.compile(backend="aot_eager")) if way in ("torch", "partitioned") else '
    lines.add(f"with {contexts}contextlib.nullcontext():\n    {backward}")


def _failing(lines: Lines, program: Program, number: int, step: Step, sizes: str) -> None:
    loss = _loss(program, f"{1000 * number} + 70", sizes)
    if step.fails == "loss":
        lines.add(loss)
        return
    flag = "model.fails" if step.fails == "forward" else "Fail.told"
    lines.add(f"{flag} = True\ntry:")
    lines.depth += 1
    _backward(lines, program, f"({loss}).backward()")
    lines.depth -= 1
    lines.add(f"except ArithmeticError:\n    note('step {number}: failed', torch.ones(()))")
    lines.add(f"{flag} = False\nmodel.zero_grad()")
    lines.add('if hasattr(model, "reset_iter_state"):\n    model.reset_iter_state()')
