"""@torch: PyTorch for tests and the demo, from the lock or from the machine's own Python.

The kernels and the wheel are built without torch; only what runs Python needs it.
"""

load(":wheels.bzl", "fetch_wheels", "host_python", "write_site_build")

_MINIMUM = "2.6"

# Prints the version and the folder that holds the package, without the cost of importing it.
_FIND = """
import importlib.metadata, importlib.util, os, sys
spec = importlib.util.find_spec("torch")
if spec is None:
    sys.exit("this Python has no torch")
version = importlib.metadata.version("torch")
if tuple(int(p) for p in version.split("+")[0].split(".")[:2]) < tuple(int(p) for p in sys.argv[1].split(".")):
    sys.exit("its torch is " + version)
print(os.path.dirname(os.path.dirname(os.path.realpath(spec.origin))))
"""

_SYSTEM_BUILD = """\
load("@rules_python//python:defs.bzl", "py_library")

package(default_visibility = ["//visibility:public"])

# The folder that holds the machine's torch (and all else that is installed there).
filegroup(
    name = "tree",
    srcs = ["site-packages"],
)

# Empty: the interpreter that runs the tests finds torch among its own packages.
py_library(name = "site")
"""

def _system(rctx):
    python = host_python(rctx)
    found = rctx.execute([python, "-c", _FIND, _MINIMUM])
    if found.return_code:
        fail("--config=system_torch needs torch {} or newer in {}, but {}".format(
            _MINIMUM,
            python,
            found.stderr.strip().split("\n")[-1],
        ))
    rctx.symlink(found.stdout.strip(), "site-packages")
    rctx.file("BUILD.bazel", _SYSTEM_BUILD)

def _is_cuda_build(rctx):
    for entry in rctx.path("site-packages").readdir():
        if entry.basename.startswith("torch-") and entry.basename.endswith(".dist-info"):
            metadata = rctx.read(entry.get_child("METADATA"))
            return "Requires-Dist: nvidia-" in metadata or "Requires-Dist: cuda-" in metadata
    fail("the torch wheel has no METADATA")

def _torch_impl(rctx):
    if rctx.getenv("ASTRAI_TORCH", "lock") == "system":
        _system(rctx)
        return
    rctx.report_progress("torch from the lock (--config=system_torch takes the machine's own)")
    fetch_wheels(rctx, [rctx.attr.lock], "site-packages", compile = True)
    if _is_cuda_build(rctx):
        fetch_wheels(rctx, [rctx.attr.cuda_lock], "site-packages")
    write_site_build(rctx)

torch_repository = repository_rule(
    implementation = _torch_impl,
    attrs = {
        "cuda_lock": attr.label(mandatory = True, allow_single_file = True),
        "lock": attr.label(mandatory = True, allow_single_file = True),
    },
    environ = ["ASTRAI_TORCH", "ASTRAI_WHEELHOUSE", "PATH"],
)
