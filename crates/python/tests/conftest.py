import pytest

from pair import two_agents


@pytest.fixture(params=["shared_memory", "tcp"])
def agents(request):
    with two_agents(request.param) as pair:
        yield pair
