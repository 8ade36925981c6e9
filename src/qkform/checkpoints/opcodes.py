"""What a PyTorch pickle would do, followed opcode by opcode without doing it.

torch decides which names a pickle may use; it does not bound what is done with them. A few hundred bytes can ask for
gigabytes (a bytearray of a number), for hours (the hash of tuples that hold each other, a slow codec) or for more
stack than there is (a tuple nested 200,000 deep as a key). All of that shows in the opcodes, before torch runs one.
Source: https://github.com/python/cpython/blob/main/Lib/pickletools.py
"""

from __future__ import annotations

import math
import pickletools
from typing import Any

MAX_OPCODES = 3_000_000  # 100,000 tensors take about as many
MAX_DEPTH = 100  # containers inside each other
MAX_KEY = 1_000  # numbers and texts in one tuple that is a key
MAX_TUPLE_KEYS = 2_000
MAX_WORK = 50_000_000  # characters encoded, elements counted
LATIN = ("latin1", "latin-1")

_REBUILDS = {
    f"torch._utils._rebuild_{kind}"
    for kind in (
        *(
            "tensor",
            "tensor_v2",
            "tensor_v3",
            "parameter",
            "parameter_with_state",
            "sparse_tensor",
            "qtensor",
        ),
        *("sparse_csr_tensor", "meta_tensor_no_storage", "nested_tensor", "wrapper_subclass"),
    )
}
_CALLED = {"torch.nn.parameter.Parameter", "torch.device", "torch.Size", "torch.serialization._get_layout"}
_BUILTIN = {"set", "complex", "bytearray"}
_BYTES = {"Double": 8, "Long": 8, "ComplexFloat": 8, "ComplexDouble": 16, "Float": 4, "Int": 4}
_BYTES |= {"Half": 2, "BFloat16": 2, "Short": 2}


class Unsafe(Exception):
    """What a pickle would do, and why it is not done; completes "FILE ..."."""


class Asks(Unsafe):
    """The name of what is no part of a tensor; the text is that name."""


class _Group:
    """A tuple, list, dictionary, or anything that was called: what it holds, and how deep."""

    __slots__ = ("depth", "items", "kind", "size")

    def __init__(self, kind: str, items: list[Any] | None = None) -> None:
        self.kind, self.depth = kind, 0
        self.items: list[Any] = []
        self.size = 1  # of a tuple, what its hash goes through: that of each element as often as it is held
        if items:
            self.hold(items)

    def hold(self, items: list[Any]) -> None:
        self.items += items
        for item in items:
            if type(item) is _Group:
                self.depth = max(self.depth, item.depth + 1)
                self.size += item.size if self.kind == "tuple" and item.kind == "tuple" else 1
            else:
                self.size += 1
        if self.depth > MAX_DEPTH:
            raise Unsafe(
                f"has a pickle of containers nested more than {MAX_DEPTH} deep: not a model's weights"
            )


class _Name(str):
    """A global, by its dotted name."""


class Pickle:
    """Follows the pickles of one file; `nbytes` is the file's size, `trusted` are names the user has let torch load."""

    def __init__(self, nbytes: int, trusted: frozenset[str] = frozenset()) -> None:
        self._nbytes, self._trusted = nbytes, trusted
        self._opcodes = self._work = self._tuples = self._announced = 0
        self._storages: dict[Any, int] = {}

    def follow(self, stream: Any) -> Any:
        """The value that the next pickle of the stream makes: a number or a text as it is. Raises Unsafe."""
        stack: list[Any] = []
        marks: list[list[Any]] = []
        memo: dict[int, Any] = {}

        def popped() -> list[Any]:
            nonlocal stack
            items, stack = stack, marks.pop()
            return items

        try:
            arg: Any
            for opcode, arg, at in pickletools.genops(stream):
                self._opcodes += 1
                if self._opcodes > MAX_OPCODES:
                    raise Unsafe(f"has a pickle of more than {MAX_OPCODES:,} opcodes: not a model's weights")
                name = opcode.name
                if name in ("BINPUT", "LONG_BINPUT"):
                    memo[arg] = stack[-1]
                elif name in ("BINGET", "LONG_BINGET"):
                    stack.append(memo[arg])
                elif name in _LITERALS:
                    stack.append(_LITERALS[name] if arg is None else arg)
                elif name == "MARK":
                    marks.append(stack)
                    stack = []
                elif name in _EMPTY:
                    stack.append(_Group(_EMPTY[name]))
                elif name == "TUPLE":
                    items = popped()
                    stack.append(_Group("tuple", items))
                elif name in _TUPLES:
                    stack[-_TUPLES[name] :] = [_Group("tuple", stack[-_TUPLES[name] :])]
                elif name in ("APPEND", "APPENDS"):
                    items = [stack.pop()] if name == "APPEND" else popped()
                    self._held(stack[-1], "list", items)
                elif name in ("SETITEM", "SETITEMS"):
                    items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else popped()
                    for key in items[::2]:
                        self._hash(key)
                    self._held(stack[-1], "dictionary", items)
                elif name == "GLOBAL":
                    stack.append(self._global(arg))
                elif name in ("REDUCE", "NEWOBJ"):
                    arguments, called = stack.pop(), stack.pop()
                    stack.append(self._call(called, arguments))
                elif name == "BUILD":
                    self._build(stack.pop())
                elif name == "BINPERSID":
                    stack.append(self._storage(stack.pop()))
                elif name == "STOP":
                    return stack.pop()
                elif name != "PROTO":
                    raise Unsafe(
                        f"has a pickle with the opcode {name} at byte {at:,}, which weights saved by torch.save (with "
                        "its own pickle protocol, 2) do not have"
                    )
        except (
            ValueError,
            KeyError,
            IndexError,
            UnicodeError,
            Warning,
        ) as error:  # a warning: of escapes, made an error
            raise Unsafe(f"has a pickle that is damaged or truncated ({type(error).__name__})") from None
        raise Unsafe("has a pickle without an end: truncated")

    def _global(self, arg: str) -> _Name:
        module, _, last = arg.partition(" ")
        name = f"{'builtins' if module == '__builtin__' else module}.{last}"
        known = (
            name in ("collections.OrderedDict", "collections.Counter", "_codecs.encode")
            or (name.startswith("builtins.") and last in _BUILTIN)
            or module == "torch"
            or module.startswith("torch.")
        )
        if not known and name not in self._trusted:
            raise Asks(arg.replace(" ", ".") if module != "__builtin__" else last)
        return _Name(name)

    def _held(self, target: Any, kind: str, items: list[Any]) -> None:
        if type(target) is not _Group or target.kind not in (kind, "object"):
            raise Unsafe(f"has a pickle that puts entries into what is no {kind}: damaged")
        target.hold(items)

    def _hash(self, key: Any) -> None:
        """What may be a key, at a bounded cost: numbers that collide, and tuples, make a dictionary quadratic."""
        if type(key) is _Group and key.kind == "tuple":
            self._tuples += 1
            if key.size > MAX_KEY or self._tuples > MAX_TUPLE_KEYS:
                raise Unsafe(
                    f"has a pickle with a tuple of {min(key.size, 10**9):,} parts as a key, or with more than "
                    f"{MAX_TUPLE_KEYS:,} tuples as keys: not a model's weights"
                )
        elif type(key) is float or (type(key) is int and abs(key) >= 2**60):
            self._tuples += 1
            if self._tuples > MAX_TUPLE_KEYS:
                raise Unsafe(
                    f"has a pickle with more than {MAX_TUPLE_KEYS:,} odd numbers as keys: not a model's"
                )

    def _spend(self, work: int, what: str) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise Unsafe(f"has a pickle that would {what} more than {MAX_WORK:,} elements in all")

    def _call(self, called: Any, arguments: Any) -> Any:
        """What a call makes; only those that state dicts need, with arguments that bound them."""
        if (
            type(called) is not _Name
            or type(arguments) is not _Group
            or arguments.kind not in ("tuple", "list")
        ):
            raise Unsafe("has a pickle that calls what is no function: damaged")
        name, args = str(called), arguments.items
        short = name.removeprefix("builtins.")
        out = _Group("object", args)
        if name in self._trusted:
            return out
        if name == "_codecs.encode" or short == "bytearray":
            text = args[0] if args else ""
            coded = len(args) == 2 and args[1] in LATIN and type(text) is str
            if not coded and (args[:1] or name == "_codecs.encode") and not _is_bytes(args):
                said = ", ".join(repr(arg)[:40] if type(arg) in (int, str) else "..." for arg in args)
                raise Unsafe(
                    f"has a pickle that calls {short}({said[:120]}): only text in latin1 becomes bytes"
                )
            self._spend(len(text) if coded else args[0].size if args else 0, "encode")
            out.kind, out.size = "bytes", len(text) if coded else 1
            return out
        if name in ("collections.OrderedDict", "collections.Counter") or short == "set":
            for group in args:
                if type(group) is not _Group:
                    raise Unsafe(f"has a pickle that makes a {short} of a {type(group).__name__}: damaged")
                self._spend(len(group.items), "count")
                for item in group.items if group.kind != "dictionary" else ():
                    pair = name == "collections.OrderedDict" and type(item) is _Group and item.items
                    self._hash(item.items[0] if pair else item)
            out.kind = "dictionary" if short != "set" else "object"
            return out
        if short == "complex" and all(type(arg) in (int, float) for arg in args):
            return out
        if name == "torch._tensor._rebuild_from_type_v2" and len(args) == 4:
            self._build(args[3])
            self._call(args[0], args[2])
            return out
        if name in _REBUILDS:
            return self._rebuilt(name, out)
        made = not args and name.startswith("torch.")  # an empty tensor of old files
        if made or name in _CALLED:
            self._spend(sum(arg.size if type(arg) is _Group else 1 for arg in args), "count")
            return out
        raise Asks(name)

    def _rebuilt(self, name: str, out: _Group) -> _Group:
        """A tensor: whether it repeats its storage is kept, because what is sparse is gone through on loading."""
        args = out.items
        repeated = False
        if "_rebuild_tensor" in name and len(args) > 2 and type(args[2]) is _Group:
            sides = args[2].items
            held = args[0].size if type(args[0]) is _Group else 0
            repeated = all(type(n) is int for n in sides) and math.prod(sides) > max(held, 1)
        elif "sparse" in name and _holds_repeated(out, 2):
            raise Unsafe("has a sparse tensor whose indices or values repeat a few stored numbers")
        out.kind = "repeated" if repeated else "tensor"
        return out

    def _build(self, state: Any) -> None:
        """State that is set on an object: a dictionary, pairs, or two of these."""
        for group in (state, *(state.items[:2] if type(state) is _Group and state.kind == "tuple" else ())):
            if type(group) is not _Group:
                continue
            self._spend(len(group.items), "set")
            if group.kind != "dictionary":
                for pair in group.items:
                    self._hash(pair.items[0] if type(pair) is _Group and pair.items else None)

    def _storage(self, pid: Any) -> Any:
        """A storage, no larger than the file it lies in."""
        if type(pid) is int:
            return pid
        if type(pid) is not _Group or pid.kind != "tuple" or len(pid.items) < 5:
            raise Unsafe("has a pickle that names a storage as torch does not: damaged")
        kind, key, count = str(pid.items[1]), pid.items[2], pid.items[4]
        if type(count) is not int or count < 0 or type(key) not in (str, int):
            raise Unsafe("has a pickle that names a storage as torch does not: damaged")
        nbytes = count * _BYTES.get(kind.rpartition(".")[2].removesuffix("Storage"), 1)
        before = self._storages.get(key, 0)
        if nbytes > before:
            self._storages[key] = nbytes
            self._announced += nbytes - before
        if self._announced > self._nbytes:
            raise Unsafe(
                f"announces storages of {self._announced:,} bytes, and has {self._nbytes:,} in all: truncated"
            )
        out = _Group("storage")
        out.size = count
        return out


def _is_bytes(args: list[Any]) -> bool:
    return len(args) == 1 and type(args[0]) is _Group and args[0].kind == "bytes"


def _holds_repeated(group: _Group, depth: int) -> bool:
    parts = [item for item in group.items[:10] if type(item) is _Group]
    return any(item.kind == "repeated" or (depth > 0 and _holds_repeated(item, depth - 1)) for item in parts)


_LITERALS: dict[str, Any] = {
    **dict.fromkeys(
        ("NONE", "BININT", "BININT1", "BININT2", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "LONG1")
    ),
    "NEWFALSE": False,
    "NEWTRUE": True,
}
_EMPTY = {"EMPTY_TUPLE": "tuple", "EMPTY_LIST": "list", "EMPTY_DICT": "dictionary", "EMPTY_SET": "object"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
