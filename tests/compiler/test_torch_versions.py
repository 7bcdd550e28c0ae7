"""Other versions of torch: one that is not known yet, names that are gone, the suite on all of them."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import compiled_fsdp
from compiled_fsdp.compat.patches import PATCHES, RECOMPILE_LIMIT, fits, install, required_names
from compiled_fsdp.compat.versions import is_known, is_there
from compiled_fsdp.tools.cli.patches import patches
from tests.versions import Result, last_line, nightly_of, table

COMPAT = Path(compiled_fsdp.__file__).parent / "compat"

NEWER = """
import warnings
import torch
torch.__version__ = "2.99.0"
{change}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    {run}
for warning in caught:
    if "compiled_fsdp" in str(warning.message):
        print("WARNED", warning.message)
"""

TRAIN = """
    import torch.distributed as dist
    from compiled_fsdp import fully_shard
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(torch.nn.Linear(4, 4))
    run = torch.compile(model, backend="compiled_fsdp", options={"codegen": "aot_eager"})
    run(torch.ones(2, 4)).sum().backward()
    print("TRAINED", model.weight.grad is not None)
    dist.destroy_process_group()
"""


def _lines(run: str, change: str = "") -> list[str]:
    script = NEWER.format(change=change, run=run.strip())
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("2.11.0", True), ("2.13.0+cpu", True), ("2.15.1", True), ("2.15.0a0+git1234", False),
        ("2.15.0.dev20261101+cpu", False), ("2.15.0rc1", False), ("2.16.0", False), ("3.0", False), ("unknown", False),
    ],
)  # fmt: skip
def test_which_versions_are_known(version, known):
    assert is_known(version) is known


def test_every_private_name_is_there():
    """In the torch that runs this, which is a known one; and there are names to be found."""
    names = required_names()
    assert len(names) > 50
    if is_known(torch.__version__):
        assert [name for name in names if not is_there(name)] == []


@pytest.mark.more
def test_a_newer_torch_is_one_warning_and_trains():
    lines = _lines(TRAIN)
    warned = [line for line in lines if line.startswith("WARNED")]
    assert "TRAINED True" in lines
    # an old torch that calls itself a newer one lacks functions that are replaced in that one
    assert len(warned) == 1 + sum(not patch.is_needed for patch in PATCHES)
    assert "tested with torch 2.11 to 2.15, and not with torch 2.99.0" in warned[0]


def test_a_name_that_is_gone_is_an_error_with_the_versions_that_have_it():
    """When it is needed, and with the rest at work; the warning names it, too."""
    call = """
    from compiled_fsdp.compat.autograd import local_of
    from compiled_fsdp.compat.dynamo import is_dynamo_restart
    try:
        is_dynamo_restart(ValueError())
    except ImportError as error:
        print("ERROR", error)
    print("REST", local_of)
    """
    lines = _lines(call, "import torch._dynamo.exc; del torch._dynamo.exc.RestartAnalysis")
    (error,) = [line for line in lines if line.startswith("ERROR")]
    assert "torch 2.99.0 has no torch._dynamo.exc.RestartAnalysis, which is_dynamo_restart needs" in error
    assert "torch 2.11 to 2.15 have it" in error
    (warned,) = [line for line in lines if line.startswith("WARNED")]
    assert "This torch has no torch._dynamo.exc.RestartAnalysis" in warned
    assert any(line.startswith("REST <function") for line in lines)


@pytest.mark.more
def test_a_known_torch_says_nothing():
    lines = _lines("import compiled_fsdp.compat", 'torch.__version__ = "2.15.0"')
    assert not any(line.startswith("WARNED") for line in lines)


# ---- replacements inside torch ---------------------------------------------------------------------------------------
def test_the_page_is_the_table():
    """Made by `python -m compiled_fsdp patches --page > docs/patches.md`."""
    done = CliRunner().invoke(patches, ["--page"])
    assert done.output == (COMPAT.parents[1] / "docs" / "patches.md").read_text()


def test_this_torch_has_it_all():
    if is_known(torch.__version__):
        done = CliRunner().invoke(patches)
        assert done.exit_code == 0, done.output
        assert "all there" in done.output


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("del frame.exceeds_recompile_limit", "exceeds_recompile_limit is gone."),
        ("frame.exceeds_recompile_limit = lambda code: 0", "takes (code), and not (cache_size, compile_id)."),
        ("frame._compile = lambda: 0", "is called by _compile, which has no variable code, compiler_fn"),
    ],
)
def test_a_torch_that_differs_is_named(monkeypatch, change, problem):
    """By the command; where the function is to be replaced it is left as it is, with one warning."""
    from torch._dynamo import convert_frame as frame

    for name in ("exceeds_recompile_limit", "_compile"):
        monkeypatch.setattr(frame, name, getattr(frame, name))  # puts it back
    exec(change, {"frame": frame})
    before = vars(frame).get("exceeds_recompile_limit")
    done = CliRunner().invoke(patches)
    assert done.exit_code == 1
    assert problem in done.output
    fits.cache_clear()
    with pytest.warns(UserWarning, match="one rank alone may run uncompiled"):
        install(dataclasses.replace(RECOMPILE_LIMIT, why="tried"), lambda function: pytest.fail("replaced"))
    assert vars(frame).get("exceeds_recompile_limit") is before
    fits.cache_clear()


@pytest.mark.more
def test_nothing_is_replaced_at_import():
    imports = """
    import inspect
    import compiled_fsdp.compiler.backend
    from compiled_fsdp import explain, fully_shard, profile
    from compiled_fsdp.compat.patches import PATCHES
    functions = [getattr(patch.place(), patch.attribute) for patch in PATCHES if patch.is_needed]
    print("REPLACED", [function for function in functions if hasattr(function, "__wrapped__")])
    """
    assert "REPLACED []" in _lines(imports, f'torch.__version__ = "{torch.__version__}"')


# ---- the suite on all of them ----------------------------------------------------------------------------------------
def test_a_nightly_is_what_is_newer_than_every_release():
    assert nightly_of("torch (2.15.0)\nAvailable versions: 2.16.0.dev20261123+cpu, 2.15.0, 2.14.1\n")
    assert nightly_of("torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1\n") is None
    assert nightly_of("") is None


def test_the_table_says_how_it_went():
    output = (
        "...\n========= 2 failed, 1400 passed in 1200.00s (0:20:00) =========\nmake: *** [Makefile:31: test] Error 1\n"
    )
    assert last_line(output) == "2 failed, 1400 passed in 1200.00s (0:20:00)"
    assert last_line("ERROR: No matching distribution found for torch==9\n").startswith("ERROR: No matching")
    shown = table([Result("2.11.0", True, "1402 passed"), Result("nightly", None, "pip finds no pre-release")])
    assert "| 2.11.0 | passed | 1402 passed |" in shown
    assert "| nightly | skipped | pip finds no pre-release |" in shown
