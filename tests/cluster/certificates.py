"""A certificate authority for one test cluster: it signs what the API server, the webhooks and kwok serve with.

Everything is ECDSA P-256 (quick to make) and valid for 30 days; the keys never leave the cluster's folder.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import pathlib
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID = datetime.timedelta(days=30)
BACKDATED = datetime.timedelta(hours=1)  # a container's clock may be a little behind


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files in PEM."""

    certificate: pathlib.Path
    key: pathlib.Path


class Authority:
    """Makes `ca.crt` and `ca.key` in `folder`, and signs certificates into it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("dispatch-test-cluster-ca")
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.pair = self._write("ca", certificate, self._key)

    def serving(self, name: str, addresses: list[str], names: list[str]) -> Pair:
        """A server's certificate for these IP addresses and DNS names."""
        subjects: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(a)) for a in addresses]
        subjects += [x509.DNSName(n) for n in names]
        return self._leaf(name, _name(name), ExtendedKeyUsageOID.SERVER_AUTH, subjects)

    def client(self, name: str, common_name: str) -> Pair:
        """A client's certificate: whoever trusts this authority takes its holder for `common_name`."""
        return self._leaf(name, _name(common_name), ExtendedKeyUsageOID.CLIENT_AUTH, [])

    def _leaf(
        self, file: str, subject: x509.Name, usage: x509.ObjectIdentifier, subjects: list[x509.GeneralName]
    ) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            self._builder(subject, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        )
        if subjects:
            builder = builder.add_extension(x509.SubjectAlternativeName(subjects), critical=False)
        return self._write(file, builder.sign(self._key, hashes.SHA256()), key)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        # Both key identifiers: Python 3.13 verifies strictly and refuses a chain without them.
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - BACKDATED)
            .not_valid_after(now + VALID)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )

    def _write(self, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Pair:
        pair = Pair(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        write_key(pair.key, key)
        return pair


def write_key(path: pathlib.Path, key: ec.EllipticCurvePrivateKey | None = None) -> None:
    """Writes `key`, or a new one, readable by the owner only."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(text)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
