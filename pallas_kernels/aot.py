"""Compiles Mosaic GPU kernels to Hopper machine code on a machine without a GPU, and reads what came out.

Needs the extra `gpu-compile` (Python >= 3.12) and a C compiler: the plugin's compiler asks the CUDA driver what GPU
there is, and a stub of the driver, built on the fly, answers as a Hopper GPU would. Nothing can be launched with it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PLUGIN = "jax_plugins.xla_cuda13"
DUMPS = "MOSAIC_GPU_DUMP_TO"

DRIVER_STUB = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 75: *value = 9; break;       /* compute capability, major */
    case 76: *value = 0; break;       /* and minor */
    case 16: *value = 132; break;     /* multiprocessors */
    case 97: *value = 232448; break;  /* shared memory of a block, bytes */
    default: *value = 1;
  }
  return 0;
}
int cuGetErrorName(int error, const char **text) { *text = "STUB"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no GPU here"; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)1; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 0; return 0; }
int cuLibraryLoadData(void **lib, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
  *lib = (void *)1; return 0;
}
int cuLibraryGetKernel(void **kernel, void *lib, const char *name) { *kernel = (void *)1; return 0; }
int cuKernelGetFunction(void **function, void *kernel) { *function = (void *)1; return 0; }
int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) { return 0; }
"""


class Machine(NamedTuple):
    """What one compiled kernel uses: registers of a thread, bytes, instructions in its text."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    wgmma: int
    tma: int


def what_is_missing() -> str | None:
    """Why kernels cannot be compiled here, in words; None if they can."""
    if sys.version_info < (3, 12):
        return "compiling needs Python 3.12 or newer and the extra gpu-compile"
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("jax_plugins") is None:
        return 'compiling needs the extra gpu-compile: pip install "k3jax[gpu-compile]"'
    if importlib.util.find_spec(PLUGIN) is None or importlib.util.find_spec("nvidia.cu13") is None:
        return 'compiling needs the extra gpu-compile: pip install "k3jax[gpu-compile]"'
    return None if shutil.which("cc") else "compiling needs a C compiler (cc) on the PATH"


def restart_ready_to_compile() -> None:
    """Starts this program again with the driver stub and the dump switches, which are read when it loads; once."""
    if DUMPS in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="pallas_kernels."))
    (folder / "stub.c").write_text(DRIVER_STUB)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", folder / "libcuda.so.1", folder / "stub.c"], check=True)
    (tools,) = importlib.import_module("nvidia.cu13").__path__
    environment = os.environ | {
        DUMPS: str(folder),
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "LD_LIBRARY_PATH": f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}",
        "PATH": f"{tools}/bin:{os.environ['PATH']}",
        **{f"MOSAIC_GPU_DUMP_{kind}": "1" for kind in ("PTX", "PTXAS", "RESOURCES")},
    }
    os.execve(sys.executable, sys.orig_argv, environment)


def compile_kernel(function, arguments) -> Machine:
    """Machine code of the one kernel in function(*arguments); arguments may be jax.ShapeDtypeStruct."""
    import jax.experimental.mosaic.gpu.core  # noqa: F401  sets the paths that the compiler reads

    library = ctypes.CDLL(importlib.import_module(PLUGIN)._get_library_path())
    compiler = library.MosaicGpuCompile
    compiler.argtypes, compiler.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    (code,) = kernel_modules(jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)))
    folder = Path(os.environ[DUMPS])
    before = set(folder.glob("*.ptx"))
    if not compiler(code, len(code)):
        raise RuntimeError("the kernel does not compile for sm_90a")
    (ptx,) = set(folder.glob("*.ptx")) - before
    text, report = ptx.read_text(), ptx.with_suffix(".ptxas").read_text()
    shared = re.findall(r"smem_scratch_bytes=(\d+)", ptx.with_suffix(".resources.txt").read_text())
    return Machine(
        registers=int(re.findall(r"[Uu]sed (\d+) registers", report)[0]),
        spilled_bytes=int(re.findall(r"(\d+) bytes spill stores", report)[0]),
        shared_bytes=int(shared[0]),
        wgmma=text.count("wgmma.mma_async"),
        tma=text.count("cp.async.bulk.tensor"),
    )


def kernel_modules(lowered) -> Iterator[bytes]:
    """The serialized module of each Mosaic GPU kernel in a lowered function."""
    from jaxlib.mlir import ir

    def walk(operation):
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    attributes = inner.attributes
                    if "call_target_name" in attributes and "mosaic_gpu" in str(attributes["call_target_name"]):
                        yield ir.StringAttr(ir.DictAttr(attributes["mhlo.backend_config"])["module"]).value_bytes
                    yield from walk(inner.operation)

    yield from walk(lowered.compiler_ir("stablehlo").operation)
