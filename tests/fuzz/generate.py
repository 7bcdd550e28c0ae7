"""Draw random programs, each from one number."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import torch

from tests.fuzz.layers import ALONE, IN_CHAINS, KINDS, NO_GRADIENTS, TOGGLES, WRITE_TO_BUFFERS
from tests.fuzz.program import MODES, OTHERS, Layer, Program, Step
from tests.fuzz.source import DIVISOR

OPTIMIZERS = (
    "torch.optim.SGD(params, lr=0.1)",
    "torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False)",
    "torch.optim.AdamW(params, lr=0.01, eps=0.01)",
    "torch.optim.AdamW(params, lr=0.01, eps=0.01, foreach=False)",
    "torch.optim.AdamW(params, lr=0.01, eps=0.01, fused=True)",
    "torch.optim.Adagrad(params, lr=0.01, eps=0.01)",
)
"""The eps is large, so that the optimizer does not amplify rounding in a gradient near zero."""

POLICIES = (
    "param_dtype=torch.bfloat16, reduce_dtype=torch.float32",
    "param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16",
    "param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True",
    "param_dtype=torch.float16, reduce_dtype=torch.float32",
    "reduce_dtype=torch.bfloat16",
)
"""`reduce_dtype` is always given, because without it FSDP2 differs between versions of torch."""

CHECKPOINTS = ("plain", "plain", "reentrant")

OPTIONS = {
    "bucket": ('"auto"', '"module"', '"parameter"', "0.0005", '[["*0*"], ["*weight"]]'),
    "overlap": ("True", "False"),
    "prefetch": ('"before"', '"after"'),
    "reshard_after_forward": ('"as sharded"', '"auto"'),
    "verify": ('"plan"', '"full"'),
    "recheck_prefetched": ("True", "False"),
    "memory_budget": ("10**9", '"1GB"', "120"),
    "hardware": ('"h100"', '"H100"'),
    "kernels": ("True",),
    "collectives_at_world_size_1": ("True",),
    "gathers_ahead": ("True", "True", "False"),
}


BUDGETS = ("tight(0)", "tight(0.05)", "tight(0.2)", "tight(0.5)", "tight(0.9)")
"""Memory budgets (`tests/harness/budgets.py`) that most programs keep by computing again, or by copies to host memory.
"""


def generate(
    seed: int,
    modes: Sequence[str] = MODES,
    scripts: int = 1,
    ranks_differ: float = 0.1,
    budgets: float = 0.2,
    equal_layers: float = 0.2,
) -> Program:
    """Return the program of a seed. Consecutive seeds take the `modes` in turn.

    Args:
        seed: any number.
        modes: some of MODES.
        scripts: how many consecutive seeds have the same model, sharded and run in the same way.
        ranks_differ: the share of models for which one rank runs other code in some steps.
        budgets: the share of models that have a small memory budget, of those that compiled_fsdp plans.
        equal_layers: the share of models with a chain of equal layers that are traced once, of those that are one
            graph without symbolic sizes.
    """
    number = seed // scripts
    mode = modes[number % len(modes)]
    program = _Draw(str(number), mode).program()
    program = _Draw(f"equal layers of {number}", mode).equal_layers(program, equal_layers)
    program = _Draw(f"transport of {number}", mode).transport(program)
    program = _Draw(f"budget of {number}", mode).budget(program, budgets)
    program = _Draw(f"ranks of {number}", mode).other(program, ranks_differ)
    if scripts > 1:
        program = _Draw(f"script {seed}", mode).script(program)
    program = _Draw(f"odd ranks of {seed}", mode).odd_ranks(program)
    program = _Draw(f"update of {seed}", mode).update(program)
    return dataclasses.replace(program, seed=seed)


class _Draw:
    """The random choices of one program."""

    def __init__(self, seed: str, mode: str) -> None:
        self.mode = mode
        self.random = random.Random(f"{seed} {mode}")

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def program(self) -> Program:
        pick = self.random.choice
        world = pick((2, 2, 2, 3, 4))
        meshes = {
            2: ("1-D", "1-D", "1-D", "HSDP all", "HSDP none", "replicate"),
            3: ("1-D", "1-D", "HSDP all", "replicate"),
            4: ("1-D", "HSDP 2", "TP", "replicate"),
        }
        mesh = pick(meshes[world])
        policy = pick(POLICIES) if mesh != "TP" and self.chance(0.25) else ""
        halves = ("2",) if (world, mesh) == (4, "1-D") else ()
        layers = self.layers(policy)
        calls = list(range(len(layers)))
        if self.chance(0.2):
            calls.append(pick(calls))
        tokens = self.chance(0.3)
        program = Program(
            mode=self.mode, world=world, mesh=mesh, layers=layers, calls=tuple(calls), tokens=tokens,
            head=pick(("", "linear", "tied") if tokens else ("", "linear")),
            output=pick(("tensor", "tensor", "dict", "tuple", "beside", "beside", "middle")),
            policy=policy, reshard=pick(("None", "True", "True", "False", *halves)),
            root_policy=f"{policy}, output_dtype=torch.float32" if policy and self.chance(0.3) else "",
            columns=mesh == "1-D" and self.chance(0.1), offload=self.chance(0.08),
            grouped=len(layers) > 1 and self.chance(0.1), options=self.options(), optimizer=pick(OPTIMIZERS),
            in_backward=self.chance(0.15), on_shards=self.chance(0.3),
        )  # fmt: skip
        return self.with_steps(dataclasses.replace(program, sharding=self.sharding(program)))

    def script(self, program: Program) -> Program:
        """Return the program with another optimizer and other steps."""
        script = {"optimizer": self.random.choice(OPTIMIZERS), "in_backward": self.chance(0.15)}
        return self.with_steps(dataclasses.replace(program, **script, on_shards=self.chance(0.3)))

    def update(self, program: Program) -> Program:
        """Return the program, perhaps with a compiled update."""
        on_shards = program.on_shards and not program.in_backward
        return dataclasses.replace(program, compiles_update=on_shards and self.chance(0.5))

    def with_steps(self, program: Program) -> Program:
        steps = self.steps(program)
        # with such steps forward would write to full parameters, or to tensors saved for another backward, which torch
        # refuses
        changes = any(
            "shard" in step.before or step.fails or step.forwards > 1 or step.again or step.losses == "two"
            for step in steps
        )
        trusts = ("recheck_prefetched", "False") in program.options  # trusts that nobody writes to shards
        program = dataclasses.replace(program, writes=not changes and not trusts and self.chance(0.15))
        steps = self.own_gradients(program, steps)
        if any(layer.dtype or layer.kind in ALONE for layer in program.layers):
            program = dataclasses.replace(program, grouped=False)
        return dataclasses.replace(program, steps=steps)

    # ---- the model ---------------------------------------------------------------------------------------------------
    def layers(self, policy: str) -> tuple[Layer, ...]:
        """Draw few layers, because each has to be compiled. Often one is repeated, as in real models."""
        drawn = [self.layer(policy) for _ in range(self.random.choice((1, 1, 2, 2, 3)))]
        if self.chance(0.4):
            drawn += [self.random.choice(drawn)] * self.random.choice((1, 2))
        if self.chance(0.3):  # each layer is a unit
            drawn = [dataclasses.replace(layer, unit=True) for layer in drawn]
        return tuple(drawn)

    def layer(self, policy: str, depth: int = 0) -> Layer:
        dtype = self.random.choice(("float64", "bfloat16")) if not policy and depth == 0 and self.chance(0.06) else ""
        inner = (
            tuple(self.layer(policy, depth + 1) for _ in range(self.random.choice((1, 2))))
            if depth == 0 and self.chance(0.15)
            else ()
        )
        # no complex layer with a policy, which would narrow it, or a dtype, which would cast it; more often "summed",
        # because the gradients of its two parameters are one tensor
        left_out = IN_CHAINS | (ALONE if policy or dtype or depth else set())
        kind = self.random.choice([*(kind for kind in KINDS if kind not in left_out), "summed", "summed"])
        # compiled, a checkpoint's recomputation does not write to buffers; in eager mode it does
        inner = () if kind in ALONE else inner
        may_be_checkpointed = self.mode == "eager" or not ({kind} | {each.kind for each in inner}) & WRITE_TO_BUFFERS
        return Layer(
            kind=kind, hidden=self.random.choice((1, 2, 3, 5, 8, 8)),
            unit=bool(dtype) or kind in ALONE or self.chance(0.5 if depth == 0 else 0.3),
            checkpoint=self.random.choice(CHECKPOINTS) if may_be_checkpointed and self.chance(0.15) else "",
            frozen=self.random.choice(("all", "first")) if self.chance(0.12) else "", dtype=dtype, inner=inner,
        )  # fmt: skip

    def equal_layers(self, program: Program, share: float) -> Program:
        """Return the program, perhaps with equal layers at its end that AOTAutograd traces once.

        One of them may differ: in what is frozen, or as another layer in the middle.
        """
        if self.mode not in ("aot_eager", "inductor") or not self.chance(share):
            return program
        own = Layer(self.random.choice(sorted(IN_CHAINS)), unit=self.chance(0.5))
        layer = self.random.choice((*program.layers, own))
        chain = [layer] * self.random.choice((3, 4, 5))
        if self.chance(0.2):
            chain[self.random.randrange(len(chain))] = dataclasses.replace(layer, frozen="first")
        if self.chance(0.2):
            chain.insert(self.random.randrange(len(chain)), self.random.choice(program.layers))
        calls = [len(program.layers) + i for i in range(len(chain))]
        if self.chance(0.1):
            calls.append(calls[0])
        return dataclasses.replace(
            program,
            layers=(*program.layers, *chain),
            calls=(*program.calls, *calls),
            options=(*program.options, ("trace_equal_layers_once", "True")),
        )

    # ---- how it is sharded -------------------------------------------------------------------------------------------
    def options(self) -> tuple[tuple[str, str], ...]:
        drawn = {name: self.random.choice(values) for name, values in OPTIONS.items() if self.chance(0.2)}
        if drawn.get("bucket") not in ('"module"', '"parameter"'):
            drawn.pop("prefetch", None)
        return tuple(drawn.items())

    def transport(self, program: Program) -> Program:
        """Return the program, perhaps with collectives over symmetric memory."""
        if not self.chance(0.1) or torch.__version__ < "2.13":
            return program
        return dataclasses.replace(program, options=(*program.options, ("transport", '"symm_mem"')))

    def budget(self, program: Program, share: float) -> Program:
        """Return the program, perhaps with a small memory budget."""
        options = dict(program.options)
        if not self.chance(share) or "memory_budget" in options or program.mode in ("eager", "torch's aot_eager"):
            return program
        options["memory_budget"] = self.random.choice(BUDGETS)
        options["offload_activations"] = self.random.choice(("True", "True", "False"))
        return dataclasses.replace(program, options=tuple(options.items()))

    def units(self, program: Program) -> list[str]:
        """Return the layers that are units of their own, as code."""
        first = 2 if program.grouped else 0
        return [f"model.layers[{i}]" for i, layer in enumerate(program.layers) if layer.unit and i >= first]

    def sharding(self, program: Program) -> tuple[str, ...]:
        calls = []
        units = self.units(program)
        if len(units) > 1 and self.chance(0.2):
            which = self.random.choice(("forward", "backward"))
            calls.append(f"{units[0]}.set_modules_to_{which}_prefetch([{units[1]}])")
        if self.chance(0.05):
            unit = self.random.choice([*units, "model"])  # sums: gloo cannot multiply before them, as FSDP2 would
            calls.append(
                f"{unit}.set_force_sum_reduction_for_comms(True), {unit}.set_gradient_divide_factor({DIVISOR})"
            )
        if self.chance(0.05):
            calls.append("model.set_reduce_scatter_unused_params(True)")
        return tuple(calls)

    def other(self, program: Program, ranks_differ: float) -> Program:
        """Return the program, perhaps with another way through one of its layers."""
        if not self.chance(ranks_differ) or self.mode == "torch's aot_eager":  # its ranks do not agree on plans
            return program
        at = self.random.randrange(len(program.calls))
        layer = program.layers[program.calls[at]]
        kinds = {layer.kind, *(each.kind for each in layer.inner)}
        writes = self.mode != "eager" and kinds & WRITE_TO_BUFFERS  # compiled, a checkpoint does not write to buffers
        left_out = ["checkpointed"] if writes or layer.checkpoint == "plain" else []
        left_out += [] if layer.checkpoint else ["not checkpointed"]
        names = [name for name in OTHERS if name not in left_out]
        return dataclasses.replace(program, other=self.random.choice(names), other_at=at)

    # ---- the script --------------------------------------------------------------------------------------------------
    def steps(self, program: Program) -> tuple[Step, ...]:
        return (*(self.step(program) for _ in range(self.random.choice((1, 2, 2, 3)))), Step())

    def step(self, program: Program) -> Step:
        pick = self.random.choice
        kinds = ("train",) * 8 + ("evaluate", "evaluate", "inference", "save", "load", "checkpoint")
        kind = "train" if program.in_backward else pick(kinds)
        same = pick((1, 2, 2, 2, 3, 5))
        sizes = tuple(pick((1, 2, 3, 5)) for _ in range(4)) if self.chance(0.15) else (same,) * 4
        if kind != "train":
            return Step(kind, sizes)
        microbatches = pick((1, 1, 1, 2, 3, 3))
        each = () if program.in_backward else ("each",)
        in_parts = {
            "HSDP": ("shards",),
            "replicate": ("shards",),
            "1-D": ("node",) * (program.world == 4 and not program.in_backward),
        }
        sync = pick(("last", "last", *each, *in_parts.get(program.mesh.split()[0], ())))
        fails = "" if microbatches > 1 else self.fails(program)
        forwards, again = 2 if self.chance(0.1) else 1, self.chance(0.1) and not program.in_backward
        return Step(
            kind, sizes, self.toggle(program) if self.chance(0.25) else "",
            microbatches, sync if microbatches > 1 else "last", forwards,
            "" if forwards > 1 or again else self.losses(program), self.chance(0.15) and program.mesh != "TP",
            fails, self.chance(0.2), again, self.chance(0.08),
        )  # fmt: skip

    def own_gradients(self, program: Program, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        """Return the steps. Some compute the loss's gradient in the head first, if the head stays unsharded.

        Only steps with one microbatch do so, because with several FSDP2 reduces the pending gradients as soon as the
        last loss is asked for its gradient.
        """
        may_be_asked = (
            self.mode == "eager" and program.head == "linear" and program.mesh != "TP"
            and program.reshard in ("None", "False")
            and not any("shard" in step.before for step in steps)
            and not any(layer.checkpoint == "reentrant" for layer in program.every_layer())  # torch refuses it
        )  # fmt: skip
        if not may_be_asked:
            return steps
        asked = [step.kind == "train" and step.forwards == step.microbatches == 1 for step in steps]
        return tuple(
            dataclasses.replace(step, own=may_be and self.chance(0.4))
            for step, may_be in zip(steps, asked, strict=True)
        )

    def odd_ranks(self, program: Program) -> Program:
        """Return the program, with a rank that takes the other way in some steps."""
        if not program.other:
            return program
        ranks = 2 if program.mesh == "TP" else program.world
        steps = [
            dataclasses.replace(step, odd=self.random.randrange(ranks))
            if step.kind in ("train", "evaluate", "inference") and self.chance(0.6)
            else step
            for step in program.steps
        ]
        return dataclasses.replace(program, steps=tuple(steps))

    def losses(self, program: Program) -> str:
        """Draw the use of a second output. No backward begins at the "middle" output, because it may be computed from
        frozen parameters only.
        """
        if program.output not in ("beside", "middle"):
            return ""
        ways = () if program.output == "middle" else ("together", *(() if program.in_backward else ("two",)))
        return self.random.choice(("", "", "sum", *ways))

    def fails(self, program: Program) -> str:
        """Draw where a step fails.

        A backward fails in its middle, so only in modes without a graph across the middle. It does not fail with an
        optimizer in backward, because each way would have updated another part of the model before the failure.
        """
        if not self.chance(0.1):
            return ""
        in_the_middle = self.mode in ("eager", "broken", "compiled autograd", "per block") and not program.in_backward
        return self.random.choice(("forward", "loss", *(("backward",) if in_the_middle else ())))

    def toggle(self, program: Program) -> str:
        pick = self.random.choice
        some = pick(["model", *self.units(program)])
        layer = f"model.layers[{self.random.randrange(len(program.layers))}]"
        copies = (2, 2) if (program.world, program.mesh) == (4, "1-D") else ()  # a copy in each half of the ranks
        choices = [
            f"{layer}.requires_grad_(False)",
            f"{layer}.requires_grad_(True)"
            if not NO_GRADIENTS & {layer.kind for layer in program.every_layer()}
            else "",
            f"{some}.set_reshard_after_forward({pick((True, False))})",
            f"model.set_reshard_after_backward({pick((True, False, *copies))})",
            f"{some}.unshard()",
            f"{some}.reshard()",
            "model.set_is_last_backward(True)",
        ]
        for i, each in enumerate(program.layers):
            if each.kind in TOGGLES:
                choices += [f"model.layers[{i}].{pick(TOGGLES[each.kind])}"] * 3
        return pick(choices)
