from __future__ import annotations

import pytest

from common.policy.addresses import BURST_S, MAX_ADDRESSES, AddressRates, client_of, within


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("unix", ""),
    ],
)
def test_what_counts_as_one_client(address: str, client: str) -> None:
    assert client_of(address) == client


def test_networks_that_are_not_limited() -> None:
    assert within("10.1.2.3", ("192.168.0.0/16", "10.0.0.0/8"))
    assert within("::ffff:10.1.2.3", ("10.0.0.0/8",))
    assert not within("11.1.2.3", ("10.0.0.0/8", "2001:db8::/32"))
    assert not within("", ("0.0.0.0/0",))


def test_a_burst_and_then_the_rate() -> None:
    rates = AddressRates()
    burst = [rates.take("a", 5.0, 0.0) for _ in range(11)]
    assert burst[:10] == [0.0] * int(5 * BURST_S)
    assert burst[10] == pytest.approx(0.2)
    assert rates.take("b", 5.0, 0.0) == 0.0  # another one's is its own
    passed = sum(rates.take("a", 5.0, 0.001 * ms) == 0.0 for ms in range(10_000))
    assert 49 <= passed <= 50


def test_less_than_one_a_second() -> None:
    rates = AddressRates()
    assert rates.take("a", 0.1, 0.0) == 0.0
    assert rates.take("a", 0.1, 0.0) == pytest.approx(10.0)
    assert rates.take("a", 0.1, 10.1) == 0.0


def test_what_is_remembered_is_bounded() -> None:
    rates = AddressRates()
    for number in range(MAX_ADDRESSES + 100):
        rates.take(str(number), 1.0, 0.0)
    assert len(rates._buckets) == MAX_ADDRESSES
