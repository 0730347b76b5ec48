"""All repositories that the build makes for itself, for MODULE.bazel and for WORKSPACE."""

load(":cuda.bzl", "cuda_toolkit_repository")
load(":gpu.bzl", "host_gpu_repository")
load(":python.bzl", "host_python_repository")
load(":torch.bzl", "torch_repository")
load(":wheels.bzl", "dlpack_header", "wheels_site")

def _lock(name):
    return Label("//third_party/locks:{}.lock".format(name))

def astrai_repositories():
    """Declares the repositories; each is fetched only when a target that is built needs it."""
    host_python_repository(name = "host_python")
    host_gpu_repository(name = "host_gpu")
    cuda_toolkit_repository(name = "cuda_toolkit", lock = _lock("cuda"))
    dlpack_header(name = "dlpack", lock = _lock("dlpack"))
    torch_repository(name = "torch", cuda_lock = _lock("torch_cuda"), lock = _lock("torch"))
    wheels_site(name = "py_test_deps", lock = _lock("test"))
    wheels_site(name = "py_numpy", lock = _lock("numpy"))
    wheels_site(name = "py_models", lock = _lock("models"))
    wheels_site(name = "py_audit", compile = False, files = True, lock = _lock("audit"))
    wheels_site(name = "cuobjdump", compile = False, lock = _lock("cuobjdump"))
    wheels_site(name = "smollm2", compile = False, lock = _lock("smollm2"))

def _impl(_mctx):
    astrai_repositories()

astrai = module_extension(implementation = _impl)
