"""How a received message is shown, by `consumer next` and `sub`."""

from datetime import UTC, datetime

from purveyor.app.cli.render import payload_fields, show_line, show_payload, write, write_json
from purveyor.app.cli.sanitize import safe
from purveyor.jetstream.connection import Answer
from purveyor.jetstream.headers import Headers
from purveyor.jetstream.messages import Message


def write_received(message: Message) -> None:
    """A message as a block: where it came in, its headers, its payload."""
    again = f" (delivery {message.delivery.delivered})" if message.delivery.delivered > 1 else ""
    write(f"--- received on {safe(message.subject)}{again}")
    for line in header_lines(message.headers):
        write(line)
    if message.headers:
        write("")
    write(show_payload(message.data))


def write_line(number: int, message: Message | Answer, *, timestamps: bool) -> None:
    """A message on one line (and one for each header): what flows by is easier to search like this."""
    when = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S.%f} " if timestamps else ""
    write(f"{when}[#{number}] Received on [{safe(message.subject)}]: {show_line(message.data)}")
    for line in header_lines(message.headers):
        write(f"    {line}")


def write_object(message: Message | Answer, **more: object) -> None:
    """A message as one line of JSON."""
    place: dict[str, object] = {}
    if isinstance(message, Message):
        delivery = message.delivery
        place = {
            "stream": delivery.stream,
            "consumer": delivery.consumer,
            "sequence": delivery.sequence,
            "consumer_sequence": delivery.consumer_sequence,
            "delivered": delivery.delivered,
            "pending": delivery.pending,
            "timestamp": delivery.timestamp,
        }
    write_json(
        {"subject": message.subject, **place, "headers": message.headers, **payload_fields(message.data), **more}
    )


def header_lines(headers: Headers) -> list[str]:
    """One line for each value."""
    return [f"{safe(name)}: {safe(value)}" for name, values in headers.items() for value in values]
