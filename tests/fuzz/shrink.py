"""Make a finding small: drop layers, steps, options and settings one after another, as long as the finding stays."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from tests.fuzz.program import Layer, Program, Step

TRIES = 80
SECONDS = 900.0


def shrink(program: Program, stays: Callable[[Program], bool], tries: int = TRIES, seconds: float = SECONDS) -> Program:
    """Return the smallest program found for which `stays` holds. It must hold for `program`."""
    deadline = time.monotonic() + seconds
    tried: set[Program] = set()
    found = True
    while found:
        found = False
        for smaller in simpler(program):
            if smaller in tried:
                continue
            if len(tried) >= tries or time.monotonic() > deadline:
                return program
            tried.add(smaller)
            if stays(smaller):
                program, found = smaller, True
                break
    return program


def simpler(program: Program) -> Iterator[Program]:
    """Yield programs that are one change smaller, the largest changes first."""
    steps = program.steps
    for i in range(len(steps)):
        if len(steps) > 1:
            yield dataclasses.replace(program, steps=steps[:i] + steps[i + 1 :])
    for i in range(len(program.layers)):
        if len(program.layers) > 1:
            yield _without_layer(program, i)
    for i in range(len(program.calls)):
        if program.calls.count(program.calls[i]) > 1:
            at = program.other_at - (i < program.other_at)
            yield dataclasses.replace(program, calls=program.calls[:i] + program.calls[i + 1 :], other_at=at)
    for i, step in enumerate(steps):
        for small in _reset(step, Step(), keep=("kind",)):
            yield dataclasses.replace(program, steps=(*steps[:i], small, *steps[i + 1 :]))
    for i in range(len(program.options)):
        yield dataclasses.replace(program, options=program.options[:i] + program.options[i + 1 :])
    for i in range(len(program.sharding)):
        yield dataclasses.replace(program, sharding=program.sharding[:i] + program.sharding[i + 1 :])
    keep = ("seed", "mode", "layers", "calls", "steps", "options", "sharding", "head" if program.head == "tied" else "")
    if program.other:
        yield dataclasses.replace(
            program, other="", other_at=0, steps=tuple(dataclasses.replace(step, odd=-1) for step in steps)
        )
    yield from (
        small
        for small in _reset(program, Program(), (*keep, "other", "other_at"))
        if small.world == 2 or small.mesh == program.mesh
    )
    for i, layer in enumerate(program.layers):
        for small_layer in _simpler_layers(layer):
            yield dataclasses.replace(program, layers=(*program.layers[:i], small_layer, *program.layers[i + 1 :]))


def _reset(value: Program | Step, default: Program | Step, keep: tuple[str, ...]) -> Iterator:
    for field in dataclasses.fields(value):
        if field.name not in keep and getattr(value, field.name) != getattr(default, field.name):
            yield dataclasses.replace(value, **{field.name: getattr(default, field.name)})


def _without_layer(program: Program, number: int) -> Program:
    calls = tuple(call - (call > number) for call in program.calls if call != number)
    other_at = sum(call != number for call in program.calls[: program.other_at])
    layers = program.layers[:number] + program.layers[number + 1 :]
    # drop calls that name a layer, because its number would now mean another layer or none
    steps = tuple(
        dataclasses.replace(step, before="" if "layers[" in step.before else step.before) for step in program.steps
    )
    sharding = tuple(call for call in program.sharding if "layers[" not in call)
    return dataclasses.replace(
        program,
        layers=layers,
        calls=calls or (0,),
        other_at=min(other_at, max(len(calls) - 1, 0)),
        steps=steps,
        sharding=sharding,
        grouped=program.grouped and len(layers) > 1,
    )


def _simpler_layers(layer: Layer) -> Iterator[Layer]:
    for i in range(len(layer.inner)):
        yield dataclasses.replace(layer, inner=layer.inner[:i] + layer.inner[i + 1 :])
    for field, value in (
        ("checkpoint", ""),
        ("frozen", ""),
        ("dtype", ""),
        ("hidden", 8),
        ("kind", "linear"),
        ("unit", False),
    ):
        if getattr(layer, field) != value:
            yield dataclasses.replace(layer, **{field: value})
    for i, inner in enumerate(layer.inner):
        for small in _simpler_layers(inner):
            yield dataclasses.replace(layer, inner=(*layer.inner[:i], small, *layer.inner[i + 1 :]))
