"""What the documentation points at is there."""

import ast
import functools
import itertools
import os
import re
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
from tests.harness import batch, distributed, variants
from tests.harness.models import Mlp, small

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/design/*.md")])
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
    """Ten lines at most; and each row of the libraries that were run names a test that is there."""
    recipes = re.split(r"^## (?!A complete example)", (ROOT / "docs/ecosystem.md").read_text(), flags=re.MULTILINE)
    for code in re.findall(r"^```\w+\n(.*?)^```", "".join(recipes[1:]), re.MULTILINE | re.DOTALL):
        assert len([line for line in code.splitlines() if line.strip()]) <= 10, code
    page = (ROOT / "docs/compatibility.md").read_text()
    table = page.partition("\n## Libraries that were run\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!library).*$", table, re.MULTILINE)
    assert len(rows) >= 15
    for row in rows:
        text = (ROOT / "tests/clients" / re.search(r"`(test_\w+\.py)::", row)[1]).read_text()
        for function in re.findall(r"::(test_\w+)`", row):
            assert f"def {function}(" in text, row


def mapped_files() -> list[str]:
    """The files in the map of docs/architecture.md: a folder stands at a line's beginning, its files are indented."""
    listed = re.search(
        r"^## Map of the files\n.*?^```\n(.*?)^```",
        (ROOT / "docs/architecture.md").read_text(),
        re.MULTILINE | re.DOTALL,
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
    """Code cites a note by its page and title. Each note has a decision and its reason."""
    notes: dict[str, list[str]] = {}
    for page in ROOT.glob("docs/design/*.md"):
        for title, text in re.findall(r"^## ([^\n]+)\n\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL):
            assert text.startswith("**Decision.** "), f"{page.name}: {title}"
            assert "\n**Why.** " in text, f"{page.name}: {title}"
            notes.setdefault(page.name, []).append(title)
    assert sum(map(len, notes.values())) >= 45
    cited = 0
    for path in SOURCES:
        for page, titles in re.findall(r'docs/design/([\w-]+\.md)((?:[,;] "[^"\n]+")+)', path.read_text()):
            for title in re.findall(r'"([^"]+)"', titles):
                assert title in notes.get(page, ()), f"{path}: {page}, {title!r}"
                cited += 1
        for page in re.findall(r"^# Why: (\S+\.md)", path.read_text(), re.MULTILINE):
            assert (ROOT / page).exists(), f"{path}: {page}"
    assert cited >= 100


def test_lines_are_short():
    """At most 120 columns in pages and code; a line with an address may be longer, and so may a table's."""
    long = {
        f"{path.relative_to(ROOT)}:{number}"
        for path in (*PAGES, *SOURCES)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > 120 and "://" not in line and not line.startswith("| ")
    }
    assert not long


def test_lines_of_code_are_seen_whole():
    """The site shows about 92 columns of a block of code."""
    blocks = {
        page.name: re.findall(r"^```(?:python|py|sh)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        for page in PAGES
    }
    long = {f"{name}: {line}" for name, of in blocks.items() for line in "".join(of).splitlines() if len(line) > 92}
    assert not long


def anchors(page: Path) -> set[str]:
    """The names by which links reach a page's headings, as GitHub makes them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


def output_of(*command: str, folder: Path = ROOT, **variables: str) -> str:
    """What Python prints that is given these arguments in ``folder``."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def save_program(code: str, file: Path) -> None:
    """Save a program for torchrun, whose ranks end without the interpreter's own end.

    A model's mesh keeps gloo's threads. One of them that frees a tensor while the interpreter ends aborts the process,
    with and without this package.
    """
    file.write_text(f"{code}\nimport os, sys\nsys.stdout.flush()\nsys.stderr.flush()\nos._exit(0)\n")


@pytest.mark.more
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="another torch names nodes in other ways")
def test_graphs_in_the_page_of_concepts():
    """The example prints each piece of a graph there. ``...`` stands for lines left out; others follow each other."""
    printed: dict[str, str] = {}
    for line in output_of("examples/graph_text.py").splitlines():
        if found := re.match(r"(\w+ graph, \w+):", line):
            title = found[1]
            printed[title] = "\n"
        printed[title] += f"{line}\n"
    page = (ROOT / "docs/concepts.md").read_text()
    pieces = re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(pieces) >= 8
    for piece in pieces:
        head, *lines = piece.splitlines()
        text = printed[re.match(r"\w+ graph, \w+", head)[0]]
        assert f"\n{head}\n" in text
        at = 0
        for run in "\n".join(lines).split(" ..."):
            at = text.find(f"\n{run.strip(chr(10))}\n" if run.strip() else "\n", at)
            assert at >= 0, f"{head}\n{run}"
    said = re.findall(r"^\w+ graph, (?:plan|verify): .*", page, re.MULTILINE)
    assert len(said) == 3
    for line in said:
        assert f"\n{line}\n" in "".join(printed.values()), line


@pytest.mark.more
def test_the_idea_in_one_file(tmp_path):
    """The first program of docs/concepts.md, under torchrun as the page says."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/concepts.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 60
    save_program(code, tmp_path / "idea.py")
    output_of("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "idea.py"))


@pytest.mark.parametrize("page", variants(["checkpoints", "errors", "faq", "mixed-precision", "porting"], "faq"))
@distributed(world_size=2)  # many variants of a model are compiled
def test_snippets_run(rank, world_size, page, tmp_path):
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
        "folder": tmp_path / "checkpoint",
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


def pairs_of(text: str) -> list[tuple[str, str]]:
    return list(itertools.pairwise(text.split()))


def test_messages_on_the_page_of_errors_are_those_of_the_code():
    """Most neighbouring words of a quoted message are neighbours in a text of the code; values stand in between."""
    nodes = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    known = {pair for text in texts for pair in pairs_of(text)}
    page = (ROOT / "docs/errors.md").read_text()
    quoted = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(quoted) >= 100
    shares = {message: sum(pair in known for pair in pairs_of(message)) / len(pairs_of(message)) for message in quoted}
    assert min(shares.values()) >= 0.3, min(shares, key=shares.__getitem__)
    assert sum(shares.values()) / len(shares) > 0.75


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
