"""The kernels' own text, compiled for the CPU: every machine instruction in it becomes a line of C++."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from a2a.nvlink import params

KERNELS: Final = Path(params.__file__).with_name("kernels")
HERE: Final = Path(__file__).parent
COMPILER: Final = shutil.which("g++")

_ATOMIC_LOAD = "%0 = __atomic_load_n(static_cast<const {type}*>(%1), __ATOMIC_ACQUIRE); emulated::linger();"
_ATOMIC_STORE = "__atomic_store_n(reinterpret_cast<{type}*>(%0), %1, __ATOMIC_RELEASE);"
_FOUR = (
    "const u32* four = static_cast<const u32*>(emulated::aligned(%4, 16));"
    "%0 = four[0]; %1 = four[1]; %2 = four[2]; %3 = four[3];"
)
INSTRUCTIONS: Final = {
    r"ld\.(relaxed|acquire)\.(sys|gpu)\.global\.u32": _ATOMIC_LOAD.replace("{type}", "u32"),
    r"ld\.(relaxed|acquire)\.(sys|gpu)\.global\.u64": _ATOMIC_LOAD.replace("{type}", "u64"),
    r"ld\.relaxed\.gpu\.global\.v4\.u32": _FOUR,
    r"ld\.relaxed\.sys\.global\.v2\.u64": "emulated::LOAD_TWO(%2, %0, %1);",
    r"st\.relaxed\.(sys|gpu)\.global\.u32": _ATOMIC_STORE.replace("{type}", "u32"),
    r"st\.relaxed\.(sys|gpu)\.global\.u64": _ATOMIC_STORE.replace("{type}", "u64"),
    # The lane with a line's tag goes last: lanes come out of a collective in any order, and a GPU shows a line whole.
    r"st\.relaxed\.sys\.global\.v2\.u64": "if (((unsigned long long)(%0) & 127) == 112)"
    " for (int i = 0; i < 3; ++i) emulated::yield();"
    "__atomic_store_n(%0, %1, __ATOMIC_RELEASE); __atomic_store_n(%0 + 1, %2, __ATOMIC_RELEASE);",
    r"ld\.global\.L1::no_allocate\.v4\.u32": _FOUR,
    r"st\.global\.v4\.u32": "u32* four = (u32*)(emulated::aligned(%0, 16));"
    "four[0] = %1; four[1] = %2; four[2] = %3; four[3] = %4;",
    r"ld\.global\.u32": "%0 = *static_cast<const u32*>(emulated::aligned(%1, 4));",
    r"ld\.global\.u64": "%0 = *static_cast<const u64*>(emulated::aligned(%1, 8));",
    r"red\.relaxed\.gpu\.global\.add\.u32": "__atomic_fetch_add(%0, 1u, __ATOMIC_SEQ_CST);",
    r"fence\.acq_rel": "__atomic_thread_fence(__ATOMIC_SEQ_CST);",
    r"mov\.u64 %0, %%globaltimer": "%0 = emulated::nanoseconds();",
    r"cvt\.f32\.f16": "%0 = emulated::from_half(%1);",
    r"cvt\.rn\.bf16\.f32": "%0 = emulated::to_bf16(%1);",
    r"cvt\.rn\.f16\.f32": "%0 = emulated::to_half(%1);",
    r"^$": "",
}
"""What each instruction of the kernels does; one that is not listed fails the build."""


class EmulatedModule:
    """One kernel file compiled for the CPU.

    Args:
        file: "dispatch.cu" or "combine.cu".
        constants: its -D constants.
        struct: what its kernels are told.
        directory: for the library.
    """

    def __init__(
        self, file: str, constants: Mapping[str, int], struct: type[ctypes.Structure], directory: Path
    ) -> None:
        assert COMPILER is not None
        directory.mkdir(parents=True, exist_ok=True)
        # As for sm_80, the one architecture whose kernels use no instruction that only later ones have.
        macros = [f"-D{name}={value}" for name, value in {**constants, "__CUDA_ARCH__": 800}.items()]
        source = params.device_source() + (KERNELS / file).read_text()
        command = [COMPILER, "-E", "-P", "-x", "c++", *macros, "-I", str(KERNELS), "-"]
        flat = subprocess.run(command, input=source, capture_output=True, check=True, text=True).stdout
        names = re.findall(r'extern "C" __global__ .*?\b(\w+)\(const __grid_constant__', flat, re.DOTALL)
        table = ", ".join(f'{{"{name}", {name}}}' for name in names)
        code = _without_instructions(flat).replace(
            "extern __shared__ u64 image[];", "static thread_local u64 image[4096];"
        )
        entries = f"using Params = {struct.__name__}; struct Entry {{ const char* name; void (*kernel)(Params); }};"
        (directory / "kernels.inc").write_text(f"{code}\n{entries}\nconst Entry ENTRIES[] = {{{table}}};\n")
        library = directory / "kernels.so"
        options = ["-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-w", f"-I{directory}"]
        # Shared variables of inline functions would be one for all modules of the process.
        options.append("-fno-gnu-unique")
        # A GPU refuses what a CPU allows: a word that does not lie on a multiple of its size.
        options += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
        command = [COMPILER, *options, str(HERE / "emulated_device.cpp"), "-o", str(library)]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
        self._launch = loaded.launch
        self.set_pauses = loaded.set_pauses
        """How many microseconds a CTA pauses behind some of its waiting loads, until set to 0 again."""

    def launch(self, name: str, told: Sequence[Any], grid: tuple[int, int], threads: int) -> None:
        """Run one launch per element of `told`, all at the same time, to their ends."""
        structs = (type(told[0]) * len(told))(*told)
        grids = (ctypes.c_uint * (2 * len(told)))(*(grid * len(told)))
        assert self._launch(name.encode(), structs, len(told), grids, threads) == 0, name


def _without_instructions(text: str) -> str:
    done = []
    while (found := re.search(r"\basm(?: volatile)?\s*\(", text)) is not None:
        end = _closing(text, found.end())
        done += [text[: found.start()], "{ ", _translated(text[found.end() : end - 1]), " }"]
        text = text[end + 1 :]
    flat = "".join([*done, text])
    # A line's parts have a rule of their own; other pairs of words are just two words.
    start = flat.find("void load_line_part")
    if start < 0:
        return flat
    end = flat.index("LOAD_TWO", start)
    flat = flat[:end] + flat[end:].replace("LOAD_TWO", "load_line_part", 1)
    return flat.replace("LOAD_TWO", "load_two")


def _translated(statement: str) -> str:
    """C++ for what stands between the parentheses of an asm statement."""
    template = re.match(r'\s*"([^"]*)"', statement)
    assert template is not None, statement
    rest = statement[template.end() :]
    operands = [rest[found.end() : _closing(rest, found.end()) - 1] for found in re.finditer(r'"[^"]*"\s*\(', rest)]
    for pattern, code in INSTRUCTIONS.items():
        if re.search(pattern, template.group(1)) and (template.group(1) or not pattern.strip("^$")):
            return re.sub(r"%(\d)", lambda which: f"({operands[int(which.group(1))]})", code)
    raise AssertionError(f"no emulation of {template.group(1)!r}")


def _closing(text: str, start: int) -> int:
    """Position behind the parenthesis that closes the one before `start`."""
    depth, quoted = 1, False
    while depth:
        character = text[start]
        if character == '"':
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(character, 0)
        start += 1
    return start
