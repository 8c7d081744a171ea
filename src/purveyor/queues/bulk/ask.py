"""One question to the JetStream API from a program without an event loop: the driver of a Spark query, say."""

from typing import Any

from purveyor.model.errors import NoAnswer, ServerUnavailable
from purveyor.queues.address import Address
from purveyor.queues.bulk.link import LinkLost
from purveyor.queues.bulk.pool import OutOfPatience, Patience, connect, give_back


def ask(
    address: Address, subject: str, body: dict[str, Any] | None = None, *, patience_seconds: float = 60.0
) -> dict[str, Any]:
    """The answer to `$JS.API.<subject>`, over an idle link; a lost server is waited for within the patience.

    Only for questions that may be asked twice.
    """
    patience = Patience(patience_seconds)
    while True:
        link = connect(address, patience)
        try:
            answer = link.api(subject, body)
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
