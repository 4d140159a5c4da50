"""`verify` finds every kind of damage, names it, and finds all of it."""

from __future__ import annotations

import json

import pytest
from tiny_exchange import make_base, publish, writing

from weightferry.shared.command import main
from weightferry.shared.exchange import Exchange
from weightferry.shared.verify import verify_exchange, verify_version


@pytest.fixture
def version(tmp_path):
    exchange = Exchange.open(tmp_path / "exchange", base=make_base(tmp_path / "base"))
    with writing(exchange) as writer:
        publish(writer, 1)
        return publish(writer, 2)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.unlink()
    path.write_bytes(data)


DAMAGE = {
    "missing": (lambda d: (d / "layer-00000.safetensors").unlink(), "is missing"),
    "short": (lambda d: (d / "layer-00000.safetensors").write_bytes(b"short"), "wrong size"),
    "flipped": (lambda d: flip(d / "layer-00000.safetensors"), "other bytes"),
    "surplus": (lambda d: (d / "layer-00007.safetensors").write_bytes(b""), "not named by the manifest"),
    "index": (lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {}}'), "misplaces"),
    "manifest": (lambda d: flip(d / "manifest.json"), "not what the log names"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "is missing"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_each_kind_of_damage_is_named(version, kind):
    damage, words = DAMAGE[kind]
    damage(version.path)
    fresh = Exchange.open(version.exchange_path).version(version.number)
    assert any(words in str(finding) for finding in verify_version(fresh)), verify_version(fresh)


def test_a_whole_version_has_no_finding(version):
    assert verify_version(version) == []


def test_all_damage_is_found_and_not_only_the_first(version):
    flip(version.path / "layer-00000.safetensors")
    (version.path / "config.json").unlink()
    (version.path / "stray").write_bytes(b"")
    assert len(verify_version(version)) == 4  # the file, its tensor, the missing and the surplus file


def test_two_shards_with_swapped_names_are_found(version):
    first, second = version.path / "layer-00000.safetensors", version.path / "outer.same.safetensors"
    first_bytes, second_bytes = first.read_bytes(), second.read_bytes()
    first.unlink()
    second.unlink()
    first.write_bytes(second_bytes)
    second.write_bytes(first_bytes)
    problems = " ".join(map(str, verify_version(version)))
    assert "lacks model.layers.0" in problems
    assert "does not place there" in problems


def test_a_gap_in_the_log_is_found(version):
    (version.exchange_path / "log" / "000000000002.json").unlink()
    assert any("gap" in str(finding) for finding in verify_exchange(Exchange.open(version.exchange_path)))


def test_the_commands_agree_with_the_findings(version, capsys):
    path = str(version.exchange_path)
    assert main(["verify", path]) == 0
    flip(version.path / "layer-00000.safetensors")
    assert main(["verify", path, str(version.number), "--json"]) == 1
    out = capsys.readouterr().out
    findings = json.loads(out[out.index("{") :])["findings"]
    assert any("layer-00000" in finding["path"] for finding in findings)


def test_ls_and_show_print_tables_and_json(version, capsys):
    path = str(version.exchange_path)
    assert main(["ls", path]) == 0
    assert "run-a" in capsys.readouterr().out
    assert main(["ls", path, "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)] == [1, 2]
    assert main(["show", path]) == 0
    assert "layer-00000.safetensors" in capsys.readouterr().out
    assert main(["show", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["manifest"]["format"] == 1


def test_bad_usage_is_one_line_and_exit_code_2(version, tmp_path, capsys):
    assert main(["ls", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["show", str(version.exchange_path), "99"]) == 1
    assert "has no version 99" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["ls", str(version.exchange_path), "--unknown"])
