"""cuda_binary and cuda_test: a cuda_library named _NAME, and the C++ rule that links it."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_test")
load(":rules.bzl", "cuda_library")

# Attributes of the cuda_library alone.
_LIBRARY_ONLY = ["alwayslink", "archs", "deps", "hdrs", "ptxasopts", "rdc", "srcs"]

# Attributes of the C++ rule alone.
_BINARY_ONLY = ["args", "data", "env", "output_licenses"]
_TEST_ONLY = ["args", "data", "env", "env_inherit", "flaky", "local", "shard_count", "size", "timeout"]

# For the library these are about the host's part; the C++ rule has nothing else.
_RENAMED = {
    "host_copts": "copts",
    "host_defines": "defines",
    "host_linkopts": "linkopts",
    "host_local_defines": "local_defines",
}

def _library_and(rule, name, rule_only, attrs):
    library = {key: value for key, value in attrs.items() if key not in rule_only}
    library.setdefault("alwayslink", True)
    cuda_library(name = "_" + name, **library)

    rest = {
        key: value
        for key, value in attrs.items()
        if key not in _LIBRARY_ONLY and key not in _RENAMED and key not in _RENAMED.values()
    }
    for source, target in _RENAMED.items():
        if source in attrs:
            rest[target] = attrs[source]
    rule(name = name, deps = ["_" + name], **rest)

def cuda_binary(name, **attrs):
    """A program with device code.

    Args:
      name: of the program; the library is _NAME.
      **attrs: attributes of cuda_library and cc_binary.
    """
    _library_and(cc_binary, name, _BINARY_ONLY, attrs)

def cuda_test(name, **attrs):
    """A test with device code.

    Args:
      name: of the test; the library is _NAME.
      **attrs: attributes of cuda_library and cc_test.
    """
    attrs.setdefault("testonly", True)
    _library_and(cc_test, name, _TEST_ONLY, attrs)
