"""@cuda_toolkit: one CUDA toolkit tree and its toolchain for @rules_cuda.

By default it is laid out from the hash-locked PyPI wheels; with --config=local_cuda (ASTRAI_CUDA=local) it is the
toolkit at CUDA_PATH, or at /usr/local/cuda.
"""

load(":wheels.bzl", "fetch_wheels")

# Tools that put a hash of the source's absolute path into symbol names; see reproducible_tool.sh.
_WRAPPED = ["bin/cudafe++", "nvvm/bin/cicc"]

def _from_wheels(rctx):
    fetch_wheels(rctx, [rctx.attr.lock], "wheels")
    layout = rctx.execute(["sh", "-ec", """
        mv wheels/nvidia/cu13/* .
        rm -rf wheels
        ln -s lib lib64
        chmod a+rx bin/* nvvm/bin/*
        chmod a-x bin/nvcc.profile
        for tool in {}; do mv "$tool" "$tool.real"; done
    """.format(" ".join(_WRAPPED))])
    if layout.return_code:
        fail("the CUDA wheels have another layout than expected: " + layout.stderr)
    return "13.0"

def _from_machine(rctx):
    root = rctx.getenv("CUDA_PATH") or "/usr/local/cuda"
    if not rctx.path(root + "/bin/nvcc").exists:
        fail("--config=local_cuda: no CUDA toolkit at {} (set CUDA_PATH)".format(root))
    version = rctx.execute([root + "/bin/nvcc", "--version"])
    number = version.stdout.partition("release ")[2].partition(",")[0]
    if version.return_code or not number:
        fail("{}/bin/nvcc cannot be run: {}".format(root, version.stderr))
    if int(number.split(".")[0]) < 12:
        fail("CUDA 12 or newer is needed, and {} is {}".format(root, number))

    # nvcc finds its own folder from the path it was called by: a real file in bin/ keeps the tools of
    # this tree (with the wrappers) in use; all the rest is linked.
    layout = rctx.execute(["sh", "-ec", """
        root=$(realpath "$1")
        arch="$root/targets/x86_64-linux"
        [ -d "$arch" ] || arch="$root"
        mkdir -p bin nvvm/bin
        for tool in "$root"/bin/*; do
            [ "${tool##*/}" = nvcc ] || ln -s "$tool" bin/
        done
        cp -L "$root/bin/nvcc" bin/nvcc
        rm -f bin/nvcc.profile; cp -L "$root/bin/nvcc.profile" bin/
        for tool in "$root"/nvvm/bin/*; do ln -s "$tool" nvvm/bin/; done
        ln -s "$root/nvvm/libdevice" nvvm/libdevice
        ln -s "$arch/include" include
        ln -s "$arch/lib" lib || true
        [ -e lib/libcudart_static.a ] || { rm -f lib; ln -s "$root/lib64" lib; }
        ln -s lib lib64
        # nvcc.profile names the headers by this folder on machines whose toolkit has it.
        mkdir -p targets/x86_64-linux
        ln -s ../../include targets/x86_64-linux/include
        ln -s ../../lib targets/x86_64-linux/lib
        shift
        for tool in "$@"; do mv "$tool" "$tool.real"; done
    """, "sh", root] + _WRAPPED)
    if layout.return_code:
        fail("the toolkit at {} is not complete: {}".format(root, layout.stderr))
    return number

def _impl(rctx):
    local_toolkit = rctx.getenv("ASTRAI_CUDA", "wheels") == "local"
    version = _from_machine(rctx) if local_toolkit else _from_wheels(rctx)
    wrapper = rctx.read(rctx.path(Label("//tools/build/repos:reproducible_tool.sh")))
    for tool in _WRAPPED:
        rctx.file(tool, wrapper, executable = True)
    rctx.template("BUILD.bazel", Label("//tools/build/repos:cuda_toolkit.BUILD.tpl"), {
        "%{major}": version.split(".")[0],
        "%{minor}": version.split(".")[1],
        "%{root}": "external/" + rctx.name,
    })

cuda_toolkit_repository = repository_rule(
    implementation = _impl,
    attrs = {"lock": attr.label(mandatory = True, allow_single_file = True)},
    environ = ["ASTRAI_CUDA", "ASTRAI_WHEELHOUSE", "CUDA_PATH", "PATH"],
)
