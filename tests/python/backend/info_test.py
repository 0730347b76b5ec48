"""``python -m astrai.info`` on a machine without a GPU, and with one that is pretended."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import astrai
from astrai import info


def run(*arguments, **environment):
    root = str(Path(astrai.__file__).parent.parent)
    path = os.pathsep.join([root, *[p for p in sys.path if p]])
    result = subprocess.run(
        [sys.executable, "-m", "astrai.info", *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_text_says_what_was_built_what_is_here_and_what_ops_take():
    text = run(CUDA_VISIBLE_DEVICES="", ASTR_BACKEND="torch_native")
    for heading in (
        f"astrai {astrai.__version__}",
        "Built",
        "This machine",
        "What ops take on cpu",
    ):
        assert heading in text.split("\n"), text
    assert "  No GPU: " in text
    assert "  ASTR_BACKEND=torch_native" in text
    assert "=> torch_native (origin=env)" in text
    assert "rotary: apply_rotary_emb, bf16" in text


def test_json_is_one_object():
    data = json.loads(run("--json", CUDA_VISIBLE_DEVICES=""))
    assert set(data) == {"astrai", "modules", "machine", "environment", "ops"}
    assert data["machine"]["gpus"] == [] and data["machine"]["no_gpu_because"]
    for entry in data["ops"]:
        assert entry["device"] == "cpu" and "ERROR" not in entry["takes"], entry
        assert any(line.startswith("cuda: ") for line in entry["why"])
    built = {path.name.split(".", 1)[0] for path in info.LIB_DIR.glob("*.so")}
    assert {module["name"] for module in data["modules"]} == built
    if "TEST_SRCDIR" in os.environ:  # under Bazel the modules are always there
        assert built >= {"attn_decode", "attn_prefill", "rotary_emb"}
    for module in data["modules"]:
        assert not module["available"] and module["reason"]
        assert module["archs"] and module["cuda"] and module["bytes"] > 0


@pytest.fixture
def report():
    return {
        "astrai": "1.2.3",
        "modules": [
            {
                "name": "attn_decode",
                "file": "attn_decode.so",
                "bytes": 2_500_000,
                "available": True,
                "archs": ["sm_80", "sm_90a"],
                "cuda": "13.0",
                "reason": None,
            },
            {
                "name": "rotary_emb",
                "file": "rotary_emb.so",
                "bytes": 400_000,
                "available": False,
                "archs": None,
                "cuda": None,
                "reason": "It is broken.",
            },
        ],
        "machine": {
            "python": "3.11.7",
            "platform": "Linux",
            "torch": "2.11.0",
            "torch_cuda": "13.0",
            "driver": "580.1",
            "flash_attn": None,
            "gpus": [
                {
                    "index": 0,
                    "name": "NVIDIA H200",
                    "capability": "9.0",
                    "memory_gib": 139.8,
                    "sms": 132,
                }
            ],
            "no_gpu_because": None,
        },
        "environment": {},
        "ops": [
            {"family": "f", "call": "a", "device": "cuda:0", "takes": "x", "why": ["x: MATCH"]},
            {"family": "f", "call": "b", "device": "cuda:0", "takes": "x", "why": ["x: MATCH"]},
            {"family": "f", "call": "c", "device": "cuda:0", "takes": "y", "why": ["x: reject"]},
        ],
    }


def test_rendering(report):
    text = info.render(report)
    assert "  attn_decode  2.5 MB  CUDA 13.0  sm_80 sm_90a  ready\n" in text
    assert "  rotary_emb   0.4 MB" in text and "  It is broken.\n" in text
    gpu = "  GPU 0: NVIDIA H200, compute capability 9.0, 139.8 GiB, 132 SMs\n"
    assert gpu in text and "No GPU" not in text
    expected = """
What ops take on cuda:0
  f: a
  f: b
      x: MATCH
      => x
  f: c
      x: reject
      => y"""
    assert text.endswith(expected)


def test_package_without_modules(report):
    report["modules"] = []
    assert "no compiled modules in astrai/extension/lib" in info.render(report)
