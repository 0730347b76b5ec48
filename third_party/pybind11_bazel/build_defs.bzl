"""pybind_extension and pybind_library."""

load("@rules_cc//cc:defs.bzl", "cc_binary", "cc_library")

_COPTS = ["-fexceptions"]
_DEPS = [Label("@pybind11//:pybind11")]
_FEATURES = [
    "-parse_headers",
    "-use_header_modules",
]

def pybind_extension(name, copts = [], features = [], linkopts = [], tags = [], deps = [], **kwargs):
    """A Python extension module, NAME.so.

    Args:
      name: of the module.
      copts: options of the compiler.
      features: features of the toolchain.
      linkopts: options of the linker.
      tags: tags.
      deps: C++ targets; pybind11 and Python's headers are added.
      **kwargs: further attributes of cc_binary.
    """
    cc_binary(
        name = name + ".so",
        copts = copts + _COPTS + ["-fvisibility=hidden"],
        features = features + _FEATURES,
        linkopts = linkopts + ["-Wl,-Bsymbolic"],
        linkshared = True,
        tags = tags,
        deps = deps + _DEPS,
        **kwargs
    )
    native.alias(
        name = name,
        actual = name + ".so",
        testonly = kwargs.get("testonly"),
        visibility = kwargs.get("visibility"),
    )

def pybind_library(name, copts = [], features = [], tags = [], deps = [], **kwargs):
    """A C++ library that uses pybind11.

    Args:
      name: of the library.
      copts: options of the compiler.
      features: features of the toolchain.
      tags: tags.
      deps: C++ targets; pybind11 and Python's headers are added.
      **kwargs: further attributes of cc_library.
    """
    cc_library(
        name = name,
        copts = copts + _COPTS,
        features = features + _FEATURES,
        tags = tags,
        deps = deps + _DEPS,
        **kwargs
    )
