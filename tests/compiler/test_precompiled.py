"""Code that was compiled before, in a file: loaded, not for this process, without a graph, damaged, or unsafe."""

import logging
import os
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import compiled_fsdp
from compiled_fsdp import fully_shard, load_precompiled
from compiled_fsdp.base import files, logs
from compiled_fsdp.compat.code_cache import cache_directory
from compiled_fsdp.compiler import precompiled
from compiled_fsdp.compiler.precompiled import facts_here, save_precompiled
from tests.harness import compiled
from tests.harness.fake import fake_group


class Net(nn.Module):
    def __init__(self, doubles: bool = False, wide: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, wide), nn.Linear(wide, 3)
        self.doubles = doubles

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x * 2 if self.doubles else x)


def step(model: nn.Module, **options) -> list[bool]:
    """Take a step, and return for each graph whether its code is from the cache."""
    torch.compiler.reset()
    fully_shard(model)
    run = compiled(model, codegen="inductor", **options)
    run(torch.ones(5, 4)).sum().backward()
    return [graph.from_cache for graph in compiled_fsdp.explain(model).graphs]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Code for a step of ``Net`` on two ranks."""
    folder, path = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("file") / "net.precompiled"
    with pytest.MonkeyPatch.context() as patch, fake_group(2):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        patch.delenv("LOCAL_WORLD_SIZE", raising=False)
        assert save_precompiled(path, folder, facts_here(), [0]) == 0
        assert not path.exists()
        assert step(Net()) == [False, False]
        assert save_precompiled(path, folder, facts_here(), [0]) == 1
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and no file loaded."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(precompiled, "_loaded", {})
    monkeypatch.setattr(logs, "_logged", set())
    return folder


def warnings(caplog) -> list[str]:
    named = precompiled.log.name
    return [record.message for record in caplog.records if record.name == named and record.levelno == logging.WARNING]


def test_the_step_is_in_the_file(file, cache, caplog):
    with fake_group(2):
        assert load_precompiled(file)
        assert step(Net()) == [True, True]
        assert load_precompiled(str(file))  # what is there stays
    assert warnings(caplog) == []


def test_made_for_other_ranks(file, cache, caplog, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with fake_group(4):
        assert not load_precompiled(file)
        assert step(Net()) == [False, False]
    (warning,) = warnings(caplog)
    assert "for another number of ranks (2, here 4); LOCAL_WORLD_SIZE (not set, here 2)" in warning


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ({}, {"bucket": "module"}, "here option bucket='module'; in the file option bucket='auto'"),
        ({"wide": 5}, {}, "here "),
        ({"doubles": True}, {}, "the code of the model or of its loss"),
    ],
    ids=["option", "sizes", "code"],
)
def test_a_graph_is_missing(kind, options, why, file, cache, caplog):
    """It is compiled, and one warning says why."""
    with fake_group(2):
        assert load_precompiled(file)
        assert step(Net(**kind), **options) == [False, False]
        step(Net(), bucket="parameter")
    (warning,) = warnings(caplog)
    assert why in warning
    assert str(file) in warning


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-100])


def another_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def a_text(path):
    path.write_text("no archive")


def without_manifest(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("cache/one", "code")


def outside_of_the_folder(path):
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("cache/../one", "code")


def from_the_root(path):
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"cache/{path.parent / 'one'}", "code")


@pytest.mark.parametrize(
    "damage", [cut_short, another_byte, a_text, without_manifest, outside_of_the_folder, from_the_root]
)
def test_a_damaged_file(damage, file, cache, tmp_path):
    path = tmp_path / "copy"
    path.write_bytes(file.read_bytes())
    damage(path)
    with fake_group(2), pytest.raises(ValueError, match="copy is damaged, or was not written"):
        load_precompiled(path)
    assert not (tmp_path / "one").exists()


def test_no_file(cache):
    with fake_group(2), pytest.raises(FileNotFoundError, match="nothing"):
        load_precompiled("nothing")


@pytest.mark.parametrize("rights", [0o707, 0o1777])
@pytest.mark.parametrize("below", ["", "fxgraph"])
def test_a_folder_that_others_can_write(below, rights, file, cache):
    """No code from it runs, whether it was there before or comes from a file."""
    cache.chmod(0o755)
    (cache / below).mkdir(exist_ok=True)
    (cache / below).chmod(rights)
    with fake_group(2):
        with pytest.raises(ValueError, match=r"every user can write to .*chmod 700"):
            load_precompiled(file)
        with pytest.raises(ValueError, match="TORCHINDUCTOR_CACHE_DIR"):
            step(Net())


def test_a_folder_that_nobody_else_can_enter(cache):
    (cache / "fxgraph").mkdir()
    (cache / "fxgraph").chmod(0o777)
    files.check_folder_is_ours(cache)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_folder_that_a_group_can_write(is_own, cache, monkeypatch):
    """A group for this user alone does no harm."""
    cache.chmod(0o770)
    monkeypatch.setattr(files, "_is_own_group", lambda group: is_own)
    with nullcontext() if is_own else pytest.raises(ValueError, match="a group can write"):
        files.check_folder_is_ours(cache)


@pytest.mark.parametrize(("owner", "is_fine"), [(0, True), (1, False), (2, True)])
def test_the_owner_of_a_folder(owner, is_fine, cache, monkeypatch):
    """Root and user 2, who runs this, are fine."""
    monkeypatch.setattr(files.os, "getuid", lambda: 2)
    entry, stat = os.stat_result((0o40700, 0, 0, 1, owner, 0, 0, 0, 0, 0)), Path.stat
    monkeypatch.setattr(Path, "stat", lambda self, **_: entry if self == cache else stat(self))
    with nullcontext() if is_fine else pytest.raises(ValueError, match="belongs to another user"):
        files.check_folder_is_ours(cache)


def test_a_missing_folder_is_made_for_this_user_alone(cache, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache / "new"))
    before = os.umask(0)
    try:
        files.check_folder_is_ours(cache_directory() / "below")
    finally:
        os.umask(before)
    for folder in (cache / "new", cache / "new" / "below"):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_written(file, cache, monkeypatch, tmp_path):
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "a file" / "cache"))
    with fake_group(2), pytest.raises(OSError, match="cannot write to Inductor's cache folder"):
        load_precompiled(file)


def test_caches_are_off(file, cache, caplog, monkeypatch):
    monkeypatch.setattr(torch.compiler.config, "force_disable_caches", True)
    with fake_group(2):
        assert not load_precompiled(file)
    (warning,) = warnings(caplog)
    assert "caches of compiled code are off" in warning


def test_code_that_no_cache_keeps(file, cache, caplog):
    with fake_group(2):
        assert load_precompiled(file)
        step(Net(), inductor={"triton.cudagraphs": True}, kernels=False)
    (warning,) = warnings(caplog)
    assert "no cache keeps such code" in warning
