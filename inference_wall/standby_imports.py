"""Imported by the process that keeps the engine's imports ready, and nowhere else: importing this module imports the engine.

What:   imports what a server imports before it touches a GPU, and finds out whether a process forked from here can still use the GPU.
Why:    see `standby`.
Not:    the model's own code: some of vLLM's kernels ask the GPU for its name when they are imported, and a process that has asked
        cannot be forked any more.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

from .standby import end_with_parent

MODULES = ("vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve", "vllm.entrypoints.openai.api_server", "vllm.v1.engine.async_llm",
           "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor", "vllm.compilation.backends", "vllm.model_executor.model_loader")
WORKERS = {"cuda": ("vllm.v1.worker.gpu_worker", "vllm.v1.attention.backends.flash_attn"), "cpu": ("vllm.v1.worker.cpu_worker",)}
LEFT_OUT = "left out"


def _import_all() -> float:
    """Import the engine and return how many seconds that took. What this version does not have is left to the server."""
    began = time.perf_counter()
    for name in MODULES:
        _import(name)
    from vllm.platforms import current_platform

    for name in WORKERS.get(current_platform.device_type, ()):
        _import(name)
    return time.perf_counter() - began


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as problem:
        print(f"{LEFT_OUT}: {name} ({problem})", file=sys.stderr)


def _can_be_forked() -> bool:
    """Whether a child of this process can use the GPU: tried, not guessed. True where the engine computes elsewhere."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return True
    child = os.fork()
    if child == 0:
        works = False
        try:
            import torch

            torch.zeros(1, device="cuda")
            works = True
        finally:
            os._exit(0 if works else 1)
    return os.waitpid(child, 0)[1] == 0


end_with_parent()
IMPORT_S = _import_all()
CAN_BE_FORKED = _can_be_forked()
