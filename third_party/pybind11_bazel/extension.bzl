"""@pybind11: the headers out of pybind11's own wheel, with those of the python3 on PATH."""

_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "python_headers",
    hdrs = glob(["python_include/**"]),
    includes = ["python_include"],
)

cc_library(
    name = "pybind11",
    hdrs = glob(["wheel/pybind11/include/**/*.h"]),
    includes = ["wheel/pybind11/include"],
    deps = [":python_headers"],
)
"""

# Of the repository that this stand-in belongs to: one way to get at wheels, and one place for its cases.
_FETCH = Label("@@//tools/build/repos:fetch_wheels.py")

def _impl(rctx):
    python = rctx.which("python3") or fail("no python3 on PATH: install Python 3.10 or newer")
    rctx.report_progress("pip: pybind11")
    command = [python, rctx.path(_FETCH), "--lock", rctx.path(Label("//:pybind11.lock"))]
    command += ["--into", rctx.path("wheel"), "--wheelhouse", rctx.getenv("ASTRAI_WHEELHOUSE", "")]
    fetched = rctx.execute(command)
    if fetched.return_code:
        fail(fetched.stderr.strip())
    include = rctx.execute([python, "-c", "import sysconfig; print(sysconfig.get_path('include'))"])
    rctx.symlink(include.stdout.strip(), "python_include")
    rctx.file("BUILD.bazel", _BUILD)

pybind11_repository = repository_rule(
    implementation = _impl,
    environ = ["ASTRAI_WHEELHOUSE", "PATH"],
)

def _extension_impl(_mctx):
    pybind11_repository(name = "pybind11")

pybind11 = module_extension(implementation = _extension_impl)
