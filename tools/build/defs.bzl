"""Macros for the BUILD files of this repository."""

load("@host_python//:defs.bzl", "EXT_SUFFIX")
load("@rules_python//python:defs.bzl", "py_library", "py_test")
load(":gpu.bzl", "GPU_TAGS", "REQUIRES_GPU")

_PYTEST_MAIN = "//tools/testing:pytest_main.py"

# What every Python test can import. The numpy of the lock goes before the machine's own packages.
_TEST_DEPS = [
    "//tools/testing:pytest_main",
    "@py_numpy//:site",
    "@py_test_deps//:site",
]

def astrai_py_test(name, srcs, deps = [], gpu = False, torch = True, astrai = True, args = [], tags = [], **kwargs):
    """A pytest test; each of its cases is counted in Bazel's test.xml.

    Args:
      name: of the test.
      srcs: Python files. Those named *_test.py are run; others (conftest.py, helpers) are only there to import,
        by their path from the top of the repository.
      deps: further py_library targets.
      gpu: whether the test needs a GPU; without one it is SKIPPED.
      torch: whether torch is on the path.
      astrai: whether the package (//python:astrai) with its modules is on the path.
      args: further arguments of pytest.
      tags: tags.
      **kwargs: further attributes of py_test.
    """
    files = ["$(rootpath {})".format(src) for src in srcs if src.endswith("_test.py")]
    if not files:
        fail("{}: no *_test.py in srcs".format(name))
    if gpu:
        tags = tags + GPU_TAGS
        kwargs["target_compatible_with"] = kwargs.get("target_compatible_with", []) + REQUIRES_GPU
    kwargs.setdefault("size", "medium")
    py_test(
        name = name,
        srcs = srcs + [_PYTEST_MAIN],
        args = args + files,
        main = _PYTEST_MAIN,
        tags = tags,
        deps = deps + _TEST_DEPS +
               (["//python:astrai"] if astrai else []) +
               (["@torch//:site"] if torch else []),
        **kwargs
    )

def _extension_module_impl(ctx):
    out = ctx.actions.declare_file("{}/{}{}".format(ctx.attr.package_dir, ctx.attr.module_name, EXT_SUFFIX))
    ctx.actions.symlink(output = out, target_file = ctx.file.src)
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles([out]))]

extension_module = rule(
    doc = "A pybind_extension under the file name and in the package from which Python imports it.",
    implementation = _extension_module_impl,
    attrs = {
        "module_name": attr.string(mandatory = True, doc = "Name that Python imports."),
        "package_dir": attr.string(mandatory = True, doc = "Folder of the Python package, from this BUILD file's."),
        "src": attr.label(mandatory = True, allow_single_file = [".so"]),
    },
)

def astrai_py_tests(deps = [], exclude = [], helpers_visibility = None, **kwargs):
    """One astrai_py_test for each *_test.py of the folder; a *_gpu_test.py needs a GPU.

    The folder's other Python files are helpers that each of the tests can import.

    Args:
      deps: further py_library targets for each test.
      exclude: files to leave out, for which the BUILD file has targets of their own.
      helpers_visibility: who else may use the helpers, as the target `helpers`.
      **kwargs: further attributes of astrai_py_test.
    """
    helpers = native.glob(["*.py"], exclude = ["*_test.py"] + exclude, allow_empty = True)
    if helpers:
        py_library(
            name = "helpers",
            testonly = True,
            srcs = helpers,
            visibility = helpers_visibility,
        )
    for test in native.glob(["*_test.py"], exclude = exclude, allow_empty = True):
        astrai_py_test(
            name = test.removesuffix(".py"),
            srcs = [test],
            gpu = test.endswith("_gpu_test.py"),
            deps = deps + ([":helpers"] if helpers else []),
            **kwargs
        )
