"""Pickles: nothing that they name runs, what hurts is refused in one line, and what is read is written as it was."""

from __future__ import annotations

import os
import pickle
import random
import struct
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from mckpt import pickle_columns
from mckpt import safe_pickle as sp
from mckpt.errors import MckptError, PickleError


class Evil:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nothing_runs(tmp_path, protocol):
    marker = tmp_path / "marker"
    value = {"args": Evil(os.system, f"touch '{marker}'"), "e": Evil(eval, f"open({str(marker)!r}, 'w')")}
    data = pickle.dumps(value, protocol)
    got = sp.loads(data, "x")
    assert repr(type(got["args"])) in ("<posix.system>", "<nt.system>") and got["args"].args == (f"touch '{marker}'",)
    assert sp.short(got["e"]).endswith("eval object>")
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists()  # the plain unpickler would have run it


def u32(n):
    return struct.pack("<I", n)


BOMBS = {
    "memo index": b"\x80\x02]r" + u32(1 << 31) + b".",
    "memo index late": b"\x80\x04" + b"]\x94" * 70000 + b"bbbu" + b"]r" + u32(1 << 31) + b".",
    "text put": b"]p99999999999\n.",
    "unicode length": b"\x80\x02X" + u32(0xFFFFFFFF) + b".",
    "bytes8 length": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "bytearray8 length": b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b".",
    "long length": b"\x80\x02\x8b" + u32(0x7FFFFFFF) + b".",
    "frame length": b"\x80\x04\x95" + struct.pack("<Q", 1 << 36) + b"N.",
    "deep tuple as key": b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.",
    "shared tuples as key": b"\x80\x02})q\x00" + b"".join(b"h%c\x85h%c\x86q%c" % (i, i, i + 1) for i in range(60)) + b"Ns.",
    "copies of a list": b"\x80\x02("
    + b"ccollections\nOrderedDict\nq\x00]("
    + b"K\x01K\x02\x86" * 1000
    + b"eq\x01"
    + b"h\x00h\x01\x85R" * 100
    + b"t",
    "ext": b"\x80\x02\x82\x01.",
    "inst": b"(ios\nsystem\n.",
    "dup": b"\x80\x02]" + b"2" * 100 + b"t.",
    "set": b"\x80\x04\x8f.",
    "buffer": b"\x80\x05\x97.",
    "text persid": b"Pabc\n.",
    "odd persid": b"\x80\x02K\x01Q.",
    "no opcode": b"\x80\x02\xff.",
    "underflow": b"\x80\x02s.",
    "cut": b"\x80\x02X\x04\x00\x00\x00abcd",
    "empty": b"",
    "call of a class with no arguments": b"\x80\x02cos\nsystem\nb.",
    "globals": b"\x80\x02(" + b"".join(b"ca\n%d\n0" % i for i in range(5000)) + b"N.",
    "attribute of an OrderedDict": b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsK\x01sb.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_in_one_line(name):
    with pytest.raises(PickleError) as e:
        sp.loads(BOMBS[name], "some.pt")
    assert str(e.value).startswith("some.pt: ") and "\n" not in str(e.value) and len(str(e.value)) < 400


def test_errors_say_where_and_what():
    with pytest.raises(PickleError, match="byte 3 of the pickle: opcode LONG_BINPUT sets memo 2147483648, but 9 bytes"):
        sp.loads(BOMBS["memo index"], "some.pt")
    with pytest.raises(PickleError, match="opcode BINUNICODE claims 4294967295 bytes, 1 are left"):
        sp.loads(BOMBS["unicode length"], "some.pt")
    with pytest.raises(PickleError, match="the most read here"):
        sp.loads(pickle.dumps(list(range(100))), "x", max_bytes=50)


def test_bombs_cost_no_memory():
    """In a process that may not have 1 GiB: what were an OOM kill is one error."""
    code = """
import resource, sys
sys.path[:0] = sys.argv[1:]
from tests.test_safe_pickle import BOMBS
from mckpt import safe_pickle
from mckpt.errors import PickleError
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for data in BOMBS.values():
    try:
        safe_pickle.loads(data, "x")
        raise SystemExit("read")
    except PickleError:
        pass
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
"""
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code, str(root)], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout


def test_deep_nesting():
    deep = sp.loads(b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".", "x")
    with pytest.raises(PickleError, match="nested too deeply"):
        sp.dumps(deep)
    assert sp.short(deep) == "a list"
    sp.plain(deep)


def test_many_shared_references_stay_small():
    laughs = b"\x80\x02]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(100)) + b"."
    with pytest.raises(PickleError):  # a hundred values on the stack
        sp.loads(laughs, "x")
    value = []
    for _ in range(100):
        value = [value, value]
    got = sp.loads(pickle.dumps(value, 2), "x")
    assert len(sp.dumps(got)) < 2000
    assert len(repr(sp.plain(got))) < 200_000


VALUES = [
    None, True, False, 0, 255, 256, 65535, 65536,
    -1, -128, -129, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, -(2**63), 2**64, 2**2100, -(2**2100),
    1.5, float("inf"), "", "a", "modèle", "\ud800", "x" * 300, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], [1], list(range(2500)),
    {}, {"a": 1}, {i: str(i) for i in range(2500)}, b"", b"abc\xff", b"y" * 300, OrderedDict(a=1, b=[2]), {(1, (2, 3)): {"k": ()}},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(v)[:20])
def test_plain_values_are_written_as_cpython_does(value):
    data = pickle.dumps(value, 2)
    got = sp.dumps(value)
    assert pickle.loads(got) == value
    if not isinstance(value, bytes):
        assert got == data
        assert sp.dumps(sp.loads(data, "x")) == data
    assert pickle.loads(sp.dumps(sp.loads(pickle.dumps(value, 4), "x"))) == value


def test_records_are_written_as_they_were():
    import argparse
    import pathlib

    import numpy as np

    value = {
        "args": argparse.Namespace(a=1, p=pathlib.PurePosixPath("/a/b"), n=np.float32(1.5)),
        "rng": random.Random(1).getstate(),
        "np": np.random.RandomState(1).get_state(),
        "array": np.arange(6).reshape(2, 3),
        "device": random.Random,
    }
    data = pickle.dumps(value, 2)
    out = sp.dumps(sp.loads(data, "x"))
    again = pickle.loads(out)
    assert again["args"] == value["args"] and again["rng"] == value["rng"] and (again["array"] == value["array"]).all()
    assert (again["np"][1] == value["np"][1]).all() and again["device"] is random.Random
    assert sp.dumps(sp.loads(out, "x")) == out


def test_fields_and_plain():
    import argparse
    import pathlib

    space = sp.namespace(
        dtype=sp.torch_dtype("bfloat16"), n=3, path=sp.loads(pickle.dumps(pathlib.PurePosixPath("/a/b"), 2), "x"), t=(1, 2.5)
    )
    space.state["kind"] = sp.glob("megatron.core.enums", "ModelType")(1)
    space.state["odd"] = sp.glob("a", "B").__new__(sp.glob("a", "B"))
    assert sp.fields(space)["n"] == 3
    assert sp.plain(space) == {"dtype": "bfloat16", "n": 3, "path": "/a/b", "t": [1, 2.5], "kind": 1, "odd": "<a.B object>"}
    assert pickle.loads(sp.dumps(sp.namespace(a=1))) == argparse.Namespace(a=1)
    with pytest.raises(PickleError):
        sp.fields(3)


def test_tensor_views():
    assert sp.as_tensor(sp.tensor("bfloat16", (3, 4), "7")) == ("bfloat16", (3, 4), (4, 1), "7", 0)
    assert sp.as_tensor(sp.tensor("float8_e4m3fn", (3, 4), "7")) == ("float8_e4m3fn", (3, 4), (4, 1), "7", 0)
    assert sp.as_tensor({"a": 1}) is None and sp.as_tensor(sp.namespace()) is None
    storage = sp.tensor("float32", (3, 4), "0").args[0]
    build = sp.glob("torch._utils", "_rebuild_tensor_v2")
    parameter = sp.glob("torch._utils", "_rebuild_parameter")
    view = build(storage, 2, (2, 2), (1, 5), False, OrderedDict())
    assert sp.as_tensor(parameter(view, True, OrderedDict())) == ("float32", (2, 2), (1, 5), "0", 2)
    for args in (
        (3, (2, 2), (1, 9)),
        (0, (13,), (1,)),
        (-1, (2,), (1,)),
        (0, (2,), (-1,)),
        (0, (2,), (1, 1)),
        (0, ("a",), (1,)),
        (0, 5, 5),
        (True, (2,), (1,)),
    ):
        with pytest.raises(PickleError):
            sp.as_tensor(build(storage, *args))


def test_flips_raise_nothing_else():
    """5,000 damaged pickles: each is read, or is one PickleError."""
    import argparse

    value = {
        "args": argparse.Namespace(a=[1, (2, 3)], b="text", c={"k": 1.5}),
        "m": OrderedDict(x=(1, 2), y=b"raw"),
        "n": [2**40, None, True],
    }
    rng = random.Random(0)
    for n in range(5000):
        data = bytearray(pickle.dumps(value, 2 + n % 4))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            got = sp.loads(bytes(data), "x", compact=n % 2 == 0)
            sp.plain(got)
            sp.dumps(got)
        except MckptError:
            pass


def repetitive(protocol):
    """Pickles as checkpoints have them, each of many values alike."""
    value = {f"k{i}": [i, (i, i + 1), "s" * (i % 100), 1.5, ("a", ("b", i))] for i in range(3000)}
    records = [Evil(str, i) for i in range(3000)]
    return pickle.dumps({"records": records, **value, "again": [records[i % 99] for i in range(3000)]}, protocol)


@pytest.mark.parametrize("protocol", [2, 4])
def test_repetitions_are_taken_whole(protocol):
    """Nearly no opcode is followed alone; a bomb behind them is found all the same."""
    data = repetitive(protocol)
    assert sp.scan(data, "x").steps < len(data) // 20
    got = sp.loads(data, "x")
    assert got["k2999"] == [2999, (2999, 3000), "s" * 99, 1.5, ("a", ("b", 2999))] and got["records"][2999].args == (2999,)
    end = data.rindex(b"k2999") + 5
    with pytest.raises(PickleError, match="LONG_BINPUT"):
        sp.loads(data[:end] + b"]r" + u32(1 << 31) + b"0" + data[end:], "x")
    with pytest.raises(PickleError):
        sp.loads(data[: len(data) // 2], "x")


@pytest.mark.parametrize("seed", range(4))
def test_repetitions_have_the_effect_of_their_opcodes(monkeypatch, seed):
    """Damaged anyhow, a pickle is refused for the same reason at the same byte as when each opcode is followed.

    Only a memo index that nothing has set may be left to the unpickler, which refuses it.
    """
    import argparse

    rng = random.Random(seed)
    tensors = OrderedDict((f"layers.{i}.w", sp.tensor("bfloat16", (i + 1, 300), str(i))) for i in range(40))
    value = {f"k{i}": [i, (i, i + 1), "s" * (i % 30), (i, ("a", i))] for i in range(40)}
    shared = ("p", "q")
    spaces = [argparse.Namespace(key=f"k{i % 3}", at=(i, 0, 1, i), n=i) for i in range(40)]
    seeds = [sp.dumps(tensors), *(pickle.dumps(v, p) for p in (2, 4) for v in (value, [(shared, i, shared) for i in range(40)], spaces))]

    def verdict(data, small):
        monkeypatch.setattr(sp, "_SMALL", small)
        try:
            sp.scan(data, "x")
            return None
        except PickleError as e:
            return str(e)

    for _ in range(1500):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.randint(0, 3)):
            at, copied = rng.randrange(len(data)), rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    data[at:at] = bytes([rng.choice(b"hjqr\x94()]}NeubsatR\x81\x85\x86\x87K0.Q")])
                case 2:
                    del data[at : at + rng.randrange(1, 60)]
                case 3:
                    data[at:at] = data[copied : copied + rng.randrange(1, 400)]
        slow, fast = verdict(bytes(data), 1 << 40), verdict(bytes(data), 0)
        if slow != fast:
            assert slow and "which nothing has set" in slow
            with pytest.raises(PickleError):
                sp.loads(bytes(data), "x")


def test_repetitions_do_not_hide_a_nest():
    """Else a tuple could hold the one before it, and hashing the last would take 2**60 steps."""
    head = b"\x80\x02](" + b"".join(b"Nr" + u32(i) + b"0" for i in range(70000)) + b"cos\nsystem\n)R"
    chain = b"".join(b"j" + u32(i) + b"j" + u32(i) + b"\x86r" + u32(i + 1) + b"0" for i in range(100, 160))
    late = b"".join(b"j" + u32(i) + b"j" + u32(i) + b"\x86r" + u32(i + 1) + b"0" for i in range(70100, 70160))
    for links, last in ((chain, 160), (late.replace(b"j" + u32(70100), b"j" + u32(100)), 70160)):
        with pytest.raises(PickleError, match="nest"):
            sp.loads(head + links + b"}j" + u32(last) + b"Nse.", "x")


def test_gc_is_left_as_it_was():
    import gc

    with pytest.raises(PickleError):
        sp.loads(b"", "x")
    assert gc.isenabled()


def one_of(part, rng):
    """An opcode that a form leaves open, with an argument, and what it is worth."""
    if part == b"K"[0]:
        number = rng.choice((0, 255, 256, 65535, 65536, 2**31 - 1, -1, -(2**31), 2**31, -(2**31) - 1, 2**47, -(2**47), 2**63 - 1, -(2**63)))
        return rng.choice((pickle.dumps(number, 2)[2:-1], b"\x8a\x08" + number.to_bytes(8, "little", signed=True))), number
    if part == b"h"[0]:
        number = rng.choice((0, 7, 255, 256, 1 << 31))
        return (b"h" + bytes([number]) if number < 256 else b"j" + u32(number)), number
    if part == b"G"[0]:
        return b"G" + rng.randbytes(8), None
    text = rng.choice(("", "a", "é" * 9, "x" * 255))
    head = bytes([part, len(text.encode())])
    return head + bytes(0 if part == 0x8C else 3) + text.encode(), text


def behind(data, at, form):
    """Where a form ends that is at a byte, followed opcode by opcode; None if it is not there."""
    numbers, gets = {0x4B: 1, 0x4D: 2, 0x4A: 4}, {0x68: 1, 0x6A: 4}
    for part in form:
        op, argument = data[at], int.from_bytes(data[at + 1 : at + 5], "little")
        if isinstance(part, bytes):
            size = len(part) if data[at : at + len(part)] == part else 0
        elif part == b"K"[0] and op == 0x8A:
            size = 2 + data[at + 1] if data[at + 1] <= 8 else 0
        elif part in b"Kh":
            size = {0x4B: numbers, 0x68: gets}[part].get(op, -1) + 1
        elif op != part:
            size = 0
        else:
            size = 9 if part == b"G"[0] else 2 + data[at + 1] if op == 0x8C else 5 + argument if argument < 256 else 0
        if not size:
            return None
        at += size
    return at


@pytest.mark.parametrize("seed", range(4))
def test_many_at_once_are_what_they_are_one_by_one(seed):
    """Repetitions that Ahead finds are those that follow one another, up to the first damage, and columns hold their values."""
    rng, taken, damaged, whole = random.Random(seed), 0, 0, 0
    for n in range(250):
        opens = [rng.choice(b"KKhG\x8cX") for _ in range(rng.randrange(1, 5))]
        form = [part for o in opens for part in (o, rng.choice((b"N", b"\x85\x94", b")\x81\x94}\x94(")))]
        form = tuple(form if rng.random() < 0.5 else [rng.choice((b"N", b"ub")), *form])
        instances = [[(part, None) if isinstance(part, bytes) else one_of(part, rng) for part in form] for _ in range(80)]
        if n % 4 == 1:
            del instances[60][form.index(opens[0])]  # an argument that is not there
        units = [b"".join(made for made, _ in instance) for instance in instances]
        data = bytearray(b"".join(units) + bytes(3000))
        if n % 2:
            for _ in range(rng.randrange(1, 3)):
                data[rng.randrange(len(data) - 3000)] = rng.choice((rng.randrange(256), data[rng.randrange(len(data) - 3000)]))
        data = bytes(data)
        wanted, at = [], behind(data, 0, form)
        while at is not None:
            wanted.append(at)
            at = behind(data, at, form)
        if not wanted:
            continue
        start, stop = wanted[0], wanted[-1]  # the last is no beginning
        ahead = pickle_columns.Ahead(form, [made for made, _ in instances[0]])
        begins, end = ahead.take(data, start)
        found = [*begins.tolist(), end]
        assert found == wanted[: len(found)] and end <= stop
        damaged += n % 2 and 16 < len(found) < 80
        if b"h"[0] not in form and len(ahead.anchor) >= 3 and units[0].count(ahead.anchor) == 1 and not n % 2:  # it is once in all of them
            assert len(found) > 40  # in the bytes that are looked at first
        if len(begins):
            taken += 1
            again = pickle_columns.Ahead(form, [made for made, _ in instances[0]])
            middle, last = again.take(data, wanted[len(begins) - 16])
            assert len(middle) == 16 and last == end
            assert not len(again.take(data, start - 1)[0]) or behind(data, start - 1, form) == start
            for i, place in enumerate(pickle_columns.follow(np.frombuffer(data, "u1"), begins, form, known=True)[0]):
                part, values = opens[i], [instance[form.index(opens[0]) + 2 * i][1] for instance in instances[1 : len(begins) + 1]]
                if part != b"G"[0] and not n % 2:
                    column = pickle_columns._column(data, place, part)
                    if part in b"X\x8c":
                        column = np.array([opcode[column.head :].decode() for opcode in column.opcodes])
                    assert (column.ids if part == b"h"[0] else column).tolist() == values
                    whole += 1
    assert taken > 60 and damaged > 5 and whole > 40
