"""The page that strategy.trace writes, and the table of a report in a notebook."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from mirror.base.timeline import FORWARD, KINDS
from mirror.viewer.html_page import page_of
from mirror.viewer.html_table import TablePart, table_of
from mirror.viewer.trace_lanes import lanes_of
from tests.viewer.made import HOSTILE, NAMES, STEP, content, span

# What a reader does, and what the page shows then.
USE = """
<script>
window.onerror = message => { document.title = "error: " + message; };
function point(kind, x, y, more) {
  const event = new PointerEvent(kind, {bubbles: true, pointerId: 1, ...more});
  Object.defineProperty(event, "offsetX", {value: x});
  Object.defineProperty(event, "offsetY", {value: y});
  canvas.dispatchEvent(event);
}
canvas.setPointerCapture = () => {};
const said = [[from, to]];
point("pointermove", xOf(40), data.lanes[0].top + 5);
said.push(told.textContent);
document.getElementById("in").click();
said.push([from, to]);
point("pointerdown", 400, 40);
point("pointermove", 300, 40);
point("pointerup", 300, 40);
said.push([from, to]);
document.dispatchEvent(new KeyboardEvent("keydown", {key: "0"}));
said.push([from, to]);
point("pointermove", 2, 2);
said.push(told.hidden);
find.value = "sgd";
find.dispatchEvent(new Event("input"));
said.push(document.getElementById("found").textContent);
drawNow();
if (!document.title.startsWith("error")) document.title = JSON.stringify(said);
</script></body>"""


def made(spans, names=NAMES):
    lanes = lanes_of(content(spans, names)["traceEvents"])
    return page_of(lanes, title="a title", summary="a summary")


class Parsed(HTMLParser):
    """Elements, links to anything, and the text of the element with the data."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.links, self.data = [], [], None
        self.is_data = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        named = dict(attrs)
        self.links += [v for k, v in attrs if k in ("src", "href", "action", "onerror")]
        self.is_data = named.get("id") == "data"

    def handle_data(self, data):
        if self.is_data:
            self.data, self.is_data = json.loads(data), False


def test_the_page_holds_every_span_of_every_lane():
    data = Parsed(made(STEP)).data
    assert [lane["name"] for lane in data["lanes"]] == list(NAMES[:3])
    found = [
        (data["names"][name], data["kinds"][kind][0], begin, length)
        for begin, length, name, kind in (
            one for lane in data["lanes"] for row in lane["rows"] for one in row
        )
    ]
    wanted = [(e["name"], e["cat"], e["ts"] - 1000, e["dur"]) for e in STEP]
    assert sorted(found) == sorted(wanted)


def test_the_page_asks_nobody_for_anything():
    page = made(STEP)
    assert Parsed(page).links == []
    assert not re.search(r"https?:|url\(|@import|fetch|XMLHttp|WebSocket", page)
    assert "default-src 'none'" in page
    assert page.isascii()


def test_the_page_is_dark_or_light_and_always_the_same():
    assert "prefers-color-scheme: dark" in made(STEP)
    assert made(STEP) == made(list(reversed(STEP)))


def test_names_are_no_markup():
    page = made([span(0, HOSTILE, 0.0, 1.0, HOSTILE)], [HOSTILE])
    parsed = Parsed(page)
    assert "img" not in parsed.elements
    assert parsed.elements.count("script") == 2
    assert parsed.data["names"] == [HOSTILE]
    assert parsed.data["lanes"][0]["name"] == HOSTILE


def test_sums_are_told_without_the_program():
    page = made(STEP)
    assert "<td>0.040</td><td>0.030</td>" in page  # forward, backward of replica 0
    assert all(name in page for name in NAMES[:3])


def test_a_page_of_thousands_of_spans_is_small():
    spans = [span(i % 4, KINDS[i % 3], 10.0 * i, 9.0, f"name {i % 50}") for i in range(20_000)]
    page = made(spans)
    assert len(page) < 30 * len(spans)
    assert sum(len(row) for lane in Parsed(page).data["lanes"] for row in lane["rows"]) == 20_000


@pytest.mark.slow
def test_a_browser_zooms_moves_and_tells(tmp_path):
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("wants chromium")
    spans = [*STEP, *(span(1, FORWARD, 1080 + 0.01 * i, 0.009) for i in range(5000))]
    page = tmp_path / "page.html"
    page.write_text(made(spans).replace("</body>", USE))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/own"]
    command = [browser, *options, "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    said = json.loads(re.search(r"<title>(.*?)</title>", shown)[1].replace("&amp;", "&"))
    whole, words, zoomed, moved, again, hidden, found = said
    assert whole == again == [0, pytest.approx(130, abs=0.1)]
    assert words == f"forward\n80.0 \u00b5s, from 0.0 \u00b5s on\n{NAMES[0]}"
    assert zoomed[1] - zoomed[0] == pytest.approx(0.6 * 130, abs=0.1)
    assert moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0])
    assert moved[0] > zoomed[0]
    assert hidden
    assert found == "1 found, 0.010 ms altogether;"


PARTS = [TablePart("forward", 1e-3, "#111111"), TablePart("backward", 3e-3, "#222222")]


def widths(table):
    bar = ET.fromstring(re.search(r"<svg.*?</svg>", table, re.S)[0])
    return [float(rect.get("width")) for rect in bar.iter("rect") if rect.get("fill")[0] == "#"]


def test_a_line_for_each_part_and_the_notes_below():
    table = ET.fromstring(table_of("a step", 4e-3, PARTS, ["one note", "another"]))
    lines = [" ".join(line.itertext()).split() for line in table.iter("tr")]
    assert lines == [
        ["whole", "step", "4.000", "ms", "100%"],
        ["forward", "1.000", "ms", "25%"],
        ["backward", "3.000", "ms", "75%"],
    ]
    assert "".join(table.itertext()).split("\n")[-3:-1] == ["one note", "another"]


def test_the_bar_is_shared_as_the_step_is():
    assert widths(table_of("", 4e-3, PARTS, [])) == [140, 420]
    assert widths(table_of("", 8e-3, PARTS, [])) == [70, 210]


@pytest.mark.parametrize("whole", [0.0, 1e-3])
def test_parts_that_are_more_than_the_whole_stay_in_the_bar(whole):
    # Medians need not add up; and before the first step has ended the whole is not known.
    assert sum(widths(table_of("", whole, PARTS, []))) == pytest.approx(560 if whole else 0)


def test_words_are_no_markup():
    table = table_of(HOSTILE, 1.0, [TablePart(HOSTILE, 1.0, "#111111")], [HOSTILE])
    assert "<img" not in table
    assert "".join(ET.fromstring(table).itertext()).count(HOSTILE) == 4  # one in the bar's title
