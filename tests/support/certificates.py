"""Certificates for tests, with the extensions that a strict verifier such as Python 3.13 requires.

An authority: basicConstraints (critical), keyUsage with keyCertSign (critical), subjectKeyIdentifier. What it issues:
subjectAltName, extendedKeyUsage, authorityKeyIdentifier.
"""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = timedelta(days=1)
BOTH_SIDES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])


class Authority:
    """A certificate authority; its certificate is `ca.pem` in its directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("test authority")
        built = _builder(self._name, self._key, self._name, self._key, ca=True)
        self.certificate, _ = _write(directory, "ca", built.sign(self._key, hashes.SHA256()), self._key)

    def issue(self, name: str, names: str = "DNS:localhost,IP:127.0.0.1") -> tuple[Path, Path]:
        """Issue a certificate for some names: `<name>.pem` and `<name>.key`."""
        key = ec.generate_private_key(ec.SECP256R1())
        built = _builder(_named(name), key, self._name, self._key, ca=False)
        built = built.add_extension(_alternatives(names), critical=False).add_extension(BOTH_SIDES, critical=False)
        return _write(self._directory, name, built.sign(self._key, hashes.SHA256()), key)


def self_signed(directory: Path, name: str, names: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """Make a self-signed certificate and its key."""
    key, subject = ec.generate_private_key(ec.SECP256R1()), _named(name)
    built = _builder(subject, key, subject, key, ca=True)
    built = built.add_extension(_alternatives(names), critical=False).add_extension(BOTH_SIDES, critical=False)
    return _write(directory, name, built.sign(key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    ca: bool,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    usage = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    usage |= {"encipher_only": False, "decipher_only": False, "crl_sign": ca, "key_cert_sign": ca}
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternatives(names: str) -> x509.SubjectAlternativeName:
    """Parse names in the syntax of openssl: `DNS:localhost,IP:127.0.0.1`."""
    found: list[x509.GeneralName] = []
    for each in names.split(","):
        kind, _, value = each.partition(":")
        found.append(x509.IPAddress(ip_address(value)) if kind == "IP" else x509.DNSName(value))
    return x509.SubjectAlternativeName(found)


def _write(
    directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> tuple[Path, Path]:
    cert_file, key_file = directory / f"{name}.pem", directory / f"{name}.key"
    cert_file.write_bytes(certificate.public_bytes(Encoding.PEM))
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return cert_file, key_file


__all__ = ["Authority", "self_signed"]
