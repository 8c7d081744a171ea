"""Certificates made for a test: self-signed, so that each is its own authority."""

import subprocess
from pathlib import Path

_MAKE = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")


def self_signed(directory: Path, name: str, names: str = "IP:127.0.0.1") -> tuple[Path, Path]:
    """A certificate for some names, and its key."""
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    about = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(cert))
    subprocess.run([*_MAKE, *about], check=True, capture_output=True)
    return cert, key
