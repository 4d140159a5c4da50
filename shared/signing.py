"""Signatures over manifests: HMAC-SHA256 with a shared secret, or Ed25519 with a key pair.

A signature covers the canonical bytes of the manifest without its signature; a signed manifest also has the
SHA-256 of every file, because xxh3 detects accidents and not attackers. It proves that the holder of the key
published these bytes in this exchange; it does not prove that the version is the newest one. The key decides
the algorithm, never the manifest. Called by the writing and the reading side. Follows docs/format.md [2].
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from .errors import ConfigError, SignatureError, UnsupportedError
from .manifest import Manifest

MIN_SECRET_BYTES = 32
_KEY_ID_TEXT = b"weightferry key id"


class SigningKey(Protocol):
    """What a writer signs with; it can check, too."""

    def sign(self, data: bytes) -> dict[str, str]: ...


class CheckingKey(Protocol):
    """What a reader checks with."""

    @property
    def algorithm(self) -> str: ...

    @property
    def key_id(self) -> str: ...

    def is_valid(self, value: bytes, data: bytes) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HmacKey:
    """A secret that writers and readers share."""

    secret: bytes

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"the HMAC secret has {len(self.secret)} bytes; give {MIN_SECRET_BYTES} random bytes or more"
            )

    def __repr__(self) -> str:
        return f"HmacKey({self.key_id})"

    @property
    def algorithm(self) -> str:
        return "hmac-sha256"

    @property
    def key_id(self) -> str:
        return hmac.digest(self.secret, _KEY_ID_TEXT, "sha256").hex()[:16]

    def sign(self, data: bytes) -> dict[str, str]:
        value = hmac.digest(self.secret, data, "sha256").hex()
        return {"algorithm": self.algorithm, "key_id": self.key_id, "value": value}

    def is_valid(self, value: bytes, data: bytes) -> bool:
        return hmac.compare_digest(value, hmac.digest(self.secret, data, "sha256"))


class Ed25519PublicKey:
    """The half of a key pair that readers have; `key` is cryptography's."""

    algorithm = "ed25519"

    def __init__(self, key: Any) -> None:
        self._key = key

    @property
    def key_id(self) -> str:
        return hashlib.sha256(self._key.public_bytes_raw()).hexdigest()[:16]

    def is_valid(self, value: bytes, data: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(value, data)
        except InvalidSignature:
            return False
        return True


class Ed25519PrivateKey(Ed25519PublicKey):
    """The half of a key pair that the trainer alone has."""

    def __init__(self, key: Any) -> None:
        super().__init__(key.public_key())
        self._private = key

    def sign(self, data: bytes) -> dict[str, str]:
        value = self._private.sign(data).hex()
        return {"algorithm": self.algorithm, "key_id": self.key_id, "value": value}


def load_signing_key(path: Path) -> HmacKey | Ed25519PrivateKey:
    """The key in a file: a PEM Ed25519 private key, or at least 32 bytes of secret."""
    key = load_checking_key(path)
    if not isinstance(key, HmacKey | Ed25519PrivateKey):
        raise ConfigError(f"{path} is a public key; a writer signs with the private one")
    return key


def load_checking_key(path: Path) -> HmacKey | Ed25519PublicKey:
    """The key in a file: a PEM Ed25519 public (or private) key, or at least 32 bytes of secret."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the key {path} cannot be read: {error.strerror}") from None
    if not data.startswith(b"-----BEGIN "):
        return HmacKey(secret=data.strip())
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
    except ImportError:
        raise UnsupportedError(
            f"{path} is a PEM key, which needs the package cryptography: pip install 'weightferry[signing]'"
        ) from None
    try:
        if b"PRIVATE" in data.partition(b"\n")[0]:
            key = load_pem_private_key(data, password=None)
            if isinstance(key, ed25519.Ed25519PrivateKey):
                return Ed25519PrivateKey(key)
        elif isinstance(key := load_pem_public_key(data), ed25519.Ed25519PublicKey):
            return Ed25519PublicKey(key)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a PEM key without a password: {error}") from None
    raise ConfigError(f"{path} is a key of another kind; make one with `openssl genpkey -algorithm ed25519`")


def sign_manifest(manifest: Manifest, key: SigningKey) -> Manifest:
    """The same manifest with its signature."""
    return replace(manifest, signature=key.sign(_signed_bytes(manifest)))


def check_signature(manifest: Manifest, key: CheckingKey, where: object) -> None:
    """Raise SignatureError, naming the manifest, unless the key's holder signed it, files and all."""
    signature = manifest.signature
    if signature is None:
        raise SignatureError(where, "is not signed, and this reader requires it", **_expected(key, "none"))
    said = f"{signature.get('algorithm')} by key {signature.get('key_id')}"
    if (signature.get("algorithm"), signature.get("key_id")) != (key.algorithm, key.key_id):
        raise SignatureError(where, "is signed otherwise", **_expected(key, said))
    if any(entry.sha256 is None for entry in manifest.files):
        raise SignatureError(where, "is signed but lacks the SHA-256 of a file")
    try:
        value = bytes.fromhex(signature["value"])
    except (KeyError, TypeError, ValueError):
        value = b""
    if not key.is_valid(value, _signed_bytes(manifest)):
        raise SignatureError(where, "has a signature that is not of these bytes")


def _signed_bytes(manifest: Manifest) -> bytes:
    return replace(manifest, signature=None).to_bytes()


def _expected(key: CheckingKey, found: str) -> dict[str, str]:
    return {"expected": f"{key.algorithm} by key {key.key_id}", "found": found}
