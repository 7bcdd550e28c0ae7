"""What can happen to the folder of compiled code: each time a clean compile, or an error that names what is wrong."""

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from compiled_fsdp.compiler.compilation import Compilation
from compiled_fsdp.ranks.failures import RanksDiffer
from tests.compiler.test_code_cache import as_new_process
from tests.compiler.test_one_rank_compiles import Seen, run, same_step
from tests.harness import RankFailure, Ranks, run_ranks
from tests.harness.spawn import TIMEOUT

pytestmark = pytest.mark.more


@pytest.fixture(autouse=True)
def caches_are_on(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    monkeypatch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "1")


def files_in(folder: str) -> list[Path]:
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def cut_short(folder: str, share: float) -> None:
    for path in files_in(folder):
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


DAMAGES: dict[str, Any] = {
    "half": lambda folder: cut_short(folder, 0.5),
    "empty": lambda folder: cut_short(folder, 0.0),
}


def damaged(rank: int, world_size: int, folder: str) -> dict[str, Seen]:
    found = {}
    for name, damage in {"whole": lambda folder: None, **DAMAGES}.items():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = own = f"{folder}/{name}"
        as_new_process()
        run(rank)
        as_new_process()
        if rank == 0:
            damage(own)
        torch.distributed.barrier()
        found[name] = run(rank)
    return found


@pytest.fixture(scope="module")
def after_damage():
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
        patch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "1")
        by_rank = run_ranks(damaged, 2, folder)
    return {name: [results[name] for results in by_rank] for name in by_rank[0]}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_are_damaged_are_compiled_again(after_damage, damage):
    assert all(rank.from_cache == [True, True] for rank in after_damage["whole"])
    assert same_step(after_damage[damage], after_damage["whole"])


def one_run(rank: int, world_size: int, folder: str) -> Seen:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    return run(rank)


def test_two_jobs_share_a_folder(tmp_path):
    """They start at the same time, with an empty folder."""
    found: list[Any] = [None, None]

    def job(number: int) -> None:
        found[number] = run_ranks(one_run, 2, str(tmp_path))

    threads = [threading.Thread(target=job, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same_step(found[0], found[1])


def killed(rank: int, world_size: int, folder: str) -> None:
    """Rank 0 compiles for both, and is killed while it generates code."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    for_inductor = Compilation.for_inductor

    def die(self: Any, *given: Any) -> Any:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return for_inductor(self, *given)

    start = time.perf_counter()
    with (
        mock.patch.object(Compilation, "for_inductor", die),
        pytest.raises(RanksDiffer, match=r"rank 0 of the group has ended .process"),
    ):
        run(rank)
    raise ValueError(f"this rank knows after {time.perf_counter() - start:.0f} s")


@pytest.mark.timeout(0)
def test_the_rank_that_compiles_for_others_is_killed(tmp_path):
    with pytest.raises(RankFailure) as caught, Ranks(2) as ranks:
        ranks.run(killed, str(tmp_path), grace=TIMEOUT)
    assert "this rank knows" in str(caught.value)


def cannot_write(rank: int, world_size: int, folder: str) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    with pytest.raises(OSError, match=folder):  # torch's own error, if torch looks first
        run(rank)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "a file").write_text("")
    run_ranks(cannot_write, 2, str(tmp_path / "a file" / "cache"))
