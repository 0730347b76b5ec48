"""Discovery, lazy import, and the true cause of what is not available."""

import importlib.machinery
import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch

from astrai.extension import loader

NAMES = ("attn_decode", "attn_paged_decode", "attn_paged_prefill", "attn_prefill", "rotary_emb")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """The loader with an empty memory and a folder of its own."""
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(loader, "_LIB_DIR", tmp_path)
    return tmp_path


class FakeModule:
    def __init__(self, reason=""):
        self.reason = reason

    def why_no_device(self):
        return self.reason


def suffix():
    return importlib.machinery.EXTENSION_SUFFIXES[0]


def environment():
    """For a child process that imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_names_are_sorted_and_complete():
    assert sorted(loader.KERNEL_NAMES) == loader.KERNEL_NAMES
    assert set(NAMES) <= set(loader.KERNEL_NAMES)


def test_discovery_takes_the_text_before_the_first_dot(tmp_path):
    for name in ("b.cpython-311-x86_64-linux-gnu.so", "a.so", "a.abi3.so", "c.py", "d.so.txt"):
        (tmp_path / name).touch()
    assert loader._discover(tmp_path) == ["a", "b"]


def test_nothing_is_imported_before_the_first_use():
    code = (
        "import sys, astrai.extension as e\n"
        "loaded = [m for m in sys.modules if m.startswith('astrai.extension.lib.')]\n"
        "assert loaded == [], loaded\n"
        "e.is_available('rotary_emb')\n"
        "assert 'astrai.extension.lib.rotary_emb' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def test_unknown_name():
    assert loader.is_available("no_such_kernel") is False
    with pytest.raises(RuntimeError) as caught:
        loader.get_module("no_such_kernel")
    assert str(caught.value) == (
        "CUDA kernel 'no_such_kernel' is not available. There is no kernel of that name; this "
        f"package has: {', '.join(loader.KERNEL_NAMES)}."
    )


def test_case_a02_missing_file_is_named_with_the_command_that_brings_it(fresh):
    assert not loader.is_available("attn_decode")
    with pytest.raises(RuntimeError) as caught:
        loader.get_module("attn_decode")
    assert str(caught.value) == (
        f"CUDA kernel 'attn_decode' is not available. Its file attn_decode.*.so is missing from "
        f"{fresh}. Reinstall the package: pip install --force-reinstall astrai."
    )


def test_case_a02_broken_file(fresh, caplog):
    path = fresh / f"attn_decode{suffix()}"
    path.write_bytes(b"\x7fELF")
    with caplog.at_level(logging.WARNING, logger=loader.__name__):
        assert not loader.is_available("attn_decode")
        assert not loader.is_available("attn_decode")
    assert len(caplog.records) == 1  # kept, and logged once
    with pytest.raises(RuntimeError) as caught:
        loader.get_module("attn_decode")
    message = str(caught.value)
    assert message.startswith(
        f"CUDA kernel 'attn_decode' is not available. Its file {path} cannot be loaded: "
    )
    assert "file too short" in message and "pip install --force-reinstall astrai" in message


def test_file_for_another_python(fresh):
    name = "attn_decode.cpython-35m-x86_64-linux-gnu.so"
    (fresh / name).touch()
    assert f"The package holds {name}, which another Python" in loader.why_unavailable(
        "attn_decode"
    )


@pytest.mark.parametrize(
    "reason",
    [
        "This machine has no GPU, or no NVIDIA driver is installed.",
        "The NVIDIA driver is too old: it supports CUDA 12.4, and these kernels are built with "
        "CUDA 13, which needs driver 580 or newer.",
        "The GPU has compute capability 7.5 (older than sm_80), and this build has kernels for "
        "sm_80 only.",
    ],
)
def test_reason_of_the_device(fresh, monkeypatch, reason):
    monkeypatch.setattr(loader, "_import", lambda name: loader._Loaded(FakeModule(), reason))
    assert not loader.is_available("attn_decode")
    with pytest.raises(RuntimeError) as caught:
        loader.get_module("attn_decode")
    assert str(caught.value) == f"CUDA kernel 'attn_decode' is not available. {reason}"


@pytest.mark.parametrize("name", NAMES)
def test_each_module_imports_on_this_machine_and_tells_about_the_device(name):
    reason = loader.why_unavailable(name)
    module = loader._loaded[name].module
    assert module is not None, reason
    assert module.why_no_device() == reason
    assert callable(getattr(module, name)) and callable(module.direct)
    info = module.build_info()
    assert info["name"] == name and info["archs"]
    if not torch.cuda.is_available():
        assert "GPU" in reason or "driver" in reason
        with pytest.raises(RuntimeError, match=f"CUDA kernel '{name}' is not available. "):
            loader.get_module(name)


@pytest.mark.parametrize("name", NAMES)
def test_case_a01_no_symbol_of_torch_is_needed_or_shown(name):
    path = loader._find_file(name)
    assert path is not None
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm (binutils) is not installed")
    symbols = subprocess.run(
        [nm, "-D", str(path)], check=True, capture_output=True, text=True
    ).stdout
    assert "PyInit_" + name in symbols
    for forbidden in ("c10", "_ZN2at", "torch", "libcudart"):
        assert forbidden not in symbols
    defined = subprocess.run(
        [nm, "-D", "--defined-only", str(path)], check=True, capture_output=True, text=True
    ).stdout.split()
    assert defined[2::3] == ["PyInit_" + name]
