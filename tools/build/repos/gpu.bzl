"""@host_gpu: whether this machine has a GPU that CUDA programs can use."""

def _impl(rctx):
    smi = rctx.which("nvidia-smi")
    listing = rctx.execute([smi, "-L"], timeout = 60) if smi else None
    found = bool(listing and listing.return_code == 0 and "GPU 0" in listing.stdout)
    rctx.file("BUILD.bazel", "")
    rctx.file("defs.bzl", "HAS_GPU = {}\n".format(found))

host_gpu_repository = repository_rule(
    implementation = _impl,
    environ = ["PATH", "CUDA_VISIBLE_DEVICES"],
    configure = True,
    local = True,
)
