"""Providers of the CUDA rules, and the grammar of archs."""

CudaArchsInfo = provider(
    doc = "The archs to compile for.",
    fields = {"arch_specs": "list of structs: virtual (compute_X), and gpus (list of sm_X, compute_X, lto_X)"},
)

CudaToolkitInfo = provider(
    doc = "Where the parts of a CUDA toolkit are.",
    fields = {
        "bin2c": "File",
        "cicc": "File",
        "fatbinary": "File",
        "libdevice": "File",
        "link_stub": "File",
        "nvlink": "File",
        "path": "the toolkit's folder, from the execution root",
        "ptxas": "File",
        "version_major": "int",
        "version_minor": "int",
    },
)

CudaToolchainConfigInfo = provider(
    doc = "How a toolchain calls its compiler.",
    fields = {
        "cuda_toolkit": "Target with CudaToolkitInfo",
        "toolchain_identifier": "string",
    },
)

CudaInfo = provider(
    doc = "What CUDA targets take from the CUDA targets they depend on.",
    fields = {
        "defines": "depset of macros for device and host code",
        "objects": "depset of objects",
        "pic_objects": "depset of position-independent objects",
        "rdc_objects": "depset of relocatable device code",
        "rdc_pic_objects": "depset of position-independent relocatable device code",
    },
)

# The arch numbers that a build setting may name.
cuda_archs = [
    "75",
    "80",
    "86",
    "87",
    "88",
    "89",
    "90",
    "90a",
    "100",
    "100a",
    "100f",
    "103",
    "103a",
    "103f",
    "110",
    "110a",
    "110f",
    "120",
    "120a",
    "120f",
    "121",
    "121a",
    "121f",
]

def _number(arch):
    kind, _, number = arch.partition("_")
    if kind not in ("sm", "compute", "lto") or number not in cuda_archs:
        fail("not a CUDA arch: {} (sm_X, compute_X or lto_X, X one of {})".format(arch, ", ".join(cuda_archs)))
    return number

def parse_archs(text):
    """Reads a list of archs.

    SPECS = SPEC [";" SPECS], SPEC = [compute_X ":"] GPUS, GPUS = GPU ["," GPUS], GPU = sm_X | compute_X | lto_X.
    Each SPEC is one pass of the front end for compute_X; sm_X adds machine code and compute_X adds PTX. Without
    "compute_X:" the lowest of the GPUs is taken.

    Args:
      text: such a list; may be empty.

    Returns:
      List of structs, see CudaArchsInfo.
    """
    specs = []
    for spec in [part.strip() for part in text.split(";") if part.strip()]:
        virtual, _, gpus = spec.rpartition(":")
        gpus = [gpu.strip() for gpu in gpus.split(",")]
        numbers = [_number(gpu) for gpu in gpus]
        if virtual:
            _number(virtual)
        else:
            virtual = "compute_" + sorted(numbers, key = lambda number: int(number.rstrip("af")))[0]
        specs.append(struct(virtual = virtual, gpus = gpus))
    return specs

def gencode(specs):
    """nvcc's options for archs.

    Args:
      specs: what parse_archs returns.

    Returns:
      List of strings.
    """
    return [
        "-gencode=arch={},code=[{}]".format(spec.virtual, ",".join(spec.gpus))
        for spec in specs
    ]
