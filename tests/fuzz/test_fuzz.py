"""Tests of the fuzzer, and a short run of it. `python -m tests.fuzz` runs as many programs as you like."""

import dataclasses
from collections.abc import Iterator

import pytest
from torch._dynamo.utils import counters

from tests.fuzz import execute
from tests.fuzz.generate import generate
from tests.fuzz.judge import Judge, Kind
from tests.fuzz.layers import KINDS
from tests.fuzz.mutations import MUTATIONS
from tests.fuzz.program import MODES, OTHERS, Layer, Program, Step, from_json, to_json
from tests.fuzz.script import MOST_LINES, script_of
from tests.fuzz.shrink import shrink, simpler
from tests.fuzz.source import source_of
from tests.harness.cases import Pool, variants

MANY = range(400)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Yield processes for the fuzzer alone, because it leaves the code of many programs in them."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.mark.parametrize("seeds", variants([MANY[:100], MANY[100:]], MANY[:100]), ids=["first 100", "others"])
def test_programs_are_data(seeds):
    """A seed gives one program. It survives JSON, and its text is valid Python, also after each change of shrinking."""
    for seed in seeds:
        program = generate(seed)
        assert program == generate(seed) == from_json(to_json(program))
        assert program.mode == MODES[seed % len(MODES)]
        for each in (program, *(simpler(program) if seed % 10 == 0 else ())):
            compile(source_of(each), "program", "exec")
        for other in ("fsdp2", "plain"):
            compile(script_of(program, other, "found"), "script", "exec")


def test_several_scripts_of_one_model():
    """Consecutive programs differ only in their scripts: steps and optimizer."""
    for first in range(0, len(MANY), 4):
        programs = [generate(seed, scripts=4) for seed in range(first, first + 4)]
        script = {"seed", "optimizer", "in_backward", "on_shards", "compiles_update", "steps", "writes"}
        models = [{k: v for k, v in vars(program).items() if k not in script} for program in programs]
        assert models == models[:1] * 4
        assert len({program.steps for program in programs}) > 1
        assert [program.seed for program in programs] == list(range(first, first + 4))


def test_every_kind_of_layer_is_drawn():
    drawn = {layer.kind for seed in MANY for layer in generate(seed).every_layer()}
    assert drawn == set(KINDS)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_replaces_something(name):
    """Each mutation finds the code that it replaces, and is removed again."""
    with MUTATIONS[name]():
        pass


def test_ranks_that_differ_are_drawn():
    """Each other way is drawn, and a rank takes it in some step. Without it the program is that of `ranks_differ=0`."""
    programs = [generate(seed, ranks_differ=1.0) for seed in MANY]
    assert {program.other for program in programs if any(step.odd >= 0 for step in program.steps)} == set(OTHERS)
    for program in programs[:20]:
        same = dataclasses.replace(
            program, other="", other_at=0, steps=tuple(dataclasses.replace(step, odd=-1) for step in program.steps)
        )
        assert same == generate(program.seed, ranks_differ=0.0)


def test_shrinking():
    """Shrinking removes everything that the finding does not need, and the script is short."""
    layers = (Layer("gru", inner=(Layer("conv"),)), Layer("norm", unit=True, checkpoint="plain"), Layer("tied"))
    program = Program(
        mode="aot_eager", world=4, mesh="HSDP 2", layers=layers, calls=(0, 1, 2, 1), output="dict", offload=True,
        options=(("verify", '"full"'),), steps=(Step(clip=True), Step("evaluate"), Step(microbatches=3), Step()),
    )  # fmt: skip

    def stays(smaller: Program) -> bool:
        return any(layer.kind == "norm" and layer.unit for layer in smaller.layers) and any(
            step.microbatches > 1 for step in smaller.steps
        )

    small = shrink(program, stays)
    assert small == Program(
        mode="aot_eager", layers=(Layer("norm", unit=True),), calls=(0,), steps=(Step(microbatches=3),)
    )
    assert len(script_of(small, "plain", "found").splitlines()) <= MOST_LINES


def test_a_fault_of_ours_is_told_from_one_of_fsdp2(pool):
    """A sum instead of a mean is a finding. A failure of FSDP2 alone (training after inference mode) is none."""
    training = Program(steps=(Step(), Step(sizes=(1, 3, 2, 2))))
    assert Judge(pool).verdict(training).kind is Kind.RIGHT
    assert Judge(pool, "a wrong divisor").verdict(training).kind is Kind.WRONG
    after_inference = dataclasses.replace(training, layers=(Layer(unit=True),), steps=(Step("inference"), Step()))
    assert Judge(pool).verdict(after_inference).kind is Kind.FSDP2


@pytest.mark.more
def test_programs_of_one_model_share_its_code(pool):
    """A model's second program compiles nothing. Another model's program compiles, and so does one that runs alone."""
    one = Program(mode="aot_eager", steps=(Step(),))
    other = dataclasses.replace(one, layers=(Layer("norm"),))
    ways = [(one, True), (one, True), (other, True), (one, True), (one, False)]
    compiled = [pool.get(2).run(_compiles, source_of(program), shares) for program, shares in ways]
    assert [counts[0] > 0 for counts in compiled] == [True, False, True, True, True]


def _compiles(rank: int, world_size: int, text: str, shares: bool) -> int:
    counters.clear()
    execute.run(rank, world_size, text, "ours", shares)
    return counters["stats"]["unique_graphs"]


@pytest.mark.more
@pytest.mark.timeout(0)
@pytest.mark.parametrize("mode", MODES)
def test_random_programs(pool, mode):
    """A few programs of each mode run right. `python -m tests.fuzz --seed 0` shrinks their findings."""
    seeds = range(MODES.index(mode), (12 if mode == "eager" else 3) * len(MODES), len(MODES))
    for seed in seeds:
        program = generate(seed)
        verdict = Judge(pool).verdict(program)
        assert not verdict.is_finding, f"{verdict.kind.value}: {verdict.about}\n{to_json(program)}\n{verdict.text}"
