"""The message of a record of a live directory: the contract with the transform."""

import json

import pytest

from purveyor.model.ldif_changes import Change, Gone, Present, RefreshBegin, RefreshEnd, Step
from purveyor.sources.ldif.live_records import LiveEntry, LiveRecord, Operation, encode_live_record
from purveyor.sources.ldif.records import Modification, Record

UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"
CSN = "20261119041844.123456Z#000000#001#000000"


@pytest.mark.parametrize(
    ("record", "fields"),
    [
        (RefreshBegin(full=True), {"change": "refresh-begin", "full": True}),
        (
            LiveEntry(UUID, "cn=ä", {"cn": ("ä".encode(),), "photo": (b"\xff",), "cert;binary": (b"a",)}),
            {
                "change": "entry",
                "uuid": UUID,
                "dn": "cn=ä",
                "attributes": {"cn": ["ä"], "photo": [{"base64": "/w=="}], "cert;binary": [{"base64": "YQ=="}]},
            },
        ),
        (Gone((UUID,)), {"change": "gone", "uuids": [UUID]}),
        (Present((UUID,)), {"change": "present", "uuids": [UUID]}),
        (RefreshEnd(True, (CSN,)), {"change": "refresh-end", "remove_unseen": True, "csns": [CSN]}),
        (
            Operation(
                Record(0, "cn=a", Change.MODIFY, modifications=(Modification(Step.ADD, "cn", (b"b",)),)), UUID, CSN
            ),
            {
                "change": "modify",
                "dn": "cn=a",
                "modifications": [{"op": "add", "attribute": "cn", "values": ["b"]}],
                "uuid": UUID,
                "csn": CSN,
            },
        ),
        (
            Operation(Record(0, "cn=a", Change.DELETE), UUID, CSN, catch_up=True),
            {"change": "delete", "dn": "cn=a", "uuid": UUID, "csn": CSN, "catch_up": True},
        ),
    ],
)
def test_the_message_of_each_kind(record: LiveRecord, fields: dict[str, object]) -> None:
    assert json.loads(encode_live_record(record, 7)) == {"epoch": 7, **fields}
