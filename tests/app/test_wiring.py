"""An API process has one of each shared object."""

import gc

import pytest

from purveyor.app.http.application import ApiOptions
from purveyor.app.wiring import open_services
from purveyor.delivery.credentials import PasswordHasher
from purveyor.delivery.state_writer import StateWriterCache
from purveyor.delivery.subscription_changes import Notifier, RegistrationCache
from purveyor.jetstream.address import Address
from purveyor.queues.client import connect


@pytest.mark.parametrize("kind", [Notifier, RegistrationCache, StateWriterCache])
async def test_the_services_of_an_api_process_share_one_of_each(address: Address, kind: type) -> None:
    def instances() -> set[int]:
        return {id(each) for each in gc.get_objects() if isinstance(each, kind)}

    hasher, options = PasswordHasher(), ApiOptions(find_address=lambda: address, logins=())
    try:
        async with connect(address) as queues:
            before = instances()
            async with open_services(queues, hasher=hasher, options=options) as services:
                assert len(instances() - before) == 1
                assert services.registrations is not None
    finally:
        hasher.close()
