"""The exchange on a real NFS v4.2 server, from two clients whose caches are as separate as two hosts'."""

from __future__ import annotations

import pytest
from nfs_machine import run_story
from nfs_stories import NUM_VERSIONS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_store_contract_and_the_exchanges_tests_hold_on_nfs(tmp_path):
    told = run_story("contract", tmp_path, deadline_s=500)["a"]
    assert told["passed"], told["tail"]


def test_a_reader_on_another_client_reads_every_version_it_opens_whole_while_retention_deletes(tmp_path):
    told = run_story("reading", tmp_path)
    assert told["b"]["problems"] == []
    seen = told["b"]["seen"]
    assert seen == sorted(seen)
    assert seen[-1] == told["a"]["newest"]
    assert len(seen) > NUM_VERSIONS // 8  # it did read along, not the last one only
    assert told["a"]["left"] <= 4  # keep=2, the lease's, and the one that is just passed
    assert max(told["b"]["delays_s"]) < 10.0  # a name that NFS remembers as absent costs 28 s


def test_a_writer_on_another_client_is_refused_takes_over_and_fences_the_sleeper(tmp_path):
    told = run_story("takeover", tmp_path)
    assert "has a live writer: a pid" in told["b"]["refused"]
    assert "epoch" in told["a"]["fenced"]
    assert told["b"]["numbers"] == told["b"]["is"]
    assert told["b"]["findings"] == []


def test_a_full_server_fails_the_publish_and_nothing_else(tmp_path):
    told = run_story("full", tmp_path)
    a = told["a"]
    assert "No space left on device" in a["error"]
    assert a["whole"]
    assert a["after_failure"] == [a["first"]]
    assert told["b"] == {"newest_is_again": True, "findings": []}
