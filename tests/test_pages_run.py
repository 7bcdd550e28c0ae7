"""The programs of the documentation run, and print what their pages show."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from compiled_fsdp.passes.cost import Hardware
from tests.test_docs import ROOT, output_of, save_program


def without_numbers(text: str) -> str:
    """The text with ``#`` for each number, because the last digits depend on the machine."""
    return re.sub(r"\d[\d.,]*", "#", text)


def shown_programs_of(page: str) -> list[tuple[str, str]]:
    """The page's programs for torchrun, with the output that the page shows: the next block of text."""
    text = (ROOT / f"docs/{page}.md").read_text()
    return re.findall(r"^```python\n(.*?)^```(?:(?!```python).)*?^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("page", "number", "library"),
    [
        pytest.param("compressed-communication", 0, "torch", marks=pytest.mark.more),
        pytest.param("all-gather-extensions", 1, "torch", marks=pytest.mark.more),
        pytest.param("all-gather-extensions", 0, "torchao", marks=pytest.mark.more),
        pytest.param("ecosystem", 0, "transformers", marks=pytest.mark.more),
    ],
)
def test_programs_print_what_their_page_shows_but_for_numbers(page, number, library, tmp_path):
    """On two ranks. Numbers may differ."""
    pytest.importorskip(library)
    if library == "torch" and torch.__version__ < "2.13":
        pytest.skip("before torch 2.13 an nn.Sequential that is compiled in place runs uncompiled")
    code, shown = shown_programs_of(page)[number]
    save_program(code, tmp_path / "program.py")
    program = str(tmp_path / "program.py")
    said = output_of("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program)
    assert without_numbers(said) == without_numbers(shown)


@pytest.mark.parametrize("page", ["all-gather-extensions", "compressed-communication"])
def test_pages_with_programs_have_no_other_code(page):
    assert len(shown_programs_of(page)) == (ROOT / f"docs/{page}.md").read_text().count("```python\n")


PROGRAMS = {
    "accumulation": 1,
    "graph-breaks": 1,
    "parallelism": 6,
    "faults": 2,
    "whole-matrices": 1,
    "training-step": 1,
}
"""How many programs of a page run under torchrun and end well. A program begins with a block whose first word is
`import`; further blocks of it, its command, and what it prints follow."""


def programs_of(page: str) -> list[tuple[str, str, str]]:
    """The programs of a page that have a command of torchrun: the command, the code and the output."""
    text = (ROOT / f"docs/{page}.md").read_text()
    found: list[dict[str, str]] = []
    for language, block in re.findall(r"^```(python|sh|text)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language == "python" and block.startswith("import "):
            found.append({"python": "", "sh": "", "text": ""})
        if found:
            found[-1][language] += f"{block}\n"
    programs = [(of["sh"].partition("\n")[0], of["python"], of["text"]) for of in found]
    return [program for program in programs if program[0].startswith("torchrun --standalone")]


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="another torch has other graphs to plan")
@pytest.mark.parametrize(
    ("page", "number"),
    [
        pytest.param(page, number, marks=[pytest.mark.more] if page != "accumulation" else [])
        for page, count in PROGRAMS.items()
        for number in range(count)
    ],
)
def test_programs_print_what_their_page_shows(tmp_path, monkeypatch, page, number):
    """Under the page's own command, the blocks in the order in which they stand, as one file."""
    monkeypatch.setenv("COMPILED_FSDP_CACHE_DIR", str(tmp_path / "cache"))  # nobody has measured this machine
    programs = programs_of(page)
    assert len(programs) == PROGRAMS[page]
    command, code, shown = programs[number]
    *flags, name = command.split()[1:]
    save_program(code, tmp_path / name)
    said = output_of("-m", "torch.distributed.run", *flags, name, folder=tmp_path)
    # longer names of folders end lines elsewhere
    assert said.replace(f"{tmp_path}/", "").split() == shown.split()


@pytest.mark.more
def test_a_killed_rank_is_named_as_its_page_shows(tmp_path):
    """Each of the two processes by the page's own command, on a free port."""
    page = (ROOT / "docs/faults.md").read_text()
    code, command, shown = re.search(
        r"```python\n(import os\n.*?)```.*?```sh\n(.*?)```.*?```text\n(.*?)```", page, re.DOTALL
    ).groups()
    (tmp_path / "fault.py").write_text(code)
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        command = re.sub(r"MASTER_PORT=\d+", f"MASTER_PORT={probe.getsockname()[1]}", command)
    done = subprocess.run(
        ["bash", "-c", command.replace(" python ", f" {sys.executable} ")], cwd=tmp_path, check=False, timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr

    def until_the_cause(text: str) -> list[str]:
        return re.sub(r"process \d+", "process", text).partition(" [")[0].split()

    assert until_the_cause(done.stdout) == until_the_cause(shown)


@pytest.mark.more
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.more) for page in ("options", "out-of-memory", "slow-steps")]
)
def test_the_programs_of_pages_print_what_they_show(tmp_path, page):
    """A page's blocks of Python as one file, by the page's command. The text under the first block is the output."""
    text = (ROOT / f"docs/{page}.md").read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    command, name = re.search(r"`torchrun ([^`]*) (\w+\.py)`", text).groups()
    save_program("\n".join(block[1] for block in blocks), tmp_path / name)
    said = output_of("-m", "torch.distributed.run", "--standalone", *command.split(), str(tmp_path / name))
    (shown,) = re.findall(r"\A.*?^```text\n(.*?)^```", text[blocks[0].end() :], re.MULTILINE | re.DOTALL)
    if torch.__version__.startswith("2.13"):  # another torch saves other activations
        assert " ".join(shown.split()) in " ".join(said.split())


def program_of(page: str, folder: Path) -> list[tuple[str, str | None]]:
    """Run all Python of a page as one program under torchrun, by the page's own command.

    Returns for each block what rank 0 prints, and the text that the page shows between this block and the next one.
    """
    text = (ROOT / f"docs/{page}.md").read_text()
    options, file = re.search(r"^torchrun (.*) (\w+\.py)$", text, re.MULTILINE).groups()
    codes, shown = [], []
    for language, block in re.findall(r"^```(python|text)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language == "python":
            codes.append(block)
            shown.append(None)
        else:
            shown[-1] = block
    # the line between two blocks is empty in a reader's file, so that line numbers are the same
    cut = "print('-- cut', flush=True) if dist.get_rank() == 0 else None\n"
    save_program(cut.join(codes) + "dist.destroy_process_group()\n", folder / file)
    command = ("-m", "torch.distributed.run", "--standalone", *options.split(), file)
    with mock.patch.dict(os.environ, {"COMPILED_FSDP_CACHE_DIR": str(folder)}):  # for measure_hardware
        printed = output_of(*command, folder=folder).split("-- cut\n")
    return list(zip(printed, shown, strict=True))


@pytest.mark.more
def test_the_page_of_explain_prints_what_it_shows(tmp_path):
    """Its programs run as one. The output of each stands under it. The folder of a code line is not the reader's."""
    pairs = program_of("explain", tmp_path)
    assert sum(shown is not None for _, shown in pairs) >= 6
    for printed, shown in pairs:
        if not torch.__version__.startswith("2.13"):  # another torch makes other graphs
            assert bool(printed) == (shown is not None)
        elif str(tmp_path) in printed:  # lines break elsewhere in another folder
            assert printed.replace(str(tmp_path), "/home/me").split() == shown.split()
        else:
            assert printed == (shown or "")
    assert (tmp_path / "step.json").exists()


@pytest.mark.more
def test_the_page_of_profiles_runs(tmp_path):
    """Its programs as one: measured times differ, and the words between them do not."""
    pairs = program_of("profiling", tmp_path)
    verdict, planned_again, microbatches, names = (printed for printed, _ in pairs)
    for text in ("rank 0, 5 steps", "compute, copies and launches", "of communication hidden", "gather", "reduce"):
        assert text in verdict
        assert text in pairs[0][1]
    assert planned_again == pairs[1][1]
    assert microbatches == pairs[2][1]
    for lines in (names.splitlines(), pairs[3][1].splitlines()):  # which buckets there are depends on the machine
        assert {line.split()[0] for line in lines} == {"gather", "reduce"}
        assert all(line.endswith(": launch") for line in lines)


@pytest.mark.more
def test_the_plan_of_a_model_of_the_page(tmp_path):
    """docs/planning.md: the reader's own model by its command."""
    text = (ROOT / "docs/planning.md").read_text()
    model, profile = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "slow_network.py").write_text(profile)
    output_of("slow_network.py", folder=tmp_path)
    assert Hardware.from_json((tmp_path / "slow.json").read_text()).name == "slow"
    (tmp_path / "my_model.py").write_text(model)
    commands = re.findall(
        r"^compiled-fsdp (plan --model my_model:(?:[^\n]*\\\n)?[^\n]*)\n```\n\n```text\n(.*?)^```",
        text,
        re.MULTILINE | re.DOTALL,
    )
    assert len(commands) == 2
    for command, shown in commands:
        printed = output_of("-m", "compiled_fsdp", *command.replace("\\\n", "").split(), folder=tmp_path)
        lines, expected = ([line.rstrip() for line in lines.splitlines()] for lines in (printed, shown))
        assert len(lines) == len(expected)
        assert lines == expected or not torch.__version__.startswith("2.13")


def blocks_of(page: str) -> list[str]:
    """The page's blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / f"docs/{page}.md").read_text(), re.MULTILINE | re.DOTALL)


def quickly(program: str) -> str:
    """The program without Inductor, which computes the same and takes longer to compile."""
    changed = program.replace('backend="compiled_fsdp")', 'backend="compiled_fsdp", options={"codegen": "aot_eager"})')
    assert changed != program
    return changed


def sessions_of(page: str) -> list[tuple[str, str]]:
    """The page's commands of torchrun without that word, each with the output that the page shows."""
    text = (ROOT / f"docs/{page}.md").read_text()
    sessions = "\n".join(re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    return re.findall(r"^\$ torchrun (.*)\n((?:[^$].*\n)*)", sessions, re.MULTILINE)


def torchrun(command: str, folder: Path) -> str:
    """Return the command's output. Hardware that was measured elsewhere does not count."""
    cache = str(folder / "cache")
    return output_of("-m", "torch.distributed.run", *command.split(), folder=folder, COMPILED_FSDP_CACHE_DIR=cache)


@pytest.mark.more
def test_the_first_program(tmp_path):
    """docs/getting-started.md, by its command: it trains, and lists the compiled graphs. So it does on a mesh.

    A torch that compiles no ``nn.Sequential`` in place compiles it as the page says for that."""
    first, _, on_a_mesh = blocks_of("getting-started")
    if torch.__version__ < "2.13":
        first = first.replace("model.compile(", "compiled = torch.compile(model, ").replace("(model(in", "(compiled(in")
    page = (ROOT / "docs/getting-started.md").read_text()
    (command,) = re.findall(r"^torchrun (.* first.py)$", page, re.MULTILINE)
    (line,) = re.findall(r"^fully_shard\(model\).*\n", first, re.MULTILINE)
    for program in (first, quickly(first.replace(line, on_a_mesh))):
        save_program(program, tmp_path / "first.py")
        said = torchrun(command, tmp_path)
        losses = [float(loss) for loss in re.findall(r"^step \d+: loss (.*)$", said, re.MULTILINE)]
        assert len(losses) == 10
        assert losses[-1] < losses[0]
        assert "backward" in said.partition("step 9")[2]
    assert "measured with 2 ranks" in said


@pytest.mark.more
def test_the_program_that_saves_and_resumes(tmp_path):
    """docs/getting-started.md, by its commands. A run that is resumed prints the line of the one that was not stopped;
    in bfloat16 it trains as well."""
    save_program(quickly(blocks_of("getting-started")[1]), tmp_path / "train.py")
    (command, shown), (again, shown_again) = sessions_of("getting-started")
    without_a_stop = torchrun(command, tmp_path)
    assert re.findall(r"^epoch \d+", without_a_stop, re.MULTILINE) == re.findall(r"^epoch \d+", shown, re.MULTILINE)
    resumed = torchrun(again, tmp_path)
    assert resumed.splitlines()[0] == shown_again.splitlines()[0]
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", without_a_stop + resumed)]
    assert losses == sorted(losses, reverse=True)
    for name in ("epoch-0002", "epoch-0003"):
        shutil.rmtree(tmp_path / "runs" / name)
    assert torchrun(command, tmp_path).splitlines() == ["resumed from runs/epoch-0001", without_a_stop.splitlines()[1]]
    assert torchrun(f"{command} --epochs 1 --bf16 --runs other", tmp_path).startswith("epoch 1: loss ")


@pytest.mark.more
def test_the_program_of_the_page_of_checkpoints(tmp_path):
    """Its output is the page's, but for the losses' last digits, also resumed on another number of ranks."""
    save_program(quickly(blocks_of("checkpoints")[0]), tmp_path / "checkpoint.py")
    for command, shown in sessions_of("checkpoints"):
        printed = torchrun(command, tmp_path).splitlines()
        for line, expected in zip(printed, shown.splitlines(), strict=True):
            assert line.rpartition(" ")[0] == expected.rpartition(" ")[0]
            assert float(line.rpartition(" ")[2]) == pytest.approx(float(expected.rpartition(" ")[2]), abs=1e-4)


@pytest.mark.more
def test_the_program_of_the_page_of_mixed_precision(tmp_path):
    """It prints the dtypes and bytes that the page shows."""
    save_program(quickly(blocks_of("mixed-precision")[0]), tmp_path / "precision.py")
    ((command, shown),) = sessions_of("mixed-precision")
    printed = torchrun(command, tmp_path)
    assert [line.split()[:-1] for line in printed.splitlines()] == [line.split()[:-1] for line in shown.splitlines()]
