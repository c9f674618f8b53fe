"""host/numba_atomics: addresses, memory order between processes, and sleeping on a word, as numba intrinsics.

Owns every ordering that the doorbells of shared memory rest on, one function each, named by what it guarantees on any
architecture. Refuses to know what is stored. Imported only where numba is installed.
"""

from __future__ import annotations

import platform
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I32: Final = ir.IntType(32)
_I64: Final = ir.IntType(64)

_FUTEX_CALLS: Final = {
    "x86_64": 202,
    "aarch64": 98,
    "riscv64": 98,
    "loongarch64": 98,
    "ppc64le": 221,
    "s390x": 238,
}
"""Number of the futex system call by machine, from the kernel's tables of system calls; libc does not offer it."""

FUTEX_CALL: Final = _FUTEX_CALLS.get(platform.machine())
"""This machine's, or None where it is not known."""

# Of the kernel's interface. Without the flag for private words: these are shared between processes.
_FUTEX_WAIT: Final = 0
_FUTEX_WAKE: Final = 1
_EVERYONE: Final = 2**31 - 1


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """The address as a pointer. Kernels get addresses, since an array made of every tensor slows small rounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def store_release(typingctx: Any, address: Any, value: Any) -> Any:
    """Store an int64: who sees it by `load_acquire` sees all that this thread loaded and stored before it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def load_acquire(typingctx: Any, address: Any) -> Any:
    """An int64: nothing that follows is done before it, so that what preceded the `store_release` seen is seen too."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_flag(typingctx: Any, address: Any, value: Any) -> Any:
    """Store an int32, whole; orders nothing by itself."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I32.as_pointer())
        builder.store_atomic(builder.trunc(args[1], _I32), pointer, "monotonic", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def load_flag(typingctx: Any, address: Any) -> Any:
    """An int32, whole; orders nothing by itself."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I32.as_pointer()), "monotonic", 4)

    return types.int32(types.int64), generate


@intrinsic
def swap_flag(typingctx: Any, address: Any, value: Any) -> Any:
    """Store an int32 and give back what was there, in one step: of several that take a flag one gets it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I32.as_pointer())
        return builder.atomic_rmw("xchg", pointer, builder.trunc(args[1], _I32), "seq_cst")

    return types.int32(types.int64, types.int64), generate


@intrinsic
def fence(typingctx: Any) -> Any:
    """Orders everything before it ahead of everything after it, stores ahead of loads and streamed stores included.

    Of two threads that each store, pass a fence and load what the other stored, at least one sees the other's store.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def advance_word(typingctx: Any, address: Any) -> Any:
    """Add one to an int32: who sees it by `load_word` sees all that this thread stored before it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _I32.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(_I32, 1), "seq_cst")

    return types.int32(types.int64), generate


@intrinsic
def load_word(typingctx: Any, address: Any) -> Any:
    """An int32: nothing that follows is done before it. Pairs with `advance_word`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I32.as_pointer()), "acquire", 4)

    return types.int32(types.int64), generate


@intrinsic
def sleep_while(typingctx: Any, word: Any, value: Any, timespec: Any) -> Any:
    """Sleep in the kernel while the int32 at `word` is `value`: until `wake_all`, the time at `timespec` or a signal.

    The kernel compares and falls asleep in one step: a word that has changed before it looked lets nobody sleep.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _system_call(builder, args[0], _FUTEX_WAIT, builder.zext(args[1], _I64), args[2])

    return types.int64(types.int64, types.int32, types.int64), generate


@intrinsic
def wake_all(typingctx: Any, word: Any) -> Any:
    """Wake all threads that sleep on the int32 at `word`, in whichever process they are."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _system_call(builder, args[0], _FUTEX_WAKE, ir.Constant(_I64, _EVERYONE), ir.Constant(_I64, 0))

    return types.int64(types.int64), generate


def _system_call(builder: Any, word: Any, operation: int, value: Any, timespec: Any) -> Any:
    # Found by name in the running process when the compiled code is loaded: an address would not survive on disk.
    kind = ir.FunctionType(_I64, [_I64], var_arg=True)
    function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    return builder.call(
        function,
        [ir.Constant(_I64, FUTEX_CALL), word, ir.Constant(_I64, operation), value, timespec],
    )
