"""@host_python: the python3 on PATH, as the toolchain of every Python rule and of the extension modules.

It is registered in every configuration. A wheel is for one Python (pybind11 has no stable ABI) and so are the
hashes of the locks: what is built, tested and tagged has to be the Python that the user has.
"""

load(":wheels.bzl", "host_python")

_ASK = """
import platform, sys, sysconfig
print(sys.executable)
print(sysconfig.get_path("include"))
print(sysconfig.get_config_var("EXT_SUFFIX"))
print("%d.%d" % sys.version_info[:2])
print(sysconfig.get_platform().replace("-", "_").replace(".", "_"))
"""

_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = glob(["include/**"]),
    includes = ["include"],
)

py_runtime(
    name = "runtime",
    interpreter_path = "{python}",
    python_version = "PY3",
    stub_shebang = "#!{python}",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

# For the real pybind11_bazel, which takes its headers from a toolchain of rules_python.
_CC_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_python//python/cc:py_cc_toolchain.bzl", "py_cc_toolchain")

cc_library(name = "no_libs")

py_cc_toolchain(
    name = "py_cc",
    headers = "//:headers",
    libs = ":no_libs",
    python_version = "{version}",
)

toolchain(
    name = "toolchain",
    toolchain = ":py_cc",
    toolchain_type = "@rules_python//python/cc:toolchain_type",
)
"""

def _impl(rctx):
    python = host_python(rctx)
    answer = rctx.execute([python, "-c", _ASK])
    if answer.return_code:
        fail("{} cannot be run: {}".format(python, answer.stderr))
    executable, include, suffix, version, platform = answer.stdout.strip().split("\n")
    if [int(part) for part in version.split(".")] < [3, 10]:
        fail("Python 3.10 or newer is needed, and {} is {}".format(executable, version))
    if not rctx.path(include + "/Python.h").exists:
        fail("no Python.h in {}: install python3-dev".format(include))
    rctx.symlink(include, "include")
    rctx.file("BUILD.bazel", _BUILD.format(python = executable))

    # The rule sets that Debian ships (--config=offline) have no such toolchain.
    offline = rctx.getenv("ASTRAI_OFFLINE", "") == "1"
    rctx.file("cc/BUILD.bazel", "" if offline else _CC_BUILD.format(version = version))
    rctx.file("defs.bzl", """\
PYTHON = "{}"
PYTHON_VERSION = "{}"
EXT_SUFFIX = "{}"
PLATFORM = "{}"
""".format(executable, version, suffix, platform))

host_python_repository = repository_rule(
    implementation = _impl,
    environ = ["ASTRAI_OFFLINE", "PATH"],
    configure = True,
    local = True,
)
