"""The HTML page of a verdict: complete, self-contained, escaped, with marks at the numbers."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mckpt.pages import document
from mckpt.verification import charts, report
from mckpt.verification.verdict import Verdict

HOSTILE = '<script>alert(1)</script>"><img src=//x onerror=1>&lt;\x00\x1b\u202e\udcff'
FP32 = {
    "max_abs": 1.3e-05,
    "rms": 1.4e-06,
    "kl": 1.03e-12,
    "kl_max": 1e-11,
    "top1": 0.99999,
    "loss": 6.1071946,
    "loss_hf": 6.1071947,
    "noise": 2.67e-05,
    "spread": 1.28,
    "tolerance": 0.000267,
    "bound": 0.0128,
    "decisive": True,
    "below": 20.3636,
    "probe": 3.4712,
    "probe_above": 12999.321,
}
LOW = {k: v for k, v in FP32.items() if "probe" not in k} | {
    "decisive": False,
    "below": 0.25,
    "kl_transformers": 0.0885,
    "top1_transformers": 0.744,
}
TRAINING = {
    "sizes": [{"tp": 2, "pp": 1}, {"tp": 1, "pp": 2}],
    "losses": [[6.12, 6.01, 5.8], [6.12, 6.02, math.inf]],
    "grad_norms": [[1.2, 1.1, 0.9]] * 2,
    "moved": 0.32,
    "max_abs": math.inf,
    "tolerance": 0.0032,
    "below": 0.0,
    "grad_norm_apart": 0.0,
    "grad_norm_tolerance": 0.01,
}
CHANGED = {
    "name": "a.b",
    "what": "values",
    "left": "0.5",
    "right": "nan",
    "first": (0, 3),
    "max_abs": math.nan,
    "count": 12,
}
BYTES: dict[str, Any] = {
    "level": "bytes",
    "hf": "/a",
    "megatron": "/b",
    "dims": [{"dim": "rope_theta", "arg": "rotary_base", "hf": 1e6, "megatron": [1, None]}],
    "values": {
        "same": False,
        "tensors_equal": 7,
        "equal_after_cast": 3,
        "bytes_compared": 12345,
        "dropped": ["a.weight (why)"],
        "missing": ["only.left"],
        "extra": [],
        "changed": [
            CHANGED,
            CHANGED | {"what": "shape", "first": None, "max_abs": None, "count": 0},
        ],
    },
}


def facts(num_layers: int = 8, **others: Any) -> dict[str, Any]:
    names = [
        "embed",
        *(f"layers.{n}{part}" for n in range(num_layers) for part in (".attn", ".mlp", "")),
        "final_norm",
    ]
    points = [
        {
            "point": p,
            "difference": 1e-6,
            "noise": 2e-6,
            "size": 10.0,
            "first": None,
            "tolerance": 2e-5,
        }
        for p in names
    ]
    points[0] |= {"difference": 0.0, "noise": 0.0}
    return {
        "hf": "/models/hf",
        "megatron": "/models/meg",
        "format": "torch_dist",
        "mckpt": "0.1",
        "dims": [],
        "ranks": 8,
        "device": "cpu",
        "level": "forward",
        "sizes": {"tp": 2, "pp": 2, "vpp": 2, "ep": 4, "etp": 1, "cp": 1},
        "dtype": "bfloat16",
        "impl": "local",
        "iteration": 0,
        "versions": {"torch": "2.13"},
        "logits": {"float32": dict(FP32), "bfloat16": LOW},
        "points": points,
        "tokens": {"sequences": 4, "positions": 512, "judged": 500, "lengths": [128], "ties": 1},
        "coverage": {
            "embedding_rows": {"reached": 187, "of": 199},
            "experts": {
                "reached": 127,
                "of": 16 * num_layers,
                "missing": {"3": [5]},
                "per_layer": 16,
            },
            "window": {"window": 64, "longest_sequence": 81, "exceeded": True},
            "positions": {"longest_sequence": 128, "of": None},
        },
        "scatter": [[-2.0, -2.0], [0.5, 0.4], [3.0, 3.0]],
    } | others


def failing() -> dict[str, Any]:
    """Returns facts of a verdict that fails at layers.4.mlp, the 15th point, and at all later ones.
    The difference at the end of layer 7 is infinite.
    """
    out = facts(training=TRAINING, dims=BYTES["dims"], resharded="from tp 4")
    for p in out["points"][14:]:
        p["difference"] = 5.0
    out["points"][-2]["difference"] = math.inf
    out["scatter"] += [[1.0, math.inf], [math.nan, 0.0], [-math.inf, 1.0]]
    out["logits"]["float32"] |= {
        "max_abs": math.inf,
        "rms": math.inf,
        "kl": math.nan,
        "loss": math.inf,
        "below": 0.0,
    }
    where = {
        "point": "layers.4.mlp",
        "position": {"sequence": 1, "position": 3},
        "args": ["x"],
        "hf": ["k"] * 60,
        "stored": ["s"],
        "differ": [],
    }
    return out | {"where": where}


class Page(HTMLParser):
    """Collects elements and text of a page. Fails where a tag is closed out of turn, or an SVG is
    not XML.
    """

    def __init__(
        self, found: dict[str, Any], verdict: str = "fail", reason: str = "they differ"
    ) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.page = report.page(Verdict(verdict, [reason], found))
        self.svgs = {
            s[0].text: s for s in map(ET.fromstring, re.findall("<svg.*?</svg>", self.page, re.S))
        }
        self.feed(self.page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open += [tag] * (tag != "meta")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if "style" not in self.open else ""

    def marks(self, title: str) -> list[tuple[float, float, str]]:
        return [
            (float(c.attrib["cx"]), float(c.attrib["cy"]), c.attrib["class"])
            for c in self.svgs[title].iter("circle")
        ]


STATES, LOGITS, LOSSES = (
    "difference of states by layer",
    "logits against logits",
    "losses of two runs",
)


def test_the_page_has_the_facts_of_the_verdict() -> None:
    passed, failed = Page(facts(), "pass"), Page(failing())
    for said in (
        "PASS",
        "/models/hf",
        "/models/meg",
        "forward",
        "tp 2, pp 2, vpp 2, ep 4, etp 1, cp 1",
        "transformer_impllocal",
        "torch 2.13",
        "stays 20.36x below the tolerance (at least 3 wanted)",
        "a seeded fault exceeds it 13,000x (at least 10 wanted)",
        "bfloat16 decides nothing",
        "bfloat16: this run exceeds the tolerance 4x",
        "top-1 agreement99.99%",
        "127 of 128",
        "layer 3: 5",
        "187 of 199",
        "500 of 512",
        ": exceeded",
    ):
        assert said in passed.text, said
    for said in (
        "FAIL",
        "position 3 of sequence 1",
        "reshardedfrom tp 4",
        "differs infinitely",
        "and 44 more",
        "rope_theta",
    ):
        assert said in failed.text and said not in passed.text, said
    assert failed.page.count("<code>k</code>") == 60 and failed.page == Page(failing()).page


@pytest.mark.parametrize(
    ("below", "said"),
    [
        (20.4, "the logits differ by 1/20.4 of the tolerance"),
        (0.25, "the logits differ by 4 times the tolerance"),
        (math.inf, "the logits differ by nothing"),
        (0.0, "the logits differ by inf times the tolerance"),
    ],
)
def test_the_margins_are_plain_on_both_sides_of_the_tolerance(below: float, said: str) -> None:
    lines = Verdict("fail", [], {"logits": {"float32": FP32 | {"below": below}}}).lines()
    assert any(said in line and "13,000 times the tolerance" in line for line in lines), lines


@pytest.mark.parametrize("num_layers", [1, 8, 94])
def test_each_point_has_one_mark(num_layers: int) -> None:
    found = facts(num_layers, sizes={"tp": 1, "pp": 1, "vpp": 1, "ep": 1, "etp": 1, "cp": 1})
    drawn = Page(found).marks(STATES)
    assert len(drawn) == len(found["points"]) == 3 * num_layers + 2
    assert [x for x, *_ in drawn] == sorted({x for x, *_ in drawn}) and {
        kind for *_, kind in drawn
    } == {"a"}


def test_the_first_point_beyond_the_tolerance_is_marked() -> None:
    found, page = failing(), Page(failing())
    drawn = {p["point"]: mark for p, mark in zip(found["points"], page.marks(STATES), strict=True)}
    assert [p for p, (_, _, kind) in drawn.items() if kind == "first"] == ["layers.4.mlp"]
    assert [p for p, (_, _, kind) in drawn.items() if kind == "beyond"] == [
        p["point"] for p in found["points"]
    ][15:]
    heights = {p: y for p, (_, y, _) in drawn.items()}
    assert (
        heights["layers.7"]
        == charts.TOP
        < heights["layers.7.mlp"]
        < heights["layers.0"]
        < heights["embed"]
        == 302
    )
    assert {"0", "inf", "layers.4.mlp"} < {t.text for t in page.svgs[STATES].iter("text")}
    assert "layers.4.mlp: difference 5, noise 2e-06, tolerance 2e-05, size 10" in {
        t.text for t in page.svgs[STATES].iter("title")
    }


def test_scales_place_values() -> None:
    log = charts.Scale.of([0.0, 3e-5, 2e-2, math.inf, math.nan], 300, 0, log=True)
    assert [log(v) for v in (0.0, 1e-5, 1e-3, 1e-1, math.inf, math.nan)] == [
        300,
        282,
        150,
        18,
        0,
        0,
    ]
    assert [label for _, label in log.ticks([0.0, 1e-2])] == [
        "1e-5",
        "1e-4",
        "1e-3",
        "1e-2",
        "1e-1",
        "0",
    ]
    linear = charts.Scale.of([-1.0, 4.0, -math.inf], 0, 136)
    assert [linear(v) for v in (-math.inf, -1.0, 1.5, 4.0, math.nan)] == [0, 18, 68, 118, 136]
    assert linear.ticks() == [(18, "-1"), (38, "0"), (58, "1"), (78, "2"), (98, "3"), (118, "4")]
    for values in ([], [0.0], [7.0] * 3, [math.nan], [1e-310, 1e308]):
        assert all(
            0 < len(charts.Scale.of(values, 0, 100, is_log).ticks(values)) < 12
            for is_log in (False, True)
        )
    said = [*map(document.say, (1.31130e-05, 12999.32, 4030.4, 0.0, 7, None, math.inf))]
    assert said == ["1.311e-05", "13,000", "4,030", "0", "7", "-", "inf"]
    assert [*map(document.share, (1.0, 0.99999, 0.7168, math.nan))] == [
        "100%",
        "99.99%",
        "71.68%",
        "nan",
    ]


def test_all_marks_lie_inside_the_picture() -> None:
    found = Page(failing())
    assert set(found.svgs) == {STATES, LOGITS, LOSSES} and len(found.marks(LOSSES)) == 6
    for title, svg in found.svgs.items():
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        assert all(0 <= x <= width and 0 <= y <= height for x, y, _ in found.marks(str(title)))
        assert not re.search(
            "nan|inf", " ".join(v for e in svg.iter() for k, v in e.attrib.items() if k != "class")
        )
    *finite, up, right, left = found.marks(LOGITS)
    assert [kind for *_, kind in (*finite, up, right, left)] == ["a"] * 3 + ["odd"] * 3
    assert (up[1], right[0], left[0]) == (charts.TOP, 504, charts.LEFT)


def test_the_page_shows_the_ranks_of_layers_and_experts() -> None:
    text = Page(failing()).text
    assert (
        "stage 0ranks 0 to 3embed, 0 to 14 to 5stage 1ranks 4 to 72 to 36 to 7, norm, head" in text
    )
    assert "ep rank 00 to 30ep rank 14 to 71ep rank 28 to 112ep rank 312 to 153" in text
    assert re.findall('"here">([^<]*)', Page(failing()).page) == ["4 to 5"]
    text = Page(facts(sizes={"tp": 4, "pp": 2, "vpp": 1, "ep": 2, "etp": 2, "cp": 1})).text
    assert (
        "ep rank 00 to 70, 1ep rank 18 to 152, 3" in text
        and "stage 1ranks 4 to 74 to 7, norm, head" in text
    )
    assert "cannot be split evenly over 2 pipeline stages" in Page(facts(5)).text


def spoilt(value: Any) -> Any:
    """Returns facts whose text is all hostile."""
    if isinstance(value, dict):
        return {k: spoilt(v) for k, v in value.items()}
    return (
        [spoilt(v) for v in value]
        if isinstance(value, (list, tuple))
        else HOSTILE
        if isinstance(value, str)
        else value
    )


def test_hostile_text_stays_text_and_nothing_comes_from_outside() -> None:
    found = failing() | {"values": BYTES["values"]}
    clean, bad = Page(found), Page(spoilt(found) | {"versions": {HOSTILE: HOSTILE}}, reason=HOSTILE)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in clean.elements}
    assert not {"src", "href", "xlink:href", "data", "srcset"} & {
        key for _, a in clean.elements for key in a
    }
    assert not re.search(r"https?:|url\(|@import", clean.page)
    assert {tag for tag, _ in bad.elements} <= {tag for tag, _ in clean.elements}
    assert {key for _, a in bad.elements for key in a} <= {
        key for _, a in clean.elements for key in a
    }
    assert (
        '<script>alert(1)</script>"><img src=//x onerror=1>&lt;\\x00\\x1b\\u202e\\udcff' in bad.text
    )
    assert document.tag("p", class_='"><b>&') == '<p class="&quot;&gt;&lt;b&gt;&amp;"></p>'
    assert not {"\x00", "\x1b", "\u202e", "\udcff"} & set(bad.page)


def test_missing_facts_are_left_out() -> None:
    for key in (whole := failing() | BYTES):
        if key not in ("sizes", "ranks", "tokens"):  # these three come with points and coverage
            Page({k: v for k, v in whole.items() if k != key})
    assert "Logits" not in Page({}).text
    text = Page(BYTES).text
    assert (
        "12,345 bytes" in text
        and "only.left" in text
        and "a.bvalues0.5nan[0, 3]12nan" in text
        and "a.bshape0.5nan---" in text
    )
    load = {"point": "load", "args": ["x"], "message": "no such tensor"}
    assert (
        "they differ first atload"
        in Page({"hf": "/a", "sizes": facts()["sizes"], "dims": [], "where": load}).text
    )
    assert (
        "nothing could be judged"
        in Page(facts(logits={"float32": dict.fromkeys(FP32, math.nan)})).text
    )


def test_the_file_is_complete_or_absent(tmp_path: Path) -> None:
    verdict, broken = (
        Verdict("pass", [], facts()),
        Verdict("pass", [], facts(points=[{"point": "embed"}])),
    )
    (old := tmp_path / "a.html").write_text("old")
    with old.open() as reader:
        report.write(verdict, old)
        assert reader.read() == "old"
    (tmp_path / "folder").mkdir()
    for found, name, error in (
        (broken, "a.html", KeyError),
        (verdict, "no/a.html", OSError),
        (verdict, "folder", OSError),
    ):
        with pytest.raises(error):
            report.write(found, tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == report.page(verdict).encode()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.html", "folder"]
