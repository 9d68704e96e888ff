"""Compiles the virtual GPU for one torch installation and keeps the result in the user's cache.

A build belongs to a torch version, because the list of symbols torch imports and the layout of a few CUDA structs
do, and to the exact sources and compiler. It is made in a private directory and renamed into place, so that two
processes building at once both end with a whole one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gpumon.virtual_gpu import elf, stubs

SOURCES = Path(__file__).parent / "src"
# Unused parameters are the rule here: the functions have NVIDIA's signatures.
_FLAGS = (
    "-std=gnu11",
    "-O2",
    "-g",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
)
_NVIDIA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
_FIND_TORCH = """
import importlib.util, json
find = lambda name: getattr(importlib.util.find_spec(name), "origin", None)
print(json.dumps([find("torch"), find("pynvml")]))
"""


class BuildUnavailable(Exception):
    """This machine cannot run the virtual GPU; the message says why and what to do, in one sentence."""


@dataclass(frozen=True)
class Torch:
    """A torch installation with CUDA, as found on disk: it is never imported here."""

    folder: Path
    version: str
    cuda: tuple[int, int]
    cudnn: int
    """The cuDNN version it was built with, as cudnnGetVersion gives it (9.1.0 is 90100)."""
    nvml_reader: Path | None
    """nvidia-ml-py's module, whose lookups tell which NVML functions must exist; None where it is not installed."""

    @property
    def libraries(self) -> Path:
        return self.folder / "lib"


def find_torch(python: str = sys.executable) -> Torch:
    """Find the torch that ``python`` would import. Raises Unavailable without one, or with one without CUDA."""
    if Path(python) == Path(sys.executable):
        found: list[str | None] = [_origin("torch"), _origin("pynvml")]
    else:
        try:
            answer = subprocess.run([python, "-c", _FIND_TORCH], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BuildUnavailable(f"{python} could not be asked for its torch: {error}.") from error
        found = json.loads(answer.stdout)
    if found[0] is None:
        raise BuildUnavailable(f"The virtual GPU needs PyTorch, and {python} has none: pip install torch.")
    folder = Path(found[0]).parent
    text = (folder / "version.py").read_text()
    version = re.search(r"^__version__.*?=\s*'([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda.*?=\s*'(\d+)\.(\d+)", text, re.MULTILINE)
    if version is None:
        raise BuildUnavailable(f"{folder / 'version.py'} does not say which torch this is: reinstall torch.")
    if cuda is None or not (folder / "lib" / "libtorch_cuda.so").exists():
        raise BuildUnavailable(
            f"The virtual GPU needs a PyTorch built for CUDA, and torch {version[1]} of {python} is not: "
            "install the CUDA wheel (no GPU, driver or nvidia-* wheel is needed)."
        )
    reader = Path(found[1]) if found[1] else None
    return Torch(folder, version[1], (int(cuda[1]), int(cuda[2])), _cudnn_version(folder), reader)


def _cudnn_version(folder: Path) -> int:
    """From the requirement in torch's metadata. Raises Unavailable if it names none."""
    for metadata in folder.parent.glob("torch-*.dist-info/METADATA"):
        found = re.search(
            r"^Requires-Dist: nvidia-cudnn-cu\d+\s*\(?==\s*(\d+)\.(\d+)\.(\d+)", metadata.read_text(), re.M
        )
        if found:
            return int(found[1]) * 10_000 + int(found[2]) * 100 + int(found[3])
    raise BuildUnavailable(f"torch in {folder} does not say which cuDNN it was built with: install it from a wheel.")


def _origin(name: str) -> str | None:
    spec = importlib.util.find_spec(name)
    return spec.origin if spec else None


def cache_folder() -> Path:
    """Where builds are kept: ``$XDG_CACHE_HOME/gpumon/virtual_gpu``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpumon" / "virtual_gpu"


def build(python: str = sys.executable) -> Path:
    """Return the folder with libcuda.so.1, libnvidia-ml.so.1 and stand-ins for absent NVIDIA libraries.

    Takes about three seconds the first time and milliseconds afterwards. Raises Unavailable without a C compiler or a
    torch with CUDA, or when the compiler fails.
    """
    torch = find_torch(python)
    compiler = os.environ.get("CC") or "gcc"
    if shutil.which(compiler) is None:
        raise BuildUnavailable(f"The virtual GPU is built on demand and needs a C compiler: {compiler} was not found.")
    folder = cache_folder() / f"{torch.version}-{_fingerprint(torch, compiler)}"
    if not (folder / "complete").exists():
        _make(folder, torch, compiler)
    return folder


def _fingerprint(torch: Torch, compiler: str) -> str:
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.iterdir(), Path(stubs.__file__), Path(__file__)]):
        digest.update(path.name.encode() + path.read_bytes())
    digest.update(subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout)
    digest.update(str(torch.folder).encode())
    digest.update(str((torch.libraries / "libtorch_cuda.so").stat().st_mtime_ns).encode())
    digest.update(" ".join(sorted(_installed(torch))).encode())
    digest.update(torch.nvml_reader.read_bytes() if torch.nvml_reader else b"")
    return digest.hexdigest()[:16]


def _installed(torch: Torch) -> set[str]:
    """File names of the NVIDIA libraries that came with torch or as wheels beside it."""
    site = torch.folder.parent
    paths = [*torch.libraries.glob("lib*.so*"), *site.glob("nvidia/*/lib/lib*.so*"), *site.glob("cusparselt/lib/lib*")]
    return {path.name for path in paths if _NVIDIA_LIBRARY.match(path.name)}


def _make(folder: Path, torch: Torch, compiler: str) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    private = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        _compile(private, torch, compiler)
        (private / "complete").touch()
        try:
            private.rename(folder)
        except OSError:
            if not (folder / "complete").exists():
                raise
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _compile(target: Path, torch: Torch, compiler: str) -> None:
    libraries = [elf.read(path) for path in sorted({path.resolve() for path in torch.libraries.glob("lib*.so")})]
    imports = frozenset().union(*(library.imports for library in libraries)) | _looked_up(torch)
    needed = frozenset().union(*(library.needed for library in libraries))
    (target / "cuda_stubs.c").write_text(stubs.cuda(imports))
    reader = torch.nvml_reader.read_text() if torch.nvml_reader else ""
    (target / "nvml_stubs.c").write_text(stubs.nvml(reader))
    version = torch.cuda[0] * 1000 + torch.cuda[1] * 10
    defines = [f"-DVGPU_CUDA_VERSION={version}", f"-DVGPU_CUDNN_VERSION={torch.cudnn}", f"-I{SOURCES}"]
    nvml = sorted(SOURCES.glob("nvml*.c"))
    cuda = sorted(set(SOURCES.glob("*.c")) - set(nvml))
    for name, sources in (
        ("libcuda.so.1", [*cuda, target / "cuda_stubs.c"]),
        ("libnvidia-ml.so.1", [*nvml, SOURCES / "table.c", target / "nvml_stubs.c"]),
    ):
        command = [compiler, *_FLAGS, *defines, f"-Wl,-soname,{name}", "-o", str(target / name)]
        result = subprocess.run(
            [*command, *map(str, sources), "-lpthread", "-ldl"], capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise BuildUnavailable(f"{compiler} could not build the virtual GPU's {name}:\n{result.stderr}")
        if result.stderr:
            (target / "warnings.txt").write_text(result.stderr)
    (target / "libcuda.so").symlink_to("libcuda.so.1")  # the name older versions of Triton link against
    # A library that is absent is answered by the one that defines its symbols: same file, so it is loaded once.
    for name in sorted(needed - _installed(torch)):
        if _NVIDIA_LIBRARY.match(name) and not (target / name).exists():
            (target / name).symlink_to("libcuda.so.1")


def _looked_up(torch: Torch) -> frozenset[str]:
    """Driver functions that torch's CUDA library asks for by name at run time instead of importing them."""
    data = (torch.libraries / "libc10_cuda.so").read_bytes()
    return frozenset(name.decode() for name in re.findall(rb"\0(cu[A-Z][A-Za-z]{2,60}(?:_v\d)?)(?=\0)", data))
