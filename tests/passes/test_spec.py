"""Values that say what a bucket is."""

import json

import pytest

from compiled_fsdp.base.plain_data import Unfit, from_data
from compiled_fsdp.buckets.spec import Kind


@pytest.mark.parametrize("kind", Kind)
def test_a_kind_is_its_text(kind):
    """In a dictionary, in a message, and in JSON and back."""
    assert {kind: 1}[kind.value] == {kind.value: 1}[kind] == 1
    assert f"{kind} of 3 reads" == f"{kind.value} of 3 reads"
    assert from_data(Kind, json.loads(json.dumps(kind))) is kind


def test_another_text_is_no_kind():
    with pytest.raises(Unfit, match="should be a Kind, but is 'broadcast'"):
        from_data(Kind, "broadcast")
