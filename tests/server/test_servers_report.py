"""servers_report.py: what servers and workers have done, printed and in a notebook."""

import xml.etree.ElementTree as ET

from mirror.server.servers_report import ServersReport

REPORT = ServersReport(
    num_steps=10,
    num_retried=1,
    num_updates=9,
    staleness={0: 6, 2: 3},
    pulled_bytes=120,
    pushed_bytes=60,
    pull_seconds=0.1,
    push_seconds=0.2,
    step_seconds=1.0,
    server_bytes=(8, 4),
)


def test_a_report_is_printed_as_a_table():
    assert str(REPORT).splitlines() == [
        "steps           10, 1 times again on another worker",
        "updates         9, gradients dropped: 0, waiting: 0",
        "a step          100.00 ms, of which pull 10.00, push 20.00",
        "bytes a step    pulled 12, pushed 6",
        "servers         8 bytes, 4 bytes",
        "staleness       gradients",
        f"        0       6        {'#' * 30}",
        f"        2       3        {'#' * 15}",
    ]


def test_a_notebook_shows_the_same():
    shown = ET.fromstring(REPORT._repr_html_())
    lines = [" ".join(line.itertext()).split() for line in shown.iter("tr")]
    assert lines[1:] == [
        ["pull", "10.000", "ms", "10%"],
        ["push", "20.000", "ms", "20%"],
        ["on", "the", "worker", "70.000", "ms", "70%"],
    ]
    words = "".join(shown.itertext())
    assert all(line in words for line in str(REPORT).splitlines() if "a step   " not in line)


def test_a_report_of_nothing_is_shown_too():
    assert "steps           0" in str(ServersReport())
    assert "mean of 0" in ServersReport()._repr_html_()
