"""Certificates for servers under test: an authority, and keys that it signs for a host name."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """One authority; its certificate is in the file :attr:`path`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), _name(name)
        self.path = folder / f"{name}.pem"
        usage = x509.BasicConstraints(ca=True, path_length=None)
        made = _builder(self._name, self._name, self._key.public_key()).add_extension(usage, critical=True)
        self.path.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(self, folder: Path, host: str) -> tuple[Path, Path]:
        """The files of a certificate for *host*, a name or an address, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        try:
            named: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            named = x509.DNSName(host)
        made = _builder(_name(host), self._name, key.public_key())
        made = made.add_extension(x509.SubjectAlternativeName([named]), critical=False)
        certificate, secret = folder / f"{host}.crt", folder / f"{host}.key"
        certificate.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
        secret.write_bytes(key.private_bytes(pem, form, plain))
        secret.chmod(0o600)
        return certificate, secret


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=2))
    )
