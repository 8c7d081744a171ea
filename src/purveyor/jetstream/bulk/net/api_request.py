"""One question to the JetStream API from a program without an event loop: the driver of a Spark query, say."""

from typing import Any

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.connection import ANSWER_SECONDS, LinkLost
from purveyor.jetstream.bulk.net.pool import OutOfPatience, Patience, connect, give_back
from purveyor.model.errors import NoAnswer, ServerUnavailable


def ask(
    address: Address,
    subject: str,
    body: dict[str, Any] | None = None,
    *,
    patience_seconds: float = 60.0,
    answer_seconds: float = ANSWER_SECONDS,
) -> dict[str, Any]:
    """Return the answer to `$JS.API.<subject>`, over an idle link; wait for a lost server within the patience.

    Only for questions that may be asked twice. A question is repeated when no answer came within `answer_seconds`.
    """
    patience = Patience(patience_seconds)
    while True:
        link = connect(address, patience)
        try:
            answer = link.api(subject, body, timeout=answer_seconds)
        except OutOfPatience:
            raise
        except (LinkLost, NoAnswer, ServerUnavailable) as error:
            link.close()
            patience.failed(error)
            continue
        except BaseException:
            give_back(address, link) if link.usable else link.close()
            raise
        give_back(address, link)
        return answer
