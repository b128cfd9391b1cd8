"""Nothing that a pickle names runs, and hostile pickles are refused in one line."""

from __future__ import annotations

import os
import pickle
import pickletools
import random
import re
import struct
from collections import OrderedDict

import pytest

from mckpt.containers import safe_pickle as sp
from mckpt.containers.safe_pickle import reading
from mckpt.errors import MckptError, PickleError
from tests.helpers.commands import ROOT, python


class Evil:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_nothing_that_a_pickle_names_runs(tmp_path, protocol):
    marker = tmp_path / "marker"
    value = {
        "args": Evil(os.system, f"touch '{marker}'"),
        "e": Evil(eval, f"open({str(marker)!r}, 'w')"),
    }
    data = pickle.dumps(value, protocol)
    got = sp.loads(data, "x")
    assert repr(type(got["args"])) in ("<posix.system>", "<nt.system>") and got["args"].args == (
        f"touch '{marker}'",
    )
    assert sp.short(got["e"]).endswith("eval object>")
    assert not marker.exists()
    pickle.loads(data)
    assert marker.exists()  # Python's own unpickler does run it


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
    "shared tuples as key": (
        b"\x80\x02})q\x00"
        + b"".join(b"h%c\x85h%c\x86q%c" % (i, i, i + 1) for i in range(60))
        + b"Ns."
    ),
    "copies of a list": (
        b"\x80\x02("
        + b"ccollections\nOrderedDict\nq\x00]("
        + b"K\x01K\x02\x86" * 1000
        + b"eq\x01"
        + b"h\x00h\x01\x85R" * 100
        + b"t"
    ),
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
    "attribute of an OrderedDict": (
        b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsK\x01sb."
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_in_one_line(name):
    with pytest.raises(PickleError) as e:
        sp.loads(BOMBS[name], "some.pt")
    assert (
        str(e.value).startswith("some.pt: ")
        and "\n" not in str(e.value)
        and len(str(e.value)) < 400
    )


def test_errors_name_the_byte_and_the_opcode():
    with pytest.raises(
        PickleError,
        match="byte 3 of the pickle: opcode LONG_BINPUT sets memo 2147483648, but 9 bytes",
    ):
        sp.loads(BOMBS["memo index"], "some.pt")
    with pytest.raises(PickleError, match="opcode BINUNICODE claims 4294967295 bytes, 1 are left"):
        sp.loads(BOMBS["unicode length"], "some.pt")
    with pytest.raises(PickleError, match="at most 50 are read here"):
        sp.loads(pickle.dumps(list(range(100))), "x", max_bytes=50)


def test_bombs_cost_no_memory():
    """Runs in a process with limited memory, in which a bomb that is read would be an error."""
    code = """
import resource, sys
sys.path[:0] = sys.argv[1:]
from tests.unit.test_safe_pickle import BOMBS
from mckpt.containers import safe_pickle
from mckpt.errors import PickleError
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for data in BOMBS.values():
    try:
        safe_pickle.loads(data, "x")
        raise SystemExit("read")
    except PickleError:
        pass
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert after - before < 100 << 10, after
"""
    python(code, ROOT)


def test_deep_nesting_is_read_but_not_written():
    deep = sp.loads(b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".", "x")
    with pytest.raises(PickleError, match="nested too deeply"):
        sp.dumps(deep)
    assert sp.short(deep) == "a list"
    sp.plain(deep)


def test_many_shared_references_stay_small():
    laughs = (
        b"\x80\x02]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(100)) + b"."
    )
    with pytest.raises(PickleError):  # the stack has a hundred values
        sp.loads(laughs, "x")
    value = []
    for _ in range(100):
        value = [value, value]
    got = sp.loads(pickle.dumps(value, 2), "x")
    assert len(sp.dumps(got)) < 2000
    assert len(repr(sp.plain(got))) < 200_000


VALUES = [
    None,
    True,
    False,
    0,
    255,
    256,
    65535,
    65536,
    -1,
    -128,
    -129,
    2**31 - 1,
    2**31,
    -(2**31),
    -(2**31) - 1,
    -(2**63),
    2**64,
    2**2100,
    -(2**2100),
    1.5,
    float("inf"),
    "",
    "a",
    "modèle",
    "\ud800",
    "x" * 300,
    (),
    (1,),
    (1, 2),
    (1, 2, 3),
    (1, 2, 3, 4),
    [],
    [1],
    list(range(2500)),
    {},
    {"a": 1},
    {i: str(i) for i in range(2500)},
    b"",
    b"abc\xff",
    b"y" * 300,
    OrderedDict(a=1, b=[2]),
    {(1, (2, 3)): {"k": ()}},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(v)[:20])
def test_plain_values_are_written_as_cpython_does(value):
    data = pickle.dumps(value, 2)
    got = sp.dumps(value)
    assert pickle.loads(got) == value
    if not isinstance(value, bytes):
        assert got == data
        assert sp.dumps(sp.loads(data, "x")) == data
    assert pickle.loads(sp.dumps(sp.loads(pickle.dumps(value, 4), "x"))) == value


def test_records_are_written_as_they_were_read():
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
    assert (
        again["args"] == value["args"]
        and again["rng"] == value["rng"]
        and (again["array"] == value["array"]).all()
    )
    assert (again["np"][1] == value["np"][1]).all() and again["device"] is random.Random
    assert sp.dumps(sp.loads(out, "x")) == out


def test_fields_and_plain_give_plain_values():
    import argparse
    import pathlib

    space = sp.namespace(
        dtype=sp.torch_dtype("bfloat16"),
        n=3,
        path=sp.loads(pickle.dumps(pathlib.PurePosixPath("/a/b"), 2), "x"),
        t=(1, 2.5),
    )
    space.state["kind"] = sp.glob("megatron.core.enums", "ModelType")(1)
    space.state["odd"] = sp.glob("a", "B").__new__(sp.glob("a", "B"))
    assert sp.fields(space)["n"] == 3
    assert sp.plain(space) == {
        "dtype": "bfloat16",
        "n": 3,
        "path": "/a/b",
        "t": [1, 2.5],
        "kind": 1,
        "odd": "<a.B object>",
    }
    assert pickle.loads(sp.dumps(sp.namespace(a=1))) == argparse.Namespace(a=1)
    with pytest.raises(PickleError):
        sp.fields(3)


def test_as_tensor_reads_views_of_a_storage():
    assert sp.as_tensor(sp.tensor("bfloat16", (3, 4), "7")) == ("bfloat16", (3, 4), (4, 1), "7", 0)
    assert sp.as_tensor(sp.tensor("float8_e4m3fn", (3, 4), "7")) == (
        "float8_e4m3fn",
        (3, 4),
        (4, 1),
        "7",
        0,
    )
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


def test_damaged_pickles_raise_only_pickle_errors():
    """Each of 5,000 damaged pickles is read, or raises a PickleError."""
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


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_bomb_behind_many_values_is_found(protocol):
    value = {f"k{i}": [i, (i, i + 1), "s" * (i % 100), 1.5, ("a", ("b", i))] for i in range(3000)}
    records = [Evil(str, i) for i in range(3000)]
    data = pickle.dumps(
        {"records": records, **value, "again": [records[i % 99] for i in range(3000)]}, protocol
    )
    got = sp.loads(data, "x")
    assert got["k2999"] == [2999, (2999, 3000), "s" * 99, 1.5, ("a", ("b", 2999))] and got[
        "records"
    ][2999].args == (2999,)
    end = data.rindex(b"k2999") + 5
    with pytest.raises(PickleError, match="LONG_BINPUT"):
        sp.loads(data[:end] + b"]r" + u32(1 << 31) + b"0" + data[end:], "x")
    with pytest.raises(PickleError):
        sp.loads(data[: len(data) // 2], "x")


class Size(tuple):
    """Pickles to the opcodes of a torch.Size."""

    def __reduce__(self):
        return Size, (tuple(self),)


def objects(rng, num):
    """Draws objects with the opcodes of chunks and items: with up to three sizes, of ranks 0 to 9,
    and numbers of every width.
    """
    import argparse

    out, keys = [], ["k0", "k1", "k2"]
    for i in range(num):
        ranks = [rng.randrange(10) for _ in range(rng.randrange(4))]
        sizes = {
            f"size{n}": Size(rng.choice((0, 300, 70_000, 1 << 40, -1)) for _ in range(rank))
            for n, rank in enumerate(ranks)
        }
        more = {
            "key": keys[i % 3],
            "at": rng.choice((i, i << 8, i << 33)),
            "index": rng.choice((None, True, i)),
        }
        fields = list({**sizes, **more}.items())
        rng.shuffle(fields)
        out.append(argparse.Namespace(**dict(fields)))
    return out


def refusal(data):
    try:
        reading.scan(data, "x")
        return None
    except PickleError as e:
        return str(e)


@pytest.fixture
def by_opcode(monkeypatch):
    """Returns a function that calls another one while `scan` follows each opcode by itself."""

    def call(function, *args):
        with monkeypatch.context() as only:
            only.setattr(reading, "_OBJECT", re.compile(b"(?!)"))
            return function(*args)

    return call


@pytest.mark.parametrize("seed", range(4))
def test_objects_have_the_effect_of_their_opcodes(seed, by_opcode):
    """The scan of a damaged pickle refuses the same byte for the same reason as when it follows
    each opcode.

    An exception is a memo index that nothing has set: the unpickler may refuse that one.
    """
    rng = random.Random(seed)
    tensors = OrderedDict(
        (f"layers.{i}.w", sp.tensor("bfloat16", (i + 1, 300), str(i))) for i in range(40)
    )
    shared = ("p", "q")
    values = (
        {f"k{i}": [i, (i, i + 1), "s" * (i % 30), (i, ("a", i))] for i in range(40)},
        [(shared, i, shared) for i in range(40)],
    )
    plain = [
        sp.dumps(tensors),
        *(pickle.dumps(value, protocol) for protocol in (2, 4) for value in values),
    ]
    flat = [pickle.dumps(objects(rng, 40), 4) for _ in range(3)]
    assert all(len(re.findall(reading._OBJECT, data)) > 15 for data in flat)
    refused = 0
    for _ in range(1500):
        data = bytearray(rng.choice(plain + 3 * flat))
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
        slow, fast = by_opcode(refusal, bytes(data)), refusal(bytes(data))
        refused += slow is not None
        if slow != fast:
            assert slow and "which nothing has set" in slow
            with pytest.raises(PickleError):
                sp.loads(bytes(data), "x")
    assert 200 < refused < 1300


@pytest.mark.parametrize("seed", range(4))
def test_objects_do_not_shift_the_memo(seed, by_opcode):
    """A nest of tuples that begins at the memo entry after 1000 objects is found, and the next
    entry is not set.
    """
    data = pickle.dumps(objects(random.Random(seed), 1000), 4)
    num = sum(op.name == "MEMOIZE" for op, _, _ in pickletools.genops(data))
    nest = b")\x940" + b"".join(
        b"j" + u32(num + i) + b"j" + u32(num + i) + b"\x86\x940" for i in range(60)
    )
    for more, found in (
        (nest, "opcode TUPLE makes a nest"),
        (b"j" + u32(num) + b"0", f"reads memo {num}, which nothing"),
    ):
        whole = data[:-1].replace(b"\x95" + data[3:11], b"") + more + b"."
        assert found in refusal(whole) and refusal(whole) == by_opcode(refusal, whole)


def test_nests_by_memo_entries_are_found():
    """Otherwise each tuple could hold the one before it, and hashing the last would take 2**60
    steps.
    """
    head = (
        b"\x80\x02](" + b"".join(b"Nr" + u32(i) + b"0" for i in range(70000)) + b"cos\nsystem\n)R"
    )
    chain = b"".join(
        b"j" + u32(i) + b"j" + u32(i) + b"\x86r" + u32(i + 1) + b"0" for i in range(100, 160)
    )
    late = b"".join(
        b"j" + u32(i) + b"j" + u32(i) + b"\x86r" + u32(i + 1) + b"0" for i in range(70100, 70160)
    )
    for links, last in ((chain, 160), (late.replace(b"j" + u32(70100), b"j" + u32(100)), 70160)):
        with pytest.raises(PickleError, match="nest"):
            sp.loads(head + links + b"}j" + u32(last) + b"Nse.", "x")


def test_reading_restores_the_garbage_collector():
    import gc

    with pytest.raises(PickleError):
        sp.loads(b"", "x")
    assert gc.isenabled()
