from tests.clients.promises import broken_calls, broken_schemas
from tests.e2e.conftest import DEFAULT_MODEL


def test_answers_follow_random_schemas(client):
    """A kind of schema that the grammar lets out of hand; `make clients` tries 200."""
    assert not broken_schemas(client, DEFAULT_MODEL, seed=1, count=5)


def test_forced_calls_parse(client):
    """A forced call that the parser of the model's own style can't read; `make clients` tries 100."""
    assert not broken_calls(client, DEFAULT_MODEL, seed=1, count=4)
