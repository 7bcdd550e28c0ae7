"""What the documentation points at is there."""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import compiled_fsdp
from compiled_fsdp.frontend.gradient_methods import GradientMethods
from tests.clients.huggingface import llama
from tests.harness import batch, distributed
from tests.harness.models import Mlp, small

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FOLDERS = ("compiled_fsdp", "passes", "tests", "bench", "examples")
# FSDP2's own, which torch describes.
HANDED_ON = {"CPUOffloadPolicy", "MixedPrecisionPolicy", "OffloadPolicy", "UnshardHandle"}
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_tests_named_in_the_contract_are_in_the_suite():
    """Each row names a test, or says `no test`. It is there, and `make test` runs it: it is not marked `more` as a
    whole."""
    page = (ROOT / "docs/contract.md").read_text()
    rows = re.split(r"^- ", page.partition("\n## ")[2], flags=re.MULTILINE)[1:]
    assert len(rows) > 150
    named = [re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row) for row in rows]
    for row, tests in zip(rows, named, strict=True):
        assert len(tests) == row.count("::"), row
        assert tests or "`no test`" in row, row
    for file, function in {test for tests in named for test in tests}:
        tree = ast.parse((ROOT / file).read_text())
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
        assert found, f"{file}::{function}"
        assert all(ast.unparse(mark) != "pytest.mark.more" for mark in found[0].decorator_list), f"{file}::{function}"


def test_recipes_for_other_libraries():
    """Ten lines at most; and each row of what was run names a test that is there."""
    page = (ROOT / "docs/ecosystem.md").read_text()
    for code in re.findall(r"^```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        assert len([line for line in code.splitlines() if line.strip()]) <= 10, code
    rows = re.split(r"^[-|] (?!client)", page.partition("\n## What was run\n")[2], flags=re.MULTILINE)[1:]
    assert len(rows) >= 15
    for row in rows:
        text = (ROOT / "tests/clients" / re.search(r"`(test_\w+\.py)::", row)[1]).read_text()
        for function in re.findall(r"::(test_\w+)`", row):
            assert f"def {function}(" in text, row


def mapped_files() -> list[str]:
    """The files that the map of docs/design.md names: a folder stands at a line's beginning, its files are indented."""
    listed = re.search(
        r"^## The map\n.*?^```\n(.*?)^```", (ROOT / "docs/design.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert listed
    folder, files = "", []
    for line in listed[1].splitlines():
        if found := re.match(r"(\S+/)\s", line):
            folder = found[1]
        elif found := re.match(r"  (\w+\.py)\s", line):
            files.append(folder + found[1])
    return files


def test_the_map_names_every_file():
    """Each once, and none that is not there. A folder's ``__init__.py`` is described by the folder's own line."""
    there = ["compiled_fsdp/__init__.py"]
    for folder in (ROOT / "compiled_fsdp", ROOT / "passes"):
        paths = (
            path.relative_to(ROOT) for path in folder.rglob("*.py") if ROOT / "compiled_fsdp/passes" not in path.parents
        )
        there += [str(path) for path in paths if path.name != "__init__.py"]
    mapped = mapped_files()
    assert len(mapped) == len(set(mapped))
    assert {"forgotten": sorted(set(there) - set(mapped)), "gone": sorted(set(mapped) - set(there))} == {
        "forgotten": [],
        "gone": [],
    }


def test_what_cites_a_design_note_finds_it():
    notes = re.findall(r"^### N(\d+)\. \S", (ROOT / "docs/design.md").read_text(), re.MULTILINE)
    assert len(notes) >= 45
    assert len(notes) == len(set(notes))
    for path in (*SOURCES, *PAGES):
        for cited in re.findall(r"design\.md, note N(\d+)", path.read_text()):
            assert cited in notes, f"{path}: N{cited}"


def test_lines_are_short():
    """At most 120 columns in pages and code; a line with an address may be longer, and so may a table's."""
    long = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in (*PAGES, *SOURCES)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > 120 and "://" not in line and not line.startswith("| ")
    }
    assert not long


def anchors(page: Path) -> set[str]:
    """The names by which links reach a page's headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def output_of(*command: str, cwd: Path = ROOT, **variables: str) -> str:
    """What Python prints that is given these arguments in a folder, by default the repository's root."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="another torch names nodes in other ways")
def test_graphs_in_the_page_of_concepts():
    """The example prints each piece of a graph there. ``...`` stands for lines left out; others follow each other."""
    printed: dict[str, str] = {}
    for line in output_of("examples/graph_text.py").splitlines():
        if found := re.match(r"(\w+ graph, \w+):", line):
            title = found[1]
            printed[title] = "\n"
        printed[title] += f"{line}\n"
    pieces = re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs/concepts.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(pieces) >= 8
    for piece in pieces:
        head, *lines = piece.splitlines()
        text = printed[re.match(r"\w+ graph, \w+", head)[0]]
        assert f"\n{head}\n" in text
        at = 0
        for run in "\n".join(lines).split(" ..."):
            at = text.find(f"\n{run.strip(chr(10))}\n" if run.strip() else "\n", at)
            assert at >= 0, f"{head}\n{run}"


def test_the_idea_in_one_file(tmp_path):
    """The first program of docs/concepts.md, under torchrun as the page says."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/concepts.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 60
    (tmp_path / "idea.py").write_text(code)
    output_of("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "idea.py"))


@pytest.mark.parametrize("page", ["accumulation", "checkpoints", "mixed-precision", "porting"])
@distributed(world_size=2)  # many variants of a model are compiled
def test_snippets_run(rank, world_size, tmp_path, page):
    """In the order in which they stand, in one namespace, which is no program's: ``main()`` is not called."""
    text = (ROOT / f"docs/{page}.md").read_text()
    snippets = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(snippets) >= 4
    names = {
        "build_model": functools.partial(small, blocks=2),
        "Block": Mlp,
        "mesh": init_device_mesh("cpu", (2,)),
        "loss_fn": lambda logits, targets: F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()),
        "microbatches": [batch(rank, number) for number in range(3)],
        "inputs": batch(rank, 0)[0],
        "targets": batch(rank, 0)[1],
        "path": str(tmp_path / "llama"),
    }
    if page == "checkpoints":
        if rank == 0:
            llama().save_pretrained(names["path"])
        dist.barrier()
    # generated code takes longer to compile, and is no other here
    quick = functools.partial(torch.compile, options={"codegen": "aot_eager"})
    before = Path.cwd()
    os.chdir(tmp_path)  # where snippets write files
    try:
        with mock.patch.object(torch, "compile", quick):
            for snippet in snippets:
                # the page's own line numbers in a traceback
                above = "\n" * text[: snippet.start(1)].count("\n")
                exec(compile(above + snippet[1], f"{page}.md", "exec"), names)
    finally:
        os.chdir(before)
    assert all(not param.isnan().any() for param in names["model"].state_dict().values())


def programs_of(page: str) -> list[str]:
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
    """What the command prints, without measured hardware from elsewhere."""
    cache = str(folder / "cache")
    return output_of("-m", "torch.distributed.run", *command.split(), cwd=folder, COMPILED_FSDP_CACHE_DIR=cache)


def test_the_first_program(tmp_path):
    """docs/getting-started.md, by its command: it trains, and says what was compiled. So it does on a mesh."""
    first, _, on_a_mesh = programs_of("getting-started")
    page = (ROOT / "docs/getting-started.md").read_text()
    (command,) = re.findall(r"^torchrun (.* first.py)$", page, re.MULTILINE)
    (line,) = re.findall(r"^fully_shard\(model\).*\n", first, re.MULTILINE)
    for program in (first, quickly(first.replace(line, on_a_mesh))):
        (tmp_path / "first.py").write_text(program)
        said = torchrun(command, tmp_path)
        losses = [float(loss) for loss in re.findall(r"^step \d+: loss (.*)$", said, re.MULTILINE)]
        assert len(losses) == 10
        assert losses[-1] < losses[0]
        assert "backward" in said.partition("step 9")[2]
    assert "measured with 2 ranks" in said


def test_the_program_that_saves_and_resumes(tmp_path):
    """docs/getting-started.md, by its commands. A run that is resumed prints the line of the one that was not stopped;
    in bfloat16 it trains as well."""
    (tmp_path / "train.py").write_text(quickly(programs_of("getting-started")[1]))
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


def test_the_program_of_the_page_of_checkpoints(tmp_path):
    """It prints what the page shows, but for the losses' last digits, also resumed on another number of ranks."""
    (tmp_path / "checkpoint.py").write_text(quickly(programs_of("checkpoints")[0]))
    for command, shown in sessions_of("checkpoints"):
        printed = torchrun(command, tmp_path).splitlines()
        for line, expected in zip(printed, shown.splitlines(), strict=True):
            assert line.rpartition(" ")[0] == expected.rpartition(" ")[0]
            assert float(line.rpartition(" ")[2]) == pytest.approx(float(expected.rpartition(" ")[2]), abs=1e-4)


def test_the_program_of_the_page_of_mixed_precision(tmp_path):
    """It prints the dtypes and bytes that the page shows."""
    (tmp_path / "precision.py").write_text(quickly(programs_of("mixed-precision")[0]))
    ((command, shown),) = sessions_of("mixed-precision")
    printed = torchrun(command, tmp_path)
    assert [line.split()[:-1] for line in printed.splitlines()] == [line.split()[:-1] for line in shown.splitlines()]


@pytest.mark.more
def test_the_site(tmp_path):
    """As `make docs` makes it, of all pages and of all public names, without a warning."""
    flags = re.search(r"-m sphinx (.*) docs build/site", (ROOT / "Makefile").read_text())[1]
    pytest.importorskip("sphinx", reason="Sphinx is not installed: make docs installs it")
    output_of("-m", "sphinx", *flags.split(), "docs", str(tmp_path))
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= {path.stem for path in tmp_path.glob("*.html")}
    described = (tmp_path / "api.html").read_text()
    inherited = {f"FSDPModule.{name}" for name in vars(GradientMethods) if not name.startswith("_")}
    assert "FSDPModule.set_requires_gradient_sync" in inherited
    for name in (set(compiled_fsdp.__all__) | inherited) - HANDED_ON:
        assert f'id="compiled_fsdp.{name}"' in described, name


def test_the_page_of_explain_prints_what_it_shows(capsys):
    """Its programs in one namespace; what each prints stands under it."""
    text = (ROOT / "docs/explain.md").read_text()
    pairs = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(pairs) >= 3
    names: dict[str, object] = {}
    try:
        for code, shown in pairs:
            exec(code, names)
            assert capsys.readouterr().out == shown
    finally:
        torch.distributed.destroy_process_group()
        torch.compiler.reset()
