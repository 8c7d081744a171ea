"""The server's refusals in our words: its `{code, err_code, description}` becomes one error of our tree. Pure.

Both clients (the async one and the bulk path) come here, so that the same refusal reads the same everywhere.
"""

from dataclasses import dataclass

from purveyor.jetstream.codec import Json
from purveyor.model.errors import (
    AlreadyExists,
    ConfigRefused,
    NoAnswer,
    PublishRefused,
    PurveyorError,
    Refused,
    SetupError,
    UnknownConsumer,
    UnknownMessage,
    UnknownStream,
    WrongRevision,
)

# The server's exact reasons (its err_code), as far as a caller acts on them.
STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
CONSUMER_DOES_NOT_EXIST = 10149
MESSAGE_NOT_FOUND = 10037
STREAM_NAME_IN_USE = 10058
CONSUMER_NAME_IN_USE = 10013
CONSUMER_EXISTS = 10148
SUBJECTS_OVERLAP = 10065
ID_IN_PROCESS = 10158
STREAM_SEALED = 10109
MESSAGE_TOO_LARGE = 10054
HEADERS_TOO_LARGE = 10097
WRONG_LAST_SEQUENCE = 10071
WRONG_LAST_SEQUENCE_UNKNOWN = 10164
TOO_MANY_REQUESTS = 429
"""A status, not a code of JetStream: the stream has too much to store already, and dropped this message."""
NOT_READY = (10008, 10009, 10118)
JETSTREAM_NOT_ENABLED = (10039, 10076)
NO_SUITABLE_PEERS = 10005

FIXES = {
    TOO_MANY_REQUESTS: "the stream has too much to store at the moment: publish from fewer places at once",
    10060: "publish to a subject of the expected stream",
    10174: "switch allow_atomic on for the stream, or publish pipelined",
    10176: "all messages of an atomic batch must go to one stream",
    SUBJECTS_OVERLAP: "another stream takes one of these subjects; see `purveyor stream ls`",
    STREAM_SEALED: "the stream is sealed; wait for its migration, or remove it",
    10023: "the disk or the store of the NATS server is full: free disk space, or raise max_file_store",
    10047: "free disk space, or raise max_file_store",
    10077: "the stream is at its limit of messages and discards new ones",
    MESSAGE_TOO_LARGE: "the message is larger than the stream's maximum",
    HEADERS_TOO_LARGE: "put what is large into the body",
    10122: "the stream is at its limit of messages per subject",
    10099: "a work queue takes one consumer per subject: remove it, or use an interest stream",
    10100: "consumers of a work queue may not overlap: give each its own filter",
    10101: "a work queue's consumer must deliver all",
    10098: "a work queue's consumer must acknowledge explicitly",
    NO_SUITABLE_PEERS: "the cluster has too few servers for that many replicas",
    10074: "replicas need a cluster of that many servers",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """What a question is about, for the words of an error."""

    stream: str = ""
    consumer: str = ""
    sequence: int = 0

    @classmethod
    def of_question(cls, question: str) -> "Subject":
        """What a question of the API is about, by its subject.

        >>> str(Subject.of_question("CONSUMER.INFO.ORDERS.DISPATCH"))
        "consumer 'DISPATCH' of stream 'ORDERS'"
        """
        kind, *words = question.split(".")
        names = words[2:] if words[:2] in (["MSG", "GET"], ["MSG", "DELETE"], ["MSG", "NEXT"]) else words[1:]
        return cls(names[0] if names else "", names[1] if kind == "CONSUMER" and len(names) > 1 else "")

    def __str__(self) -> str:
        if self.consumer:
            return f"consumer {self.consumer!r} of stream {self.stream!r}"
        return f"stream {self.stream!r}" if self.stream else "JetStream"


def translate(error: Json, about: Subject, *, publishing: bool = False) -> PurveyorError:
    """The server's `{code, err_code, description}` as one of our errors. Pure."""
    code, err_code = int(error.get("code", 500)), int(error.get("err_code", 0))
    text = str(error.get("description", "unknown error"))
    numbers: dict[str, int] = {"code": code, "err_code": err_code}
    if err_code == STREAM_NOT_FOUND:
        return UnknownStream(f"no stream {about.stream!r}", fix="`purveyor stream ls` lists them")
    if err_code in (CONSUMER_NOT_FOUND, CONSUMER_DOES_NOT_EXIST):
        return UnknownConsumer(
            f"no consumer {about.consumer!r} on stream {about.stream!r}",
            fix=f"`purveyor consumer ls {about.stream}` lists them",
        )
    if err_code == MESSAGE_NOT_FOUND:
        where = f" at sequence {about.sequence}" if about.sequence else ""
        return UnknownMessage(f"no message{where} in stream {about.stream!r}")
    if err_code in NOT_READY:
        return NoAnswer(f"{about}: JetStream is not ready ({text})", fix="try again")
    if err_code in JETSTREAM_NOT_ENABLED:
        return SetupError(f"JetStream is not enabled: {text}", fix="enable it for the server and the account")
    if err_code in (WRONG_LAST_SEQUENCE, WRONG_LAST_SEQUENCE_UNKNOWN):
        return WrongRevision(f"{about}: {text}", fix="read again, then write", **numbers)
    fix = FIXES.get(err_code)
    message = f"{about}: {text} (code {code}, {err_code})"
    if publishing:
        return PublishRefused(f"message not stored in {message}", fix=fix, **numbers)
    if err_code in (STREAM_NAME_IN_USE, CONSUMER_NAME_IN_USE, CONSUMER_EXISTS):
        return AlreadyExists(message, fix="choose another name, or update what is there", **numbers)
    if code == 503:
        return NoAnswer(message, fix="try again")
    return (ConfigRefused if code in (400, 500) else Refused)(message, fix=fix, **numbers)
