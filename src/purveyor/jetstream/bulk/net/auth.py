"""Who we are, as the CONNECT line says it: password, token, nkey signature or JWT.

Secrets leave this module inside that line only, and never in an error.
"""

import base64
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nkeys

from purveyor.jetstream.address import Address
from purveyor.model.errors import AuthenticationFailed, SetupError

_JWT = re.compile(rb"-+BEGIN NATS USER JWT-+\s+([^\s-][^\s]*)\s+-+END NATS USER JWT-+")
_SEED = re.compile(rb"-+BEGIN USER NKEY SEED-+\s+([A-Z2-7]+)\s+-+END USER NKEY SEED-+")
_BARE_SEED = re.compile(rb"^\s*(SU[A-Z2-7]{56})\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """What a credentials file holds: always a seed, and in a `.creds` file a JWT."""

    seed: bytes = field(repr=False)
    jwt: str | None = field(default=None, repr=False)

    def answer(self, nonce: str | None) -> dict[str, str]:
        """The fields of CONNECT that prove possession of the seed by signing the server's nonce."""
        if not nonce:
            raise AuthenticationFailed(
                "the server asks for no signature, but the credentials are a key",
                fix="use the credentials that this server is set up for",
            )
        pair: Any = nkeys.from_seed(bytearray(self.seed))
        try:
            signature = base64.urlsafe_b64encode(pair.sign(nonce.encode())).rstrip(b"=").decode()
            who = {"jwt": self.jwt} if self.jwt else {"nkey": pair.public_key.decode()}
        finally:
            pair.wipe()
        return {**who, "sig": signature}


def parse_key_file(content: bytes, path: Path) -> KeyFile:
    """A `.creds` file (JWT and seed between their marks) or a file with nothing but an nkey seed."""
    jwt, seed = _JWT.search(content), _SEED.search(content)
    bare = _BARE_SEED.search(content)
    if jwt and seed:
        found = KeyFile(seed.group(1), jwt.group(1).decode())
    elif bare and not jwt:
        found = KeyFile(bare.group(1))
    else:
        raise SetupError(
            f"credentials file {path} holds neither a JWT with its seed nor an nkey seed of a user",
            fix="give a .creds file, or a file with a seed that starts with SU",
        )
    try:
        raw = base64.b32decode(found.seed + b"=" * (-len(found.seed) % 8))
        if nkeys.crc16(raw[:-2]) != int.from_bytes(raw[-2:], "little"):
            raise ValueError("checksum")  # the package reads over it
        nkeys.from_seed(bytearray(found.seed))
    except (nkeys.NkeysError, ValueError):
        # From nothing: the cause would carry pieces of the seed.
        raise SetupError(f"the seed in {path} is damaged", fix="export the credentials again") from None
    return found


def prove(address: Address, nonce: str | None) -> dict[str, str]:
    """The fields of CONNECT for the credentials of an address."""
    if address.credentials is not None:
        try:
            content = address.credentials.read_bytes()
        except OSError as error:
            raise SetupError(
                f"credentials file {address.credentials} cannot be read: {error.strerror}", fix="check path and rights"
            ) from error
        return parse_key_file(content, address.credentials).answer(nonce)
    if address.token is not None:
        return {"auth_token": address.token}
    if address.user is not None:
        return {"user": address.user, "pass": address.password or ""}
    return {}
