"""Repositories made of PyPI wheels that a lock file pins by hash."""

def host_python(rctx):
    """Returns the path of the machine's python3, or fails in one sentence."""
    return rctx.which("python3") or fail("no python3 on PATH: install Python 3.10 or newer")

def fetch_wheels(rctx, locks, into, compile = False):
    """Downloads the wheels of some locks with pip and unpacks them into one folder.

    ASTRAI_WHEELHOUSE (--repo_env) names a folder of wheels to use instead of an index.

    Args:
      rctx: repository_ctx.
      locks: Labels of lock files.
      into: folder, relative to the repository.
      compile: whether to write byte code for the Python files.
    """
    names = [lock.name for lock in locks]
    rctx.report_progress("pip: wheels of " + ", ".join(names))
    command = [host_python(rctx), rctx.path(Label("//tools/build/repos:fetch_wheels.py"))]
    for lock in locks:
        command += ["--lock", rctx.path(lock)]
    command += ["--into", rctx.path(into), "--wheelhouse", rctx.getenv("ASTRAI_WHEELHOUSE", "")]
    result = rctx.execute(command + (["--compile"] if compile else []), timeout = 3600)
    if result.return_code:
        fail((result.stderr or result.stdout or "pip gave no answer within an hour").strip())

_SITE_BUILD = """\
load("@rules_python//python:defs.bzl", "py_library")

package(default_visibility = ["//visibility:public"])

filegroup(
    name = "tree",
    srcs = {srcs},
)

py_library(
    name = "site",
    data = [":tree"],
    imports = ["site-packages"],
)
"""

# One source directory, so that runfiles and sandboxes hold one link and not thousands.
_FOLDER = """["site-packages"]"""

# Single files, as an action's inputs have to be.
_FILES = """glob(["site-packages/**"])"""

def write_site_build(rctx, files = False):
    """Writes a BUILD file for the folder site-packages/.

    It has `:tree`, the folder, and `:site`, a py_library that puts it on sys.path.

    Args:
      rctx: repository_ctx.
      files: whether `:tree` is every file instead of the folder.
    """
    rctx.file("BUILD.bazel", _SITE_BUILD.format(srcs = _FILES if files else _FOLDER))

def _wheels_site_impl(rctx):
    fetch_wheels(rctx, [rctx.attr.lock], "site-packages", compile = rctx.attr.compile)
    write_site_build(rctx, files = rctx.attr.files)

wheels_site = repository_rule(
    doc = "The wheels of one lock as a folder for sys.path.",
    implementation = _wheels_site_impl,
    attrs = {
        "compile": attr.bool(default = True, doc = "Write byte code for the Python files."),
        "files": attr.bool(doc = "For an action: `:tree` is every file instead of the folder."),
        "lock": attr.label(mandatory = True, allow_single_file = True),
    },
    environ = ["ASTRAI_WHEELHOUSE", "PATH"],
)

def _dlpack_impl(rctx):
    fetch_wheels(rctx, [rctx.attr.lock], "wheel")
    for found in ["wheel/tvm_ffi/include/dlpack/dlpack.h", "wheel/include/dlpack/dlpack.h"]:
        if rctx.path(found).exists:
            rctx.file("include/dlpack/dlpack.h", rctx.read(found))
    rctx.delete("wheel")
    rctx.file("BUILD.bazel", """\
load("@rules_cc//cc:defs.bzl", "cc_library")

cc_library(
    name = "dlpack",
    hdrs = ["include/dlpack/dlpack.h"],
    includes = ["include"],
    visibility = ["//visibility:public"],
)
""")

dlpack_header = repository_rule(
    doc = "dlpack.h, out of the apache-tvm-ffi wheel.",
    implementation = _dlpack_impl,
    attrs = {"lock": attr.label(mandatory = True, allow_single_file = True)},
    environ = ["ASTRAI_WHEELHOUSE", "PATH"],
)
