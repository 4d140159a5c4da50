"""The store on Azure Blob Storage, as Microsoft's emulator has it: the contract, and an exchange whole."""

from __future__ import annotations

import pytest
from azurite import azure_server, fresh_url
from store_contract import StoreContract
from tiny_exchange import make_base, publish, writing

from weightferry.shared.errors import WriterFencedError
from weightferry.shared.exchange import Exchange
from weightferry.shared.materialize import materialize
from weightferry.shared.object_store import open_object_store
from weightferry.shared.verify import verify_exchange
from weightferry.shared.writer import ExchangeWriter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # Azure's client hands aiohttp whole blocks, which aiohttp 3.14 warns of
    pytest.mark.filterwarnings("ignore:Sending a large body directly with raw bytes"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with azure_server(tmp_path_factory.mktemp("azurite")) as endpoint:
        yield endpoint


class TestAzure(StoreContract):
    @pytest.fixture
    def stores(self, server):
        url = fresh_url()
        return lambda: open_object_store(url)


def test_an_exchange_is_published_verified_and_materialized(server, tmp_path):
    exchange = Exchange.open(fresh_url(), base=make_base(tmp_path / "base"))
    with writing(exchange) as writer:
        numbers = [publish(writer, step).number for step in range(3)]
    again = Exchange.open(exchange.store.where(""))
    assert [version.number for version in again.versions()] == numbers
    assert verify_exchange(again) == []
    materialize(again.version(numbers[-1]), tmp_path / "copy")
    assert (tmp_path / "copy" / "model.safetensors.index.json").exists()


def test_a_writer_that_was_replaced_cannot_commit(server, tmp_path):
    base = make_base(tmp_path / "base")
    exchange = Exchange.open(fresh_url(), base=base)
    sleeper = ExchangeWriter.become(exchange, run_id="sleeper")
    sleeper.close()
    with writing(Exchange.open(exchange.store.where(""), base=base), run_id="successor") as writer:
        publish(writer, 1)
    with pytest.raises(WriterFencedError, match="successor"):
        publish(sleeper, 2)
