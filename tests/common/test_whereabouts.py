"""Where a client is: who is believed."""

from __future__ import annotations

import pytest

from common.config import Clients, Residency
from common.errors import BadRequest
from common.whereabouts import Whereabouts

CLIENTS = Clients.model_validate(
    {
        "locations": [
            {"location": "eu", "networks": ["10.1.0.0/16", "2001:db8:1::/48"]},
            {"location": "us", "networks": ["10.0.0.0/8"]},
        ],
        "location_header": "x-client-region",
        "trusted_proxies": ["192.168.0.0/24", "10.9.0.1/32"],
    }
)
RESIDENCY = Residency.model_validate(
    {
        "header": "x-data-residency",
        "rules": [
            {"value": "eu", "allow": ["eu"]},
            {"tenants": ["acme"], "deny": ["us"]},
            {"locations": ["eu"], "allow": ["eu", "ap"]},
        ],
    }
)


@pytest.fixture
def here() -> Whereabouts:
    return Whereabouts(CLIENTS, RESIDENCY, "ap")


@pytest.mark.parametrize(
    ("address", "headers", "location"),
    [
        ("10.1.2.3", [], "eu"),
        ("10.2.2.3", [], "us"),
        ("2001:db8:1::5", [], "eu"),
        ("8.8.8.8", [], "ap"),  # the tier's own region
        ("", [], "ap"),
        ("8.8.8.8", [(b"x-client-region", b"eu")], "ap"),  # anybody can say that
        ("8.8.8.8", [(b"x-forwarded-for", b"10.1.0.1")], "ap"),
        ("192.168.0.7", [(b"x-client-region", b"eu")], "eu"),
        ("192.168.0.7", [(b"x-forwarded-for", b"10.1.0.1")], "eu"),
        ("192.168.0.7", [(b"x-forwarded-for", b"10.1.0.1, 10.2.0.1, 10.9.0.1")], "us"),  # the last that is not ours
        ("192.168.0.7", [(b"x-forwarded-for", b"10.1.0.1"), (b"x-forwarded-for", b"10.2.0.1")], "us"),
        ("192.168.0.7", [(b"x-forwarded-for", b"garbage")], "ap"),
        ("192.168.0.7", [], "ap"),
    ],
)
def test_by_address_and_by_the_word_of_a_trusted_proxy(
    here: Whereabouts, address: str, headers: list[tuple[bytes, bytes]], location: str
) -> None:
    assert here.location(address, headers) == location
    assert here.location(address, headers) == location  # and so when it is remembered


def test_rules_by_header_tenant_and_location(here: Whereabouts) -> None:
    assert here.regions("x", "us", []) == ((), ())
    assert here.regions("x", "us", [(b"x-data-residency", b"eu")]) == (("eu",), ())
    assert here.regions("acme", "us", []) == ((), ("us",))
    assert here.regions("acme", "eu", []) == (("ap", "eu"), ())
    with pytest.raises(BadRequest, match="no rule of residency knows"):
        here.regions("x", "us", [(b"x-data-residency", b"mars")])


def test_without_any_of_it_a_client_is_where_the_tier_is() -> None:
    plain = Whereabouts(Clients(), Residency(), "eu")
    assert plain.plain
    assert plain.location("10.1.2.3", [(b"x-client-region", b"us")]) == "eu"
    assert Whereabouts(Clients(default="us"), Residency(), "eu").location("10.1.2.3", []) == "us"


@pytest.mark.parametrize(
    "values", [{"rules": [{"tenants": ["a"]}]}, {"rules": [{"value": "eu", "allow": ["eu"]}]}, {"header": "cookie"}]
)
def test_rules_that_cannot_be_meant_end_the_start(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"allows and denies|no header is named|pattern"):
        Residency.model_validate(values)
