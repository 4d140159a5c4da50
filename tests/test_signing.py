"""Signed manifests: only what the key's holder published is read (format.md [2])."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from tiny_exchange import make_base, publish

from weightferry.shared.command import main
from weightferry.shared.digest import canonical_json
from weightferry.shared.errors import ConfigError, IntegrityError, UnsupportedError
from weightferry.shared.exchange import Exchange
from weightferry.shared.manifest import manifest_id
from weightferry.shared.materialize import materialize
from weightferry.shared.signing import load_checking_key, load_signing_key
from weightferry.shared.verify import verify_exchange
from weightferry.shared.writer import ExchangeWriter


def pem_pair(folder, name="trainer", key=None):
    key = key or ed25519.Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture(params=["hmac", "ed25519"])
def key_files(request, tmp_path):
    """(what the writer has, what the reader has)"""
    if request.param == "ed25519":
        return pem_pair(tmp_path)
    (tmp_path / "secret").write_bytes(b"0123456789abcdef0123456789abcdef\n")
    return tmp_path / "secret", tmp_path / "secret"


@pytest.fixture
def signed(tmp_path, key_files):
    """A version that was signed, as its exchange's directory."""
    exchange = Exchange.open(tmp_path / "exchange", base=make_base(tmp_path / "base"))
    writer = ExchangeWriter.become(exchange, run_id="r", signing_key=load_signing_key(key_files[0]))
    publish(writer, 1)
    version = publish(writer, 2)
    writer.close()
    return version


def reader_with(version, key_file) -> Exchange:
    return Exchange.open(version.exchange_path, require_signature=load_checking_key(key_file))


def forge(version, change) -> None:
    """Change the manifest and the log entry that names it, as somebody who can write to the share would."""
    path = version.path / "manifest.json"
    value = json.loads(path.read_bytes())
    change(value)
    path.write_bytes(canonical_json(value))
    entry = version.exchange_path / "log" / f"{version.number:012d}.json"
    changed = replace(version.entry, manifest_sha256=manifest_id(path.read_bytes()))
    entry.write_bytes(changed.to_bytes())


def test_a_signed_version_is_read_with_and_without_the_key(signed, key_files, tmp_path):
    reader = reader_with(signed, key_files[1])
    assert verify_exchange(reader) == []
    version = reader.version(signed.number)
    assert all(entry.sha256 for entry in version.manifest.files)
    assert materialize(version, tmp_path / "copy").is_dir()
    assert verify_exchange(Exchange.open(signed.exchange_path)) == []


def change_step(value):
    value["metrics"] = {"loss": 0.0}


def drop_signature(value):
    value["signature"] = None


def drop_sha256(value):
    value["files"][0]["sha256"] = None


def garble(value):
    value["signature"]["value"] = "zz"


def claim_another_algorithm(value):
    value["signature"]["algorithm"] = "none"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_step, "not of these bytes"),
        (garble, "not of these bytes"),
        (drop_signature, "is not signed"),
        (drop_sha256, "lacks the SHA-256"),
        (claim_another_algorithm, "is signed otherwise"),
    ],
)
def test_every_forgery_is_refused_by_a_reader_that_requires_a_signature(signed, key_files, change, words):
    forge(signed, change)
    version = reader_with(signed, key_files[1]).version(signed.number)
    with pytest.raises(IntegrityError, match=rf"manifest\.json: .*{words}"):
        _ = version.manifest
    assert Exchange.open(signed.exchange_path).version(signed.number).manifest


def test_another_key_is_named(signed, tmp_path):
    _, other = pem_pair(tmp_path, "other")
    key = load_checking_key(other)
    version = Exchange.open(signed.exchange_path, require_signature=key).version(signed.number)
    with pytest.raises(IntegrityError, match=f"ed25519 by key {key.key_id} expected"):
        _ = version.manifest


def test_an_unsigned_version_is_refused_and_verify_says_so(tmp_path, key_files, capsys):
    exchange = Exchange.open(tmp_path / "exchange", base=make_base(tmp_path / "base"))
    writer = ExchangeWriter.become(exchange, run_id="r")
    version = publish(writer, 1)
    writer.close()
    findings = verify_exchange(reader_with(version, key_files[1]))
    assert [finding.problem for finding in findings] == ["is not signed, and this reader requires it"]
    url = str(exchange.path)
    assert main(["verify", url]) == 0
    assert main(["verify", url, "--key", str(key_files[1])]) == 1
    assert "is not signed" in capsys.readouterr().out


def test_a_public_key_cannot_sign_and_other_keys_are_refused(tmp_path):
    _, public = pem_pair(tmp_path)
    with pytest.raises(ConfigError, match="public key"):
        load_signing_key(public)
    other, _ = pem_pair(tmp_path, "ec", ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(ConfigError, match="openssl genpkey -algorithm ed25519"):
        load_signing_key(other)
    (tmp_path / "short").write_bytes(b"hunter2")
    with pytest.raises(ConfigError, match="has 7 bytes; give 32"):
        load_signing_key(tmp_path / "short")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_signing_key(tmp_path / "none")
    (tmp_path / "torn").write_bytes(b"-----BEGIN PUBLIC KEY-----\nxx")
    with pytest.raises(ConfigError, match="not a PEM key"):
        load_checking_key(tmp_path / "torn")


def test_without_the_package_a_pem_key_names_what_to_install(tmp_path, monkeypatch):
    private, _ = pem_pair(tmp_path)
    real_import = builtins.__import__

    def without_cryptography(name, *rest):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_cryptography)
    with pytest.raises(UnsupportedError, match=r"pip install 'weightferry\[signing\]'"):
        load_signing_key(private)


def test_a_secret_does_not_show_in_messages(tmp_path):
    (tmp_path / "secret").write_bytes(b"0123456789abcdef0123456789abcdef")
    assert "0123456789" not in repr(load_signing_key(tmp_path / "secret"))
