"""What this installation of astrai can do here: ``python -m astrai.info [--json]``.

Prints what was built (modules, GPU architectures, CUDA version), what this machine has (torch,
driver, GPUs), and which implementation each op would take for a typical call, and why.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from astrai import __version__
from astrai.extension import dispatch, loader
from astrai.extension.backend.rotary import get_rotary_emb

LIB_DIR = Path(loader.__file__).parent / "lib"


def module_info(name: str) -> dict[str, Any]:
    """What is known of one compiled module: its file, what it was built for, whether it can run."""
    files = sorted(LIB_DIR.glob(f"{name}.*"))
    info: dict[str, Any] = {
        "name": name,
        "file": files[0].name if files else None,
        "bytes": files[0].stat().st_size if files else None,
        "available": loader.is_available(name),
        "archs": None,
        "cuda": None,
        "reason": loader.why_unavailable(name) or None,
    }
    # A module that imports says what it was built for even where it finds no GPU to run on.
    module = sys.modules.get(f"astrai.extension.lib.{name}")
    if module is not None:
        built = module.build_info()
        info.update(archs=list(built["archs"]), cuda=built["cuda"])
    return info


def package_version(name: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def device_info(index: int) -> dict[str, Any]:
    """Name, compute capability, memory and SM count of a CUDA device."""
    properties = torch.cuda.get_device_properties(index)
    return {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "sms": properties.multi_processor_count,
    }


def driver_version() -> str | None:
    """Version of the NVIDIA kernel driver, read from the system; None if there is none."""
    path = Path("/proc/driver/nvidia/version")
    try:
        words = path.read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def machine_info() -> dict[str, Any]:
    """Python, torch, driver and GPUs of this machine."""
    gpus, problem = [], None
    try:
        if torch.version.cuda is None:
            problem = "this torch is built without CUDA"
        elif not torch.cuda.is_available():
            problem = "torch finds no usable CUDA device"
        else:
            gpus = [device_info(index) for index in range(torch.cuda.device_count())]
    except RuntimeError as error:  # a driver that is there but broken
        problem = str(error).split("\n", 1)[0]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "driver": driver_version(),
        "flash_attn": package_version("flash-attn"),
        "gpus": gpus,
        "no_gpu_because": problem,
    }


def typical_calls(device: torch.device) -> list[tuple[str, str, Callable[[], tuple[tuple, dict]]]]:
    """Typical calls of every op: (family, description, function that makes the arguments)."""
    dtype = torch.bfloat16

    def attention(q_len: int, kv_len: int, head_dim: int = 128, **extra: Any) -> tuple:
        q = torch.zeros(1, q_len, 8, head_dim, dtype=dtype, device=device)
        k = torch.zeros(1, kv_len, 2, head_dim, dtype=dtype, device=device)
        return (q, k, k), {"is_causal": True, **extra}

    def masked() -> tuple:
        mask = torch.ones(1, 64, dtype=torch.bool, device=device)
        return attention(64, 64, attn_mask=mask)

    def training() -> tuple:
        (q, k, v), extra = attention(64, 64)
        return (q.requires_grad_(), k, v), extra

    def rotary() -> tuple:
        x = torch.zeros(16, 8, 128, dtype=dtype, device=device)
        return (x, get_rotary_emb(128, 16, device=device)), {}

    def rotary_pair() -> tuple:
        q = torch.zeros(16, 8, 128, dtype=dtype, device=device)
        positions = torch.arange(16, device=device)
        return (q, torch.zeros(16, 128, device=device), q[:, :2], positions), {}

    return [
        ("attention", "prefill, bf16, head_dim 128", lambda: attention(64, 64)),
        ("attention", "decode, bf16, head_dim 128", lambda: attention(1, 64)),
        ("attention", "prefill with a bool mask", masked),
        ("attention", "prefill, head_dim 80", lambda: attention(64, 64, 80)),
        ("attention", "training (q requires grad)", training),
        ("rotary", "apply_rotary_emb, bf16", rotary),
        ("rotary", "rotary_embed of q and k, bf16", rotary_pair),
    ]


def op_info(device: torch.device) -> list[dict[str, str]]:
    """For every typical call on a device: the implementation it takes, what decided it, and why."""
    out = []
    for family, description, make in typical_calls(device):
        try:
            args, kwargs = make()
            text = dispatch.explain(family, *args, **kwargs)
        except RuntimeError as error:  # for instance a GPU with no memory left
            text = f"=> ERROR: {error}"
        *_, verdict = text.split("\n")
        lines = text.split("\n")[1:-1]
        out.append(
            {
                "family": family,
                "call": description,
                "device": str(device),
                "takes": verdict.removeprefix("=> "),
                "why": lines,
            }
        )
    return out


def collect() -> dict[str, Any]:
    """Everything that is printed, as plain data."""
    machine = machine_info()
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", gpu["index"]) for gpu in machine["gpus"][:1]]
    return {
        "astrai": __version__,
        "modules": [module_info(name) for name in loader.KERNEL_NAMES],
        "machine": machine,
        "environment": {
            name: dispatch.read_env(name)
            for name in ("ASTR_OPS", "ASTR_BACKEND")
            if dispatch.read_env(name) is not None
        },
        "ops": [entry for device in devices for entry in op_info(device)],
    }


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _grouped(ops: list[dict[str, Any]]) -> dict[tuple, list[str]]:
    """Calls that resolve alike and for the same reasons, listed together."""
    groups: dict[tuple, list[str]] = {}
    for entry in ops:
        key = (entry["device"], entry["family"], entry["takes"], tuple(entry["why"]))
        groups.setdefault(key, []).append(entry["call"])
    return groups


def render(info: dict[str, Any]) -> str:
    """The report as text."""
    machine = info["machine"]
    lines = [f"astrai {info['astrai']}", "", "Built"]
    if info["modules"]:
        rows = [
            [
                module["name"],
                f"{(module['bytes'] or 0) / 1e6:.1f} MB",
                f"CUDA {module['cuda']}" if module["cuda"] else "",
                " ".join(module["archs"] or []),
                "ready" if module["available"] else "not usable here",
            ]
            for module in info["modules"]
        ]
        lines += _table(rows)
        for reason in dict.fromkeys(m["reason"] for m in info["modules"] if m["reason"]):
            lines.append(f"  {reason}")
    else:
        lines.append(
            "  no compiled modules in astrai/extension/lib: every op takes its torch fallback"
        )

    lines += ["", "This machine"]
    lines.append(f"  Python {machine['python']} on {machine['platform']}")
    cuda = f"CUDA {machine['torch_cuda']}" if machine["torch_cuda"] else "no CUDA"
    lines.append(f"  torch {machine['torch']} ({cuda})")
    lines.append(f"  NVIDIA driver {machine['driver'] or 'not found'}")
    lines.append(f"  flash-attn {machine['flash_attn'] or 'not installed'}")
    for gpu in machine["gpus"]:
        lines.append(
            f"  GPU {gpu['index']}: {gpu['name']}, compute capability {gpu['capability']}, "
            f"{gpu['memory_gib']} GiB, {gpu['sms']} SMs"
        )
    if machine["no_gpu_because"]:
        lines.append(f"  No GPU: {machine['no_gpu_because']}")
    for name, value in info["environment"].items():
        lines.append(f"  {name}={value}")

    device = None
    for (where, family, takes, why), calls in _grouped(info["ops"]).items():
        if where != device:
            device = where
            lines += ["", f"What ops take on {device}"]
        lines += [f"  {family}: {call}" for call in calls]
        lines += [f"      {line}" for line in why]
        lines.append(f"      => {takes}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(
        prog="python -m astrai.info",
        description="What was built, what this machine has, and which backend each op takes.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    info = collect()
    print(json.dumps(info, indent=2) if options.json else render(info))
    return 0


if __name__ == "__main__":
    sys.exit(main())
