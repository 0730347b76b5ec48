"""Layers: model, inference -> extension -> backend -> ops -> loader; kernels know no Python."""

from pathlib import Path

import pytest

import astrai
from astrai import extension
from tests.python.layering.imports import imports, includes, module_name

PACKAGE_ROOT = Path(astrai.__file__).parent.parent
REPOSITORY = Path(__file__).parents[3]
E = "astrai.extension"

# Each layer (a module and all below it) and the only parts of astrai that it may import. What is
# not listed here has no layer, and the test says so.
MAY_IMPORT = {
    f"{E}.errors": (),
    f"{E}.lib": (),
    f"{E}.loader": (f"{E}.errors", f"{E}.lib"),
    f"{E}.ops": (f"{E}.ops", f"{E}.loader", f"{E}.errors"),
    f"{E}.dispatch": (f"{E}.dispatch", f"{E}.errors"),
    f"{E}.backend": (f"{E}.backend", f"{E}.dispatch", f"{E}.ops", f"{E}.loader", f"{E}.errors"),
    E: (E,),
    "astrai.model": ("astrai.model", "astrai.inference", E),
    "astrai.inference": ("astrai.inference", "astrai.model", E),
    "astrai.info": ("astrai", E),
    "astrai": (),
}
# These see of the extension only what its root exports.
PUBLIC_API_ONLY = ("astrai.model", "astrai.inference")

PYTHON_SIDE = ("torch", "ATen", "c10", "Python.h", "pybind11", "python", "dlpack")
TORCH_SIDE = ("torch", "ATen", "c10")


def within(module, part):
    return module == part or module.startswith(part + ".")


def layer_of(module):
    return max((part for part in MAY_IMPORT if within(module, part)), key=len)


def allowed(layer, target):
    if target == "astrai" and layer in ("astrai.info",):
        return True
    return any(part != "astrai" and within(target, part) for part in MAY_IMPORT[layer])


def violations(module, source, is_package, modules, public):
    """Sentences about the imports of a module that its layer may not make."""
    layer = layer_of(module)
    out = []
    for target, name in sorted(imports(source, module, is_package, modules)):
        if not within(target, "astrai"):
            continue
        if not allowed(layer, target):
            out.append(f"{module} (layer {layer}) must not import {target}")
        elif layer in PUBLIC_API_ONLY and within(target, E):
            if target != E:
                out.append(f"{module} must use only astrai.extension itself, not {target}")
            elif name not in public:
                out.append(f"{module} must use only public names, not astrai.extension.{name}")
    return out


def python_sources():
    return sorted((PACKAGE_ROOT / "astrai").rglob("*.py"))


def test_python_layers():
    paths = python_sources()
    modules = {module_name(path, PACKAGE_ROOT) for path in paths}
    assert {f"{E}.ops.attention", f"{E}.backend.attention", f"{E}.loader"} <= modules
    found = []
    for path in paths:
        name = module_name(path, PACKAGE_ROOT)
        package = path.name == "__init__.py"
        found += violations(
            name, path.read_text(encoding="utf-8"), package, modules, extension.__all__
        )
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        (f"{E}.ops.x", f"from {E}.backend import attention", "must not import"),
        (f"{E}.ops.x", f"import {E}.backend.rotary", "must not import"),
        (f"{E}.ops.x", "from ..backend import rotary", "must not import"),
        (f"{E}.ops.x", "def f():\n    from ..dispatch import resolve", "must not import"),
        (f"{E}.ops.x", f"from {E} import attention", "must not import"),
        (f"{E}.ops.x", f"from {E} import loader", None),
        (f"{E}.ops.x", "from ..errors import ShapeError", None),
        (f"{E}.loader", f"from {E}.ops import attn_decode", "must not import"),
        (f"{E}.dispatch.x", f"from {E}.backend import rotary", "must not import"),
        (f"{E}.backend.x", "import astrai.inference.cache", "must not import"),
        (f"{E}.backend.x", f"from {E}.ops.rotary import rotary_emb", None),
        ("astrai.model.x", f"from {E} import attention", None),
        ("astrai.model.x", f"from {E}.ops import attn_prefill", "only astrai.extension itself"),
        ("astrai.model.x", f"from {E} import loader", "only astrai.extension itself"),
        ("astrai.model.x", f"from {E} import _secret", "only public names"),
        ("astrai.model.x", "from astrai.inference.cache import KVCache", None),
        ("astrai.model.x", "import astrai.info", "must not import"),
        ("astrai.inference.x", "from astrai.model import Decoder", None),
        ("astrai.model.x", "import torch\nfrom . import y", None),
    ],
)
def test_the_check_finds_what_it_should(module, source, complaint):
    modules = {f"{E}.loader", f"{E}.backend.rotary", "astrai.model.y"}
    found = violations(module, source, False, modules, ["attention"])
    assert len(found) == (complaint is not None)
    assert complaint is None or complaint in found[0]


def cpp_sources(folder):
    suffixes = (".cu", ".cuh", ".h", ".cc")
    paths = [path for path in (REPOSITORY / folder).rglob("*") if path.suffix in suffixes]
    assert paths, f"no sources in {folder}"
    return paths


def bad_includes(source, forbidden):
    return [name for name in includes(source) if name.split("/", 1)[0] in forbidden]


@pytest.mark.parametrize(
    ("folder", "forbidden"), [("kernels", PYTHON_SIDE), ("python/bindings", TORCH_SIDE)]
)
def test_cpp_layers(folder, forbidden):
    found = [
        f"{path}: must not include {name}"
        for path in cpp_sources(folder)
        for name in bad_includes(path.read_text(encoding="utf-8"), forbidden)
    ]
    assert not found, "\n".join(found)


def test_the_include_check_finds_what_it_should():
    source = "\n".join(
        [
            "#include <torch/extension.h>",
            ' # include "python/bindings/tensor.h"',
            "#include <cuda.h>",
            "#include <Python.h>",
            "// #include <ATen/ATen.h>",
            '#include "kernels/common/dtype.h"',
        ]
    )
    found = bad_includes(source, PYTHON_SIDE)
    assert found == ["torch/extension.h", "python/bindings/tensor.h", "Python.h"]


def test_exported_names_exist_and_are_listed_once():
    assert len(set(extension.__all__)) == len(extension.__all__)
    for name in extension.__all__:
        assert hasattr(extension, name), name


def test_version_is_the_modules():
    text = (REPOSITORY / "MODULE.bazel").read_text(encoding="utf-8")
    assert f'version = "{astrai.__version__}"' in text.split("bazel_dep", 1)[0]
