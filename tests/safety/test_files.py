"""Files that several processes write and read, whatever the umask is."""

import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiled_fsdp.base import logs
from compiled_fsdp.base.files import OURS, READABLE, replace_text, write_text
from compiled_fsdp.buckets.agreed_plan import AgreedPlan
from compiled_fsdp.compiler.cached_code import CachedCode, Decision
from compiled_fsdp.compiler.samples import Samples, keep, kept, samples_from_json
from compiled_fsdp.passes.cost import PROFILES

ROOT = Path(__file__).parents[2]
CODE = CachedCode((Decision("cut", (), "[]"),), (), AgreedPlan((), (), {}))


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def rights(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_nobody_else_may_write(umask, tmp_path):
    replace_text(tmp_path / "a" / "b" / "ours.json", "{}", OURS)
    replace_text(tmp_path / "c" / "d" / "shared.json", "{}", READABLE)
    write_text(tmp_path / "asked_for.html", "page")
    assert [rights(tmp_path / name) for name in ("a", "a/b", "a/b/ours.json")] == [0o700, 0o700, 0o600]
    readable = [rights(tmp_path / name) for name in ("c", "c/d", "c/d/shared.json", "asked_for.html")]
    assert readable == [0o755 & ~umask, 0o755 & ~umask, 0o644 & ~umask, 0o644 & ~umask]


def test_caches_are_written_so(umask, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    CODE.save(["key"])
    keep(tmp_path / "measured" / "hardware-1.json", PROFILES["h100"].to_json(), "[]")
    files = [path for path in tmp_path.rglob("*") if "compiled_fsdp" in str(path) or "measured" in str(path)]
    assert len([path for path in files if path.is_file()]) == 3
    assert not [path for path in files if rights(path) & 0o022]


def test_what_is_not_written_to_its_end_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "kept.json"
    replace_text(path, "before", OURS)

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="No space"):
        replace_text(path, "after", OURS)
    assert [file.name for file in tmp_path.iterdir()] == ["kept.json"]
    assert path.read_text() == "before"


WRITER = """
import sys
from pathlib import Path
from compiled_fsdp.base.files import OURS, replace_text
for _ in range(100):
    replace_text(Path(sys.argv[1]), sys.argv[2] * 300_000, OURS)
"""


def test_two_processes_write_and_one_reads(tmp_path):
    path = tmp_path / "shared.json"
    replace_text(path, "a", OURS)
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, letter], cwd=ROOT) for letter in "ab"]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        text = path.read_text()
        assert text in ("a", "a" * 300_000, "b" * 300_000)
        seen.add(text[0] + str(len(text)))
    assert [writer.returncode for writer in writers] == [0, 0]
    assert {"a300000", "b300000"} <= seen
    assert [file.name for file in tmp_path.iterdir()] == ["shared.json"]


@pytest.mark.parametrize("damage", ["half", "empty", "binary", "foreign", "zero", "nan", "below", "samples"])
def test_damaged_measurements_are_ignored_with_one_warning(damage, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logs, "_logged", set())
    path, text = tmp_path / "hardware-1.json", PROFILES["h100"].to_json()
    samples = (Samples("gather", 2, 1, (1,), (0.5,)),)
    keep(path, text, '[{"kind": "gather", "ranks": 2, "nodes": 1, "sizes": [1], "seconds": [0.5]}]')
    assert kept(path) == (PROFILES["h100"], samples)
    if damage == "samples":
        path.with_suffix(".samples").write_text("[1]")
    else:
        broken = {"half": text[: len(text) // 2], "empty": "", "binary": b"\xff\xfe\x00", "foreign": '{"gpu": "h100"}'}
        for name, value in (("zero", 0), ("nan", float("nan"))):
            broken[name] = json.dumps(json.loads(text) | {"copy": value})
        broken["below"] = json.dumps(json.loads(text) | {"latency": -1.0})
        content = broken[damage]
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.WARNING):
        assert kept(path) is None
        assert kept(path) is None
    assert len(caplog.records) == 1
    assert str(path) in caplog.text


def test_a_missing_measurement_is_nothing_to_warn_of(tmp_path, caplog):
    assert kept(tmp_path / "hardware-1.json") is None
    assert not caplog.records


@pytest.mark.parametrize(
    "text", ["", "{", '{"decisions": 1, "reports": []}', '{"decisions": [], "reports": [], "x": 1}']
)
def test_damaged_notes_of_code_are_errors(text, tmp_path, monkeypatch):
    """The backend says so in one line and compiles (tests/compiler/test_code_cache.py)."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert CachedCode.load(["key"]) is None
    CODE.save(["key"])
    assert CachedCode.load(["key"]) == CODE
    (path,) = tmp_path.rglob("*.json")
    path.write_text(text)
    with pytest.raises(ValueError, match=r"JSON|should be"):
        CachedCode.load(["key"])


def test_samples_of_another_version():
    with pytest.raises(ValueError, match="has no colour"):
        samples_from_json('[{"kind": "gather", "ranks": 2, "nodes": 1, "sizes": [], "seconds": [], "colour": 1}]')
