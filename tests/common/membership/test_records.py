"""What is stored: keys, values, and what a reader makes of those that others wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from common.membership.records import Place, decode, encode, key_of, place_of
from common.types import Endpoint, Path, Peer, Phase, Speed

NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
INSTANCE = Endpoint(
    id="i1",
    url="http://10.0.0.1:8000",
    agent="10.0.0.1:9100",
    models=frozenset({"llama-8b", "llama-70b"}),
    engine="vllm",
    gpu="h100",
    weight=2.0,
    price_usd_per_hour=3.5,
    phase=Phase.LOADING,
    boot="b1",
    capacity=Speed(0.01, 0.0001, 1e-7, 20_000.0),
    memory_gb=160.0,
    labels=frozenset({"site=edge", "pool=realtime"}),
    loadable=frozenset({"french"}),
)
BALANCER = Peer("b1", "https://10.0.0.2:8443", load="10.0.0.2:9100", admin="http://10.0.0.2:9080", phase=Phase.DRAINING)


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("/headwater/global/balancers/g1", Place((), "g1")),
        ("/headwater/regions/eu/balancers/r1", Place(("eu",), "r1")),
        ("/headwater/regions/eu/clusters/a/balancers/c1", Place(("eu", "a"), "c1")),
        ("/headwater/regions/eu/clusters/a/instances/i1", Place(("eu", "a"), "i1", instance=True)),
    ],
)
def test_keys_are_those_of_the_design(key: str, place: Place) -> None:
    assert key_of("/headwater", place) == key
    assert place_of("/headwater", key) == place


@settings(max_examples=50, deadline=None)
@given(st.lists(NAMES, max_size=2).map(tuple), NAMES, st.booleans())
def test_a_key_says_what_it_was_made_of(path: Path, id_: str, instance: bool) -> None:
    place = Place(path, id_, instance=instance and len(path) == 2)
    assert place_of("/x", key_of("/x", place)) == place


@pytest.mark.parametrize("bad", ["", "a/b", "a b", "ü", "x" * 65, "a\n"])
def test_names_are_checked(bad: str) -> None:
    for place in (Place((), bad), Place((bad,), "ok"), Place(("eu", bad), "ok", instance=True)):
        with pytest.raises(ConfigError):
            key_of("/headwater", place)


def test_an_instance_belongs_to_a_cluster() -> None:
    with pytest.raises(ConfigError):
        key_of("/headwater", Place(("eu",), "i1", instance=True))


@pytest.mark.parametrize(
    "key",
    [
        "/headwater/route_key",
        "/headwater/regions/eu/instances/i1",
        "/headwater/global/instances/i1",
        "/headwater/regions/eu/clusters/a/balancers",
        "/elsewhere/global/balancers/g1",
        "/headwater/regions/eu/clusters/a/balancers/b/c",
    ],
)
def test_other_keys_are_none_of_ours(key: str) -> None:
    assert place_of("/headwater", key) is None


def test_a_key_with_a_broken_name_is_refused() -> None:
    with pytest.raises(ValueError, match="name"):
        place_of("/headwater", "/headwater/global/balancers/a b")


def test_values_come_back_as_they_went() -> None:
    assert decode(Place(("eu", "a"), "i1", instance=True), encode(INSTANCE)) == INSTANCE
    assert decode(Place((), "b1"), encode(BALANCER)) == BALANCER
    plain = Endpoint("i1", "http://h:1")
    assert decode(Place(("eu", "a"), "i1", instance=True), encode(plain)) == plain


def test_values_are_as_documented() -> None:
    value = json.loads(encode(INSTANCE))
    assert value.keys() == {
        *("schema", "id", "url", "agent", "models", "engine", "gpu", "weight", "price_usd_per_hour", "phase", "boot"),
        *("capacity", "memory_gb", "labels", "loadable"),
    }
    assert (value["schema"], value["phase"], value["models"]) == (1, "loading", ["llama-70b", "llama-8b"])
    assert json.loads(encode(BALANCER)).keys() == {"schema", "id", "url", "load", "admin", "phase"}


def test_records_from_before_placement_are_read_with_nothing_known() -> None:
    value = json.loads(encode(INSTANCE))
    for field in ("memory_gb", "labels", "loadable"):
        del value[field]
    old = decode(Place(("eu", "a"), "i1", instance=True), json.dumps(value).encode())
    assert old == replace(INSTANCE, memory_gb=None, labels=frozenset(), loadable=frozenset())


@pytest.mark.parametrize(
    "fields",
    [
        {"memory_gb": -1.0},
        {"labels": frozenset({"no value"})},
        {"labels": frozenset({"key=" + "x" * 65})},
        {"labels": frozenset(f"k{i}=v" for i in range(65))},
    ],
)
def test_what_placement_cannot_use_is_not_written(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        encode(replace(INSTANCE, **fields))


def test_unknown_fields_are_ignored() -> None:
    value = {**json.loads(encode(INSTANCE)), "colour": "green"}
    value["capacity"]["more"] = 1
    assert decode(Place(("eu", "a"), "i1", instance=True), json.dumps(value).encode()) == INSTANCE


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"schema": None},
        {"id": "another"},
        {"url": ""},
        {"url": "ftp://h"},
        {"url": "http://user:password@h"},
        {"agent": "http://h:1"},
        {"phase": "asleep"},
        {"weight": -1},
        {"weight": "much"},
        {"models": "llama"},
        {"capacity": {"alpha_s": 1}},
        {"capacity": {"alpha_s": 0.01, "beta_s": 0.0, "gamma_s": 0.0, "prefill_tokens_per_s": 0}},
        {"capacity": {"alpha_s": 0.01, "beta_s": -1.0, "gamma_s": 0.0, "prefill_tokens_per_s": 1}},
    ],
)
def test_a_value_that_cannot_be_used_is_refused(change: dict[str, Any]) -> None:
    value = {**json.loads(encode(INSTANCE)), **change}
    with pytest.raises(ValueError, match=r"."):
        decode(Place(("eu", "a"), "i1", instance=True), json.dumps(value).encode())


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_worse(value: bytes) -> None:
    for place in (Place((), "b1"), Place(("eu", "a"), "i1", instance=True)):
        with pytest.raises(ValueError, match=r"."):
            decode(place, value)


def test_nothing_is_registered_that_a_reader_would_refuse() -> None:
    for bad in (replace(INSTANCE, url="10.0.0.1:8000"), replace(INSTANCE, weight=float("nan")), Peer("b", "")):
        with pytest.raises(ConfigError):
            encode(bad)
