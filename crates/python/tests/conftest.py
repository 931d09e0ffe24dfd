import pytest

import needs
from pair import two_agents


def pytest_runtest_logreport(report):
    if report.skipped and not hasattr(report, "wasxfail"):
        needs.on_skipped(report.fspath, str(report.longrepr[2]))


def pytest_collectreport(report):
    if report.skipped:
        needs.on_skipped(report.nodeid, str(report.longrepr[2]))


@pytest.fixture(params=["shared_memory", "tcp"])
def agents(request):
    with two_agents(request.param) as pair:
        yield pair
