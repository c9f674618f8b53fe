"""nvlink/compile: CUDA C++ to machine code through NVRTC, with a cache on disk.

Owns the compiler's options, the key and the files of the cache, and how a log becomes an error. Refuses to know what a
kernel does or how it is launched. Compiling needs no GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from cuda.bindings import nvrtc
from cuda.core import Program, ProgramOptions

from a2a import env
from a2a.errors import CompileError

KERNELS: Final = Path(__file__).with_name("kernels")
_INCLUDE: Final = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_LOCK_BUDGET_S: Final = 120.0
"""A compilation takes seconds; who has waited this long for another process's compiles as well."""
_LOCK_POLL_S: Final = 0.02


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where compiled kernels are kept: `a2a` below `XDG_CACHE_HOME`, by default below `~/.cache`."""
    environ = env.snapshot() if environ is None else environ
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "a2a"


def compile_kernel(
    file: str,
    defines: Mapping[str, int | str],
    arch: str,
    *,
    preamble: str = "",
    include_path: Path = KERNELS,
    cache: Path | None = None,
) -> tuple[bytes, str]:
    """Machine code of one source file.

    Args:
        file: name of the source in `include_path`; what it includes lies there too.
        defines: macros, the sizes of this object among them.
        arch: such as "sm_90".
        preamble: text in front of the source, for declarations printed from Python.
        cache: directory of the cache; None for the user's. A directory that cannot be written is not used.

    Returns:
        The cubin and the compiler's log, which is empty when the cubin came from the cache.

    Raises:
        CompileError: with the compiler's log.
    """
    source = preamble + f'\n#line 1 "{file}"\n' + (include_path / file).read_text()
    path = (cache_directory() if cache is None else cache) / f"{_key(source, defines, arch, include_path)}.cubin"
    cubin = _read(path)
    if cubin is not None:
        return cubin, ""
    with _turn(path):
        # All ranks of a machine ask at once; those that waited find what the first one made.
        cubin = _read(path)
        if cubin is not None:
            return cubin, ""
        cubin, log = _compile(file, source, defines, arch, include_path)
        _write(path, cubin)
    return cubin, log


def compiler_version() -> str:
    """Version of NVRTC as "13.0".

    Raises:
        CompileError: the library is not there.
    """
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise CompileError(kernel="any", log=f"NVRTC cannot be loaded: {error}") from error
    return f"{major}.{minor}"


def _key(source: str, defines: Mapping[str, int | str], arch: str, include_path: Path) -> str:
    digest = hashlib.sha256()
    texts = _included(source, include_path)
    parts = (source, sorted((name, str(value)) for name, value in defines.items()), arch, sorted(texts.items()))
    digest.update(repr((*parts, compiler_version())).encode())
    return digest.hexdigest()


def _included(source: str, directory: Path) -> dict[str, str]:
    """Texts of all files that a source includes, whether or not a macro leaves some out.

    By path from the including folder, so that a cache can travel between copies of the project.
    """
    found: dict[str, str] = {}
    todo = [(source, directory)]
    while todo:
        text, where = todo.pop()
        for name in _INCLUDE.findall(text):
            path = (where / name).resolve()
            key = os.path.relpath(path, directory.resolve())
            if key not in found and path.is_file():
                found[key] = path.read_text()
                todo.append((found[key], path.parent))
    return found


def _compile(
    file: str, source: str, defines: Mapping[str, int | str], arch: str, include_path: Path
) -> tuple[bytes, str]:
    options = ProgramOptions(
        name=file,
        arch=arch,
        std="c++17",
        define_macro=[(name, str(value)) for name, value in sorted(defines.items())] or None,
        include_path=[str(include_path)],
        ptxas_options=["-v"],
        lineinfo=True,
    )
    log = io.StringIO()
    try:
        program = Program(source, "c++", options)
        code = program.compile("cubin", logs=log).code
    except Exception as error:
        # cuda-core puts the compiler's log into the text of its own exceptions, whose types differ between releases.
        raise CompileError(kernel=file, log=f"{error}\n{log.getvalue()}".strip()) from error
    return bytes(code), log.getvalue()


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Hold the lock of one file of the cache: for as long as it is held, or without it where it cannot be had soon."""
    with contextlib.ExitStack() as opened:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = opened.enter_context(path.with_suffix(".lock").open("a"))
            deadline = time.monotonic() + _LOCK_BUDGET_S
            while not _locked(lock.fileno()) and time.monotonic() < deadline:
                time.sleep(_LOCK_POLL_S)
        except OSError:
            # A directory that cannot be written: every process compiles for itself.
            opened.close()
        yield


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    cubin = data[_DIGEST_BYTES:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == data[:_DIGEST_BYTES] else None


def _write(path: Path, cubin: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        # Whoever could not get the lock writes as well; whichever renames last wins with the same bytes.
        os.replace(file.name, path)
    except OSError:
        return
