"""link_report.py: doctors of several workers measure what lies between them."""

import json

from mirror.tools.doctor.link_report import LinkReport, measure_links


def measured():
    told = []
    report = measure_links(2, told.append)
    return report, told


def test_doctors_of_all_workers_measure_their_links(worker_pool):
    for report, told in worker_pool(2).run(measured):
        assert told == ["waiting up to 30 s for the doctors of the other workers"]
        assert report.failure is report.missing is None
        assert 0 < report.seconds_per_exchange < report.seconds_per_sum < 30
        first, second = report.render()
        assert first.startswith("an exchange of all workers takes ")
        assert second.startswith("an all-reduce of 10 MB takes ")
        assert json.loads(json.dumps(report.to_dict()))["failure"] is None


def test_what_went_wrong_is_said():
    assert list(LinkReport(failure="broken").render()) == ["FAILED: broken"]
    assert list(LinkReport(missing="nobody").render()) == ["not tested: nobody"]
