"""What happens to a queue that refused: made again when it is missing, suspended when it says no.

Others are not affected, and nothing is lost: a suspended subscription has the first position that is missing in the
registry, and gets everything from there on when it is resumed.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import Refusal, RefusalKind
from purveyor.model.errors import PurveyorError, Unavailable, WrongRevision
from purveyor.model.registration import DispatchState, Suspension
from purveyor.pipeline.dispatch.batch_plan import Seat, takes_part
from purveyor.pipeline.dispatch.subscription_snapshot import Registrations
from purveyor.queues.registry import update_dispatch
from purveyor.queues.subscriptions import make_queue_again

_log = logging.getLogger(__name__)


def why_suspended(refusal: Refusal) -> str:
    """The reason that people read."""
    return refusal.reason if refusal.kind is RefusalKind.OTHER else f"{refusal.kind.value}: {refusal.reason}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who is to be written again, and who stays out from which position on."""

    again: tuple[Seat, ...]
    stopped: tuple[tuple[Seat, int], ...]


class Refusals:
    """Deals with them."""

    def __init__(self, address: Address, registrations: Registrations, *, replicas: int = 1) -> None:
        self._address = address
        self._registrations = registrations
        self._replicas = replicas

    def settle(self, refusals: Iterable[tuple[Seat, Refusal]], *, again: bool) -> Verdict:
        """Decide and act. With `again` false a queue that is missing once more is suspended as well."""
        retried, stopped = [], []
        for seat, refusal in refusals:
            if self._registrations.current(seat.name, seat.incarnation) is None:
                _log.info("subscription %s is gone: its events are dropped", seat.name)
            elif again and refusal.kind is RefusalKind.MISSING_STREAM and self._make_again(seat):
                retried.append(seat)
                continue
            else:
                self._suspend(seat, refusal)
            stopped.append((seat, refusal.position))
        return Verdict(tuple(retried), tuple(stopped))

    def _make_again(self, seat: Seat) -> bool:
        try:
            make_queue_again(self._address, seat.name, seat.incarnation, replicas=self._replicas)
        except Unavailable:
            raise
        except PurveyorError as error:
            _log.warning("the queue of subscription %s was missing and cannot be made again: %s", seat.name, error)
            return False
        _log.warning("the queue of subscription %s was missing and is made again", seat.name)
        return True

    def _suspend(self, seat: Seat, refusal: Refusal) -> None:
        why = why_suspended(refusal)
        state = DispatchState(
            incarnation=seat.incarnation,
            next=refusal.position,
            suspended=Suspension(position=refusal.position, reason=why, at=datetime.now(UTC)),
        )
        while True:
            found = self._registrations.current(seat.name, seat.incarnation)
            if found is None or not takes_part(found):
                return  # gone, or another group was quicker: what it noted stands
            try:
                update_dispatch(self._address, seat.name, state, found.dispatch_revision)
            except WrongRevision:
                continue
            _log.error("subscription %s is suspended at position %d: %s", seat.name, refusal.position, why)
            return
