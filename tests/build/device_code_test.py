"""The GPU code in the wheel's modules: for which archs, and what the compiler made of it.

The speed of the sm_80 and sm_89 code cannot be measured everywhere; that it holds tensor core
instructions and asynchronous copies, and spills no registers, can.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import subprocess

import pytest

from tests.build.wheel_file import module_files

__all__ = ["module_files"]  # a fixture

ATTENTION = ["attn_decode", "attn_prefill", "attn_paged_decode", "attn_paged_prefill"]
MODULES = [*ATTENTION, "rotary_emb"]
# One module for each kernel library: disassembling takes a minute, and the attention modules all
# link the same kernels of decode and prefill.
LIBRARIES = ["attn_decode", "rotary_emb"]

# Machine code for each level, and the PTX that newer GPUs compile. A module that gets wgmma files
# has them as sm_90a code only, so this list holds for it too.
ELF_ARCHS = {"sm_80", "sm_89", "sm_90a"}
PTX_ARCHS = {"sm_80"}  # cuobjdump names PTX by the sm of its compute capability


@functools.cache
def cuobjdump(*args: str) -> str:
    program = pathlib.Path(os.environ["ASTRAI_CUOBJDUMP"]).resolve()
    env = {"PATH": str(program.parent)}  # with nvdisasm
    command = [str(program), *args]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout


def listed_archs(kind: str, file: pathlib.Path) -> set[str]:
    # "ELF file    1: name.1.sm_80.cubin"
    return set(re.findall(r"\.(sm_\d+[af]?)\.(?:cubin|ptx)$", cuobjdump(kind, str(file)), re.M))


@functools.cache
def functions(arch: str, file: pathlib.Path) -> dict[str, str]:
    """The SASS of each kernel by its mangled name."""
    text = cuobjdump("--dump-sass", "--gpu-architecture", arch, str(file))
    parts = re.split(r"^\s*Function : (\S+)$", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def kernels(arch: str, file: pathlib.Path, pattern: str) -> dict[str, str]:
    found = {name: sass for name, sass in functions(arch, file).items() if re.search(pattern, name)}
    assert found, f"no kernel of {arch} in {file.name} is named like {pattern}"
    return found


@pytest.mark.parametrize("module", MODULES)
def test_case_b02_machine_code_is_for_the_listed_archs(
    module: str, module_files: dict[str, pathlib.Path]
) -> None:
    assert listed_archs("--list-elf", module_files[module]) == ELF_ARCHS


@pytest.mark.parametrize("module", MODULES)
def test_case_b01_newer_gpus_find_ptx(module: str, module_files: dict[str, pathlib.Path]) -> None:
    assert listed_archs("--list-ptx", module_files[module]) == PTX_ARCHS


@pytest.mark.parametrize("module", LIBRARIES)
def test_no_copy_is_encoded_wrongly(module: str, module_files: dict[str, pathlib.Path]) -> None:
    """Some copies come out of ptxas 13.0 as illegal instructions.

    Those are cp.async with a cache policy and a shared address in a uniform register: both claim
    the same pair of registers, and the number of the policy's is odd.
    """
    for name, sass in functions("sm_90a", module_files[module]).items():
        assert not re.search(r"LDGSTS\S* \[.*\bUR\d+.*\], desc\[UR\d*[13579]\]", sass), name


@pytest.mark.parametrize("arch", sorted(ELF_ARCHS))
@pytest.mark.parametrize("module", LIBRARIES)
def test_no_kernel_spills_registers(
    module: str, arch: str, module_files: dict[str, pathlib.Path]
) -> None:
    spilling = {
        name: len(re.findall(r"\b(?:STL|LDL)\b", sass))
        for name, sass in functions(arch, module_files[module]).items()
        if re.search(r"\b(?:STL|LDL)\b", sass)
    }
    assert not spilling


@pytest.mark.parametrize("arch", sorted(ELF_ARCHS))
def test_mma_kernels_use_tensor_cores_and_asynchronous_copies(
    arch: str, module_files: dict[str, pathlib.Path]
) -> None:
    for name, sass in kernels(arch, module_files["attn_decode"], "mma").items():
        assert re.search(r"\bHMMA\.16816\.F32", sass), f"{name} has no HMMA"
        assert re.search(r"\bLDGSTS\b", sass), f"{name} has no LDGSTS"
        assert re.search(r"\bLDSM\b", sass), f"{name} has no LDSM"


@pytest.mark.parametrize("arch", sorted(ELF_ARCHS))
def test_rotary_moves_16_bytes_at_a_time(arch: str, module_files: dict[str, pathlib.Path]) -> None:
    wide = [
        name
        for name, sass in functions(arch, module_files["rotary_emb"]).items()
        if re.search(r"\bLDG\.E\.128", sass) and re.search(r"\bSTG\.E\.128", sass)
    ]
    assert wide
