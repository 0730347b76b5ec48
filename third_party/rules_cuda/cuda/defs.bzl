"""The rules, macros and providers that BUILD files load."""

load(":macros.bzl", _cuda_binary = "cuda_binary", _cuda_test = "cuda_test")
load(":providers.bzl", _CudaArchsInfo = "CudaArchsInfo", _cuda_archs = "cuda_archs")
load(":rules.bzl", _cuda_library = "cuda_library", _cuda_objects = "cuda_objects")
load(
    ":toolchain.bzl",
    _cuda_toolchain = "cuda_toolchain",
    _cuda_toolchain_config_nvcc = "cuda_toolchain_config_nvcc",
    _cuda_toolkit_info = "cuda_toolkit_info",
    _find_cuda_toolchain = "find_cuda_toolchain",
    _use_cuda_toolchain = "use_cuda_toolchain",
)

CudaArchsInfo = _CudaArchsInfo
cuda_archs = _cuda_archs
cuda_binary = _cuda_binary
cuda_library = _cuda_library
cuda_objects = _cuda_objects
cuda_test = _cuda_test
cuda_toolchain = _cuda_toolchain
cuda_toolchain_config_nvcc = _cuda_toolchain_config_nvcc
cuda_toolkit_info = _cuda_toolkit_info
find_cuda_toolchain = _find_cuda_toolchain
use_cuda_toolchain = _use_cuda_toolchain

def if_linux(if_true, if_false = []):
    """A select() on the target's system.

    Args:
      if_true: the value on Linux.
      if_false: the value elsewhere.

    Returns:
      A select().
    """
    return select({
        "@platforms//os:linux": if_true,
        "//conditions:default": if_false,
    })

def requires_cuda():
    """For `target_compatible_with`: the target needs the CUDA rules to be enabled."""
    return select({
        Label("//cuda:is_enabled"): [],
        "//conditions:default": ["@platforms//:incompatible"],
    })
